// One weight row against N rows of rounded activations, by eight threads.
// Never sums otherwise than the CPU: two of its 16 lanes belong to each thread, and the fold is its fold.
// Surprising fact: decoding a block costs more instructions than the dots, so N rows cost much less than N times one.
#pragma once
#include "dot_parts.cuh"

constexpr int DOT_THREADS = 128;
// Blocks of a multiprocessor. Without this number the compiler saves registers by moving loads to where they are used, which makes every
// load wait for the one before it.
constexpr int DOT_BLOCKS = 5;

// A number as a type, for loops whose length the compiler must know.
template <int V> struct Count {
    static constexpr int value = V;
};

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

// Blocks whose loads are started before the first of them is used: with few warps that is what covers memory's latency.
template <int N> constexpr int AHEAD_256 = N == 1 ? 2 : 1;
template <int N> constexpr int AHEAD_32 = N == 1 ? 8 : 2;

// What a thread loads of an activation block of 256.
struct Raw256Acts {
    uint2 codes[4];
    float scale;
    uint2 sums;
};

template <int T> __device__ __forceinline__ void fetch_acts(const Acts &acts, size_t block, int t, Raw256Acts &x) {
    const i8 *codes = acts.codes + block * 256 + 8 * t;
#pragma unroll
    for (int j = 0; j < 4; j++) x.codes[j] = *(const uint2 *)(codes + 64 * j);
    x.scale = acts.scales[block];
    if constexpr (CODE_OFFSET<T> != 0) x.sums = *(const uint2 *)(acts.sums + block * 16 + 4 * (t & 3));
    if constexpr (HAS_MINS<T>) x.sums.x = *(const u32 *)(acts.sums + block * 16 + 2 * t);
}

__device__ __forceinline__ int low_half(u32 pair) { return (int)(i16)pair; }
__device__ __forceinline__ int high_half(u32 pair) { return (int)pair >> 16; }

// Adds one block to the lanes of a thread.
template <int T> __device__ __forceinline__ void add_256(const Part256 &p, const Raw256Acts &x, int t, float &even, float &odd, float &min) {
    int a = 0, c = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a += p.scales[j] * __dp4a(p.codes[j][0], (int)x.codes[j].x, 0);
        c += p.scales[j] * __dp4a(p.codes[j][1], (int)x.codes[j].y, 0);
    }
    if constexpr (CODE_OFFSET<T> != 0) {
        // Lanes 0 to 7 carry the offsets of all 16 runs.
        int first = p.extra[0] * low_half(x.sums.x) + p.extra[1] * high_half(x.sums.x);
        int second = p.extra[2] * low_half(x.sums.y) + p.extra[3] * high_half(x.sums.y);
        a -= t < 4 ? CODE_OFFSET<T> * first : 0;
        c -= t < 4 ? CODE_OFFSET<T> * second : 0;
    }
    if constexpr (HAS_MINS<T>) {
        int sum = p.extra[0] * low_half(x.sums.x) + p.extra[1] * high_half(x.sums.x);
        min = fmaf((float)-sum, p.dmin * x.scale, min);
    }
    even = fmaf((float)a, p.d * x.scale, even);
    odd = fmaf((float)c, p.d * x.scale, odd);
}

// N activation rows (`act[n]`) against one weight row of blocks of 256.
template <int T, int N>
__device__ __forceinline__ void dot_256(
    const u8 *body, const u8 *tail, const Iq2Tables *tables, int blocks, const Acts &acts, const size_t *act, int t, float *out
) {
    constexpr int AHEAD = AHEAD_256<N>;
    float even[N] = {}, odd[N] = {}, min[N] = {};
    auto take = [&](int b, auto count) {
        constexpr int COUNT = decltype(count)::value;
        Raw256 raw[COUNT];
        Raw256Acts x[COUNT][N];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            fetch<T>(body + (size_t)(b + k) * Block<T>::BODY, tail + (size_t)(b + k) * Block<T>::TAIL, t, raw[k]);
#pragma unroll
            for (int n = 0; n < N; n++) fetch_acts<T>(acts, act[n] * blocks + b + k, t, x[k][n]);
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            Part256 p;
            unpack<T>(raw[k], tables, t, p);
#pragma unroll
            for (int n = 0; n < N; n++) add_256<T>(p, x[k][n], t, even[n], odd[n], min[n]);
        }
    };
    int b = 0;
    for (; b + AHEAD <= blocks; b += AHEAD) take(b, Count<AHEAD>{});
    for (; b < blocks; b++) take(b, Count<1>{});
