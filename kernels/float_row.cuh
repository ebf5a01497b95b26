// One activation row against many rows of floats: four threads a weight row, each owning eight neighbouring lanes of the CPU's 32.
// Never adds in another order than `matmul_floats`: a lane's products join it one after another. Surprising fact: 16 bytes of halves are one
// value for each of a thread's lanes, so nothing has to be moved between threads before the end.
#pragma once
#include "quant.cuh"

// Threads of a block, those of a weight row, lanes of each.
constexpr int FLOAT_ROW_THREADS = 64, FLOAT_SHARERS = 4, FLOAT_LANES = 8;
// Reads of 16 bytes that are on their way before the first of them is used.
constexpr int FLOAT_READS = 8;

// Value `i` of eight that lie in one or two reads of 16 bytes.
template <int T> __device__ __forceinline__ float value_in(const uint4 *raw, int i) {
    auto word = [=](int at) { return at % 4 == 0 ? raw[at / 4].x : at % 4 == 1 ? raw[at / 4].y : at % 4 == 2 ? raw[at / 4].z : raw[at / 4].w; };
    if constexpr (T == F32) return __uint_as_float(word(i));
    u16 bits = (u16)(word(i / 2) >> (i % 2 * 16));
    return T == F16 ? half_value(bits) : bf16_value(bits);
}

// x: [groups, cols]; out: [w_rows]. A weight row begins on a multiple of 16 bytes. Grid (weight rows / 16).
template <int T> __device__ void matmul_float_row(const u8 *w, const float *x, float *out, int w_rows, int cols, int groups) {
    constexpr int BYTES = Block<T>::BODY, PARTS = FLOAT_LANES * BYTES / 16, AT_ONCE = FLOAT_READS / PARTS;
    int t = threadIdx.x % FLOAT_SHARERS, o = (int)((blockIdx.x * FLOAT_ROW_THREADS + threadIdx.x) / FLOAT_SHARERS);
    // Threads beyond the last row compute it again: all of a warp take part in the fold.
    int row = min(o, w_rows - 1), first = FLOAT_LANES * t, whole = cols / 32;
    const float *act = x + (size_t)(row / (w_rows / groups)) * cols + first;
    const u8 *from = w + ((size_t)row * cols + first) * BYTES;
    float lane[FLOAT_LANES] = {};
    auto read = [&](uint4 raw[PARTS]) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(raw[p].x), "=r"(raw[p].y), "=r"(raw[p].z), "=r"(raw[p].w)
                : "l"(from + 16 * p));
        from += 32 * BYTES;
    };
    auto add = [&](const uint4 raw[PARTS]) {
        float4 a = *(const float4 *)act, b = *(const float4 *)(act + 4);
        float v[FLOAT_LANES] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        act += 32;
#pragma unroll
        for (int i = 0; i < FLOAT_LANES; i++) lane[i] = fmaf(value_in<T>(raw, i), v[i], lane[i]);
    };
    int k = 0;
    for (; k + AT_ONCE <= whole; k += AT_ONCE) {
        uint4 raw[AT_ONCE][PARTS];
#pragma unroll
        for (int d = 0; d < AT_ONCE; d++) read(raw[d]);
#pragma unroll
        for (int d = 0; d < AT_ONCE; d++) add(raw[d]);
    }
    for (; k < whole; k++) {
        uint4 raw[PARTS];
        read(raw);
        add(raw);
    }
    // Up to 31 values more.
    for (int i = 0; i < FLOAT_LANES; i++) {
        if (whole * 32 + first + i < cols) lane[i] = fmaf(block_value<T>(from + i * BYTES, nullptr, 0), act[i], lane[i]);
    }
#pragma unroll
    for (int apart = 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < FLOAT_LANES; i++) lane[i] = lane[i] + __shfl_down_sync(FULL, lane[i], apart, FLOAT_SHARERS);
    }
#pragma unroll
    for (int apart = FLOAT_LANES / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < apart; i++) lane[i] = lane[i] + lane[i + apart];
    }
    if (t == 0 && o < w_rows) out[o] = lane[0] + 0.0f;
}

#define FLOAT_ROW(name, type) \
    extern "C" __global__ void __launch_bounds__(FLOAT_ROW_THREADS, 12) float_row_##name( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int groups \
    ) { \
        previous_ended(); \
        matmul_float_row<type>(w, x, out, w_rows, cols, groups); \
    }
FLOAT_ROW(f32, F32)
FLOAT_ROW(f16, F16)
FLOAT_ROW(bf16, BF16)
