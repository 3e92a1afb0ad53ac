/*
 * Signals that come all the time, to whichever thread, none of whose handlers lets calls of the
 * system be restarted: no call of the library fails or hangs for them, and no byte is wrong. The
 * one function that a handler may call is called by one, everywhere.
 */
#define _GNU_SOURCE
#include "check.h"
#include "device.h"
#include "models.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>

#define TENSORS 24
#define ROUNDS 12

static char path[4096];
static VbarDevice device;
static VbarModel model;
static uint64_t data;
static atomic_uint handled;
static atomic_bool cancels;
static unsigned char bytes[1 << 21];

static void handle(int number) {
    (void)number;
    atomic_fetch_add(&handled, 1);
    if (atomic_load(&cancels) && vbar_device_cancel_waits(device) != VBAR_STATUS_OK) _Exit(9);
}

/* The timer that ends a test is the one that makes signals here. */
static void *watch_for_a_hang(void *argument) {
    (void)argument;
    for (int second = 0; second < SECONDS_MAX; second++) usleep(1000000);
    fputs("it hangs\n", stderr);
    _Exit(8);
}

/* Children that end all the time. */
static void *make_children(void *argument) {
    (void)argument;
    for (;;) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        int status;
        while (waitpid(child, &status, 0) < 0) continue;
        usleep(2000);
    }
    return NULL;
}

/* A thread that takes no signals. */
static void start_thread(void *(*body)(void *)) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    CHECK(pthread_create(&thread, NULL, body, NULL) == 0);
    CHECK(pthread_detach(thread) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
}

static void start_the_storm(void) {
    struct sigaction action = {.sa_handler = handle};
    static const int signals[] = {SIGALRM, SIGCHLD, SIGUSR1, SIGINT, SIGTERM};
    for (size_t at = 0; at < COUNT_OF(signals); at++) {
        CHECK(sigaction(signals[at], &action, NULL) == 0);
    }
    struct itimerval often = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    start_thread(watch_for_a_hang);
    start_thread(make_children);
}

/* All tensors, through a budget of a third of them. */
static unsigned stream_once(bool may_be_cancelled) {
    unsigned cancelled = 0;
    for (uint64_t at = 0; at < TENSORS; at++) {
        VbarFault told;
        int status = vbar_model_fault(model, at, 0, &told);
        if (may_be_cancelled && status == VBAR_STATUS_CANCELLED) {
            cancelled++;
            continue;
        }
        OK(status);
        if (told.outcome != VBAR_OUTCOME_RESIDENT) continue;
        copy_from_device(device, bytes, told.address, told.bytes);
        CHECK(are_file_bytes(bytes, data + at * page_bytes(), told.bytes));
        OK(vbar_token_unpin(told.token, 0));
    }
    return cancelled;
}

/* Whatever the signals interrupt, the calls come to what they would have come to. */
static void calls_come_to_what_they_would(void) {
    unsigned before = handled;
    for (int round = 0; round < ROUNDS || handled - before < 200; round++) {
        CHECK(stream_once(false) == 0);
        if (round == ROUNDS / 2) {
            kill(getpid(), SIGINT);
            kill(getpid(), SIGTERM);
        }
        VbarBar bar;
        OK(vbar_bar_create(device, 2 * page_bytes(), &bar));
        OK(vbar_bar_destroy_wait(bar));
    }
}

/* A handler that calls, in the middle of whatever its thread is doing. */
static void a_handler_may_cancel_waits(void) {
    atomic_store(&cancels, true);
    unsigned before = handled;
    for (int round = 0; round < ROUNDS || handled - before < 200; round++) stream_once(true);
    /* A wait that nothing else would end. */
    VbarBar bar;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_bar_fault(bar, 0, 1, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    FAILS(vbar_bar_destroy_wait(bar), VBAR_STATUS_CANCELLED, NULL);
    OK(vbar_token_unpin(told.token, 0));
    atomic_store(&cancels, false);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    snprintf(path, sizeof path, "%s/signals.safetensors", arguments[1]);
    data = write_model(path, TENSORS, page_bytes());
    VbarDeviceOptions options = test_options(TENSORS / 3);
    /* Longer than the test may take: a wait that loses its wake-up is seen. */
    options.wait_timeout_ms = 240000;
    OK(vbar_device_open(&options, &device));
    OK(vbar_model_open(device, path, &model));
    start_the_storm();
    calls_come_to_what_they_would();
    a_handler_may_cancel_waits();
    calls_come_to_what_they_would();
    printf("%u signals\n", (unsigned)handled);
    OK(vbar_model_close(model));
    OK(vbar_device_close(device));
    return 0;
}
