/*
 * Hostile calls of what PyTorch calls. PyTorch is not loaded here, so that nothing is thrown: a
 * failure is NULL, or nothing, and a message. See hostile.c.
 */
#include "hostile.h"

static const int32_t no_devices[] = {-1, INT32_MIN, 1, 127, 128, INT32_MAX};

/* A device of PyTorch's own, simulated also where the others are on a GPU. */
static void configure(void) {
    VbarDeviceOptions options = test_options(16);
    options.driver = "sim:capacity=64M,granularity=64K,address_space=64G,jitter=0,bandwidth=1T";
    options.page_bytes = 64 << 10;
    OK(vbar_torch_configure(&options));
}

static VbarTorchStatistics numbers(void) {
    configure();
    VbarTorchStatistics told = {.size = sizeof told};
    OK(vbar_torch_statistics(0, &told));
    return told;
}

static bool is_as_before(VbarTorchStatistics before) {
    VbarTorchStatistics after = numbers();
    return after.allocated_bytes.all.current == before.allocated_bytes.all.current &&
           after.reserved_bytes.all.current >= before.allocated_bytes.all.current;
}

/* The call said something, and it has the words. */
static bool said(const char *words) {
    return strstr(vbar_last_message(), words) != NULL;
}

/* The message of a failure that is another's. */
static void forget(void) {
    FAILS(vbar_device_refresh((VbarDevice){0}), VBAR_STATUS_STALE_HANDLE, "0");
}

CASE(vbar_torch_malloc) {
    VbarTorchStatistics before = numbers();
    CHECK(vbar_torch_malloc(0, 0, 0) == NULL);
    CHECK(vbar_torch_malloc(0, -1, 0xdead) == NULL);
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, (size_t)1 << 60,
                                   (size_t)1 << 40};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        forget();
        CHECK(vbar_torch_malloc(sizes[at], 0, 0) == NULL);
        CHECK(said("out of memory. Tried to allocate"));
    }
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        forget();
        CHECK(vbar_torch_malloc(512, no_devices[at], 0) == NULL);
        CHECK(!said("id is 0"));
    }
    CHECK(is_as_before(before));
    CHECK(numbers().oom_count >= before.oom_count + COUNT_OF(sizes));
}

CASE(vbar_torch_free) {
    VbarTorchStatistics before = numbers();
    vbar_torch_free(NULL, 0, 0, 0);
    vbar_torch_free(NULL, SIZE_MAX, -1, VBAR_STREAM_NONE);
    CHECK(numbers().unknown_free_count == before.unknown_free_count);
    void *place = vbar_torch_malloc(4096, 0, 0);
    CHECK(place != NULL);
    void *unknown[] = {(void *)1, (void *)0xdead, (char *)place + 512, (void *)UINTPTR_MAX,
                       untouched()};
    for (size_t at = 0; at < COUNT_OF(unknown); at++) {
        vbar_torch_free(unknown[at], 4096, 0, 0);
        CHECK(numbers().unknown_free_count == before.unknown_free_count + at + 1);
    }
    /* Of the arguments only the address is believed. */
    vbar_torch_free(place, SIZE_MAX, INT32_MIN, 0xdead);
    CHECK(is_as_before(before));
    vbar_torch_free(place, 4096, 0, 0);
    CHECK(numbers().unknown_free_count == before.unknown_free_count + COUNT_OF(unknown) + 1);
    CHECK(is_untouched());
}

CASE(vbar_torch_init) {
    vbar_torch_init(0);
    vbar_torch_init(INT32_MIN);
    vbar_torch_init(INT32_MAX);
}

CASE(vbar_torch_reset) {
    VbarTorchStatistics before = numbers();
    void *place = vbar_torch_malloc(4096, 0, 0);
    for (int turn = 0; turn < 3; turn++) vbar_torch_reset();
    CHECK(numbers().allocated_bytes.all.current == before.allocated_bytes.all.current + 4096);
    vbar_torch_free(place, 4096, 0, 0);
}

