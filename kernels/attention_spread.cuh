// Attention of one row, or of a few, on tensor cores: scores by blocks of 16 heads and 24 keys, then values by blocks of 16 heads and 16 channels.
// Never adds in another order than attention_mma.cuh. Surprising fact: products of 16 terms are all made at once, by different warps, and only their
// sum is a chain.
#pragma once
#include "attention_parts.cuh"

constexpr int SPREAD_THREADS = 256, SPREAD_WARPS = SPREAD_THREADS / 32, SPREAD_KEYS = 24, SPREAD_TILES = SPREAD_KEYS / 8, SPREAD_CHANNELS = 16;
constexpr int SPREAD_STEPS = 40, SPREAD_STRIDE = SPREAD_STEPS * STEP + 16;

// scores: [rows, heads, stride], stride = window_len + k as whole steps; minus infinity behind the last key.
// Grid (stride / SPREAD_KEYS, heads / 16, rows).
extern "C" __global__ void __launch_bounds__(SPREAD_THREADS, 1) attention_scores(
    const float *q, const float *window, const float *compressed, const int *selected, float *scores, int heads, int stride, int window_slots,
    int window_len, int k, int first_pos, float scale
) {
    previous_ended();
    __shared__ float4 products[SCORE_STEPS][SPREAD_TILES * 32];
    constexpr int EACH = SCORE_STEPS / SPREAD_WARPS;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, first_head = blockIdx.y * 16, base = blockIdx.x * SPREAD_KEYS;
    size_t r = blockIdx.z;
    Keys list(window, compressed, selected, r, window_slots, window_len, k, first_pos);
    int at = warp * EACH * STEP + 4 * t;
    q += (r * heads + first_head + g) * HEAD_WIDTH + at;
    float4 low[EACH], high[EACH], key[SPREAD_TILES][EACH];
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        low[s] = *(const float4 *)(q + s * STEP);
        high[s] = *(const float4 *)(q + 8 * HEAD_WIDTH + s * STEP);
    }
#pragma unroll
    for (int n = 0; n < SPREAD_TILES; n++) {
        const float *row = list.at(base + n * 8 + g, k);
#pragma unroll
        for (int s = 0; s < EACH; s++) key[n][s] = row ? *(const float4 *)(row + at + s * STEP) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        Factors f = split_factors(low[s], high[s]);
        float product[SPREAD_TILES][4];
        uint2 b[SPREAD_TILES];
#pragma unroll
        for (int n = 0; n < SPREAD_TILES; n++) b[n] = make_uint2(bf16_pair(key[n][s].x, key[n][s].y), bf16_pair(key[n][s].z, key[n][s].w));
        step_products(product, f, b);
#pragma unroll
        for (int n = 0; n < SPREAD_TILES; n++) {
            products[warp * EACH + s][n * 32 + lane] = make_float4(product[n][0], product[n][1], product[n][2], product[n][3]);
        }
    }
    // Thread 4 * of + i of a tile adds what thread `of` of each step has in place i: key % 8 = of % 4 * 2 + i % 2.
    bool is_key[2];
#pragma unroll
    for (int e = 0; e < 2; e++) is_key[e] = list.at(base + (e * 2 + tid / 128) * 8 + tid / 4 % 4 * 2 + tid % 2, k);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = e * SPREAD_THREADS + tid, of = i / 4 % 32, head = of / 4 + i % 4 / 2 * 8, at = base + i / 128 * 8 + of % 4 * 2 + i % 2;
        if (i >= SPREAD_TILES * 128 || at >= stride) continue;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SCORE_STEPS; s++) sum += ((const float *)products[s])[i];
        scores[(r * heads + first_head + head) * stride + at] = is_key[e] ? sum * scale : __uint_as_float(0xff800000u);
    }
}

