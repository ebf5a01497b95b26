// One weight row against N rows of rounded activations, by eight threads.
// Never sums otherwise than the CPU: two of its 16 lanes belong to each thread, and the fold is its fold.
// Surprising fact: decoding a block costs more instructions than the dots, so N rows cost much less than N times one.
#pragma once
#include "dot_parts.cuh"

constexpr int DOT_THREADS = 128;

// Activations: `rows` x `groups` rows of `cols` codes.
struct Acts {
    const i8 *codes;
    const float *scales;
    const i16 *sums;
};

// Sum of 16 lanes and 8 minima held by eight threads (lanes 2t and 2t + 1, minimum t), in the CPU's order; valid in thread 0.
__device__ __forceinline__ float fold_eight(float even, float odd, float min) {
    even = even + __shfl_down_sync(FULL, even, 4, 8);
    odd = odd + __shfl_down_sync(FULL, odd, 4, 8);
    int t = threadIdx.x % 8;
    even = even + __shfl_sync(FULL, min, 2 * t, 8);
    odd = odd + __shfl_sync(FULL, min, 2 * t + 1, 8);
    even = even + __shfl_down_sync(FULL, even, 2, 8);
    odd = odd + __shfl_down_sync(FULL, odd, 2, 8);
    even = even + __shfl_down_sync(FULL, even, 1, 8);
    odd = odd + __shfl_down_sync(FULL, odd, 1, 8);
    return (even + odd) + 0.0f;
}

// N activation rows (`act[n]`) against one weight row of blocks of 256.
template <int T, int N>
__device__ __forceinline__ void dot_256(
    const u8 *body, const u8 *tail, const u64 *grid, int blocks, const Acts &acts, const size_t *act, int t, float *out
) {
    float even[N] = {}, odd[N] = {}, min[N] = {};
#pragma unroll 2
    for (int b = 0; b < blocks; b++) {
        Part256 p;
        load_part<T>(body + (size_t)b * Block<T>::BODY, tail + (size_t)b * Block<T>::TAIL, grid, t, p);
#pragma unroll
        for (int n = 0; n < N; n++) {
            size_t block = act[n] * blocks + b;
            const i8 *codes = acts.codes + block * 256 + 8 * t;
            float scale = acts.scales[block];
            int a = 0, c = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint2 x = *(const uint2 *)(codes + 64 * j);
                a += p.scales[j] * __dp4a(p.codes[j][0], (int)x.x, 0);
                c += p.scales[j] * __dp4a(p.codes[j][1], (int)x.y, 0);
            }
            if (CODE_OFFSET<T> != 0 && t < 4) {
                const i16 *sums = acts.sums + block * 16 + 4 * t;
                a -= CODE_OFFSET<T> * (p.extra[0] * sums[0] + p.extra[1] * sums[1]);
                c -= CODE_OFFSET<T> * (p.extra[2] * sums[2] + p.extra[3] * sums[3]);
            }
            if constexpr (HAS_MINS<T>) {
                const i16 *sums = acts.sums + block * 16 + 2 * t;
                min[n] = fmaf((float)-(p.extra[0] * sums[0] + p.extra[1] * sums[1]), p.dmin * scale, min[n]);
            }
            even[n] = fmaf((float)a, p.d * scale, even[n]);
            odd[n] = fmaf((float)c, p.d * scale, odd[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) out[n] = fold_eight(even[n], odd[n], min[n]);
}

// As `dot_256` for blocks of 32: threads 0 to 3 take even blocks, 4 to 7 odd ones.
template <int T, int N>
__device__ __forceinline__ void dot_32(const u8 *body, const u8 *tail, int blocks, const Acts &acts, const size_t *act, int t, float *out) {
    float even[N] = {}, odd[N] = {};
#pragma unroll 4
    for (int b = t >> 2; b < blocks; b += 2) {
        uint2 codes = codes_of_32<T>(body + (size_t)b * Block<T>::BODY, t);
        float d = factor_of_32<T>(tail + (size_t)b * Block<T>::TAIL);
#pragma unroll
        for (int n = 0; n < N; n++) {
            size_t block = act[n] * blocks + b;
            uint2 x = *(const uint2 *)(acts.codes + block * 32 + 8 * (t & 3));
            float factor = d * acts.scales[block];
            even[n] = fmaf((float)__dp4a((int)codes.x, (int)x.x, 0), factor, even[n]);
            odd[n] = fmaf((float)__dp4a((int)codes.y, (int)x.y, 0), factor, odd[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) out[n] = fold_eight(even[n], odd[n], 0.0f);
}

// Row `row` of a planar matrix against N activation rows.
template <int T, int N>
__device__ __forceinline__ void dot_row(
    const u8 *w, int w_rows, int cols, int row, const u64 *grid, const Acts &acts, const size_t *act, int t, float *out
) {
    int blocks = cols / Block<T>::VALUES;
    const u8 *body = w + (size_t)row * blocks * Block<T>::BODY;
    const u8 *tail = w + (size_t)w_rows * blocks * Block<T>::BODY + (size_t)row * blocks * Block<T>::TAIL;
    if constexpr (Block<T>::VALUES == 256) {
        dot_256<T, N>(body, tail, grid, blocks, acts, act, t, out);
    } else {
        dot_32<T, N>(body, tail, blocks, acts, act, t, out);
    }
}

// The grid of IQ2_XXS in shared memory, for types that need it.
template <int T> __device__ __forceinline__ void load_grid(u64 *grid) {
    if constexpr (T == IQ2_XXS) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) grid[i] = IQ2_GRID[i];
        __syncthreads();
    }
}
