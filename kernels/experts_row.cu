// Some experts on one row: gate, up and SwiGLU of all of them in one launch, their second products in another.
// Never sums experts: each output has its place. Surprising fact: gate and up rows sit in the two halves of one warp, so the SwiGLU needs a
// shuffle and no memory.
#include "dots.cuh"
#include "expert_gate.cuh"

// Matrices of the experts.
struct Matrices {
    const u8 *at[EXPERTS_MAX];
};

// The matrix of expert e: named by a parameter, or `offset` bytes into a slot that memory names (0: the expert is not there, nobody will
// look at what is computed).
__device__ __forceinline__ const u8 *matrix_of(const Matrices &named, const u64 *slots, u64 offset, int e) {
    if (!slots) return named.at[e];
    u64 slot = slots[e];
    return slot ? (const u8 *)(slot + offset) : nullptr;
}

__device__ __forceinline__ float clamped(float value, float limit) {
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

// mid: [experts, width]. Grid (width / (DOT_ROWS / 2), experts).
template <int T>
__device__ void gate_up(
    const Matrices &gates, const Matrices &ups, const u64 *slots, u64 up_at, Acts acts, float *mid, int width, int hidden, float limit
) {
    const Iq2Tables *tables = tables_for<T>();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.y;
    int o = blockIdx.x * (DOT_ROWS<T> / 2) + warp * (16 / ROW_THREADS<T>) + lane % 16 / ROW_THREADS<T>;
    const u8 *first = matrix_of(gates, slots, 0, e), *second = matrix_of(ups, slots, up_at, e), *w = lane >= 16 ? second : first;
    if (!w) return;
    size_t act = 0;
    float sum;
    dot_row<T, 1>(w, width, hidden, min(o, width - 1), tables, acts, &act, &sum);
    float up = __shfl_down_sync(FULL, sum, 16);
    if (lane >= 16 || lane % ROW_THREADS<T> != 0 || o >= width) return;
    float x = fminf(sum, limit);
    mid[(size_t)e * width + o] = x * sigmoid(x) * clamped(up, limit);
}

// Places of the experts among the outputs.
struct Places {
    int at[EXPERTS_MAX];
};

// Activations: [experts, width]; outputs: [places, hidden]. Grid (hidden / (DOWN_THREADS / ROW_THREADS), experts).
template <int T>
__device__ void down(
    const Matrices &downs, const Places &places, const u64 *slots, u64 down_at, Acts acts, float *outputs, int width, int hidden
) {
    const Iq2Tables *tables = tables_for<T>();
    int o = (blockIdx.x * DOWN_THREADS<T> + threadIdx.x) / ROW_THREADS<T>, e = blockIdx.y;
    size_t act = e;
    float sum;
    const u8 *w = matrix_of(downs, slots, down_at, e);
    if (!w) return;
    dot_row<T, 1>(w, hidden, width, min(o, hidden - 1), tables, acts, &act, &sum);
    if (threadIdx.x % ROW_THREADS<T> == 0 && o < hidden) outputs[(size_t)places.at[e] * hidden + o] = sum;
}

#define EXPERTS(name, type) \
    extern "C" __global__ void __launch_bounds__(DOT_THREADS<type>, DOT_BLOCKS<type, 1>) experts_gate_up_##name( \
        const __grid_constant__ Matrices gates, const __grid_constant__ Matrices ups, const u64 *slots, u64 up_at, \
        const i8 *codes, const float *scales, const i16 *sums, float *mid, int width, int hidden, float limit \
    ) { \
        previous_ended(); \
        gate_up<type>(gates, ups, slots, up_at, Acts{codes, scales, sums}, mid, width, hidden, limit); \
    } \
    extern "C" __global__ void __launch_bounds__(DOWN_THREADS<type>, DOT_BLOCKS<type, 1>) experts_down_##name( \
        const __grid_constant__ Matrices downs, const __grid_constant__ Places places, const u64 *slots, u64 down_at, \
        const i8 *codes, const float *scales, const i16 *sums, float *outputs, int width, int hidden \
    ) { \
        previous_ended(); \
        down<type>(downs, places, slots, down_at, Acts{codes, scales, sums}, outputs, width, hidden); \
    }
EXPERTS(q8_0, Q8_0)
EXPERTS(q2_k, Q2_K)
EXPERTS(q3_k, Q3_K)
EXPERTS(q4_k, Q4_K)
EXPERTS(q6_k, Q6_K)
EXPERTS(iq2_xxs, IQ2_XXS)
EXPERTS(mxfp4, MXFP4)
