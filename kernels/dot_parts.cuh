// The weights of one block as a few threads share them: fetched, then unpacked for four-way integer dots.
// Never touches activations. Surprising fact: of a block of 256 the four threads may share the values in any way, since all sums inside a
// block are whole numbers; codes of Q2_K stay where they lie in their bytes, and a power of two is taken out of the sum at its end.
#pragma once
#include "quant.cuh"

// What a thread loads of a block of 256; what a type does not use costs nothing.
struct Raw256 {
    uint4 a, b, high, head;
};

// The same, ready for dots. Piece j is 16 values, see `piece_at`.
struct Part256 {
    // codes[j][c]: codes 4c .. 4c + 3 of piece j; of Q2_K 4^j times them, as bytes without sign.
    int codes[4][4];
    // Scale of piece j; of Q2_K 4^(3 - j) times it. IQ2_XXS: of pieces 2j and 2j + 1.
    int scales[4];
    // Four bytes, of runs 4t .. 4t + 3 of 16 values. Q2_K, Q4_K: minima. Q3_K, Q6_K: scales.
    int extra;
};

// First value of piece `j` of thread `t`.
template <int T> __device__ __forceinline__ int piece_at(int j, int t) {
    // IQ2_XXS: runs t and t + 4 of 32 values.
    return T == IQ2_XXS ? 128 * (j / 2) + 32 * t + 16 * (j % 2) : 64 * j + 16 * t;
}

// Codes are stored this much too high.
template <int T> constexpr int CODE_OFFSET = T == Q3_K ? 4 : T == Q6_K ? 32 : 0;
template <int T> constexpr bool HAS_MINS = T == Q2_K || T == Q4_K;
// Sums of a block are this many bits too high.
template <int T> constexpr int SUM_SHIFT = T == Q2_K ? 6 : 0;

// IQ2_XXS in shared memory: eight values as the digits by which PRMT picks their bytes, and eight signs as the bits of those digits that
// turn to the negated bytes. Each thread of a warp has its own copy in its own bank: reads by chance numbers never wait for one another.
struct Iq2Tables {
    u32 grid[256 * 32];
    u32 signs[128 * 32];
};

// Bytes 0 to 2: the magnitudes 8, 25, 43; bytes 4 to 6: the same negated.
constexpr u32 IQ2_PLUS = 0x002b1908, IQ2_MINUS = 0x00d5e7f8;

__device__ __forceinline__ u32 iq2_digits(u64 magnitudes) {
    u32 digits = 0;
    for (int i = 0; i < 8; i++) {
        u32 m = (u32)(magnitudes >> (8 * i)) & 255;
        digits |= (m == 8 ? 0u : m == 25 ? 1u : 2u) << (4 * i);
    }
    return digits;
}

__device__ __forceinline__ u32 iq2_turns(u32 code) {
    u32 signs = sign_bits(code), turns = 0;
    for (int i = 0; i < 8; i++) turns |= ((signs >> i) & 1) << (4 * i + 2);
    return turns;
}

// A copy for each bank, by all threads of the block.
__device__ __forceinline__ void fill_tables(Iq2Tables &tables) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    // A warp computes 32 entries, one a thread, then all threads write each of them to their banks.
    for (int first = threadIdx.x / 32 * 32; first < 384; first += warps * 32) {
        u32 mine = first < 256 ? iq2_digits(IQ2_GRID[first + lane]) : iq2_turns((u32)(first - 256 + lane));
        u32 *to = first < 256 ? tables.grid + first * 32 : tables.signs + (first - 256) * 32;
#pragma unroll 8
        for (int i = 0; i < 32; i++) to[i * 32 + lane] = __shfl_sync(FULL, mine, i);
    }
    __syncthreads();
}

// As __byte_perm, whose digits are masked first.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 digits) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(digits));
    return out;
}

// Four products of bytes without sign and bytes with one.
__device__ __forceinline__ int dot_unsigned(u32 a, int b, int sum) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}

