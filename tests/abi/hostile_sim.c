/*
 * Hostile calls of the simulated device. On a real one each says that it is none. See hostile.c.
 */
#include "hostile.h"

/* A call that needs a simulated device: refused on another; else with each bad id. */
#define NEEDS_SIM(call_on) \
    do { \
        EACH_BAD_ID(DEVICE, VbarDevice, bad_, call_on(bad_)); \
        if (on_gpu()) { \
            FAILS(call_on(world.device), VBAR_STATUS_UNSUPPORTED, "real one"); \
            CHECK(is_untouched()); \
            return; \
        } \
    } while (0)

#define EACH_BAD_SIM(call_on) EACH_BAD_ID(SIM, VbarSim, bad_, call_on(bad_))

CASE(vbar_sim_open) {
#define CALL(device) vbar_sim_open(device, untouched())
    NEEDS_SIM(CALL);
#undef CALL
    BAD_PLACES(VbarSim, bad, vbar_sim_open(world.device, bad));
}

CASE(vbar_sim_close) {
    EACH_BAD_SIM(vbar_sim_close);
}

CASE(vbar_sim_stream_create) {
#define CALL(device) vbar_sim_stream_create(device, untouched())
    NEEDS_SIM(CALL);
#undef CALL
    BAD_PLACES(VbarStream, bad, vbar_sim_stream_create(world.device, bad));
}

static void stream_fails(VbarStatus (*call)(VbarDevice device, VbarStream stream)) {
    static const VbarStream streams[] = {3, 0xdead, SIZE_MAX - 1, VBAR_STREAM_NONE};
    for (size_t at = 0; at < COUNT_OF(streams); at++) {
        FAILS(call(world.device, streams[at]), VBAR_STATUS_DRIVER, "CUDA_ERROR_INVALID_HANDLE");
    }
    VbarStream closed;
    OK(vbar_sim_stream_create(world.device, &closed));
    OK(vbar_sim_stream_destroy(world.device, closed));
    FAILS(call(world.device, closed), VBAR_STATUS_DRIVER, "CUDA_ERROR_INVALID_HANDLE");
}

CASE(vbar_sim_stream_destroy) {
#define CALL(device) vbar_sim_stream_destroy(device, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    stream_fails(vbar_sim_stream_destroy);
}

CASE(vbar_sim_stream_synchronize) {
#define CALL(device) vbar_sim_stream_synchronize(device, 0)
    NEEDS_SIM(CALL);
#undef CALL
    stream_fails(vbar_sim_stream_synchronize);
}

static VbarStatus wait_of(VbarDevice device, VbarStream stream) {
    return vbar_sim_stream_wait(device, stream, 0);
}

static VbarStatus wait_for(VbarDevice device, VbarStream stream) {
    return vbar_sim_stream_wait(device, 0, stream);
}

CASE(vbar_sim_stream_wait) {
#define CALL(device) vbar_sim_stream_wait(device, 0, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    stream_fails(wait_of);
    stream_fails(wait_for);
    OK(vbar_sim_stream_wait(world.device, 0, 0));
}

CASE(vbar_sim_stream_hold) {
#define CALL(device) vbar_sim_stream_hold(device, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    stream_fails(vbar_sim_stream_hold);
}

CASE(vbar_sim_stream_release) {
#define CALL(device) vbar_sim_stream_release(device, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    stream_fails(vbar_sim_stream_release);
}

