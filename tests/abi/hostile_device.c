/*
 * Hostile calls of what takes no id, and of devices. See hostile.c.
 */
#define _POSIX_C_SOURCE 200809L
#include "hostile.h"

CASE(vbar_abi_version) {
    CHECK(vbar_abi_version() == VBAR_ABI_VERSION);
}

CASE(vbar_version) {
    CHECK(vbar_version()[0] != '\0');
}

CASE(vbar_status_text) {
    static const int32_t numbers[] = {INT32_MIN, -1, 23, 1000, INT32_MAX};
    for (size_t at = 0; at < COUNT_OF(numbers); at++) {
        CHECK(strcmp(vbar_status_text(numbers[at]), "unknown status") == 0);
    }
}

CASE(vbar_last_message) {
    VbarDevice none = {0};
    FAILS(vbar_device_close(none), VBAR_STATUS_STALE_HANDLE, "the id is 0");
    OK(vbar_device_refresh(world.device));
    CHECK(strstr(vbar_last_message(), "the id is 0") != NULL);
}

CASE(vbar_reason_text) {
    CHECK(strcmp(vbar_reason_text(VBAR_REASON_HOST_MAPPED + 1), "unknown") == 0);
    CHECK(strcmp(vbar_reason_text(UINT32_MAX), "unknown") == 0);
}

CASE(vbar_dtype_text) {
    CHECK(strcmp(vbar_dtype_text(VBAR_DTYPE_U64 + 1), "unknown") == 0);
    CHECK(strcmp(vbar_dtype_text(UINT32_MAX), "unknown") == 0);
}

CASE(vbar_log_set_level) {
    FAILS(vbar_log_set_level(VBAR_LOG_LEVEL_TRACE + 1), VBAR_STATUS_INVALID_ARGUMENT, "level 6");
    FAILS(vbar_log_set_level(UINT32_MAX), VBAR_STATUS_INVALID_ARGUMENT, "4294967295");
    OK(vbar_log_set_level(VBAR_LOG_LEVEL_OFF));
}

CASE(vbar_log_set_callback) {
    OK(vbar_log_set_callback(NULL, NULL));
    OK(vbar_log_set_callback(NULL, (void *)UINTPTR_MAX));
}

CASE(vbar_log_poll) {
    char text[64];
    uint32_t level;
    size_t bytes;
    BAD_PLACES(uint32_t, bad, vbar_log_poll(text, sizeof text, bad, &bytes));
    BAD_PLACES(size_t, bad, vbar_log_poll(text, sizeof text, &level, bad));
    FAILS(vbar_log_poll(NULL, 64, &level, &bytes), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_log_poll(NULL, 0, &level, &bytes), VBAR_STATUS_INVALID_ARGUMENT, "room");
    FAILS(vbar_log_poll(text, SIZE_MAX, &level, &bytes), VBAR_STATUS_INVALID_ARGUMENT, "memory");
    text[0] = 'x';
    OK(vbar_log_poll(text, 1, &level, &bytes));
    CHECK(text[0] == '\0' && level == VBAR_LOG_LEVEL_OFF && bytes == 0);
}

#define OPEN_FAILS(options, status, words) \
    do { \
        FAILS(vbar_device_open(&(options), untouched()), status, words); \
        CHECK(is_untouched()); \
    } while (0)

#define DRIVER_FAILS(text, status, words) \
    do { \
        VbarDeviceOptions options_ = test_options(16); \
        options_.driver = text; \
        OPEN_FAILS(options_, status, words); \
    } while (0)

