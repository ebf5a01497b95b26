// Mixes the residual streams and adds a sublayer's output, in place.
// Never reads a stream after it is written: a thread holds its column of all streams.
#include "common.cuh"

constexpr int STREAMS_MAX = 8;

// y: [rows, hidden]; post: [rows, n]; comb: [rows, n (source), n]; streams: [rows, n, hidden]. Grid (pieces of a row, rows).
extern "C" __global__ void hc_expand(const float *y, const float *post, const float *comb, float *streams, int n, int hidden) {
    previous_ended();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (at >= hidden) return;
    float old[STREAMS_MAX];
#pragma unroll
    for (int j = 0; j < STREAMS_MAX; j++) old[j] = j < n ? streams[(r * n + j) * hidden + at] : 0.0f;
    float value = y[r * hidden + at];
    for (int i = 0; i < n; i++) {
        float sum = post[r * n + i] * value;
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++) {
            if (j < n) sum += comb[(r * n + j) * n + i] * old[j];
        }
        streams[(r * n + i) * hidden + at] = sum;
    }
}
