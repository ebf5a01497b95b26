// The k best of many scores by a whole block, in rising index order; the lower index wins among equals.
// Never depends on the order in which threads run: counters are whole numbers, places come from ballots.
// Surprising fact: the k-th best score is found digit by digit, so no sort takes place.
#pragma once
#include "common.cuh"

constexpr int SELECT_THREADS = 512, SELECT_WARPS = SELECT_THREADS / 32;

// The highest of 256 bins down to which `left` of the counted are, or bin 0, and how many of them are wanted of it. One warp, eight bins a thread.
__device__ __forceinline__ void find_bin(const int *bins, int left, int state[2]) {
    int lane = threadIdx.x % 32, own[8], sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += own[j] = bins[8 * lane + j];
    int down_to = sum;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_down_sync(FULL, down_to, step);
        down_to += lane + step < 32 ? other : 0;
    }
    int above = down_to - sum;
    if ((above >= left && lane < 31) || (down_to < left && lane > 0)) return;
    int bin = 7;
#pragma unroll
    for (int j = 7; j > 0; j--) {
        if (bin == j && above + own[j] < left) {
            above += own[j];
            bin = j - 1;
        }
    }
    state[0] = 8 * lane + bin;
    state[1] = left - above;
}

// Calls emit(i, is_chosen, place) once for each i below `count` rounded up to warps, 32 neighbours by one warp at a time; `place` is the number of
// chosen ones below i. key(i) orders (larger is better), is_candidate(i) says who takes part; both are called for i < count only.
// Returns how many were chosen. By a block of SELECT_THREADS.
template <typename Key, typename IsCandidate, typename Emit>
__device__ int select_best(int count, int k, Key key, IsCandidate is_candidate, Emit emit) {
    __shared__ int bins[256], warp_equal[SELECT_WARPS], warp_above[SELECT_WARPS], state[2];
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    auto sum_of = [](const int *each, int end) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < SELECT_WARPS; w++) sum += w < end ? each[w] : 0;
        return sum;
    };
    int candidates = 0;
#pragma unroll 4
    for (int i = tid; i < count; i += SELECT_THREADS) candidates += is_candidate(i);
    for (int step = 16; step > 0; step /= 2) candidates += __shfl_xor_sync(FULL, candidates, step);
    if (lane == 0) warp_equal[warp] = candidates;
    __syncthreads();
    bool takes_all = sum_of(warp_equal, SELECT_WARPS) <= k;
    u32 prefix = 0, mask = 0;
    int left = k;
    for (int shift = 24; shift >= 0 && !takes_all; shift -= 8) {
        for (int i = tid; i < 256; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
#pragma unroll 4
        for (int i = tid; i < count; i += SELECT_THREADS) {
            u32 value = key(i);
            if (is_candidate(i) && (value & mask) == prefix) atomicAdd(&bins[(value >> shift) & 255], 1);
        }
        __syncthreads();
        if (warp == 0) find_bin(bins, left, state);
        __syncthreads();
        prefix |= (u32)state[0] << shift;
        mask |= 255u << shift;
        left = state[1];
    }
    // A warp has a stretch of neighbours: it counts, then all know how many are before it.
    int each = ((count + 31) / 32 + SELECT_WARPS - 1) / SELECT_WARPS * 32;
    int begin = min(warp * each, count), end = min(begin + each, count);
    auto look = [&](int i, bool *is_above, bool *is_equal) {
        bool inside = i < end && is_candidate(i);
        u32 value = i < end && !takes_all ? key(i) : 0;
        *is_above = inside && (takes_all || value > prefix);
        *is_equal = inside && !takes_all && value == prefix;
    };
    int equals = 0, aboves = 0;
#pragma unroll 4
    for (int first = begin; first < end; first += 32) {
        bool is_above, is_equal;
        look(first + lane, &is_above, &is_equal);
        aboves += is_above;
        equals += is_equal;
    }
    for (int step = 16; step > 0; step /= 2) {
        aboves += __shfl_xor_sync(FULL, aboves, step);
        equals += __shfl_xor_sync(FULL, equals, step);
    }
    // Everybody has read what stood there before.
    __syncthreads();
    if (lane == 0) {
        warp_above[warp] = aboves;
        warp_equal[warp] = equals;
    }
    __syncthreads();
    int rank = sum_of(warp_equal, warp), place = sum_of(warp_above, warp) + min(rank, left);
    u32 below = (1u << lane) - 1;
    for (int first = begin; first < end; first += 32) {
        bool is_above, is_equal;
        look(first + lane, &is_above, &is_equal);
        u32 equal_votes = __ballot_sync(FULL, is_equal);
        bool is_chosen = is_above || (is_equal && rank + __popc(equal_votes & below) < left);
        u32 votes = __ballot_sync(FULL, is_chosen);
        emit(first + lane, is_chosen, place + __popc(votes & below));
        rank += __popc(equal_votes);
        place += __popc(votes);
    }
    return sum_of(warp_above, SELECT_WARPS) + min(sum_of(warp_equal, SELECT_WARPS), left);
}