CASE(vbar_torch_memory_fraction) {
    numbers();
    static const double wrong[] = {-1.0, 1.0000001, 1e300, -1e300};
    for (size_t at = 0; at < COUNT_OF(wrong); at++) {
        vbar_torch_memory_fraction(wrong[at], 0);
        CHECK(said("0 to 1 is expected"));
    }
    double zero = 0;
    vbar_torch_memory_fraction(zero / zero, 0);
    CHECK(said("0 to 1 is expected"));
    CHECK(numbers().memory_fraction == 1.0);
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        forget();
        vbar_torch_memory_fraction(0.5, no_devices[at]);
        CHECK(!said("id is 0"));
    }
    CHECK(numbers().memory_fraction == 1.0);
}

CASE(vbar_torch_base_alloc) {
    numbers();
    char *place = vbar_torch_malloc(4096, 0, 0);
    size_t size = 7;
    CHECK(vbar_torch_base_alloc(NULL, &size) == NULL && size == 7);
    CHECK(vbar_torch_base_alloc((void *)0xdead, &size) == (void *)0xdead && size == 7);
    CHECK(vbar_torch_base_alloc(place + 100, NULL) == place);
    CHECK(vbar_torch_base_alloc(place + 100, unaligned()) == place);
    CHECK(is_untouched());
    CHECK(vbar_torch_base_alloc(place + 4095, &size) == place && size == 4096);
    vbar_torch_free(place, 4096, 0, 0);
    CHECK(vbar_torch_base_alloc(place, &size) == place);
}

CASE(vbar_torch_record_stream) {
    VbarTorchStatistics before = numbers();
    vbar_torch_record_stream(NULL, 0xdead);
    vbar_torch_record_stream((void *)0xdead, 0xdead);
    vbar_torch_record_stream(untouched(), 0);
    CHECK(is_untouched());
    CHECK(is_as_before(before));
}

CASE(vbar_torch_begin_pool) {
    numbers();
    const VbarTorchPool pools[] = {{0, 0}, {0, 1}, {UINT64_MAX, UINT64_MAX}};
    /* A std::function that is empty; its other words are anything. */
    void *empty[4] = {(void *)0xdead, (void *)0xdead, NULL, (void *)0xdead};
    for (size_t at = 0; at < COUNT_OF(pools); at++) {
        vbar_torch_begin_pool(0, pools[at], NULL);
        CHECK(said("without a filter"));
        vbar_torch_begin_pool(0, pools[at], unaligned());
        CHECK(said("without a filter") && is_untouched());
        vbar_torch_begin_pool(0, pools[at], empty);
        CHECK(said("without a filter"));
    }
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        forget();
        vbar_torch_begin_pool(no_devices[at], pools[0], empty);
        CHECK(!said("id is 0"));
    }
}

static void each_unknown_pool(void (*call)(int32_t device, VbarTorchPool pool)) {
    static const VbarTorchPool pools[] = {{0, 0}, {0, 1}, {UINT64_MAX, UINT64_MAX}};
    VbarTorchStatistics before = numbers();
    for (size_t at = 0; at < COUNT_OF(pools); at++) {
        forget();
        call(0, pools[at]);
        CHECK(said("pool"));
        for (size_t device = 0; device < COUNT_OF(no_devices); device++) {
            forget();
            call(no_devices[device], pools[at]);
            CHECK(!said("id is 0"));
        }
    }
    CHECK(is_as_before(before));
}

CASE(vbar_torch_end_pool) {
    each_unknown_pool(vbar_torch_end_pool);
}

CASE(vbar_torch_release_pool) {
    each_unknown_pool(vbar_torch_release_pool);
}

