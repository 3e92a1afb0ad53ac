/*
 * Hostile calls of VBARs, tokens and allocations. See hostile.c.
 */
#include "hostile.h"

CASE(vbar_bar_create) {
    BAD_PLACES(VbarBar, bad, vbar_bar_create(world.device, world.page, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_bar_create(bad, world.page, untouched()));
    static const uint64_t sizes[] = {0, UINT64_MAX, UINT64_MAX - 1, UINT64_C(1) << 63};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        FAILS(vbar_bar_create(world.device, sizes[at], untouched()),
              VBAR_STATUS_INVALID_ARGUMENT, "creating a VBAR");
        CHECK(is_untouched());
    }
}

CASE(vbar_bar_destroy) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_destroy(bad));
    FAILS(vbar_bar_destroy(world.model_bar), VBAR_STATUS_INVALID_ARGUMENT, "close the model");
}

CASE(vbar_bar_destroy_wait) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_destroy_wait(bad));
    FAILS(vbar_bar_destroy_wait(world.model_bar), VBAR_STATUS_INVALID_ARGUMENT, "the model");
}

CASE(vbar_bar_info) {
    BAD_STRUCTS(VbarBarInfo, bad, vbar_bar_info(world.bar, bad));
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_info(bad, untouched_struct(sizeof(VbarBarInfo))));
}

static VbarBar fresh_bar(void) {
    VbarBar bar;
    OK(vbar_bar_create(world.device, 4 * world.page, &bar));
    return bar;
}

/* A binding that is refused leaves the VBAR as it was: not bound. */
#define BIND_FAILS(source, segment, status, words) \
    do { \
        VbarBar bar_ = fresh_bar(); \
        FAILS(vbar_bar_bind(bar_, &(source), 1, &(segment), 1), status, words); \
        VbarAllocation allocation_; \
        OK(vbar_bar_allocate(bar_, world.page, &allocation_)); \
        OK(vbar_bar_destroy_wait(bar_)); \
    } while (0)

static void bind_arrays_fail(void) {
    VbarBar bar = fresh_bar();
    VbarBindSource source = {.path = world.raw_path};
    VbarBindSegment segment = {.bytes = 512};
    FAILS(vbar_bar_bind(bar, NULL, 1, &segment, 1), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_bar_bind(bar, &source, 1, NULL, 1), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_bar_bind(bar, unaligned(), 1, &segment, 1), VBAR_STATUS_INVALID_ARGUMENT,
          "not aligned");
    FAILS(vbar_bar_bind(bar, &source, 1, unaligned(), 1), VBAR_STATUS_INVALID_ARGUMENT,
          "not aligned");
    static const size_t counts[] = {SIZE_MAX, SIZE_MAX / 16, SIZE_MAX / 24};
    for (size_t at = 0; at < COUNT_OF(counts); at++) {
        FAILS(vbar_bar_bind(bar, &source, counts[at], &segment, 1), VBAR_STATUS_INVALID_ARGUMENT,
              "larger than memory");
        FAILS(vbar_bar_bind(bar, &source, 1, &segment, counts[at]), VBAR_STATUS_INVALID_ARGUMENT,
              "larger than memory");
    }
    VbarBindSegment twice[] = {{.bytes = 512}, {.bytes = 512, .bar_offset = 511}};
    FAILS(vbar_bar_bind(bar, &source, 1, twice, 2), VBAR_STATUS_INVALID_ARGUMENT, "overlaps");
    OK(vbar_bar_destroy_wait(bar));
}

static void count_release(void *context) { ++*(int *)context; }

