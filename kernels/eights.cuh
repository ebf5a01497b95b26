// Products of few activation rows on tensor cores: a warp multiplies 16 weight rows with eights of activation rows, alone or with neighbours that
// have other blocks of the same rows.
// Never sums otherwise than kernels/dots.cuh: a block has one whole number, and its minima another, which join running sum `block % 4` (blocks of
// 256) or `block % 8` (blocks of 32), and running sums fold in the same order.
// Surprising fact: weights go from memory to the tensor cores without shared memory. The codes of a thread are a fragment as they are, because
// the values of a block may be multiplied in any order, if only both sides take the same.
#pragma once
#include "tiles.cuh"

// The same with weights that have no sign.
__device__ __forceinline__ void multiply_unsigned(int out[4], const u32 a[4], const u32 *b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(out[0]), "+r"(out[1]), "+r"(out[2]), "+r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Weight rows of a warp: those of its lower eight (of one matrix) and of its upper eight (of the same one, or another of its shape).
struct Sixteen {
    const u8 *w[2];
    // Of this thread, which shares it with three others.
    int row[2];
};

// Activation rows `first` to `first + count` of EIGHTS eights, of `groups` each, as a thread sees them. Rows beyond the last are it again.
template <int T, int EIGHTS> struct ActRows {
    Acts acts;
    // Block 0 of row lane / 4 of each eight, and of rows 2 (lane % 4) and the next.
    u32 own[EIGHTS], pair[EIGHTS][2];
    // Eights that have rows.
    int used;
    __device__ __forceinline__ ActRows(const Acts &acts, int blocks, int first, int count, int groups, int group) : acts(acts) {
        int lane = threadIdx.x % 32;
        used = min(EIGHTS, (count + 7) / 8);
        auto row = [=](int i) { return (u32)(((first + min(i, count - 1)) * groups + group) * blocks); };
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            own[i] = row(8 * i + lane / 4);
#pragma unroll
            for (int k = 0; k < 2; k++) pair[i][k] = row(8 * i + 2 * (lane % 4) + k);
        }
    }
    __device__ __forceinline__ const i8 *codes(int i, int b) const { return acts.codes + (u64)(own[i] + b) * Block<T>::VALUES; }
    __device__ __forceinline__ uint2 sums(int i, int b) const { return *(const uint2 *)(acts.sums + (u64)(own[i] + b) * 16 + threadIdx.x % 4 * 4); }
    // Of rows 2 (lane % 4) and the next.
    __device__ __forceinline__ float2 scales(int i, int b) const { return make_float2(acts.scales[pair[i][0] + b], acts.scales[pair[i][1] + b]); }
};

// The same from shared memory, where all threads of a block have put them. What lies behind the last row is anything, and nobody stores what comes of it.
template <int T, int EIGHTS> struct StagedRows {
    static constexpr int ROWS = 8 * EIGHTS;
    // Row lane / 4 of the first eight, and rows 2 (lane % 4) and the next of block 0.
    const u8 *own_codes, *own_sums;
    const float *pair_scales;
    int code_stride, sum_stride, used;

    // Bytes from one row to the next: those that a part of a warp reads at once lie in different banks.
    static __device__ __forceinline__ int codes_apart(int cols) {
        return (cols + 127) / 128 * 128 + (T == Q2_K || T == Q3_K ? 64 : T == IQ2_XXS || T == Q6_K ? 16 : 32);
    }
    static __device__ __forceinline__ int sums_apart(int cols) { return HAS_MINS<T> ? (cols / 8 + 127) / 128 * 128 + 32 : 0; }

    __device__ __forceinline__ StagedRows(u8 *memory, const Acts &acts, int cols, int first, int count) {
        constexpr int VALUES = Block<T>::VALUES;
        int blocks = cols / VALUES, lane = threadIdx.x % 32;
        count = min(count, ROWS);
        used = (count + 7) / 8;
        code_stride = codes_apart(cols);
        sum_stride = sums_apart(cols);
        u8 *sums = memory + ROWS * code_stride;
        float *scales = (float *)(sums + ROWS * sum_stride);
        for (int row = 0; row < count; row++) {
            size_t from = (size_t)(first + row) * cols;
            for (int i = threadIdx.x; i < cols / 16; i += blockDim.x) *(uint4 *)(memory + row * code_stride + 16 * i) = *(const uint4 *)(acts.codes + from + 16 * i);
            for (int i = threadIdx.x; i < blocks; i += blockDim.x) scales[i * ROWS + row] = acts.scales[from / VALUES + i];
            if constexpr (HAS_MINS<T>) {
                for (int i = threadIdx.x; i < cols / 128; i += blockDim.x) *(uint4 *)(sums + row * sum_stride + 16 * i) = *(const uint4 *)(acts.sums + from / 16 + 8 * i);
            }
        }
        __syncthreads();
        own_codes = memory + lane / 4 * code_stride;
        own_sums = sums + lane / 4 * sum_stride + lane % 4 * 8;
        pair_scales = scales + lane % 4 * 2;
    }
    __device__ __forceinline__ const i8 *codes(int i, int b) const { return (const i8 *)own_codes + 8 * i * code_stride + b * Block<T>::VALUES; }
    __device__ __forceinline__ uint2 sums(int i, int b) const { return *(const uint2 *)(own_sums + 8 * i * sum_stride + 32 * b); }
    __device__ __forceinline__ float2 scales(int i, int b) const { return *(const float2 *)(pair_scales + b * ROWS + 8 * i); }
};

