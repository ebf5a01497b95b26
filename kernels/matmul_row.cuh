// One activation row against Q8_0 weights in one launch: the rounding of activations, the products and their sums.
// Never adds in another order than `dots.cuh`: the integer sums of four products are taken by all threads at once, and 16 threads a weight
// row then add them in their lanes. Surprising fact: each block rounds the whole row again, which costs less than a launch and a wait.
#pragma once
#include "dot_parts.cuh"

// Weight rows of a block, values of a thread, and threads of the largest block.
constexpr int ROWS = 4, EACH = 16, THREADS_MAX = 320;
// Floats between the rows in shared memory, beyond their sums: two rows that a warp reads lie in different banks.
constexpr int PAD = 16;

// Rounds 16 values of a block of 32; the neighbour has the other 16. Returns the scale.
__device__ __forceinline__ float round_half(const float v[EACH], int words[4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
    most = max(most, __shfl_xor_sync(FULL, most, 1));
    float amax = __uint_as_float(most);
    bool is_finite = most < 0x7f800000u, is_zero = !is_finite || amax < 1.0e-36f;
    float inverse = 127.0f / amax;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code = is_zero ? 0 : __float_as_uint(v[4 * w + i] * inverse + 12582912.0f) - 0x4b400000u;
            word |= (code & 255) << (8 * i);
        }
        words[w] = (int)word;
    }
    return !is_finite ? __uint_as_float(0x7fc00000u) : is_zero ? 0.0f : amax / 127.0f;
}

// w: [w_rows, cols]; x: [groups, cols]; out: [w_rows]. Rows of a block are of one group. Grid (w_rows / ROWS); whole warps of threads,
// 16 values each. Shared: (cols of a turn / 4 + PAD) * ROWS sums, then ROWS factors for each 32 columns of a turn.
extern "C" __global__ void __launch_bounds__(THREADS_MAX, 3) matmul_row_q8_0(
    const u8 *w, const float *x, float *out, int w_rows, int cols, int groups
) {
    extern __shared__ float4 dynamic[];
    int tid = threadIdx.x, turn = blockDim.x * EACH, stride = turn / 4 + PAD;
    float *sums = (float *)dynamic, *factors = sums + ROWS * stride;
    int first = blockIdx.x * ROWS, blocks = cols / 32;
    const float *act = x + (size_t)(first / (w_rows / groups)) * cols;
    const u8 *tails = w + (size_t)w_rows * cols;
    float lane[ROWS * LANES / 32] = {};
    for (int start = 0; start < cols; start += turn) {
        int at = start + tid * EACH;
        bool inside = at < cols;
        uint4 codes[ROWS];
        float d[ROWS], v[EACH];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            // Rows beyond the last are computed and not written.
            size_t row = min(first + r, w_rows - 1);
            codes[r] = inside ? stream16(w + row * cols + at) : make_uint4(0, 0, 0, 0);
            d[r] = inside ? half_at(tails + (row * blocks + at / 32) * 2) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 four = inside ? *(const float4 *)(act + at + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[i] = four.x;
            v[i + 1] = four.y;
            v[i + 2] = four.z;
            v[i + 3] = four.w;
        }
        int words[4];
        float scale = round_half(v, words);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 four;
            four.x = (float)__dp4a((int)codes[r].x, words[0], 0);
            four.y = (float)__dp4a((int)codes[r].y, words[1], 0);
            four.z = (float)__dp4a((int)codes[r].z, words[2], 0);
            four.w = (float)__dp4a((int)codes[r].w, words[3], 0);
            *(float4 *)(sums + r * stride + 4 * tid) = four;
            if (tid % 2 == 0) factors[r * (turn / 32) + tid / 2] = d[r] * scale;
        }
        __syncthreads();
        // Lanes 0 to 7 take even blocks, 8 to 15 odd ones. Only the first warps have lanes: all of one take part or none.
        int count = min(turn, cols - start) / 32;
#pragma unroll
        for (int k = 0; k < ROWS * LANES / 32; k++) {
            int pair = tid + k * blockDim.x, r = pair / LANES, l = pair % LANES;
            if (pair >= ROWS * LANES) break;
            const float *sum = sums + r * stride + l, *factor = factors + r * (turn / 32) + l / 8;
            float value = lane[k];
#pragma unroll 16
            for (int b = l / 8; b < count; b += 2, sum += 16, factor += 2) value = fmaf(*sum, *factor, value);
            lane[k] = value;
        }
    }
#pragma unroll
    for (int k = 0; k < ROWS * LANES / 32; k++) {
        int pair = tid + k * blockDim.x;
        if (pair >= ROWS * LANES) break;
        float sum = lane[k];
        for (int half = LANES / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(FULL, sum, half, LANES);
        if (pair % LANES == 0 && first + pair / LANES < w_rows) out[first + pair / LANES] = sum + 0.0f;
    }
}
