// Gated pooling of token pairs, channel by channel.
// Never overlaps pairs. Surprising fact: the first row of a pair that a chunk border cuts comes from the buffers kept open.
#include "common.cuh"

// values, gates: [rows, width]; open_*: [width]; pooled: [pairs, width]. `first_row` is the second row of pair 0.
// Grid (pieces of a row, pairs).
extern "C" __global__ void pool_pairs(
    const float *values, const float *gates, const float *open_values, const float *open_gates, float *pooled, int width, int first_row
) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t r = (size_t)first_row + 2 * blockIdx.y;
    float v1 = values[r * width + i], g1 = gates[r * width + i];
    float v0 = r ? values[(r - 1) * width + i] : open_values[i];
    float g0 = r ? gates[(r - 1) * width + i] : open_gates[i];
    float most = fmaxf(g0, g1);
    float a = exp_of(g0 - most), b = exp_of(g1 - most);
    pooled[(size_t)blockIdx.y * width + i] = (a * v0 + b * v1) / (a + b);
}