// What a thread loads of a block of 256 of a weight row.
template <int T> struct RawRow {
    Raw256 raw;
    u32 factors;
};
// Q6_K: word `t` of each of four runs.
template <> struct RawRow<Q6_K> {
    u32 a[4], b[4], high[4];
    uint4 head;
    u32 factors;
};

// Where a thread's part of a weight row is, of every SPLIT-th block from `part` on.
template <int T, int SPLIT> struct RowPlanes {
    Planes planes;
    u32 slot, step;
    __device__ __forceinline__ RowPlanes(const u8 *w, int w_rows, int blocks, int row, int part, int t) {
        Place place = place_of(w_rows, blocks, min(row, w_rows - 1));
        size_t total = (size_t)w_rows * blocks;
        slot = (u32)place.first + (u32)(part * place.step);
        step = (u32)(SPLIT * place.step);
        if constexpr (T == Q4_K) {
            planes = Planes{w + 8 * t, w + total * Q4_K_CODES + 8 * t, nullptr, w + total * Q4_K_HEAD, nullptr};
        } else if constexpr (T == Q6_K) {
            planes = Planes{w + 4 * t, w + total * Q6_K_CODES + 4 * t, w + total * Q6_K_HIGH + 4 * t, w + total * Q6_K_HEAD, w + total * Q6_K_TAIL};
        } else {
            planes = planes_of<T>(w, total, t);
        }
    }
    __device__ __forceinline__ void fetch_next(RawRow<T> &r) {
        if constexpr (T == Q4_K) {
            // Eight codes of each run: one of 32 values is 32 bytes of a plane, in two nibbles.
            auto both = [&](const u8 *plane) {
                uint2 low = load8(plane + (u64)slot * 64), high = load8(plane + (u64)slot * 64 + 32);
                return make_uint4(low.x, low.y, high.x, high.y);
            };
            r.raw.a = both(planes.codes);
            r.raw.b = both(planes.more);
            r.raw.head = *(const uint4 *)(planes.head + (u64)slot * 16);
        } else if constexpr (T == Q6_K) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r.a[i] = *(const u32 *)(planes.codes + (u64)slot * 64 + 16 * i);
                r.b[i] = *(const u32 *)(planes.more + (u64)slot * 64 + 16 * i);
                r.high[i] = *(const u32 *)(planes.high + (u64)slot * 64 + 16 * i);
            }
            r.head = *(const uint4 *)(planes.head + (u64)slot * 16);
            r.factors = fetch_factors<T>(planes, slot);
        } else {
            fetch<T>(planes, slot, r.raw);
            r.factors = fetch_factors<T>(planes, slot);
        }
        slot += step;
    }
};

// The weights of a block of 16 rows as fragments.
template <int T> struct Weights16 {
    // Of two runs of 16 (a piece) or 32 values: words of the lower row, the upper one, the lower one, the upper one.
    u32 a[8][4];
    // IQ2_XXS: what is above the lower eight bits.
    u32 above[T == IQ2_XXS ? 8 : 1][4];
    // By row: scale of each run, one a byte.
    u32 scales[2][4];
    u32 minima[2];
    float2 factors[2];
};

