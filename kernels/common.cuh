// What all kernels share: number types, conversions, and sums in the order that the CPU ops define.
// Never includes a header: the same text is compiled by nvcc and by NVRTC, which has none.
// Surprising fact: compiled without contraction into fused multiply-adds, and with exp and log taken in F64, so that a kernel
// rounds where its CPU twin rounds and most results have the same bits.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;

// First thing in every kernel: waits until the kernel before it has ended. The next one may be set up while the last blocks of this one run, and
// must touch nothing before this returns.
__device__ __forceinline__ void previous_ended() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lanes of a sum in the CPU ops: value i is added to lane i % 16.
constexpr int LANES = 16;
constexpr u32 FULL = 0xffffffffu;

__device__ __forceinline__ float half_value(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Rounded once from F64, as on the CPU.
__device__ __forceinline__ float exp_of(float x) { return (float)exp((double)x); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// Folds 16 lanes held as 4 by each of 4 neighbouring threads (thread t holds lanes 4t..4t+3); the sum is valid in thread 0 of the four.
// All threads of the warp must take part.
__device__ __forceinline__ float fold_fours(const float lane[4]) {
    float sum[4];
    for (int c = 0; c < 4; c++) sum[c] = lane[c] + __shfl_down_sync(FULL, lane[c], 2, 4);
    for (int c = 0; c < 4; c++) sum[c] = sum[c] + __shfl_down_sync(FULL, sum[c], 1, 4);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Values that a thread of a long sum reads before it adds the first of them.
constexpr int AHEAD = 16;

// Threads of a block that sums, values that it holds in shared memory at a time, and how many of those are one thread's.
constexpr int SUM_THREADS = 512, SUM_EACH = 10, SUM_TILE = SUM_THREADS * SUM_EACH;
// A lane's values lie one after another; four more places keep the lanes of a warp in different banks.
constexpr int LANE_STRIDE = SUM_TILE / LANES + 4, SUM_ROOM = LANES * LANE_STRIDE;

// lane + at[0] + at[1] + .. up to `len` values, in order; loads are ahead of the additions, which wait for one another.
__device__ __forceinline__ float add_lane(float lane, const float *at, int len) {
    float4 now[AHEAD / 4], next[AHEAD / 4];
    int whole = len / AHEAD;
    auto load = [](float4 to[AHEAD / 4], const float *from) {
#pragma unroll
        for (int k = 0; k < AHEAD / 4; k++) to[k] = *(const float4 *)(from + 4 * k);
    };
    load(now, at);
#pragma unroll 2
    for (int batch = 0; batch < whole; batch++) {
        at += AHEAD;
        if (batch + 1 < whole) load(next, at);
#pragma unroll
        for (int k = 0; k < AHEAD / 4; k++) lane = (((lane + now[k].x) + now[k].y) + now[k].z) + now[k].w;
#pragma unroll
        for (int k = 0; k < AHEAD / 4; k++) now[k] = next[k];
    }
    for (int i = whole * AHEAD; i < len; i++) lane += *at++;
    return lane;
}

// Sum of term(0..count) in the order of the CPU's 16 lanes, by a block of SUM_THREADS threads; every thread gets it.
// `tiles` has room for 2 * SUM_ROOM values, on a multiple of 16 bytes: while 16 threads add up one tile, the next is on its way.
template <typename Term>
__device__ float block_sum(int count, float *tiles, Term term) {
    __shared__ float result;
    float lane = 0.0f, v[SUM_EACH];
    int tid = threadIdx.x;
    auto fetch = [&](int first) {
#pragma unroll
        for (int k = 0; k < SUM_EACH; k++) {
            int i = first + k * SUM_THREADS + tid;
            v[k] = i < count ? term(i) : 0.0f;
        }
    };
    fetch(0);
    for (int first = 0, turn = 0; first < count; first += SUM_TILE, turn ^= 1) {
        float *tile = tiles + turn * SUM_ROOM;
#pragma unroll
        for (int k = 0; k < SUM_EACH; k++) tile[tid % LANES * LANE_STRIDE + (k * SUM_THREADS + tid) / LANES] = v[k];
        // Whoever adds comes here after its last tile, so that the one before may be overwritten.
        __syncthreads();
        if (first + SUM_TILE < count) fetch(first + SUM_TILE);
        int len = min(SUM_TILE, count - first);
        if (tid < LANES) lane = add_lane(lane, tile + tid * LANE_STRIDE, (len - tid + LANES - 1) / LANES);
    }
    if (tid < 32) {
        for (int half = LANES / 2; half > 0; half /= 2) lane += __shfl_down_sync(FULL, lane, half, LANES);
        if (tid == 0) result = lane;
    }
    __syncthreads();
    float sum = result;
    __syncthreads();
    return sum;
}

// The same of values that the threads hold, value k * SUM_THREADS + tid in v[k], zeros behind `count`.
__device__ float block_sum_of(const float v[SUM_EACH], int count, float *tile) {
    __shared__ float result;
    int tid = threadIdx.x;
#pragma unroll
    for (int k = 0; k < SUM_EACH; k++) tile[tid % LANES * LANE_STRIDE + (k * SUM_THREADS + tid) / LANES] = v[k];
    __syncthreads();
    if (tid < 32) {
        float lane = tid < LANES ? add_lane(0.0f, tile + tid * LANE_STRIDE, (count - tid + LANES - 1) / LANES) : 0.0f;
        for (int half = LANES / 2; half > 0; half /= 2) lane += __shfl_down_sync(FULL, lane, half, LANES);
        if (tid == 0) result = lane;
    }
    __syncthreads();
    return result;
}

// `lanes::rms_factor` of `count` values.
__device__ __forceinline__ float block_rms_factor(const float *x, int count, float eps, float *tiles) {
    float sum = block_sum(count, tiles, [=](int i) { return x[i] * x[i]; });
    return 1.0f / sqrtf(sum / (float)count + eps);
}

// Order-preserving image of a score: the order of `f32::total_cmp` with both zeros equal.
__device__ __forceinline__ u32 score_key(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
