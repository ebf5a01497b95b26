// Products of weight rows with activation rows, and what prepares both: weights arranged, activations rounded to 8 bits a block.
// Never lets the number of rows change a bit: each (weight row, activation row) pair is summed alone, in the lanes of the CPU op.
// Surprising fact: the threads that share a weight row own whole lanes, so integer sums and F32 sums equal the CPU's bit for bit.
#include "arrange.cuh"
#include "dots.cuh"
#include "float_strips.cuh"
#include "matmul_row.cuh"
#include "quantise.cuh"
#include "tiles_jobs.cuh"

// Codes of x with one scale for each BLOCK values, and sums of 16 codes.
// x: row `from` of it becomes row blockIdx.y of codes: [rows, cols]; scales: [rows, cols / BLOCK]; sums: [rows, cols / 16]. Grid (warps of a row,
// rows).
template <int BLOCK> __device__ void quantise(const float *x, size_t from, i8 *codes, float *scales, i16 *sums, int cols) {
    int lane = threadIdx.x % 32, at = first_of_eight();
    size_t row = blockIdx.y;
    bool inside = at < cols;
    float v[8];
    read_eight(v, x + from * cols + at, inside);
    RoundedEight r = round_eight<BLOCK>(v);
    if (!inside) return;
    *(uint2 *)(codes + row * cols + at) = r.codes;
    if (lane % (BLOCK / 8) == 0) scales[row * (cols / BLOCK) + at / BLOCK] = r.scale;
    if (lane % 2 == 0) sums[row * (cols / 16) + at / 16] = (i16)r.sum;
}

extern "C" __global__ void quantise_32(const float *x, i8 *codes, float *scales, i16 *sums, int cols) {
    previous_ended();
    quantise<32>(x, blockIdx.y, codes, scales, sums, cols);
}

extern "C" __global__ void quantise_256(const float *x, i8 *codes, float *scales, i16 *sums, int cols) {
    previous_ended();
    quantise<256>(x, blockIdx.y, codes, scales, sums, cols);
}

// The same of rows indices[first] and on.
extern "C" __global__ void quantise_rows_32(const float *x, const int *indices, i8 *codes, float *scales, i16 *sums, int first, int cols) {
    previous_ended();
    quantise<32>(x, indices[first + blockIdx.y], codes, scales, sums, cols);
}

extern "C" __global__ void quantise_rows_256(const float *x, const int *indices, i8 *codes, float *scales, i16 *sums, int first, int cols) {
    previous_ended();
    quantise<256>(x, indices[first + blockIdx.y], codes, scales, sums, cols);
}

// One row; more are multiplied by kernels/eights.cuh and kernels/tiles.cuh. out: [w_rows]. Grid (weight rows / DOT_ROWS).
template <int T> __device__ void matmul_codes(const u8 *w, Acts acts, float *out, int w_rows, int cols, int groups) {
    const Iq2Tables *tables = tables_for<T>();
    int o = blockIdx.x * DOT_ROWS<T, true> + threadIdx.x / ROW_THREADS<T>;
    // Threads beyond the last row compute it again: all of a warp must take part in the fold.
    int row = min(o, w_rows - 1);
    size_t group = row / (w_rows / groups);
    float sum;
    dot_row<T, 1>(w, w_rows, cols, row, tables, acts, &group, &sum);
    if (threadIdx.x % ROW_THREADS<T> == 0 && o < w_rows) out[o] = sum;
}

#define CODES(name, type) \
    extern "C" __global__ void __launch_bounds__(DOT_THREADS<type, true>, DOT_BLOCKS<type, 1, true>) matmul_##name##_codes( \
        const u8 *w, const i8 *codes, const float *scales, const i16 *sums, float *out, int w_rows, int cols, int groups \
    ) { \
        previous_ended(); \
        matmul_codes<type>(w, Acts{codes, scales, sums}, out, w_rows, cols, groups); \
    }
CODES(q8_0, Q8_0)
CODES(q2_k, Q2_K)
CODES(q3_k, Q3_K)
CODES(q4_k, Q4_K)
CODES(q6_k, Q6_K)
CODES(iq2_xxs, IQ2_XXS)
CODES(mxfp4, MXFP4)

// Sum of 32 lanes, one a thread, in the CPU's order; valid in thread 0 of the warp.
__device__ __forceinline__ float fold_warp(float lane) {
    lane = lane + __shfl_down_sync(FULL, lane, 16);
    lane = lane + __shfl_down_sync(FULL, lane, 8);
    lane = lane + __shfl_down_sync(FULL, lane, 4);
    lane = lane + __shfl_down_sync(FULL, lane, 2);
    lane = lane + __shfl_down_sync(FULL, lane, 1);
    return lane + 0.0f;
}