// One row of a block; `h` is 0 for the lower one.
template <int T> __device__ __forceinline__ void unpack_row(const RawRow<T> &r, int h, const Iq2Tables *tables, u32 plus, int t, Weights16<T> &to) {
    if constexpr (T == Q2_K || T == Q3_K) {
        Part256 p;
        unpack<T>(r.raw, nullptr, 0, t, p);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 codes = piece_of<T>(p, r.raw, j, t);
            to.a[2 * j][h] = codes.x;
            to.a[2 * j][h + 2] = codes.y;
            to.a[2 * j + 1][h] = codes.z;
            to.a[2 * j + 1][h + 2] = codes.w;
        }
        to.minima[h] = (u32)p.extra;
        to.factors[h] = factors_of<T>(r.factors);
    } else if constexpr (T == Q4_K) {
        const uint4 &head = r.raw.head;
#pragma unroll
        for (int run = 0; run < 8; run++) {
            uint4 codes = run < 4 ? r.raw.a : r.raw.b;
            int shift = 4 * (run / 2 % 2);
            to.a[run][h] = ((run % 2 ? codes.z : codes.x) >> shift) & 0x0f0f0f0f;
            to.a[run][h + 2] = ((run % 2 ? codes.w : codes.y) >> shift) & 0x0f0f0f0f;
        }
        to.scales[h][0] = head.y & 0x3f3f3f3f;
        to.scales[h][1] = (head.w & 0x0f0f0f0f) | ((head.y >> 2) & 0x30303030);
        u32 low = head.z & 0x3f3f3f3f, high = ((head.w >> 4) & 0x0f0f0f0f) | ((head.z >> 2) & 0x30303030);
        // One minimum for two runs of 16.
        to.minima[h] = prmt(t >> 1 ? high : low, 0, t & 1 ? 0x3322 : 0x1100);
        to.factors[h] = factors_of<T>(head.x);
    } else if constexpr (T == Q6_K) {
#pragma unroll
        for (int run = 0; run < 16; run++) {
            int j = run / 4, i = run % 4;
            u32 low = ((j < 2 ? r.a[i] : r.b[i]) >> (4 * (j & 1))) & 0x0f0f0f0f;
            u32 top = (j < 2 ? r.high[i] << (4 - 2 * j) : r.high[i] >> (2 * j - 4)) & 0x30303030;
            to.a[run / 2][run % 2 * 2 + h] = ((low | top | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) to.scales[h][j] = word_of(r.head, j);
        to.factors[h] = factors_of<T>(r.factors);
    } else {
        u32 mine = (u32)__cvta_generic_to_shared(tables) + threadIdx.x % 32 * 4 + (plus ^ IQ2_PLUS);
#pragma unroll
        for (int run = 0; run < 2; run++) {
            u32 groups = run ? r.raw.a.z : r.raw.a.x, signs = run ? r.raw.a.w : r.raw.a.y;
            u32 turns = (signs & 0x7f) | ((signs << 1) & 0x7f00) | ((signs << 2) & 0x7f0000) | ((signs << 3) & 0x7f000000);
            // Magnitudes times the scale, in 16 bits, and the same negated; then their lower and upper bytes, for permutations.
            u32 scale = signs >> 27 | 1, two = scale * 0x00190008u, third = scale * 43u;
            u32 minus_two = ~two + 0x00010001u, minus_third = 0u - third;
            u32 low = prmt(two, third, 0x6420), high = prmt(two, third, 0x7531);
            u32 minus_low = prmt(minus_two, minus_third, 0x6420), minus_high = prmt(minus_two, minus_third, 0x7531);
#pragma unroll
            for (int g = 0; g < 4; g++) {
                u32 digits = entry_of<0>(groups, g, mine) | entry_of<sizeof(tables->grid)>(turns, g, mine);
                u32 next = digits >> 16;
                to.a[4 * run + g][h] = prmt(low, minus_low, digits);
                to.a[4 * run + g][h + 2] = prmt(low, minus_low, next);
                to.above[4 * run + g][h] = prmt(high, minus_high, digits);
                to.above[4 * run + g][h + 2] = prmt(high, minus_high, next);
            }
        }
        to.factors[h] = factors_of<T>(r.factors);
    }
}

// Whole numbers of a block: 16 weight rows by eight activation rows, whose codes of this block begin at `x` for this thread's row.
template <int T> __device__ __forceinline__ void whole_256(const Weights16<T> &w, const i8 *x, int t, int (&whole)[4]) {
    const int zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 4; c++) whole[c] = 0;
    if constexpr (T == Q2_K || T == Q3_K) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 codes = *(const uint4 *)(x + piece_at<T>(j, t));
            u32 b[4] = {codes.x, codes.y, codes.z, codes.w};
            multiply_32(whole, w.a[2 * j], b, whole);
            multiply_32(whole, w.a[2 * j + 1], b + 2, whole);
        }
    } else if constexpr (T == Q4_K) {
#pragma unroll
        for (int run = 0; run < 8; run++) {
            uint2 codes = *(const uint2 *)(x + 32 * run + 8 * t);
            u32 b[2] = {codes.x, codes.y};
            int sums[4];
            multiply_32(sums, w.a[run], b, zero);
#pragma unroll
            for (int c = 0; c < 4; c++) whole[c] += byte_of(w.scales[c / 2][run / 4], run % 4) * sums[c];
        }
    } else if constexpr (T == Q6_K) {
#pragma unroll
        for (int run = 0; run < 16; run++) {
            u32 b = *(const u32 *)(x + 16 * run + 4 * t);
            int sums[4];
            multiply_16(sums, w.a[run / 2] + run % 2 * 2, b, zero);
#pragma unroll
            for (int c = 0; c < 4; c++) whole[c] += (int)(i8)byte_of(w.scales[c / 2][run / 4], run % 4) * sums[c];
        }
    } else {
        int above[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 codes = *(const uint4 *)(x + piece_at<T>(j, t));
            u32 b[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                multiply_unsigned(whole, w.a[2 * j + k], b + 2 * k);
                multiply_32(above, w.above[2 * j + k], b + 2 * k, above);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) whole[c] += above[c] << 8;
    }
}

