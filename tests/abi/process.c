/*
 * The process ends or forks with everything open: it ends as it was told to, the child of a fork is
 * told that it may do nothing, and nobody hangs.
 */
#define _GNU_SOURCE
#include "check.h"
#include "children.h"
#include "models.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define THREADS 4
#define TENSORS 12

static char path[4096];
static VbarDevice device;
static VbarBar bar;
static VbarAllocation allocation;
static VbarModel model;
static VbarFault held, refill, weight;

/* One of each, with pins, an unfinished fill and work that cannot run. */
static void open_everything(void) {
    device = open_device(8);
    OK(vbar_bar_create(device, 4 * page_bytes(), &bar));
    OK(vbar_bar_allocate(bar, 4096, &allocation));
    OK(vbar_bar_fault(bar, 3 * page_bytes(), page_bytes(), 0, &held));
    OK(vbar_allocation_fault(allocation, 0, &refill));
    CHECK(refill.outcome == VBAR_OUTCOME_REFILL);
    OK(vbar_model_open(device, path, &model));
    OK(vbar_model_fault(model, 0, 0, &weight));
    if (on_gpu()) return;
    VbarSim sim;
    VbarStream stream;
    OK(vbar_sim_open(device, &sim));
    OK(vbar_sim_stream_create(device, &stream));
    OK(vbar_sim_stream_hold(device, stream));
    OK(vbar_sim_launch_pattern(device, held.address, 4096, 1, 0, stream));
}

#define ENDING(call) FAILS(call, VBAR_STATUS_PROCESS_ENDING, "ending or forked")

/* Nothing may be called, and everything says so. */
static void check_all_refuse(void) {
    VbarFault told;
    VbarFreed freed;
    VbarBar other;
    VbarModel opened;
    VbarDevice again;
    uint64_t number;
    uint32_t count;
    size_t bytes;
    char text[16];
    VbarDeviceOptions options = test_options(8);
    VbarStatistics numbers = {.size = sizeof numbers};
    VbarDeviceInfo info = {.size = sizeof info};
    ENDING(vbar_device_open(&options, &again));
    ENDING(vbar_device_info(device, &info));
    ENDING(vbar_device_statistics(device, &numbers));
    ENDING(vbar_device_set_budget(device, 0));
    ENDING(vbar_device_refresh(device));
    ENDING(vbar_device_trim(device, 0, &number));
    ENDING(vbar_device_trim_host(device, 0, &number));
    ENDING(vbar_device_trim_host_frames(device, &number));
    ENDING(vbar_device_free_memory(device, UINT64_MAX, &freed));
    ENDING(vbar_device_cancel_waits(device));
    ENDING(vbar_stream_retire(device, 0));
    ENDING(vbar_device_read_file(device, 0, 0, 1, held.address, 0));
    ENDING(vbar_device_write_file(device, 0, 0, 1, held.address, 0));
    ENDING(vbar_device_copy_from_host(device, text, 1, held.address, 0));
    ENDING(vbar_device_lock_host(device, text, 1));
    ENDING(vbar_device_unlock_host(device, text));
    ENDING(vbar_bar_create(device, 1, &other));
    ENDING(vbar_bar_fault(bar, 0, 1, 0, &told));
    ENDING(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    ENDING(vbar_bar_end_of_run(bar, 0, VBAR_HELD_PINS_RELEASE, &count));
    ENDING(vbar_allocation_fault_wait(allocation, 0, &told));
    ENDING(vbar_token_commit(refill.token, 0));
    ENDING(vbar_token_unpin(refill.token, 0));
    ENDING(vbar_token_unpin(held.token, 0));
    ENDING(vbar_model_open(device, path, &opened));
    ENDING(vbar_model_fault(model, 0, 0, &told));
    ENDING(vbar_model_close(model));
    ENDING(vbar_bar_destroy_wait(bar));
    ENDING(vbar_device_close(device));
    ENDING(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE));
    VbarTorchStatistics torch_numbers = {.size = sizeof torch_numbers};
    ENDING(vbar_torch_configure(&options));
    ENDING(vbar_torch_device(0, &again));
    ENDING(vbar_torch_statistics(0, &torch_numbers));
    vbar_torch_free(&numbers, 1, 0, 0);
    vbar_torch_reset();
    CHECK(vbar_torch_malloc(1, 0, 0) == NULL);
    ENDING(vbar_torch_reset_peaks(0));
    ENDING(vbar_log_poll(text, sizeof text, &count, &bytes));
    CHECK(vbar_abi_version() == VBAR_ABI_VERSION);
}

