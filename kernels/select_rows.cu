// Selection of compressed rows: the k best scores, kept in rising row order. One block a row.
// Never selects outside the candidate mask. Surprising fact: rows come out sorted by index, so the attention sums in an order that
// does not depend on the scores.
#include "select_best.cuh"

// scores: [rows, stride] or null if every row keeps all it sees; mask: [all rows, words] or null; selected: [all rows, k].
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) select_rows(
    const float *scores, const u32 *mask, int *selected, int first_row, int first_pos, int ratio, int stride, int k, int block, int words
) {
    previous_ended();
    size_t row = (size_t)first_row + blockIdx.x;
    int visible = (int)(((size_t)first_pos + row + 1) / ratio);
    const float *score = scores + (size_t)blockIdx.x * stride;
    const u32 *bits = mask + row * words;
    int *to = selected + row * k;
    auto key = [=](int i) { return score_key(score[i]); };
    auto is_candidate = [=](int i) {
        int b = i / block;
        return mask == nullptr || ((bits[b / 32] >> (b % 32)) & 1);
    };
    int chosen = select_best(visible, k, key, is_candidate, [=](int i, bool is_chosen, int place) {
        if (is_chosen) to[place] = i;
    });
    for (int i = chosen + threadIdx.x; i < k; i += SELECT_THREADS) to[i] = -1;
}