/* No options at all, or no driver among them: the environment says which. */
static void open_by_environment(void) {
    static const char *const drivers[] = {"gpu", "sim:capacity=0", "sim:\xff=1", "cuda:-1"};
    char *before = getenv("VBAR_DRIVER"), kept[256];
    snprintf(kept, sizeof kept, "%s", before ? before : "");
    VbarDeviceOptions options = {.size = sizeof options};
    for (size_t at = 0; at < COUNT_OF(drivers); at++) {
        CHECK(setenv("VBAR_DRIVER", drivers[at], 1) == 0);
        FAILS(vbar_device_open(NULL, untouched()), VBAR_STATUS_INVALID_ARGUMENT, "VBAR_DRIVER");
        FAILS(vbar_device_open(&options, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
              "VBAR_DRIVER");
        CHECK(is_untouched());
    }
    CHECK(unsetenv("VBAR_DRIVER") == 0);
    if (before) CHECK(setenv("VBAR_DRIVER", kept, 1) == 0);
}

CASE(vbar_device_open) {
    open_by_environment();
    VbarDeviceOptions good = test_options(16), options = good;
    VbarDevice device;
    BAD_PLACES(VbarDevice, bad, vbar_device_open(&good, bad));
    FAILS(vbar_device_open(&good, NULL), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    FAILS(vbar_device_open((void *)((char *)&good + 1), &device), VBAR_STATUS_INVALID_ARGUMENT,
          NULL);
    /* It has grown: shorter than it was at first is no size. */
    const size_t first = offsetof(VbarDeviceOptions, host_allowance_bytes);
    const size_t sizes[] = {0, 1, sizeof(size_t), first - 1, 65537, SIZE_MAX};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        FAILS(vbar_device_open(untouched_struct(sizes[at]), &device),
              VBAR_STATUS_INVALID_ARGUMENT, "size field");
        CHECK(is_untouched());
    }
    DRIVER_FAILS("", VBAR_STATUS_INVALID_ARGUMENT, "no device");
    DRIVER_FAILS("sim:colour=red", VBAR_STATUS_INVALID_ARGUMENT, "colour");
    DRIVER_FAILS("sim:capacity=99999999999999999999G", VBAR_STATUS_INVALID_ARGUMENT, "capacity");
    DRIVER_FAILS("\xff\xfe", VBAR_STATUS_INVALID_ARGUMENT, "UTF-8");
    DRIVER_FAILS("cuda:4294967296", VBAR_STATUS_INVALID_ARGUMENT, "no device");
    options.ordinal = UINT32_MAX;
    OPEN_FAILS(options, VBAR_STATUS_DEVICE_NOT_REGISTERED, "4294967295");
    options = good;
    for (size_t at = 0; at < edge_count; at++) {
        /* 0 is the default; 2^63 is a power of two that no page has. */
        if (edges[at] == 0) continue;
        options.page_bytes = edges[at];
        int refused = edges[at] == UINT64_C(1) << 32 ? VBAR_STATUS_ALREADY_OPEN
                                                     : VBAR_STATUS_INVALID_ARGUMENT;
        OPEN_FAILS(options, refused, NULL);
    }
    options = good;
    options.eviction = 2;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "eviction is 2");
    options = good;
    options.context_waits = UINT32_MAX;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "context_waits is 4294967295");
    options = good;
    options.threads = VBAR_THREADS_OFF + 1;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "threads is 3");
    options = good;
    options.poison = 2;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "poison is 2");
    options = good;
    options.scrub = 2;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "scrub is 2");
    options = good;
    options.budget_ppm = 1;
    options.budget_bytes = 1;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "both given");
    options = good;
    options.host_mapped = UINT32_MAX;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "host_mapped is 4294967295");
    options = good;
    options.prefer = VBAR_PREFER_DISK + 1;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "prefer is 3: 0 to 2 are expected");
    options.prefer = UINT32_MAX;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "prefer is 4294967295");
    options = good;
    /* Any allowance is one; the device is open, so that it stays what it was. */
    for (size_t at = 0; at < edge_count; at++) {
        options.host_allowance_bytes = edges[at];
        OK(vbar_device_open(&options, &device));
        OK(vbar_device_close(device));
    }
    /* A program of before knows no allowance, and none is read. */
    options.size = first;
    OK(vbar_device_open(&options, &device));
    OK(vbar_device_close(device));
    options = good;
    options = good;
    options.headroom_bytes = UINT64_MAX - 1;
    OPEN_FAILS(options, VBAR_STATUS_INVALID_ARGUMENT, "headroom");
    options = good;
    options.context = (void *)(uintptr_t)1;
    OPEN_FAILS(options, VBAR_STATUS_ALREADY_OPEN, "context");
}

