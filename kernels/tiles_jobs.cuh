// Products of several experts, each with rows of its own, in one launch.
// Never computes otherwise than tiles_256.cuh and tiles_32.cuh. Surprising fact: the list of experts travels as a kernel parameter, so nothing is uploaded for it.
#pragma once
#include "tiles_256.cuh"
#include "tiles_32.cuh"

// outs: one for each matrix of an expert, [all rows, w_rows]. Grid (tiles of the most rows of an expert, tiles of weight rows, all matrices).
#define JOBS_HIGH(name, type, high, threads, each) \
    extern "C" __global__ void __launch_bounds__(threads, each) tiles_jobs_##name##_##high( \
        const __grid_constant__ TileJobs jobs, const i8 *codes, const float *scales, const i16 *sums, float *out, float *second, int w_rows, int cols, int matrices \
    ) { \
        previous_ended(); \
        int matrix = blockIdx.z, expert = matrix / matrices; \
        size_t first = jobs.rows[expert].first; \
        int count = jobs.rows[expert].count; \
        if ((int)blockIdx.x * TILE_ROWS<high> >= count) return; \
        Acts acts{codes + first * cols, scales + first * (cols / 256), sums + first * (cols / 16)}; \
        float *to = (matrix % matrices ? second : out) + first * w_rows; \
        tiles_256<type, high>(jobs.w[matrix], acts, to, w_rows, cols, count, 1); \
    }
#define JOBS(name, type) JOBS_HIGH(name, type, 2, 128, 3) JOBS_HIGH(name, type, 4, 256, 2)
JOBS(q2_k, Q2_K)
JOBS(q3_k, Q3_K)
JOBS(q4_k, Q4_K)
JOBS(q6_k, Q6_K)
JOBS(iq2_xxs, IQ2_XXS)

// The same with blocks of 32 and activations from `quantise_tiles_32`, all experts' rows in one batch of `padded` rows.
#define JOBS_32_HIGH(name, type, high, threads, each) \
    extern "C" __global__ void __launch_bounds__(threads, each) tiles_jobs_##name##_##high( \
        const __grid_constant__ TileJobs jobs, const i8 *codes, const float *scales, float *out, float *second, int w_rows, int cols, int matrices, int padded \
    ) { \
        previous_ended(); \
        int matrix = blockIdx.z, expert = matrix / matrices; \
        size_t first = jobs.rows[expert].first; \
        int count = jobs.rows[expert].count; \
        if ((int)blockIdx.x * TILE_ROWS<high> >= count) return; \
        float *to = (matrix % matrices ? second : out) + first * w_rows; \
        Tile tile = tile_of<high>(w_rows, count, 1); \
        Tiles32<type, high, true>(jobs.w[matrix], codes + first * cols, scales + first, tile, w_rows, cols / 32, padded).run(to); \
    }
#define JOBS_32(name, type) JOBS_32_HIGH(name, type, 2, 128, 4) JOBS_32_HIGH(name, type, 4, 256, 2)
JOBS_32(q8_0, Q8_0)
JOBS_32(mxfp4, MXFP4)
