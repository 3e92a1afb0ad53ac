/* A stand-in for libcuda.so.1 in tests that need no GPU. Device addresses are host addresses, calls
 * take effect at once, and there is one device, one context, and one graph. It answers what the
 * tests ask and refuses what the real driver would refuse; functions that are not here are added by
 * the test as stubs that return CUDA_ERROR_NOT_SUPPORTED. It is not the simulated device. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int result;
enum { INVALID_VALUE = 1, INVALID_PTX = 218, UNSUPPORTED_PTX_VERSION = 222, NOT_FOUND = 500,
       CAPTURE_IMPLICIT = 906, UNKNOWN = 999 };

static void *context = &context;

result cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
result cuDriverGetVersion(int *version) { return *version = 13020, 0; }
result cuDeviceGetCount(int *count) { return *count = 1, 0; }
result cuDeviceGet(int *device, int ordinal) { return *device = ordinal + 40, 0; }
result cuDeviceGetName(char *name, int length, int device) {
    return device == 40 && length == 256 ? strcpy(name, "Fake"), 0 : INVALID_VALUE;
}
result cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 40) return INVALID_VALUE;
    switch (attribute) {
    case 16: return *value = 2, 0;
    case 39: return *value = 1024, 0;
    case 75: return *value = CAPABILITY / 10, 0;
    case 76: return *value = CAPABILITY % 10, 0;
    default: return INVALID_VALUE;
    }
}
/* There is one device, which is no peer of its own. */
result cuDeviceCanAccessPeer(int *able, int device, int peer) {
    return device == 40 && peer == 40 ? *able = 0, 0 : INVALID_VALUE;
}

result cuDevicePrimaryCtxRetain(void **out, int device) {
    return device == 40 ? *out = context = &context, 0 : INVALID_VALUE;
}
/* The next context has the same address, as it happens with the real driver. */
result cuDevicePrimaryCtxRelease_v2(int device) { return device == 40 ? 0 : INVALID_VALUE; }
result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return (void)device, *flags = 0, *active = 0, 0;
}
result cuCtxGetCurrent(void **out) { return *out = context, 0; }
result cuCtxSetCurrent(void *next) { return context = next, 0; }
/* Event 0x70 is one of the context. */
result cuCtxRecordEvent(void *it, uintptr_t event) {
    return it != &context ? 201 : event != 0x70 ? 400 : 0;
}
result cuCtxGetDevice(int *device) { return *device = 40, 0; }

struct location { int type, id; };
struct properties {
    int type, handles; struct location location; void *windows;
    unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4];
};
struct access { struct location location; int flags; };
static result check_frame(const struct properties *it) {
    struct properties wanted = { 1, 0, { 1, 0 }, NULL, 0, 0, 0, { 0 } };
    /* Or host memory on node 2. */
    struct properties host = { 1, 0, { 3, 2 }, NULL, 0, 0, 0, { 0 } };
    return memcmp(it, &wanted, sizeof wanted) && memcmp(it, &host, sizeof host) ? INVALID_VALUE : 0;
}
result cuMemGetAllocationGranularity(size_t *bytes, const struct properties *it, int option) {
    return option ? INVALID_VALUE : (*bytes = 2 << 20, check_frame(it));
}
result cuMemCreate(uint64_t *frame, size_t bytes, const struct properties *it, uint64_t flags) {
    return flags ? INVALID_VALUE : (*frame = bytes, check_frame(it));
}
result cuMemSetAccess(uint64_t address, size_t bytes, const struct access *it, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (it[i].location.type != 1 || it[i].location.id != 0 || it[i].flags != 3)
            return INVALID_VALUE;
    return address == 0x1000 && bytes == 0x2000 && count == 2 ? 0 : UNKNOWN;
}

result cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    return memory && bytes == (flags == 9 ? 8192 : 4096) && (flags == 1 || flags == 9)
        ? 0 : INVALID_VALUE;
}
result cuMemHostUnregister(void *memory) { return memory ? 0 : INVALID_VALUE; }
/* Host memory is 0x2000 bytes at 0x10000; 0x20000 is managed, and 0x30000 the device's. What is not
 * known is 0, and its other places stay as they are. */
result cuPointerGetAttributes(unsigned count, int *attributes, void **places, uint64_t address) {
    uint64_t page = address >> 16;
    if (count != 4 || attributes[0] != 2 || attributes[1] != 8 || attributes[2] != 11 ||
        attributes[3] != 12)
        return INVALID_VALUE;
    int host = page == 2 || (page == 1 && address < 0x12000);
    *(int *)places[0] = host ? 1 : page == 3 ? 2 : 0;
    *(int *)places[1] = page == 2;
    if (host || page == 3) {
        *(uint64_t *)places[2] = page << 16;
        *(size_t *)places[3] = 0x2000;
    }
    return 0;
}
/* An event is its flags. */
result cuEventCreate(uintptr_t *event, unsigned flags) { return *event = flags + 0x70, 0; }
result cuEventElapsedTime(float *millis, uintptr_t start, uintptr_t end) {
    return *millis = start < end ? 1.5f : -1.5f, 0;
}