CASE(vbar_torch_segment_malloc) {
    VbarTorchStatistics before = numbers();
    static const size_t sizes[] = {0, SIZE_MAX, SIZE_MAX - 511, (size_t)1 << 60, (size_t)1 << 40};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        forget();
        CHECK(vbar_torch_segment_malloc(sizes[at], 0, 0) == NULL);
        CHECK(said("could not be had"));
    }
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        forget();
        CHECK(vbar_torch_segment_malloc(2 << 20, no_devices[at], 0) == NULL);
        CHECK(!said("id is 0"));
    }
    CHECK(is_as_before(before));
}

CASE(vbar_torch_segment_free) {
    VbarTorchStatistics before = numbers();
    vbar_torch_segment_free(NULL, SIZE_MAX, -1, 0);
    vbar_torch_segment_free((void *)0xdead, 2 << 20, 0, 0);
    vbar_torch_segment_free(untouched(), 0, INT32_MIN, VBAR_STREAM_NONE);
    CHECK(is_untouched());
    CHECK(is_as_before(before));
}

CASE(vbar_torch_configure) {
    numbers();
    VbarDeviceOptions options = test_options(16);
    options.size = 1;
    FAILS(vbar_torch_configure(&options), VBAR_STATUS_INVALID_ARGUMENT, "size field");
    FAILS(vbar_torch_configure(unaligned()), VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    options = test_options(16);
    options.driver = "nothing";
    FAILS(vbar_torch_configure(&options), VBAR_STATUS_INVALID_ARGUMENT, "nothing");
    options = test_options(16);
    options.ordinal = 1;
    FAILS(vbar_torch_configure(&options), VBAR_STATUS_INVALID_ARGUMENT, "ordinal");
    options = test_options(16);
    options.context = untouched();
    FAILS(vbar_torch_configure(&options), VBAR_STATUS_INVALID_ARGUMENT, "context");
    /* It is open with others. */
    options = test_options(16);
    options.driver = "sim:capacity=64M,granularity=64K,address_space=64G,jitter=0,bandwidth=1T";
    options.page_bytes = 128 << 10;
    FAILS(vbar_torch_configure(&options), VBAR_STATUS_ALREADY_OPEN, "65536");
    CHECK(is_untouched());
    configure();
}

CASE(vbar_torch_device) {
    numbers();
    BAD_PLACES(VbarDevice, bad, vbar_torch_device(0, bad));
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        CHECK(vbar_torch_device(no_devices[at], untouched()) != VBAR_STATUS_OK);
        CHECK(is_untouched());
    }
    VbarDevice device;
    OK(vbar_torch_device(0, &device));
    OK(vbar_device_close(device));
    FAILS(vbar_device_close(device), VBAR_STATUS_STALE_HANDLE, "0x");
    /* PyTorch's own goes on. */
    void *place = vbar_torch_malloc(1, 0, 0);
    CHECK(place != NULL);
    vbar_torch_free(place, 1, 0, 0);
}

CASE(vbar_torch_raise) {
    BAD_PLACES(uint32_t, bad, vbar_torch_raise(bad));
    uint32_t raise;
    OK(vbar_torch_raise(&raise));
    CHECK(raise == VBAR_TORCH_RAISE_NOTHING);
}

static void each_bad_device(VbarStatus (*call)(int32_t device)) {
    numbers();
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        CHECK(call(no_devices[at]) != VBAR_STATUS_OK);
    }
}

static VbarStatus statistics_of(int32_t device) {
    VbarStatus status =
        vbar_torch_statistics(device, untouched_struct(sizeof(VbarTorchStatistics)));
    CHECK(is_untouched());
    return status;
}

CASE(vbar_torch_statistics) {
    numbers();
    BAD_STRUCTS(VbarTorchStatistics, bad, vbar_torch_statistics(0, bad));
    each_bad_device(statistics_of);
}

CASE(vbar_torch_reset_peaks) {
    each_bad_device(vbar_torch_reset_peaks);
}

CASE(vbar_torch_reset_accumulated) {
    each_bad_device(vbar_torch_reset_accumulated);
}

static VbarStatus snapshot_of(int32_t device) {
    size_t *counts = untouched();
    VbarStatus status = vbar_torch_snapshot(device, NULL, 0, counts, NULL, 0, counts + 1);
    CHECK(is_untouched());
    return status;
}

