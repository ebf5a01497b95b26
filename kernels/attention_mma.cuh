// Attention of many rows on tensor cores: 16 * MT heads of a row a block, which share its keys. Scores stay in registers while the values of
// queries and keys pass through shared memory, 16 channels at a time; weights stay in shared memory while keys pass a second time.
// Never adds in another order than attention_spread.cuh. Surprising fact: weights take the place of the keys that scores came from.
#pragma once
#include "attention_parts.cuh"

constexpr int MMA_THREADS = 256, MMA_WARPS = MMA_THREADS / 32, MMA_KEYS = 640;
// Tiles of 8 keys and of 8 channels of a warp, and rows of a step of values that it brings.
constexpr int KEY_TILES = MMA_KEYS / 8 / MMA_WARPS, CHANNEL_TILES = HEAD_WIDTH / 8 / MMA_WARPS, VALUE_ROWS = STEP / MMA_WARPS;
// Products under way in a warp.
constexpr int KEY_GROUP = 5, CHANNEL_GROUP = 4;
// Values from one head's weights to the next one's: eight threads that read two heads find them in different banks.
constexpr int WEIGHT_STRIDE = MMA_KEYS + 16;
// Bytes of the parts of one step's factors, of one step's keys in F32, and of a step's values in BF16, a row of which is 16 bytes longer.
__host__ __device__ constexpr int factor_room(int mt) { return PARTS * mt * 512; }
constexpr int KEY_ROOM = MMA_KEYS * STEP * 4, VALUE_STRIDE = HEAD_WIDTH * 2 + 16, VALUE_ROOM = STEP * VALUE_STRIDE;
// Steps of keys in shared memory.
__host__ __device__ constexpr int key_stages(int mt) { return mt == 4 ? 4 : 2; }
__host__ __device__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }
// Shared: where each key lies; factors of two steps; then keys of some steps, or weights and the values of two steps.
__host__ __device__ constexpr int mma_shared(int mt) {
    return MMA_KEYS * 8 + 2 * factor_room(mt) + larger_of(key_stages(mt) * KEY_ROOM, 16 * mt * WEIGHT_STRIDE * 4 + 2 * VALUE_ROOM);
}

__device__ __forceinline__ void copy_16(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of copies but the last `LEFT`.
template <int LEFT> __device__ __forceinline__ void copies_wait_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// What a thread brings of one step's factors: two terms of a head and of the eighth one behind it.
struct Brought {
    bool has_any;
    int head, term;

    __device__ __forceinline__ Brought(int mt) : has_any(threadIdx.x < 64 * mt), head(threadIdx.x / 64 * 16 + threadIdx.x / 8 % 8), term(threadIdx.x % 8 * 2) {}
};

// Into the place where a warp looks for them.
template <int MT> __device__ __forceinline__ void put_factors(u8 *to, float2 g, float2 g8) {
    u32 a[PARTS], b[PARTS];
    split_pair(g.x, g.y, a);
    split_pair(g8.x, g8.y, b);
    to += threadIdx.x / 64 * 512 + threadIdx.x % 64 * 8;
#pragma unroll
    for (int p = 0; p < PARTS; p++) *(uint2 *)(to + p * MT * 512) = make_uint2(a[p], b[p]);
}

template <int MT> __device__ __forceinline__ Factors factors_of(const u8 *from, int m) {
    Factors f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) f.parts[p] = *(const uint4 *)(from + (p * MT + m) * 512 + threadIdx.x % 32 * 16);
    return f;
}