// Sum of minima times sums of 16 activations, of which `sums` are those of runs 4t to 4t + 3 of this thread's row.
__device__ __forceinline__ void whole_minima(const u32 (&minima)[2], uint2 sums, int (&out)[4]) {
    const int zero[4] = {0, 0, 0, 0};
    multiply_16(out, minima, prmt(sums.x >> 4, sums.y >> 4, 0x6420), zero);
#pragma unroll
    for (int c = 0; c < 4; c++) out[c] *= 16;
    multiply_16(out, minima, prmt(sums.x & 0x000f000f, sums.y & 0x000f000f, 0x6420), out);
}

// Sum of N running sums, halves onto each other.
template <int N> __device__ __forceinline__ float fold_lanes(const float (&lanes)[N]) {
    if constexpr (N == 1) return lanes[0];
    else {
        float half[N / 2];
#pragma unroll
        for (int k = 0; k < N / 2; k++) half[k] = lanes[k] + lanes[k + N / 2];
        return fold_lanes<N / 2>(half);
    }
}

// Running sums that end in out[i][c]: those of blocks `part`, `part` + SPLIT and so on. c / 2 says which weight row, c % 2 which row of `pair`.
template <int T, int EIGHTS, int SPLIT, typename Rows>
__device__ __forceinline__ void eights_256(
    const Sixteen &w, int w_rows, int blocks, int part, const Rows &rows, const Iq2Tables *tables, float (&out)[EIGHTS][4]
) {
    constexpr int LANES_OWN = 4 / SPLIT;
    int t = threadIdx.x % 4;
    u32 plus = iq2_plus<T>(tables);
    RowPlanes<T, SPLIT> low(w.w[0], w_rows, blocks, w.row[0], part, t), high(w.w[1], w_rows, blocks, w.row[1], part, t);
    RawRow<T> raw[2];
    if (part < blocks) {
        low.fetch_next(raw[0]);
        high.fetch_next(raw[1]);
    }
    float lanes[EIGHTS][4][LANES_OWN] = {};
#pragma unroll 1
    for (int first = part; first < blocks; first += 4) {
#pragma unroll
        for (int k = 0; k < LANES_OWN; k++) {
            int b = first + k * SPLIT;
            if (b >= blocks) break;
            Weights16<T> weights;
            unpack_row<T>(raw[0], 0, tables, plus, t, weights);
            unpack_row<T>(raw[1], 1, tables, plus, t, weights);
            if (b + SPLIT < blocks) {
                low.fetch_next(raw[0]);
                high.fetch_next(raw[1]);
            }
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                if (i >= rows.used) break;
                int whole[4], mins[4];
                whole_256<T>(weights, rows.codes(i, b), t, whole);
                if constexpr (HAS_MINS<T>) whole_minima(weights.minima, rows.sums(i, b), mins);
                float2 both_scales = rows.scales(i, b);
                float scales[2] = {both_scales.x, both_scales.y};
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float2 factors = weights.factors[c / 2];
                    float &lane = lanes[i][c][k];
                    lane = fmaf((float)(T == Q3_K ? -whole[c] : whole[c]), factors.x * scales[c % 2], lane);
                    if constexpr (HAS_MINS<T>) lane = fmaf((float)-mins[c], factors.y * scales[c % 2], lane);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) out[i][c] = fold_lanes<LANES_OWN>(lanes[i][c]);
    }
}

