/*
 * The plug-in functions with the signatures that PyTorch calls them by, and checks.
 */
#ifndef VBAR_TESTS_TORCH_PLUG_H
#define VBAR_TESTS_TORCH_PLUG_H

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "c10.h"
#include "vbar.h"
#include "vbar_sim.h"

static inline void report(const char *file, int line, const char *what, int status) {
    std::fprintf(stderr, "%s:%d: %s\n  status %d (%s): %s\n", file, line, what, status,
                 vbar_status_text(status), vbar_last_message());
    std::_Exit(1);
}

/* The condition holds. */
#define CHECK(condition) \
    do { \
        if (!(condition)) report(__FILE__, __LINE__, #condition, 0); \
    } while (0)

/* The call succeeds. */
#define OK(call) \
    do { \
        int status_ = (call); \
        if (status_ != VBAR_STATUS_OK) report(__FILE__, __LINE__, #call, status_); \
    } while (0)

/* A test that hangs is ended. */
static inline void start() { alarm(300); }

using cudaStream_t = struct CUstream_st *;
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;

/* PyTorch knows addresses only, and what it believes to be there. */
template <class Signature, class Function> Signature *plugged(Function *function) {
    return reinterpret_cast<Signature *>(reinterpret_cast<uintptr_t>(function));
}

static const auto alloc_fn = plugged<void *(size_t, int, cudaStream_t)>(&vbar_torch_malloc);
static const auto free_fn = plugged<void(void *, size_t, int, cudaStream_t)>(&vbar_torch_free);
static const auto record_stream_fn = plugged<void(void *, cudaStream_t)>(&vbar_torch_record_stream);
static const auto begin_allocate_to_pool =
    plugged<void(int, MempoolId_t, std::function<bool(cudaStream_t)>)>(&vbar_torch_begin_pool);
static const auto end_allocate_to_pool = plugged<void(int, MempoolId_t)>(&vbar_torch_end_pool);
static const auto release_pool = plugged<void(int, MempoolId_t)>(&vbar_torch_release_pool);

/* A small device, not that of other tests: its name is its own. */
static inline void configure(uint64_t pages) {
    VbarDeviceOptions options{};
    options.size = sizeof options;
    options.page_bytes = 64 << 10;
    options.budget_bytes = pages * options.page_bytes;
    options.headroom_bytes = VBAR_HEADROOM_NONE;
    options.driver = "sim:capacity=64M,granularity=64K,address_space=64G,poison=1";
    OK(vbar_torch_configure(&options));
}

static inline VbarTorchStatistics torch_statistics() {
    VbarTorchStatistics told{};
    told.size = sizeof told;
    OK(vbar_torch_statistics(0, &told));
    return told;
}

static inline bool contains(const char *text, const char *words) {
    return std::strstr(text, words) != nullptr;
}

static inline cudaStream_t stream_of(VbarStream stream) {
    return reinterpret_cast<cudaStream_t>(stream);
}

#endif