/* Gives back what a fault came to. Whether the process ends. */
static int is_over(int status, const VbarFault *told) {
    if (status == VBAR_STATUS_PROCESS_ENDING) return 1;
    OK(status);
    if (told->token.id == 0) return 0;
    status = vbar_token_unpin(told->token, 0);
    CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_PROCESS_ENDING);
    return 0;
}

static void *use_for_ever(void *argument) {
    (void)argument;
    for (;;) {
        VbarFault told;
        int status = vbar_bar_fault(bar, 0, 2 * page_bytes(), 0, &told);
        if (is_over(status, &told)) return NULL;
    }
}

static void start_threads(void *(*work)(void *)) {
    for (int at = 0; at < THREADS; at++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
        CHECK(pthread_detach(thread) == 0);
    }
}

static void start_users(void) {
    start_threads(use_for_ever);
}

static atomic_int ended_code = 7;

/* Registered before the device was opened, so it runs after the library's own handler. */
static void call_at_the_end(void) {
    VbarFault told;
    if (vbar_bar_fault(bar, 0, 1, 0, &told) != VBAR_STATUS_PROCESS_ENDING) _Exit(81);
    if (vbar_device_close(device) != VBAR_STATUS_PROCESS_ENDING) _Exit(82);
    _Exit(ended_code);
}

static void exit_at_once(void) {
    open_everything();
    exit(7);
}

static void exit_with_calls_in_handlers(void) {
    CHECK(atexit(call_at_the_end) == 0);
    open_everything();
    exit(1);
}

static void exit_while_others_call(void) {
    open_everything();
    start_users();
    usleep(20000);
    exit(7);
}

static void *exit_here(void *argument) {
    (void)argument;
    usleep(20000);
    exit(7);
}

static void exit_from_another_thread(void) {
    open_everything();
    start_users();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, exit_here, NULL) == 0);
    for (;;) pause();
}

/* The main thread is gone when another one ends the process. */
static void exit_after_the_main_thread(void) {
    open_everything();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, exit_here, NULL) == 0);
    pthread_exit(NULL);
}

static void exit_quickly(void) {
    open_everything();
    start_users();
    quick_exit(7);
}

static void exit_without_handlers(void) {
    open_everything();
    start_users();
    _exit(7);
}

/* Another thread may be in the middle of exit(3), and this one's calls are refused already. */
static void wait_for_the_end(void) {
    for (;;) pause();
}

static void exit_when_told(uint32_t level, const char *message, void *user) {
    (void)level, (void)message, (void)user;
    exit(7);
}

/* Callbacks of the library end the process, whatever it is in the middle of then. */
static void exit_from_a_message(void) {
    open_everything();
    start_users();
    OK(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE));
    OK(vbar_log_set_callback(exit_when_told, NULL));
    VbarDeviceOptions options = test_options(8);
    VbarDevice none;
    options.ordinal = 63;
    vbar_device_open(&options, &none);
    wait_for_the_end();
}

static int exit_when_asked(void *user) {
    (void)user;
    exit(7);
}

static void exit_from_a_wait(void) {
    open_everything();
    start_users();
    VbarBar pinned;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &pinned));
    OK(vbar_bar_fault(pinned, 0, 1, VBAR_STREAM_NONE, &told));
    CHECK(told.token.id != 0);
    OK(vbar_thread_set_wait_check(exit_when_asked, NULL));
    vbar_bar_destroy_wait(pinned);
}

static void exit_when_released(void *user) {
    (void)user;
    exit(7);
}