/* Memory that is refused is given back at once, whatever was wrong. */
static void memory_is_refused(void) {
    static unsigned char bytes[1024];
    int released = 0, expected = 0;
    VbarBindSegment segment = {.bytes = 512}, leaving = {.bytes = 1024, .source_offset = 1};
    const VbarBindSource good = {.memory = bytes, .memory_bytes = sizeof bytes,
                                 .release = count_release, .context = &released};
#define MEMORY_FAILS(field, words) \
    do { \
        VbarBindSource bad_ = good; \
        bad_.field; \
        BIND_FAILS(bad_, segment, VBAR_STATUS_INVALID_ARGUMENT, words); \
        CHECK(released == ++expected); \
    } while (0)
    MEMORY_FAILS(memory = NULL, "NULL");
    MEMORY_FAILS(memory_bytes = 0, "no bytes");
    MEMORY_FAILS(memory_bytes = UINT64_MAX, "address space");
    MEMORY_FAILS(memory = (void *)(UINTPTR_MAX - 9), "address space");
    MEMORY_FAILS(host_lock = 2, "host_lock is 2");
    MEMORY_FAILS(path = world.raw_path, "a path and memory");
    if (!on_gpu()) MEMORY_FAILS(host_lock = VBAR_HOST_LOCK_REQUIRED, "not page-locked from byte 0");
    VbarBindSource file = {.path = world.raw_path, .release = count_release, .context = &released};
    BIND_FAILS(file, segment, VBAR_STATUS_INVALID_ARGUMENT, "no release");
    CHECK(released == ++expected);
    BIND_FAILS(good, leaving, VBAR_STATUS_INVALID_ARGUMENT, "memory 0");
    CHECK(released == ++expected);
    /* All of several, also those behind the one that is wrong; and for an id that is stale. */
    const VbarBindSource several[] = {good, {.path = "/nonexistent"}, good};
    VbarBar bar = fresh_bar();
    FAILS(vbar_bar_bind(bar, several, 3, &segment, 1), VBAR_STATUS_IO, "No such file");
    CHECK(released == (expected += 2));
    OK(vbar_bar_destroy_wait(bar));
    FAILS(vbar_bar_bind(bar, &good, 1, &segment, 1), VBAR_STATUS_STALE_HANDLE, NULL);
    CHECK(released == ++expected);
    /* Sources that cannot be read have no owner. */
    FAILS(vbar_bar_bind(world.bar, unaligned(), 1, &segment, 1), VBAR_STATUS_INVALID_ARGUMENT,
          NULL);
    CHECK(released == expected);
}

CASE(vbar_flag_raise) {
    vbar_flag_raise(NULL);
    vbar_flag_raise((void *)(uintptr_t)1);
    uint32_t flags[] = {0, 0, 7};
    vbar_flag_raise(&flags[1]);
    CHECK(flags[0] == 0 && flags[1] == 1 && flags[2] == 7);
}

CASE(vbar_bar_bind) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_bind(bad, NULL, 0, NULL, 0));
    bind_arrays_fail();
    VbarBindSource good = {.path = world.raw_path}, source = good;
    VbarBindSegment segment = {.bytes = 512};
    source.path = "";
    BIND_FAILS(source, segment, VBAR_STATUS_INVALID_ARGUMENT, "empty");
    source.path = "/nonexistent/\xff";
    BIND_FAILS(source, segment, VBAR_STATUS_IO, "No such file");
    source.path = "/";
    BIND_FAILS(source, segment, VBAR_STATUS_FORMAT, "not a regular file");
    source = (VbarBindSource){.descriptor = -1};
    BIND_FAILS(source, segment, VBAR_STATUS_INVALID_ARGUMENT, "descriptor -1");
    source.descriptor = INT32_MIN;
    BIND_FAILS(source, segment, VBAR_STATUS_INVALID_ARGUMENT, "descriptor");
    source.descriptor = INT32_MAX;
    BIND_FAILS(source, segment, VBAR_STATUS_IO, "descriptor 2147483647");
    source = good;
    source.host_lock = 1;
    BIND_FAILS(source, segment, VBAR_STATUS_INVALID_ARGUMENT, "host_lock");
    memory_is_refused();
    segment.encoding = 1;
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, "encoding 1");
    segment = (VbarBindSegment){.bytes = 512, .source = 1};
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    segment.source = UINT32_MAX;
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    segment = (VbarBindSegment){.bytes = UINT64_MAX, .bar_offset = 1};
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    segment = (VbarBindSegment){.bytes = 512, .source_offset = UINT64_MAX - 511};
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    segment = (VbarBindSegment){.bytes = 512, .bar_offset = 4 * world.page - 511};
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    /* The file has three pages. */
    segment = (VbarBindSegment){.bytes = 512, .source_offset = 3 * world.page - 511};
    BIND_FAILS(good, segment, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    VbarBindSegment bound = {.bytes = 512};
    FAILS(vbar_bar_bind(world.model_bar, &good, 1, &bound, 1), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    FAILS(vbar_bar_bind(world.bar, &good, 1, &bound, 1), VBAR_STATUS_INVALID_ARGUMENT, NULL);
}

CASE(vbar_bar_prioritise) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_prioritise(bad));
}

