// Products of many activation rows with weights in blocks of 32, on tensor cores.
// Never sums otherwise than kernels/dots.cuh: a block's whole number is exact, and joins running sum `block % 8`.
// Surprising fact: whole numbers become floats without a conversion: the tensor cores add to the bits of 1.5 * 2^23, and a subtraction gives
// the exact float.
#pragma once
#include "quantise.cuh"
#include "tiles.cuh"

// Blocks of a step, of one residue of eight: 256 codes a row.
constexpr int STEP_BLOCKS = 4, PITCH_32 = 32 * STEP_BLOCKS, PIECES_32 = 2 * STEP_BLOCKS;

// Shared memory of a step.
template <int HIGH> struct alignas(16) Step32 {
    u8 rows[TILE_ROWS<HIGH> * PITCH_32];
    u8 weights[TILE_WEIGHTS * PITCH_32];
    // [block, row].
    float scales[STEP_BLOCKS][TILE_ROWS<HIGH>];
    float factors[STEP_BLOCKS][TILE_WEIGHTS];
};

// What a thread has on the way in registers: factors, and the codes of types that are unpacked.
template <int T, int HIGH> struct Coming32 {
    static constexpr int FACTORS = STEP_BLOCKS * TILE_WEIGHTS / TILE_THREADS<HIGH>;
    u32 factors[FACTORS];
    uint4 codes[T == MXFP4 ? FACTORS : 1];
};

// Place of block `b` of a row whose blocks are sorted by residue, so that a step reads them in a row.
__device__ __forceinline__ int sorted_place(int blocks, int b) { return b % 8 * (blocks / 8) + min(b % 8, blocks % 8) + b / 8; }

// Rounds x [rows, groups, cols] for tiles: codes [rows, groups, sorted block, 32]; scales [groups, sorted block, padded] with `padded` rows, a
// multiple of 4. Grid (warps of a row, padded x groups).
extern "C" __global__ void quantise_tiles_32(const float *x, i8 *codes, float *scales, int cols, int rows, int groups, int padded) {
    previous_ended();
    int lane = threadIdx.x % 32, at = first_of_eight(), row = (int)blockIdx.y / groups, group = (int)blockIdx.y % groups;
    // Rows beyond the last are it again.
    size_t from = (size_t)min(row, rows - 1) * groups + group;
    bool inside = at < cols;
    float v[8];
    read_eight(v, x + from * cols + at, inside);
    RoundedEight r = round_eight<32>(v);
    if (!inside) return;
    int blocks = cols / 32, place = sorted_place(blocks, at / 32);
    if (row < rows) *(uint2 *)(codes + (from * blocks + place) * 32 + at % 32) = r.codes;
    if (lane % 4 == 0) scales[((size_t)group * blocks + place) * padded + row] = r.scale;
}

