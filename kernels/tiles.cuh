// Tiles of a product of many rows on tensor cores: copies on their way, fragments, codes ready to be multiplied, and the order in which blocks
// join running sums.
// Never changes the CPU's order of sums: inside a block whole numbers are added exactly, so the tensor cores may do it; blocks join their
// running sum one after another. Surprising fact: a tile goes through the blocks residue by residue and folds as it goes, so that one running sum
// of an output is live instead of four or eight.
#pragma once
#include "dots.cuh"

// A warp owns 32 activation rows by 32 weight rows, two warps of a tile lie side by side: MT and NT fragments of 16 rows and 8.
constexpr int MT = 2, NT = 4, WARPS_WIDE = 2, TILE_WEIGHTS = WARPS_WIDE * 8 * NT;
// A tile of HIGH warps one above the other.
template <int HIGH> constexpr int TILE_ROWS = HIGH * 16 * MT;
template <int HIGH> constexpr int TILE_THREADS = 32 * HIGH * WARPS_WIDE;

__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Copies to shared memory that nobody waits for yet. Predicated and not branched around: a step starts a dozen of them.
__device__ __forceinline__ void copy16(u32 to, const void *from, bool is_wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to), "l"(from), "r"((u32)is_wanted)
                 : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const void *from, bool is_wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(to), "l"(from), "r"((u32)is_wanted)
                 : "memory");
}