// Scores of up to 8 * MMA_WARPS * NT keys into `weights`, minus infinity behind the last.
template <int MT, int NT>
__device__ __forceinline__ void score_keys(
    const float *q, const u64 *rows, u8 *factors, u8 *stages, float *weights, int keys, float scale
) {
    constexpr int STAGES = key_stages(MT), AT_ONCE = MMA_THREADS / 4, LOADS = NT * 8 * MMA_WARPS / AT_ONCE;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    float sums[MT][NT][4] = {};
    Brought mine(MT);
    float2 query[2];
    q += mine.head * HEAD_WIDTH + mine.term;
    auto fetch = [&](int step) {
        if (!mine.has_any || step >= SCORE_STEPS) return;
        query[0] = *(const float2 *)(q + step * STEP);
        query[1] = *(const float2 *)(q + 8 * HEAD_WIDTH + step * STEP);
    };
    auto copy_keys = [&](int step) {
        if (step < SCORE_STEPS) {
            u8 *to = stages + step % STAGES * KEY_ROOM + tid * 16;
#pragma unroll
            for (int i = 0; i < LOADS; i++) copy_16(to + i * AT_ONCE * 64, (const float *)rows[i * AT_ONCE + tid / 4] + step * STEP + tid % 4 * 4);
        }
        copies_end();
    };
    for (int step = 0; step < STAGES - 1; step++) copy_keys(step);
    fetch(0);
    if (mine.has_any) put_factors<MT>(factors, query[0], query[1]);
    fetch(1);
#pragma unroll 1
    for (int step = 0; step < SCORE_STEPS; step++) {
        copies_wait_but<STAGES - 2>();
        // What came is seen by all, and nobody reads the step before any more.
        __syncthreads();
        copy_keys(step + STAGES - 1);
        if (mine.has_any) put_factors<MT>(factors + (step + 1) % 2 * factor_room(MT), query[0], query[1]);
        fetch(step + 2);
        const u8 *from = stages + step % STAGES * KEY_ROOM + (warp * 8 + g) * 64 + t * 16;
        uint2 b[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 v = *(const float4 *)(from + n * MMA_WARPS * 512);
            b[n] = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            Factors f = factors_of<MT>(factors + step % 2 * factor_room(MT), m);
            add_products_of<NT % KEY_GROUP == 0 ? KEY_GROUP : NT>(sums[m], f, b);
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int key = (n * MMA_WARPS + warp) * 8 + 2 * t;
            float(&s)[4] = sums[m][n];
            float none = __uint_as_float(0xff800000u);
            float *to = weights + (m * 16 + g) * WEIGHT_STRIDE + key;
            *(float2 *)to = make_float2(key < keys ? s[0] * scale : none, key + 1 < keys ? s[1] * scale : none);
            *(float2 *)(to + 8 * WEIGHT_STRIDE) = make_float2(key < keys ? s[2] * scale : none, key + 1 < keys ? s[3] * scale : none);
        }
    }
    __syncthreads();
}

// One step of two tiles of 8 channels; `at`: 8 channels of the value that this thread names.
__device__ __forceinline__ void load_values(uint2 &a, uint2 &b, const u8 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.x), "=r"(a.y), "=r"(b.x), "=r"(b.y)
                 : "r"((u32)__cvta_generic_to_shared(at))
                 : "memory");
}

template <int MT>
__device__ __forceinline__ void attend_mma(
    float4 *shared, const float *q, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int window_slots,
    int window_len, int k, int first_pos, float scale
) {
    constexpr int HEADS = 16 * MT;
    __shared__ float totals[HEADS];
    u64 *rows = (u64 *)shared;
    u8 *factors = (u8 *)(rows + MMA_KEYS), *work = factors + 2 * factor_room(MT);
    float *weights = (float *)work;
    u8 *values = work + HEADS * WEIGHT_STRIDE * 4;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, first_head = blockIdx.x * HEADS;
    size_t r = blockIdx.y;
    Keys list(window, compressed, selected, r, window_slots, window_len, k, first_pos);

    int keys = 0;
    for (int i = tid; i < MMA_KEYS; i += MMA_THREADS) {
        const float *row = list.at(i, k);
        rows[i] = (u64)(row ? row : list.at(0, k));
    }
    for (int i = 0; i < MMA_KEYS; i += MMA_THREADS) {
        int at = i + tid;
        keys += __syncthreads_count(at < MMA_KEYS && (at < list.in_window || (at - list.in_window < k && list.picks[at - list.in_window] >= 0)));
    }
    q += (r * heads + first_head) * HEAD_WIDTH;
    if (keys <= 128) {
        score_keys<MT, 128 / 8 / MMA_WARPS>(q, rows, factors, work, weights, keys, scale);
    } else {
        score_keys<MT, KEY_TILES>(q, rows, factors, work, weights, keys, scale);
    }

    // Values: some rows of a step a warp, on their way while weights are computed.
    int steps = (keys + STEP - 1) / STEP;
    float4 coming[VALUE_ROWS][4];
    auto fetch = [&](int step) {
        if (step >= steps) return;
#pragma unroll
        for (int e = 0; e < VALUE_ROWS; e++) {
            const float *row = (const float *)rows[step * STEP + VALUE_ROWS * warp + e];
#pragma unroll
            for (int i = 0; i < 4; i++) coming[e][i] = *(const float4 *)(row + i * 128 + lane * 4);
        }
    };
    // Terms 4 * t + e of a step lie in rows 2 * t + e, for e = 2, 3 in 8 + 2 * t + e - 2.
    auto keep = [&](int step) {
        int first = VALUE_ROWS * warp;
        u8 *to = values + step % 2 * VALUE_ROOM + (first / 2 % 2 * 8 + first / 4 * 2 + first % 2) * VALUE_STRIDE + lane * 8;
#pragma unroll
        for (int e = 0; e < VALUE_ROWS; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float4 v = coming[e][i];
                *(uint2 *)(to + e * VALUE_STRIDE + i * 256) = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
            }
        }
    };
    Brought mine(MT);
    auto weigh = [&](int step) {
        if (!mine.has_any || step >= steps) return;
        const float *weight = weights + mine.head * WEIGHT_STRIDE + step * STEP + mine.term;
        put_factors<MT>(factors + step % 2 * factor_room(MT), *(const float2 *)weight, *(const float2 *)(weight + 8 * WEIGHT_STRIDE));
    };
    fetch(0);
