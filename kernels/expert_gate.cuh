// Experts of one row found on the device: which slots they lie in, and a gate that stands closed while one of them is on its way.
// A guess of what the next layer will choose is told too, so that the host can bring it ahead.
// Never hears of the host while all are there. Surprising fact: the host reads every choice, but only answers where an expert is absent; an
// answer is one small kernel on the stream that brings experts, which names their slots and opens the gate.
#pragma once
#include "common.cuh"

// Experts of a row, and entries of the table that one answer changes.
constexpr int EXPERTS_MAX = 16, CHANGES_MAX = 2 * EXPERTS_MAX;
// Looks at the gate between two looks at host memory.
constexpr int LOOKS = 32;

// Nanoseconds of the device's clock; all its kernels see the same one.
__device__ __forceinline__ u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Times of a layer: its choice, the first look at its gate, and when that was found open.
constexpr int CHOSEN = 0, LOOKED = 1, OPENED = 2;

__device__ __forceinline__ u32 look(const u32 *at) { return *(const volatile u32 *)at; }

// ids, weights: [k] as the router chose; table: [experts] addresses of slots, 0 where there is none; sorted, sorted_weights: [k] by rising id.
// told (host memory): the ids, whether all are there, the number of the pass. One warp.
extern "C" __global__ void __launch_bounds__(32) resolve_experts(
    const int *ids, const float *weights, const u64 *table, int *sorted, float *sorted_weights, u32 *told, u32 *gate, u32 pass, int k, u64 *times
) {
    previous_ended();
    int i = threadIdx.x;
    bool is_one = i < k;
    int id = is_one ? ids[i] : 0;
    int place = 0;
    for (int other = 0; other < k; other++) {
        int their = __shfl_sync(FULL, id, other);
        place += their < id || (their == id && other < i);
    }
    bool is_here = !is_one || table[id] != 0;
    bool are_all = __all_sync(FULL, is_here);
    if (is_one) {
        sorted[place] = id;
        sorted_weights[place] = weights[i];
        ((volatile u32 *)told)[2 + i] = (u32)id;
    }
    if (i == 0) ((volatile u32 *)told)[1] = are_all;
    __threadfence_system();
    __syncwarp();
    if (i != 0) return;
    if (are_all) *(volatile u32 *)gate = pass;
    *(volatile u32 *)told = pass;
    times[CHOSEN] = clock_ns();
}

// told (host memory): the number of the pass, then the `count` experts `ids` that a layer will probably choose. One warp.
extern "C" __global__ void __launch_bounds__(32) tell_guess(const int *ids, u32 *told, u32 pass, int count) {
    previous_ended();
    int i = threadIdx.x;
    if (i < count) ((volatile u32 *)told)[1 + i] = (u32)ids[i];
    __threadfence_system();
    __syncwarp();
    if (i == 0) *(volatile u32 *)told = pass;
}

// Waits until `gate` is open for `pass`, then looks up the slots of the experts `sorted`; none if `stop` (host memory) names the pass.
// One warp.
extern "C" __global__ void __launch_bounds__(32) await_experts(
    const u32 *gate, const u32 *stop, u32 pass, const u64 *table, const int *sorted, u64 *slots, int k, u64 *times
) {
    previous_ended();
    u64 looked = clock_ns();
    bool is_open = true;
    for (int looks = 1; look(gate) != pass; looks++) {
        if (looks % LOOKS == 0 && look(stop) == pass) {
            is_open = false;
            break;
        }
        __nanosleep(100);
    }
    __threadfence();
    int i = threadIdx.x;
    if (i < k) slots[i] = is_open ? ((const volatile u64 *)table)[sorted[i]] : 0;
    if (i == 0) {
        times[LOOKED] = looked;
        times[OPENED] = clock_ns();
    }
}

// Writes the time: who knows when this ran on another clock can translate. One thread.
extern "C" __global__ void __launch_bounds__(32) stamp_clock(u64 *at) {
    previous_ended();
    if (threadIdx.x == 0) *at = clock_ns();
}

// Entries of the table that change.
struct Changes {
    u64 slot[CHANGES_MAX];
    int entry[CHANGES_MAX];
};

// Writes `count` entries of the whole table, then opens `gate` for `pass`. One warp.
extern "C" __global__ void __launch_bounds__(CHANGES_MAX) open_gate(
    const __grid_constant__ Changes changes, int count, u64 *table, u32 *gate, u32 pass
) {
    previous_ended();
    int i = threadIdx.x;
    if (i < count) *(volatile u64 *)(table + changes.entry[i]) = changes.slot[i];
    __threadfence();
    __syncwarp();
    if (i == 0) *(volatile u32 *)gate = pass;
}
