/*
 * A process forks while another of its threads, or the same one, is in the middle of opening the
 * library for the first time: the child never hangs. It is told that it may do nothing, or, where
 * nothing had begun yet, opens devices of its own.
 *
 *     opening FOLDER|stand-in    with `stand-in` libcuda.so.1 is that of opening_driver.c
 */
#define _GNU_SOURCE
#include "check.h"
#include "children.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

/* What children end with. */
enum { OPENED = 5, REFUSED = 6 };

/* Opens a device and uses it, if the process may. */
static void open_or_be_refused(void) {
    alarm(60);
    VbarDeviceOptions options = test_options(8);
    VbarDevice device;
    int status = vbar_device_open(&options, &device);
    if (status == VBAR_STATUS_PROCESS_ENDING) {
        FAILS(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE), VBAR_STATUS_PROCESS_ENDING, "forked");
        _exit(REFUSED);
    }
    OK(status);
    VbarBar bar;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_bar_fault(bar, 0, page_bytes(), 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_bar_destroy_wait(bar));
    OK(vbar_device_close(device));
    _exit(OPENED);
}

static pid_t fork_to(void (*body)(void)) {
    pid_t child = fork();
    if (child == 0) {
        body();
        _exit(99);
    }
    return child;
}

static int codes_seen[8];

static void refused_by_all(void) {
    VbarDeviceOptions options = test_options(8);
    VbarDevice device;
    alarm(60);
    options.driver = "cuda";
    FAILS(vbar_device_open(&options, &device), VBAR_STATUS_PROCESS_ENDING, "forked");
    FAILS(vbar_torch_device(0, &device), VBAR_STATUS_PROCESS_ENDING, "forked");
    CHECK(vbar_torch_malloc(1, 0, 0) == NULL);
    /* Nor does a child of its own. */
    CHECK(code_of(fork_to(open_or_be_refused)) == REFUSED);
    open_or_be_refused();
}

/* Called by the driver's stand-in from inside cuInit, on the thread that opens. */
static int fork_in_the_middle(void) {
    codes_seen[0] = code_of(fork_to(refused_by_all));
    return 0;
}

/* What the child finds there is what another thread's opening would have left: a lock that is
 * held for as long as the driver takes, seconds on some machines. */
static void forks_in_the_middle_of_cu_init(void) {
    char address[32];
    int (*hook)(void) = fork_in_the_middle;
    uintptr_t number;
    memcpy(&number, &hook, sizeof number);
    snprintf(address, sizeof address, "%" PRIuPTR, number);
    CHECK(setenv("VBAR_TEST_IN_INIT", address, 1) == 0);
    VbarDeviceOptions options = test_options(8);
    options.driver = "cuda";
    VbarDevice device;
    for (int round = 0; round < 2; round++) {
        codes_seen[0] = 0;
        FAILS(vbar_device_open(&options, &device), VBAR_STATUS_DRIVER, "CUDA_ERROR_NO_DEVICE");
        CHECK(codes_seen[0] == REFUSED);
        /* There is nothing of it now: children may open what there is. */
        CHECK(code_of(fork_to(open_or_be_refused)) == OPENED);
    }
}

static atomic_int threads_ready;

/* Calls what is called before a device is open, again and again, so that a fork finds it anywhere. */
static void *fail_to_open_for_ever(void *argument) {
    VbarDeviceOptions options = test_options(8);
    (void)argument;
    options.driver = "sim:capacity=nothing";
    atomic_fetch_add(&threads_ready, 1);
    for (;;) {
        char text[256];
        uint32_t level;
        size_t bytes;
        VbarDevice device;
        FAILS(vbar_device_open(&options, &device), VBAR_STATUS_INVALID_ARGUMENT, "capacity");
        OK(vbar_log_set_level(VBAR_LOG_LEVEL_INFO));
        OK(vbar_log_poll(text, sizeof text, &level, &bytes));
    }
    return NULL;
}

static void *open_once(void *argument) {
    (void)argument;
    atomic_fetch_add(&threads_ready, 1);
    open_device(8);
    for (;;) pause();
    return NULL;
}

#define CHILDREN 6

/* A process that has never called the library. */
static void fork_while_others_open(bool failing) {
    alarm(120);
    pthread_t thread;
    void *(*body)(void *) = failing ? fail_to_open_for_ever : open_once;
    CHECK(pthread_create(&thread, NULL, body, NULL) == 0);
    while (atomic_load(&threads_ready) == 0) continue;
    pid_t children[CHILDREN];
    for (int at = 0; at < CHILDREN; at++) children[at] = fork_to(open_or_be_refused);
    int opened = 0;
    for (int at = 0; at < CHILDREN; at++) {
        int code = code_of(children[at]);
        CHECK(code == OPENED || code == REFUSED);
        opened += code == OPENED;
    }
    _exit(opened);
}

static void fork_while_one_opens(void) { fork_while_others_open(false); }
static void fork_while_one_fails(void) { fork_while_others_open(true); }

int main(int count, char **arguments) {
    start();
    /* The processes of this part have to be the first callers, each of them. */
    int rounds = on_gpu() ? 3 : 20, opened = 0;
    for (int round = 0; round < rounds; round++) {
        int one = code_of(fork_to(fork_while_one_opens));
        CHECK(one <= CHILDREN);
        int other = code_of(fork_to(fork_while_one_fails));
        CHECK(other <= CHILDREN);
        opened += one + other;
    }
    printf("%d of %d children opened devices\n", opened, 2 * rounds * CHILDREN);
    if (count > 1 && strcmp(arguments[1], "stand-in") == 0) forks_in_the_middle_of_cu_init();
    return 0;
}