CASE(vbar_bar_deprioritise) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_deprioritise(bad));
}

CASE(vbar_bar_set_class) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_set_class(bad, 1));
    static const int32_t classes[] = {INT32_MIN, INT32_MAX, 0};
    for (size_t at = 0; at < COUNT_OF(classes); at++) {
        OK(vbar_bar_set_class(world.bar, classes[at]));
        VbarBarInfo info = {.size = sizeof info};
        OK(vbar_bar_info(world.bar, &info));
        CHECK(info.priority_class == classes[at]);
    }
}

CASE(vbar_bar_set_floor) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_set_floor(bad, 1));
    OK(vbar_bar_set_floor(world.bar, UINT32_MAX));
    VbarFreed freed;
    OK(vbar_bar_free_memory(world.bar, UINT64_MAX, &freed));
    CHECK(freed.bytes == 0 && freed.shortfall == VBAR_SHORTFALL_AT_FLOOR);
    OK(vbar_bar_set_floor(world.bar, 0));
}

CASE(vbar_bar_set_watermark) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_set_watermark(bad, 1));
    OK(vbar_bar_set_watermark(world.bar, 0));
    OK(vbar_bar_set_watermark(world.bar, UINT32_MAX));
    VbarBarInfo info = {.size = sizeof info};
    OK(vbar_bar_info(world.bar, &info));
    CHECK(info.watermark <= info.page_count);
    OK(vbar_bar_prioritise(world.bar));
    FAILS(vbar_bar_set_watermark(world.model_bar, 1), VBAR_STATUS_INVALID_ARGUMENT,
          "no watermark");
}

CASE(vbar_bar_free_memory) {
    BAD_PLACES(VbarFreed, bad, vbar_bar_free_memory(world.bar, 0, bad));
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_free_memory(bad, 0, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        VbarFreed freed;
        OK(vbar_bar_free_memory(world.bar, edges[at], &freed));
        CHECK(freed.bytes % world.page == 0 && freed.bytes <= 8 * world.page);
    }
    OK(vbar_bar_prioritise(world.bar));
}

CASE(vbar_bar_end_of_run) {
    BAD_PLACES(uint32_t, bad, vbar_bar_end_of_run(world.bar, 0, VBAR_HELD_PINS_KEEP, bad));
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_end_of_run(bad, 0, 0, untouched()));
    FAILS(vbar_bar_end_of_run(world.bar, 0, 2, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "held is 2");
    FAILS(vbar_bar_end_of_run(world.bar, 0, UINT32_MAX, untouched()),
          VBAR_STATUS_INVALID_ARGUMENT, "held is 4294967295");
    CHECK(is_untouched());
    if (on_gpu()) return;
    FAILS(vbar_bar_end_of_run(world.bar, 0xdead, 0, untouched()), VBAR_STATUS_DRIVER, "cuStream");
    CHECK(is_untouched());
}

