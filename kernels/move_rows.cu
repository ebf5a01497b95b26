// Gather and scatter of rows by index.
// Never adds: each output row has its own place.
#include "common.cuh"

// Four values, or what a row has left of them: rows of whole fours are moved four at a time.
__device__ __forceinline__ void move_four(const float *from, float *to, int i, int width) {
    if (width % 4 == 0) {
        *(float4 *)(to + i) = *(const float4 *)(from + i);
        return;
    }
    for (int k = i; k < min(i + 4, width); k++) to[k] = from[k];
}

// out: [count, width]; row i is row indices[first + i] of src. Grid (pieces of a row, count).
extern "C" __global__ void gather_rows(const float *src, const int *indices, float *out, int first, int width) {
    previous_ended();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    size_t r = blockIdx.y;
    if (i < width) move_four(src + (size_t)indices[first + r] * width, out + r * width, i, width);
}

// Row i of src goes to row indices[first + i] of dst. Grid (pieces of a row, count).
extern "C" __global__ void scatter_rows(const float *src, const int *indices, float *dst, int first, int width) {
    previous_ended();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    size_t r = blockIdx.y;
    if (i < width) move_four(src + r * width, dst + (size_t)indices[first + r] * width, i, width);
}
