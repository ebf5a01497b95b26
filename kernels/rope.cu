// Rotary embedding of interleaved pairs on the last values of each head, in place.
// Never scales. Surprising fact: the angle is an F32 product; its sine and cosine are taken in F64 and rounded once.
#include "common.cuh"

// x: [rows, heads, width]; freqs: [rotary / 2]. One block a row, one thread a pair, looping over heads.
extern "C" __global__ void rope(const float *freqs, float *x, int heads, int width, int rotary, int first_pos, int pos_step, int inverse) {
    float *row = x + (size_t)blockIdx.x * heads * width;
    int pairs = rotary / 2;
    float pos = (float)((size_t)first_pos + (size_t)blockIdx.x * pos_step);
    for (int i = threadIdx.x % pairs, h = threadIdx.x / pairs; h < heads; h += blockDim.x / pairs) {
        double sine, cosine;
        sincos((double)(pos * freqs[i]), &sine, &cosine);
        float s = inverse ? (float)-sine : (float)sine;
        float c = (float)cosine;
        float *at = row + (size_t)h * width + width - rotary + 2 * i;
        float a = at[0], b = at[1];
        at[0] = a * c - b * s;
        at[1] = a * s + b * c;
    }
}
