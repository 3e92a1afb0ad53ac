/*
 * Messages: a callback that calls the library, one that is exchanged while it is called, polling,
 * and a place in the source that says the same thing too often.
 */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define SAYINGS 100
/* Fewer than one place may say in a second. */
#define CHAIN 5
#define SAID_IN_A_SECOND_MAX 10

static atomic_uint called;
static VbarDevice device;

/* Something that is logged, at the level of information: a device that is not opened. */
static void say(void) {
    VbarDeviceOptions options = test_options(8);
    options.ordinal = 63;
    VbarDevice none = {0};
    CHECK(vbar_device_open(&options, &none) == VBAR_STATUS_DEVICE_NOT_REGISTERED);
}

static void count_call(uint32_t level, const char *message, void *user) {
    CHECK(level >= VBAR_LOG_LEVEL_ERROR && level <= VBAR_LOG_LEVEL_TRACE);
    CHECK(message[0] != '\0' && user == &called);
    atomic_fetch_add(&called, 1);
}

/* No lock is held here: everything may be called. */
static void call_back(uint32_t level, const char *message, void *user) {
    count_call(level, message, user);
    VbarBar bar;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_bar_fault(bar, 0, 1, 0, &told));
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_bar_destroy_wait(bar));
    CHECK(statistics(device).bar_count == 0);
    char text[256];
    uint32_t other;
    size_t bytes;
    OK(vbar_log_poll(text, sizeof text, &other, &bytes));
    /* What is said in a callback is delivered when it has returned. */
    if (atomic_load(&called) < CHAIN) say();
}

static void a_callback_may_call_the_library(void) {
    called = 0;
    OK(vbar_log_set_callback(call_back, &called));
    say();
    CHECK(called == CHAIN);
    OK(vbar_log_set_callback(NULL, NULL));
    say();
    CHECK(called == CHAIN);
}

static void call_in_vain(uint32_t level, const char *message, void *user) {
    count_call(level, message, user);
    FAILS(vbar_bar_destroy((VbarBar){0}), VBAR_STATUS_STALE_HANDLE, "no VBAR");
}

/* The caller gets the message of the call that it made. */
static void a_callback_s_failure_is_its_own(void) {
    called = 0;
    OK(vbar_log_set_callback(call_in_vain, &called));
    say();
    CHECK(called >= 1 && strstr(vbar_last_message(), "63") != NULL);
    const char *before = vbar_last_message();
    VbarBar bar;
    VbarDeviceOptions options = test_options(8);
    VbarDevice other;
    OK(vbar_device_open(&options, &other));
    OK(vbar_bar_create(other, page_bytes(), &bar));
    OK(vbar_bar_destroy_wait(bar));
    OK(vbar_device_close(other));
    CHECK(vbar_last_message() == before && strstr(before, "63") != NULL);
    OK(vbar_log_set_callback(NULL, NULL));
}

/* A message that ends the callback. */
static void stop(uint32_t level, const char *message, void *user) {
    count_call(level, message, user);
    OK(vbar_log_set_callback(NULL, NULL));
}

static void a_callback_may_end_itself(void) {
    called = 0;
    OK(vbar_log_set_callback(stop, &called));
    say();
    say();
    CHECK(called == 1);
}

/* Everything queued is taken out. */
static unsigned drain(void) {
    char text[512];
    uint32_t level;
    size_t bytes;
    unsigned count = 0;
    for (;; count++) {
        OK(vbar_log_poll(text, sizeof text, &level, &bytes));
        if (level == VBAR_LOG_LEVEL_OFF) return count;
        CHECK(strlen(text) == (bytes < sizeof text ? bytes : sizeof text - 1));
    }
}

static double seconds(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void one_place_is_not_heard_too_often(void) {
    drain();
    double from = seconds();
    for (int at = 0; at < SAYINGS; at++) say();
    unsigned windows = (unsigned)(seconds() - from) + 2;
    unsigned heard = drain();
    CHECK(heard >= 1 && heard <= windows * SAID_IN_A_SECOND_MAX);
}

static void polling_cuts_messages_off(void) {
    /* Another place in the source: a device that is opened. */
    VbarDeviceOptions options = test_options(8);
    char driver[256], text[512], start[8];
    uint32_t level;
    size_t bytes;
    snprintf(driver, sizeof driver, "%s%s", test_driver(), on_gpu() ? "" : ",seed=9");
    options.driver = driver;
    drain();
    VbarDevice other;
    OK(vbar_device_open(&options, &other));
    OK(vbar_device_close(other));
    if (on_gpu()) return; /* It was open: nothing was said. */
    OK(vbar_log_poll(start, sizeof start, &level, &bytes));
    CHECK(level == VBAR_LOG_LEVEL_INFO && strlen(start) == 7 && bytes > 7);
    CHECK(strncmp(start, "device 0", 7) == 0);
    OK(vbar_log_poll(text, sizeof text, &level, &bytes));
}

static atomic_bool stopped;

static void *say_for_long(void *argument) {
    (void)argument;
    while (!atomic_load(&stopped)) say();
    return NULL;
}

/* After the exchange the callback before is not called any more, whoever is in a call. */
static void exchanged_callbacks_are_not_called(void) {
    pthread_t threads[4];
    atomic_store(&stopped, false);
    for (size_t at = 0; at < COUNT_OF(threads); at++) {
        CHECK(pthread_create(&threads[at], NULL, say_for_long, NULL) == 0);
    }
    /* Some messages of three seconds. */
    for (called = 0; called < 2 * SAID_IN_A_SECOND_MAX + 1;) {
        OK(vbar_log_set_callback(count_call, &called));
        OK(vbar_log_set_callback(NULL, NULL));
        unsigned before = called;
        say();
        CHECK(called == before);
    }
    atomic_store(&stopped, true);
    for (size_t at = 0; at < COUNT_OF(threads); at++) CHECK(pthread_join(threads[at], NULL) == 0);
}

int main(void) {
    start();
    device = open_device(8);
    say();
    CHECK(drain() == 0); /* Off at first. */
    OK(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE));
    a_callback_may_call_the_library();
    a_callback_may_end_itself();
    a_callback_s_failure_is_its_own();
    one_place_is_not_heard_too_often();
    polling_cuts_messages_off();
    exchanged_callbacks_are_not_called();
    OK(vbar_log_set_level(VBAR_LOG_LEVEL_OFF));
    drain();
    say();
    CHECK(drain() == 0);
    close_device(device);
    return 0;
}