CASE(vbar_bar_residency) {
    VbarPage pages[8];
    FAILS(vbar_bar_residency(world.bar, 0, 8, NULL), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_bar_residency(world.bar, 0, 8, unaligned()), VBAR_STATUS_INVALID_ARGUMENT,
          "not aligned");
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_residency(bad, 0, 8, untouched()));
    static const size_t counts[] = {9, UINT32_MAX, SIZE_MAX / 16, SIZE_MAX};
    for (size_t at = 0; at < COUNT_OF(counts); at++) {
        FAILS(vbar_bar_residency(world.bar, 0, counts[at], pages), VBAR_STATUS_INVALID_ARGUMENT,
              NULL);
    }
    FAILS(vbar_bar_residency(world.bar, 1, 8, pages), VBAR_STATUS_INVALID_ARGUMENT, "8 pages");
    FAILS(vbar_bar_residency(world.bar, UINT32_MAX, 1, pages), VBAR_STATUS_INVALID_ARGUMENT,
          "4294967295");
    OK(vbar_bar_residency(world.bar, 8, 0, NULL));
}

CASE(vbar_bar_fault) {
    BAD_PLACES(VbarFault, bad, vbar_bar_fault(world.bar, 0, 1, 0, bad));
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_fault(bad, 0, 1, 0, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        uint64_t edge = edges[at];
        if (edge > 8 * world.page) {
            FAILS(vbar_bar_fault(world.bar, 0, edge, 0, untouched()),
                  VBAR_STATUS_INVALID_ARGUMENT, NULL);
            FAILS(vbar_bar_fault(world.bar, edge, 1, 0, untouched()),
                  VBAR_STATUS_INVALID_ARGUMENT, NULL);
        }
        FAILS(vbar_bar_fault(world.bar, UINT64_MAX - edge, UINT64_MAX, 0, untouched()),
              VBAR_STATUS_INVALID_ARGUMENT, NULL);
        CHECK(is_untouched());
    }
    FAILS(vbar_bar_fault(world.bar, 8 * world.page, 1, 0, untouched()),
          VBAR_STATUS_INVALID_ARGUMENT, NULL);
    if (on_gpu()) return;
    FAILS(vbar_bar_fault(world.bar, 0, 1, 0xdead, untouched()), VBAR_STATUS_DRIVER, "cuStream");
    FAILS(vbar_bar_fault(world.bar, 6 * world.page, 1, 0xdead, untouched()), VBAR_STATUS_DRIVER,
          "cuStream");
    CHECK(is_untouched());
}

CASE(vbar_device_fault_many) {
    VbarRange good = {.bar = world.bar, .bytes = 1};
    VbarFault faults[2];
    FAILS(vbar_device_fault_many(world.device, NULL, 1, 0, faults), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    FAILS(vbar_device_fault_many(world.device, unaligned(), 1, 0, faults),
          VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    FAILS(vbar_device_fault_many(world.device, &good, 1, 0, NULL), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    FAILS(vbar_device_fault_many(world.device, &good, 1, 0, unaligned()),
          VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    FAILS(vbar_device_fault_many(world.device, &good, SIZE_MAX, 0, faults),
          VBAR_STATUS_INVALID_ARGUMENT, "larger than memory");
    EACH_BAD_ID(DEVICE, VbarDevice, bad,
                vbar_device_fault_many(bad, &good, 1, 0, untouched()));
    EACH_BAD_ID(BAR, VbarBar, bad,
                vbar_device_fault_many(world.device,
                                       (VbarRange[]){good, {.bar = bad, .bytes = 1}}, 2, 0,
                                       untouched()));
    VbarRange ranges[] = {good, {.bar = world.bar, .bar_offset = UINT64_MAX, .bytes = 2}};
    FAILS(vbar_device_fault_many(world.device, ranges, 2, 0, untouched()),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    ranges[1] = (VbarRange){.bar = world.bar, .bar_offset = 8 * world.page, .bytes = 1};
    FAILS(vbar_device_fault_many(world.device, ranges, 2, 0, untouched()),
          VBAR_STATUS_INVALID_ARGUMENT, NULL);
    CHECK(is_untouched());
    OK(vbar_device_fault_many(world.device, NULL, 0, 0, NULL));
}

CASE(vbar_bar_prefetch) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_prefetch(bad, 0, 1));
    FAILS(vbar_bar_prefetch(world.bar, 0, 1), VBAR_STATUS_INVALID_ARGUMENT, "bound");
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] < UINT32_MAX) continue;
        FAILS(vbar_bar_prefetch(world.model_bar, edges[at], 2), VBAR_STATUS_INVALID_ARGUMENT,
              NULL);
        FAILS(vbar_bar_prefetch(world.model_bar, 1, edges[at]), VBAR_STATUS_INVALID_ARGUMENT,
              NULL);
    }
    OK(vbar_bar_prefetch(world.model_bar, 0, 0));
    OK(vbar_bar_prefetch(world.model_bar, 0, 1));
}

