// A place drawn at random, larger values more often, after `best_of` has found the largest.
// Never rounds a sum: weights are whole numbers, so blocks may add them in any order, and the place is the one that the CPU draws.
// Surprising fact: top-k and top-p look for the last value that stays, eleven bits of its rank at a time; no two values have the same rank.
#include "common.cuh"

constexpr int THREADS = 512;
// Values of a block, each thread's, and the bits of a rank that are found at a time.
constexpr int SPAN = 2048, EACH = SPAN / THREADS, BITS = 11, BINS = 1 << BITS;
static_assert(BINS == SPAN, "a thread has as many bins as values");
// The weight of the largest value, and the bits of its lower half: a block's sums of halves fit 32 bits.
constexpr double ONE = 1099511627776.0;
constexpr int HALF_BITS = 20;

// What blocks and launches bring together; zeros before the first launch and after the last one, and places past the bins for the sums of
// the blocks.
struct Work {
    u64 bins[BINS];
    // Rank of the last value that stays; the bits of it that are found; what is still to be reached by better ones of those bits.
    u64 last, found, left;
    u32 arrived, unused;
    u64 sums[1];
};

// `exp_down` of cpu/draw.rs.
__device__ __forceinline__ double exp_down(double x) {
    constexpr double ROUND = 6755399441055744.0, LOG2_E = 1.44269504088896340736, LN_2 = 0.693147180559945309417;
    constexpr double RECIPROCALS[] = {1.0 / 10.0, 1.0 / 9.0, 1.0 / 8.0, 1.0 / 7.0, 1.0 / 6.0, 1.0 / 5.0, 1.0 / 4.0, 1.0 / 3.0, 1.0 / 2.0, 1.0};
    double scaled = (x > -700.0 ? x : -700.0) * LOG2_E;
    double shifted = scaled + ROUND, rest = (scaled - (shifted - ROUND)) * LN_2, series = 1.0;
#pragma unroll
    for (int i = 0; i < 10; i++) series = 1.0 + series * rest * RECIPROCALS[i];
    double power_of_two = __longlong_as_double((long long)(((u64)__double_as_longlong(shifted) + 1023) << 52));
    return x < -700.0 ? 0.0 : series * power_of_two;
}

__device__ __forceinline__ u64 weight_of(float value, double largest, double temperature) {
    constexpr double ROUND = 4503599627370496.0;
    double weight = exp_down(((double)value - largest) / temperature) * ONE + ROUND;
    return (u64)__double_as_longlong(weight) & ((1ull << 52) - 1);
}

__device__ __forceinline__ u64 rank_of(float value, int i, int place_bits) {
    return (u64)score_key(value) << place_bits | (u64)((1u << place_bits) - 1 - (u32)i);
}

