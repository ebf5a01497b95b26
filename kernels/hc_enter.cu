// How a sublayer of one row begins, in one launch: the mix of the streams, the coefficients made of it, the streams' weighted sum and its norm.
// Never adds in another order than the four kernels that it replaces: each raw value and each norm is one block's. Surprising fact: whichever
// block comes last makes the coefficients; the sum and its norm are a block's of their own when they take weights that were there before.
#include "sinkhorn.cuh"

// Values of a row of the matrix that a thread holds of a tile, and tiles that are on their way.
constexpr int MIX_EACH = 5, MIX_TILE = SUM_THREADS * MIX_EACH, MIX_AHEAD = 3;
static_assert(2 * 2 * MIX_TILE <= 2 * SUM_ROOM, "tiles share their memory with those of a sum");

// Types that the matrix comes in.
struct Half {
    u16 bits;
};
struct Bf16 {
    u16 bits;
};
__device__ __forceinline__ float value_of(float w) { return w; }
__device__ __forceinline__ float value_of(Half w) { return half_value(w.bits); }
__device__ __forceinline__ float value_of(Bf16 w) { return bf16_value(w.bits); }

// w . x in the 32 lanes of a product with floats, valid in thread 0. `tiles` as for `block_sum`.
template <typename W> __device__ float product(const W *__restrict__ w, const float *__restrict__ x, int cols, float *tiles) {
    float a[MIX_AHEAD][MIX_EACH], b[MIX_AHEAD][MIX_EACH], lane = 0.0f;
    int tid = threadIdx.x;
    auto fetch = [&](int d, int first) {
#pragma unroll
        for (int k = 0; k < MIX_EACH; k++) {
            int i = first + k * SUM_THREADS + tid;
            a[d][k] = i < cols ? value_of(w[i]) : 0.0f;
            b[d][k] = i < cols ? x[i] : 0.0f;
        }
    };
#pragma unroll
    for (int d = 0; d < MIX_AHEAD; d++) fetch(d, d * MIX_TILE);
    for (int first = 0, turn = 0; first < cols;) {
#pragma unroll
        for (int d = 0; d < MIX_AHEAD; d++) {
            if (first >= cols) break;
            float2 *tile = (float2 *)tiles + turn * MIX_TILE;
#pragma unroll
            for (int k = 0; k < MIX_EACH; k++) tile[k * SUM_THREADS + tid] = make_float2(a[d][k], b[d][k]);
            // The warp that adds comes here after its last tile, so that the one before may be overwritten.
            __syncthreads();
            if (first + MIX_AHEAD * MIX_TILE < cols) fetch(d, first + MIX_AHEAD * MIX_TILE);
            if (tid < 32) {
                int len = min(MIX_TILE, cols - first), i = tid;
                for (; i + (AHEAD - 1) * 32 < len; i += AHEAD * 32) {
                    float2 v[AHEAD];
#pragma unroll
                    for (int k = 0; k < AHEAD; k++) v[k] = tile[i + k * 32];
#pragma unroll
                    for (int k = 0; k < AHEAD; k++) lane = fmaf(v[k].x, v[k].y, lane);
                }
                for (; i < len; i += 32) lane = fmaf(tile[i].x, tile[i].y, lane);
            }
            first += MIX_TILE;
            turn ^= 1;
        }
    }
    if (tid < 32) {
        for (int half = 16; half > 0; half /= 2) lane = lane + __shfl_down_sync(FULL, lane, half);
    }
    return lane + 0.0f;
}

// out = norm of the streams' sum with `weights`: [n] and [n, hidden] to [hidden].
__device__ void collapse_and_norm(
    const float *streams, const float *weights, const float *norm, float *out, int n, int hidden, float eps, float *tiles
) {
    float w[STREAMS_MAX];
#pragma unroll
    for (int k = 0; k < STREAMS_MAX; k++) w[k] = k < n ? ((const volatile float *)weights)[k] : 0.0f;
    auto collapsed = [&](int i) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < STREAMS_MAX; k++) {
            if (k < n) sum += w[k] * streams[k * hidden + i];
        }
        return sum;
    };
    float sum = block_sum(hidden, tiles, [&](int i) {
        float c = collapsed(i);
        return c * c;
    });
    float factor = 1.0f / sqrtf(sum / (float)hidden + eps);
#pragma unroll 5
    for (int i = threadIdx.x; i < hidden; i += SUM_THREADS) out[i] = collapsed(i) * factor * norm[i];
}

