// Router: which experts a row uses, and with which weights. One block a row.
// Never lets the bias into the weights. Surprising fact: among equal scores the lower expert comes first, as on the CPU.
#include "common.cuh"
#include "router_score.cuh"

constexpr int THREADS = 128;

// logits: [rows, experts]; bias: [experts]; ids, weights: [rows, k]. Shared: a 64-bit word and a float an expert.
extern "C" __global__ void __launch_bounds__(THREADS) route(
    const float *logits, const float *bias, int *ids, float *weights, int experts, int k, float scale, int normalise
) {
    previous_ended();
    extern __shared__ u64 ranks[];
    float *scores = (float *)(ranks + experts);
    __shared__ u64 bests[THREADS / 32];
    int tid = threadIdx.x;
    size_t r = blockIdx.x;
    const float *row = logits + r * experts;
    // Larger is better: the score, then the lower index. 0 is below every score.
    for (int i = tid; i < experts; i += THREADS) {
        scores[i] = score_of(row[i]);
        ranks[i] = ((u64)score_key(scores[i] + bias[i]) << 32) | (u32)~i;
    }
    __syncthreads();
    for (int e = 0; e < k; e++) {
        u64 best = 0;
        for (int i = tid; i < experts; i += THREADS) best = max(best, ranks[i]);
        for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(FULL, best, step));
        if (tid % 32 == 0) bests[tid / 32] = best;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++) best = max(best, bests[w]);
        int id = best ? (int)~(u32)best : -1;
        if (tid == 0) {
            ids[r * k + e] = id;
            if (id >= 0) ranks[id] = 0;
        }
        __syncthreads();
    }
    // Every thread sums, in the order of choice, and writes one weight.
    for (int e = tid; e < k; e += THREADS) {
        float sum = 0.0f;
        for (int other = 0; other < k; other++) sum += scores[ids[r * k + other]];
        sum = normalise ? sum + 1e-20f : 1.0f;
        weights[r * k + e] = scale * scores[ids[r * k + e]] / sum;
    }
}
