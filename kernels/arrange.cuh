// Brings weights from the layout of files into that of the device, see quant.cuh.
// Never changes how many bytes there are. Surprising fact: codes are moved bit by bit, so that kernels which read them a thousand times
// need a shift and a mask for four of them.
#pragma once
#include "quant.cuh"

// Two bits of value v of Q2_K and, 16 bytes further on, of Q3_K.
__device__ __forceinline__ u32 two_bits(const u8 *codes, int v) { return (codes[v / 128 * 32 + v % 32] >> (v % 128 / 32 * 2)) & 3; }
__device__ __forceinline__ u32 q4_k_code(const u8 *src, int v) { return (src[16 + v / 64 * 32 + v % 32] >> (v / 32 % 2 * 4)) & 15; }
__device__ __forceinline__ u32 q6_k_low(const u8 *src, int v) { return (src[v / 128 * 64 + v % 64] >> (v % 128 / 64 * 4)) & 15; }
__device__ __forceinline__ u32 word_at(const u8 *at) { return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24; }

// One of 16 threads of a block: thread `u` makes what word c = u % 4 of thread t = u / 4 of a product reads.
// put(plane, bytes, at, word) stores four bytes, put_half the two at an address.
template <int T, typename Put, typename PutHalf> __device__ void arrange_block(const u8 *src, int u, Put put, PutHalf put_half) {
    if constexpr (T == Q8_0) {
        put_half(0, 32, 2 * u, src + 2 + 2 * u);
        if (u == 0) put_half(32, 2, 0, src);
        return;
    }
    int t = u / 4, c = u % 4;
    // value(j, i): the number in its block of code i of word (j, c).
    auto value = [=](int j, int i) { return 64 * j + 16 * t + 4 * c + i; };
    // A word of four codes a byte (i) or a field (j) each.
    auto gather = [=](int fields, int bits, auto code) {
        u32 word = 0;
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < fields; j++) word |= code(j, i) << (8 * i + bits * j);
        }
        return word;
    };
    if constexpr (T == Q2_K) {
        put(0, 64, 4 * u, gather(4, 2, [=](int j, int i) { return two_bits(src + 16, value(j, i)); }));
        if (u < 4) put(Q2_K_HEAD, 16, 4 * u, word_at(src + 4 * u));
        if (u == 4) put(Q2_K_TAIL, 4, 0, word_at(src + 80));
    } else if constexpr (T == Q3_K) {
        put(0, 64, 4 * u, gather(4, 2, [=](int j, int i) { return two_bits(src + 32, value(j, i)); }));
        if (c % 2 == 0) {
            u32 word = 0;
            for (int next = 0; next < 2; next++) {
                word |= gather(4, 1, [=](int j, int i) { int v = value(j, i) + 4 * next; return (u32)(src[v % 32] >> (v / 32)) & 1; })
                    << (4 * next);
            }
            put(Q3_K_HIGH, 32, 8 * t + 2 * c, word);
        }
        if (u < 3) put(Q3_K_HEAD, 12, 4 * u, word_at(src + 96 + 4 * u));
        if (u == 3) put_half(Q3_K_TAIL, 2, 0, src + 108);
    } else if constexpr (T == Q4_K || T == Q6_K) {
        for (int half = 0; half < 2; half++) {
            u32 word = gather(2, 4, [=](int j, int i) {
                int v = value(2 * half + j, i);
                return T == Q4_K ? q4_k_code(src, v) : q6_k_low(src, v);
            });
            put(64 * half, 64, 4 * u, word);
        }
        if constexpr (T == Q4_K) {
            if (u < 4) put(Q4_K_HEAD, 16, 4 * u, word_at(src + 4 * u));
        } else {
            put(Q6_K_HIGH, 64, 4 * u, gather(4, 2, [=](int j, int i) { return two_bits(src + 128, value(j, i)); }));
            if (u < 4) put(Q6_K_HEAD, 16, 4 * u, word_at(src + 192 + 4 * u));
            if (u == 4) put_half(Q6_K_TAIL, 2, 0, src + 208);
        }
    } else {
        // Runs t and t + 4 of 32 values: the numbers of four groups, then their signs and scale.
        put(0, 64, 4 * u, word_at(src + 2 + (t + c / 2 * 4) * 8 + c % 2 * 4));
        if (u == 4) put_half(IQ2_XXS_TAIL, 2, 0, src);
    }
}

// src holds `blocks` blocks of the file, from number `first` on, of `rows` rows of `row_blocks` each. 16 threads a block.
template <int T> __device__ void arrange(const u8 *src, u8 *dst, u64 first, u64 blocks, int rows, int row_blocks) {
    using B = Block<T>;
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x, block = at / 16;
    if (block >= blocks) return;
    int u = (int)(at % 16);
    size_t total = (size_t)rows * row_blocks, slot = first + block;
    src += block * (B::BODY + B::TAIL);
    if constexpr (T == MXFP4) {
        // Codes 2u and 2u + 1; the file keeps the codes from 16 on in the upper halves of the same bytes.
        const u8 *pair = src + 1 + 2 * u % 16;
        int shift = u / 8 * 4;
        dst[slot * 16 + u] = (u8)(((pair[0] >> shift) & 15) | ((pair[1] >> shift) & 15) << 4);
        if (u == 0) dst[total * 16 + slot] = src[0];
        return;
    }
    if constexpr (B::VALUES == 256) {
        Place place = place_of(rows, row_blocks, (int)(slot / row_blocks));
        slot = place.first + slot % row_blocks * place.step;
    }
    auto put = [=](int plane, int bytes, int i, u32 word) { *(u32 *)(dst + total * plane + slot * bytes + i) = word; };
    auto put_half = [=](int plane, int bytes, int i, const u8 *from) {
        *(u16 *)(dst + total * plane + slot * bytes + i) = (u16)(from[0] | from[1] << 8);
    };
    arrange_block<T>(src, u, put, put_half);
}

#define ARRANGE(name, type) \
    extern "C" __global__ void arrange_##name(const u8 *src, u8 *dst, u64 first, u64 blocks, int rows, int row_blocks) { \
        previous_ended(); \
        arrange<type>(src, dst, first, blocks, rows, row_blocks); \
    }
ARRANGE(q8_0, Q8_0)
ARRANGE(q2_k, Q2_K)
ARRANGE(q3_k, Q3_K)
ARRANGE(q4_k, Q4_K)
ARRANGE(q6_k, Q6_K)
ARRANGE(iq2_xxs, IQ2_XXS)
ARRANGE(mxfp4, MXFP4)
