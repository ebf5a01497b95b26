// Attention of one row, or of a few, on tensor cores: scores by blocks of 16 heads and 24 keys, then values by blocks of 16 heads and 16 channels.
// Never adds in another order than attention_mma.cuh. Surprising fact: products of 16 terms are all made at once, by different warps, and only their
// sum is a chain.
#pragma once
#include "attention_parts.cuh"

constexpr int SPREAD_THREADS = 256, SPREAD_WARPS = SPREAD_THREADS / 32, VALUE_THREADS = 512, VALUE_WARPS = VALUE_THREADS / 32, SPREAD_KEYS = 24, SPREAD_TILES = SPREAD_KEYS / 8, SPREAD_CHANNELS = 16;
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

// out: [rows, heads, HEAD_WIDTH]. Grid (HEAD_WIDTH / SPREAD_CHANNELS, heads / 16, rows), VALUE_THREADS threads.
// Shared: SPREAD_STEPS * 1,024 bytes, and weights: 16 * SPREAD_STRIDE values.
extern "C" __global__ void __launch_bounds__(VALUE_THREADS, 1) attention_values(
    const float *scores, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int stride,
    int window_slots, int window_len, int k, int first_pos
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    __shared__ u64 rows[SPREAD_STEPS * STEP];
    __shared__ float totals[16];
    constexpr int EACH = (SPREAD_STEPS + VALUE_WARPS - 1) / VALUE_WARPS, TURNS = SPREAD_STEPS * STEP / 32;
    constexpr int ROWS_EACH = (SPREAD_STEPS * STEP + VALUE_THREADS - 1) / VALUE_THREADS;
    float4 *products = dynamic;
    float *weights = (float *)(dynamic + SPREAD_STEPS * 64);
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, first_head = blockIdx.y * 16;
    size_t r = blockIdx.z;
    Keys list(window, compressed, selected, r, window_slots, window_len, k, first_pos);

    // A warp a head: its scores are on their way first.
    const float *mine = scores + (r * heads + first_head + warp) * stride + lane, *first = list.at(0, k), *row[ROWS_EACH];
    float score[TURNS], sink = sinks[first_head + warp];
#pragma unroll
    for (int i = 0; i < TURNS; i++) score[i] = i * 32 + lane < stride ? mine[i * 32] : __uint_as_float(0xff800000u);
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) row[i] = i * VALUE_THREADS + tid < stride ? list.at(i * VALUE_THREADS + tid, k) : nullptr;
    int keys = 0;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        if (i * VALUE_THREADS + tid < stride) rows[i * VALUE_THREADS + tid] = (u64)(row[i] ? row[i] : first);
        keys += __syncthreads_count(row[i] != nullptr);
    }
    int steps = (keys + STEP - 1) / STEP;
    // Channels 2 * g and 2 * g + 1 are column g of two tiles.
    float2 value[EACH][4];
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        int step = warp + s * VALUE_WARPS;
        if (step < steps) {
#pragma unroll
            for (int e = 0; e < 4; e++) value[s][e] = *(const float2 *)((const float *)rows[step * STEP + 4 * t + e] + blockIdx.x * SPREAD_CHANNELS + 2 * g);
        }
    }
    float *of = weights + warp * SPREAD_STRIDE + lane;
    float total = soften<TURNS>(
        steps * STEP, sink, [&](int i) { return score[i]; }, [&](int i, float weight) { of[i * 32] = weight; }
    );
    if (lane == 0) totals[warp] = total;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < EACH; s++) {
        int step = warp + s * VALUE_WARPS;
        if (step < steps) {
            const float *weight = weights + g * SPREAD_STRIDE + step * STEP + 4 * t;
            Factors f = split_factors(*(const float4 *)weight, *(const float4 *)(weight + 8 * SPREAD_STRIDE));
            float product[2][4];
            float2(&v)[4] = value[s];
            uint2 b[2] = {
                make_uint2(bf16_pair(v[0].x, v[1].x), bf16_pair(v[2].x, v[3].x)), make_uint2(bf16_pair(v[0].y, v[1].y), bf16_pair(v[2].y, v[3].y))
            };
            step_products(product, f, b);
#pragma unroll
            for (int n = 0; n < 2; n++) products[step * 64 + n * 32 + lane] = make_float4(product[n][0], product[n][1], product[n][2], product[n][3]);
        }
    }
    __syncthreads();
    if (tid >= 256) return;
    // Output i % 4 of what thread `source` of a tile has: column source % 4 * 2 + i % 2 of head source / 4, or of the eighth one behind it.
    float result = 0.0f;
    const float *from = (const float *)products + tid;
#pragma unroll 8
    for (int s = 0; s < steps; s++) result += from[s * 256];
    int source = tid / 4 % 32, head = source / 4 + tid % 4 / 2 * 8, channel = (source % 4 * 2 + tid % 2) * 2 + tid / 128;
    out[(r * heads + first_head + head) * HEAD_WIDTH + blockIdx.x * SPREAD_CHANNELS + channel] = result / totals[head];
}
