// Speed of llama.cpp on one model file through its public interface, all settings at their defaults but the threads.
//
//   llama_cpp_rate MODEL THREADS ROWS TOKENS SEED WARM EXTRA
//
// Reads ROWS random tokens in one prompt and then appends TOKENS random ones one by one; prints one JSON line with both rates. WARM 1 first
// does the prompt once without timing it, so that no page of the file has to be read while the clock runs. EXTRA 0 keeps weights as they are
// in the file, as llama-bench --repack 0 does. Built by llama_cpp.sh.

#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    fprintf(stderr, "llama_cpp_rate: %s\n", what);
    exit(1);
}

static unsigned long long state;

// SplitMix64, then a number below n.
static int drawn(int n) {
    unsigned long long z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (int)((z ^ (z >> 31)) % (unsigned long long)n);
}

static double prompt(struct llama_context *ctx, llama_token *tokens, int rows, int batch) {
    double start = now();
    for (int at = 0; at < rows; at += batch) {
        int len = rows - at < batch ? rows - at : batch;
        if (llama_decode(ctx, llama_batch_get_one(tokens + at, len)) != 0) fail("the prompt failed");
    }
    llama_synchronize(ctx);
    return now() - start;
}

int main(int argc, char **argv) {
    if (argc != 8) fail("usage: llama_cpp_rate MODEL THREADS ROWS TOKENS SEED WARM EXTRA");
    int threads = atoi(argv[2]), rows = atoi(argv[3]), count = atoi(argv[4]);
    state = strtoull(argv[5], NULL, 10);
    if (threads < 1 || rows < 1 || count < 0) fail("THREADS and ROWS are at least 1");

    llama_backend_init();
    struct llama_model_params how = llama_model_default_params();
    how.use_extra_bufts = atoi(argv[7]) != 0;
    struct llama_model *model = llama_model_load_from_file(argv[1], how);
    if (!model) fail("the model could not be loaded");
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = rows + count;
    params.n_threads = params.n_threads_batch = threads;
    int batch = params.n_batch;
    struct llama_context *ctx = llama_init_from_model(model, params);
    if (!ctx) fail("no context could be made");

    llama_token *tokens = malloc(sizeof(llama_token) * (size_t)rows);
    for (int i = 0; i < rows; i++) tokens[i] = drawn(vocab);
    if (atoi(argv[6])) {
        prompt(ctx, tokens, rows, batch);
        llama_memory_clear(llama_get_memory(ctx), true);
    }
    double prefill_s = prompt(ctx, tokens, rows, batch);

    double start = now();
    for (int i = 0; i < count; i++) {
        llama_token token = drawn(vocab);
        if (llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0) fail("a token failed");
        llama_synchronize(ctx);
    }
    double decode_s = now() - start;

    printf("{\"prefill_tokens\":%d,\"prefill_tps\":%.4f,\"gen_tokens\":%d,\"gen_tps\":%.4f,\"system\":\"%s\"}\n", rows,
           rows / prefill_s, count, count > 0 ? count / decode_s : 0.0, llama_print_system_info());
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
