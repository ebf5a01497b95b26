// One activation row against Q8_0 weights in one launch: the rounding of activations, the products and their sums.
// Never adds in another order than `dots.cuh`: whole sums of all blocks are taken by all threads at once, and one warp then adds them, eight
// lanes a weight row. Surprising fact: each block of threads rounds the whole row again, which costs less than a launch and a wait.
#pragma once
#include "dot_parts.cuh"

// Weight rows of a block, values of a thread, and threads of the largest block.
constexpr int ROWS = 4, EACH = 16, THREADS_MAX = 320;
// Lanes of a weight row.
constexpr int ROW_LANES = 8;
// Places between the rows in shared memory, beyond their sums: two rows that half a warp reads lie in different banks.
constexpr int PAD = 8;
static_assert(ROWS * ROW_LANES == 32, "one warp adds");

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

// w: [w_rows, cols]; x: [groups, cols]; out: [w_rows]; of a second matrix on the same row likewise, or none. Rows of a block are of one
// group. Grid (w_rows / ROWS + second_rows / ROWS); whole warps of threads, 16 values each. Shared: ROWS times a sum and its factor for each 32 columns of a turn and PAD more.
extern "C" __global__ void __launch_bounds__(THREADS_MAX, 3) matmul_row_q8_0(
    const u8 *w, const float *x, float *out, int w_rows, int cols, int groups, const u8 *second, float *second_out, int second_rows
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    int tid = threadIdx.x, turn = blockDim.x * EACH, stride = turn / 32 + PAD, is_odd = tid & 1;
    float2 *sums = (float2 *)dynamic;
    int blocks = cols / 32, first = blockIdx.x * ROWS, others = (w_rows + ROWS - 1) / ROWS * ROWS;
    if (first >= others) {
        first -= others;
        w = second;
        out = second_out;
        w_rows = second_rows;
    }
    const float *act = x + (size_t)(first / (w_rows / groups)) * cols;
    const u8 *tails = w + (size_t)w_rows * cols;
    float lane = 0.0f;
    for (int start = 0; start < cols; start += turn) {
        int at = start + tid * EACH;
        bool inside = at < cols;
        uint4 codes[ROWS];
        float d[ROWS / 2], v[EACH];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            // Rows beyond the last are computed and not written.
            size_t row = min(first + r, w_rows - 1);
            codes[r] = inside ? stream16(w + row * cols + at) : make_uint4(0, 0, 0, 0);
        }
        // A thread keeps two rows of its block, its neighbour the other two.
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            size_t row = min(first + is_odd * (ROWS / 2) + i, w_rows - 1);
            d[i] = inside ? half_at(tails + (row * blocks + at / 32) * 2) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 four = inside ? *(const float4 *)(act + at + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[i] = four.x;
            v[i + 1] = four.y;
            v[i + 2] = four.z;
            v[i + 3] = four.w;
        }
        int words[4], halves[ROWS];
        float scale = round_half(v, words);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int low = __dp4a((int)codes[r].y, words[1], __dp4a((int)codes[r].x, words[0], 0));
            halves[r] = __dp4a((int)codes[r].w, words[3], __dp4a((int)codes[r].z, words[2], low));
        }
        // The warp that adds has done so with the turn before.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            int kept = is_odd ? halves[ROWS / 2 + i] : halves[i], given = is_odd ? halves[i] : halves[ROWS / 2 + i];
            kept += __shfl_xor_sync(FULL, given, 1);
            sums[(is_odd * (ROWS / 2) + i) * stride + tid / 2] = make_float2((float)kept, d[i] * scale);
        }
        __syncthreads();
        if (tid < 32) {
            int count = min(turn, cols - start) / 32;
            const float2 *from = sums + tid / ROW_LANES * stride;
#pragma unroll 8
            for (int b = tid % ROW_LANES; b < count; b += ROW_LANES) lane = fmaf(from[b].x, from[b].y, lane);
        }
    }
    if (tid >= 32) return;
    for (int half = ROW_LANES / 2; half > 0; half /= 2) lane = lane + __shfl_down_sync(FULL, lane, half, ROW_LANES);
    int row = first + tid / ROW_LANES;
    if (tid % ROW_LANES == 0 && row < w_rows) out[row] = lane + 0.0f;
}
