/*
 * What the load of soak.c has: its state, the calls of the library and of the CUDA driver, and how
 * they end it when they fail. On a simulated device nothing of the driver is called.
 */
#ifndef VBAR_BENCHES_SOAK_H
#define VBAR_BENCHES_SOAK_H

#include <dlfcn.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vbar.h"
#include "vbar_sim.h"

#define MODELS_MAX 4
#define STREAMS 2
#define SLOTS 4
#define OWN 6
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define ALL_BYTES UINT64_MAX

/* What of the CUDA driver is called: nothing of it on a simulated device. */
struct cuda {
    int (*set_current)(void *);
    int (*stream_create)(void **, unsigned);
    int (*stream_synchronize)(void *);
    int (*stream_destroy)(void *);
    int (*to_device)(uint64_t, const void *, size_t, void *);
    int (*to_host)(void *, uint64_t, size_t, void *);
    int (*host_alloc)(void **, size_t);
    int (*host_free)(void *);
};

/* A copy to the host that was enqueued, and what it must have brought once it is done. */
struct slot {
    unsigned char *buffer;
    const unsigned char *wanted;
    uint64_t bytes;
    VbarStream stream;
};

/* A model, and its file's bytes. */
struct model {
    const char *path;
    VbarModel id;
    VbarBar bar;
    uint64_t tensor_count;
    const unsigned char *file;
    uint64_t file_bytes;
};

/* A weight that the program writes. */
struct own {
    VbarAllocation id;
    unsigned char *bytes;
    uint64_t size;
};

struct load {
    int in, out;
    const char *driver, *inject;
    uint64_t budget, headroom, page, outside;
    uint64_t random;
    bool simulated, ending;
    VbarDevice device;
    VbarSim sim;
    struct cuda cuda;
    void *context;
    VbarStream streams[STREAMS];
    struct model models[MODELS_MAX];
    size_t model_count;
    VbarBar own_bar;
    struct own own[OWN];
    struct slot slots[SLOTS];
    size_t next_slot;
    uint64_t slot_bytes;
    /* What it counts. */
    uint64_t rounds, passes, verified, wrong, refused, interrupted;
    uint64_t reasons[32];
    char first_wrong[200], failure[400];
};

/* Whether a call did what it should; what it says otherwise ends the load. Ctrl-C and other
 * threads' vbar_device_cancel_waits end waits, which is no failure. */
static bool done(struct load *load, const char *call, VbarStatus status) {
    if (status == VBAR_STATUS_OK) return true;
    if (status == VBAR_STATUS_CANCELLED) {
        load->interrupted++;
        return false;
    }
    if (!load->failure[0]) {
        snprintf(load->failure, sizeof load->failure, "%s: status %d (%s): %s", call, status,
                 vbar_status_text(status), vbar_last_message());
    }
    load->ending = true;
    return false;
}
#define DONE(call) done(load, #call, (call))

static bool cuda_done(struct load *load, const char *call, int code) {
    if (!code) return true;
    if (!load->failure[0]) snprintf(load->failure, sizeof load->failure, "%s: %d", call, code);
    load->ending = true;
    return false;
}
#define CUDA(call) cuda_done(load, #call, (call))

static uint64_t drawn(struct load *load, uint64_t below) {
    load->random ^= load->random << 13;
    load->random ^= load->random >> 7;
    load->random ^= load->random << 17;
    return load->random % below;
}

/* Streams and copies. */

static bool find(struct load *load, void *library, const char *name, void *function) {
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        snprintf(load->failure, sizeof load->failure, "libcuda.so.1 has no %s", name);
        return false;
    }
    memcpy(function, &found, sizeof found);
    return true;
}

static bool find_cuda(struct load *load) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    struct cuda *cuda = &load->cuda;
    return find(load, library, "cuCtxSetCurrent", &cuda->set_current) &&
           find(load, library, "cuStreamCreate", &cuda->stream_create) &&
           find(load, library, "cuStreamSynchronize", &cuda->stream_synchronize) &&
           find(load, library, "cuStreamDestroy_v2", &cuda->stream_destroy) &&
           find(load, library, "cuMemcpyHtoDAsync_v2", &cuda->to_device) &&
           find(load, library, "cuMemcpyDtoHAsync_v2", &cuda->to_host) &&
           find(load, library, "cuMemAllocHost_v2", &cuda->host_alloc) &&
           find(load, library, "cuMemFreeHost", &cuda->host_free);
}

static bool make_stream(struct load *load, VbarStream *stream) {
    if (load->simulated) return DONE(vbar_sim_stream_create(load->device, stream));
    void *made = NULL;
    if (!CUDA(load->cuda.stream_create(&made, 1))) return false;
    *stream = (VbarStream)made;
    return true;
}

static bool drop_stream(struct load *load, VbarStream stream) {
    if (!DONE(vbar_stream_retire(load->device, stream))) return false;
    if (load->simulated) return DONE(vbar_sim_stream_destroy(load->device, stream));
    return CUDA(load->cuda.stream_destroy((void *)stream));
}

static bool synchronize(struct load *load, VbarStream stream) {
    if (load->simulated) return DONE(vbar_sim_stream_synchronize(load->device, stream));
    return CUDA(load->cuda.stream_synchronize((void *)stream));
}

static bool to_device(struct load *load, uint64_t target, const void *source, uint64_t bytes,
                      VbarStream stream) {
    if (!load->simulated) {
        return CUDA(load->cuda.to_device(target, source, bytes, (void *)stream));
    }
    return DONE(vbar_sim_copy_to_device(load->device, target, source, bytes, stream));
}

#endif
