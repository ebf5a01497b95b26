// Root-mean-square norm with a weight a channel. One block a row.
// Never subtracts a mean. Surprising fact: the sum runs in the 16 lanes of the CPU op, so both give the same bits.
#include "common.cuh"

// x, out: [rows, width]; weight: [width].
extern "C" __global__ void __launch_bounds__(SUM_THREADS, 1) rms_norm(
    const float *x, const float *__restrict__ weight, float *__restrict__ out, int width, float eps
) {
    previous_ended();
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    const float *row = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width;
    float factor = block_rms_factor(row, width, eps, tiles);
    // Unrolled: loads are not held up by stores.
#pragma unroll 10
    for (int i = threadIdx.x; i < width; i += SUM_THREADS) to[i] = row[i] * factor * weight[i];
}
