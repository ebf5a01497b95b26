// Blocks of quantised weights as they lie on the device, and the value of one weight.
// Never sees the file's layout: kernels/arrange.cuh brings a matrix into this one, with the same number of bytes. Blocks of 32 are split
// into bodies and factors; MXFP4 keeps its codes in order. Blocks of 256 are cut into planes, one a part of a block; in each plane the
// blocks of eight neighbouring rows alternate, and a block's codes are kept as four threads use them: thread t owns values
// 64 j + 16 t .. + 15, of IQ2_XXS runs t and t + 4 of 32 values, so that a warp reads 512 bytes in a row.
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

// Rows whose blocks alternate.
constexpr int GROUP = 8;

// Where a row's first block lies in each plane, counted in blocks, and how far it is to the next.
struct Place {
    size_t first;
    int step;
};

__device__ __forceinline__ Place place_of(int rows, int blocks, int row) {
    int start = row / GROUP * GROUP;
    return Place{(size_t)start * blocks + (row - start), min(GROUP, rows - start)};
}

// First byte of a plane, for each block of the matrix.
enum Plane {
    Q2_K_HEAD = 64, Q2_K_TAIL = 80,
    Q3_K_HIGH = 64, Q3_K_HEAD = 96, Q3_K_TAIL = 108,
    Q4_K_CODES = 64, Q4_K_HEAD = 128,
    Q6_K_CODES = 64, Q6_K_HIGH = 128, Q6_K_HEAD = 192, Q6_K_TAIL = 208,
    IQ2_XXS_TAIL = 64,
};

// Value `v` of block `slot` among `total` blocks of 256.
template <int T> __device__ __forceinline__ float quad_value(const u8 *w, size_t total, size_t slot, int v) {
    int j = v / 64, t = v / 16 % 4, c = v / 4 % 4, i = v % 4;
    auto word = [=](int plane, int bytes, int at) { return *(const u32 *)(w + total * plane + slot * bytes + at); };
    auto part = [=](int plane, int bytes) { return w + total * plane + slot * bytes; };
    if constexpr (T == Q2_K) {
        const u8 *head = part(Q2_K_HEAD, 16), *tail = part(Q2_K_TAIL, 4);
        float scale = half_at(tail) * (float)(head[v / 16] & 15);
        float min = half_at(tail + 2) * (float)(head[v / 16] >> 4);
        int code = (word(0, 64, 16 * t + 4 * c) >> (8 * i + 2 * j)) & 3;
        return scale * (float)code - min;
    } else if constexpr (T == Q3_K) {
        const u8 *head = part(Q3_K_HEAD, 12);
        int s = v / 16;
        int low = (head[s % 8] >> (s / 8 * 4)) & 15, high = (head[8 + s % 4] >> (s / 4 * 2)) & 3;
        float scale = half_at(part(Q3_K_TAIL, 2)) * (float)((low | (high << 4)) - 32);
        int top = (word(Q3_K_HIGH, 32, 8 * t + c / 2 * 4) >> (8 * i + 4 * (c & 1) + j)) & 1;
        int code = ((word(0, 64, 16 * t + 4 * c) >> (8 * i + 2 * j)) & 3) | (top << 2);
        return scale * (float)(code - 4);
    } else if constexpr (T == Q4_K) {
        const u8 *head = part(Q4_K_HEAD, 16);
        int scale, min;
        q4_k_scale(head + 4, v / 32, &scale, &min);
        int code = (word(j / 2 * Q4_K_CODES, 64, 16 * t + 4 * c) >> (8 * i + 4 * (j & 1))) & 15;
        return half_at(head) * (float)scale * (float)code - half_at(head + 2) * (float)min;
    } else if constexpr (T == Q6_K) {
        float scale = half_at(part(Q6_K_TAIL, 2)) * (float)(i8)part(Q6_K_HEAD, 16)[v / 16];
        int low = (word(j / 2 * Q6_K_CODES, 64, 16 * t + 4 * c) >> (8 * i + 4 * (j & 1))) & 15;
        int high = (word(Q6_K_HIGH, 64, 16 * t + 4 * c) >> (8 * i + 2 * j)) & 3;
        return scale * (float)((low | (high << 4)) - 32);
    } else {
        // Runs of 32 values, two a thread.
        int run = v / 32, group = v / 8 % 4, value = v % 8, at = 16 * (run % 4) + run / 4 * 8;
        u32 groups = word(0, 64, at), signs = word(0, 64, at + 4);
        float factor = half_at(part(IQ2_XXS_TAIL, 2)) * (0.5f + (float)(signs >> 28)) * 0.25f;
        float magnitude = factor * (float)(u8)(IQ2_GRID[(groups >> (8 * group)) & 255] >> (value * 8));
        return (sign_bits((signs >> (7 * group)) & 127) >> value) & 1 ? -magnitude : magnitude;
    }
}

// The value of a block of one value, or value `i` of a block of 32.
template <int T> __device__ __forceinline__ float block_value(const u8 *body, const u8 *tail, int i) {
    if constexpr (T == F32) {
        return *(const float *)body;
    } else if constexpr (T == F16) {
        return half_at(body);
    } else if constexpr (T == BF16) {
        return bf16_value(*(const u16 *)body);
    } else if constexpr (T == Q8_0) {
        return (float)(i8)body[i] * half_at(tail);
    } else {
        return (float)mxfp4_code((body[i / 2] >> (i % 2 * 4)) & 15) * mxfp4_scale(tail[0]);
    }
}

// Weight (`row`, `i`) of a matrix of `rows` rows of `cols` values.
template <int T> __device__ __forceinline__ float weight_at(const u8 *w, int rows, int cols, int row, int i) {
    using B = Block<T>;
    int blocks = cols / B::VALUES;
    if constexpr (B::VALUES == 256) {
        Place place = place_of(rows, blocks, row);
        return quad_value<T>(w, (size_t)rows * blocks, place.first + (size_t)(i / 256) * place.step, i % 256);
    } else {
        size_t block = (size_t)row * blocks + i / B::VALUES;
        const u8 *tail = w + (size_t)rows * blocks * B::BODY + block * B::TAIL;
        return block_value<T>(w + block * B::BODY, tail, i % B::VALUES);
    }
}