// Blocks of 32 that are on their way together.
constexpr int AT_ONCE_32 = 8;

// As `eights_256` for blocks of 32.
template <int T, int EIGHTS, int SPLIT, typename Rows>
__device__ __forceinline__ void eights_32(
    const Sixteen &w, int w_rows, int blocks, int part, const Rows &rows, float (&out)[EIGHTS][4]
) {
    constexpr int LANES_OWN = 8 / SPLIT;
    int t = threadIdx.x % 4;
    const u8 *body[2], *tail[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        size_t row = min(w.row[h], w_rows - 1);
        body[h] = w.w[h] + row * blocks * Block<T>::BODY + t * (Block<T>::BODY / 4);
        tail[h] = w.w[h] + (size_t)w_rows * blocks * Block<T>::BODY + row * blocks * Block<T>::TAIL;
    }
    float lanes[EIGHTS][4][LANES_OWN] = {};
    auto some = [&](int first, auto is_whole) {
        uint2 raw[AT_ONCE_32][2];
        u32 factors[AT_ONCE_32][2];
#pragma unroll
        for (int k = 0; k < AT_ONCE_32; k++) {
            int b = decltype(is_whole)::value ? first + k * SPLIT : min(first + k * SPLIT, blocks - 1);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                raw[k][h] = fetch_32<T>(body[h] + (size_t)b * Block<T>::BODY, 0);
                factors[k][h] = fetch_factor<T>(tail[h] + (size_t)b * Block<T>::TAIL);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE_32; k++) {
            int b = first + k * SPLIT;
            if (!decltype(is_whole)::value && b >= blocks) break;
            u32 a[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 low = raw[k][h].x, high = raw[k][h].y;
                a[h] = T == MXFP4 ? mxfp4_bytes(low) : low;
                a[h + 2] = T == MXFP4 ? mxfp4_bytes(low >> 16) : high;
            }
            float both[2] = {factor_of<T>(factors[k][0]), factor_of<T>(factors[k][1])};
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                if (i >= rows.used) break;
                const int zero[4] = {0, 0, 0, 0};
                uint2 codes = *(const uint2 *)(rows.codes(i, b) + 8 * t);
                u32 x[2] = {codes.x, codes.y};
                int whole[4];
                multiply_32(whole, a, x, zero);
                float2 both_scales = rows.scales(i, b);
                float scales[2] = {both_scales.x, both_scales.y};
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float &lane = lanes[i][c][k % LANES_OWN];
                    lane = fmaf((float)whole[c], both[c / 2] * scales[c % 2], lane);
                }
            }
        }
    };
    int b = part;
#pragma unroll 1
    for (; b + (AT_ONCE_32 - 1) * SPLIT < blocks; b += AT_ONCE_32 * SPLIT) some(b, Count<1>{});
    if (b < blocks) some(b, Count<0>{});
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) out[i][c] = fold_lanes<LANES_OWN>(lanes[i][c]);
    }
}

