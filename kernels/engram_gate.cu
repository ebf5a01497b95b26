// Gated addition of n-gram memory to the residual streams. One block a row and stream.
// Never mixes streams: each has its own key and gate, all share one value.
#include "common.cuh"

// keys_value: [rows, n + 1, hidden]; q_norm, k_norm: [n, hidden]; streams: [rows, n, hidden]; gates: [rows, n]. Grid (n, rows).
extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2) engram_gate(
    const float *keys_value, const float *q_norm, const float *k_norm, float *streams, float *gates, int n, int hidden, float rms_eps,
    float floor, float norm
) {
    previous_ended();
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    size_t r = blockIdx.y;
    int k = blockIdx.x;
    const float *key = keys_value + (r * (n + 1) + k) * hidden;
    const float *value = keys_value + (r * (n + 1) + n) * hidden;
    const float *q = q_norm + (size_t)k * hidden, *kn = k_norm + (size_t)k * hidden;
    float *stream = streams + (r * n + k) * hidden;
    float dot = block_sum(hidden, tiles, [=](int i) { return (stream[i] * q[i]) * (kn[i] * key[i]); });
    float d = dot * block_rms_factor(stream, hidden, rms_eps, tiles) * block_rms_factor(key, hidden, rms_eps, tiles) * norm;
    float gate = sigmoid(copysignf(sqrtf(fmaxf(fabsf(d), floor)), d));
    if (threadIdx.x == 0) gates[r * n + k] = gate;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) stream[i] += gate * value[i];
}