CASE(vbar_bar_prepare_save) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_prepare_save(bad, 0, 1));
    FAILS(vbar_bar_prepare_save(world.bar, 0, 0), VBAR_STATUS_INVALID_ARGUMENT, "no bytes");
    FAILS(vbar_bar_prepare_save(world.model_bar, 0, 1), VBAR_STATUS_INVALID_ARGUMENT, "bound");
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] < UINT32_MAX) continue;
        FAILS(vbar_bar_prepare_save(world.bar, edges[at], 2), VBAR_STATUS_INVALID_ARGUMENT, NULL);
        FAILS(vbar_bar_prepare_save(world.bar, 1, edges[at]), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    }
    OK(vbar_bar_prepare_save(world.bar, 8, 16));
    OK(vbar_bar_prepare_save(world.bar, 8, 16));
    FAILS(vbar_bar_prepare_save(world.bar, 0, 9), VBAR_STATUS_INVALID_ARGUMENT, "overlaps");
    OK(vbar_bar_drop_save(world.bar, 8, 16));
}

CASE(vbar_bar_save) {
    VbarFault told;
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_save(bad, 0, 16, 0));
    FAILS(vbar_bar_save(world.bar, 0, 16, 0), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    FAILS(vbar_bar_save(world.bar, UINT64_MAX, 2, 0), VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    OK(vbar_bar_prepare_save(world.bar, 0, 16));
    OK(vbar_bar_fault(world.bar, 0, 16, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    FAILS(vbar_bar_save(world.bar, 0, 16, VBAR_STREAM_NONE), VBAR_STATUS_INVALID_ARGUMENT,
          "stream");
    OK(vbar_bar_prepare_save(world.bar, 0, 16));
    OK(vbar_bar_save(world.bar, 0, 16, 0));
    FAILS(vbar_bar_save(world.bar, 0, 16, 0), VBAR_STATUS_INVALID_ARGUMENT, "prepared");
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_bar_drop_save(world.bar, 0, 16));
}

CASE(vbar_bar_drop_save) {
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_drop_save(bad, 0, 1));
    FAILS(vbar_bar_drop_save(world.bar, UINT64_MAX, 2), VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    OK(vbar_bar_drop_save(world.bar, 0, 0));
    OK(vbar_bar_drop_save(world.bar, 0, UINT32_MAX));
}

#define HINT_FAILS(ranges, counts, step_count, words) \
    FAILS(vbar_device_schedule_hint(world.device, ranges, counts, step_count), \
          VBAR_STATUS_INVALID_ARGUMENT, words)

CASE(vbar_device_schedule_hint) {
    VbarRange good = {.bar = world.model_bar, .bytes = 1};
    VbarRange pair[] = {good, good};
    const size_t one = 1, two = 2, ones[] = {1, 1};
    HINT_FAILS(NULL, &one, 1, "NULL");
    HINT_FAILS(&good, NULL, 1, "NULL");
    HINT_FAILS(unaligned(), &one, 1, "not aligned");
    HINT_FAILS(&good, unaligned(), 1, "not aligned");
    static const size_t many[] = {SIZE_MAX, SIZE_MAX / 24, SIZE_MAX / 48 + 1};
    static const size_t steps[] = {SIZE_MAX, SIZE_MAX / 8, SIZE_MAX / 16 + 1};
    for (size_t at = 0; at < COUNT_OF(many); at++) {
        HINT_FAILS(&good, &one, steps[at], "are remembered");
        HINT_FAILS(&good, &many[at], 1, "are remembered");
    }
    HINT_FAILS(&good, &one, (1U << 18) + 1, "are remembered");
    const size_t past[] = {SIZE_MAX, 1}, none[] = {1, 0};
    HINT_FAILS(&good, past, 2, "larger than memory");
    HINT_FAILS(&good, none, 2, "step 1 has no ranges");
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_schedule_hint(bad, &good, &one, 1));
    EACH_BAD_ID(BAR, VbarBar, bad,
                vbar_device_schedule_hint(world.device,
                                          (VbarRange[]){good, {.bar = bad, .bytes = 1}}, ones, 2));
    pair[1] = (VbarRange){.bar = world.model_bar, .bar_offset = UINT64_MAX, .bytes = 2};
    HINT_FAILS(pair, &two, 1, "2^64");
    pair[1] = (VbarRange){.bar = world.model_bar, .bytes = UINT64_MAX};
    HINT_FAILS(pair, ones, 2, NULL);
    pair[1] = (VbarRange){.bar = world.bar, .bytes = 1};
    HINT_FAILS(pair, ones, 2, "bound");
    CHECK(is_untouched());
    OK(vbar_device_schedule_hint(world.device, NULL, NULL, 0));
    pair[1] = good;
    OK(vbar_device_schedule_hint(world.device, pair, ones, 2));
    OK(vbar_device_schedule_hint(world.device, pair, &two, 1));
}

CASE(vbar_token_unpin) {
    EACH_BAD_ID(TOKEN, VbarToken, bad, vbar_token_unpin(bad, 0));
    EACH_BAD_ID(TOKEN, VbarToken, bad, vbar_token_unpin(bad, VBAR_STREAM_NONE));
}

CASE(vbar_tokens_unpin) {
    VbarToken tokens[3] = {{0}};
    FAILS(vbar_tokens_unpin(NULL, 1, 0), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_tokens_unpin(unaligned(), 1, 0), VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    FAILS(vbar_tokens_unpin(tokens, SIZE_MAX, 0), VBAR_STATUS_INVALID_ARGUMENT,
          "larger than memory");
    EACH_BAD_ID(TOKEN, VbarToken, bad, vbar_tokens_unpin(&bad, 1, 0));
    /* All good ones are given back, whatever stands beside them; one that is named twice is once. */
    for (size_t at = 0; at < bad_id_count(); at++) {
        VbarFault fault;
        OK(vbar_bar_fault(world.bar, 0, 1, VBAR_STREAM_NONE, &fault));
        tokens[0] = (VbarToken){bad_id(TOKEN, at)};
        tokens[1] = tokens[2] = fault.token;
        FAILS(vbar_tokens_unpin(tokens, 3, VBAR_STREAM_NONE), VBAR_STATUS_STALE_TOKEN,
              tokens[0].id == 0 ? "0" : "0x");
        FAILS(vbar_token_unpin(fault.token, VBAR_STREAM_NONE), VBAR_STATUS_STALE_TOKEN, "0x");
    }
    OK(vbar_tokens_unpin(NULL, 0, 0));
}

CASE(vbar_token_also_used_on) {
    EACH_BAD_ID(TOKEN, VbarToken, bad, vbar_token_also_used_on(bad, 0));
    if (on_gpu()) return;
    FAILS(vbar_token_also_used_on(world.token, 0xdead), VBAR_STATUS_DRIVER, "cuStream");
    FAILS(vbar_token_also_used_on(world.token, VBAR_STREAM_NONE), VBAR_STATUS_UNSUPPORTED,
          "no stream was named");
}

CASE(vbar_token_commit) {
    EACH_BAD_ID(TOKEN, VbarToken, bad, vbar_token_commit(bad, 0));
    FAILS(vbar_token_commit(world.token, 0), VBAR_STATUS_INVALID_ARGUMENT, "refill");
}

CASE(vbar_bar_allocate) {
    BAD_PLACES(VbarAllocation, bad, vbar_bar_allocate(world.bar, 1, bad));
    EACH_BAD_ID(BAR, VbarBar, bad, vbar_bar_allocate(bad, 1, untouched()));
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] <= 8 * world.page) continue;
        FAILS(vbar_bar_allocate(world.bar, edges[at], untouched()), VBAR_STATUS_NO_ADDRESSES,
              "do not fit");
        CHECK(is_untouched());
    }
    FAILS(vbar_bar_allocate(world.model_bar, 1, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "bound");
}

