// The weights of one block as eight threads share them: fetched, then unpacked for four-way integer dots.
// Never touches activations. Surprising fact: thread t of eight holds values 64 * j + 8 * t .. + 7, which belong to lanes 2 * t and
// 2 * t + 1 of the CPU's 16, so its two sums are two whole lanes and no order of additions differs.
#pragma once
#include "quant.cuh"

// What a thread loads of a block of 256; what a type does not use costs nothing.
struct Raw256 {
    uint4 head;
    uint2 low[4], high[4];
    u32 a, b, c;
};

// The same, ready for dots.
struct Part256 {
    // codes[j][h]: four codes of lane 2 * t + h.
    int codes[4][2];
    // Scale of those codes.
    int scales[4];
    // Q2_K, Q4_K: minima of runs 2t and 2t + 1. Q3_K, Q6_K: scales of runs 4t .. 4t + 3 (threads 0 to 3).
    int extra[4];
    float d, dmin;
};

// The magnitudes of IQ2_XXS in shared memory. Signs are computed: a second table was slower, its reads fall into the same banks.
struct Iq2Tables {
    u64 grid[256];
};

// Codes are stored this much too high.
template <int T> constexpr int CODE_OFFSET = T == Q3_K ? 4 : T == Q6_K ? 32 : 0;
template <int T> constexpr bool HAS_MINS = T == Q2_K || T == Q4_K;

__device__ __forceinline__ uint2 load8(const u8 *at) { return *(const uint2 *)at; }
// At an address that is a multiple of 4 only.
__device__ __forceinline__ uint2 load4x2(const u8 *at) { return make_uint2(((const u32 *)at)[0], ((const u32 *)at)[1]); }

template <int T> __device__ __forceinline__ void fetch(const u8 *body, const u8 *tail, int t, Raw256 &r) {
    if constexpr (T == Q2_K) {
        r.head = *(const uint4 *)body;
        r.low[0] = load8(body + 16 + 8 * (t & 3));
        r.low[1] = load8(body + 48 + 8 * (t & 3));
        r.a = *(const u16 *)(body + 2 * t);
        r.b = *(const u32 *)tail;
    } else if constexpr (T == Q3_K) {
        const u32 *packed = (const u32 *)(body + 96);
        r.a = packed[0];
        r.b = packed[1];
        r.c = packed[2];
        r.high[0] = load4x2(body + 8 * (t & 3));
        r.low[0] = load4x2(body + 32 + 8 * (t & 3));
        r.low[1] = load4x2(body + 64 + 8 * (t & 3));
        r.head.x = *(const u16 *)tail;
    } else if constexpr (T == Q4_K) {
        r.head = *(const uint4 *)body;
#pragma unroll
        for (int j = 0; j < 4; j++) r.low[j] = load8(body + 16 + 32 * j + 8 * (t & 3));
    } else if constexpr (T == Q6_K) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            r.low[k] = load8(body + 64 * k + 8 * t);
            r.high[k] = load8(body + 128 + 32 * k + 8 * (t & 3));
        }
        r.head = *(const uint4 *)(body + 192);
        r.a = *(const u16 *)tail;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) r.low[j] = load8(body + 16 * j + 8 * (t >> 2));
        r.a = *(const u16 *)tail;
    }
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ void unpack_q2_k(const Raw256 &r, int t, Part256 &p) {
    int shift = 2 * (t >> 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 q = r.low[j / 2];
        p.codes[j][0] = (q.x >> (shift + 4 * (j & 1))) & 0x03030303;
        p.codes[j][1] = (q.y >> (shift + 4 * (j & 1))) & 0x03030303;
        p.scales[j] = (word_of(r.head, j) >> (8 * (t >> 1))) & 15;
    }
    p.extra[0] = (r.a >> 4) & 15;
    p.extra[1] = r.a >> 12;
    p.d = half_value((u16)r.b);
    p.dmin = half_value((u16)(r.b >> 16));
}

__device__ __forceinline__ void unpack_q3_k(const Raw256 &r, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 q = r.low[j / 2];
        int shift = 4 * (j & 1) + 2 * (t >> 2), bit = 2 * j + (t >> 2), at = 8 * (t >> 1);
        p.codes[j][0] = ((q.x >> shift) & 0x03030303) | (((r.high[0].x >> bit) & 0x01010101) << 2);
        p.codes[j][1] = ((q.y >> shift) & 0x03030303) | (((r.high[0].y >> bit) & 0x01010101) << 2);
        u32 low = j & 1 ? r.b : r.a;
        p.scales[j] = (int)(((low >> (at + 4 * (j >> 1))) & 15) | (((r.c >> (at + 2 * j)) & 3) << 4)) - 32;
    }
    u32 mine = t & 1 ? r.b : r.a;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        p.extra[c] = (int)(((mine >> (8 * c + 4 * ((t >> 1) & 1))) & 15) | (((r.c >> (8 * c + 2 * (t & 3))) & 3) << 4)) - 32;
    }
    p.d = half_value((u16)r.head.x);
}

