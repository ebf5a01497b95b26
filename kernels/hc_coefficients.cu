// Coefficients of the hyper-connections: sigmoid weights and a Sinkhorn-normalised combination matrix. One block a row.
// Never touches the streams beyond their norm. Surprising fact: the norm factor is applied to the mixed values, not to the streams.
#include "sinkhorn.cuh"

// streams: [rows, n, hidden]; mix: [rows, n * (n + 2)]; base: [n * (n + 2)]; scale: [3];
// pre, post: [rows, n]; comb: [rows, n, n].
extern "C" __global__ void __launch_bounds__(SUM_THREADS, 2) hc_coefficients(
    const float *streams, const float *mix, const float *base, const float *scale, float *pre, float *post, float *comb, int n, int hidden,
    float rms_eps, float hc_eps, int iterations
) {
    previous_ended();
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    __shared__ float c[STREAMS_MAX * STREAMS_MAX];
    size_t r = blockIdx.x;
    int len = n * hidden, mix_len = n * (n + 2);
    float factor = block_rms_factor(streams + r * len, len, rms_eps, tiles);
    coefficients_of(
        mix + r * mix_len, factor, base, scale, pre + r * n, post + r * n, comb + r * n * n, c, n, hc_eps, iterations
    );
}