// All copies of this thread have landed.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 rows of 16 bytes; thread i of eights gives the address of a row of its matrix.
__device__ __forceinline__ void load_matrices(u32 to[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// out = a * b + c: 16 activation rows by 8 weight rows, 32 codes of each.
__device__ __forceinline__ void multiply_32(int out[4], const u32 a[4], const u32 *b, const int c[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// The same, 16 codes of each.
__device__ __forceinline__ void multiply_16(int out[4], const u32 *a, u32 b, const int c[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Where a row's piece of 16 codes lies among rows of `pitch` bytes: neighbouring rows have the same piece in different banks.
__device__ __forceinline__ u32 piece_place(int row, int piece, int pitch) { return (u32)(row * pitch + ((piece ^ (row & 7)) << 4)); }

// Fragment `i` of activation rows of a warp, pieces `piece` and the next: ready for `multiply_32`.
__device__ __forceinline__ void load_rows(u32 to[4], u32 base, int first, int piece, int pitch) {
    int lane = threadIdx.x % 32;
    load_matrices(to, base + piece_place(first + lane % 16, piece + lane / 16, pitch));
}

// Two neighbouring fragments of weight rows: `to` and `to + 2`.
__device__ __forceinline__ void load_weights(u32 to[4], u32 base, int first, int piece, int pitch) {
    int lane = threadIdx.x % 32;
    load_matrices(to, base + piece_place(first + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2, pitch));
}

// (4 - code) * scale in each byte, for codes up to 7 and a scale of -32 to 31.
__device__ __forceinline__ int fold_q3_k(int codes, int scale) {
    // No byte of the product reaches 256.
    u32 product = (u32)codes * (u32)abs(scale), four = ((u32)(4 * scale) & 255) * 0x01010101u;
    return (int)(scale < 0 ? __vadd4(four, product) : __vsub4(four, product));
}

// Codes of piece j as a tile has them.
template <int T> __device__ __forceinline__ uint4 piece_of(const Part256 &p, const Raw256 &raw, int j, int t) {
    u32 out[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        u32 codes = (u32)p.codes[j][c];
        if constexpr (T == Q2_K) {
            // Codes lie 2j bits up, the scale 6 - 2j.
            codes = (codes >> (2 * j)) * ((u32)p.scales[j] >> (6 - 2 * j));
        } else if constexpr (T == Q3_K) {
            codes = (u32)fold_q3_k((int)codes, p.scales[j]);
        } else if constexpr (T == Q6_K) {
            codes = ((codes | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
        }
        out[c] = codes;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// Four codes of MXFP4 as bytes with their signs.
__device__ __forceinline__ u32 mxfp4_bytes(u32 four) {
    return __vsub4(prmt(MXFP4_LOW, MXFP4_HIGH, four), prmt(MXFP4_LOW, MXFP4_HIGH, four ^ 0x8888));
}

// What a tile computes: activation rows from `first` on, of `rows` of `group`; weight rows `o` to `end`.
struct Tile {
    int first, rows, groups, group, o, end;
};

// Bit k says whether row `at + k * stride` of `count` exists. What lies beyond the last row is not fetched, and nobody stores what comes of it.
__device__ __forceinline__ u32 existing(int at, int stride, int count) {
    int rows = max(0, (count - at + stride - 1) / stride);
    return rows >= 32 ? ~0u : (1u << rows) - 1;
}

// Grid: tiles of activation rows, tiles of weight rows of all groups.
template <int HIGH> __device__ __forceinline__ Tile tile_of(int w_rows, int rows, int groups) {
    int each = w_rows / groups, tiles = (each + TILE_WEIGHTS - 1) / TILE_WEIGHTS, group = (int)blockIdx.y / tiles;
    return Tile{(int)blockIdx.x * TILE_ROWS<HIGH>, rows, groups, group, group * each + (int)blockIdx.y % tiles * TILE_WEIGHTS, (group + 1) * each};
}

// Experts of a launch, and their matrices.
constexpr int JOB_EXPERTS_MAX = 64, JOBS_MAX = 2 * JOB_EXPERTS_MAX;

// Matrices of expert e: w[e * matrices] and on; its rows of activations and outputs.
struct TileJobs {
    const u8 *w[JOBS_MAX];
    struct {
        int first, count;
    } rows[JOB_EXPERTS_MAX];
};

// Steps of a pass over SUMS residues: in pass p blocks of residue `bits of p reversed` join one running sum, EACH of them a step.
template <int SUMS, int EACH> struct Walk {
    int blocks, pass, step, steps;
    __device__ __forceinline__ explicit Walk(int blocks) : blocks(blocks), pass(-1), step(0), steps(0) { next_pass(); }
    __device__ __forceinline__ int residue() const { return SUMS == 8 ? (pass & 1) << 2 | (pass & 2) | pass >> 2 : (pass & 1) << 1 | pass >> 1; }
    // First block of the step; the others follow SUMS apart.
    __device__ __forceinline__ int block() const { return residue() + SUMS * EACH * step; }
    // How many blocks the step has.
    __device__ __forceinline__ int count() const { return min(EACH, (blocks - block() + SUMS - 1) / SUMS); }
    __device__ __forceinline__ void next_pass() {
        pass++;
        step = 0;
        steps = pass < SUMS ? max(0, (blocks - residue() + SUMS * EACH - 1) / (SUMS * EACH)) : 0;
    }
    __device__ __forceinline__ bool is_done() const { return pass >= SUMS; }
};

// Outputs of a thread.
constexpr int OUTPUTS = 4 * MT * NT;

// Running sums of earlier passes that wait for their partner: few reads and writes of local memory a pass; in registers they would halve the
// warps of a multiprocessor.
struct Waiting {
    float sums[3][OUTPUTS];
    int depth;
};

// The end of pass `pass` of SUMS: what it completes is folded, halves onto each other, and the next pass starts from zero.
template <int SUMS> __device__ __forceinline__ void end_pass(float (&now)[OUTPUTS], Waiting &waiting, int pass) {
    for (int p = pass; p & 1; p >>= 1) {
        waiting.depth--;
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) now[i] = waiting.sums[waiting.depth][i] + now[i];
    }
    if (pass == SUMS - 1) return;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        waiting.sums[waiting.depth][i] = now[i];
        now[i] = 0.0f;
    }
    waiting.depth++;
}

// out: [rows, w_rows].
__device__ __forceinline__ void store_tile(const Tile &tile, const float (&now)[OUTPUTS], float *out, int w_rows, int row, int weight) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int c = 0; c < 4; c += 2) {
                int r = tile.first + row + 16 * i + 8 * (c / 2) + g, o = tile.o + weight + 8 * j + 2 * t;
                if (r >= tile.rows || o >= tile.end) continue;
                float *to = out + (size_t)r * w_rows + o;
                const float *from = now + (i * NT + j) * 4 + c;
                float2 both = make_float2(from[0] + 0.0f, from[1] + 0.0f);
                if (o + 1 < tile.end && (size_t)to % 8 == 0) {
                    *(float2 *)to = both;
                } else {
                    to[0] = both.x;
                    if (o + 1 < tile.end) to[1] = both.y;
                }
            }
        }
    }
}