#pragma unroll 1
    for (int h = warp; h < HEADS; h += MMA_WARPS) {
        float *of = weights + h * WEIGHT_STRIDE + lane;
        float total = soften<MMA_KEYS / 32>(
            steps * STEP, sinks[first_head + h], [&](int i) { return of[i * 32]; }, [&](int i, float weight) { of[i * 32] = weight; }
        );
        if (lane == 0) totals[h] = total;
    }
    __syncthreads();
    keep(0);
    weigh(0);
    fetch(1);

    float sums[MT][CHANNEL_TILES][4] = {};
    const u8 *at = values + (lane / 8 % 2 * 8 + lane % 8) * VALUE_STRIDE + (warp * CHANNEL_TILES * 8 + lane / 16 * 8) * 2;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        __syncthreads();
        if (step + 1 < steps) keep(step + 1);
        weigh(step + 1);
        fetch(step + 2);
        uint2 b[CHANNEL_TILES];
#pragma unroll
        for (int n = 0; n < CHANNEL_TILES; n += 2) load_values(b[n], b[n + 1], at + step % 2 * VALUE_ROOM + n * 16);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            Factors f = factors_of<MT>(factors + step % 2 * factor_room(MT), m);
            add_products_of<CHANNEL_GROUP>(sums[m], f, b);
        }
    }
    out += (r * heads + first_head) * HEAD_WIDTH + warp * CHANNEL_TILES * 8 + 2 * t;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        float low = totals[m * 16 + g], high = totals[m * 16 + g + 8];
#pragma unroll
        for (int n = 0; n < CHANNEL_TILES; n++) {
            float(&s)[4] = sums[m][n];
            float *to = out + (m * 16 + g) * HEAD_WIDTH + n * 8;
            *(float2 *)to = make_float2(s[0] / low, s[1] / low);
            *(float2 *)(to + 8 * HEAD_WIDTH) = make_float2(s[2] / high, s[3] / high);
        }
    }
}

// The parameters of `attention`. Grid (heads / 64, rows), MMA_THREADS threads. Shared: mma_shared(4) bytes.
extern "C" __global__ void __launch_bounds__(MMA_THREADS, 1) attention_mma_64(
    const float *q, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int width,
    int window_slots, int window_len, int k, int first_pos, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    attend_mma<4>(dynamic, q, window, compressed, selected, sinks, out, heads, window_slots, window_len, k, first_pos, scale);
}

// The same for devices with less shared memory. Grid (heads / 16, rows). Shared: mma_shared(1) bytes.
extern "C" __global__ void __launch_bounds__(MMA_THREADS, 1) attention_mma_16(
    const float *q, const float *window, const float *compressed, const int *selected, const float *sinks, float *out, int heads, int width,
    int window_slots, int window_len, int k, int first_pos, float scale
) {
    previous_ended();
    extern __shared__ float4 dynamic[];
    attend_mma<1>(dynamic, q, window, compressed, selected, sinks, out, heads, window_slots, window_len, k, first_pos, scale);
}
