/*
 * A plug-in that is loaded, unloaded and loaded again: the library stays (`-z nodelete`), because
 * the driver may still call into it, and what was opened is open still.
 *
 * This program is not linked to the library: `reload LIBRARY`.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vbar.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _Exit(1); \
        } \
    } while (0)

static struct {
    uint32_t (*abi_version)(void);
    VbarStatus (*device_open)(const VbarDeviceOptions *options, VbarDevice *device);
    VbarStatus (*device_close)(VbarDevice device);
    VbarStatus (*device_refresh)(VbarDevice device);
    VbarStatus (*bar_create)(VbarDevice device, uint64_t bytes, VbarBar *bar);
    VbarStatus (*bar_destroy)(VbarBar bar);
    VbarStatus (*bar_fault)(VbarBar bar, uint64_t offset, uint64_t bytes, VbarStream stream,
                            VbarFault *fault);
    VbarStatus (*token_unpin)(VbarToken token, VbarStream stream);
} vbar;

static void find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    CHECK(symbol != NULL);
    memcpy(function, &symbol, sizeof symbol);
}

static void *load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    find(library, "vbar_abi_version", &vbar.abi_version);
    find(library, "vbar_device_open", &vbar.device_open);
    find(library, "vbar_device_close", &vbar.device_close);
    find(library, "vbar_device_refresh", &vbar.device_refresh);
    find(library, "vbar_bar_create", &vbar.bar_create);
    find(library, "vbar_bar_destroy", &vbar.bar_destroy);
    find(library, "vbar_bar_fault", &vbar.bar_fault);
    find(library, "vbar_token_unpin", &vbar.token_unpin);
    return library;
}

static VbarDevice device;
static VbarBar bar;
static pthread_barrier_t used, unloaded;

/* A thread that used the library before it was unloaded, and ends afterwards. */
static void *use_and_end_later(void *argument) {
    (void)argument;
    VbarFault told;
    CHECK(vbar.bar_fault(bar, 0, 1, 0, &told) == VBAR_STATUS_OK);
    CHECK(vbar.token_unpin(told.token, 0) == VBAR_STATUS_OK);
    pthread_barrier_wait(&used);
    pthread_barrier_wait(&unloaded);
    return NULL;
}

int main(int count, char **arguments) {
    alarm(300);
    CHECK(count == 2);
    const char *driver = getenv("VBAR_TEST_DRIVER");
    VbarDeviceOptions options = {.size = sizeof options, .budget_bytes = UINT64_C(16) << 20};
    options.driver = driver ? driver : "sim:capacity=64M,address_space=8G";
    options.headroom_bytes = VBAR_HEADROOM_NONE;
    options.page_bytes = UINT64_C(2) << 20;
    options.threads = getenv("VBAR_TEST_THREADS") ? VBAR_THREADS_ON : VBAR_THREADS_OFF;

    void *library = load(arguments[1]);
    void *(*body)(void *) = use_and_end_later;
    uint32_t (*abi_version)(void) = vbar.abi_version;
    CHECK(vbar.device_open(&options, &device) == VBAR_STATUS_OK);
    CHECK(vbar.bar_create(device, UINT64_C(8) << 20, &bar) == VBAR_STATUS_OK);
    VbarFault told;
    CHECK(vbar.bar_fault(bar, 0, 1, 0, &told) == VBAR_STATUS_OK);

    pthread_t thread;
    pthread_barrier_init(&used, NULL, 2);
    pthread_barrier_init(&unloaded, NULL, 2);
    CHECK(pthread_create(&thread, NULL, body, NULL) == 0);
    pthread_barrier_wait(&used);
    CHECK(dlclose(library) == 0);
    pthread_barrier_wait(&unloaded);
    CHECK(pthread_join(thread, NULL) == 0);

    for (int round = 0; round < 20; round++) {
        memset(&vbar, 0, sizeof vbar);
        library = load(arguments[1]);
        /* The same code, the same ids. */
        CHECK(vbar.abi_version == abi_version && abi_version() == VBAR_ABI_VERSION);
        CHECK(vbar.device_refresh(device) == VBAR_STATUS_OK);
        CHECK(dlclose(library) == 0);
    }
    library = load(arguments[1]);
    CHECK(vbar.token_unpin(told.token, 0) == VBAR_STATUS_OK);
    CHECK(vbar.bar_destroy(bar) == VBAR_STATUS_OK);
    CHECK(vbar.device_close(device) == VBAR_STATUS_OK);
    CHECK(vbar.device_close(device) == VBAR_STATUS_STALE_HANDLE);
    CHECK(vbar.device_open(&options, &device) == VBAR_STATUS_OK);
    /* Unloaded with a device open, and the process ends. */
    CHECK(dlclose(library) == 0);
    return 0;
}
