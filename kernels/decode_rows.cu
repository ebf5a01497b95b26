// Decoding of n-gram rows: E4M3 codes, a power of two for each 32 of them, the product rounded to BF16.
// Never meets a code that is no number: the host has looked. Surprising fact: code bits moved into those of a float are 2^-120 times the value,
// subnormal codes included, so one exact product decodes them all.
#include "common.cuh"

// rows: [rows, width + width / 32] bytes, codes before scales; out: [rows, width]. Four values a thread.
extern "C" __global__ void decode_rows(const u8 *rows, float *out, u64 fours, int width) {
    previous_ended();
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= fours) return;
    u64 row = at / (u32)(width / 4);
    int first = (int)(at % (u32)(width / 4)) * 4;
    const u8 *codes = rows + row * (u32)(width + width / 32);
    u32 exponent = codes[width + first / 32];
    float scale = exponent ? __uint_as_float(exponent << 23) : __uint_as_float(0x00400000u), v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 code = codes[first + i];
        float value = __uint_as_float((code & 0x7f) << 20) * __uint_as_float((127u + 120u) << 23);
        u32 bits = __float_as_uint(__uint_as_float(__float_as_uint(value) | (code & 0x80) << 24) * scale);
        v[i] = __uint_as_float((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    }
    *(float4 *)(out + row * width + first) = make_float4(v[0], v[1], v[2], v[3]);
}