__device__ __forceinline__ uint2 load8(const u8 *at) { return *(const uint2 *)at; }

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 stream16(const u8 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// Where a thread finds its part of block 0 in each plane of a matrix.
struct Planes {
    const u8 *codes, *more, *high, *head, *tail;
};

template <int T> __device__ __forceinline__ Planes planes_of(const u8 *w, size_t total, int t) {
    Planes p{w + 16 * t, nullptr, nullptr, nullptr, nullptr};
    auto plane = [=](int at) { return w + total * at; };
    if constexpr (T == Q2_K) {
        p.head = plane(Q2_K_HEAD);
        p.tail = plane(Q2_K_TAIL);
    } else if constexpr (T == Q3_K) {
        p.high = plane(Q3_K_HIGH) + 8 * t;
        p.head = plane(Q3_K_HEAD);
        p.tail = plane(Q3_K_TAIL);
    } else if constexpr (T == Q4_K) {
        p.more = plane(Q4_K_CODES) + 16 * t;
        p.head = plane(Q4_K_HEAD);
    } else if constexpr (T == Q6_K) {
        p.more = plane(Q6_K_CODES) + 16 * t;
        p.high = plane(Q6_K_HIGH) + 16 * t;
        p.head = plane(Q6_K_HEAD);
        p.tail = plane(Q6_K_TAIL);
    } else {
        p.tail = plane(IQ2_XXS_TAIL);
    }
    return p;
}

// Block `slot`. Places are 32 bits wide: with 64 the arithmetic of addresses takes as many instructions as the products.
template <int T> __device__ __forceinline__ void fetch(const Planes &w, u32 slot, Raw256 &r) {
    auto at = [=](const u8 *plane, u32 bytes) { return plane + (u64)slot * bytes; };
    r.a = stream16(at(w.codes, 64));
    if constexpr (T == Q2_K) {
        r.head = stream16(at(w.head, 16));
    } else if constexpr (T == Q3_K) {
        uint2 high = load8(at(w.high, 32));
        const u32 *head = (const u32 *)at(w.head, 12);
        r.high.x = high.x;
        r.high.y = high.y;
        r.head.x = head[0];
        r.head.y = head[1];
        r.head.z = head[2];
    } else if constexpr (T == Q4_K) {
        r.b = stream16(at(w.more, 64));
        r.head = stream16(at(w.head, 16));
    } else if constexpr (T == Q6_K) {
        r.b = stream16(at(w.more, 64));
        r.high = stream16(at(w.high, 64));
        r.head = stream16(at(w.head, 16));
    }
}

// Factors of block `slot`, for `factors_of`: d, with dmin above it where there are minima. Q4_K has them in its head.
template <int T> __device__ __forceinline__ u32 fetch_factors(const Planes &w, u32 slot) {
    if constexpr (T == Q2_K) return *(const u32 *)(w.tail + (u64)slot * 4);
    if constexpr (T == Q4_K) return *(const u32 *)(w.head + (u64)slot * 16);
    return *(const u16 *)(w.tail + (u64)slot * 2);
}

// d and dmin.
template <int T> __device__ __forceinline__ float2 factors_of(u32 raw) {
    float d = half_value((u16)raw);
    return make_float2(T == IQ2_XXS ? d * 0.125f : d, HAS_MINS<T> ? half_value((u16)(raw >> 16)) : 0.0f);
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte `i` of a word; `i` need not be known to the compiler.
__device__ __forceinline__ int byte_of(u32 word, int i) { return (int)((word >> (8 * i)) & 255); }

// Word `i`; `i` need not be known to the compiler.
__device__ __forceinline__ u32 chosen_word(uint4 v, int i) {
    u32 low = i & 1 ? v.y : v.x, high = i & 1 ? v.w : v.z;
    return i & 2 ? high : low;
}

__device__ __forceinline__ void unpack_q2_k(const Raw256 &r, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) p.codes[j][c] = (int)(word_of(r.a, c) & (0x03030303u << (2 * j)));
        // Byte t, turned so that its lower four bits stand 6 - 2j bits up.
        u32 head = word_of(r.head, j), up = 6 - 2 * j;
        p.scales[j] = (int)(__funnelshift_r(head, head, 8 * t - up) & (15u << up));
    }
    p.extra = (int)((chosen_word(r.head, t) >> 4) & 0x0f0f0f0f);
}

