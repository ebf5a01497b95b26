// Dot products of many query heads with many rows of floats that they share, in the lanes of the CPU op.
// Never fuses a product with its addition, and never adds across lanes before the end. Surprising fact: no tensor cores: 16 running sums of
// each product, in order, are what makes the bits those of a single row, and the floating-point units are busy with them all the time.
#pragma once
#include "common.cuh"

// Heads and keys of a tile, and values of a key that are in shared memory at a time.
constexpr int TILE_HEADS = 32, TILE_KEYS = 64, TILE_PART = 64;
// Four threads share 8 heads by 4 keys, four lanes each.
constexpr int TILE_THREADS = 256, HEADS_EACH = 8, KEYS_EACH = 4, HEAD_GROUPS = TILE_HEADS / HEADS_EACH, KEY_GROUPS = TILE_KEYS / KEYS_EACH;
static_assert(4 * HEAD_GROUPS * KEY_GROUPS == TILE_THREADS, "one product of groups for each four threads");
// Values from one key to the next: eight threads that read two keys find them in different banks.
constexpr int PART_STRIDE = TILE_PART + 16;
// Shared memory of one part of a tile's keys, in values.
constexpr int PART_ROOM = TILE_KEYS * PART_STRIDE;

// Four values on their way into shared memory.
__device__ __forceinline__ void copy16(float *to, const float *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(float4 *)to = *(const float4 *)from;
#endif
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copies of part `part` of the keys of a tile; row_of(i) is where key i of the tile begins.
template <typename RowOf> __device__ __forceinline__ void copy_part(float *to, int part, RowOf row_of) {
    constexpr int PIECES = TILE_PART / 4;
#pragma unroll
    for (int first = 0; first < TILE_KEYS; first += TILE_THREADS / PIECES) {
        int key = first + threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        copy16(to + key * PART_STRIDE + piece * 4, row_of(key) + part * TILE_PART + piece * 4);
    }
}

// Two lanes of two products: the thread whose bit `bit` is not set keeps the sum of both a, the other one that of both b.
__device__ __forceinline__ float exchange_sum(float a, float b, int bit) {
    bool is_upper = threadIdx.x & bit;
    return (is_upper ? b : a) + __shfl_xor_sync(FULL, is_upper ? a : b, bit);
}

// One part: lanes[h][k][c] += query * key.
__device__ __forceinline__ void add_part(float (&lanes)[HEADS_EACH][KEYS_EACH][4], const float *query, int query_stride, const float *keys) {
#pragma unroll
    for (int at = 0; at < TILE_PART; at += LANES) {
        float4 key[KEYS_EACH];
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) key[k] = *(const float4 *)(keys + k * KEY_GROUPS * PART_STRIDE + at);
#pragma unroll
        for (int h = 0; h < HEADS_EACH; h++) {
            float4 q = *(const float4 *)(query + h * query_stride + at);
#pragma unroll
            for (int k = 0; k < KEYS_EACH; k++) {
                float(&lane)[4] = lanes[h][k];
                lane[0] += q.x * key[k].x;
                lane[1] += q.y * key[k].y;
                lane[2] += q.z * key[k].z;
                lane[3] += q.w * key[k].w;
            }
        }
    }
}

// Products of TILE_HEADS queries of WIDTH values in shared memory, one after another, with `keys` keys: put(head, key, float2) gets those of heads
// `head` and `head + 1`, end() is called behind each tile of keys. row_of(i) is where key i begins, also for `keys` and beyond. `parts`: room for two
// parts, which nobody may use before all threads have returned.
template <int WIDTH, typename RowOf, typename Put, typename End>
__device__ __forceinline__ void tile_dots(const float *queries, float *parts, int keys, RowOf row_of, Put put, End end) {
    constexpr int PARTS = WIDTH / TILE_PART;
    int tid = threadIdx.x, t = tid % 4, key_group = tid / 4 % 4 + tid / 32 % 4 * 4, head_group = tid / 16 % 2 + tid / 128 * 2;
    const float *query = queries + head_group * HEADS_EACH * WIDTH + 4 * t;
    int turn = 0;
    auto copy = [&](int base, int part, int turn) {
        copy_part(parts + turn * PART_ROOM, part, [&](int i) { return row_of(base + i); });
    };
    copy(0, 0, turn);
#pragma unroll 1
    for (int base = 0; base < keys; base += TILE_KEYS) {
        float lanes[HEADS_EACH][KEYS_EACH][4] = {};
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {
            copies_wait();
            // What came is seen by all, and nobody reads the part before any more.
            __syncthreads();
            if (part + 1 < PARTS) {
                copy(base, part + 1, turn ^ 1);
            } else if (base + TILE_KEYS < keys) {
                copy(base + TILE_KEYS, 0, turn ^ 1);
            }
            add_part(lanes, query + part * TILE_PART, WIDTH, parts + turn * PART_ROOM + key_group * PART_STRIDE + 4 * t);
            turn ^= 1;
        }
        // Lanes fold onto each other: 16 -> 8 -> 4 among the threads, each of which keeps two heads, then within one.
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            float four[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float low = exchange_sum(lanes[h][k][c], lanes[h + 4][k][c], 2), high = exchange_sum(lanes[h + 2][k][c], lanes[h + 6][k][c], 2);
                    four[h][c] = exchange_sum(low, high, 1);
                }
            }
            float2 sums = make_float2((four[0][0] + four[0][2]) + (four[0][1] + four[0][3]), (four[1][0] + four[1][2]) + (four[1][1] + four[1][3]));
            put(head_group * HEADS_EACH + t / 2 * 4 + t % 2 * 2, base + key_group + k * KEY_GROUPS, sums);
        }
        end(base);
    }
}