// An expert among several (IS_JOB) may begin at any row: its scales come one by one.
template <int T, int HIGH, bool IS_JOB = false> struct Tiles32 {
    static constexpr int THREADS = TILE_THREADS<HIGH>, ROWS_EACH = TILE_ROWS<HIGH> * PIECES_32 / THREADS, WEIGHTS_EACH = TILE_WEIGHTS * PIECES_32 / THREADS;
    // Rows from one piece of a thread to its next.
    static constexpr int STRIDE = THREADS / PIECES_32;
    using Walk32 = Walk<8, STEP_BLOCKS>;
    Tile tile;
    int w_rows, blocks, padded, scale_rows;
    u32 has_rows, has_weights, has_factors;
    // Of this thread's first piece, of block 0: activation codes (a block sorted first), weights, factors, and scales of four rows.
    const i8 *codes;
    const u8 *w, *tail;
    const float *scales;

    __device__ __forceinline__ Tiles32(
        const u8 *w_all, const i8 *codes_all, const float *scales_all, Tile tile, int w_rows, int blocks, int padded
    )
        : tile(tile), w_rows(w_rows), blocks(blocks), padded(padded), scale_rows(IS_JOB ? tile.rows : padded) {
        int row = threadIdx.x / PIECES_32, piece = threadIdx.x % PIECES_32;
        codes = codes_all + ((u64)(tile.first + row) * tile.groups + tile.group) * blocks * 32 + piece * 16;
        w = w_all + ((u64)(tile.o + row) * blocks + piece / 2 * 8) * 32 + piece % 2 * 16;
        u64 factor = (u64)(tile.o + threadIdx.x / STEP_BLOCKS) * blocks + threadIdx.x % STEP_BLOCKS * 8;
        if constexpr (T == MXFP4) w = w_all + factor * 16;
        tail = w_all + ((u64)w_rows * blocks * Block<T>::BODY + factor * Block<T>::TAIL);
        scales = scales_all + (u64)tile.group * blocks * padded + tile.first;
        has_rows = existing(tile.first + row, STRIDE, tile.rows);
        has_weights = existing(tile.o + row, STRIDE, tile.end);
        has_factors = existing(tile.o + threadIdx.x / STEP_BLOCKS, THREADS / STEP_BLOCKS, tile.end);
    }

    // Starts the copies of a step, and the loads of what has to be changed.
    __device__ __forceinline__ void begin(const Walk32 &at, Step32<HIGH> &to, Coming32<T, HIGH> &coming) const {
        int tid = threadIdx.x, row = tid / PIECES_32, piece = tid % PIECES_32, first = at.block(), count = at.count();
        int place = sorted_place(blocks, first);
        bool is_block = piece / 2 < count;
        u32 rows_at = shared_address(to.rows), weights_at = shared_address(to.weights);
        const i8 *from = codes + place * 32;
        u32 wanted = is_block ? has_rows : 0;
#pragma unroll
        for (int k = 0; k < ROWS_EACH; k++) {
            copy16(rows_at + piece_place(row + k * STRIDE, piece, PITCH_32), from, wanted >> k & 1);
            from += (size_t)(STRIDE * 32) * tile.groups * blocks;
        }
        if constexpr (T == Q8_0) {
            const u8 *next = w + first * 32;
            u32 wanted = is_block ? has_weights : 0;
#pragma unroll
            for (int k = 0; k < WEIGHTS_EACH; k++) {
                copy16(weights_at + piece_place(row + k * STRIDE, piece, PITCH_32), next, wanted >> k & 1);
                next += (size_t)(STRIDE * 32) * blocks;
            }
        }
        constexpr int FOURS = TILE_ROWS<HIGH> / 4;
        int four = tid % FOURS * 4, b = tid / FOURS;
        const float *scale = scales + (u64)(place + b) * padded + four;
        if constexpr (IS_JOB) {
#pragma unroll
            for (int i = 0; i < 4; i++) copy4(shared_address(&to.scales[b][four] + i), scale + i, b < count && tile.first + four + i < scale_rows);
        } else {
            copy16(shared_address(&to.scales[b][four]), scale, b < count && tile.first + four < scale_rows);
        }
        u32 factors = tid % STEP_BLOCKS < count ? has_factors : 0;
#pragma unroll
        for (int k = 0; k < Coming32<T, HIGH>::FACTORS; k++) {
            bool inside = factors >> k & 1;
            size_t block = (size_t)(k * (THREADS / STEP_BLOCKS)) * blocks + first;
            coming.factors[k] = inside ? fetch_factor<T>(tail + block * Block<T>::TAIL) : 0;
            if constexpr (T == MXFP4) coming.codes[k] = inside ? *(const uint4 *)(w + block * 16) : make_uint4(0, 0, 0, 0);
        }
    }

    // What came in registers goes where the step looks for it.
    __device__ __forceinline__ void finish(Step32<HIGH> &to, const Coming32<T, HIGH> &coming) const {
#pragma unroll
        for (int k = 0; k < Coming32<T, HIGH>::FACTORS; k++) {
            int i = k * THREADS + (int)threadIdx.x, row = i / STEP_BLOCKS, b = i % STEP_BLOCKS;
            to.factors[b][row] = factor_of<T>(coming.factors[k]);
            if constexpr (T == MXFP4) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 low = word_of(coming.codes[k], 2 * half), high = word_of(coming.codes[k], 2 * half + 1);
                    uint4 bytes = make_uint4(mxfp4_bytes(low), mxfp4_bytes(low >> 16), mxfp4_bytes(high), mxfp4_bytes(high >> 16));
                    *(uint4 *)(to.weights + piece_place(row, 2 * b + half, PITCH_32)) = bytes;
                }
            }
        }
    }

    // Codes of a block that a warp multiplies.
    struct Fragments {
        u32 rows[MT][4], weights[NT / 2][4];
        __device__ __forceinline__ void load(u32 rows_at, u32 weights_at, int b, int row, int weight) {
#pragma unroll
            for (int i = 0; i < MT; i++) load_rows(rows[i], rows_at, row + 16 * i, 2 * b, PITCH_32);
#pragma unroll
            for (int j = 0; j < NT / 2; j++) load_weights(weights[j], weights_at, weight + 16 * j, 2 * b, PITCH_32);
        }
    };

    // The blocks of a step join the running sums.
    __device__ __forceinline__ static void add(const Step32<HIGH> &from, int count, float (&now)[OUTPUTS], int row, int weight) {
        constexpr int MAGIC = 0x4b400000;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        u32 rows_at = shared_address(from.rows), weights_at = shared_address(from.weights);
        const int base[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
        Fragments codes;
        codes.load(rows_at, weights_at, 0, row, weight);
#pragma unroll 1
        for (int b = 0; b < count; b++) {
            int whole[MT * NT][4];
#pragma unroll
            for (int j = 0; j < NT; j++) {
#pragma unroll
                for (int i = 0; i < MT; i++) multiply_32(whole[i * NT + j], codes.rows[i], codes.weights[j / 2] + j % 2 * 2, base);
            }
            // The next codes come while these sums become floats.
            codes.load(rows_at, weights_at, min(b + 1, STEP_BLOCKS - 1), row, weight);
            float scales[MT][2];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                scales[i][0] = from.scales[b][row + 16 * i + g];
                scales[i][1] = from.scales[b][row + 16 * i + 8 + g];
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                float2 factors = *(const float2 *)&from.factors[b][weight + 8 * j + 2 * t];
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    float *sum = now + (i * NT + j) * 4;
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float value = __int_as_float(whole[i * NT + j][c]) - 12582912.0f;
                        sum[c] = fmaf(value, (c % 2 ? factors.y : factors.x) * scales[i][c / 2], sum[c]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run(float *out) const {
        extern __shared__ uint4 tile_memory[];
        Step32<HIGH> *steps = (Step32<HIGH> *)tile_memory;
        int warp = threadIdx.x / 32, row = warp / WARPS_WIDE * 16 * MT, weight = warp % WARPS_WIDE * 8 * NT;
        float now[OUTPUTS] = {};
        Waiting waiting;
        waiting.depth = 0;
        Coming32<T, HIGH> coming;
        Walk32 ahead(blocks);
        // The next step that has blocks: passes without any are passed over.
        auto advance = [&]() {
            while (!ahead.is_done() && ahead.step >= ahead.steps) ahead.next_pass();
        };
        advance();
        if (!ahead.is_done()) {
            begin(ahead, steps[0], coming);
            finish(steps[0], coming);
            ahead.step++;
            advance();
        }
        int turn = 0;
        for (Walk32 at(blocks); !at.is_done();) {
            if (at.step >= at.steps) {
                end_pass<8>(now, waiting, at.pass);
                at.next_pass();
                continue;
            }
            wait_copies();
            __syncthreads();
            bool has_next = !ahead.is_done();
            if (has_next) begin(ahead, steps[turn ^ 1], coming);
            add(steps[turn], at.count(), now, row, weight);
            if (has_next) {
                finish(steps[turn ^ 1], coming);
                ahead.step++;
                advance();
            }
            at.step++;
            turn ^= 1;
        }
        store_tile(tile, now, out, w_rows, row, weight);
    }
};

// Dynamic shared memory: two steps. Grid: see `tile_of`. Activations from `quantise_tiles_32`.
template <int T, int HIGH>
__device__ void tiles_32(const u8 *w, const i8 *codes, const float *scales, float *out, int w_rows, int cols, int rows, int groups, int padded) {
    Tiles32<T, HIGH>(w, codes, scales, tile_of<HIGH>(w_rows, rows, groups), w_rows, cols / 32, padded).run(out);
}

#define TILES_32_HIGH(name, type, high, threads, each) \
    extern "C" __global__ void __launch_bounds__(threads, each) tiles_##name##_##high( \
        const u8 *w, const i8 *codes, const float *scales, float *out, int w_rows, int cols, int rows, int groups, int padded \
    ) { \
        previous_ended(); \
        tiles_32<type, high>(w, codes, scales, out, w_rows, cols, rows, groups, padded); \
    }
#define TILES_32(name, type) TILES_32_HIGH(name, type, 1, 64, 7) TILES_32_HIGH(name, type, 2, 128, 4) TILES_32_HIGH(name, type, 4, 256, 2)
TILES_32(q8_0, Q8_0)
TILES_32(mxfp4, MXFP4)
