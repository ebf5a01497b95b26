// The largest of a long row of values.
// Never depends on which block ends first: of equal values the lowest index wins. Surprising fact: a value that is no finite number or minus
// infinity makes the whole row one without a best, since nothing should be chosen from it.
#include "common.cuh"

constexpr int THREADS = 512;

// What the blocks bring together; zeros before and after.
struct Found {
    // Order-preserving image of the value, then the complement of its index.
    u64 most;
    u32 is_broken, arrived;
};

// values: [count]; out: [1], -1 where there is no best.
extern "C" __global__ void __launch_bounds__(THREADS) best_of(const float *values, int count, Found *found, int *out) {
    previous_ended();
    __shared__ u64 mosts[THREADS / 32];
    u64 most = 0;
    bool is_broken = false;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        float value = values[i];
        u32 bits = __float_as_uint(value);
        is_broken |= bits == 0x7f800000u || (bits & 0x7fffffffu) > 0x7f800000u;
        if (bits != 0xff800000u) most = max(most, (u64)score_key(value) << 32 | (u32)~i);
    }
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(FULL, most, step));
    if (threadIdx.x % 32 == 0) mosts[threadIdx.x / 32] = most;
    is_broken = __syncthreads_or(is_broken);
    if (threadIdx.x != 0) return;
    for (int w = 1; w < THREADS / 32; w++) most = max(most, mosts[w]);
    atomicMax(&found->most, most);
    if (is_broken) atomicOr(&found->is_broken, 1u);
    __threadfence();
    if (atomicAdd(&found->arrived, 1u) != gridDim.x - 1) return;
    __threadfence();
    u64 best = *(volatile u64 *)&found->most;
    out[0] = *(volatile u32 *)&found->is_broken || best == 0 ? -1 : (int)~(u32)best;
    found->most = 0;
    found->is_broken = found->arrived = 0;
}
