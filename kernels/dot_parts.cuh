// The weights of one block as a few threads share them: fetched, then unpacked for four-way integer dots.
// Never touches activations. Surprising fact: of a block of 256 thread t of four holds values 64 j + 16 t .. + 15, which belong to lanes
// 4 t .. 4 t + 3 of the CPU's 16, so its four sums are four whole lanes and no order of additions differs.
#pragma once
#include "quant.cuh"

// What a thread loads of a block of 256; what a type does not use costs nothing.
struct Raw256 {
    uint4 a, b, high, head;
    u32 tail;
};

// The same, ready for dots.
struct Part256 {
    // codes[j][c]: four codes of lane 4 t + c.
    int codes[4][4];
    // Scale of codes[j].
    int scales[4];
    // Four bytes each. Q2_K, Q4_K: minima of runs 4t .. 4t + 3 of 16 values. Q3_K, Q6_K: scales of runs 8t .. 8t + 7 (threads 0 and 1).
    int extra[2];
    float d, dmin;
};

// Codes are stored this much too high.
template <int T> constexpr int CODE_OFFSET = T == Q3_K ? 4 : T == Q6_K ? 32 : 0;
template <int T> constexpr bool HAS_MINS = T == Q2_K || T == Q4_K;

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
        r.tail = *(const u32 *)at(w.tail, 4);
    } else if constexpr (T == Q3_K) {
        uint2 high = load8(at(w.high, 32));
        const u32 *head = (const u32 *)at(w.head, 12);
        r.high.x = high.x;
        r.high.y = high.y;
        r.head.x = head[0];
        r.head.y = head[1];
        r.head.z = head[2];
        r.tail = *(const u16 *)at(w.tail, 2);
    } else if constexpr (T == Q4_K) {
        r.b = stream16(at(w.more, 64));
        r.head = stream16(at(w.head, 16));
    } else if constexpr (T == Q6_K) {
        r.b = stream16(at(w.more, 64));
        r.high = stream16(at(w.high, 64));
        r.head = stream16(at(w.head, 16));
        r.tail = *(const u16 *)at(w.tail, 2);
    } else {
        r.tail = *(const u16 *)at(w.tail, 2);
    }
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Byte `i` of a word; `i` need not be known to the compiler.
__device__ __forceinline__ int byte_of(u32 word, int i) { return (int)((word >> (8 * i)) & 255); }

__device__ __forceinline__ void unpack_q2_k(const Raw256 &r, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) p.codes[j][c] = (int)((word_of(r.a, c) >> (2 * j)) & 0x03030303);
        p.scales[j] = byte_of(word_of(r.head, j), t) & 15;
    }
    u32 mine = t & 2 ? (t & 1 ? r.head.w : r.head.z) : (t & 1 ? r.head.y : r.head.x);
    p.extra[0] = (int)((mine >> 4) & 0x0f0f0f0f);
    p.d = half_value((u16)r.tail);
    p.dmin = half_value((u16)(r.tail >> 16));
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
    // Threads 2 and 3 compute something that nobody uses.
    int shift = 4 * (t & 1);
    u32 first = ((r.head.x >> shift) & 0x0f0f0f0f) | (((r.head.z >> shift) & 0x03030303) << 4);
    u32 second = ((r.head.y >> shift) & 0x0f0f0f0f) | (((r.head.z >> shift >> 2) & 0x03030303) << 4);
    // Minus 32 in each byte.
    p.extra[0] = (int)(((first | 0x80808080u) - 0x20202020u) ^ 0x80808080u);
    p.extra[1] = (int)(((second | 0x80808080u) - 0x20202020u) ^ 0x80808080u);
    p.d = half_value((u16)r.tail);
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
    p.extra[0] = (int)prmt(h ? mins[1] : mins[0], 0, t & 1 ? 0x3322 : 0x1100);
    p.d = half_value((u16)r.head.x);
    p.dmin = half_value((u16)(r.head.x >> 16));
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
    p.extra[0] = (int)(t & 1 ? r.head.z : r.head.x);
    p.extra[1] = (int)(t & 1 ? r.head.w : r.head.y);
    p.d = half_value((u16)r.tail);
}

__device__ __forceinline__ u32 shared_word(const u32 *table, u32 at) { return *(const u32 *)((const u8 *)table + at); }

__device__ __forceinline__ void unpack_iq2_xxs(const Raw256 &r, const Iq2Tables *tables, int t, Part256 &p) {
    u32 bank = threadIdx.x % 32 * 4;
    // Two bits of each scale, four scales to a word; the neighbour has the other two.
    u32 mine = (prmt(prmt(r.a.x, r.a.y, 0x0073), prmt(r.a.z, r.a.w, 0x0073), 0x5410) >> 6) & 0x03030303;
    u32 other = __shfl_xor_sync(FULL, mine, 1);
    // 2 * scale + 1.
    u32 scales = (t & 1 ? (mine << 3) + (other << 1) : (mine << 1) + (other << 3)) + 0x01010101;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 word = word_of(r.a, j);
        u32 digits[2] = {
            shared_word(tables->grid, ((word << 7) & 0x7f80) | bank) | shared_word(tables->signs, ((word >> 9) & 0x3f80) | bank),
            shared_word(tables->grid, ((word >> 1) & 0x7f80) | bank) | shared_word(tables->signs, ((word >> 16) & 0x3f80) | bank),
        };
#pragma unroll
        for (int c = 0; c < 4; c++) p.codes[j][c] = (int)prmt(IQ2_PLUS, IQ2_MINUS, digits[c >> 1] >> (16 * (c & 1)));
        p.scales[j] = byte_of(scales, j);
    }
    p.d = half_value((u16)r.tail) * 0.125f;
}

template <int T> __device__ __forceinline__ void unpack(const Raw256 &r, const Iq2Tables *tables, int t, Part256 &p) {
    if constexpr (T == Q2_K) unpack_q2_k(r, t, p);
    if constexpr (T == Q3_K) unpack_q3_k(r, t, p);
    if constexpr (T == Q4_K) unpack_q4_k(r, t, p);
    if constexpr (T == Q6_K) unpack_q6_k(r, t, p);
    if constexpr (T == IQ2_XXS) unpack_iq2_xxs(r, tables, t, p);
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

// Four codes of MXFP4 against four of activations.
__device__ __forceinline__ int dot_mxfp4(u32 digits, u32 x) {
    u32 plus = prmt(MXFP4_LOW, MXFP4_HIGH, digits), minus = prmt(MXFP4_LOW, MXFP4_HIGH, digits ^ 0x8888);
    return __dp4a((int)plus, (int)x, 0) - __dp4a((int)minus, (int)x, 0);
}

// Both sums of four products.
template <int T> __device__ __forceinline__ int2 dots_32(uint2 codes, uint2 x) {
    if constexpr (T == Q8_0) return make_int2(__dp4a((int)codes.x, (int)x.x, 0), __dp4a((int)codes.y, (int)x.y, 0));
    return make_int2(dot_mxfp4(codes.x, x.x), dot_mxfp4(codes.x >> 16, x.y));
}

template <int T> __device__ __forceinline__ float factor_of(u32 raw) {
    if constexpr (T == Q8_0) return half_value((u16)raw);
    return mxfp4_scale(raw);
}
