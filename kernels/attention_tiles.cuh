// Attention of many rows: as attention.cu, 32 heads of a row a block, which share its keys in shared memory.
// Never adds in another order than attention.cu. Surprising fact: a row's scores lie key by key, so that the heads of eight by eight outputs
// are two reads for all threads of a warp.
#pragma once
#include "dot_tiles.cuh"

// Width of a head, and keys whose values are in shared memory at a time.
constexpr int WIDTH = 512, VALUE_KEYS = 16, VALUES_ROOM = VALUE_KEYS * WIDTH, WARPS = TILE_THREADS / 32;
// Queries and parts of keys, later two tiles of values.
constexpr int WORK_ROOM = TILE_HEADS * WIDTH + 2 * PART_ROOM;
static_assert(2 * VALUES_ROOM <= WORK_ROOM, "values take the place of queries and keys");
static_assert(TILE_THREADS * 8 * 8 == TILE_HEADS * WIDTH, "a thread sums 8 heads by 8 channels");

// sums[h][c] += weights[key][h] * values[key][c] for `count` keys, in order.
__device__ __forceinline__ void add_values(float (&sums)[8][8], const float *weights, const float *values, int count) {
#pragma unroll 2
    for (int i = 0; i < count; i++) {
        float w[8], v[8];
        *(float4 *)w = *(const float4 *)(weights + i * TILE_HEADS);
        *(float4 *)(w + 4) = *(const float4 *)(weights + i * TILE_HEADS + 4);
        *(float4 *)v = *(const float4 *)(values + i * WIDTH);
        *(float4 *)(v + 4) = *(const float4 *)(values + i * WIDTH + WIDTH / 2);
#pragma unroll
        for (int h = 0; h < 8; h++) {
#pragma unroll
            for (int c = 0; c < 8; c++) sums[h][c] += w[h] * v[c];
        }
    }
}

// The parameters of `attention`. Grid (heads / TILE_HEADS, rows). Shared: WORK_ROOM + (TILE_HEADS + 1) * (window_len + k) words.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) attention_tiles(
    const float *q, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int width,
    int window_slots, int window_len, int k, int first_pos, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    __shared__ float peaks[WARPS][TILE_HEADS], totals[TILE_HEADS];
    float *work = (float *)dynamic, *parts = work + TILE_HEADS * WIDTH, *weights = work + WORK_ROOM;
    int *slots = (int *)(weights + TILE_HEADS * (window_len + k));
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, first_head = blockIdx.x * TILE_HEADS;
    size_t r = blockIdx.y;
    int pos = first_pos + (int)r, start = max(0, pos + 1 - window_len), in_window = pos + 1 - start;
    const int *picks = selected + r * k;

    const float *from = q + (r * heads + first_head) * width;
    for (int i = 4 * tid; i < TILE_HEADS * WIDTH; i += 4 * TILE_THREADS) copy16(work + i, from + i);
    for (int i = tid; i < in_window; i += TILE_THREADS) slots[i] = (start + i) % window_slots;
    int picked = 0;
    for (int i = 0; i < k; i += TILE_THREADS) {
        int pick = i + tid < k ? picks[i + tid] : -1;
        if (pick >= 0) slots[in_window + i + tid] = pick;
        picked += __syncthreads_count(pick >= 0);
    }
    int keys = in_window + picked;
    __syncthreads();
    auto row_of = [&](int i) { return (i < in_window ? window : compressed) + (size_t)slots[i] * WIDTH; };

    auto put = [&](int head, int key, float2 dots) {
        if (key < keys) *(float2 *)(weights + key * TILE_HEADS + head) = make_float2(dots.x * scale, dots.y * scale);
    };
    tile_dots<WIDTH>(work, parts, keys, [&](int i) { return row_of(min(i, keys - 1)); }, put, [](int) {});
    __syncthreads();

    // Values are on their way while weights are computed.
    auto copy_values = [&](int base) {
        float *to = work + base / VALUE_KEYS % 2 * VALUES_ROOM;
#pragma unroll
        for (int i = 0; i < VALUES_ROOM; i += 4 * TILE_THREADS) {
            int key = (i + 4 * tid) / WIDTH, at = 4 * tid % WIDTH;
            if (base + key < keys) copy16(to + i + 4 * tid, row_of(base + key) + at);
        }
    };
    copy_values(0);
    float peak = sinks[first_head + lane];
    for (int i = warp; i < keys; i += WARPS) peak = fmaxf(peak, weights[i * TILE_HEADS + lane]);
    peaks[warp][lane] = peak;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) peak = fmaxf(peak, peaks[i][lane]);
    for (int i = warp; i < keys; i += WARPS) weights[i * TILE_HEADS + lane] = exp_of(weights[i * TILE_HEADS + lane] - peak);
    __syncthreads();
    if (warp == 0) {
        float sum = exp_of(sinks[first_head + lane] - peak);
#pragma unroll 16
        for (int i = 0; i < keys; i++) sum += weights[i * TILE_HEADS + lane];
        totals[lane] = sum;
    }

    float sums[8][8] = {};
    int head = tid / 64 * 8, channel = tid % 64 * 4;
    for (int base = 0; base < keys; base += VALUE_KEYS) {
        copies_wait();
        __syncthreads();
        if (base + VALUE_KEYS < keys) copy_values(base + VALUE_KEYS);
        const float *values = work + base / VALUE_KEYS % 2 * VALUES_ROOM + channel;
        add_values(sums, weights + base * TILE_HEADS + head, values, min(VALUE_KEYS, keys - base));
    }
    float *to = out + (r * heads + first_head + head) * width + channel;
#pragma unroll
    for (int h = 0; h < 8; h++) {
        float total = totals[head + h];
        float(&s)[8] = sums[h];
        *(float4 *)(to + h * WIDTH) = make_float4(s[0] / total, s[1] / total, s[2] / total, s[3] / total);
        *(float4 *)(to + h * WIDTH + WIDTH / 2) = make_float4(s[4] / total, s[5] / total, s[6] / total, s[7] / total);
    }
}
