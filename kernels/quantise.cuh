// Activations rounded to 8 bits: codes -127..127 with one scale for each block.
// Never rounds otherwise than the CPU. Surprising fact: as whole numbers magnitudes order like floats, with infinity and NaN above all others.
#pragma once
#include "common.cuh"

// Eight neighbouring values of a row, rounded.
struct RoundedEight {
    uint2 codes;
    float scale;
    // Of 16 codes: this thread's and its neighbour's.
    int sum;
};

// A warp rounds 256 values in blocks of BLOCK, eight a thread.
template <int BLOCK> __device__ __forceinline__ RoundedEight round_eight(const float v[8]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < BLOCK / 8; step *= 2) most = max(most, __shfl_xor_sync(FULL, most, step));
    float amax = __uint_as_float(most);
    bool is_finite = most < 0x7f800000u, is_zero = !is_finite || amax < 1.0e-36f;
    float inverse = 127.0f / amax;
    u32 words[2] = {0, 0};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int code = is_zero ? 0 : (int)(i8)(__float_as_uint(v[i] * inverse + 12582912.0f) - 0x4b400000u);
        sum += code;
        words[i / 4] |= (u32)(code & 255) << (i % 4 * 8);
    }
    sum += __shfl_xor_sync(FULL, sum, 1);
    float scale = !is_finite ? __uint_as_float(0x7fc00000u) : is_zero ? 0.0f : amax / 127.0f;
    return RoundedEight{make_uint2(words[0], words[1]), scale, sum};
}

// First of the eight values of this thread. Grid (four or more warps of a row, rows).
__device__ __forceinline__ int first_of_eight() { return (int)((blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 256 + 8 * (threadIdx.x % 32)); }

// Eight values from `x` on, zeros where they are not `inside`.
__device__ __forceinline__ void read_eight(float v[8], const float *x, bool inside) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = inside ? x[i] : 0.0f;
}
