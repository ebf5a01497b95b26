// Products of many activation rows with weights in blocks of 256, on tensor cores.
// Never sums otherwise than kernels/dots.cuh: a block has one whole number, and its minima another, which join running sum `block % 4`.
// Surprising fact: in Q2_K and Q3_K code times scale fits one byte, so that a whole block is summed by the tensor cores alone; the others multiply
// the sum of each run by its scale.
#pragma once
#include "tiles.cuh"

constexpr int PITCH_256 = 256, PIECES_256 = 16;
// Scales multiplied into the codes; Q3_K has them negative, since 4 x -32 fits a byte and 4 x 32 does not.
template <int T> constexpr bool IS_FOLDED = T == Q2_K || T == Q3_K;
// Values that share a scale.
template <int T> constexpr int RUN = T == Q6_K ? 16 : 32;
template <int T> constexpr int RUNS = IS_FOLDED<T> ? 0 : 256 / RUN<T>;

// Parts of a step that only some types have.
template <int T, int HIGH> struct Minima {};
// Sums of 16 activations as 16 upper digits (of 16), then 16 lower ones; minima of 16 values.
template <int HIGH> struct Minima<Q2_K, HIGH> {
    alignas(16) u8 digits[TILE_ROWS<HIGH> * 32];
    u8 minima[TILE_WEIGHTS * 16];
    float factors[TILE_WEIGHTS];
};
template <int HIGH> struct Minima<Q4_K, HIGH> : Minima<Q2_K, HIGH> {};
template <int RUNS> struct Scales {
    // [run, weight row].
    int of[RUNS][TILE_WEIGHTS];
};
template <> struct Scales<0> {};

// Shared memory of a step: one block of all rows.
template <int T, int HIGH> struct alignas(16) Step256 {
    u8 rows[TILE_ROWS<HIGH> * PITCH_256];
    u8 weights[TILE_WEIGHTS * PITCH_256];
    float scales[TILE_ROWS<HIGH>];
    float factors[TILE_WEIGHTS];
    Scales<RUNS<T>> runs;
    Minima<T, HIGH> minima;
};

// IQ2_XXS: digits by which PRMT picks eight values, and the turns of their signs.
struct SmallTables {
    u32 grid[256];
    u32 signs[128];
};

// What a thread has on the way in registers.
template <int T, int HIGH> struct Coming256 {
    // A quarter of a block of each of these weight rows.
    static constexpr int QUARTERS = 4 * TILE_WEIGHTS / TILE_THREADS<HIGH>;
    // Of eight sums each.
    static constexpr int SUMS = HAS_MINS<T> ? 2 * TILE_ROWS<HIGH> / TILE_THREADS<HIGH> : 0;
    Raw256 raw[QUARTERS];
    u32 factors[QUARTERS];
    uint4 sums[SUMS + 1];
};

__device__ __forceinline__ void unpack_small(const Raw256 &r, const SmallTables &tables, Part256 &p) {
#pragma unroll
    for (int run = 0; run < 2; run++) {
        u32 groups = run ? r.a.z : r.a.x, signs = run ? r.a.w : r.a.y;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            u32 digits = tables.grid[(groups >> (8 * g)) & 255] | tables.signs[(signs >> (7 * g)) & 127];
            int *codes = p.codes[2 * run + g / 2] + g % 2 * 2;
            codes[0] = (int)prmt(IQ2_PLUS, IQ2_MINUS, digits);
            codes[1] = (int)prmt(IQ2_PLUS, IQ2_MINUS, digits >> 16);
        }
        p.scales[run] = (int)(signs >> 27 | 1);
    }
}

// Upper digits (of 16) of four sums, or the lower ones.
__device__ __forceinline__ u32 digits_of(u32 a, u32 b, int shift, u32 mask) {
    u32 out = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int sum = (int)(i16)((i < 2 ? a : b) >> (i % 2 * 16));
        out |= ((u32)(sum >> shift) & mask) << (8 * i);
    }
    return out;
}