// By all threads of a block of WARPS warps, of which SPLIT neighbours share a product. Returns whether this one has the outputs; what is not `inside`
// the matrix is not computed.
template <int T, int EIGHTS, int SPLIT, int WARPS, typename Rows>
__device__ __forceinline__ bool eights(
    const Sixteen &w, int w_rows, int cols, bool inside, const Rows &rows, const Iq2Tables *tables, float (&out)[EIGHTS][4]
) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % SPLIT;
    if (inside) {
        if constexpr (Block<T>::VALUES == 256) eights_256<T, EIGHTS, SPLIT>(w, w_rows, cols / 256, part, rows, tables, out);
        else eights_32<T, EIGHTS, SPLIT>(w, w_rows, cols / 32, part, rows, out);
    }
    if constexpr (SPLIT > 1) {
        using Parts = float[EIGHTS][4][32];
        Parts *parts;
        if constexpr (T == IQ2_XXS) {
            // Where the tables were: no kernel has more than 48 KiB without being asked for it.
            __syncthreads();
            parts = (Parts *)tables;
        } else {
            __shared__ Parts own[WARPS];
            parts = own;
        }
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) parts[warp][i][c][lane] = out[i][c];
        }
        __syncthreads();
        if (part != 0) return false;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float all[SPLIT];
#pragma unroll
                for (int k = 0; k < SPLIT; k++) all[k] = parts[warp + k][i][c][lane];
                out[i][c] = fold_lanes<SPLIT>(all);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) out[i][c] = out[i][c] + 0.0f;
    }
    return inside;
}

// Which rows of its expert a block takes: `count` from `first` on, both among the rows of all; none if `count` is not above 0.
template <int EIGHTS> struct TakenRows {
    int first, count;
    __device__ __forceinline__ explicit TakenRows(const TileJobs &jobs) {
        int skipped = blockIdx.y * 8 * EIGHTS;
        first = jobs.rows[blockIdx.z].first + skipped;
        count = jobs.rows[blockIdx.z].count - skipped;
    }
};

// IS_PAIR: SwiGLU of both first matrices of each expert, [outputs, cols], of which a warp takes eight rows each. Else the product of its one matrix, sixteen
// rows a warp. out: [rows of all, outputs]. `rounds` times a block takes what its warps take at once. Dynamic shared memory: tables and `StagedRows`. Grid
// (eights or sixteens of `outputs` / warps / rounds, passes over the most rows of an expert, experts).
template <int T, int EIGHTS, bool IS_PAIR>
__device__ __forceinline__ void eights_experts(const TileJobs &jobs, const Acts &acts, float *out, int outputs, int cols, int rounds, float limit) {
    constexpr int TILE = IS_PAIR ? 8 : 16;
    extern __shared__ uint4 eights_memory[];
    TakenRows<EIGHTS> taken(jobs);
    if (taken.count <= 0) return;
    u8 *memory = (u8 *)eights_memory;
    const Iq2Tables *tables = nullptr;
    if constexpr (T == IQ2_XXS) {
        fill_tables(*(Iq2Tables *)memory);
        tables = (const Iq2Tables *)memory;
        memory += sizeof(Iq2Tables);
    }
    StagedRows<T, EIGHTS> rows(memory, acts, cols, taken.first, taken.count);
    const u8 *low = jobs.w[IS_PAIR ? 2 * blockIdx.z : blockIdx.z], *high = IS_PAIR ? jobs.w[2 * blockIdx.z + 1] : low;
    int warps = blockDim.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        int o = (int)((blockIdx.x * rounds + round) * warps + threadIdx.x / 32) * TILE + g;
        if (o - g >= outputs) return;
        float sums[EIGHTS][4] = {};
        eights<T, EIGHTS, 1, 1>(Sixteen{{low, high}, {o, IS_PAIR ? o : o + 8}}, outputs, cols, true, rows, tables, sums);
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int c = 0; c < (IS_PAIR ? 2 : 4); c++) {
                int row = 8 * i + 2 * t + c % 2, at = o + c / 2 * 8;
                if (row >= taken.count || at >= outputs) continue;
                float value = sums[i][c];
                if constexpr (IS_PAIR) {
                    float x = fminf(value, limit), up = sums[i][c + 2];
                    // As `clamp` on the CPU: NaN stays NaN.
                    up = up < -limit ? -limit : up;
                    up = up > limit ? limit : up;
                    value = x * sigmoid(x) * up;
                }
                out[(size_t)(taken.first + row) * outputs + at] = value;
            }
        }
    }
}

