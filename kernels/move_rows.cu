// Gather and scatter of rows by index.
// Never adds: each output row has its own place.
#include "common.cuh"

// out: [count, width]; row i is row indices[first + i] of src. Grid (pieces of a row, count).
extern "C" __global__ void gather_rows(const float *src, const int *indices, float *out, int first, int width) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (i < width) out[r * width + i] = src[(size_t)indices[first + r] * width + i];
}

// Row i of src goes to row indices[first + i] of dst. Grid (pieces of a row, count).
extern "C" __global__ void scatter_rows(const float *src, const int *indices, float *dst, int first, int width) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (i < width) dst[(size_t)indices[first + r] * width + i] = src[r * width + i];
}