template <int T, int HIGH> struct Tiles256 {
    static constexpr int THREADS = TILE_THREADS<HIGH>, ROWS_EACH = TILE_ROWS<HIGH> * PIECES_256 / THREADS;
    // Rows from one piece of a thread to its next.
    static constexpr int STRIDE = THREADS / PIECES_256;
    using Walk256 = Walk<4, 1>;
    using Come = Coming256<T, HIGH>;
    Tile tile;
    int blocks;
    const SmallTables *tables;
    // Of block 0: this thread's first piece of activations, the scale of a row, and its sums.
    const i8 *codes;
    const float *scales;
    const i16 *sums;
    u32 has_rows, has_sums;
    bool has_scale;
    Planes planes;
    // Block 0 of this thread's weight rows, and how far it is to the next.
    u32 slots[Come::QUARTERS], apart[Come::QUARTERS];

    __device__ __forceinline__ Tiles256(const u8 *w, const Acts &acts, Tile tile, int w_rows, int blocks, const SmallTables *tables)
        : tile(tile), blocks(blocks), tables(tables) {
        int tid = threadIdx.x, row = tid / PIECES_256;
        auto act_row = [&](int i) { return ((u64)(tile.first + i) * tile.groups + tile.group) * blocks; };
        codes = acts.codes + act_row(row) * 256 + tid % PIECES_256 * 16;
        scales = acts.scales + act_row(tid);
        sums = acts.sums + act_row(tid / 2) * 16 + tid % 2 * 8;
        has_rows = existing(tile.first + row, STRIDE, tile.rows);
        has_sums = existing(tile.first + tid / 2, THREADS / 2, tile.rows);
        has_scale = tid < TILE_ROWS<HIGH> && tile.first + tid < tile.rows;
        planes = planes_of<T>(w, (size_t)w_rows * blocks, tid % 4);
#pragma unroll
        for (int k = 0; k < Come::QUARTERS; k++) {
            Place place = place_of(w_rows, blocks, min(tile.o + (k * THREADS + tid) / 4, tile.end - 1));
            slots[k] = (u32)place.first;
            apart[k] = (u32)place.step;
        }
    }

    __device__ __forceinline__ void begin(int b, Step256<T, HIGH> &to, Come &coming) const {
        int tid = threadIdx.x, row = tid / PIECES_256, piece = tid % PIECES_256;
        u32 rows_at = shared_address(to.rows);
        const i8 *from = codes + b * 256;
#pragma unroll
        for (int k = 0; k < ROWS_EACH; k++) {
            copy16(rows_at + piece_place(row + k * STRIDE, piece, PITCH_256), from, has_rows >> k & 1);
            from += (size_t)(STRIDE * 256) * tile.groups * blocks;
        }
        copy4(shared_address(to.scales + tid), scales + b, has_scale);
#pragma unroll
        for (int k = 0; k < Come::QUARTERS; k++) {
            u32 slot = slots[k] + (u32)b * apart[k];
            fetch<T>(planes, slot, coming.raw[k]);
            if constexpr (T != Q4_K) coming.factors[k] = fetch_factors<T>(planes, slot);
        }
#pragma unroll
        for (int k = 0; k < Come::SUMS; k++) {
            const i16 *at = sums + ((u64)(k * (THREADS / 2)) * tile.groups * blocks + b) * 16;
            coming.sums[k] = has_sums >> k & 1 ? *(const uint4 *)at : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void finish(Step256<T, HIGH> &to, const Come &coming) const {
        int tid = threadIdx.x, t = tid % 4;
#pragma unroll
        for (int k = 0; k < Come::QUARTERS; k++) {
            const Raw256 &raw = coming.raw[k];
            int row = (k * THREADS + tid) / 4;
            Part256 p;
            if constexpr (T == IQ2_XXS) unpack_small(raw, *tables, p);
            else unpack<T>(raw, nullptr, 0, t, p);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                *(uint4 *)(to.weights + piece_place(row, piece_at<T>(j, t) / 16, PITCH_256)) = piece_of<T>(p, raw, j, t);
                if constexpr (T == Q6_K) to.runs.of[4 * j + t][row] = p.scales[j];
                if constexpr (T == Q4_K) {
                    if (t % 2 == 0) to.runs.of[2 * j + t / 2][row] = p.scales[j];
                }
            }
            if constexpr (T == IQ2_XXS) {
                to.runs.of[t][row] = p.scales[0];
                to.runs.of[t + 4][row] = p.scales[1];
            }
            float2 both = factors_of<T>(T == Q4_K ? raw.head.x : coming.factors[k]);
            if (t == 0) to.factors[row] = both.x;
            if constexpr (HAS_MINS<T>) {
                *(u32 *)(to.minima.minima + row * 16 + 4 * t) = (u32)p.extra;
                if (t == 0) to.minima.factors[row] = both.y;
            }
        }
        if constexpr (HAS_MINS<T>) {
#pragma unroll
            for (int k = 0; k < Come::SUMS; k++) {
                int i = k * THREADS + tid;
                uint4 s = coming.sums[k];
                u8 *at = to.minima.digits + i / 2 * 32 + i % 2 * 8;
                *(uint2 *)at = make_uint2(digits_of(s.x, s.y, 4, 255), digits_of(s.z, s.w, 4, 255));
                *(uint2 *)(at + 16) = make_uint2(digits_of(s.x, s.y, 0, 15), digits_of(s.z, s.w, 0, 15));
            }
        }
    }

    // Whole numbers of a block, of all outputs of a thread.
    __device__ __forceinline__ static void multiply(const Step256<T, HIGH> &from, int (&whole)[OUTPUTS], int row, int weight) {
        const int zero[4] = {0, 0, 0, 0};
        int t = threadIdx.x % 4;
        u32 rows_at = shared_address(from.rows), weights_at = shared_address(from.weights);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) whole[i] = 0;
#pragma unroll 2
        for (int piece = 0; piece < PIECES_256; piece += 2) {
            u32 a[MT][4], w[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++) load_rows(a[i], rows_at, row + 16 * i, piece, PITCH_256);
#pragma unroll
            for (int j = 0; j < NT / 2; j++) load_weights(w[j], weights_at, weight + 16 * j, piece, PITCH_256);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const u32 *codes = w[j / 2] + j % 2 * 2;
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    int *sum = whole + (i * NT + j) * 4;
                    if constexpr (IS_FOLDED<T>) {
                        multiply_32(sum, a[i], codes, sum);
                    } else {
#pragma unroll
                        for (int part = 0; part < 32 / RUN<T>; part++) {
                            int run[4];
                            if constexpr (RUN<T> == 32) multiply_32(run, a[i], codes, zero);
                            else multiply_16(run, a[i] + 2 * part, codes[part], zero);
                            int2 scales = *(const int2 *)&from.runs.of[piece * 16 / RUN<T> + part][weight + 8 * j + 2 * t];
#pragma unroll
                            for (int c = 0; c < 4; c++) sum[c] += (c % 2 ? scales.y : scales.x) * run[c];
                        }
                    }
                }
            }
        }
    }

    // A block joins the running sums.
    __device__ __forceinline__ static void add(const Step256<T, HIGH> &from, float (&now)[OUTPUTS], int row, int weight) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        int whole[OUTPUTS];
        multiply(from, whole, row, weight);
        const int zero[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < MT; i++) {
            int at = row + 16 * i + g;
            float scales[2] = {from.scales[at], from.scales[at + 8]};
            u32 digits[4] = {0, 0, 0, 0};
            if constexpr (HAS_MINS<T>) {
#pragma unroll
                for (int k = 0; k < 4; k++) digits[k] = *(const u32 *)(from.minima.digits + (at + k % 2 * 8) * 32 + k / 2 * 16 + 4 * t);
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                int o = weight + 8 * j + 2 * t;
                float2 factors = *(const float2 *)&from.factors[o];
                int first = (i * NT + j) * 4;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float value = (float)(T == Q3_K ? -whole[first + c] : whole[first + c]);
                    now[first + c] = fmaf(value, (c % 2 ? factors.y : factors.x) * scales[c / 2], now[first + c]);
                }
                if constexpr (HAS_MINS<T>) {
                    int mins[4];
                    u32 minima = *(const u32 *)(from.minima.minima + (weight + 8 * j + g) * 16 + 4 * t);
                    multiply_16(mins, digits, minima, zero);
#pragma unroll
                    for (int c = 0; c < 4; c++) mins[c] *= 16;
                    multiply_16(mins, digits + 2, minima, mins);
                    float2 below = *(const float2 *)&from.minima.factors[o];
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        now[first + c] = fmaf((float)-mins[c], (c % 2 ? below.y : below.x) * scales[c / 2], now[first + c]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run(float *out, int w_rows) const {
        extern __shared__ uint4 tile_memory[];
        Step256<T, HIGH> *steps = (Step256<T, HIGH> *)tile_memory;
        int warp = threadIdx.x / 32, row = warp / WARPS_WIDE * 16 * MT, weight = warp % WARPS_WIDE * 8 * NT;
        float now[OUTPUTS] = {};
        Waiting waiting;
        waiting.depth = 0;
        Come coming;
        Walk256 ahead(blocks);
        auto advance = [&]() {
            while (!ahead.is_done() && ahead.step >= ahead.steps) ahead.next_pass();
        };
        advance();
        if (!ahead.is_done()) {
            begin(ahead.block(), steps[0], coming);
            finish(steps[0], coming);
            ahead.step++;
            advance();
        }
        int turn = 0;
        for (Walk256 at(blocks); !at.is_done();) {
            if (at.step >= at.steps) {
                end_pass<4>(now, waiting, at.pass);
                at.next_pass();
                continue;
            }
            wait_copies();
            __syncthreads();
            bool has_next = !ahead.is_done();
            if (has_next) begin(ahead.block(), steps[turn ^ 1], coming);
            add(steps[turn], now, row, weight);
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

// Dynamic shared memory: two steps. Grid: see `tile_of`.
template <int T, int HIGH> __device__ void tiles_256(const u8 *w, const Acts &acts, float *out, int w_rows, int cols, int rows, int groups) {
    const SmallTables *tables = nullptr;
    if constexpr (T == IQ2_XXS) {
        __shared__ SmallTables small;
        for (int i = threadIdx.x; i < 384; i += TILE_THREADS<HIGH>) {
            if (i < 256) small.grid[i] = iq2_digits(IQ2_GRID[i]);
            else small.signs[i - 256] = iq2_turns((u32)(i - 256));
        }
        __syncthreads();
        tables = &small;
    }
    Tiles256<T, HIGH>(w, acts, tile_of<HIGH>(w_rows, rows, groups), w_rows, cols / 256, tables).run(out, w_rows);
}

#define TILES_256_HIGH(name, type, high, threads, each) \
    extern "C" __global__ void __launch_bounds__(threads, each) tiles_##name##_##high( \
        const u8 *w, const i8 *codes, const float *scales, const i16 *sums, float *out, int w_rows, int cols, int rows, int groups \
    ) { \
        previous_ended(); \
        tiles_256<type, high>(w, Acts{codes, scales, sums}, out, w_rows, cols, rows, groups); \
    }
#define TILES_256(name, type) TILES_256_HIGH(name, type, 1, 64, 4) TILES_256_HIGH(name, type, 2, 128, 3) TILES_256_HIGH(name, type, 4, 256, 2)
TILES_256(q2_k, Q2_K)
TILES_256(q3_k, Q3_K)
TILES_256(q4_k, Q4_K)
TILES_256(q6_k, Q6_K)
TILES_256(iq2_xxs, IQ2_XXS)
