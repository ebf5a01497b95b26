/* A driver library that has no GPU behind it: memory is the host's, kernels compute nothing, and the environment says what goes wrong.
 * STUB_FAIL_AT fails that call, counted from 1, with STUB_FAIL_WITH, for good if that error is such; STUB_CALLS is a file for the names of all calls.
 * Never waits: what is started has ended, and a gate is passed at once. Surprising facts: the same text is built as libcuda.so and, with NVRTC
 * defined, as libnvrtc.so; the few kernels that say which experts are used, and where they lie, do that, when they are recorded. */
#define _POSIX_C_SOURCE 200809L
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
static long taken;
static char place;

/* What the call `name`, the next one, returns. */
static int outcome(const char *name) {
    static long calls;
    static FILE *names;
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    const char *path = getenv("STUB_CALLS");
    if (path && !names) names = fopen(path, "w");
    if (names) fprintf(names, "%s\n", name);
    if (number != told("STUB_FAIL_AT", 0)) return lost;
    int error = (int)told("STUB_FAIL_WITH", 719);
    /* Full memory, a wrong value, what is not supported: the next call works. */
    if (error != 1 && error != 2 && error != 801) lost = error;
    return error;
}
#define OUTCOME outcome(__func__)

#define PLAIN(name) int name(void) { return OUTCOME; }
/* Does `what` if the call does not fail. */
#define DOES(what) do { int error = OUTCOME; if (!error) { what; } return error; } while (0)
#define MAKES(name) int name(void **made) { DOES(*made = &place); }

int cuInit(unsigned flags) { (void)flags; return (int)told("STUB_INIT", OUTCOME); }
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
    int error = OUTCOME;
    if (error) return error;
    *value = attribute == 75 ? (int)capability / 10 : attribute == 76 ? (int)capability % 10 : attribute == 18 ? (int)told("STUB_INTEGRATED", 0) : attribute == 16 ? 132 : attribute == 97 ? 227 << 10 : 1;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; DOES(*bytes = (size_t)8 << 30); }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &place; return (int)told("STUB_RETAIN", OUTCOME); }
int cuMemGetInfo_v2(size_t *room, size_t *all) {
    DOES(*all = (size_t)8 << 30; *room = (size_t)told("STUB_FREE", (long)*all));
}

int cuModuleLoadData(void **module, const char *image) {
    *module = &place;
    /* What the stub "compiled", changed since. */
    if (image[0] == 's' && strcmp(image, "stub")) return 218;
    return (int)told("STUB_LOAD", OUTCOME);
}
int cuModuleGetFunction(void **function, void *module, const char *name) { (void)module; DOES(*function = strdup(name)); }
/* STUB_KERNEL fails, which shows at the next call. */
int cuLaunchKernel(void *function) {
    const char *failing = getenv("STUB_KERNEL");
    int before = outcome(function);
    if (failing && !strcmp(failing, function)) lost = 719;
    return before;
}
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Parameters of kernels, by place. */
#define AT(i, type) (*(type *const *)params[i])
#define VALUE(i) (*(const int *)params[i])

/* Every row of every layer uses other experts than the one before, all of them in turns. A choice whose weights are not normalised is a guess of
 * the next one, which STUB_GUESS makes wrong by so much. */
static void route(void *const *params, int rows) {
    static int turn;
    int *ids = AT(2, int), experts = VALUE(4), k = VALUE(5);
    if (!VALUE(7)) {
        for (int e = 0; e < k; e++) ids[e] = (turn + e + (int)told("STUB_GUESS", 0)) % experts;
        return;
    }
    float *weights = AT(3, float);
    for (int r = 0; r < rows; r++, turn++) {
        for (int e = 0; e < k; e++) {
            ids[r * k + e] = (turn + e) % experts;
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

int cuLaunchKernelEx(const unsigned *config, const char *function, void **params) {
    int before = cuLaunchKernel((void *)function);
    if (before || lost) return before;
    if (!strcmp(function, "route")) route(params, (int)config[0]);
    if (!strcmp(function, "resolve_experts")) resolve_experts(params);
    if (!strcmp(function, "tell_guess")) tell_guess(params);
    if (!strcmp(function, "await_experts")) AT(7, uint64_t)[1] = AT(7, uint64_t)[2] = now();
    if (!strcmp(function, "open_gate")) open_gate(params);
    if (!strcmp(function, "stamp_clock")) *AT(0, uint64_t) = now();
    return 0;
}

/* An event is the time when it was recorded. */
int cuEventCreate(uint64_t **event) { DOES(*event = calloc(1, sizeof **event)); }
int cuEventRecord(uint64_t *event) { DOES(*event = now()); }
int cuEventDestroy_v2(uint64_t *event) { DOES(free(event)); }
int cuEventElapsedTime_v2(float *ms, const uint64_t *from, const uint64_t *to) {
    DOES(*ms = (float)((double)(int64_t)(*to - *from) / 1e6));
}

int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    int error = OUTCOME;
    if (error) return error;
    taken += (long)bytes;
    if (taken > told("STUB_ALLOC", 1L << 40)) return 2;
    *at = (uint64_t)(uintptr_t)calloc(1, bytes);
    return *at ? 0 : 2;
}
int cuMemFree_v2(uint64_t at) { DOES(free((void *)(uintptr_t)at)); }
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { (void)flags; DOES(*at = calloc(1, bytes)); }
int cuMemFreeHost(void *at) { DOES(free(at)); }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    (void)at; (void)bytes;
    /* STUB_MAP is about memory that kernels are to read. */
    int error = OUTCOME;
    return (int)told("STUB_REGISTER", flags & 2 ? told("STUB_MAP", error) : error);
}
int cuMemHostGetDevicePointer_v2(uint64_t *place, void *at, unsigned flags) { (void)flags; DOES(*place = (uint64_t)(uintptr_t)at); }
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes) { DOES(memset((void *)(uintptr_t)at, value, bytes)); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes) { DOES(memcpy((void *)(uintptr_t)to, from, bytes)); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes) { DOES(memcpy(to, (void *)(uintptr_t)from, bytes)); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes) {
    DOES(memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes));
}
int cuStreamEndCapture(void *stream, void **graph) { (void)stream; DOES(*graph = &place); }

MAKES(cuCtxGetCurrent)
MAKES(cuStreamCreate)
MAKES(cuStreamCreateWithPriority)
MAKES(cuGraphInstantiateWithFlags)
PLAIN(cuCtxSetCurrent)
PLAIN(cuCtxSynchronize)
PLAIN(cuDevicePrimaryCtxRelease_v2)
PLAIN(cuStreamSynchronize)
PLAIN(cuStreamQuery)
PLAIN(cuStreamWaitEvent)
PLAIN(cuStreamDestroy_v2)
PLAIN(cuStreamBeginCapture_v2)
PLAIN(cuEventQuery)
PLAIN(cuEventSynchronize)
PLAIN(cuGraphLaunch)
PLAIN(cuGraphDestroy)
PLAIN(cuGraphExecDestroy)
PLAIN(cuGraphExecUpdate_v2)
PLAIN(cuFuncLoad)
PLAIN(cuFuncSetAttribute)
PLAIN(cuModuleUnload)
PLAIN(cuMemHostUnregister)

static const struct { int number; const char *name, *text; } KNOWN[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain"},
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
