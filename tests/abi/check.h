/*
 * What the C tests share: checks that say where they failed, and a device to test on.
 *
 * The device is a small simulated one, or what the environment variable VBAR_TEST_DRIVER says:
 * "cuda" runs the tests that make sense there on a GPU. With VBAR_TEST_THREADS set the library has
 * its own thread. A test that hangs is ended.
 */
#ifndef VBAR_TESTS_CHECK_H
#define VBAR_TESTS_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vbar.h"
#include "vbar_sim.h"

#define SECONDS_MAX 300
#define DEFAULT_DRIVER "sim:capacity=64M,granularity=64K,address_space=8G"
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static inline void report(const char *file, int line, const char *what, int status) {
    fprintf(stderr, "%s:%d: %s\n  status %d (%s): %s\n", file, line, what, status,
            vbar_status_text(status), vbar_last_message());
    fflush(stderr);
    _Exit(1);
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

/* The call fails with this status, and its message has the words; NULL: any message but none. */
#define FAILS(call, expected, words) \
    check_fails(__FILE__, __LINE__, #call, (call), (expected), (words))

static inline void check_fails(const char *file, int line, const char *call, int status,
                               int expected, const char *words) {
    const char *message = vbar_last_message();
    bool told = words ? strstr(message, words) != NULL : message[0] != '\0';
    if (status == expected && told) return;
    char what[512];
    snprintf(what, sizeof what, "%s: status %d (%s) and \"%s\" are expected", call, expected,
             vbar_status_text(expected), words ? words : "a message");
    report(file, line, what, status);
}

static inline const char *test_driver(void) {
    const char *driver = getenv("VBAR_TEST_DRIVER");
    return driver ? driver : DEFAULT_DRIVER;
}

static inline bool on_gpu(void) {
    return strncmp(test_driver(), "sim", 3) != 0;
}

/* Pages: as small as the device allows, so that tests are quick. */
static inline uint64_t page_bytes(void) {
    return on_gpu() ? UINT64_C(2) << 20 : UINT64_C(64) << 10;
}

/* Options for a budget of `pages` pages. */
static inline VbarDeviceOptions test_options(uint64_t pages) {
    VbarDeviceOptions options = {.size = sizeof options};
    options.driver = test_driver();
    options.page_bytes = page_bytes();
    options.budget_bytes = pages * page_bytes();
    options.headroom_bytes = VBAR_HEADROOM_NONE;
    options.threads = getenv("VBAR_TEST_THREADS") ? VBAR_THREADS_ON : VBAR_THREADS_OFF;
    return options;
}

static inline VbarDevice open_device(uint64_t pages) {
    VbarDeviceOptions options = test_options(pages);
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    return device;
}

static inline VbarStatistics statistics(VbarDevice device) {
    VbarStatistics told = {.size = sizeof told};
    OK(vbar_device_statistics(device, &told));
    return told;
}

/* Closes the last id of a device: nothing of it is left, and no rule of CUDA was broken. */
static inline void close_device(VbarDevice device) {
    VbarSim sim = {0};
    if (!on_gpu()) OK(vbar_sim_open(device, &sim));
    OK(vbar_device_close(device));
    if (on_gpu()) return;
    uint64_t violation_count;
    OK(vbar_sim_violation_count(sim, &violation_count));
    for (uint64_t at = 0; at < violation_count; at++) {
        char text[1024];
        OK(vbar_sim_violation(sim, at, text, sizeof text));
        fprintf(stderr, "violation: %s\n", text);
    }
    CHECK(violation_count == 0);
    VbarSimLive live = {.size = sizeof live};
    OK(vbar_sim_live(sim, &live));
    CHECK(live.frame_count == 0 && live.used_bytes == 0 && live.mapping_count == 0);
    CHECK(live.reservation_count == 0 && live.reserved_bytes == 0 && live.locked_bytes == 0);
    OK(vbar_sim_close(sim));
}

/* To be called first: a test that hangs is ended. */
static inline void start(void) {
    alarm(SECONDS_MAX);
    setvbuf(stdout, NULL, _IOLBF, 0);
}

#endif
