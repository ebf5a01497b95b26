// Root-mean-square norm with a weight a channel. One block a row.
// Never subtracts a mean. Surprising fact: the sum runs in the 16 lanes of the CPU op, so both give the same bits.
#include "common.cuh"

// x, out: [rows, width]; weight: [width].
extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2) rms_norm(
    const float *x, const float *__restrict__ weight, float *__restrict__ out, int width, float eps
) {
    previous_ended();
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    const float *row = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width;
    float factor = block_rms_factor(row, width, eps, tiles);
    for (int first = threadIdx.x; first < width; first += SUM_TILE) {
        // All loads before the first store, which would hold them up.
        float v[SUM_EACH];
#pragma unroll
        for (int k = 0; k < SUM_EACH; k++) {
            int i = first + k * SUM_THREADS;
            v[k] = i < width ? row[i] * factor * weight[i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < SUM_EACH; k++) {
            int i = first + k * SUM_THREADS;
            if (i < width) to[i] = v[k];
        }
    }
}
