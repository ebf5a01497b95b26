// Experts of a sweep on rows of their own: both first matrices with their SwiGLU, second matrices, and outputs added to the sums of their rows.
// Never adds two experts of a row at once: they come one after another, in the order of the list. Surprising fact: a weighted output joins a
// zero first, since that is how a single row's sum begins.
#include "eights.cuh"

// Assignments that are looked through at a time, 32 a word.
constexpr int FOUND_WORDS = 256;

// y: [count, width], row r of it is that of assignment first + r; sums: [rows, width]. The first assignment of a row adds all of them, in order. Four
// values a thread. Grid (pieces of a row, count).
extern "C" __global__ void add_experts(
    const float *y, const float *weights, const int *places, const int *rows, float *sums, int first, int count, int width
) {
    previous_ended();
    __shared__ u32 found[FOUND_WORDS];
    int tid = threadIdx.x, lane = tid % 32, mine = blockIdx.y, row = rows[first + mine], i = 4 * (blockIdx.x * blockDim.x + tid);
    float4 *to = (float4 *)(sums + (size_t)row * width + i), sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool inside = i < width, has_begun = false;
    for (int base = 0; base < count; base += 32 * FOUND_WORDS) {
        int words = min(FOUND_WORDS, (count - base + 31) / 32);
        __syncthreads();
        for (int word = tid / 32; word < words; word += blockDim.x / 32) {
            int at = base + 32 * word + lane;
            u32 same = __ballot_sync(FULL, at < count && rows[first + at] == row);
            if (lane == 0) found[word] = same;
        }
        __syncthreads();
        for (int part = 0; part < words; part += 32) {
            u32 own = part + lane < words ? found[part + lane] : 0;
            for (u32 left = __ballot_sync(FULL, own != 0); left; left &= left - 1) {
                int word = __ffs(left) - 1;
                for (u32 same = __shfl_sync(FULL, own, word); same; same &= same - 1) {
                    int at = base + 32 * (part + word) + __ffs(same) - 1;
                    // Somebody else does it.
                    if (!has_begun && at < mine) return;
                    if (!has_begun && inside) sum = *to;
                    has_begun = true;
                    if (!inside) continue;
                    float weight = weights[places[first + at]];
                    float4 v = *(const float4 *)(y + (size_t)at * width + i);
                    sum.x = (0.0f + weight * v.x) + sum.x;
                    sum.y = (0.0f + weight * v.y) + sum.y;
                    sum.z = (0.0f + weight * v.z) + sum.z;
                    sum.w = (0.0f + weight * v.w) + sum.w;
                }
            }
        }
    }
    if (inside) *to = sum;
}
