// Outputs of an expert added to the sums of its rows.
// Never adds two experts at once: a row adds its experts one after another. Surprising fact: a weighted output joins a zero first, since that
// is how a single row's sum begins.
#include "common.cuh"

// y: [.., width], row r of it is that of assignment first + r; sums: [rows, width]. Four values a thread. Grid (pieces of a row, assignments).
extern "C" __global__ void add_expert_rows(
    const float *y, const float *weights, const int *places, const int *rows, float *sums, int first, int width
) {
    previous_ended();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x), assigned = first + blockIdx.y;
    if (i >= width) return;
    float weight = weights[places[assigned]];
    float4 v = *(const float4 *)(y + (size_t)blockIdx.y * width + i), *sum = (float4 *)(sums + (size_t)rows[assigned] * width + i), s = *sum;
    *sum = make_float4((0.0f + weight * v.x) + s.x, (0.0f + weight * v.y) + s.y, (0.0f + weight * v.z) + s.z, (0.0f + weight * v.w) + s.w);
}
