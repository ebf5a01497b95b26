// One weight row against N rows of rounded activations, by four threads (blocks of 256) or eight (blocks of 32).
// Never sums otherwise than the CPU: each block has one whole sum, which joins one of four lanes (blocks of 256) or eight, and each lane is a
// thread's. Surprising fact: four blocks are summed before any of them is converted, each to the thread whose lane it belongs to.
#pragma once
#include "dot_parts.cuh"

// A number as a type, for loops whose length the compiler must know.
template <int V> struct Count {
    static constexpr int value = V;
};

// Activations: `rows` x `groups` rows of `cols` codes.
struct Acts {
    const i8 *codes;
    const float *scales;
    const i16 *sums;
};

// Two numbers of each of two threads that differ in bit `bit` of their number: the lower one gets the sum of both a, the upper one of both b.
__device__ __forceinline__ int exchange(int a, int b, int t, int bit) {
    bool is_upper = t & bit;
    return (is_upper ? b : a) + __shfl_xor_sync(FULL, is_upper ? a : b, bit);
}

// Sums of four numbers over four neighbouring threads: thread t gets that of v[t].
__device__ __forceinline__ int sum_quad(const int v[4], int t) {
    return exchange(exchange(v[0], v[1], t, 1), exchange(v[2], v[3], t, 1), t, 2);
}

// Sum of one number over four neighbouring threads, for each of them.
__device__ __forceinline__ int sum_same(int v) {
    v += __shfl_xor_sync(FULL, v, 1);
    return v + __shfl_xor_sync(FULL, v, 2);
}

// Fours of blocks of 32 whose loads are started before the first of them is used: with few warps that is what covers memory's latency.
template <int N> constexpr int AHEAD_32 = N == 1 ? 2 : 1;

// A thread's share of the whole sums of a block, and of its minima; `block` counts blocks of activations.
template <int T> __device__ __forceinline__ int2 shares_256(const Part256 &p, const Acts &acts, u32 block, int t) {
    const i8 *codes = acts.codes + (u64)block * 256;
    int dots[4], sum = 0, mins = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 x = *(const uint4 *)(codes + piece_at<T>(j, t));
        dots[j] = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int four = (int)word_of(x, c);
            dots[j] = T == Q2_K ? dot_unsigned((u32)p.codes[j][c], four, dots[j]) : __dp4a(p.codes[j][c], four, dots[j]);
        }
    }
    if constexpr (T == IQ2_XXS) {
        sum = p.scales[0] * (dots[0] + dots[1]) + p.scales[1] * (dots[2] + dots[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) sum += p.scales[j] * dots[j];
    }
    if constexpr (CODE_OFFSET<T> != 0 || HAS_MINS<T>) {
        // Runs 4t .. 4t + 3.
        uint2 runs = *(const uint2 *)(acts.sums + 4 * t + (u64)block * 16);
        int weighted = __dp2a_hi((int)runs.y, p.extra, __dp2a_lo((int)runs.x, p.extra, 0));
        if constexpr (HAS_MINS<T>) mins = weighted;
        if constexpr (CODE_OFFSET<T> != 0) sum -= CODE_OFFSET<T> * weighted;
    }
    return make_int2(sum, mins);
}

// A block joins the lane of its thread: `whole` and `mins` are its sums, `factors` its weights', `scale` its activations'.
template <int T> __device__ __forceinline__ float add_256(float lane, int whole, int mins, float2 factors, float scale) {
    lane = fmaf((float)(whole >> SUM_SHIFT<T>), factors.x * scale, lane);
    if constexpr (HAS_MINS<T>) lane = fmaf((float)-mins, factors.y * scale, lane);
    return lane;
}