// The same for N streams of at most SUM_TILE values: everything is read at once and kept.
template <int N>
__device__ void collapse_and_norm_kept(
    const float *streams, const float *weights, const float *norm, float *out, int hidden, float eps, float *tile
) {
    float w[N], s[SUM_EACH][N], g[SUM_EACH], v[SUM_EACH];
    int tid = threadIdx.x;
#pragma unroll
    for (int k = 0; k < N; k++) w[k] = weights[k];
#pragma unroll
    for (int e = 0; e < SUM_EACH; e++) {
        // Threads beyond the row read its last value.
        int i = min(e * SUM_THREADS + tid, hidden - 1);
#pragma unroll
        for (int k = 0; k < N; k++) s[e][k] = streams[k * hidden + i];
        g[e] = norm[i];
    }
#pragma unroll
    for (int e = 0; e < SUM_EACH; e++) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < N; k++) sum += w[k] * s[e][k];
        s[e][0] = sum;
        v[e] = e * SUM_THREADS + tid < hidden ? sum * sum : 0.0f;
    }
    float factor = 1.0f / sqrtf(block_sum_of(v, hidden, tile) / (float)hidden + eps);
#pragma unroll
    for (int e = 0; e < SUM_EACH; e++) {
        int i = e * SUM_THREADS + tid;
        if (i < hidden) out[i] = s[e][0] * factor * g[e];
    }
}

// How many blocks have ended, and the norm factor of the streams.
struct Meeting {
    u32 arrived;
    float factor;
};

// w: [n * (n + 2), n * hidden]; streams: [n, hidden]; base, mix: [n * (n + 2)]; scale: [3]; weights: [n] of the sum, or none: then it takes
// `pre`; norm, out: [hidden]; pre, post: [n]; comb: [n, n]. `meeting->arrived` is 0 before and after.
// Grid: n * (n + 2) + 1 blocks, and one more with `weights`.
template <typename W>
__device__ void enter(
    const W *w, const float *streams, const float *base, const float *scale, const float *weights, const float *norm, float *mix, float *pre,
    float *post, float *comb, float *out, Meeting *meeting, int n, int hidden, float rms_eps, float hc_eps, int iterations
) {
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    __shared__ float c[STREAMS_MAX * STREAMS_MAX];
    __shared__ bool is_last;
    int part = blockIdx.x, mix_len = n * (n + 2), len = n * hidden;
    if (part > mix_len) {
        collapse_and_norm(streams, weights, norm, out, n, hidden, rms_eps, tiles);
        return;
    }
    float *to = part == mix_len ? &meeting->factor : mix + part;
    float value = part == mix_len ? block_rms_factor(streams, len, rms_eps, tiles) : product(w + (size_t)part * len, streams, len, tiles);
    if (threadIdx.x == 0) {
        *(volatile float *)to = value;
        __threadfence();
        is_last = atomicAdd(&meeting->arrived, 1u) == (u32)mix_len;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) meeting->arrived = 0;
    float factor = *(volatile float *)&meeting->factor;
    coefficients_of(mix, factor, base, scale, pre, post, comb, c, n, hc_eps, iterations);
    if (!weights) collapse_and_norm(streams, pre, norm, out, n, hidden, rms_eps, tiles);
}

// The last block of `hc_enter` alone.
extern "C" __global__ void __launch_bounds__(SUM_THREADS, 1) hc_input(
    const float *streams, const float *weights, const float *norm, float *out, int n, int hidden, float eps
) {
    previous_ended();
    __shared__ __align__(16) float tiles[2 * SUM_ROOM];
    if (n == 4 && hidden <= SUM_TILE) {
        collapse_and_norm_kept<4>(streams, weights, norm, out, hidden, eps, tiles);
    } else {
        collapse_and_norm(streams, weights, norm, out, n, hidden, eps, tiles);
    }
}

#define ENTER(name, type) \
    extern "C" __global__ void __launch_bounds__(SUM_THREADS, 1) hc_enter_##name( \
        const type *w, const float *streams, const float *base, const float *scale, const float *weights, const float *norm, float *mix, \
        float *pre, float *post, float *comb, float *out, Meeting *meeting, int n, int hidden, float rms_eps, float hc_eps, int iterations \
    ) { \
        previous_ended(); \
        enter(w, streams, base, scale, weights, norm, mix, pre, post, comb, out, meeting, n, hidden, rms_eps, hc_eps, iterations); \
    }
ENTER(f32, float)
ENTER(f16, Half)
ENTER(bf16, Bf16)