__device__ __forceinline__ void unpack_q4_k(const Raw256 &r, int t, Part256 &p) {
    int h = t >> 2;
    u32 scales[2] = {r.head.y & 0x3f3f3f3f, (r.head.w & 0x0f0f0f0f) | ((r.head.y >> 2) & 0x30303030)};
    u32 mins[2] = {r.head.z & 0x3f3f3f3f, ((r.head.w >> 4) & 0x0f0f0f0f) | ((r.head.z >> 2) & 0x30303030)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        p.codes[j][0] = (r.low[j].x >> (4 * h)) & 0x0f0f0f0f;
        p.codes[j][1] = (r.low[j].y >> (4 * h)) & 0x0f0f0f0f;
        p.scales[j] = (scales[j >> 1] >> (16 * (j & 1) + 8 * h)) & 255;
    }
    p.extra[0] = p.extra[1] = ((h ? mins[1] : mins[0]) >> (8 * (t & 3))) & 255;
    p.d = half_value((u16)r.head.x);
    p.dmin = half_value((u16)(r.head.x >> 16));
}

__device__ __forceinline__ void unpack_q6_k(const Raw256 &r, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 low = r.low[j / 2], high = r.high[j / 2];
        int shift = 4 * (j & 1) + 2 * (t >> 2);
        p.codes[j][0] = ((low.x >> (4 * (j & 1))) & 0x0f0f0f0f) | (((high.x >> shift) & 0x03030303) << 4);
        p.codes[j][1] = ((low.y >> (4 * (j & 1))) & 0x0f0f0f0f) | (((high.y >> shift) & 0x03030303) << 4);
        p.scales[j] = (i8)(word_of(r.head, j) >> (8 * (t >> 1)));
    }
    u32 runs = word_of(r.head, t & 3);
#pragma unroll
    for (int c = 0; c < 4; c++) p.extra[c] = (i8)(runs >> (8 * c));
    p.d = half_value((u16)r.a);
}

__device__ __forceinline__ void unpack_iq2_xxs(const Raw256 &r, const Iq2Tables *tables, int t, Part256 &p) {
    int shift = 7 * (t & 3);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 sub = r.low[j];
        u64 magnitudes = tables->grid[__byte_perm(sub.x, 0, 0x4440 + (t & 3))];
        u32 signs = sign_bits((sub.y >> shift) & 127), low = byte_mask(signs), high = byte_mask(signs >> 4);
        // Magnitudes are never 0, so negating a byte carries nothing into the next.
        p.codes[j][0] = (int)(((u32)magnitudes ^ low) + (low & 0x01010101));
        p.codes[j][1] = (int)(((u32)(magnitudes >> 32) ^ high) + (high & 0x01010101));
        p.scales[j] = (int)(2 * (sub.y >> 28) + 1);
    }
    p.d = half_value((u16)r.a) * 0.125f;
}

template <int T> __device__ __forceinline__ void unpack(const Raw256 &r, const Iq2Tables *tables, int t, Part256 &p) {
    if constexpr (T == Q2_K) unpack_q2_k(r, t, p);
    if constexpr (T == Q3_K) unpack_q3_k(r, t, p);
    if constexpr (T == Q4_K) unpack_q4_k(r, t, p);
    if constexpr (T == Q6_K) unpack_q6_k(r, t, p);
    if constexpr (T == IQ2_XXS) unpack_iq2_xxs(r, tables, t, p);
}

// Bytes that a thread loads of a block of 32: eight codes of Q8_0, or the eight bytes that hold eight codes of MXFP4.
template <int T> __device__ __forceinline__ uint2 fetch_32(const u8 *body, int t) {
    return load8(body + 8 * (T == Q8_0 ? t & 3 : t & 1));
}

template <int T> __device__ __forceinline__ u32 fetch_factor(const u8 *tail) {
    if constexpr (T == Q8_0) return *(const u16 *)tail;
    return tail[0];
}

// Eight codes of a block of 32 (values 8 * (t % 4) ..), as two words.
template <int T> __device__ __forceinline__ uint2 unpack_32(uint2 q, int t) {
    if constexpr (T == Q8_0) return q;
    u32 out[2], in[2] = {q.x, q.y};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 v = (in[k] >> (4 * ((t & 3) >> 1))) & 0x0f0f0f0f;
        u32 pairs = (v | (v >> 4)) & 0x00ff00ff;
        u32 magnitudes = __byte_perm(0x03020100u, 0x0c080604u, (pairs | (pairs >> 8)) & 0x7777);
        // The negative zero is left positive: negating it would carry.
        u32 top = (v & ((v & 0x07070707) + 0x07070707) & 0x08080808) << 4, mask;
        asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(top));
        out[k] = (magnitudes ^ mask) + (mask & 0x01010101);
    }
    return make_uint2(out[0], out[1]);
}

template <int T> __device__ __forceinline__ float factor_of(u32 raw) {
    if constexpr (T == Q8_0) return half_value((u16)raw);
    return mxfp4_scale(raw);
}
