// Scores of compressed rows for the selection. Four threads a key, 64 keys a block.
// Never scores a key that the row does not see. Surprising fact: negative dots count as zero before the head weights, which may
// themselves be negative.
#include "common.cuh"
#include "index_tiles.cuh"

constexpr int THREADS = 256;

// q: [all rows, heads, width]; head_weights: [all rows, heads]; keys: [.., width]; scores: [rows, stride].
// Row r of the grid is row first_row + r of the chunk. Shared: heads * (width + 1) values. Grid (keys / 64, rows).
extern "C" __global__ void __launch_bounds__(THREADS) index_scores(
    const float *q, const float *head_weights, const float *keys, float *scores, int heads, int width, int first_row, int first_pos,
    int ratio, int stride, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    float *query = (float *)dynamic, *weights = query + heads * width;
    size_t row = (size_t)first_row + blockIdx.y;
    int visible = (int)(((size_t)first_pos + row + 1) / ratio);
    int tid = threadIdx.x, t = tid % 4, first = blockIdx.x * (THREADS / 4);
    if (first >= visible) return;
    for (int i = tid; i < heads * width; i += THREADS) query[i] = q[row * heads * width + i];
    for (int i = tid; i < heads; i += THREADS) weights[i] = head_weights[row * heads + i];
    __syncthreads();
    int i = first + tid / 4;
    const float *key = keys + (size_t)min(i, visible - 1) * width;
    float sum = 0.0f;
    for (int h = 0; h < heads; h++) {
        float lane[4] = {};
#pragma unroll 8
        for (int at = 4 * t; at < width; at += LANES) {
            float4 a = *(const float4 *)(query + h * width + at), b = *(const float4 *)(key + at);
            lane[0] += a.x * b.x;
            lane[1] += a.y * b.y;
            lane[2] += a.z * b.z;
            lane[3] += a.w * b.w;
        }
        sum += weights[h] * fmaxf(fold_fours(lane), 0.0f);
    }
    if (t == 0 && i < visible) scores[blockIdx.y * (size_t)stride + i] = sum * scale;
}