__device__ __forceinline__ void unpack_q3_k(const Raw256 &r, int t, Part256 &p) {
    u32 low[2] = {(u32)byte_of(r.head.x, t), (u32)byte_of(r.head.y, t)}, top = (u32)byte_of(r.head.z, t);
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int at = 4 * (c & 1) + j - 2;
            u32 high = c < 2 ? r.high.x : r.high.y;
            u32 third = (at < 0 ? high << -at : high >> at) & 0x04040404;
            p.codes[j][c] = (int)(((word_of(r.a, c) >> (2 * j)) & 0x03030303) | third);
        }
        p.scales[j] = (int)(((low[j & 1] >> (4 * (j >> 1))) & 15) | (((top >> (2 * j)) & 3) << 4)) - 32;
    }
    u32 packed = t & 1 ? r.head.y : r.head.x;
    u32 scales = ((packed >> (4 * (t >> 1))) & 0x0f0f0f0f) | (((r.head.z >> (2 * t)) & 0x03030303) << 4);
    // Minus 32 in each byte.
    p.extra = (int)(((scales | 0x80808080u) - 0x20202020u) ^ 0x80808080u);
}

__device__ __forceinline__ void unpack_q4_k(const Raw256 &r, int t, Part256 &p) {
    int h = t >> 1;
    u32 scales[2] = {r.head.y & 0x3f3f3f3f, (r.head.w & 0x0f0f0f0f) | ((r.head.y >> 2) & 0x30303030)};
    u32 mins[2] = {r.head.z & 0x3f3f3f3f, ((r.head.w >> 4) & 0x0f0f0f0f) | ((r.head.z >> 2) & 0x30303030)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 codes = j < 2 ? r.a : r.b;
#pragma unroll
        for (int c = 0; c < 4; c++) p.codes[j][c] = (int)((word_of(codes, c) >> (4 * (j & 1))) & 0x0f0f0f0f);
        p.scales[j] = byte_of(scales[j >> 1], 2 * (j & 1) + h);
    }
    // One minimum for two runs.
    p.extra = (int)prmt(h ? mins[1] : mins[0], 0, t & 1 ? 0x3322 : 0x1100);
}

__device__ __forceinline__ void unpack_q6_k(const Raw256 &r, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 low = j < 2 ? r.a : r.b;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 high = word_of(r.high, c);
            u32 top = (j < 2 ? high << (4 - 2 * j) : high >> (2 * j - 4)) & 0x30303030;
            p.codes[j][c] = (int)(((word_of(low, c) >> (4 * (j & 1))) & 0x0f0f0f0f) | top);
        }
        p.scales[j] = (int)(i8)byte_of(word_of(r.head, j), t);
    }
    p.extra = (int)chosen_word(r.head, t);
}

// The entry that byte `g` of `codes` names, of the table AT bytes behind this thread's place `mine` in shared memory. An entry takes 128 bytes: the
// product of a byte and 128 makes an address in one instruction, and beside the shifts and masks, which are what the kernel is short of.
template <int AT> __device__ __forceinline__ u32 entry_of(u32 codes, int g, u32 mine) {
    u32 at, entry;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(codes), "r"(0x80u << (8 * g)), "r"(mine));
    asm("ld.shared.u32 %0, [%1+%2];" : "=r"(entry) : "r"(at), "n"(AT));
    return entry;
}

