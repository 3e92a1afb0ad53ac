/*
 * Every call of the driver fails once, at every place where a small program makes it, with each of
 * some codes: the program gets a status and a message with the driver's code or an outcome, goes
 * on, and leaves nothing behind.
 *
 *     failing FOLDER VERB...
 *
 * Simulated only. The verbs are handed in by the Rust test, which knows them all. With
 * VBAR_TEST_CODES=in_turn a place fails with one of the codes, the next with the next: for memcheck,
 * where all of them take minutes.
 */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "models.h"

/* A place beyond this one is like the ones before. */
#define PLACES_MAX 24

static const int codes[] = {
    1,   /* CUDA_ERROR_INVALID_VALUE */
    2,   /* CUDA_ERROR_OUT_OF_MEMORY */
    201, /* CUDA_ERROR_INVALID_CONTEXT */
    600, /* CUDA_ERROR_NOT_READY */
};

static char path[4096];
static const char *verb;
static int code;
static uint64_t place;
/* Nothing fails any more. */
static bool healed;

/* Whether a call succeeded. If not, it said what the driver said. */
static bool may_fail(int line, const char *call, int status) {
    if (status == VBAR_STATUS_OK) return true;
    const char *message = vbar_last_message();
    bool told = strstr(message, "CUDA_ERROR_") || status == VBAR_STATUS_UNSUPPORTED;
    bool sensible = status == VBAR_STATUS_DRIVER || status == VBAR_STATUS_HOST_MEMORY ||
                    status == VBAR_STATUS_NO_ADDRESSES || status == VBAR_STATUS_UNSUPPORTED;
    if (!told || !sensible || healed) {
        fprintf(stderr, "%s fails with %d at place %" PRIu64 ":\n", verb, code, place);
        report(__FILE__, line, call, status);
    }
    return false;
}

#define MAY_FAIL(call) may_fail(__LINE__, #call, (call))

static void use(VbarFault told, bool commit) {
    if (told.token.id == 0) {
        CHECK(told.outcome == VBAR_OUTCOME_OFFLOADED && told.reason != VBAR_REASON_NONE);
        return;
    }
    if (commit && told.outcome == VBAR_OUTCOME_REFILL) MAY_FAIL(vbar_token_commit(told.token, 0));
    MAY_FAIL(vbar_token_unpin(told.token, 0));
    /* Given back, whatever the status said. */
    FAILS(vbar_token_unpin(told.token, 0), VBAR_STATUS_STALE_TOKEN, NULL);
}

static void use_model(VbarDevice device) {
    VbarModel model;
    if (!MAY_FAIL(vbar_model_open(device, path, &model))) return;
    for (uint64_t at = 0; at < 3; at++) {
        VbarFault told;
        if (MAY_FAIL(vbar_model_fault(model, at, 0, &told))) use(told, false);
    }
    OK(vbar_model_close(model));
}

/* Copies of the program's own, of pinned pages, and memory that it locks. */
static void transfer(VbarDevice device, VbarBar bar) {
    static _Alignas(4096) char memory[4096];
    VbarFault told;
    FILE *opened = tmpfile();
    CHECK(opened != NULL);
    int file = fileno(opened);
    CHECK(write(file, memory, sizeof memory) == sizeof memory);
    if (MAY_FAIL(vbar_bar_fault(bar, 2 * page_bytes(), page_bytes(), 0, &told)) && told.token.id) {
        MAY_FAIL(vbar_device_read_file(device, file, 0, 4096, told.address, 0));
        MAY_FAIL(vbar_device_write_file(device, file, 4096, 4096, told.address, 0));
        MAY_FAIL(vbar_device_copy_from_host(device, memory, sizeof memory, told.address, 0));
        use(told, false);
    }
    if (MAY_FAIL(vbar_device_lock_host(device, memory, sizeof memory))) {
        if (!MAY_FAIL(vbar_device_unlock_host(device, memory))) {
            OK(vbar_device_unlock_host(device, memory));
        }
    }
    CHECK(fclose(opened) == 0);
}

