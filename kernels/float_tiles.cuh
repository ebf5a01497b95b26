// Products of many rows of floats: eight activation rows by eight weight rows a warp, each of whose threads owns one of the CPU's 32 lanes.
// Never adds in another order than `matmul_floats`. Surprising fact: no shared memory: the warps of a block read the same lines at about the
// same time, and find them in the nearest cache.
#pragma once
#include "quant.cuh"

// Rows of each kind that a warp takes, and warps of a block side by side and one above the other.
constexpr int FLOATS_EACH = 8, FLOATS_WIDE = 4, FLOATS_HIGH = 2, FLOAT_TILE_THREADS = 32 * FLOATS_WIDE * FLOATS_HIGH;

template <int T> __device__ __forceinline__ float float_weight(const u8 *at) {
    if constexpr (T == F32) return *(const float *)at;
    if constexpr (T == F16) return half_value(*(const u16 *)at);
    return bf16_value(*(const u16 *)at);
}

// Of two numbers of each of two threads the lower one gets the sum of both a, the upper one of both b.
__device__ __forceinline__ float fold_pair(float a, float b, bool is_upper, int apart) {
    float other = __shfl_xor_sync(FULL, is_upper ? a : b, apart);
    return (is_upper ? b : a) + other;
}

// The first 4 * HALF sums onto the first 2 * HALF.
template <int HALF> __device__ __forceinline__ void fold_halves(float *sums, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * HALF; i++) sums[i] = fold_pair(sums[i], sums[i + 2 * HALF], lane & HALF, HALF);
}

// x: [rows, groups, cols]; out: [rows, w_rows]; the weight rows of a group are a multiple of eight.
// Grid (weight rows / 32, activation rows / 16).
template <int T> __device__ void float_tiles(const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups) {
    constexpr int BYTES = Block<T>::BODY;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int o = (blockIdx.x * FLOATS_WIDE + warp % FLOATS_WIDE) * FLOATS_EACH, r = (blockIdx.y * FLOATS_HIGH + warp / FLOATS_WIDE) * FLOATS_EACH;
    if (o >= w_rows || r >= rows) return;
    int group = o / (w_rows / groups);
    const u8 *weights[FLOATS_EACH];
    const float *acts[FLOATS_EACH];
#pragma unroll
    for (int k = 0; k < FLOATS_EACH; k++) {
        weights[k] = w + ((size_t)(o + k) * cols + lane) * BYTES;
        // Rows beyond the last are it again.
        acts[k] = x + ((size_t)min(r + k, rows - 1) * groups + group) * cols + lane;
    }
    float sums[FLOATS_EACH * FLOATS_EACH] = {};
    auto add = [&](int i) {
        float a[FLOATS_EACH], b[FLOATS_EACH];
#pragma unroll
        for (int k = 0; k < FLOATS_EACH; k++) {
            a[k] = acts[k][i];
            b[k] = float_weight<T>(weights[k] + (size_t)i * BYTES);
        }
#pragma unroll
        for (int n = 0; n < FLOATS_EACH; n++) {
#pragma unroll
            for (int k = 0; k < FLOATS_EACH; k++) sums[n * FLOATS_EACH + k] = fmaf(b[k], a[n], sums[n * FLOATS_EACH + k]);
        }
    };
    int whole = cols / 32 * 32;
#pragma unroll 4
    for (int i = 0; i < whole; i += 32) add(i);
    if (lane < cols - whole) add(whole);
    __syncwarp();
    // Halves of the lanes onto each other, 32 -> 1; at each step a thread keeps half of the sums that it has.
    fold_halves<16>(sums, lane);
    fold_halves<8>(sums, lane);
    fold_halves<4>(sums, lane);
    fold_halves<2>(sums, lane);
    fold_halves<1>(sums, lane);
    // Two neighbouring outputs are left.
    r += lane / 4;
    o += lane % 4 * 2;
    if (r >= rows) return;
    out[(size_t)r * w_rows + o] = sums[0] + 0.0f;
    out[(size_t)r * w_rows + o + 1] = sums[1] + 0.0f;
}

#define FLOAT_TILES(name, type) \
    extern "C" __global__ void __launch_bounds__(FLOAT_TILE_THREADS, 2) float_tiles_##name( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups \
    ) { \
        previous_ended(); \
        float_tiles<type>(w, x, out, w_rows, cols, rows, groups); \
    }
FLOAT_TILES(f32, F32)
FLOAT_TILES(f16, F16)
FLOAT_TILES(bf16, BF16)
