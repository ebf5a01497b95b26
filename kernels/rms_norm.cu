// Root-mean-square norm with a weight a channel. One block a row.
// Never subtracts a mean. Surprising fact: the sum runs in the 16 lanes of the CPU op, so both give the same bits.
#include "common.cuh"

// x, out: [rows, width]; weight: [width].
extern "C" __global__ void __launch_bounds__(256, 3) rms_norm(const float *x, const float *weight, float *out, int width, float eps) {
    __shared__ float tiles[2 * SUM_TILE];
    const float *row = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width;
    float factor = block_rms_factor(row, width, eps, tiles);
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = row[i] * factor * weight[i];
}