CASE(vbar_device_close) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_close(bad));
}

CASE(vbar_device_info) {
    BAD_STRUCTS(VbarDeviceInfo, bad, vbar_device_info(world.device, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad,
                vbar_device_info(bad, untouched_struct(sizeof(VbarDeviceInfo))));
}

CASE(vbar_device_set_budget) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_set_budget(bad, world.page));
    for (size_t at = 0; at < edge_count; at++) {
        OK(vbar_device_set_budget(world.device, edges[at]));
        VbarStatistics now = statistics(world.device);
        /* The page that is pinned stays, whatever the budget. */
        CHECK(now.resident_page_count >= 1 && now.budget_bytes % world.page == 0);
    }
    OK(vbar_device_set_budget(world.device, 16 * world.page));
}

CASE(vbar_device_set_headroom) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_set_headroom(bad, 0));
    FAILS(vbar_device_set_headroom(world.device, UINT64_MAX), VBAR_STATUS_INVALID_ARGUMENT,
          "headroom");
    FAILS(vbar_device_set_headroom(world.device, UINT64_C(1) << 63), VBAR_STATUS_INVALID_ARGUMENT,
          "headroom");
    OK(vbar_device_set_headroom(world.device, 0));
}

CASE(vbar_device_budget) {
    uint64_t other;
    BAD_PLACES(uint64_t, bad, vbar_device_budget(world.device, bad, &other));
    BAD_PLACES(uint64_t, bad, vbar_device_budget(world.device, &other, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_budget(bad, untouched(), &other));
}

CASE(vbar_device_refresh) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_refresh(bad));
}

