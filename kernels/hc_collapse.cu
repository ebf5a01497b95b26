// Weighted sum of the residual streams.
// Never normalises.
#include "common.cuh"

// streams: [rows, n, hidden]; weights: [rows, n]; out: [rows, hidden]. Grid (pieces of a row, rows).
extern "C" __global__ void hc_collapse(const float *streams, const float *weights, float *out, int n, int hidden) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (i >= hidden) return;
    float sum = 0.0f;
    for (int k = 0; k < n; k++) sum += weights[r * n + k] * streams[(r * n + k) * hidden + i];
    out[r * hidden + i] = sum;
}
