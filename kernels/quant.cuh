// Blocks of quantised weights as they lie on the device, and the value of one weight.
// Never sees the file's layout: on the device a matrix is planar, first the bodies of all blocks, then their tails (the factors), so
// that bodies are aligned; `planar` in matmul.cu makes it so. Q4_K, whose blocks are aligned anyway, and plain floats have no tail.
// Surprising fact: a decoded value has the bits of the CPU decoder, which rounds each product before it subtracts.
#pragma once
#include "common.cuh"
#include "iq2_grid.cuh"

// Numbers as in GGUF files.
enum Type { F32 = 0, F16 = 1, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q6_K = 14, IQ2_XXS = 16, BF16 = 30, MXFP4 = 39 };

// Values, body bytes and tail bytes of a block.
template <int T> struct Block;
template <> struct Block<F32> { static constexpr int VALUES = 1, BODY = 4, TAIL = 0; };
template <> struct Block<F16> { static constexpr int VALUES = 1, BODY = 2, TAIL = 0; };
template <> struct Block<BF16> { static constexpr int VALUES = 1, BODY = 2, TAIL = 0; };
template <> struct Block<Q8_0> { static constexpr int VALUES = 32, BODY = 32, TAIL = 2; };
template <> struct Block<MXFP4> { static constexpr int VALUES = 32, BODY = 16, TAIL = 1; };
template <> struct Block<Q2_K> { static constexpr int VALUES = 256, BODY = 80, TAIL = 4; };
template <> struct Block<Q3_K> { static constexpr int VALUES = 256, BODY = 108, TAIL = 2; };
template <> struct Block<Q4_K> { static constexpr int VALUES = 256, BODY = 144, TAIL = 0; };
template <> struct Block<Q6_K> { static constexpr int VALUES = 256, BODY = 208, TAIL = 2; };
template <> struct Block<IQ2_XXS> { static constexpr int VALUES = 256, BODY = 64, TAIL = 2; };

__device__ __forceinline__ float half_at(const u8 *at) { return half_value(*(const u16 *)at); }

// Eight sign bits of a 7-bit code: the eighth makes their number even.
__device__ __forceinline__ u32 sign_bits(u32 code) { return code | ((__popc(code) & 1) << 7); }

// 0xff in byte k for bit k of `bits`.
__device__ __forceinline__ u32 byte_mask(u32 bits) {
    u32 mask;
    // Bit k moves to the top of byte k; the permutation then fills each byte with its top bit.
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"((bits & 15) * 0x10204080u));
    return mask;
}

// Factor of the doubled MXFP4 codes: 2^(exponent - 128).
__device__ __forceinline__ float mxfp4_scale(u32 exponent) {
    // Two steps below the normal range: 2^-127 and 2^-128 are subnormal.
    return exponent >= 2 ? __uint_as_float((exponent - 1) << 23) : __uint_as_float(0x00200000u << exponent);
}

__device__ __forceinline__ int mxfp4_code(u32 nibble) {
    // 0 1 2 3 4 6 8 12, one nibble each.
    int magnitude = (int)((0xc8643210u >> ((nibble & 7) * 4)) & 15);
    return nibble & 8 ? -magnitude : magnitude;
}

// The 6-bit scale and minimum of sub-block `k` of a Q4_K block.
__device__ __forceinline__ void q4_k_scale(const u8 *packed, int k, int *scale, int *min) {
    if (k < 4) {
        *scale = packed[k] & 63;
        *min = packed[k + 4] & 63;
    } else {
        *scale = (packed[k + 4] & 15) | ((packed[k - 4] >> 6) << 4);
        *min = (packed[k + 4] >> 4) | ((packed[k] >> 6) << 4);
    }
}

// Value `i` of a block.
template <int T> __device__ __forceinline__ float block_value(const u8 *body, const u8 *tail, int i) {
    if constexpr (T == F32) {
        return *(const float *)body;
    } else if constexpr (T == F16) {
        return half_at(body);
    } else if constexpr (T == BF16) {
        return bf16_value(*(const u16 *)body);
    } else if constexpr (T == Q8_0) {
        return (float)(i8)body[i] * half_at(tail);
    } else if constexpr (T == MXFP4) {
        return (float)mxfp4_code((body[i % 16] >> (i / 16 * 4)) & 15) * mxfp4_scale(tail[0]);
    } else if constexpr (T == Q2_K) {
        float scale = half_at(tail) * (float)(body[i / 16] & 15);
        float min = half_at(tail + 2) * (float)(body[i / 16] >> 4);
        int code = (body[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
        return scale * (float)code - min;
    } else if constexpr (T == Q3_K) {
        int s = i / 16;
        int low = (body[96 + s % 8] >> (s / 8 * 4)) & 15, high = (body[104 + s % 4] >> (s / 4 * 2)) & 3;
        float scale = half_at(tail) * (float)((low | (high << 4)) - 32);
        int code = ((body[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) | (((body[i % 32] >> (i / 32)) & 1) << 2);
        return scale * (float)(code - 4);
    } else if constexpr (T == Q4_K) {
        int scale, min;
        q4_k_scale(body + 4, i / 32, &scale, &min);
        int code = (body[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15;
        return half_at(body) * (float)scale * (float)code - half_at(body + 2) * (float)min;
    } else if constexpr (T == Q6_K) {
        float scale = half_at(tail) * (float)(i8)body[192 + i / 16];
        int low = (body[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
        int high = (body[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
        return scale * (float)((low | (high << 4)) - 32);
    } else {
        const u8 *sub = body + i / 32 * 8;
        u32 word = *(const u32 *)(sub + 4);
        float factor = half_at(tail) * (0.5f + (float)(word >> 28)) * 0.25f;
        int group = i % 32 / 8;
        float magnitude = factor * (float)(u8)(IQ2_GRID[sub[group]] >> (i % 8 * 8));
        return (sign_bits((word >> (7 * group)) & 127) >> (i % 8)) & 1 ? -magnitude : magnitude;
    }
}

// Weight (`row`, `i`) of a matrix of `rows` rows of `cols` values.
template <int T> __device__ __forceinline__ float weight_at(const u8 *w, int rows, int cols, int row, int i) {
    using B = Block<T>;
    size_t blocks = cols / B::VALUES, block = row * blocks + i / B::VALUES;
    const u8 *tail = w + (size_t)rows * blocks * B::BODY + block * B::TAIL;
    return block_value<T>(w + block * B::BODY, tail, i % B::VALUES);
}
