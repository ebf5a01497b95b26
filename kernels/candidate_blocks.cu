// Candidate stage of the selection: the best blocks of neighbouring compressed rows, as one bit a block. One thread block a row.
// Never marks a block that the row does not see. Surprising fact: the newest block, partial or not, is always in.
#include "select_best.cuh"

// scores: [rows, stride], or null if every row keeps all its blocks; mask: [all rows, words].
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) candidate_blocks(
    const float *scores, u32 *mask, int first_row, int first_pos, int ratio, int stride, int block, int blocks_max, int words
) {
    previous_ended();
    size_t row = (size_t)first_row + blockIdx.x;
    int visible = (int)(((size_t)first_pos + row + 1) / ratio), blocks = (visible + block - 1) / block;
    const float *score = scores + (size_t)blockIdx.x * stride;
    u32 *to = mask + row * words;
    auto key = [=](int b) {
        float most = __uint_as_float(0xff800000u);
        if (b == blocks - 1) return score_key(-most);
        for (int i = b * block; i < (b + 1) * block; i++) most = fmaxf(most, score[i]);
        return score_key(most);
    };
    auto all = [](int) { return true; };
    for (int i = threadIdx.x; i < words; i += SELECT_THREADS) to[i] = 0;
    __syncthreads();
    select_best(blocks, blocks_max, key, all, [=](int b, bool is_chosen, int) {
        // 32 neighbouring blocks are the threads of one warp.
        u32 word = __ballot_sync(FULL, is_chosen);
        if (threadIdx.x % 32 == 0 && b / 32 < words) to[b / 32] = word;
    });
}
