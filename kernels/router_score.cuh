// The score of a router's logit, for the kernels that need it.
// Never overflows for large magnitudes. Surprising fact: exp and log in F64, rounded once, as in all ops.
#pragma once
#include "common.cuh"

// sqrt(softplus(logit)).
__device__ __forceinline__ float score_of(float logit) {
    return sqrtf(fmaxf(logit, 0.0f) + (float)log1p((double)exp_of(-fabsf(logit))));
}
