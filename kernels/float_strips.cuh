// Products of many rows of floats: a thread owns one of the CPU's 32 lanes of some weight rows by some activation rows, which come through shared memory.
// Never adds in another order than `matmul_floats`. Surprising fact: reads of shared memory bound it as much as the products do, so a thread has as
// many outputs as registers hold: 28 values are read for 192 products.
#pragma once
#include "tiles.cuh"

// Columns of a step, and steps in shared memory.
constexpr int STRIP_COLS = 128, STRIP_STAGES = 4;

template <int T> __device__ __forceinline__ float float_value(const u8 *from, size_t at) {
    if constexpr (T == F32) return ((const float *)from)[at];
    if constexpr (T == F16) return half_value(((const u16 *)from)[at]);
    return bf16_value(((const u16 *)from)[at]);
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last N groups of copies have landed.
template <int N> __device__ __forceinline__ void wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Copies 16 bytes, zeros where they are not wanted.
__device__ __forceinline__ void copy16_or_zero(u32 to, const void *from, bool is_wanted) {
    int bytes = is_wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Sums of N values of each of 32 lanes, halves onto each other; a thread keeps the one of number lane / (32 / N) in sums[0].
template <int N, int HALF> __device__ __forceinline__ void fold_many(float *sums, int lane) {
    if constexpr (HALF > 0 && N > 1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            bool is_upper = lane & HALF;
            float other = __shfl_xor_sync(FULL, is_upper ? sums[i] : sums[i + N / 2], HALF);
            sums[i] = (is_upper ? sums[i + N / 2] : sums[i]) + other;
        }
        fold_many<N / 2, HALF / 2>(sums, lane);
    } else if constexpr (HALF > 0) {
        sums[0] = sums[0] + __shfl_xor_sync(FULL, sums[0], HALF);
        fold_many<1, HALF / 2>(sums, lane);
    }
}

// WIDE weight rows by HIGH activation rows a warp, ACROSS warps side by side and DOWN one above the other.
template <int T, int WIDE, int HIGH, int ACROSS, int DOWN> struct Strips {
    static constexpr int THREADS = 32 * ACROSS * DOWN, WEIGHTS = WIDE * ACROSS, ACTS = HIGH * DOWN, BYTES = Block<T>::BODY;
    static constexpr int W_ROOM = WEIGHTS * STRIP_COLS * BYTES, STAGE = W_ROOM + ACTS * STRIP_COLS * 4;
    static constexpr int W_PIECES = STRIP_COLS * BYTES / 16, X_PIECES = STRIP_COLS * 4 / 16;

    // x: [rows, groups, cols]; out: [rows, w_rows]; rows of both are whole 16 bytes. Grid (tiles of activation rows, tiles of weight rows of all
    // groups). Shared: STRIP_STAGES stages.
    __device__ __forceinline__ static void run(const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups) {
        extern __shared__ uint4 tile_memory[];
        u8 *stages = (u8 *)tile_memory;
        int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
        int each = w_rows / groups, tiles = (each + WEIGHTS - 1) / WEIGHTS, group = (int)blockIdx.y / tiles;
        int o = group * each + (int)blockIdx.y % tiles * WEIGHTS, end = (group + 1) * each, r = blockIdx.x * ACTS;
        int steps = (cols + STRIP_COLS - 1) / STRIP_COLS;
        auto begin = [&](int step) {
            u32 to = shared_address(stages + step % STRIP_STAGES * STAGE);
#pragma unroll
            for (int k = 0; k < (WEIGHTS * W_PIECES + THREADS - 1) / THREADS; k++) {
                int i = k * THREADS + tid, row = i / W_PIECES, piece = i % W_PIECES;
                if (WEIGHTS * W_PIECES % THREADS && i >= WEIGHTS * W_PIECES) break;
                bool is_wanted = step * STRIP_COLS * BYTES + piece * 16 < cols * BYTES;
                const u8 *from = w + ((size_t)min(o + row, end - 1) * cols + step * STRIP_COLS) * BYTES + piece * 16;
                copy16_or_zero(to + i * 16, is_wanted ? from : w, is_wanted);
            }
#pragma unroll
            for (int k = 0; k < (ACTS * X_PIECES + THREADS - 1) / THREADS; k++) {
                int i = k * THREADS + tid, row = i / X_PIECES, piece = i % X_PIECES;
                if (ACTS * X_PIECES % THREADS && i >= ACTS * X_PIECES) break;
                bool is_wanted = step * STRIP_COLS + piece * 4 < cols;
                const float *from = x + ((size_t)min(r + row, rows - 1) * groups + group) * cols + step * STRIP_COLS + piece * 4;
                copy16_or_zero(to + W_ROOM + i * 16, is_wanted ? from : x, is_wanted);
            }
        };
        float sums[WIDE * HIGH] = {};
#pragma unroll
        for (int s = 0; s < STRIP_STAGES - 1; s++) {
            if (s < steps) begin(s);
            close_copies();
        }
        int my_o = warp % ACROSS * WIDE, my_r = warp / ACROSS * HIGH;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            wait_all_but<STRIP_STAGES - 2>();
            __syncthreads();
            if (step + STRIP_STAGES - 1 < steps) begin(step + STRIP_STAGES - 1);
            close_copies();
            const u8 *weights = stages + step % STRIP_STAGES * STAGE + (my_o * STRIP_COLS + lane) * BYTES;
            const float *acts = (const float *)(stages + step % STRIP_STAGES * STAGE + W_ROOM) + my_r * STRIP_COLS + lane;
#pragma unroll
            for (int i = 0; i < STRIP_COLS; i += 32) {
                float a[HIGH], b[WIDE];
#pragma unroll
                for (int k = 0; k < HIGH; k++) a[k] = acts[k * STRIP_COLS + i];
#pragma unroll
                for (int k = 0; k < WIDE; k++) b[k] = float_value<T>(weights, k * STRIP_COLS + i);
#pragma unroll
                for (int n = 0; n < WIDE; n++) {
#pragma unroll
                    for (int k = 0; k < HIGH; k++) sums[n * HIGH + k] = fmaf(b[n], a[k], sums[n * HIGH + k]);
                }
            }
        }
        // Some sums at a time.
        constexpr int TURN = WIDE * HIGH % 32 ? 16 : 32;
        static_assert(WIDE * HIGH % TURN == 0 && TURN % HIGH == 0, "whole turns");
        int mine = lane / (32 / TURN);
#pragma unroll
        for (int n = 0; n < WIDE * HIGH / TURN; n++) {
            fold_many<TURN, 16>(sums + n * TURN, lane);
            int at = o + my_o + n * (TURN / HIGH) + mine / HIGH, row = r + my_r + mine % HIGH;
            if (at < end && row < rows) out[(size_t)row * w_rows + at] = sums[n * TURN] + 0.0f;
        }
    }
};

#define FLOAT_STRIPS_OF(name, type, wide, high, across, down, each) \
    extern "C" __global__ void __launch_bounds__(32 * across * down, each) float_strips_##name( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups \
    ) { \
        previous_ended(); \
        Strips<type, wide, high, across, down>::run(w, x, out, w_rows, cols, rows, groups); \
    }
// For few outputs, and for many.
#define FLOAT_STRIPS(name, type) FLOAT_STRIPS_OF(name, type, 12, 4, 2, 2, 4) FLOAT_STRIPS_OF(name##_wide, type, 12, 16, 4, 2, 1)
FLOAT_STRIPS(f32, F32)
FLOAT_STRIPS(f16, F16)
FLOAT_STRIPS(bf16, BF16)
