/* A driver library that has no GPU behind it: memory is the host's, kernels compute nothing, and the environment says what goes wrong.
 * STUB_FAIL_AT fails that call, counted from 1 among those of STUB_FAIL_NAME, or all, with STUB_FAIL_WITH, for good if that error is such;
 * STUB_CALLS is a file for the names of all calls.
 * Never waits (queues.h). Surprising facts: the same text is built as libcuda.so and, with NVRTC defined, as libnvrtc.so; the few kernels that say
 * which experts are used, and where they lie, do that when their turn comes, so a gate that nobody opens is an error and no hang. */
#define _POSIX_C_SOURCE 200809L
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long told(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

#ifdef NVRTC
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 1; return 0; }
int nvrtcCreateProgram(void **program, const char *text, const char *name, int headers, const char *const *sources, const char *const *names) {
    (void)text; (void)name; (void)headers; (void)sources; (void)names;
    *program = &told;
    return 0;
}
int nvrtcCompileProgram(void *program, int count, const char *const *options) { (void)program; (void)count; (void)options; return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { (void)program; *size = 5; return 0; }
int nvrtcGetPTX(void *program, char *image) { (void)program; memcpy(image, "stub", 5); return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { (void)program; *size = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { (void)program; *log = 0; return 0; }
int nvrtcDestroyProgram(void **program) { (void)program; return 0; }
const char *nvrtcGetErrorString(int error) { (void)error; return "stub"; }
#else
/* The error of every call since a kernel failed. */
static int lost;
/* Bytes of the device: all, given out, and the most of them. STUB_FREE are those that nobody else has. */
#define ALL_BYTES ((size_t)8 << 30)
static long taken, most;
static long room_bytes(void) { return told("STUB_FREE", (long)ALL_BYTES); }
static char place;

/* What the call `name`, the next one, returns. */
static int outcome(const char *name) {
    static long calls;
    static FILE *names;
    const char *path = getenv("STUB_CALLS"), *only = getenv("STUB_FAIL_NAME");
    if (path && !names) names = fopen(path, "w");
    if (names) fprintf(names, "%s\n", name);
    if ((only && strcmp(only, name)) || ++calls != told("STUB_FAIL_AT", 0)) return lost;
    int error = (int)told("STUB_FAIL_WITH", 719);
    /* Full memory, a wrong value, what is not supported: the next call works. */
    if (error != 1 && error != 2 && error != 801) lost = error;
    return error;
}
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#include "queues.h"

/* Does `what` if the call does not fail by itself; that may change `error`. One call at a time. */
#define DOES_AS(name, what) do { \
        pthread_mutex_lock(&turn); \
        int error = outcome(name); \
        if (!error) { what; } \
        pthread_mutex_unlock(&turn); \
        return error; \
    } while (0)
#define DOES(what) DOES_AS(__func__, what)
#define PLAIN(name) int name(void) { DOES(); }
#define MAKES(name) int name(void **made) { DOES(*made = &place); }

int cuInit(unsigned flags) { (void)flags; DOES(error = (int)told("STUB_INIT", 0)); }
int cuDriverGetVersion(int *version) { DOES(*version = (int)told("STUB_VERSION", 13000)); }
int cuDeviceGetCount(int *count) { DOES(*count = (int)told("STUB_COUNT", 1)); }
int cuDeviceGet(int *device, int ordinal) { DOES(*device = ordinal); }
int cuDeviceGetName(char *name, int room, int device) {
    DOES(strncpy(name, "Stub GPU 0", (size_t)room); name[9] = (char)('0' + device));
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    /* Capability 9.0, 132 multiprocessors, 227 KiB of shared memory a block and memory of its own, if the environment does not say otherwise. */
    long capability = told("STUB_CAPABILITY", 90);
    DOES(*value = attribute == 75 ? (int)capability / 10 : attribute == 76 ? (int)capability % 10 : attribute == 18 ? (int)told("STUB_INTEGRATED", 0) : attribute == 16 ? 132 : attribute == 97 ? 227 << 10 : 1);
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; DOES(*bytes = ALL_BYTES); }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; DOES(*context = &place; error = (int)told("STUB_RETAIN", 0)); }
int cuMemGetInfo_v2(size_t *room, size_t *all) {
    DOES(*all = ALL_BYTES; *room = (size_t)(room_bytes() > taken ? room_bytes() - taken : 0));
}

int cuModuleLoadData(void **module, const char *image) {
    /* Refuses what the stub "compiled", changed since. */
    DOES(*module = &place; error = image[0] == 's' && strcmp(image, "stub") ? 218 : (int)told("STUB_LOAD", 0));
}
int cuModuleGetFunction(void **function, void *module, const char *name) { (void)module; DOES(*function = strdup(name)); }
/* Parameters of kernels, by place. */
#define AT(i, type) (*(type *const *)params[i])
#define VALUE(i) (*(const int *)params[i])

/* Every row of every layer uses other experts than the one before, all of them in turns. A choice whose weights are not normalised is a guess of
 * the next one, which STUB_GUESS makes wrong by so much. */
static void route(void *const *params, int rows) {
    static int used;
    int *ids = AT(2, int), experts = VALUE(4), k = VALUE(5);
    if (!VALUE(7)) {
        for (int e = 0; e < k; e++) ids[e] = (used + e + (int)told("STUB_GUESS", 0)) % experts;
        return;
    }
    float *weights = AT(3, float);
    for (int r = 0; r < rows; r++, used++) {
        for (int e = 0; e < k; e++) {
            ids[r * k + e] = (used + e) % experts;
            weights[r * k + e] = 1.0f / (float)k;
        }
    }
}

static void resolve_experts(void *const *params) {
    const int *ids = AT(0, int);
    const float *weights = AT(1, float);
    const uint64_t *table = AT(2, uint64_t);
    int *sorted = AT(3, int), k = VALUE(8);
    float *sorted_weights = AT(4, float);
    uint32_t *told = AT(5, uint32_t), *gate = AT(6, uint32_t), pass = (uint32_t)VALUE(7), all = 1;
    for (int i = 0; i < k; i++) {
        int place = 0;
        for (int other = 0; other < k; other++) place += ids[other] < ids[i] || (ids[other] == ids[i] && other < i);
        sorted[place] = ids[i];
        sorted_weights[place] = weights[i];
        told[2 + i] = (uint32_t)ids[i];
        all &= table[ids[i]] != 0;
    }
    told[1] = all;
    if (all) *gate = pass;
    told[0] = pass;
    AT(9, uint64_t)[0] = now();
}

static void tell_guess(void *const *params) {
    uint32_t *told = AT(1, uint32_t);
    for (int i = 0; i < VALUE(3); i++) told[1 + i] = (uint32_t)AT(0, int)[i];
    told[0] = (uint32_t)VALUE(2);
}

static void open_gate(void *const *params) {
    const struct { uint64_t slot[32]; int entry[32]; } *changes = params[0];
    for (int i = 0; i < VALUE(1); i++) AT(2, uint64_t)[changes->entry[i]] = changes->slot[i];
    *AT(3, uint32_t) = (uint32_t)VALUE(4);
}

/* Whether the gate is open, or the pass was given up. */
static int may_run(const struct op *op) {
    if (strcmp(op->name, "await_experts")) return 1;
    uint32_t gate = *(volatile uint32_t *)op->params[0], stop = *(volatile uint32_t *)op->params[1];
    return gate == (uint32_t)op->params[2] || stop == (uint32_t)op->params[2];
}

/* The first bytes of a matrix are kept where it is arranged, so that its place can be told from others. */
enum { MARK = 16, MARKS_MAX = 1 << 16 };
static void arrange(void *const *params) {
    if (!*(const uint64_t *)params[2]) memcpy(AT(1, void), AT(0, void), MARK);
}

/* Whether the expert of a table's entry has a slot with the bytes that it had the first time. */
static int is_itself(const uint64_t *entry) {
    static struct { const uint64_t *entry; char mark[MARK]; } known[MARKS_MAX];
    if (!*entry) return 0;
    size_t i = ((uintptr_t)entry >> 3) % MARKS_MAX;
    while (known[i].entry && known[i].entry != entry) i = (i + 1) % MARKS_MAX;
    if (!known[i].entry) {
        known[i].entry = entry;
        memcpy(known[i].mark, (const void *)*entry, MARK);
    }
    return !memcmp(known[i].mark, (const void *)*entry, MARK);
}

static void await_experts(void *const *params) {
    /* Behind an open gate every expert has a slot that is its own: else the kernels behind it would read what is not there, or another one. */
    for (int i = 0; i < VALUE(6) && *AT(0, uint32_t) == (uint32_t)VALUE(2); i++) {
        if (!is_itself(&AT(3, uint64_t)[AT(4, int)[i]])) lost = 700;
    }
    AT(7, uint64_t)[1] = AT(7, uint64_t)[2] = now();
}

static void run_kernel(const struct op *op) {
    void *params[PARAMS_MAX];
    for (int i = 0; i < PARAMS_MAX; i++) params[i] = (void *)&op->params[i];
    if (!strcmp(op->name, "route")) route(params, (int)op->grid);
    if (!strcmp(op->name, "resolve_experts")) resolve_experts(params);
    if (!strcmp(op->name, "tell_guess")) tell_guess(params);
    if (!strcmp(op->name, "await_experts")) await_experts(params);
    if (!strncmp(op->name, "arrange_", 8)) arrange(params);
    if (!strcmp(op->name, "stamp_clock")) *AT(0, uint64_t) = now();
    if (!strcmp(op->name, "open_gate")) {
        params[0] = (void *)op->block;
        open_gate(params);
    }
}

static void launch(const unsigned *config, const char *function, void **params) {
    struct op op = {.kind = KERNEL, .grid = config[0]};
    strncpy(op.name, function, sizeof op.name - 1);
    /* A parameter begins a word of its own; that of the changes is longer. */
    for (int i = 0; i < PARAMS_MAX && params[i]; i++) memcpy(&op.params[i], params[i], sizeof op.params[i]);
    if (!strcmp(function, "open_gate")) memcpy(op.block, params[0], BLOCK_BYTES);
    queue(*(void *const *)(config + 8), op);
    /* STUB_KERNEL fails, which shows at the next call. */
    const char *failing = getenv("STUB_KERNEL");
    if (failing && !strcmp(failing, function)) lost = 719;
}
int cuLaunchKernelEx(const unsigned *config, const char *function, void **params) { DOES_AS(function, launch(config, function, params)); }

int cuStreamCreate(void **stream, unsigned flags) { (void)flags; DOES(*stream = new_line()); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { (void)flags; (void)priority; DOES(*stream = new_line()); }
int cuStreamDestroy_v2(void *stream) { (void)stream; DOES(); }
/* With STUB_BUSY what was queued is under way until somebody asks for it again, or waits. */
int cuStreamQuery(void *stream) {
    DOES(
        struct line *line = line_of(stream);
        advance();
        error = lost ? lost : line->first || (line->is_busy && told("STUB_BUSY", 0)) ? NOT_READY : 0;
        line->is_busy = 0;
    );
}
int cuStreamSynchronize(void *stream) { DOES(error = wait_for(stream, 0); line_of(stream)->is_busy = 0); }
int cuCtxSynchronize(void) { DOES(error = wait_for(0, 1)); }
int cuStreamWaitEvent(void *stream, struct event *event, unsigned flags) { (void)flags; DOES(error = let_wait(line_of(stream), event)); }
int cuStreamBeginCapture_v2(void *stream, int mode) { (void)mode; DOES(begin_recording(line_of(stream))); }
int cuStreamEndCapture(void *stream, struct graph **graph) {
    (void)stream;
    pthread_mutex_lock(&turn);
    struct graph *made = end_recording();
    pthread_mutex_unlock(&turn);
    DOES(*graph = made);
}
int cuGraphInstantiateWithFlags(struct graph **form, const struct graph *graph, unsigned long long flags) {
    (void)flags;
    DOES(error = wait_for(0, 1); if (!error) *form = graph_of(graph->first));
}
int cuGraphExecUpdate_v2(struct graph *form, const struct graph *graph, void *info) { (void)info; DOES(refill(form, graph->first)); }
int cuGraphLaunch(const struct graph *form, void *stream) { DOES(play(form, line_of(stream))); }
int cuGraphDestroy(struct graph *graph) { DOES(refill(graph, 0); free(graph)); }
int cuGraphExecDestroy(struct graph *form) { DOES(refill(form, 0); free(form)); }

int cuEventCreate(struct event **event) { DOES(*event = calloc(1, sizeof **event)); }
int cuEventRecord(struct event *event, void *stream) { DOES(record(event, line_of(stream))); }
/* What still waits for it keeps it. */
int cuEventDestroy_v2(struct event *event) { DOES(if (event->come == event->asked) free(event)); }
int cuEventQuery(const struct event *event) { DOES(advance(); error = lost ? lost : event->come < event->asked ? NOT_READY : 0); }
int cuEventSynchronize(const struct event *event) { DOES(advance(); error = lost ? lost : event->come < event->asked ? for_ever() : 0); }
int cuEventElapsedTime_v2(float *ms, const struct event *from, const struct event *to) {
    DOES(*ms = (float)((double)(int64_t)(to->time - from->time) / 1e6); error = from->come < from->asked || to->come < to->asked ? NOT_READY : 0);
}

/* Memory is given and taken when nothing is under way. */
int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    DOES(
        error = wait_for(0, 1);
        void *made = error ? 0 : calloc(1, bytes);
        if (!error && (!made || taken + (long)malloc_usable_size(made) > told("STUB_ALLOC", room_bytes()))) error = 2;
        if (error) free(made);
        else *at = (uint64_t)(uintptr_t)made;
        if (!error && (taken += (long)malloc_usable_size(made)) > most) most = taken;
    );
}
int cuMemFree_v2(uint64_t at) {
    void *made = (void *)(uintptr_t)at;
    DOES(error = wait_for(0, 1); if (!error) taken -= (long)malloc_usable_size(made); if (!error) free(made));
}
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { (void)flags; DOES(*at = calloc(1, bytes); pin(*at, bytes)); }
int cuMemFreeHost(void *at) { DOES(unpin(at); free(at)); }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    /* STUB_MAP is about memory that kernels are to read. */
    DOES(error = (int)told("STUB_REGISTER", flags & 2 ? told("STUB_MAP", 0) : 0); if (!error) pin(at, bytes));
}
int cuMemHostUnregister(void *at) { DOES(unpin(at)); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { DOES(*least = 0; *greatest = -5); }
int cuMemHostGetDevicePointer_v2(uint64_t *place, void *at, unsigned flags) { (void)flags; DOES(*place = (uint64_t)(uintptr_t)at); }
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void *stream) {
    DOES(queue(stream, (struct op){.kind = CLEAR, .to = (void *)(uintptr_t)at, .bytes = bytes, .value = value}));
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    DOES(error = copy((void *)(uintptr_t)to, from, bytes, from, stream));
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    DOES(error = copy(to, (void *)(uintptr_t)from, bytes, to, stream));
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    DOES(error = copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes, 0, stream));
}

MAKES(cuCtxGetCurrent)
PLAIN(cuCtxSetCurrent)
PLAIN(cuDevicePrimaryCtxRelease_v2)
PLAIN(cuFuncLoad)
PLAIN(cuFuncSetAttribute)
PLAIN(cuModuleUnload)

static const struct { int number; const char *name, *text; } KNOWN[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
};
static int say(int error, const char **to, int is_name) {
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++) {
        if (KNOWN[i].number == error) *to = is_name ? KNOWN[i].name : KNOWN[i].text;
    }
    return 0;
}
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_OF_STUB"; return say(error, name, 1); }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stub"; return say(error, text, 0); }
#endif