/* On whichever thread gives the memory back: with its own threads the library's. */
static void exit_from_a_release(void) {
    static unsigned char bytes[4096];
    VbarBar bound;
    VbarFault told;
    VbarBindSource source = {.memory = bytes, .memory_bytes = sizeof bytes};
    source.release = exit_when_released;
    VbarBindSegment segment = {.bytes = sizeof bytes};
    open_everything();
    OK(vbar_bar_create(device, page_bytes(), &bound));
    OK(vbar_bar_bind(bound, &source, 1, &segment, 1));
    OK(vbar_bar_fault(bound, 0, sizeof bytes, VBAR_STREAM_NONE, &told));
    if (told.token.id != 0) OK(vbar_token_unpin(told.token, VBAR_STREAM_NONE));
    OK(vbar_bar_destroy_wait(bound));
    for (int status = VBAR_STATUS_OK; status == VBAR_STATUS_OK; usleep(1000)) {
        status = vbar_device_refresh(device);
        CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_PROCESS_ENDING);
    }
    wait_for_the_end();
}

static void *stream_for_ever(void *argument) {
    (void)argument;
    for (uint64_t at = 0;; at++) {
        VbarFault told;
        int status = vbar_model_fault(model, at % TENSORS, 0, &told);
        if (is_over(status, &told)) return NULL;
    }
}

/* Copies on their way, files being read, pages on the move. */
static void open_and_stream(void) {
    device = open_device(TENSORS / 2);
    OK(vbar_model_open(device, path, &model));
    start_threads(stream_for_ever);
    while (statistics(device).evicted_page_count < TENSORS) usleep(1000);
}

static void exit_while_it_streams(void) {
    open_and_stream();
    exit(7);
}

static void exit_at_once_while_it_streams(void) {
    open_and_stream();
    _exit(7);
}

static void exit_quickly_while_it_streams(void) {
    open_and_stream();
    quick_exit(7);
}

static void abort_while_it_streams(void) {
    struct rlimit none = {0, 0};
    open_and_stream();
    setrlimit(RLIMIT_CORE, &none);
    abort();
}

static void be_terminated_while_it_streams(void) {
    open_and_stream();
    for (;;) kill(getpid(), SIGTERM);
}

/* A child that ends by a signal of its own, as it should. */
static void check_ends_by(void (*body)(void), int number) {
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        body();
        _Exit(99);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == number);
}

static void check_ends(void (*body)(void), int code) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        body();
        _Exit(99);
    }
    int found = code_of(child);
    if (found != code) fprintf(stderr, "ended with %d\n", found);
    CHECK(found == code);
}

static void refuse_and_exit(void) {
    check_all_refuse();
    /* Its handlers run: those of the library, and on a GPU the driver's. */
    exit(5);
}

static void refuse_and_exit_at_once(void) {
    check_all_refuse();
    _exit(5);
}

static void a_forked_child_may_do_nothing(void) {
    open_everything();
    check_ends(refuse_and_exit, 5);
    /* The parent goes on. */
    OK(vbar_token_commit(refill.token, 0));
    OK(vbar_token_unpin(refill.token, 0));
    OK(vbar_token_unpin(weight.token, 0));
    VbarFault told;
    OK(vbar_allocation_fault(allocation, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_token_unpin(told.token, 0));
    /* Whatever locks other threads had, the child waits for none. */
    OK(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE));
    start_users();
    for (int round = 0; round < 50; round++) check_ends(refuse_and_exit_at_once, 5);
    OK(vbar_allocation_fault(allocation, 0, &told));
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_token_unpin(held.token, 0));
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2);
    snprintf(path, sizeof path, "%s/process.safetensors", arguments[1]);
    write_model(path, TENSORS, page_bytes());
    /* First those that open nothing in this process: it has not loaded a driver yet. */
    check_ends(exit_at_once, 7);
    check_ends(exit_with_calls_in_handlers, 7);
    check_ends(exit_while_others_call, 7);
    check_ends(exit_from_another_thread, 7);
    check_ends(exit_after_the_main_thread, 7);
    check_ends(exit_quickly, 7);
    check_ends(exit_without_handlers, 7);
    check_ends(exit_from_a_message, 7);
    check_ends(exit_from_a_wait, 7);
    check_ends(exit_from_a_release, 7);
    check_ends(exit_while_it_streams, 7);
    check_ends(exit_at_once_while_it_streams, 7);
    check_ends(exit_quickly_while_it_streams, 7);
    check_ends_by(abort_while_it_streams, SIGABRT);
    check_ends_by(be_terminated_while_it_streams, SIGTERM);
    a_forked_child_may_do_nothing();
    /* And this process ends as it is: threads in calls, everything open. */
    return 0;
}
