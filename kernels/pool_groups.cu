// Gated pooling of groups of tokens, channel by channel, with or without overlap.
// Never reads a slot of a position before the text. Surprising fact: with overlap a token's first half belongs to the next group.
#include "common.cuh"

// values, gates: [slots, row] rings; bias: [ratio, row]; pooled: [groups, width]; row is width, twice that with overlap.
// Grid (pieces of a row, groups).
extern "C" __global__ void pool_groups(
    const float *values, const float *gates, const float *bias, float *pooled, int slots, int width, int ratio, int overlaps,
    u64 first_group
) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    u64 group = first_group + blockIdx.y;
    int row = overlaps ? 2 * width : width;
    // Tokens of the group before, then its own.
    int begin = overlaps && group > 0 ? -ratio : 0;
    float most = __uint_as_float(0xff800000u);
    for (int t = begin; t < ratio; t++) {
        size_t slot = (group * ratio + t) % slots;
        int at = t < 0 ? i : row - width + i, place = t < 0 ? t + ratio : t;
        most = fmaxf(most, gates[slot * row + at] + bias[(size_t)place * row + at]);
    }
    float sum = 0.0f, weights = 0.0f;
    for (int t = begin; t < ratio; t++) {
        size_t slot = (group * ratio + t) % slots;
        int at = t < 0 ? i : row - width + i, place = t < 0 ? t + ratio : t;
        float weight = exp_of(gates[slot * row + at] + bias[(size_t)place * row + at] - most);
        sum += weight * values[slot * row + at];
        weights += weight;
    }
    pooled[(size_t)blockIdx.y * width + i] = sum / weights;
}