__device__ __forceinline__ void unpack_iq2_xxs(const Raw256 &r, const Iq2Tables *tables, u32 plus, Part256 &p) {
    // The zero that `plus` has come with keeps reads of the tables behind their filling.
    u32 mine = (u32)__cvta_generic_to_shared(tables) + threadIdx.x % 32 * 4 + (plus ^ IQ2_PLUS);
#pragma unroll
    for (int run = 0; run < 2; run++) {
        u32 groups = run ? r.a.z : r.a.x, signs = run ? r.a.w : r.a.y;
        // Sign codes, one a byte.
        u32 turns = (signs & 0x7f) | ((signs << 1) & 0x7f00) | ((signs << 2) & 0x7f0000) | ((signs << 3) & 0x7f000000);
#pragma unroll
        for (int g = 0; g < 4; g++) {
            u32 digits = entry_of<0>(groups, g, mine) | entry_of<sizeof(tables->grid)>(turns, g, mine);
            int *codes = p.codes[2 * run + g / 2] + g % 2 * 2;
            codes[0] = (int)prmt(plus, IQ2_MINUS, digits);
            codes[1] = (int)prmt(plus, IQ2_MINUS, digits >> 16);
        }
        // 2 * scale + 1: the scale takes the upper four bits.
        p.scales[run] = (int)(signs >> 27 | 1);
    }
}

// IQ2_PLUS in a register: a permutation takes one constant, and the compiler would copy the other one before each. No signs is no turn: it
// adds a zero that only the kernel's author knows.
template <int T> __device__ __forceinline__ u32 iq2_plus(const Iq2Tables *tables) {
    if constexpr (T == IQ2_XXS) return IQ2_PLUS | tables->signs[threadIdx.x % 32];
    return 0;
}

// `plus` is that of `iq2_plus`.
template <int T> __device__ __forceinline__ void unpack(const Raw256 &r, const Iq2Tables *tables, u32 plus, int t, Part256 &p) {
    if constexpr (T == Q2_K) unpack_q2_k(r, t, p);
    if constexpr (T == Q3_K) unpack_q3_k(r, t, p);
    if constexpr (T == Q4_K) unpack_q4_k(r, t, p);
    if constexpr (T == Q6_K) unpack_q6_k(r, t, p);
    if constexpr (T == IQ2_XXS) unpack_iq2_xxs(r, tables, plus, p);
}

// Eight codes of a block of 32, values 8 * (t % 4) .. of it.
template <int T> __device__ __forceinline__ uint2 fetch_32(const u8 *body, int t) {
    if constexpr (T == Q8_0) return load8(body + 8 * (t & 3));
    return make_uint2(*(const u32 *)(body + 4 * (t & 3)), 0);
}

template <int T> __device__ __forceinline__ u32 fetch_factor(const u8 *tail) {
    if constexpr (T == Q8_0) return *(const u16 *)tail;
    return tail[0];
}

// The magnitudes of MXFP4, doubled. PRMT takes a code without its sign as a digit, and gives 0 for a code that has one.
constexpr u32 MXFP4_LOW = 0x03020100, MXFP4_HIGH = 0x0c080604;

// Sum of eight products of a block of 32.
template <int T> __device__ __forceinline__ int dot_eight(uint2 codes, uint2 x) {
    if constexpr (T == Q8_0) return __dp4a((int)codes.y, (int)x.y, __dp4a((int)codes.x, (int)x.x, 0));
    u32 high = codes.x >> 16;
    int plus = __dp4a((int)prmt(MXFP4_LOW, MXFP4_HIGH, codes.x), (int)x.x, 0);
    int minus = __dp4a((int)prmt(MXFP4_LOW, MXFP4_HIGH, codes.x ^ 0x8888), (int)x.x, 0);
    plus = __dp4a((int)prmt(MXFP4_LOW, MXFP4_HIGH, high), (int)x.y, plus);
    minus = __dp4a((int)prmt(MXFP4_LOW, MXFP4_HIGH, high ^ 0x8888), (int)x.y, minus);
    return plus - minus;
}

template <int T> __device__ __forceinline__ float factor_of(u32 raw) {
    if constexpr (T == Q8_0) return half_value((u16)raw);
    return mxfp4_scale(raw);
}
