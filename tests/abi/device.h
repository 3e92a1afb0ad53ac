/*
 * Bytes from a device, simulated or not, for the C tests: the one call of CUDA that they make.
 */
#ifndef VBAR_TESTS_DEVICE_H
#define VBAR_TESTS_DEVICE_H

#include <dlfcn.h>

#include "check.h"

/* A function of the CUDA driver, through `function`, a pointer to a pointer to a function. */
static inline void find_cuda(const char *name, void *function) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
    void *symbol = dlsym(driver, name);
    CHECK(symbol != NULL);
    memcpy(function, &symbol, sizeof symbol);
}

/* Copies bytes from the device, behind everything that was enqueued on the default stream. */
static inline void copy_from_device(VbarDevice device, void *target, uint64_t source,
                                    size_t bytes) {
    if (!on_gpu()) {
        OK(vbar_sim_copy_to_host(device, target, source, bytes, 0));
        OK(vbar_sim_stream_synchronize(device, 0));
        return;
    }
    int (*set_current)(void *context);
    int (*copy)(void *target, uint64_t source, size_t bytes);
    find_cuda("cuCtxSetCurrent", &set_current);
    find_cuda("cuMemcpyDtoH_v2", &copy);
    VbarDeviceInfo info = {.size = sizeof info};
    OK(vbar_device_info(device, &info));
    CHECK(set_current(info.context) == 0);
    CHECK(copy(target, source, bytes) == 0);
}

#endif
