// Rotary embedding of interleaved pairs on the last values of each head, in place.
// Never scales. Surprising fact: the angle is an F32 product; its sine and cosine are taken in F64 and rounded once.
#include "common.cuh"

// x: [rows, heads, width]; freqs: [rotary / 2]. Grid (rows, groups of heads), one thread a pair of some heads.
extern "C" __global__ void rope(const float *freqs, float *x, int heads, int width, int rotary, int first_pos, int pos_step, int inverse) {
    previous_ended();
    float *row = x + (size_t)blockIdx.x * heads * width;
    int pairs = rotary / 2;
    float pos = (float)((size_t)first_pos + (size_t)blockIdx.x * pos_step);
    int i = threadIdx.x % pairs, at_once = blockDim.x / pairs;
    for (int h = blockIdx.y * at_once + threadIdx.x / pairs; h < heads; h += gridDim.y * at_once) {
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
