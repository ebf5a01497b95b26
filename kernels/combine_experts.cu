// Sum of a row's expert outputs in router order, then the shared expert's.
// Never sums in landing order: streamed and resident runs give the same bits.
#include "common.cuh"

// outputs: [rows, k, width]; weights: [rows, k]; shared, out: [rows, width]. Grid (pieces of a row, rows).
extern "C" __global__ void combine_experts(const float *outputs, const float *weights, const float *shared, float *out, int k, int width) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (i >= width) return;
    float sum = 0.0f;
    for (int e = 0; e < k; e++) sum += weights[r * k + e] * outputs[(r * k + e) * width + i];
    out[r * width + i] = sum + shared[r * width + i];
}
