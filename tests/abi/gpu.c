/*
 * What only a GPU can say: a context of the program's own, its streams, and bytes that really lie
 * on the device. The driver is opened with dlopen, as an engine without a CUDA toolkit does.
 *
 *     cc -std=c11 gpu.c -o gpu -lvbar -ldl && ./gpu
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>

#include "check.h"

#define MIB (UINT64_C(1) << 20)
#define PAGE_BYTES (2 * MIB)
#define WORDS (PAGE_BYTES / sizeof(uint32_t))

struct cuda {
    int (*init)(unsigned);
    int (*context_create)(void **, unsigned, int);
    int (*context_destroy)(void *);
    int (*stream_create)(void **, unsigned);
    int (*stream_synchronize)(void *);
    int (*stream_destroy)(void *);
    int (*to_device)(uint64_t, const void *, size_t, void *);
    int (*to_host)(void *, uint64_t, size_t);
};

static void find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    if (!found) report(__FILE__, __LINE__, name, 0);
    memcpy(function, &found, sizeof found);
}

static struct cuda open_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) report(__FILE__, __LINE__, "libcuda.so.1 is not here", 0);
    struct cuda cuda;
    find(library, "cuInit", &cuda.init);
    find(library, "cuCtxCreate_v2", &cuda.context_create);
    find(library, "cuCtxDestroy_v2", &cuda.context_destroy);
    find(library, "cuStreamCreate", &cuda.stream_create);
    find(library, "cuStreamSynchronize", &cuda.stream_synchronize);
    find(library, "cuStreamDestroy_v2", &cuda.stream_destroy);
    find(library, "cuMemcpyHtoDAsync_v2", &cuda.to_device);
    find(library, "cuMemcpyDtoH_v2", &cuda.to_host);
    return cuda;
}

/* Writes numbers from `first` on into an allocation that asks for it. */
static void write_bytes(const struct cuda *cuda, VbarAllocation allocation, uint32_t first,
                        void *stream) {
    static uint32_t words[WORDS];
    for (size_t at = 0; at < WORDS; at++) words[at] = first + (uint32_t)at;
    VbarFault fault;
    OK(vbar_allocation_fault(allocation, (VbarStream)stream, &fault));
    CHECK(fault.outcome == VBAR_OUTCOME_REFILL);
    CHECK(cuda->to_device(fault.address, words, sizeof words, stream) == 0);
    OK(vbar_token_commit(fault.token, (VbarStream)stream));
    OK(vbar_token_unpin(fault.token, (VbarStream)stream));
    CHECK(cuda->stream_synchronize(stream) == 0);
}

/* Whether the allocation's bytes are numbers from `first` on. */
static void check_bytes(const struct cuda *cuda, VbarAllocation allocation, uint32_t first,
                        void *stream) {
    static uint32_t words[WORDS];
    VbarFault fault;
    OK(vbar_allocation_fault(allocation, (VbarStream)stream, &fault));
    CHECK(fault.outcome == VBAR_OUTCOME_RESIDENT);
    CHECK(cuda->stream_synchronize(stream) == 0);
    CHECK(cuda->to_host(words, fault.address, sizeof words) == 0);
    for (size_t at = 0; at < WORDS; at++) CHECK(words[at] == first + (uint32_t)at);
    OK(vbar_token_unpin(fault.token, (VbarStream)stream));
}

static void check_work(const struct cuda *cuda, VbarDevice device, void *stream) {
    VbarBar bar;
    OK(vbar_bar_create(device, 8 * PAGE_BYTES, &bar));
    VbarAllocation parts[6];
    for (size_t at = 0; at < COUNT_OF(parts); at++) {
        OK(vbar_bar_allocate(bar, PAGE_BYTES, &parts[at]));
    }
    for (size_t at = 0; at < 4; at++) write_bytes(cuda, parts[at], (uint32_t)at << 20, stream);
    for (size_t at = 0; at < 4; at++) check_bytes(cuda, parts[at], (uint32_t)at << 20, stream);
    /* Above the budget the host's copy is used; the ones that are there stay. */
    VbarFault fault;
    OK(vbar_allocation_fault(parts[4], (VbarStream)stream, &fault));
    CHECK(fault.outcome == VBAR_OUTCOME_OFFLOADED);
    /* Evicted pages ask for their bytes again, at the same address. */
    uint64_t address, offset, bytes;
    OK(vbar_allocation_place(parts[0], &address, &offset, &bytes));
    VbarFreed freed;
    OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    CHECK(freed.bytes == 4 * PAGE_BYTES);
    OK(vbar_bar_prioritise(bar));
    write_bytes(cuda, parts[0], 77, stream);
    check_bytes(cuda, parts[0], 77, stream);
    uint64_t again;
    OK(vbar_allocation_place(parts[0], &again, &offset, &bytes));
    CHECK(address == again);
    OK(vbar_stream_retire(device, (VbarStream)stream));
    OK(vbar_bar_destroy_wait(bar));
}

/* A stale read finds poison and costs nothing. */
static void check_poison(const struct cuda *cuda, VbarDevice device, void *stream) {
    VbarBar bar;
    VbarAllocation part;
    OK(vbar_bar_create(device, PAGE_BYTES, &bar));
    OK(vbar_bar_allocate(bar, PAGE_BYTES, &part));
    write_bytes(cuda, part, 1, stream);
    uint64_t address, offset, bytes;
    OK(vbar_allocation_place(part, &address, &offset, &bytes));
    VbarFreed freed;
    OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    unsigned char stale[4096];
    CHECK(cuda->to_host(stale, address, sizeof stale) == 0);
    for (size_t at = 0; at < sizeof stale; at++) CHECK(stale[at] == 0xFF);
    OK(vbar_bar_destroy_wait(bar));
}

int main(void) {
    struct cuda cuda = open_cuda();
    CHECK(cuda.init(0) == 0);
    void *context, *stream;
    CHECK(cuda.context_create(&context, 0, 0) == 0);
    CHECK(cuda.stream_create(&stream, 1) == 0);
    VbarDeviceOptions options = {.size = sizeof options, .driver = "cuda"};
    options.context = context;
    options.page_bytes = PAGE_BYTES;
    /* A page more for the poison. */
    options.budget_bytes = 5 * PAGE_BYTES;
    options.poison = VBAR_POISON_ON;
    VbarDevice device, other;
    OK(vbar_device_open(&options, &device));
    VbarDeviceInfo info = {.size = sizeof info};
    OK(vbar_device_info(device, &info));
    CHECK(info.context == context && !info.simulated);
    printf("%s, %s\n", info.name, info.driver);
    check_poison(&cuda, device, stream);
    check_work(&cuda, device, stream);
    /* The device is open in this context: another one is refused, none named is this one. */
    void *second;
    CHECK(cuda.context_create(&second, 0, 0) == 0);
    options.context = second;
    FAILS(vbar_device_open(&options, &other), VBAR_STATUS_ALREADY_OPEN, "is open with");
    options.context = NULL;
    OK(vbar_device_open(&options, &other));
    OK(vbar_device_close(other));
    CHECK(cuda.context_destroy(second) == 0);
    OK(vbar_device_close(device));
    CHECK(cuda.stream_destroy(stream) == 0);
    CHECK(cuda.context_destroy(context) == 0);
    puts("a context of the program's own: all is well");
    return 0;
}