CASE(vbar_sim_stream_begin_capture) {
#define CALL(device) vbar_sim_stream_begin_capture(device, 0, 0)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_stream_begin_capture(world.device, 0, 3), VBAR_STATUS_INVALID_ARGUMENT,
          "mode is 3");
    FAILS(vbar_sim_stream_begin_capture(world.device, 0, UINT32_MAX), VBAR_STATUS_INVALID_ARGUMENT,
          "mode is 4294967295");
    FAILS(vbar_sim_stream_begin_capture(world.device, 0, 0), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    FAILS(vbar_sim_stream_begin_capture(world.device, 0xdead, 0), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_INVALID_HANDLE");
    VbarStream stream;
    OK(vbar_sim_stream_create(world.device, &stream));
    OK(vbar_sim_stream_begin_capture(world.device, stream, 2));
    FAILS(vbar_sim_stream_begin_capture(world.device, stream, 2), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_INVALID_VALUE");
    VbarSimGraph graph;
    OK(vbar_sim_stream_end_capture(world.device, stream, &graph));
    OK(vbar_sim_graph_destroy(graph));
    OK(vbar_sim_stream_destroy(world.device, stream));
}

CASE(vbar_sim_stream_end_capture) {
#define CALL(device) vbar_sim_stream_end_capture(device, 0, untouched())
    NEEDS_SIM(CALL);
#undef CALL
    BAD_PLACES(VbarSimGraph, bad, vbar_sim_stream_end_capture(world.device, 0, bad));
    VbarStream stream;
    OK(vbar_sim_stream_create(world.device, &stream));
    FAILS(vbar_sim_stream_end_capture(world.device, stream, untouched()), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_INVALID_VALUE");
    /* A wait for what is recorded breaks the capture, which leaves no graph. */
    OK(vbar_sim_stream_begin_capture(world.device, stream, 0));
    FAILS(vbar_sim_stream_synchronize(world.device, stream), VBAR_STATUS_DRIVER, "CAPTURE");
    FAILS(vbar_sim_stream_end_capture(world.device, stream, untouched()), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    CHECK(is_untouched());
    OK(vbar_sim_stream_destroy(world.device, stream));
}

CASE(vbar_sim_graph_launch) {
#define CALL(device) vbar_sim_graph_launch(device, world.graph, 0)
    NEEDS_SIM(CALL);
#undef CALL
    EACH_BAD_ID(SIM_GRAPH, VbarSimGraph, bad, vbar_sim_graph_launch(world.device, bad, 0));
    FAILS(vbar_sim_graph_launch(world.device, world.graph, 0xdead), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_INVALID_HANDLE");
    VbarDeviceOptions options = test_options(16);
    options.driver = "sim:capacity=64M,granularity=64K";
    VbarDevice other;
    OK(vbar_device_open(&options, &other));
    FAILS(vbar_sim_graph_launch(other, world.graph, 0), VBAR_STATUS_INVALID_ARGUMENT,
          "another device");
    OK(vbar_device_close(other));
    OK(vbar_sim_graph_launch(world.device, world.graph, 0));
    VbarStream stream;
    OK(vbar_sim_stream_create(world.device, &stream));
    OK(vbar_sim_stream_begin_capture(world.device, stream, 2));
    FAILS(vbar_sim_graph_launch(world.device, world.graph, stream), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_NOT_SUPPORTED");
    VbarSimGraph graph;
    OK(vbar_sim_stream_end_capture(world.device, stream, &graph));
    OK(vbar_sim_graph_destroy(graph));
    OK(vbar_sim_stream_destroy(world.device, stream));
}

CASE(vbar_sim_graph_destroy) {
    EACH_BAD_ID(SIM_GRAPH, VbarSimGraph, bad, vbar_sim_graph_destroy(bad));
}

CASE(vbar_sim_launch_checksum) {
#define CALL(device) vbar_sim_launch_checksum(device, 1, 1, 1, 0, 0)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_launch_checksum(world.device, 8, UINT64_MAX, 8, 0, 0), VBAR_STATUS_DRIVER,
          "cuLaunchKernel");
    FAILS(vbar_sim_launch_checksum(world.device, 9, 8, 8, 0, 0), VBAR_STATUS_DRIVER,
          "cuLaunchKernel");
    FAILS(vbar_sim_launch_checksum(world.device, 8, 8, 9, 0, 0), VBAR_STATUS_DRIVER,
          "cuLaunchKernel");
    FAILS(vbar_sim_launch_checksum(world.device, 8, 8, 8, 0, 0xdead), VBAR_STATUS_DRIVER,
          "CUDA_ERROR");
}

CASE(vbar_sim_launch_pattern) {
#define CALL(device) vbar_sim_launch_pattern(device, 8, 8, 1, 0, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_launch_pattern(world.device, 8, UINT64_MAX, 1, 0, 0), VBAR_STATUS_DRIVER,
          "cuLaunchKernel");
    FAILS(vbar_sim_launch_pattern(world.device, 9, 8, 1, 0, 0), VBAR_STATUS_DRIVER,
          "cuLaunchKernel");
}

CASE(vbar_sim_launch_sleep) {
#define CALL(device) vbar_sim_launch_sleep(device, 0, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_launch_sleep(world.device, 1, 0xdead), VBAR_STATUS_DRIVER, "CUDA_ERROR");
}

CASE(vbar_sim_copy_to_device) {
    unsigned char bytes[8] = {0};
#define CALL(device) vbar_sim_copy_to_device(device, 8, bytes, 8, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_copy_to_device(world.device, 8, NULL, 8, 0), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    FAILS(vbar_sim_copy_to_device(world.device, 8, bytes, SIZE_MAX, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "memory");
    FAILS(vbar_sim_copy_to_device(world.device, UINT64_MAX, bytes, 8, 0), VBAR_STATUS_DRIVER,
          "cuMemcpyHtoDAsync");
    FAILS(vbar_sim_copy_to_device(world.device, 8, bytes, 8, 0xdead), VBAR_STATUS_DRIVER,
          "CUDA_ERROR");
}

CASE(vbar_sim_copy_to_host) {
#define CALL(device) vbar_sim_copy_to_host(device, untouched(), 8, 8, 0xdead)
    NEEDS_SIM(CALL);
#undef CALL
    FAILS(vbar_sim_copy_to_host(world.device, NULL, 8, 8, 0), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    FAILS(vbar_sim_copy_to_host(world.device, untouched(), 8, SIZE_MAX, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "memory");
    FAILS(vbar_sim_copy_to_host(world.device, untouched(), UINT64_MAX, 8, 0), VBAR_STATUS_DRIVER,
          "cuMemcpyDtoHAsync");
    CHECK(is_untouched());
}

CASE(vbar_sim_peek) {
#define CALL(sim) vbar_sim_peek(sim, 8, untouched(), 8)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    FAILS(vbar_sim_peek(world.sim, 8, NULL, 8), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_sim_peek(world.sim, 8, untouched(), SIZE_MAX), VBAR_STATUS_INVALID_ARGUMENT,
          "memory");
    for (size_t at = 0; at < edge_count; at++) {
        bool ends = edges[at] > UINT64_MAX - 64;
        FAILS(vbar_sim_peek(world.sim, edges[at], untouched(), 64),
              ends ? VBAR_STATUS_INVALID_ARGUMENT : VBAR_STATUS_DRIVER, NULL);
        FAILS(vbar_sim_peek(world.sim, edges[at], untouched(), SIZE_MAX / 4),
              edges[at] > SIZE_MAX - SIZE_MAX / 4 ? VBAR_STATUS_INVALID_ARGUMENT
                                                  : VBAR_STATUS_DRIVER,
              NULL);
        CHECK(is_untouched());
    }
}

CASE(vbar_sim_checksum) {
    CHECK(vbar_sim_checksum(NULL, 8) == 0);
    CHECK(vbar_sim_checksum(NULL, 0) == 0);
    CHECK(vbar_sim_checksum(untouched(), SIZE_MAX) == 0);
}

CASE(vbar_sim_pattern) {
    FAILS(vbar_sim_pattern(NULL, 8, 1), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_sim_pattern(untouched(), SIZE_MAX, 1), VBAR_STATUS_INVALID_ARGUMENT, "memory");
    OK(vbar_sim_pattern(NULL, 0, 1));
    CHECK(is_untouched());
}

CASE(vbar_sim_set_outside_bytes) {
#define CALL(sim) vbar_sim_set_outside_bytes(sim, 1)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    for (size_t at = 0; at < edge_count; at++) {
        OK(vbar_sim_set_outside_bytes(world.sim, edges[at]));
        OK(vbar_device_refresh(world.device));
    }
    OK(vbar_sim_set_outside_bytes(world.sim, 0));
    OK(vbar_device_refresh(world.device));
}

CASE(vbar_sim_fail) {
#define CALL(sim) vbar_sim_fail(sim, "cuMemMap", 0, 1, 2)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    FAILS(vbar_sim_fail(world.sim, NULL, 0, 1, 2), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_sim_fail(world.sim, "", 0, 1, 2), VBAR_STATUS_INVALID_ARGUMENT, "no driver verb");
    FAILS(vbar_sim_fail(world.sim, "cuMemMop", 0, 1, 2), VBAR_STATUS_INVALID_ARGUMENT, "cuMemMop");
    FAILS(vbar_sim_fail(world.sim, "\xff", 0, 1, 2), VBAR_STATUS_INVALID_ARGUMENT, "UTF-8");
    FAILS(vbar_sim_fail(world.sim, "cuMemMap", 0, 1, 0), VBAR_STATUS_INVALID_ARGUMENT, "success");
    OK(vbar_sim_fail(world.sim, "mem_map", UINT64_MAX, UINT64_MAX, INT32_MIN));
    OK(vbar_sim_heal(world.sim));
}

CASE(vbar_sim_fail_rate) {
#define CALL(sim) vbar_sim_fail_rate(sim, 0.5, 1)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    volatile double zero = 0;
    const double rates[] = {-1, 1.0001, 1 / zero, -1 / zero, zero / zero};
    for (size_t at = 0; at < COUNT_OF(rates); at++) {
        FAILS(vbar_sim_fail_rate(world.sim, rates[at], 1), VBAR_STATUS_INVALID_ARGUMENT,
              "probability");
    }
    OK(vbar_sim_heal(world.sim));
}

CASE(vbar_sim_heal) {
    EACH_BAD_SIM(vbar_sim_heal);
}

CASE(vbar_sim_lose_device) {
#define CALL(sim) vbar_sim_lose_device(sim, 700)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    FAILS(vbar_sim_lose_device(world.sim, 0), VBAR_STATUS_INVALID_ARGUMENT, "success");
}

CASE(vbar_sim_calls) {
    uint64_t count;
#define CALL(sim) vbar_sim_calls(sim, "cuMemMap", untouched())
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    BAD_PLACES(uint64_t, bad, vbar_sim_calls(world.sim, "cuMemMap", bad));
    FAILS(vbar_sim_calls(world.sim, NULL, &count), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_sim_calls(world.sim, "", &count), VBAR_STATUS_INVALID_ARGUMENT, "no driver verb");
    FAILS(vbar_sim_calls(world.sim, "\xff", &count), VBAR_STATUS_INVALID_ARGUMENT, "UTF-8");
}

CASE(vbar_sim_live) {
#define CALL(sim) vbar_sim_live(sim, untouched_struct(sizeof(VbarSimLive)))
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    BAD_STRUCTS(VbarSimLive, bad, vbar_sim_live(world.sim, bad));
}

CASE(vbar_sim_violation_count) {
#define CALL(sim) vbar_sim_violation_count(sim, untouched())
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    BAD_PLACES(uint64_t, bad, vbar_sim_violation_count(world.sim, bad));
}

CASE(vbar_sim_violation) {
    char text[64];
#define CALL(sim) vbar_sim_violation(sim, 0, untouched(), 64)
    EACH_BAD_SIM(CALL);
#undef CALL
    if (on_gpu()) return;
    FAILS(vbar_sim_violation(world.sim, 0, NULL, 64), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_sim_violation(world.sim, 0, text, 0), VBAR_STATUS_INVALID_ARGUMENT, "room");
    FAILS(vbar_sim_violation(world.sim, 0, text, SIZE_MAX), VBAR_STATUS_INVALID_ARGUMENT,
          "memory");
    FAILS(vbar_sim_violation(world.sim, 0, text, 64), VBAR_STATUS_NOT_FOUND, "0 violations");
    FAILS(vbar_sim_violation(world.sim, UINT64_MAX, text, 64), VBAR_STATUS_NOT_FOUND, "none");
}

const struct Case sim_cases[] = {
    ENTRY(vbar_sim_open),
    ENTRY(vbar_sim_close),
    ENTRY(vbar_sim_stream_create),
    ENTRY(vbar_sim_stream_destroy),
    ENTRY(vbar_sim_stream_synchronize),
    ENTRY(vbar_sim_stream_wait),
    ENTRY(vbar_sim_stream_hold),
    ENTRY(vbar_sim_stream_release),
    ENTRY(vbar_sim_stream_begin_capture),
    ENTRY(vbar_sim_stream_end_capture),
    ENTRY(vbar_sim_graph_launch),
    ENTRY(vbar_sim_graph_destroy),
    ENTRY(vbar_sim_launch_checksum),
    ENTRY(vbar_sim_launch_pattern),
    ENTRY(vbar_sim_launch_sleep),
    ENTRY(vbar_sim_copy_to_device),
    ENTRY(vbar_sim_copy_to_host),
    ENTRY(vbar_sim_peek),
    ENTRY(vbar_sim_checksum),
    ENTRY(vbar_sim_pattern),
    ENTRY(vbar_sim_set_outside_bytes),
    ENTRY(vbar_sim_fail),
    ENTRY(vbar_sim_fail_rate),
    ENTRY(vbar_sim_heal),
    ENTRY(vbar_sim_lose_device),
    ENTRY(vbar_sim_calls),
    ENTRY(vbar_sim_live),
    ENTRY(vbar_sim_violation_count),
    ENTRY(vbar_sim_violation),
    {0},
};