/* A program that meets every part of the library; what fails it passes over. */
static void small_program(VbarDevice device) {
    VbarBar bar;
    if (!MAY_FAIL(vbar_bar_create(device, 4 * page_bytes(), &bar))) return;
    VbarAllocation allocation;
    VbarFault told;
    OK(vbar_bar_allocate(bar, page_bytes(), &allocation));
    for (int round = 0; round < 2; round++) {
        if (MAY_FAIL(vbar_allocation_fault(allocation, 0, &told))) use(told, true);
        if (MAY_FAIL(vbar_bar_fault(bar, page_bytes(), 3 * page_bytes(), 0, &told))) {
            use(told, false);
        }
        transfer(device, bar);
        use_model(device);
    }
    uint32_t pinned;
    if (MAY_FAIL(vbar_bar_end_of_run(bar, 0, VBAR_HELD_PINS_RELEASE, &pinned))) CHECK(pinned == 0);
    VbarFreed freed;
    MAY_FAIL(vbar_device_set_budget(device, 2 * page_bytes()));
    MAY_FAIL(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    MAY_FAIL(vbar_device_set_budget(device, 4 * page_bytes()));
    MAY_FAIL(vbar_stream_retire(device, 0));
    MAY_FAIL(vbar_bar_destroy_wait(bar));
}

/* After a failure the driver is well again: everything works, and nothing was left behind but what
 * was set aside and counted. */
static void check_recovers(VbarDevice device, VbarSim sim) {
    OK(vbar_sim_heal(sim));
    OK(vbar_device_refresh(device));
    VbarStatistics told = statistics(device);
    CHECK(told.bar_count == 0);
    bool set_aside = told.quarantined_bytes != 0 || told.quarantined_page_count != 0;
    healed = true;
    if (!set_aside) small_program(device);
    healed = false;
    uint64_t freed, violation_count;
    OK(vbar_device_trim(device, 0, &freed));
    told = statistics(device);
    CHECK(told.resident_page_count == 0 && told.used_bytes == told.quarantined_bytes);
    OK(vbar_sim_violation_count(sim, &violation_count));
    CHECK(violation_count == 0);
    OK(vbar_device_close(device));
    VbarSimLive live = {.size = sizeof live};
    OK(vbar_sim_live(sim, &live));
    /* Addresses that the driver does not take back are lost; they are logged, not counted. */
    bool lost = set_aside || strcmp(verb, "mem_address_free") == 0;
    if (live.used_bytes > told.quarantined_bytes || (live.reserved_bytes != 0 && !lost)) {
        fprintf(stderr, "%s fails with %d at place %" PRIu64 ": %" PRIu64 " bytes in %" PRIu64
                " mappings, %" PRIu64 " reserved\n", verb, code, place, live.used_bytes,
                live.mapping_count, live.reserved_bytes);
        CHECK(!"something was left behind");
    }
    OK(vbar_sim_close(sim));
}

/* Whether the verb was called so often that the failure came. */
static bool fail_in_the_program(void) {
    VbarDevice device = open_device(4);
    VbarSim sim;
    uint64_t before, after;
    OK(vbar_sim_open(device, &sim));
    OK(vbar_sim_calls(sim, verb, &before));
    OK(vbar_sim_fail(sim, verb, place, 1, code));
    small_program(device);
    OK(vbar_sim_calls(sim, verb, &after));
    check_recovers(device, sim);
    return after - before > place;
}

/* The first calls are those that open the device. */
static void fail_while_opening(const char *name) {
    char driver[256];
    snprintf(driver, sizeof driver, "%s,fail=%s:%" PRIu64 ":%d", test_driver(), name, place + 1,
             code);
    VbarDeviceOptions options = test_options(4);
    options.driver = driver;
    VbarDevice device = {0};
    if (!MAY_FAIL(vbar_device_open(&options, &device))) {
        CHECK(device.id == 0);
        /* The one call that was to fail has failed: the next opening makes it again. */
        return;
    }
    VbarSim sim;
    OK(vbar_sim_open(device, &sim));
    small_program(device);
    check_recovers(device, sim);
}

int main(int count, char **arguments) {
    start();
    /* Minutes under memcheck, and more of them on a machine that has other work. */
    alarm(4 * SECONDS_MAX);
    CHECK(count > 2 && !on_gpu());
    snprintf(path, sizeof path, "%s/failing.safetensors", arguments[1]);
    write_model(path, 3, page_bytes() + 100);
    const char *told = getenv("VBAR_TEST_CODES");
    CHECK(told == NULL || strcmp(told, "in_turn") == 0);
    uint64_t step = told ? COUNT_OF(codes) : 1;
    unsigned failures = 0;
    for (int at = 2; at < count; at++) {
        verb = arguments[at];
        for (size_t which = 0; which < COUNT_OF(codes); which++) {
            code = codes[which];
            /* Each verb's first place has another code than the last one's. */
            uint64_t first = told ? (which + (size_t)at) % COUNT_OF(codes) : 0;
            for (place = first; place < 3; place += step) fail_while_opening(verb);
            for (place = first; place < PLACES_MAX && fail_in_the_program(); place += step) {
                failures++;
            }
        }
    }
    printf("%u failures\n", failures);
    /* A dozen places for each on the average: more calls are made than that. */
    CHECK(failures > 12 / step * (unsigned)(count - 2));
    return 0;
}