CASE(vbar_torch_snapshot) {
    numbers();
    void *place = vbar_torch_malloc(1, 0, 0);
    size_t segments, blocks;
    BAD_PLACES(size_t, bad, vbar_torch_snapshot(0, NULL, 0, bad, NULL, 0, &blocks));
    BAD_PLACES(size_t, bad, vbar_torch_snapshot(0, NULL, 0, &segments, NULL, 0, bad));
    BAD_PLACES(VbarTorchSegment, bad,
               vbar_torch_snapshot(0, bad, 1, &segments, NULL, 0, &blocks));
    BAD_PLACES(VbarTorchBlock, bad, vbar_torch_snapshot(0, NULL, 0, &segments, bad, 1, &blocks));
    FAILS(vbar_torch_snapshot(0, untouched(), SIZE_MAX, &segments, NULL, 0, &blocks),
          VBAR_STATUS_INVALID_ARGUMENT, "larger than memory");
    CHECK(is_untouched());
    /* Room for one of each: no more is written, and all are counted. */
    OK(vbar_torch_snapshot(0, NULL, 0, &segments, NULL, 0, &blocks));
    CHECK(segments >= 1 && blocks >= 1);
    VbarTorchBlock one[2] = {{.address = 1}, {.address = 1}};
    OK(vbar_torch_snapshot(0, NULL, 0, &segments, one, 1, &blocks));
    CHECK(one[0].address != 1 && one[1].address == 1);
    each_bad_device(snapshot_of);
    vbar_torch_free(place, 1, 0, 0);
}

CASE(vbar_torch_record_start) {
    numbers();
    FAILS(vbar_torch_record_start(0, NULL), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_torch_record_start(0, ""), VBAR_STATUS_INVALID_ARGUMENT, "empty");
    FAILS(vbar_torch_record_start(0, "/nowhere/trace"), VBAR_STATUS_IO, "/nowhere/trace");
    for (size_t at = 0; at < COUNT_OF(no_devices); at++) {
        CHECK(vbar_torch_record_start(no_devices[at], "/dev/null") != VBAR_STATUS_OK);
    }
    OK(vbar_torch_record_start(0, "/dev/null"));
    FAILS(vbar_torch_record_start(0, "/dev/null"), VBAR_STATUS_INVALID_ARGUMENT, "/dev/null");
    OK(vbar_torch_record_stop(0, NULL));
}

static VbarStatus stop_of(int32_t device) {
    VbarStatus status = vbar_torch_record_stop(device, untouched());
    CHECK(is_untouched());
    return status;
}

