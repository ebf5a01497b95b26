// Rounding of cache rows to the number format that they are kept in, in place. One thread a block of values.
// Never changes what is already on the grid. Surprising fact: a block that holds a NaN or an infinity becomes all NaN.
#include "common.cuh"

__device__ __forceinline__ float exp2i(int e) {
    if (e > 127) return __uint_as_float(0x7f800000u);
    if (e >= -126) return __uint_as_float((u32)(e + 127) << 23);
    return e >= -149 ? __uint_as_float(1u << (e + 149)) : 0.0f;
}

// Nearest whole number, ties to even, for small magnitudes.
__device__ __forceinline__ float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// Smallest k with a <= mantissa * 2^(exponent + k); a is normal and positive.
__device__ __forceinline__ int ceil_ratio_log2(float a, float mantissa, int exponent) {
    u32 bits = __float_as_uint(a);
    float fraction = __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
    return (int)(bits >> 23) - 127 - exponent + (fraction > mantissa ? 1 : 0);
}

// Nearest E4M3 value, ties to even, at most 448 in magnitude.
__device__ __forceinline__ float e4m3(float x) {
    float m = fminf(fabsf(x), 448.0f);
    if (m < exp2i(-6)) {
        m = round_even(m * 512.0f) * exp2i(-9);
    } else {
        u32 bits = __float_as_uint(m);
        m = __uint_as_float((bits + 0x7ffffu + ((bits >> 20) & 1)) & 0xfff00000u);
    }
    return copysignf(m, x);
}

// Nearest E2M1 value, ties to the even code, at most 6 in magnitude.
__device__ __forceinline__ float e2m1(float x) {
    float m = fabsf(x);
    float r = m > 5.0f ? 6.0f : m >= 3.5f ? 4.0f : m > 2.5f ? 3.0f : m >= 1.75f ? 2.0f : m > 1.25f ? 1.5f : m >= 0.75f ? 1.0f
        : m > 0.25f ? 0.5f : 0.0f;
    return copysignf(r, x);
}

enum Format { FP8 = 0, FP4_BLOCK32 = 1, FP4_BLOCK16 = 2 };

template <int FORMAT>
__device__ void round_block(float *v, int count) {
    float most = 0.0f;
    bool finite = true;
    for (int i = 0; i < count; i++) {
        most = fmaxf(most, fabsf(v[i]));
        finite = finite && isfinite(v[i]);
    }
    if (!finite) {
        for (int i = 0; i < count; i++) v[i] = __uint_as_float(0x7fc00000u);
        return;
    }
    if (FORMAT == FP8) {
        int k = ceil_ratio_log2(fmaxf(most, 1e-4f), 1.75f, 8);
        float scale = exp2i(k), inverse = exp2i(-k);
        for (int i = 0; i < count; i++) v[i] = e4m3(fminf(fmaxf(v[i] * inverse, -448.0f), 448.0f)) * scale;
    } else if (FORMAT == FP4_BLOCK32) {
        float scale = exp2i(ceil_ratio_log2(fmaxf(most, 6.0f * exp2i(-126)), 1.5f, 2));
        for (int i = 0; i < count; i++) v[i] = e2m1(v[i] / scale) * scale;
    } else {
        float scale = e4m3(fmaxf(most, 6.0f * exp2i(-9)) / 6.0f);
        for (int i = 0; i < count; i++) v[i] = e2m1(v[i] / scale) * scale;
    }
}

extern "C" __global__ void round_cache(float *x, int blocks, int format) {
    previous_ended();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= blocks) return;
    if (format == FP8) round_block<FP8>(x + (size_t)at * 32, 32);
    if (format == FP4_BLOCK32) round_block<FP4_BLOCK32>(x + (size_t)at * 32, 32);
    if (format == FP4_BLOCK16) round_block<FP4_BLOCK16>(x + (size_t)at * 16, 16);
}

// The first `rounded` values of each row of `width`, in blocks of 64 of which the last may be shorter.
extern "C" __global__ void round_heads(float *x, int rows, int width, int rounded) {
    previous_ended();
    int at = blockIdx.x * blockDim.x + threadIdx.x, blocks = (rounded + 63) / 64;
    if (at >= rows * blocks) return;
    int first = at % blocks * 64;
    round_block<FP8>(x + (size_t)(at / blocks) * width + first, min(64, rounded - first));
}