// The sum of `own` in the threads before this one; `total` becomes that of all. By the whole block.
__device__ u64 sum_before(u64 own, u64 &total) {
    __shared__ u64 warps[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 upto = own;
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(FULL, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    u64 before = upto - own;
    total = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    __syncthreads();
    return before;
}

// Whether this block is the last of the launch to come here; then it sees what the others wrote before.
__device__ bool is_last(Work *work) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&work->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// One step towards the last value that stays: of the first `k`, or, with a share above 0, of the best that have this share of all weights.
// values: [count]; best: [1]. The first step has the highest shift, that of the last one is 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw_step(const float *values, int count, const int *best, float temperature, float share, int k, int place_bits, int shift, int is_first, Work *work) {
    previous_ended();
    __shared__ u32 low[BINS], high[BINS];
    int top = best[0], tid = threadIdx.x;
    if (top < 0) return;
    double largest = values[top];
    u64 last = work->last, found = is_first ? 0 : work->found, left = work->left;
    for (int b = tid; b < BINS; b += THREADS) low[b] = high[b] = 0;
    __syncthreads();
    for (int n = 0; n < EACH; n++) {
        int i = blockIdx.x * SPAN + n * THREADS + tid;
        if (i >= count) break;
        float value = values[i];
        u64 rank = rank_of(value, i, place_bits);
        if (rank < last || rank >> shift >> BITS != found) continue;
        u64 weight = share > 0.0f ? weight_of(value, largest, temperature) : 1;
        int bin = (int)(rank >> shift) & (BINS - 1);
        atomicAdd(&low[bin], (u32)weight & ((1u << HALF_BITS) - 1));
        if (weight >> HALF_BITS) atomicAdd(&high[bin], (u32)(weight >> HALF_BITS));
    }
    __syncthreads();
    for (int b = tid; b < BINS; b += THREADS) {
        u64 sum = ((u64)high[b] << HALF_BITS) + low[b];
        if (sum) atomicAdd(&work->bins[b], sum);
    }
    if (!is_last(work)) return;
    // Best first: thread 0 has the highest bins.
    u64 sums[EACH], own = 0, total;
    for (int n = 0; n < EACH; n++) {
        u64 *bin = &work->bins[BINS - 1 - (tid * EACH + n)];
        sums[n] = *(volatile u64 *)bin;
        own += sums[n];
        *bin = 0;
    }
    u64 before = sum_before(own, total);
    if (is_first) left = share > 0.0f ? (u64)ceil((double)share * (double)total) : (u64)k;
    if (tid == 0) work->arrived = 0;
    if (before >= left || left > before + own) return;
    for (int n = 0; n < EACH; before += sums[n], n++) {
        if (left > before + sums[n]) continue;
        found = found << BITS | (u64)(BINS - 1 - (tid * EACH + n));
        work->found = found;
        work->left = left - before;
        if (shift == 0) work->last = found;
        return;
    }
}

// The place at `number` (of 2^64) of the weights that are at least `floor`, laid end to end.
// values: [count]; best: [1], where the largest is, or -1, which stays; then the place.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float *values, int count, int *best, float temperature, u64 floor, u64 number, int place_bits, Work *work) {
    previous_ended();
    int top = best[0], tid = threadIdx.x;
    if (top < 0) return;
    double largest = values[top];
    u64 last = work->last, own = 0, total;
    auto weigh = [&](int i) {
        if (i >= count) return 0ull;
        float value = values[i];
        u64 weight = weight_of(value, largest, temperature);
        return weight < floor || rank_of(value, i, place_bits) < last ? 0ull : weight;
    };
    for (int n = 0; n < EACH; n++) own += weigh(blockIdx.x * SPAN + n * THREADS + tid);
    sum_before(own, total);
    if (tid == 0) work->sums[blockIdx.x] = total;
    if (!is_last(work)) return;
    __shared__ u64 at;
    __shared__ int span;
    u64 all = 0, part, before;
    for (int first = 0; first < gridDim.x; first += THREADS) {
        int b = first + tid;
        sum_before(b < gridDim.x ? ((volatile u64 *)work->sums)[b] : 0, part);
        all += part;
    }
    u64 target = __umul64hi(number, all);
    u64 passed = 0;
    for (int first = 0; first < gridDim.x; first += THREADS) {
        int b = first + tid;
        own = b < gridDim.x ? ((volatile u64 *)work->sums)[b] : 0;
        before = passed + sum_before(own, part);
        passed += part;
        if (before <= target && target < before + own) {
            span = b;
            at = target - before;
        }
    }
    __syncthreads();
    u64 weights[EACH];
    own = 0;
    for (int n = 0; n < EACH; n++) own += weights[n] = weigh(span * SPAN + tid * EACH + n);
    before = sum_before(own, part);
    if (tid == 0) {
        work->arrived = 0;
        work->last = 0;
    }
    if (before > at || at >= before + own) return;
    for (int n = 0; n < EACH; before += weights[n], n++) {
        if (at >= before + weights[n]) continue;
        best[0] = span * SPAN + tid * EACH + n;
        return;
    }
}
