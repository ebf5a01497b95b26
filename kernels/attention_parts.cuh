// Arithmetic of attention on tensor cores: F32 factors as sums of three BF16 values, keys and values that are BF16 values as they lie in memory.
// Never lets a result depend on what else a tile holds: a product of 16 terms begins at zero, and products are then added one after another.
// Surprising fact: nothing of a factor is lost, 3 x 8 bits of mantissa are all that F32 has.
#pragma once
#include "common.cuh"

// Width of a head, terms of one product on the tensor cores, and products of a score.
constexpr int HEAD_WIDTH = 512, STEP = 16, SCORE_STEPS = HEAD_WIDTH / STEP;
constexpr int PARTS = 3;

// Two neighbouring values as BF16, nearest, ties to even.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

// parts[0] + parts[1] + parts[2] = the two values, each of which is a pair of BF16.
__device__ __forceinline__ void split_pair(float low, float high, u32 (&parts)[PARTS]) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        parts[p] = bf16_pair(low, high);
        low -= __uint_as_float(parts[p] << 16);
        high -= __uint_as_float(parts[p] & 0xffff0000u);
    }
}

// Sixteen heads' factors of one step in a warp: thread 4 * g + t holds terms 4 * t .. 4 * t + 3 of heads g and g + 8.
struct Factors {
    // x, z: head g, terms 0, 1 and 2, 3 of the thread; y, w: head g + 8.
    uint4 parts[PARTS];
};

__device__ __forceinline__ Factors split_factors(float4 g, float4 g8) {
    Factors f;
    u32 a[PARTS], b[PARTS], c[PARTS], d[PARTS];
    split_pair(g.x, g.y, a);
    split_pair(g.z, g.w, b);
    split_pair(g8.x, g8.y, c);
    split_pair(g8.z, g8.w, d);
#pragma unroll
    for (int p = 0; p < PARTS; p++) f.parts[p] = make_uint4(a[p], c[p], b[p], d[p]);
    return f;
}

__device__ __forceinline__ void multiply(float (&sums)[4], uint4 a, uint2 b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#endif
}

// One step for 16 heads and N times 8 columns. `b`: terms 4 * t, 4 * t + 1 and 4 * t + 2, 4 * t + 3 of column g. Results: columns 2 * t and 2 * t + 1 of
// head g, then of head g + 8. The smallest parts come first. N products are under way at a time, since each waits for its last part.
template <int N> __device__ __forceinline__ void step_products(float (&products)[N][4], const Factors &f, const uint2 *b) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) products[n][i] = 0.0f;
    }
#pragma unroll
    for (int p = PARTS - 1; p >= 0; p--) {
#pragma unroll
        for (int n = 0; n < N; n++) multiply(products[n], f.parts[p], b[n]);
    }
}

// sums[n] += the products of one step with column tile n, of which GROUP are made at a time.
template <int GROUP, int N> __device__ __forceinline__ void add_products_of(float (&sums)[N][4], const Factors &f, const uint2 (&b)[N]) {
    static_assert(N % GROUP == 0, "whole groups");
#pragma unroll
    for (int first = 0; first < N; first += GROUP) {
        float products[GROUP][4];
        step_products(products, f, b + first);
#pragma unroll
        for (int n = 0; n < GROUP; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[first + n][i] += products[n][i];
        }
    }
}

// The keys of a row: positions of the window by rising position, then selected rows.
struct Keys {
    const float *window, *compressed;
    const int *picks;
    int start, in_window, window_slots;

    __device__ __forceinline__ Keys(
        const float *window, const float *compressed, const int *selected, size_t row, int window_slots, int window_len, int k, int first_pos
    )
        : window(window), compressed(compressed), picks(selected + row * k), window_slots(window_slots) {
        int pos = first_pos + (int)row;
        start = max(0, pos + 1 - window_len);
        in_window = pos + 1 - start;
    }

    // Where key `i` lies; null behind the last.
    __device__ __forceinline__ const float *at(int i, int k) const {
        if (i < in_window) return window + (size_t)((start + i) % window_slots) * HEAD_WIDTH;
        int pick = i - in_window < k ? picks[i - in_window] : -1;
        return pick < 0 ? nullptr : compressed + (size_t)pick * HEAD_WIDTH;
    }
};

// Weights of a head and their sum, by a warp: score(i) and put(i, weight) are of key i * 32 + lane, for those below `count`, which are at most 32 * TURNS. A
// score of minus infinity is no key.
template <int TURNS, typename Score, typename Put>
__device__ __forceinline__ float soften(int count, float sink, Score score, Put put) {
    int lane = threadIdx.x % 32;
    float peak = sink, sum = 0.0f, mine[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        mine[i] = i * 32 + lane < count ? score(i) : __uint_as_float(0xff800000u);
        peak = fmaxf(peak, mine[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, step));
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        if (i * 32 + lane < count) {
            float weight = expf(mine[i] - peak);
            put(i, weight);
            sum += weight;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    return sum + expf(sink - peak);
}
