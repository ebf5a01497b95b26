// Reads memory and does nothing else, to be timed.
// Never writes more than one number: the exclusive or of all words, the same in any order. Surprising fact: the memory may be the host's, which is
// what the time is wanted for.
#include "common.cuh"

constexpr int THREADS = 256, AT_ONCE = 4;

// words: [count]; out: [1], to which their exclusive or is added by exclusive or.
extern "C" __global__ void __launch_bounds__(THREADS) memory_rate(const uint4 *words, u64 count, u64 *out) {
    previous_ended();
    u64 step = (u64)gridDim.x * THREADS, i = (u64)blockIdx.x * THREADS + threadIdx.x;
    uint4 all = make_uint4(0, 0, 0, 0), now[AT_ONCE];
    auto add = [&](uint4 w) { all = make_uint4(all.x ^ w.x, all.y ^ w.y, all.z ^ w.z, all.w ^ w.w); };
    for (; i + (AT_ONCE - 1) * step < count; i += AT_ONCE * step) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) now[k] = words[i + k * step];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) add(now[k]);
    }
    for (; i < count; i += step) add(words[i]);
    u64 sum = ((u64)all.y << 32 | all.x) ^ ((u64)all.w << 32 | all.z);
    for (int half = 16; half > 0; half /= 2) sum ^= __shfl_xor_sync(FULL, sum, half);
    if (threadIdx.x % 32 == 0) atomicXor(out, sum);
}
