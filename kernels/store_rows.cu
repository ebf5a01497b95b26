// Copy of rows into a ring or a list.
// Never touches other slots. Surprising fact: of two rows with one slot only the later is written, as a loop would leave it.
#include "common.cuh"

// src: [rows, width]; dst: [slots, width]. Grid (pieces of a row, rows).
extern "C" __global__ void store_rows(const float *src, float *dst, int rows, int width, int first_slot, int slots) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int r = blockIdx.y;
    if (i >= width || r + slots < rows) return;
    size_t slot = ((size_t)first_slot + r) % slots;
    dst[slot * width + i] = src[(size_t)r * width + i];
}