/* Stream 0 is the legacy stream while another captures, 0x10 captures, 0x20 does not. */
result cuStreamGetCtx(uintptr_t stream, void **out) {
    return (void)stream, *out = &context, 0;
}
result cuStreamIsCapturing(uintptr_t stream, int *status) {
    if (stream == 0) return CAPTURE_IMPLICIT;
    return *status = stream == 0x10, 0;
}
static result capture_info(uintptr_t stream, int *status, uint64_t *id, void **graph) {
    result code = cuStreamIsCapturing(stream, status);
    *id = 1;
    *graph = &context;
    return code;
}
#ifdef CAPTURE_INFO_V3
result cuStreamGetCaptureInfo_v3(uintptr_t stream, int *status, uint64_t *id, void **graph,
                                 void *nodes, void *edges, void *count) {
    return nodes || edges || count ? UNKNOWN : capture_info(stream, status, id, graph);
}
#else
result cuStreamGetCaptureInfo_v2(uintptr_t stream, int *status, uint64_t *id, void **graph,
                                 void *nodes, void *count) {
    return nodes || count ? UNKNOWN : capture_info(stream, status, id, graph);
}
#endif

/* The graph holds one object at most; cuCtxSynchronize destroys the graph. */
static struct { void *data; void (*destroy)(void *); unsigned references; } object;
result cuUserObjectRelease(void *it, unsigned count) {
    if (it != &object || object.references < count) return INVALID_VALUE;
    object.references -= count;
    if (object.references == 0) object.destroy(object.data);
    return 0;
}
result cuUserObjectCreate(void **out, void *data, void (*destroy)(void *), unsigned references,
                          unsigned flags) {
    if (REFUSE_CREATE || flags != 1) return INVALID_VALUE;
    object.data = data, object.destroy = destroy, object.references = references;
    return *out = &object, 0;
}
result cuGraphRetainUserObject(void *graph, void *it, unsigned count, unsigned flags) {
    return REFUSE_RETAIN || graph != &context || it != &object || count != 1 || flags != 1
        ? INVALID_VALUE : 0;
}
result cuCtxSynchronize(void) { return object.references ? cuUserObjectRelease(&object, 1) : 0; }

/* Refuses the newest header, as an old driver would, when told to. */
result cuModuleLoadDataEx(void **module, const char *text, unsigned count, int *options,
                          void **values) {
    if (count != 2 || options[0] != 5 || options[1] != 6) return INVALID_VALUE;
    int newest = strstr(text, ".target sm_75") != NULL;
    if (newest && (REFUSE_NEWEST || CAPABILITY < 75)) {
        strncpy(values[0], "ptxas: refused", (size_t)values[1]);
        return UNSUPPORTED_PTX_VERSION;
    }
    if (strncmp(text, ".version ", 9)) return INVALID_PTX;
    return *module = &context, 0;
}
result cuModuleGetFunction(uintptr_t *function, void *module, const char *name) {
    (void)module;
    if (!strcmp(name, "vbar_checksum")) return *function = 1, 0;
    if (!strcmp(name, "vbar_pattern")) return *function = 2, 0;
    return NOT_FOUND;
}
result cuModuleUnload(void *module) { return (void)module, 0; }

static uint64_t mix(uint64_t word, uint64_t index) {
    word ^= (index + 1) * 0x9E3779B97F4A7C15u;
    word ^= word >> 32;
    word *= 0xD6E8FEB86659FD93u;
    return word ^ (word >> 32);
}
result cuLaunchKernel(uintptr_t function, unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned threads_y, unsigned threads_z, unsigned shared, uintptr_t stream,
                      uint64_t **a, void **extra) {
    /* 2 processors of 1024 threads hold 8 blocks. */
    if (x < 1 || x > 8 || y != 1 || z != 1 || threads != 256 || threads_y != 1 || threads_z != 1)
        return INVALID_VALUE;
    if (shared || stream != 0x20 || extra) return INVALID_VALUE;
    unsigned char *bytes = (unsigned char *)*a[0];
    uint64_t count = *a[1], word;
    if (function == 1 ? *a[3] != 5 : *a[3] != 6) return UNKNOWN;
    for (uint64_t i = 0; i * 8 < count; i++) {
        size_t length = count - i * 8 < 8 ? count - i * 8 : 8;
        if (function == 1) {
            word = 0;
            memcpy(&word, bytes + i * 8, length);
            *(uint64_t *)*a[4] += mix(word, *a[2] + i);
        } else {
            word = mix(*a[2], i);
            memcpy(bytes + i * 8, &word, length);
        }
    }
    return 0;
}
