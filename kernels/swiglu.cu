// Clamped SwiGLU, in place of the gate.
// Never clamps the gate from below. Surprising fact: the clamps are part of the model.
#include "common.cuh"

__device__ __forceinline__ float clamped(float value, float limit) {
    // As `clamp` on the CPU: NaN stays NaN.
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

extern "C" __global__ void swiglu(float *gate, const float *up, int values, float limit) {
    previous_ended();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= values) return;
    float x = fminf(gate[i], limit);
    gate[i] = x * sigmoid(x) * clamped(up[i], limit);
}