// out: [rows, heads, HEAD_WIDTH]. Grid (HEAD_WIDTH / SPREAD_CHANNELS, heads / 16, rows). Shared: SPREAD_STEPS * 1,024 bytes, and as much for weights.
extern "C" __global__ void __launch_bounds__(SPREAD_THREADS, 1) attention_values(
    const float *scores, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int stride,
    int window_slots, int window_len, int k, int first_pos
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    __shared__ u64 rows[SPREAD_STEPS * STEP];
    __shared__ float totals[16];
    constexpr int EACH = SPREAD_STEPS / SPREAD_WARPS;
    float4 *products = dynamic;
    float *weights = (float *)(dynamic + SPREAD_STEPS * 64);
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, first_head = blockIdx.y * 16;
    size_t r = blockIdx.z;
    Keys list(window, compressed, selected, r, window_slots, window_len, k, first_pos);

    // Scores are on their way first.
    const float *mine = scores + (r * heads + first_head + tid / 16) * stride + tid % 16;
    float score[SPREAD_STEPS];
#pragma unroll
    for (int i = 0; i < SPREAD_STEPS; i++) score[i] = i * STEP < stride ? mine[i * STEP] : __uint_as_float(0xff800000u);
    constexpr int ROWS_EACH = (SPREAD_STEPS * STEP + SPREAD_THREADS - 1) / SPREAD_THREADS;
    const float *first = list.at(0, k), *row[ROWS_EACH];
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) row[i] = i * SPREAD_THREADS + tid < stride ? list.at(i * SPREAD_THREADS + tid, k) : nullptr;
    int keys = 0;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        if (i * SPREAD_THREADS + tid < stride) rows[i * SPREAD_THREADS + tid] = (u64)(row[i] ? row[i] : first);
        keys += __syncthreads_count(row[i] != nullptr);
    }
    int steps = (keys + STEP - 1) / STEP;
    float value[EACH][2][4];
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        int step = warp + s * SPREAD_WARPS;
        if (step < steps) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float *row = (const float *)rows[step * STEP + 4 * t + e] + blockIdx.x * SPREAD_CHANNELS + g;
                value[s][0][e] = row[0];
                value[s][1][e] = row[8];
            }
        }
    }
    float peak = sinks[first_head + tid / 16];
#pragma unroll
    for (int i = 0; i < SPREAD_STEPS; i++) peak = fmaxf(peak, score[i]);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, step));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SPREAD_STEPS; i++) {
        if (i < steps) {
            float weight = expf(score[i] - peak);
            weights[tid / 16 * SPREAD_STRIDE + i * STEP + tid % 16] = weight;
            sum += weight;
        }
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    if (tid % 16 == 0) totals[tid / 16] = sum + expf(sinks[first_head + tid / 16] - peak);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        int step = warp + s * SPREAD_WARPS;
        if (step < steps) {
            const float *weight = weights + g * SPREAD_STRIDE + step * STEP + 4 * t;
            Factors f = split_factors(*(const float4 *)weight, *(const float4 *)(weight + 8 * SPREAD_STRIDE));
            float product[2][4];
            uint2 b[2];
#pragma unroll
            for (int n = 0; n < 2; n++) b[n] = make_uint2(bf16_pair(value[s][n][0], value[s][n][1]), bf16_pair(value[s][n][2], value[s][n][3]));
            step_products(product, f, b);
#pragma unroll
            for (int n = 0; n < 2; n++) products[step * 64 + n * 32 + lane] = make_float4(product[n][0], product[n][1], product[n][2], product[n][3]);
        }
    }
    __syncthreads();
    float result = 0.0f;
    const float *from = (const float *)products + tid;
#pragma unroll 8
    for (int s = 0; s < steps; s++) result += from[s * 256];
    int of = tid / 4 % 32, head = of / 4 + tid % 4 / 2 * 8, channel = tid / 128 * 8 + of % 4 * 2 + tid % 2;
    out[(r * heads + first_head + head) * HEAD_WIDTH + blockIdx.x * SPREAD_CHANNELS + channel] = result / totals[head];
}
