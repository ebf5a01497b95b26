// Router: which experts a row uses, and with which weights. One block a row.
// Never lets the bias into the weights. Surprising fact: among equal scores the lower expert comes first, as on the CPU.
#include "common.cuh"
#include "router_score.cuh"

constexpr int THREADS = 512;

// logits: [rows, experts]; bias: [experts]; ids, weights: [rows, k]. Shared: two floats and a whole number an expert, and four more, since what was
// chosen is read in pairs or fours.
extern "C" __global__ void __launch_bounds__(THREADS) route(
    const float *logits, const float *bias, int *ids, float *weights, int experts, int k, float scale, int normalise
) {
    previous_ended();
    extern __shared__ float scores[];
    u32 *keys = (u32 *)(scores + experts);
    int *chosen = (int *)(keys + experts);
    int tid = threadIdx.x;
    size_t r = blockIdx.x;
    // 0 is below every score.
    for (int i = tid; i < experts; i += THREADS) {
        scores[i] = score_of(logits[r * experts + i]);
        keys[i] = max(score_key(scores[i] + bias[i]), 1u);
    }
    __syncthreads();
    // One warp chooses.
    if (tid >= 32) return;
    for (int e = 0; e < k; e++) {
        u32 best = 0, at = 0;
#pragma unroll 4
        for (int i = tid; i < experts; i += 32) {
            u32 key = keys[i];
            at = key > best ? i : at;
            best = max(best, key);
        }
        u32 top = __reduce_max_sync(FULL, best);
        u32 id = __reduce_min_sync(FULL, top && best == top ? at : FULL);
        // All have read the keys.
        __syncwarp();
        if (tid == 0) {
            chosen[e] = (int)id;
            if (top) keys[id] = 0;
        }
        __syncwarp();
    }
    // Every thread sums, in the order of choice, and writes one weight.
    for (int e = tid; e < k; e += 32) {
        float sum = 0.0f;
        for (int other = 0; other < k; other++) sum += scores[chosen[other]];
        sum = normalise ? sum + 1e-20f : 1.0f;
        ids[r * k + e] = chosen[e];
        weights[r * k + e] = scale * scores[chosen[e]] / sum;
    }
}
