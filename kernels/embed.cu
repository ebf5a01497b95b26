// Gather of embedding rows.
// Never decodes more than the rows asked for. Surprising fact: each row is written once a residual stream.
#include "quant.cuh"

// table: [vocab, cols]; ids: [rows]; out: [rows, copies, cols]. Grid (pieces of a row, rows).
template <int T> __device__ void embed_as(const u8 *table, const int *ids, float *out, int vocab, int cols, int copies) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    size_t r = blockIdx.y;
    if (i >= cols) return;
    float value = weight_at<T>(table, vocab, cols, ids[r], i);
    for (int c = 0; c < copies; c++) out[(r * copies + c) * cols + i] = value;
}

#define EMBED(name, type) \
    extern "C" __global__ void embed_##name(const u8 *table, const int *ids, float *out, int vocab, int cols, int copies) { \
        previous_ended(); \
        embed_as<type>(table, ids, out, vocab, cols, copies); \
    }
EMBED(f32, F32)
EMBED(f16, F16)
EMBED(bf16, BF16)
EMBED(q8_0, Q8_0)
EMBED(q2_k, Q2_K)
EMBED(q3_k, Q3_K)
EMBED(q4_k, Q4_K)
EMBED(q6_k, Q6_K)
EMBED(iq2_xxs, IQ2_XXS)
EMBED(mxfp4, MXFP4)