CASE(vbar_torch_record_stop) {
    numbers();
    each_bad_device(stop_of);
    FAILS(stop_of(0), VBAR_STATUS_INVALID_ARGUMENT, "nothing is being recorded");
    OK(vbar_torch_record_start(0, "/dev/full"));
    FAILS(vbar_torch_record_stop(0, unaligned()), VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    CHECK(is_untouched());
    /* It goes on: this is what cannot be written. */
    vbar_torch_free(vbar_torch_malloc(1, 0, 0), 1, 0, 0);
    FAILS(stop_of(0), VBAR_STATUS_IO, "/dev/full");
    uint64_t event_count;
    OK(vbar_torch_record_start(0, "/dev/null"));
    vbar_torch_free(vbar_torch_malloc(1, 0, 0), 1, 0, 0);
    OK(vbar_torch_record_stop(0, &event_count));
    CHECK(event_count >= 2);
}

static VbarTorchGraph graph_of(VbarStream stream) {
    VbarTorchGraph graph;
    OK(vbar_torch_graph_create(0, stream, &graph));
    return graph;
}

static VbarStatus graph_on(int32_t device) {
    VbarStatus status = vbar_torch_graph_create(device, 0, untouched());
    CHECK(is_untouched());
    return status;
}

CASE(vbar_torch_graph_create) {
    VbarTorchStatistics before = numbers();
    BAD_PLACES(VbarTorchGraph, bad, vbar_torch_graph_create(0, 0, bad));
    FAILS(vbar_torch_graph_create(0, VBAR_STREAM_NONE, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "stream");
    CHECK(vbar_torch_graph_create(0, 0xdead, untouched()) != VBAR_STATUS_OK);
    CHECK(is_untouched());
    each_bad_device(graph_on);
    VbarTorchGraph graph = graph_of(0);
    CHECK(is_as_before(before));
    OK(vbar_torch_graph_destroy(graph));
}

static void each_stale_graph(VbarStatus (*call)(VbarTorchGraph graph)) {
    VbarTorchGraph gone = graph_of(0);
    OK(vbar_torch_graph_destroy(gone));
    VbarDevice device;
    OK(vbar_torch_device(0, &device));
    VbarTorchGraph stale[] = {{0}, {1}, {UINT64_MAX}, gone, {device.id}};
    for (size_t at = 0; at < COUNT_OF(stale); at++) {
        FAILS(call(stale[at]), VBAR_STATUS_STALE_HANDLE, "memory graph");
        CHECK(is_untouched());
    }
    OK(vbar_device_close(device));
}

static VbarStatus step_of(VbarTorchGraph graph) {
    return vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ENTER, 1, untouched());
}

CASE(vbar_torch_graph_step) {
    VbarTorchStatistics before = numbers();
    each_stale_graph(step_of);
    VbarTorchGraph graph = graph_of(0), other = graph_of(0);
    static const uint32_t unknown[] = {0, 7, UINT32_MAX};
    for (size_t at = 0; at < COUNT_OF(unknown); at++) {
        FAILS(vbar_torch_graph_step(graph, unknown[at], 0, NULL), VBAR_STATUS_INVALID_ARGUMENT,
              "1 to 6");
    }
    FAILS(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ENTER, 0, unaligned()),
          VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    for (uint32_t step = VBAR_TORCH_GRAPH_STEP_LEAVE; step < VBAR_TORCH_GRAPH_STEP_ABORT; step++) {
        FAILS(vbar_torch_graph_step(graph, step, 0, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
              "no scope");
    }
    CHECK(is_untouched());
    uint32_t broken = 7;
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ENTER, UINT64_MAX, &broken));
    CHECK(broken == 0);
    FAILS(vbar_torch_graph_step(other, VBAR_TORCH_GRAPH_STEP_ENTER, 0, NULL),
          VBAR_STATUS_INVALID_ARGUMENT, "another graph");
    FAILS(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_RESUME, 0, NULL),
          VBAR_STATUS_INVALID_ARGUMENT, "never began");
    void *first = vbar_torch_malloc(100000, 0, 0);
    vbar_torch_free(first, 100000, 0, 0);
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_NEXT, UINT64_MAX, NULL));
    /* Its scopes are this thread's, and what it serves is freed like any other. */
    void *again = vbar_torch_malloc(100000, 0, 0);
    CHECK(again == first);
    vbar_torch_free((char *)again + 512, 1, 0, 0);
    CHECK(numbers().unknown_free_count == before.unknown_free_count + 1);
    vbar_torch_free(again, 1, -1, 0xdead);
    void *more = vbar_torch_malloc(1, 0, 0);
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_LEAVE, 0, &broken));
    CHECK(broken == 1);
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ABORT, 0, &broken));
    CHECK(broken == 0);
    OK(vbar_torch_graph_destroy(graph));
    OK(vbar_torch_graph_destroy(other));
    vbar_torch_free(more, 1, 0, 0);
    CHECK(is_as_before(before));
}

static VbarStatus stream_of(VbarTorchGraph graph) {
    return vbar_torch_graph_use_stream(graph, 0);
}

