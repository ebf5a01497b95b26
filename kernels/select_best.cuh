// The k best of many scores by a whole block, in rising index order; the lower index wins among equals.
// Never depends on the order in which threads run: counters are whole numbers, places come from ballots.
// Surprising fact: the k-th best score is found digit by digit, so no sort takes place.
#pragma once
#include "common.cuh"

constexpr int SELECT_THREADS = 512, SELECT_WARPS = SELECT_THREADS / 32;

// Calls emit(i, is_chosen, place) once for each i below `count` rounded up to warps, in rising chunks; `place` is the number of chosen
// ones below i. key(i) orders (larger is better), is_candidate(i) says who takes part; both are called for i < count only.
// Returns how many were chosen.
template <typename Key, typename IsCandidate, typename Emit>
__device__ int select_best(int count, int k, Key key, IsCandidate is_candidate, Emit emit) {
    __shared__ int bins[256], warp_equal[SELECT_WARPS], warp_chosen[SELECT_WARPS], state[2];
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int candidates = 0;
    for (int first = 0; first < count; first += SELECT_THREADS) {
        int i = first + tid;
        candidates += __syncthreads_count(i < count && is_candidate(i));
    }
    bool takes_all = candidates <= k;
    u32 prefix = 0, mask = 0;
    int left = k;
    for (int shift = 24; shift >= 0 && !takes_all; shift -= 8) {
        for (int i = tid; i < 256; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
        for (int i = tid; i < count; i += SELECT_THREADS) {
            if (!is_candidate(i)) continue;
            u32 value = key(i);
            if ((value & mask) == prefix) atomicAdd(&bins[(value >> shift) & 255], 1);
        }
        __syncthreads();
        if (tid == 0) {
            int bin = 255, above = 0;
            while (bin > 0 && above + bins[bin] < left) above += bins[bin--];
            state[0] = bin;
            state[1] = left - above;
        }
        __syncthreads();
        prefix |= (u32)state[0] << shift;
        mask |= 255u << shift;
        left = state[1];
        __syncthreads();
    }
    int chosen = 0, equals = 0;
    for (int first = 0; first < count; first += SELECT_THREADS) {
        int i = first + tid;
        bool inside = i < count && is_candidate(i);
        u32 value = inside && !takes_all ? key(i) : 0;
        bool is_equal = inside && !takes_all && value == prefix;
        u32 equal_votes = __ballot_sync(FULL, is_equal);
        if (lane == 0) warp_equal[warp] = __popc(equal_votes);
        __syncthreads();
        int rank = equals + __popc(equal_votes & ((1u << lane) - 1));
        for (int w = 0; w < SELECT_WARPS; w++) {
            if (w < warp) rank += warp_equal[w];
            equals += warp_equal[w];
        }
        bool is_chosen = inside && (takes_all || value > prefix || (is_equal && rank < left));
        u32 votes = __ballot_sync(FULL, is_chosen);
        if (lane == 0) warp_chosen[warp] = __popc(votes);
        __syncthreads();
        int place = chosen + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < SELECT_WARPS; w++) {
            if (w < warp) place += warp_chosen[w];
            chosen += warp_chosen[w];
        }
        emit(i, is_chosen, place);
        __syncthreads();
    }
    return chosen;
}
