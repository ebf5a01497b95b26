// Weights of experts that a table names. One thread a row: there are few.
// Never looks at experts that were not named. Surprising fact: the sum runs in the order of the table.
#include "common.cuh"
#include "router_score.cuh"

// logits: [rows, experts]; ids, weights: [rows, k].
extern "C" __global__ void weigh_experts(
    const float *logits, const int *ids, float *weights, int rows, int experts, int k, float scale, int normalise
) {
    previous_ended();
    size_t r = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    float sum = 0.0f;
    for (int e = 0; e < k; e++) {
        float weight = score_of(logits[r * experts + ids[r * k + e]]);
        weights[r * k + e] = weight;
        sum += weight;
    }
    sum = normalise ? sum + 1e-20f : 1.0f;
    for (int e = 0; e < k; e++) weights[r * k + e] = scale * weights[r * k + e] / sum;
}