// N activation rows (`act[n]`) against weight row `row` of blocks of 256.
template <int T, int N>
__device__ __forceinline__ void dot_256(
    const u8 *w, int w_rows, int row, const Iq2Tables *tables, int blocks, const Acts &acts, const size_t *act, int t, float *out
) {
    Place place = place_of(w_rows, blocks, row);
    Planes planes = planes_of<T>(w, (size_t)w_rows * blocks, t);
    float lane[N] = {};
    u32 plus = iq2_plus<T>(tables), slot = (u32)place.first, at[N];
#pragma unroll
    for (int n = 0; n < N; n++) at[n] = (u32)act[n] * blocks;
    Raw256 raw;
    fetch<T>(planes, slot, raw);
    int b = 0;
    for (; b + 4 <= blocks; b += 4) {
        // Those of block b + t.
        u32 factors = T == Q4_K ? 0 : fetch_factors<T>(planes, slot + t * place.step);
        float scales[N];
#pragma unroll
        for (int n = 0; n < N; n++) scales[n] = acts.scales[at[n] + t];
        // Sums of an even block, then of pairs: fewer numbers are held than by `sum_quad`.
        int2 even[N], pairs[N][2];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Part256 p;
            unpack<T>(raw, tables, plus, t, p);
            if constexpr (T == Q4_K) factors = k == t ? raw.head.x : factors;
            // The next block is on its way while one is used; further ahead costs registers, and with them warps, that cover more.
            slot += place.step;
            if (k < 3 || b + 4 < blocks) fetch<T>(planes, slot, raw);
#pragma unroll
            for (int n = 0; n < N; n++) {
                int2 shares = shares_256<T>(p, acts, at[n]++, t);
                if (k % 2 == 0) {
                    even[n] = shares;
                } else {
                    pairs[n][k / 2].x = exchange(even[n].x, shares.x, t, 1);
                    if constexpr (HAS_MINS<T>) pairs[n][k / 2].y = exchange(even[n].y, shares.y, t, 1);
                }
            }
        }
        float2 both = factors_of<T>(factors);
#pragma unroll
        for (int n = 0; n < N; n++) {
            int whole = exchange(pairs[n][0].x, pairs[n][1].x, t, 2), mins = 0;
            if constexpr (HAS_MINS<T>) mins = exchange(pairs[n][0].y, pairs[n][1].y, t, 2);
            lane[n] = add_256<T>(lane[n], whole, mins, both, scales[n]);
        }
    }
    // Up to three blocks more, one by one.
    for (int k = 0; b < blocks; b++, k++) {
        float2 both = factors_of<T>(fetch_factors<T>(planes, slot));
        Part256 p;
        unpack<T>(raw, tables, plus, t, p);
        slot += place.step;
        if (b + 1 < blocks) fetch<T>(planes, slot, raw);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float scale = acts.scales[at[n]];
            int2 shares = shares_256<T>(p, acts, at[n]++, t);
            int whole = sum_same(shares.x), min = HAS_MINS<T> ? sum_same(shares.y) : 0;
            if (k == t) lane[n] = add_256<T>(lane[n], whole, min, both, scale);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sum = lane[n] + __shfl_down_sync(FULL, lane[n], 2, 4);
        out[n] = (sum + __shfl_down_sync(FULL, sum, 1, 4)) + 0.0f;
    }
}

