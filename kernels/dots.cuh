// One weight row against N rows of rounded activations, by four threads (blocks of 256) or eight (blocks of 32).
// Never sums otherwise than the CPU: four or two of its 16 lanes belong to each thread, and the fold is its fold.
// Surprising fact: decoding a block costs more instructions than the dots, so N rows cost much less than N times one.
#pragma once
#include "dot_parts.cuh"

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

// Sum of 16 lanes and 8 minima held by four threads (lanes 4t .. 4t + 3, minima 2t and 2t + 1), in the CPU's order; valid in thread 0.
template <bool MINS> __device__ __forceinline__ float fold_quad(const float lane[4], const float min[2]) {
    int t = threadIdx.x % 4;
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; c++) sum[c] = lane[c] + __shfl_down_sync(FULL, lane[c], 2, 4);
    if constexpr (MINS) {
#pragma unroll
        for (int c = 0; c < 4; c++) sum[c] = sum[c] + __shfl_sync(FULL, min[c & 1], 2 * t + c / 2, 4);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) sum[c] = sum[c] + __shfl_down_sync(FULL, sum[c], 1, 4);
    return ((sum[0] + sum[2]) + (sum[1] + sum[3])) + 0.0f;
}

// Blocks of 32 whose loads are started before the first of them is used: with few warps that is what covers memory's latency.
template <int N> constexpr int AHEAD_32 = N == 1 ? 8 : 2;

// Adds one block to the lanes of a thread; `block` counts blocks of activations.
template <int T>
__device__ __forceinline__ void add_256(const Part256 &p, const Acts &acts, u32 block, int t, float lane[4], float min[2]) {
    const i8 *codes = acts.codes + 16 * t + (u64)block * 256;
    float scale = acts.scales[block];
    int sums[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 x = *(const uint4 *)(codes + 64 * j);
#pragma unroll
        for (int c = 0; c < 4; c++) sums[c] += p.scales[j] * __dp4a(p.codes[j][c], (int)word_of(x, c), 0);
    }
    if constexpr (CODE_OFFSET<T> != 0) {
        // Lanes 0 to 7, those of two threads, carry the offsets of all 16 runs.
        uint4 runs = *(const uint4 *)(acts.sums + 8 * (t & 1) + (u64)block * 16);
        int offset = t < 2 ? CODE_OFFSET<T> : 0;
        sums[0] -= offset * __dp2a_lo((int)runs.x, p.extra[0], 0);
        sums[1] -= offset * __dp2a_hi((int)runs.y, p.extra[0], 0);
        sums[2] -= offset * __dp2a_lo((int)runs.z, p.extra[1], 0);
        sums[3] -= offset * __dp2a_hi((int)runs.w, p.extra[1], 0);
    }
    if constexpr (HAS_MINS<T>) {
        uint2 runs = *(const uint2 *)(acts.sums + 4 * t + (u64)block * 16);
        float factor = p.dmin * scale;
        min[0] = fmaf((float)-__dp2a_lo((int)runs.x, p.extra[0], 0), factor, min[0]);
        min[1] = fmaf((float)-__dp2a_hi((int)runs.y, p.extra[0], 0), factor, min[1]);
    }
    float factor = p.d * scale;
#pragma unroll
    for (int c = 0; c < 4; c++) lane[c] = fmaf((float)sums[c], factor, lane[c]);
}

// N activation rows (`act[n]`) against weight row `row` of blocks of 256.
template <int T, int N>
__device__ __forceinline__ void dot_256(
    const u8 *w, int w_rows, int row, const Iq2Tables *tables, int blocks, const Acts &acts, const size_t *act, int t, float *out
) {
    Place place = place_of(w_rows, blocks, row);
    Planes planes = planes_of<T>(w, (size_t)w_rows * blocks, t);
    float lane[N][4] = {}, min[N][2] = {};
    u32 slot = (u32)place.first, at[N];
#pragma unroll
    for (int n = 0; n < N; n++) at[n] = (u32)act[n] * blocks;
    Raw256 raw;
    fetch<T>(planes, slot, raw);
    for (int b = 0; b < blocks; b++) {
        Part256 p;
        unpack<T>(raw, tables, t, p);
        // The next block is on its way while this one is used; further ahead costs registers, and with them warps, that cover more.
        slot += place.step;
        if (b + 1 < blocks) fetch<T>(planes, slot, raw);
#pragma unroll
        for (int n = 0; n < N; n++) add_256<T>(p, acts, at[n]++, t, lane[n], min[n]);
    }
#pragma unroll
    for (int n = 0; n < N; n++) out[n] = fold_quad<HAS_MINS<T>>(lane[n], min[n]);
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
            float d = factor_of<T>(factors[k]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float factor = d * scales[k][n];
                int2 sums = dots_32<T>(raw[k], x[k][n]);
                even[n] = fmaf((float)sums.x, factor, even[n]);
                odd[n] = fmaf((float)sums.y, factor, odd[n]);
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

// Threads that share a weight row, and threads of a block of threads: tables are filled once a block of threads.
template <int T> constexpr int ROW_THREADS = Block<T>::VALUES == 256 ? 4 : 8;
template <int T> constexpr int DOT_THREADS = T == IQ2_XXS ? 512 : 128;
// Blocks of threads of a multiprocessor. Without this number the compiler saves registers by moving loads to where they are used, which
// makes every load wait for the one before it.
template <int T, int N> constexpr int DOT_BLOCKS = T == IQ2_XXS ? (N == 1 ? 2 : 1) : Block<T>::VALUES == 256 && N == 1 ? 8 : 5;
template <int T> constexpr int DOT_ROWS = DOT_THREADS<T> / ROW_THREADS<T>;

// Row `row` of a matrix against N activation rows, valid in thread 0 of the row.
template <int T, int N>
__device__ __forceinline__ void dot_row(
    const u8 *w, int w_rows, int cols, int row, const Iq2Tables *tables, const Acts &acts, const size_t *act, float *out
) {
    int blocks = cols / Block<T>::VALUES, t = threadIdx.x % ROW_THREADS<T>;
    if constexpr (Block<T>::VALUES == 256) {
        dot_256<T, N>(w, w_rows, row, tables, blocks, acts, act, t, out);
    } else {
        const u8 *body = w + (size_t)row * blocks * Block<T>::BODY;
        const u8 *tail = w + (size_t)w_rows * blocks * Block<T>::BODY + (size_t)row * blocks * Block<T>::TAIL;
        dot_32<T, N>(body, tail, blocks, acts, act, t, out);
    }
}

// The tables of IQ2_XXS, where a type needs them.
template <int T> __device__ __forceinline__ const Iq2Tables *tables_for() {
    if constexpr (T == IQ2_XXS) {
        __shared__ Iq2Tables tables;
        fill_tables(tables);
        return &tables;
    } else {
        return nullptr;
    }
}