CASE(vbar_torch_graph_use_stream) {
    numbers();
    each_stale_graph(stream_of);
    VbarTorchGraph graph = graph_of(0);
    FAILS(vbar_torch_graph_use_stream(graph, VBAR_STREAM_NONE), VBAR_STATUS_INVALID_ARGUMENT,
          "stream");
    CHECK(vbar_torch_graph_use_stream(graph, 0xdead) != VBAR_STATUS_OK);
    OK(vbar_torch_graph_use_stream(graph, 0));
    OK(vbar_torch_graph_use_stream(graph, 2));
    OK(vbar_torch_graph_use_stream(graph, 0));
    OK(vbar_torch_graph_destroy(graph));
}

static VbarStatus statistics_of_graph(VbarTorchGraph graph) {
    return vbar_torch_graph_statistics(graph, untouched_struct(sizeof(VbarTorchGraphStatistics)));
}

CASE(vbar_torch_graph_statistics) {
    numbers();
    each_stale_graph(statistics_of_graph);
    VbarTorchGraph graph = graph_of(0);
    BAD_STRUCTS(VbarTorchGraphStatistics, bad, vbar_torch_graph_statistics(graph, bad));
    VbarTorchGraphStatistics told = {.size = sizeof told};
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ENTER, 0, NULL));
    void *place = vbar_torch_malloc(1000, 0, 0);
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ABORT, 0, NULL));
    OK(vbar_torch_graph_statistics(graph, &told));
    CHECK(told.used_bytes == 1024 && told.peak_used_bytes == 1024 && told.rogue_count == 1);
    CHECK(told.pool_bytes >= 1024);
    vbar_torch_free(place, 1000, 0, 0);
    OK(vbar_torch_graph_destroy(graph));
}

CASE(vbar_torch_graph_destroy) {
    VbarTorchStatistics before = numbers();
    each_stale_graph(vbar_torch_graph_destroy);
    VbarTorchGraph graph = graph_of(0);
    OK(vbar_torch_graph_step(graph, VBAR_TORCH_GRAPH_STEP_ENTER, 0, NULL));
    void *place = vbar_torch_malloc(1000, 0, 0);
    OK(vbar_torch_graph_destroy(graph));
    /* The thread has no scope open, and the block lives. */
    VbarTorchGraph next = graph_of(0);
    OK(vbar_torch_graph_step(next, VBAR_TORCH_GRAPH_STEP_ENTER, 0, NULL));
    OK(vbar_torch_graph_destroy(next));
    size_t size = 0;
    CHECK(vbar_torch_base_alloc(place, &size) == place && size == 1024);
    vbar_torch_free(place, 1000, 0, 0);
    CHECK(is_as_before(before));
}

const struct Case torch_cases[] = {
    ENTRY(vbar_torch_configure),
    ENTRY(vbar_torch_malloc),
    ENTRY(vbar_torch_free),
    ENTRY(vbar_torch_init),
    ENTRY(vbar_torch_reset),
    ENTRY(vbar_torch_memory_fraction),
    ENTRY(vbar_torch_base_alloc),
    ENTRY(vbar_torch_record_stream),
    ENTRY(vbar_torch_begin_pool),
    ENTRY(vbar_torch_end_pool),
    ENTRY(vbar_torch_release_pool),
    ENTRY(vbar_torch_segment_malloc),
    ENTRY(vbar_torch_segment_free),
    ENTRY(vbar_torch_device),
    ENTRY(vbar_torch_raise),
    ENTRY(vbar_torch_statistics),
    ENTRY(vbar_torch_reset_peaks),
    ENTRY(vbar_torch_reset_accumulated),
    ENTRY(vbar_torch_snapshot),
    ENTRY(vbar_torch_record_start),
    ENTRY(vbar_torch_record_stop),
    ENTRY(vbar_torch_graph_create),
    ENTRY(vbar_torch_graph_step),
    ENTRY(vbar_torch_graph_use_stream),
    ENTRY(vbar_torch_graph_statistics),
    ENTRY(vbar_torch_graph_destroy),
    {NULL, NULL},
};
