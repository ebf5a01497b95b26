// The weights of one block as eight threads share them, ready for four-way integer dots.
// Never touches activations. Surprising fact: thread t of eight holds values 64 * j + 8 * t .. + 7, which belong to lanes 2 * t and
// 2 * t + 1 of the CPU's 16, so its two sums are two whole lanes and no order of additions differs.
#pragma once
#include "quant.cuh"

// What a thread holds of a block of 256.
struct Part256 {
    // codes[j][h]: four codes of lane 2 * t + h.
    int codes[4][2];
    // Scale of those codes.
    int scales[4];
    // Q2_K, Q4_K: minima of runs 2t and 2t + 1. Q3_K, Q6_K: scales of runs 4t .. 4t + 3 (threads 0 to 3).
    int extra[4];
    float d, dmin;
};

// Codes are stored this much too high.
template <int T> constexpr int CODE_OFFSET = T == Q3_K ? 4 : T == Q6_K ? 32 : 0;
template <int T> constexpr bool HAS_MINS = T == Q2_K || T == Q4_K;

__device__ __forceinline__ uint2 load8(const u8 *at) { return *(const uint2 *)at; }
// At an address that is a multiple of 4 only.
__device__ __forceinline__ uint2 load4x2(const u8 *at) { return make_uint2(((const u32 *)at)[0], ((const u32 *)at)[1]); }

__device__ __forceinline__ void load_q2_k(const u8 *body, const u8 *tail, int t, Part256 &p) {
    uint4 scales = *(const uint4 *)body;
    u32 words[4] = {scales.x, scales.y, scales.z, scales.w};
    u32 runs = *(const u16 *)(body + 2 * t), ds = *(const u32 *)tail;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint2 q = load8(body + 16 + j / 2 * 32 + 8 * (t & 3));
        int shift = 2 * (t >> 2);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            p.codes[j + k][0] = (q.x >> (shift + 4 * k)) & 0x03030303;
            p.codes[j + k][1] = (q.y >> (shift + 4 * k)) & 0x03030303;
            p.scales[j + k] = (words[j + k] >> (8 * (t >> 1))) & 15;
        }
    }
    p.extra[0] = (runs >> 4) & 15;
    p.extra[1] = runs >> 12;
    p.d = half_value((u16)ds);
    p.dmin = half_value((u16)(ds >> 16));
}

__device__ __forceinline__ void load_q3_k(const u8 *body, const u8 *tail, int t, Part256 &p) {
    const u32 *packed = (const u32 *)(body + 96);
    u32 low[2] = {packed[0], packed[1]}, high = packed[2];
    uint2 top = load4x2(body + 8 * (t & 3));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 q = load4x2(body + 32 + j / 2 * 32 + 8 * (t & 3));
        int shift = 4 * (j & 1) + 2 * (t >> 2), bit = 2 * j + (t >> 2);
        p.codes[j][0] = ((q.x >> shift) & 0x03030303) | (((top.x >> bit) & 0x01010101) << 2);
        p.codes[j][1] = ((q.y >> shift) & 0x03030303) | (((top.y >> bit) & 0x01010101) << 2);
        int at = 8 * (t >> 1);
        p.scales[j] = (int)(((low[j & 1] >> (at + 4 * (j >> 1))) & 15) | (((high >> (at + 2 * j)) & 3) << 4)) - 32;
    }
    u32 mine = t & 1 ? low[1] : low[0];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        p.extra[c] = (int)(((mine >> (8 * c + 4 * ((t >> 1) & 1))) & 15) | (((high >> (8 * c + 2 * (t & 3))) & 3) << 4)) - 32;
    }
    p.d = half_at(tail);
}