CASE(vbar_device_trim_host_frames) {
    BAD_PLACES(uint64_t, bad, vbar_device_trim_host_frames(world.device, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_trim_host_frames(bad, untouched()));
    uint64_t freed = 9;
    OK(vbar_device_trim_host_frames(world.device, &freed));
    CHECK(freed == 0);
}

CASE(vbar_device_trim_host) {
    BAD_PLACES(uint64_t, bad, vbar_device_trim_host(world.device, 0, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_trim_host(bad, 0, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        uint64_t freed, held = statistics(world.device).locked_bytes;
        OK(vbar_device_trim_host(world.device, edges[at], &freed));
        CHECK(statistics(world.device).locked_bytes + freed == held);
    }
}

CASE(vbar_device_trim) {
    BAD_PLACES(uint64_t, bad, vbar_device_trim(world.device, 0, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_trim(bad, 0, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        uint64_t freed;
        OK(vbar_device_trim(world.device, edges[at], &freed));
        CHECK(freed % world.page == 0);
    }
}

CASE(vbar_device_free_memory) {
    BAD_PLACES(VbarFreed, bad, vbar_device_free_memory(world.device, 0, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_free_memory(bad, 0, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        VbarFreed freed;
        OK(vbar_device_free_memory(world.device, edges[at], &freed));
        CHECK(freed.bytes % world.page == 0 && freed.bytes <= 16 * world.page);
        CHECK(freed.bytes >= edges[at] || freed.shortfall != VBAR_SHORTFALL_NONE);
    }
}

CASE(vbar_device_cancel_waits) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_cancel_waits(bad));
    OK(vbar_device_cancel_waits(world.device));
}

CASE(vbar_device_set_wait_timeout) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_set_wait_timeout(bad, 1));
    for (size_t at = 0; at < edge_count; at++) {
        OK(vbar_device_set_wait_timeout(world.device, edges[at]));
        OK(vbar_device_refresh(world.device));
    }
    OK(vbar_device_set_wait_timeout(world.device, 30000));
}

static int32_t give_up(void *user) {
    ++*(unsigned *)user;
    return INT32_MIN;
}

CASE(vbar_thread_set_wait_check) {
    unsigned asked = 0;
    OK(vbar_thread_set_wait_check(NULL, (void *)UINTPTR_MAX));
    OK(vbar_thread_set_wait_check(give_up, &asked));
    /* Waits for a token that nobody gives back meanwhile. */
    VbarBar bar;
    VbarFault told;
    OK(vbar_bar_create(world.device, world.page, &bar));
    OK(vbar_bar_fault(bar, 0, 1, VBAR_STREAM_NONE, &told));
    FAILS(vbar_bar_destroy_wait(bar), VBAR_STATUS_CANCELLED, NULL);
    CHECK(asked >= 1);
    OK(vbar_token_unpin(told.token, VBAR_STREAM_NONE));
    OK(vbar_thread_set_wait_check(NULL, NULL));
    OK(vbar_thread_set_wait_check(NULL, NULL));
}

CASE(vbar_device_statistics) {
    BAD_PLACES(VbarStatistics, bad, vbar_device_statistics(world.device, bad));
    /* It has grown: a program of before is told what it knows, and not a byte more. */
    const size_t before = offsetof(VbarStatistics, ahead_page_count);
    const size_t between = offsetof(VbarStatistics, locked_ring_bytes);
    const size_t sizes[] = {0, 1, sizeof(size_t), before - 1, 65537, SIZE_MAX};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        VbarStatistics *bad = untouched_struct(sizes[at]);
        FAILS(vbar_device_statistics(world.device, bad), VBAR_STATUS_INVALID_ARGUMENT,
              "size field");
        CHECK(is_untouched());
    }
    VbarStatistics *old = untouched_struct(before);
    OK(vbar_device_statistics(world.device, old));
    CHECK(old->budget_bytes > 0 && old->ahead_page_count == UINT64_C(0xEEEEEEEEEEEEEEEE));
    old = untouched_struct(between);
    OK(vbar_device_statistics(world.device, old));
    CHECK(old->ahead_page_count != UINT64_C(0xEEEEEEEEEEEEEEEE));
    CHECK(old->locked_ring_bytes == UINT64_C(0xEEEEEEEEEEEEEEEE));
    EACH_BAD_ID(DEVICE, VbarDevice, bad,
                vbar_device_statistics(bad, untouched_struct(sizeof(VbarStatistics))));
}

CASE(vbar_stream_retire) {
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_stream_retire(bad, 0));
    FAILS(vbar_stream_retire(world.device, VBAR_STREAM_NONE), VBAR_STATUS_DRIVER, "cuStream");
    /* CUDA reads through the handle of a stream: one that is none ends the process there. */
    if (on_gpu()) return;
    FAILS(vbar_stream_retire(world.device, 0xdead), VBAR_STATUS_DRIVER, "cuStream");
    FAILS(vbar_stream_retire(world.device, SIZE_MAX - 1), VBAR_STATUS_DRIVER, "cuStream");
}

const struct Case status_cases[] = {
    ENTRY(vbar_abi_version),   ENTRY(vbar_version),          ENTRY(vbar_status_text),
    ENTRY(vbar_last_message),  ENTRY(vbar_reason_text),      ENTRY(vbar_dtype_text),
    ENTRY(vbar_log_set_level), ENTRY(vbar_log_set_callback), ENTRY(vbar_log_poll),
    {0},
};

const struct Case device_cases[] = {
    ENTRY(vbar_device_open),         ENTRY(vbar_device_close),
    ENTRY(vbar_device_info),         ENTRY(vbar_device_set_budget),
    ENTRY(vbar_device_set_headroom), ENTRY(vbar_device_budget),
    ENTRY(vbar_device_refresh),      ENTRY(vbar_device_trim),
    ENTRY(vbar_device_trim_host),    ENTRY(vbar_device_trim_host_frames),
    ENTRY(vbar_device_free_memory),  ENTRY(vbar_device_cancel_waits),
    ENTRY(vbar_device_statistics),   ENTRY(vbar_stream_retire),
    ENTRY(vbar_device_set_wait_timeout), ENTRY(vbar_thread_set_wait_check),
    {0},
};