// As `dot_256` for blocks of 32: threads 0 to 3 take even blocks, 4 to 7 odd ones, and lane 2 q + h is that of thread q of half h.
template <int T, int N>
__device__ __forceinline__ void dot_32(const u8 *body, const u8 *tail, int blocks, const Acts &acts, const size_t *act, int t, float *out) {
    int q = t & 3, h = t >> 2;
    float lane[N] = {};
    auto fours = [&](int b, auto count) {
        constexpr int FOURS = decltype(count)::value;
        uint2 raw[4 * FOURS], x[4 * FOURS][N];
        u32 factors[FOURS];
        float scales[FOURS][N];
#pragma unroll
        for (int k = 0; k < 4 * FOURS; k++) {
            int at = b + 2 * k + h;
            raw[k] = fetch_32<T>(body + (size_t)at * Block<T>::BODY, t);
#pragma unroll
            for (int n = 0; n < N; n++) x[k][n] = *(const uint2 *)(acts.codes + (act[n] * blocks + at) * 32 + 8 * q);
        }
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            int mine = b + 8 * f + 2 * q + h;
            factors[f] = fetch_factor<T>(tail + (size_t)mine * Block<T>::TAIL);
#pragma unroll
            for (int n = 0; n < N; n++) scales[f][n] = acts.scales[act[n] * blocks + mine];
        }
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            float d = factor_of<T>(factors[f]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                int dots[4];
#pragma unroll
                for (int k = 0; k < 4; k++) dots[k] = dot_eight<T>(raw[4 * f + k], x[4 * f + k][n]);
                lane[n] = fmaf((float)sum_quad(dots, q), d * scales[f][n], lane[n]);
            }
        }
    };
    // All threads of a warp make the same turns.
    int b = 0;
    for (; b + 8 * AHEAD_32<N> <= blocks; b += 8 * AHEAD_32<N>) fours(b, Count<AHEAD_32<N>>{});
    if constexpr (AHEAD_32<N> > 1) {
        for (; b + 8 <= blocks; b += 8) fours(b, Count<1>{});
    }
    // Up to seven blocks more, a pair at a time.
    for (int k = 0; b < blocks; b += 2, k++) {
        int at = b + h;
        bool inside = at < blocks;
        uint2 raw = inside ? fetch_32<T>(body + (size_t)at * Block<T>::BODY, t) : make_uint2(0, 0);
        float d = inside ? factor_of<T>(fetch_factor<T>(tail + (size_t)at * Block<T>::TAIL)) : 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            size_t block = act[n] * blocks + at;
            uint2 x = inside ? *(const uint2 *)(acts.codes + block * 32 + 8 * q) : make_uint2(0, 0);
            int whole = sum_same(dot_eight<T>(raw, x));
            if (inside && k == q) lane[n] = fmaf((float)whole, d * acts.scales[block], lane[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sum = lane[n] + __shfl_down_sync(FULL, lane[n], 2, 4);
        sum = sum + __shfl_down_sync(FULL, sum, 1, 4);
        out[n] = (sum + __shfl_down_sync(FULL, sum, 4, 8)) + 0.0f;
    }
}

// Threads that share a weight row, and threads of a block of threads: tables are filled once a block of threads. Six experts' first matrices
// (rows of 2,304) are 132 blocks of 864 threads, one for each multiprocessor of an H200, where 216 of 512 leave a third of them half empty. A
// matrix alone (`ALONE`) has too few rows for that.
template <int T> constexpr int ROW_THREADS = Block<T>::VALUES == 256 ? 4 : 8;
template <int T, bool ALONE = false> constexpr int DOT_THREADS = T == IQ2_XXS ? (ALONE ? 512 : 864) : 128;
// Blocks of threads of a multiprocessor. Without this number the compiler saves registers by moving loads to where they are used, which
// makes every load wait for the one before it.
template <int T, int N, bool ALONE = false>
constexpr int DOT_BLOCKS = T == IQ2_XXS ? (ALONE && N == 1 ? 2 : 1) : Block<T>::VALUES == 256 && N == 1 ? 8 : 5;
// Likewise six experts' second matrices (rows of 5,120): 132 blocks of 960 threads.
template <int T> constexpr int DOWN_THREADS = T == IQ2_XXS ? 960 : DOT_THREADS<T>;
template <int T, bool ALONE = false> constexpr int DOT_ROWS = DOT_THREADS<T, ALONE> / ROW_THREADS<T>;

// Row `row` of a matrix against N activation rows, valid in thread 0 of the row.
template <int T, int N>
__device__ __forceinline__ void dot_row(
    const u8 *w, int w_rows, int cols, int row, const Iq2Tables *tables, const Acts &acts, const size_t *act, float *out
) {
    int blocks = cols / Block<T>::VALUES, t = threadIdx.x % ROW_THREADS<T>;
    if constexpr (Block<T>::VALUES == 256) {
        dot_256<T, N>(w, w_rows, row, tables, blocks, acts, act, t, out);
    } else {
        const u8 *body = w + (size_t)row * blocks * Block<T>::BODY;
        const u8 *tail = w + (size_t)w_rows * blocks * Block<T>::BODY + (size_t)row * blocks * Block<T>::TAIL;
        dot_32<T, N>(body, tail, blocks, acts, act, t, out);
    }
}

// The tables of IQ2_XXS, where a type needs them.
template <int T> __device__ __forceinline__ const Iq2Tables *tables_for() {
    if constexpr (T == IQ2_XXS) {
        __shared__ Iq2Tables tables;
        fill_tables(tables);
        return &tables;
    } else {
        return nullptr;
    }
}