__device__ __forceinline__ void load_q4_k(const u8 *body, int t, Part256 &p) {
    uint4 head = *(const uint4 *)body;
    int h = t >> 2;
    u32 scales[2] = {head.y & 0x3f3f3f3f, (head.w & 0x0f0f0f0f) | ((head.y >> 2) & 0x30303030)};
    u32 mins[2] = {head.z & 0x3f3f3f3f, ((head.w >> 4) & 0x0f0f0f0f) | ((head.z >> 2) & 0x30303030)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 q = load8(body + 16 + 32 * j + 8 * (t & 3));
        p.codes[j][0] = (q.x >> (4 * h)) & 0x0f0f0f0f;
        p.codes[j][1] = (q.y >> (4 * h)) & 0x0f0f0f0f;
        p.scales[j] = (scales[j >> 1] >> (16 * (j & 1) + 8 * h)) & 255;
    }
    p.extra[0] = p.extra[1] = ((t & 4 ? mins[1] : mins[0]) >> (8 * (t & 3))) & 255;
    p.d = half_value((u16)head.x);
    p.dmin = half_value((u16)(head.x >> 16));
}

__device__ __forceinline__ void load_q6_k(const u8 *body, const u8 *tail, int t, Part256 &p) {
    const i8 *scales = (const i8 *)(body + 192);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 low = load8(body + j / 2 * 64 + 8 * t), high = load8(body + 128 + j / 2 * 32 + 8 * (t & 3));
        int shift = 4 * (j & 1) + 2 * (t >> 2);
        p.codes[j][0] = ((low.x >> (4 * (j & 1))) & 0x0f0f0f0f) | (((high.x >> shift) & 0x03030303) << 4);
        p.codes[j][1] = ((low.y >> (4 * (j & 1))) & 0x0f0f0f0f) | (((high.y >> shift) & 0x03030303) << 4);
        p.scales[j] = scales[4 * j + (t >> 1)];
    }
    u32 runs = *(const u32 *)(body + 192 + 4 * (t & 3));
#pragma unroll
    for (int c = 0; c < 4; c++) p.extra[c] = (i8)(runs >> (8 * c));
    p.d = half_at(tail);
}

// `grid` is the table in shared memory.
__device__ __forceinline__ void load_iq2_xxs(const u8 *body, const u8 *tail, const u64 *grid, int t, Part256 &p) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 sub = load8(body + 16 * j + 8 * (t >> 2));
        u64 magnitudes = grid[(sub.x >> (8 * (t & 3))) & 255];
        u32 signs = sign_bits((sub.y >> (7 * (t & 3))) & 127);
        u32 low = byte_mask(signs), high = byte_mask(signs >> 4);
        // Magnitudes are never 0, so negating a byte carries nothing into the next.
        p.codes[j][0] = (int)(((u32)magnitudes ^ low) + (low & 0x01010101));
        p.codes[j][1] = (int)(((u32)(magnitudes >> 32) ^ high) + (high & 0x01010101));
        p.scales[j] = (int)(2 * (sub.y >> 28) + 1);
    }
    p.d = half_at(tail) * 0.125f;
}

template <int T> __device__ __forceinline__ void load_part(const u8 *body, const u8 *tail, const u64 *grid, int t, Part256 &p) {
    if constexpr (T == Q2_K) load_q2_k(body, tail, t, p);
    if constexpr (T == Q3_K) load_q3_k(body, tail, t, p);
    if constexpr (T == Q4_K) load_q4_k(body, t, p);
    if constexpr (T == Q6_K) load_q6_k(body, tail, t, p);
    if constexpr (T == IQ2_XXS) load_iq2_xxs(body, tail, grid, t, p);
}

// Eight codes of a block of 32 (values 8 * (t % 4) ..), as two words.
template <int T> __device__ __forceinline__ uint2 codes_of_32(const u8 *body, int t) {
    if constexpr (T == Q8_0) return load8(body + 8 * (t & 3));
    uint2 q = load8(body + 8 * (t & 1));
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

template <int T> __device__ __forceinline__ float factor_of_32(const u8 *tail) {
    if constexpr (T == Q8_0) return half_at(tail);
    return mxfp4_scale(tail[0]);
}