CASE(vbar_allocation_place) {
    uint64_t other;
    BAD_PLACES(uint64_t, bad, vbar_allocation_place(world.allocation, bad, &other, &other));
    BAD_PLACES(uint64_t, bad, vbar_allocation_place(world.allocation, &other, bad, &other));
    BAD_PLACES(uint64_t, bad, vbar_allocation_place(world.allocation, &other, &other, bad));
    EACH_BAD_ID(ALLOCATION, VbarAllocation, bad,
                vbar_allocation_place(bad, untouched(), &other, &other));
}

CASE(vbar_allocation_fault) {
    BAD_PLACES(VbarFault, bad, vbar_allocation_fault(world.allocation, 0, bad));
    EACH_BAD_ID(ALLOCATION, VbarAllocation, bad, vbar_allocation_fault(bad, 0, untouched()));
    if (on_gpu()) return;
    FAILS(vbar_allocation_fault(world.allocation, 0xdead, untouched()), VBAR_STATUS_DRIVER,
          "cuStream");
    CHECK(is_untouched());
}

CASE(vbar_allocation_fault_wait) {
    BAD_PLACES(VbarFault, bad, vbar_allocation_fault_wait(world.allocation, 0, bad));
    EACH_BAD_ID(ALLOCATION, VbarAllocation, bad,
                vbar_allocation_fault_wait(bad, 0, untouched()));
}

