// Scores of compressed rows for the selection, for many rows: as index_scores.cu, all heads of a row a block, which share its keys.
// Never scores a key that the row does not see. Surprising fact: what is added over the heads, one after another, is done by a quarter of the
// threads; it is a tenth of the work.
#pragma once
#include "dot_tiles.cuh"

// Width of an index head, keys of a block, and values from one key's products to the next.
constexpr int WIDTH = 128, BLOCK_KEYS = 8 * TILE_KEYS, DOT_STRIDE = TILE_HEADS + 2;

// The parameters of `index_scores`, with TILE_HEADS heads. Grid (keys / BLOCK_KEYS, rows).
// Shared: TILE_HEADS * (WIDTH + 1) + 2 * PART_ROOM + TILE_KEYS * DOT_STRIDE values.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) index_tiles(
    const float *q, const float *head_weights, const float *keys, float *scores, int heads, int width, int first_row, int first_pos,
    int ratio, int stride, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    float *query = (float *)dynamic, *weights = query + TILE_HEADS * WIDTH, *parts = weights + TILE_HEADS, *products = parts + 2 * PART_ROOM;
    size_t row = (size_t)first_row + blockIdx.y;
    int visible = (int)(((size_t)first_pos + row + 1) / ratio);
    int tid = threadIdx.x, first = blockIdx.x * BLOCK_KEYS, count = min(BLOCK_KEYS, visible - first);
    if (count <= 0) return;
    const float *from = q + row * heads * width;
    for (int i = 4 * tid; i < TILE_HEADS * WIDTH; i += 4 * TILE_THREADS) copy16(query + i, from + i);
    if (tid < TILE_HEADS) weights[tid] = head_weights[row * heads + tid];
    auto row_of = [&](int i) { return keys + (size_t)(first + min(i, count - 1)) * WIDTH; };
    auto put = [&](int head, int key, float2 dots) { *(float2 *)(products + key % TILE_KEYS * DOT_STRIDE + head) = dots; };
    tile_dots<WIDTH>(query, parts, count, row_of, put, [&](int base) {
        // The next products are put behind the barriers of the next parts.
        __syncthreads();
        if (tid >= TILE_KEYS || base + tid >= count) return;
        float sum = 0.0f;
#pragma unroll
        for (int h = 0; h < TILE_HEADS; h++) sum += weights[h] * fmaxf(products[tid * DOT_STRIDE + h], 0.0f);
        scores[blockIdx.y * (size_t)stride + first + base + tid] = sum * scale;
    });
}
