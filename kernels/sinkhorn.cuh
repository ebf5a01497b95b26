// From raw mix values to the coefficients of a row's hyper-connections, and the normalisation of their matrix.
// Never reads the streams. Surprising fact: the matrix is so small that one warp normalises it without shared memory, if there are four
// streams.
#pragma once
#include "common.cuh"

constexpr int STREAMS_MAX = 8;

// Any n up to STREAMS_MAX, one thread.
__device__ void sinkhorn_alone(float *c, int n, float eps, int iterations) {
    for (int row = 0; row < n; row++) {
        float *v = c + row * n;
        float most = v[0];
        for (int i = 1; i < n; i++) most = fmaxf(most, v[i]);
        float sum = 0.0f;
        for (int i = 0; i < n; i++) sum += v[i] = exp_of(v[i] - most);
        for (int i = 0; i < n; i++) v[i] = v[i] / sum + eps;
    }
    for (int iteration = 0; iteration < iterations; iteration++) {
        for (int row = 0; iteration > 0 && row < n; row++) {
            float sum = 0.0f;
            for (int i = 0; i < n; i++) sum += c[row * n + i];
            sum += eps;
            for (int i = 0; i < n; i++) c[row * n + i] /= sum;
        }
        for (int column = 0; column < n; column++) {
            float sum = 0.0f;
            for (int i = 0; i < n; i++) sum += c[i * n + column];
            sum += eps;
            for (int i = 0; i < n; i++) c[i * n + column] /= sum;
        }
    }
}

// N * N at most 32: a warp, one thread a value. The same order of sums.
template <int N> __device__ float sinkhorn_together(float v, float eps, int iterations) {
    // Threads beyond the matrix repeat its last value.
    int at = min((int)threadIdx.x % 32, N * N - 1), row = at / N * N, column = at % N;
    auto row_sum = [&]() {
        float other[N], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) other[i] = __shfl_sync(FULL, v, row + i);
#pragma unroll
        for (int i = 0; i < N; i++) sum += other[i];
        return sum;
    };
    float most = __shfl_sync(FULL, v, row);
#pragma unroll
    for (int i = 1; i < N; i++) most = fmaxf(most, __shfl_sync(FULL, v, row + i));
    v = exp_of(v - most);
    v = v / row_sum() + eps;
    for (int iteration = 0; iteration < iterations; iteration++) {
        if (iteration > 0) v /= row_sum() + eps;
        float other[N], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) other[i] = __shfl_sync(FULL, v, i * N + column);
#pragma unroll
        for (int i = 0; i < N; i++) sum += other[i];
        v /= sum + eps;
    }
    return v;
}

// mix: [n * (n + 2)] raw values, read past the caches that a kernel keeps; base: the same; scale: [3]; pre, post: [n]; comb: [n, n]. By all
// threads of a block, of which there are more than coefficients; `c` is shared and has room for n * n values.
__device__ __forceinline__ void coefficients_of(
    const float *mix, float factor, const float *base, const float *scale, float *pre, float *post, float *comb, float *c, int n, float hc_eps,
    int iterations
) {
    int i = threadIdx.x;
    if (i < n * (n + 2)) {
        int group = i < n ? 0 : i < 2 * n ? 1 : 2;
        float value = *(const volatile float *)(mix + i) * factor * scale[group] + base[i];
        if (group == 0) pre[i] = sigmoid(value) + hc_eps;
        if (group == 1) post[i - n] = 2.0f * sigmoid(value);
        if (group == 2) c[i - 2 * n] = value;
    }
    __syncthreads();
    // The usual number of streams.
    if (n == 4) {
        if (i < 32) {
            float v = sinkhorn_together<4>(c[min(i, 15)], hc_eps, iterations);
            if (i < 16) comb[i] = v;
        }
        return;
    }
    if (i == 0) sinkhorn_alone(c, n, hc_eps, iterations);
    __syncthreads();
    if (i < n * n) comb[i] = c[i];
}
