// Attention over one shared key = value row a token: a window and selected compressed rows, with sinks. One block a head of a row.
// Never looks past the row's own position. Surprising fact: four threads share a key and own four lanes each, so scores have the bits
// of the CPU op while keys are read 16 bytes at a time.
#include "common.cuh"
#include "attention_mma.cuh"
#include "attention_spread.cuh"
#include "attention_tiles.cuh"

constexpr int THREADS = 512;

__device__ __forceinline__ void add_products(float lane[4], float4 a, float4 b) {
    lane[0] += a.x * b.x;
    lane[1] += a.y * b.y;
    lane[2] += a.z * b.z;
    lane[3] += a.w * b.w;
}

// sum + weights[0] * values[slots[0] * width] + .., in order; loads are ahead of the additions, which wait for one another.
__device__ __forceinline__ float add_rows(float sum, const float *values, const int *slots, const float *weights, int count, int width) {
    int i = 0;
    for (; i + AHEAD <= count; i += AHEAD) {
        float v[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) v[k] = values[(size_t)slots[i + k] * width];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) sum += weights[i + k] * v[k];
    }
    for (; i < count; i++) sum += weights[i] * values[(size_t)slots[i] * width];
    return sum;
}

// q, out: [rows, heads, width]; window: [window_slots, width]; compressed: [groups, width]; selected: [rows, k]; sinks: [heads].
// Grid (heads, rows); THREADS + 32 threads: the last warp adds up the softmax while the others sum values.
// Shared: width + 2 * (window_len + k) words. `width` is a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) attention(
    const float *q, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int width,
    int window_slots, int window_len, int k, int first_pos, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    __shared__ float peaks[THREADS / 32 + 1], total;
    float *query = (float *)dynamic, *weights = query + width;
    int *slots = (int *)(weights + window_len + k);
    int tid = threadIdx.x, head = blockIdx.x;
    size_t r = blockIdx.y;
    int pos = first_pos + (int)r, start = max(0, pos + 1 - window_len), in_window = pos + 1 - start;
    const int *picks = selected + r * k;

    for (int i = tid; i < width; i += blockDim.x) query[i] = q[(r * heads + head) * width + i];
    for (int i = tid; i < in_window; i += blockDim.x) slots[i] = (start + i) % window_slots;
    int picked = 0;
    for (int i = 0; i < k; i += blockDim.x) {
        int pick = i + tid < k ? picks[i + tid] : -1;
        if (pick >= 0) slots[in_window + i + tid] = pick;
        picked += __syncthreads_count(pick >= 0);
    }
    __syncthreads();
    int keys = in_window + picked;
    auto row_of = [&](int i) { return (i < in_window ? window : compressed) + (size_t)slots[i] * width; };

    // Scores: groups of four threads, one key each.
    float peak = sinks[head];
    if (tid < THREADS) {
        int t = tid % 4;
        for (int base = 0; base < keys; base += THREADS / 4) {
            int i = base + tid / 4;
            const float *row = row_of(min(i, keys - 1));
            float lane[4] = {};
            int at = 4 * t;
            for (; at + (AHEAD - 1) * LANES < width; at += AHEAD * LANES) {
                float4 v[AHEAD];
#pragma unroll
                for (int k = 0; k < AHEAD; k++) v[k] = *(const float4 *)(row + at + k * LANES);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) add_products(lane, *(const float4 *)(query + at + k * LANES), v[k]);
            }
            for (; at < width; at += LANES) add_products(lane, *(const float4 *)(query + at), *(const float4 *)(row + at));
            float score = fold_fours(lane) * scale;
            if (t == 0 && i < keys) {
                weights[i] = score;
                peak = fmaxf(peak, score);
            }
        }
    }
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL, peak, step));
    if (tid % 32 == 0) peaks[tid / 32] = peak;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) peak = fmaxf(peak, peaks[i]);
    for (int i = tid; i < keys; i += blockDim.x) weights[i] = exp_of(weights[i] - peak);
    __syncthreads();

    // Values: each thread a channel, keys in order. Meanwhile one thread sums the weights, in order too.
    if (tid == THREADS) {
        float sum = exp_of(sinks[head] - peak);
        int i = 0;
        for (; i + AHEAD <= keys; i += AHEAD) {
            float v[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) v[k] = weights[i + k];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) sum += v[k];
        }
        for (; i < keys; i++) sum += weights[i];
        total = sum;
    }
    float *to = out + (r * heads + head) * width;
    for (int base = 0; base < width; base += THREADS) {
        int at = base + tid;
        bool is_mine = tid < THREADS && at < width;
        float sum = 0.0f;
        if (is_mine) {
            sum = add_rows(sum, window + at, slots, weights, in_window, width);
            sum = add_rows(sum, compressed + at, slots + in_window, weights + in_window, picked, width);
        }
        __syncthreads();
        if (is_mine) to[at] = sum / total;
    }
}