#pragma unroll
    for (int n = 0; n < N; n++) out[n] = fold_eight(even[n], odd[n], min[n]);
}

// As `dot_256` for blocks of 32: threads 0 to 3 take even blocks, 4 to 7 odd ones.
template <int T, int N>
__device__ __forceinline__ void dot_32(const u8 *body, const u8 *tail, int blocks, const Acts &acts, const size_t *act, int t, float *out) {
    constexpr int AHEAD = AHEAD_32<N>;
    float even[N] = {}, odd[N] = {};
    auto take = [&](int b, auto count) {
        constexpr int COUNT = decltype(count)::value;
        uint2 raw[COUNT], x[COUNT][N];
        u32 factors[COUNT];
        float scales[COUNT][N];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            int at = b + 2 * k;
            raw[k] = fetch_32<T>(body + (size_t)at * Block<T>::BODY, t);
            factors[k] = fetch_factor<T>(tail + (size_t)at * Block<T>::TAIL);
#pragma unroll
            for (int n = 0; n < N; n++) {
                size_t block = act[n] * blocks + at;
                x[k][n] = *(const uint2 *)(acts.codes + block * 32 + 8 * (t & 3));
                scales[k][n] = acts.scales[block];
            }
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            uint2 codes = unpack_32<T>(raw[k], t);
            float d = factor_of<T>(factors[k]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float factor = d * scales[k][n];
                even[n] = fmaf((float)__dp4a((int)codes.x, (int)x[k][n].x, 0), factor, even[n]);
                odd[n] = fmaf((float)__dp4a((int)codes.y, (int)x[k][n].y, 0), factor, odd[n]);
            }
        }
    };
    // All threads of a warp make the same turns.
    int b = 0;
    for (; b + 2 * AHEAD <= blocks; b += 2 * AHEAD) take(b + (t >> 2), Count<AHEAD>{});
    for (b += t >> 2; b < blocks; b += 2) take(b, Count<1>{});
#pragma unroll
    for (int n = 0; n < N; n++) out[n] = fold_eight(even[n], odd[n], 0.0f);
}

// Row `row` of a planar matrix against N activation rows.
template <int T, int N>
__device__ __forceinline__ void dot_row(
    const u8 *w, int w_rows, int cols, int row, const Iq2Tables *tables, const Acts &acts, const size_t *act, int t, float *out
) {
    int blocks = cols / Block<T>::VALUES;
    const u8 *body = w + (size_t)row * blocks * Block<T>::BODY;
    const u8 *tail = w + (size_t)w_rows * blocks * Block<T>::BODY + (size_t)row * blocks * Block<T>::TAIL;
    if constexpr (Block<T>::VALUES == 256) {
        dot_256<T, N>(body, tail, tables, blocks, acts, act, t, out);
    } else {
        dot_32<T, N>(body, tail, blocks, acts, act, t, out);
    }
}

// The tables of IQ2_XXS, where a type needs them.
template <int T> __device__ __forceinline__ const Iq2Tables *tables_for() {
    if constexpr (T == IQ2_XXS) {
        __shared__ Iq2Tables tables;
        for (int i = threadIdx.x; i < 256; i += blockDim.x) tables.grid[i] = IQ2_GRID[i];
        __syncthreads();
        return &tables;
    } else {
        return nullptr;
    }
}