constexpr int FLOAT_THREADS = 128;

// F32 activations x: [rows, groups, cols] against decoded weights, one warp a weight row. Grid (weight rows / 4, activation rows / N).
template <int T, int N>
__device__ void matmul_floats(const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups) {
    int lane = threadIdx.x % 32, o = blockIdx.x * (FLOAT_THREADS / 32) + threadIdx.x / 32;
    if (o >= w_rows) return;
    int first = blockIdx.y * N, group = o / (w_rows / groups);
    float sums[N] = {};
    const float *act[N];
#pragma unroll
    for (int n = 0; n < N; n++) act[n] = x + ((size_t)min(first + n, rows - 1) * groups + group) * cols;
#pragma unroll 8
    for (int i = lane; i < cols; i += 32) {
        float value = weight_at<T>(w, w_rows, cols, o, i);
#pragma unroll
        for (int n = 0; n < N; n++) sums[n] = fmaf(value, act[n][i], sums[n]);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sum = fold_warp(sums[n]);
        if (lane == 0 && first + n < rows) out[(size_t)(first + n) * w_rows + o] = sum;
    }
}

#define FLOATS_N(name, type, n) \
    extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 6) matmul_##name##_floats_##n( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int rows, int groups \
    ) { \
        previous_ended(); \
        matmul_floats<type, n>(w, x, out, w_rows, cols, rows, groups); \
    }
#define FLOATS(name, type) FLOATS_N(name, type, 1) FLOATS_N(name, type, 4)
FLOATS(f32, F32)
FLOATS(f16, F16)
FLOATS(bf16, BF16)
FLOATS_N(q8_0, Q8_0, 1)
FLOATS_N(q2_k, Q2_K, 1)
FLOATS_N(q3_k, Q3_K, 1)
FLOATS_N(q4_k, Q4_K, 1)
FLOATS_N(q6_k, Q6_K, 1)
FLOATS_N(iq2_xxs, IQ2_XXS, 1)
FLOATS_N(mxfp4, MXFP4, 1)

// As `matmul_floats`, one block a pair of rows, for matrices with few rows: all threads fetch, one warp adds. Grid (weight rows,
// activation rows).
constexpr int WIDE_THREADS = 256, WIDE_TILE = 2048, WIDE_EACH = WIDE_TILE / WIDE_THREADS;

template <int T> __device__ void matmul_wide(const u8 *w, const float *x, float *out, int w_rows, int cols, int groups) {
    __shared__ float weights[WIDE_TILE], values[WIDE_TILE];
    int o = blockIdx.x, tid = threadIdx.x;
    const float *act = x + ((size_t)blockIdx.y * groups + o / (w_rows / groups)) * cols;
    float a[WIDE_EACH], b[WIDE_EACH], lane = 0.0f;
    auto fetch = [&](int first) {
#pragma unroll
        for (int k = 0; k < WIDE_EACH; k++) {
            int i = first + k * WIDE_THREADS + tid;
            a[k] = i < cols ? weight_at<T>(w, w_rows, cols, o, i) : 0.0f;
            b[k] = i < cols ? act[i] : 0.0f;
        }
    };
    fetch(0);
    for (int first = 0; first < cols; first += WIDE_TILE) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < WIDE_EACH; k++) {
            weights[k * WIDE_THREADS + tid] = a[k];
            values[k * WIDE_THREADS + tid] = b[k];
        }
        __syncthreads();
        if (first + WIDE_TILE < cols) fetch(first + WIDE_TILE);
        if (tid < 32) {
            int len = min(WIDE_TILE, cols - first);
            int i = tid;
            for (; i + (AHEAD - 1) * 32 < len; i += AHEAD * 32) {
                float v[AHEAD], u[AHEAD];
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    v[k] = weights[i + k * 32];
                    u[k] = values[i + k * 32];
                }
#pragma unroll
                for (int k = 0; k < AHEAD; k++) lane = fmaf(v[k], u[k], lane);
            }
            for (; i < len; i += 32) lane = fmaf(weights[i], values[i], lane);
        }
    }
    if (tid >= 32) return;
    lane = fold_warp(lane);
    if (tid == 0) out[(size_t)blockIdx.y * w_rows + o] = lane;
}

#define WIDE(name, type) \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 3) matmul_##name##_wide( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int groups \
    ) { \
        previous_ended(); \
        matmul_wide<type>(w, x, out, w_rows, cols, groups); \
    }
WIDE(f32, F32)
WIDE(f16, F16)
WIDE(bf16, BF16)