// One matrix, [outputs, cols]; out: [rows, outputs], of which each of `groups` groups has activations of its own. Grid (sixteens of all groups x SPLIT /
// WARPS, passes over the rows).
template <int T, int EIGHTS, int SPLIT, int WARPS>
__device__ __forceinline__ void eights_alone(const TileJobs &jobs, const Acts &acts, float *out, int outputs, int cols, int groups) {
    TakenRows<EIGHTS> taken(jobs);
    if (taken.count <= 0) return;
    const Iq2Tables *tables = tables_for<T>();
    int lane = threadIdx.x % 32, number = (int)(blockIdx.x * WARPS + threadIdx.x / 32) / SPLIT;
    int each = outputs / groups, tiles = (each + 15) / 16, group = number / tiles, end = (group + 1) * each, o = group * each + number % tiles * 16 + lane / 4;
    ActRows<T, EIGHTS> rows(acts, cols / Block<T>::VALUES, taken.first, taken.count, groups, min(group, groups - 1));
    const u8 *w = jobs.w[blockIdx.z];
    float sums[EIGHTS][4] = {};
    if (!eights<T, EIGHTS, SPLIT, WARPS>(Sixteen{{w, w}, {o, o + 8}}, outputs, cols, group < groups, rows, tables, sums)) return;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int row = 8 * i + lane % 4 * 2 + c % 2, at = o + c / 2 * 8;
            if (row < taken.count && at < end) out[(size_t)(taken.first + row) * outputs + at] = sums[i][c];
        }
    }
}

// Warps of a block and blocks of a multiprocessor, for experts and for one matrix.
template <int EIGHTS> constexpr int EXPERT_WARPS = EIGHTS == 1 ? 8 : 12;
template <int EIGHTS> constexpr int EXPERT_BLOCKS = EIGHTS == 1 ? 2 : 1;
template <int T> constexpr int ALONE_WARPS = T == IQ2_XXS ? 8 : 4;
template <int T> constexpr int ALONE_BLOCKS = 16 / ALONE_WARPS<T>;

#define EIGHTS_N(name, type, n) \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_WARPS<n>, EXPERT_BLOCKS<n>) eights_pair_##name##_##n( \
        const __grid_constant__ TileJobs jobs, const i8 *codes, const float *scales, const i16 *sums, float *out, int outputs, int cols, int rounds, \
        float limit \
    ) { \
        previous_ended(); \
        eights_experts<type, n, true>(jobs, Acts{codes, scales, sums}, out, outputs, cols, rounds, limit); \
    } \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_WARPS<n>, EXPERT_BLOCKS<n>) eights_##name##_##n( \
        const __grid_constant__ TileJobs jobs, const i8 *codes, const float *scales, const i16 *sums, float *out, int outputs, int cols, int rounds \
    ) { \
        previous_ended(); \
        eights_experts<type, n, false>(jobs, Acts{codes, scales, sums}, out, outputs, cols, rounds, 0.0f); \
    } \
    extern "C" __global__ void __launch_bounds__(32 * ALONE_WARPS<type>, ALONE_BLOCKS<type>) eights_alone_##name##_##n( \
        const __grid_constant__ TileJobs jobs, const i8 *codes, const float *scales, const i16 *sums, float *out, int outputs, int cols, int groups \
    ) { \
        previous_ended(); \
        eights_alone<type, n, 4, ALONE_WARPS<type>>(jobs, Acts{codes, scales, sums}, out, outputs, cols, groups); \
    }
#define EIGHTS(name, type) EIGHTS_N(name, type, 1) EIGHTS_N(name, type, 2)
EIGHTS(q8_0, Q8_0)
EIGHTS(q2_k, Q2_K)
EIGHTS(q3_k, Q3_K)
EIGHTS(q4_k, Q4_K)
EIGHTS(q6_k, Q6_K)
EIGHTS(iq2_xxs, IQ2_XXS)
EIGHTS(mxfp4, MXFP4)