CASE(vbar_allocation_invalidate) {
    EACH_BAD_ID(ALLOCATION, VbarAllocation, bad, vbar_allocation_invalidate(bad));
}

const struct Case bar_cases[] = {
    ENTRY(vbar_bar_create),        ENTRY(vbar_bar_destroy),     ENTRY(vbar_bar_destroy_wait),
    ENTRY(vbar_bar_info),          ENTRY(vbar_bar_bind),        ENTRY(vbar_bar_prioritise),
    ENTRY(vbar_bar_deprioritise),  ENTRY(vbar_bar_set_class),   ENTRY(vbar_bar_set_floor),
    ENTRY(vbar_bar_set_watermark), ENTRY(vbar_bar_free_memory), ENTRY(vbar_bar_end_of_run),
    ENTRY(vbar_bar_residency),     ENTRY(vbar_bar_fault),       ENTRY(vbar_device_fault_many),
    ENTRY(vbar_bar_prefetch),      ENTRY(vbar_device_schedule_hint),
    ENTRY(vbar_flag_raise),        ENTRY(vbar_bar_prepare_save), ENTRY(vbar_bar_save),
    ENTRY(vbar_bar_drop_save),
    {0},
};

const struct Case token_cases[] = {
    ENTRY(vbar_token_unpin),        ENTRY(vbar_tokens_unpin),
    ENTRY(vbar_token_also_used_on),
    ENTRY(vbar_token_commit),       ENTRY(vbar_bar_allocate),
    ENTRY(vbar_allocation_place),   ENTRY(vbar_allocation_fault),
    ENTRY(vbar_allocation_fault_wait), ENTRY(vbar_allocation_invalidate),
    {0},
};
