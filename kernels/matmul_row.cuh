// One activation row against Q8_0 weights in one launch: the rounding of activations, the products and their sums.
// Never adds in another order than `dots.cuh`: whole sums of all blocks are taken by all threads at once, and one warp then adds them, eight
// lanes a weight row. Surprising fact: each block of threads rounds the whole row again, which costs less than a launch and a wait, and keeps its
// codes in registers for all weight rows that it takes.
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

// The weight rows of a group, ROWS of them at a time: units. Those of a second matrix on the same activations follow.
struct RowUnits {
    const u8 *w, *second;
    float *out, *second_out;
    // Rows of both matrices; of the first those from `from` to `end` are meant.
    int rows, second_rows, from, end, cols;

    // A unit's rows: the matrix that they are of, how many that has, the first one and how many there are behind that.
    struct Rows {
        bool is_first;
        int all, row, last;
    };

    __device__ __forceinline__ int first_units() const { return (end - from + ROWS - 1) / ROWS; }
    __device__ __forceinline__ int count() const { return first_units() + (second_rows + ROWS - 1) / ROWS; }

    __device__ __forceinline__ Rows rows_of(int unit) const {
        int behind = unit - first_units();
        if (behind < 0) return Rows{true, rows, from + unit * ROWS, end - 1 - from - unit * ROWS};
        return Rows{false, second_rows, behind * ROWS, second_rows - 1 - behind * ROWS};
    }

    // A thread's weights of `unit`, 16 columns of each row from `at` on, and the factors of two of the rows: a thread keeps two rows of its block, its
    // neighbour the other two.
    __device__ __forceinline__ void fetch(int unit, int at, uint4 codes[ROWS], u16 factors[ROWS / 2]) const {
        int is_odd = threadIdx.x & 1, blocks = cols / 32;
        Rows r = rows_of(unit);
        bool inside = unit < count() && at < cols;
        const u8 *matrix = r.is_first ? w : second, *body = matrix + (size_t)r.row * cols + at;
        const u8 *tail = matrix + (size_t)r.all * cols + ((size_t)r.row * blocks + at / 32) * 2;
        // Rows beyond the last are computed and not written.
#pragma unroll
        for (int i = 0; i < ROWS; i++) codes[i] = inside ? stream16(body + min(i, r.last) * cols) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) factors[i] = inside ? *(const u16 *)(tail + min(is_odd * (ROWS / 2) + i, r.last) * blocks * 2) : 0;
    }

    __device__ __forceinline__ void put(int unit, int i, float value) const {
        Rows r = rows_of(unit);
        if (i <= r.last) (r.is_first ? out : second_out)[r.row + i] = value;
    }
};

// Every `step`-th unit from `unit` on. Shared: for two units a sum and its factor for each block of ROWS rows, and PAD more.
template <int TURNS> __device__ __forceinline__ void multiply_row(const RowUnits &units, const float *x, int unit, int step) {
    extern __shared__ float4 dynamic[];
    int tid = threadIdx.x, turn = blockDim.x * EACH, stride = TURNS * turn / 32 + PAD, is_odd = tid & 1, count = units.count();
    uint4 codes[ROWS];
    u16 factors[ROWS / 2];
    units.fetch(unit, tid * EACH, codes, factors);
    int words[TURNS][4];
    float scales[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        int at = t * turn + tid * EACH;
        float v[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 four = at < units.cols ? *(const float4 *)(x + at + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[i] = four.x;
            v[i + 1] = four.y;
            v[i + 2] = four.z;
            v[i + 3] = four.w;
        }
        scales[t] = round_half(v, words[t]);
    }
    for (int is_other = 0; unit < count; unit += step, is_other ^= 1) {
        // The warp that adds comes here after its last unit, so that the one before may be overwritten.
        float2 *sums = (float2 *)dynamic + is_other * ROWS * stride;
#pragma unroll
        for (int t = 0; t < TURNS; t++) {
            int halves[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int low = __dp4a((int)codes[r].y, words[t][1], __dp4a((int)codes[r].x, words[t][0], 0));
                halves[r] = __dp4a((int)codes[r].w, words[t][3], __dp4a((int)codes[r].z, words[t][2], low));
            }
            float d[ROWS / 2];
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) d[i] = half_value(factors[i]);
            // What comes next is on its way while this is summed.
            units.fetch(t + 1 < TURNS ? unit : unit + step, (t + 1) % TURNS * turn + tid * EACH, codes, factors);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                int kept = is_odd ? halves[ROWS / 2 + i] : halves[i], given = is_odd ? halves[i] : halves[ROWS / 2 + i];
                kept += __shfl_xor_sync(FULL, given, 1);
                sums[(is_odd * (ROWS / 2) + i) * stride + t * turn / 32 + tid / 2] = make_float2((float)kept, d[i] * scales[t]);
            }
        }
        __syncthreads();
        if (tid >= 32) continue;
        float lane = 0.0f;
        const float2 *from = sums + tid / ROW_LANES * stride;
#pragma unroll 8
        for (int b = tid % ROW_LANES; b < units.cols / 32; b += ROW_LANES) lane = fmaf(from[b].x, from[b].y, lane);
        for (int half = ROW_LANES / 2; half > 0; half /= 2) lane = lane + __shfl_down_sync(FULL, lane, half, ROW_LANES);
        if (tid % ROW_LANES == 0) units.put(unit, tid / ROW_LANES, lane + 0.0f);
    }
}

// w: [w_rows, cols]; x: [groups, cols]; out: [w_rows]; of a second matrix on the same row likewise, or none: then `groups` is 1. Grid: as many blocks for
// each group as run at once, or one for each unit; whole warps of threads, 16 values each in TURNS turns. Shared: see `multiply_row`.
#define MULTIPLY_ROW(turns) \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 3) matmul_row_q8_0_##turns( \
        const u8 *w, const float *x, float *out, int w_rows, int cols, int groups, const u8 *second, float *second_out, int second_rows \
    ) { \
        previous_ended(); \
        int group = blockIdx.x % groups, rows = w_rows / groups; \
        RowUnits units{w, second, out, second_out, w_rows, second_rows, group * rows, group * rows + rows, cols}; \
        multiply_row<turns>(units, x + (size_t)group * cols, blockIdx.x / groups, gridDim.x / groups); \
    }
MULTIPLY_ROW(1)
MULTIPLY_ROW(2)
