// One activation row against Q8_0 weights in one launch: the rounding of activations, the products and their sums.
// Never adds in another order than `dots.cuh`: two threads make the whole sum of a block of 32, and the pair is the lane that it joins. Surprising
// fact: weights are on their way before the kernel that makes the activations has ended, and each block of threads rounds the whole row again,
// which takes less than what arrives meanwhile.
#pragma once
#include "dot_parts.cuh"

// Threads of a block and blocks of a multiprocessor; threads of a weight row, values of one at a time, and loads of it that are under way.
constexpr int THREADS = 256, ROW_BLOCKS = 3, ROW_SHARERS = 16, EACH = 16, UNDER_WAY = 8;
// Blocks of 32 that the threads of a row take at once, a lane each.
constexpr int ROW_LANES = 8;
static_assert(ROW_SHARERS * EACH == ROW_LANES * 32, "two threads a lane");

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

// Rounds a row of `cols` values, by all threads of the block.
__device__ __forceinline__ void round_row(const float *x, int cols, uint4 *codes, float *scales) {
    int pieces = cols / EACH;
    // Whole warps take part in each turn.
    for (int first = 0; first < pieces; first += blockDim.x) {
        int piece = first + threadIdx.x;
        bool inside = piece < pieces;
        float v[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 four = inside ? *(const float4 *)(x + piece * EACH + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[i] = four.x;
            v[i + 1] = four.y;
            v[i + 2] = four.z;
            v[i + 3] = four.w;
        }
        int words[4];
        float scale = round_half(v, words);
        if (!inside) continue;
        codes[piece] = make_uint4((u32)words[0], (u32)words[1], (u32)words[2], (u32)words[3]);
        if (piece % 2 == 0) scales[piece / 2] = scale;
    }
    __syncthreads();
}

// What a thread reads of its weight rows, one step of ROW_LANES blocks after another.
struct WeightSteps {
    // Two matrices, one behind the other, and their rows.
    const u8 *first, *second;
    int first_rows, second_rows, blocks, steps;
    // What is asked for next: step `step` of row `row`, every `row_step`th up to `end`.
    int row, row_step, end, step;
    const u8 *body, *tail;

    __device__ __forceinline__ void fetch(uint4 &codes, u16 &factor) {
        int t = threadIdx.x % ROW_SHARERS;
        if (step == 0) {
            bool is_first = row < first_rows;
            const u8 *w = is_first ? first : second;
            size_t r = is_first ? row : row - first_rows, all = is_first ? first_rows : second_rows;
            body = w + r * blocks * 32 + t * EACH;
            tail = w + (all * 32 + r * 2) * blocks + t / 2 * 2;
        }
        codes = make_uint4(0, 0, 0, 0);
        factor = 0;
        if (row < end && step * ROW_LANES + t / 2 < blocks) {
            // In this order and no later: the compiler moves nothing of it behind what follows.
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                         : "l"(body + step * (ROW_LANES * 32)));
            asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(factor) : "l"(tail + step * (ROW_LANES * 2)));
        }
        if (++step == steps) {
            step = 0;
            row += row_step;
        }
    }
};

// w: [w_rows, cols]; x: [groups, cols]; out: [w_rows]; of a second matrix on the same row likewise, or none: then `groups` is 1.
// Grid: blocks of a group, times groups. Shared: a code a column, and a scale for 32.
extern "C" __global__ void __launch_bounds__(THREADS, ROW_BLOCKS) matmul_row_q8_0(
    const u8 *w, const float *x, float *out, int w_rows, int cols, int groups, const u8 *second, float *second_out, int second_rows
) {
    setting_up();
    extern __shared__ uint4 codes[];
    float *scales = (float *)(codes + cols / EACH);
    int t = threadIdx.x % ROW_SHARERS, blocks = cols / 32;
    int group_blocks = gridDim.x / groups, group = blockIdx.x / group_blocks, rows = (w_rows + second_rows) / groups;
    // The blocks of a group take its rows in turn, so that all have as many.
    int row = group * rows + threadIdx.x / ROW_SHARERS * group_blocks + blockIdx.x % group_blocks, end = (group + 1) * rows;
    int row_step = THREADS / ROW_SHARERS * group_blocks, steps = (blocks + ROW_LANES - 1) / ROW_LANES;
    WeightSteps weights{w, second, w_rows, second_rows, blocks, steps, row, row_step, end, 0, nullptr, nullptr};
    uint4 coming[UNDER_WAY];
    u16 factors[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) weights.fetch(coming[k], factors[k]);
    previous_ended();
    round_row(x + (size_t)group * cols, cols, codes, scales);
    float lane = 0.0f;
    // Threads whose rows have ended go on with nothing, so that those of a warp stay together.
    int first_row = row - threadIdx.x % 32 / ROW_SHARERS * group_blocks, step = 0;
    while (first_row < end) {
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            if (first_row >= end) break;
            int block = step * ROW_LANES + t / 2;
            bool inside = block < blocks;
            uint4 x16 = inside ? codes[step * ROW_SHARERS + t] : make_uint4(0, 0, 0, 0);
            int sum = __dp4a((int)coming[k].y, (int)x16.y, __dp4a((int)coming[k].x, (int)x16.x, 0));
            sum = __dp4a((int)coming[k].w, (int)x16.w, __dp4a((int)coming[k].z, (int)x16.z, sum));
            sum += __shfl_xor_sync(FULL, sum, 1);
            if (inside) lane = fmaf((float)sum, half_value(factors[k]) * scales[block], lane);
            weights.fetch(coming[k], factors[k]);
            if (++step < steps) continue;
            for (int apart = ROW_LANES; apart > 1; apart /= 2) lane = lane + __shfl_down_sync(FULL, lane, apart, ROW_SHARERS);
            if (t == 0 && row < end) *(row < w_rows ? out + row : second_out + (row - w_rows)) = lane + 0.0f;
            lane = 0.0f;
            step = 0;
            row += row_step;
            first_row += row_step;
        }
    }
}
