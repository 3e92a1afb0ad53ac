/*
 * Addresses are what they cost (scenario 32): many small VBARs take addresses by their own size and
 * not by the device's, and a VBAR that gets none opens all the same and offloads everything.
 *
 * Simulated only: it counts what is reserved, and can be short of it.
 */
#include "check.h"

#define SMALL_BARS 500

static VbarSimLive live(VbarSim sim) {
    VbarSimLive told = {.size = sizeof told};
    OK(vbar_sim_live(sim, &told));
    return told;
}

static void small_bars_take_small_ranges(VbarDevice device, VbarSim sim) {
    static VbarBar bars[SMALL_BARS];
    uint64_t before = live(sim).reserved_bytes;
    for (size_t at = 0; at < SMALL_BARS; at++) OK(vbar_bar_create(device, 1, &bars[at]));
    CHECK(live(sim).reserved_bytes == before + SMALL_BARS * page_bytes());
    CHECK(live(sim).used_bytes == 0);
    for (size_t at = 0; at < SMALL_BARS; at++) OK(vbar_bar_destroy_wait(bars[at]));
    CHECK(live(sim).reserved_bytes == before);
}

static void bars_come_and_go_for_ever(VbarDevice device, VbarSim sim) {
    uint64_t before = live(sim).reserved_bytes;
    for (int round = 0; round < 2000; round++) {
        VbarBar bar;
        VbarFault told;
        OK(vbar_bar_create(device, UINT64_C(1) << 30, &bar));
        OK(vbar_bar_fault(bar, UINT64_C(1) << 29, 1, 0, &told));
        CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
        OK(vbar_token_unpin(told.token, 0));
        OK(vbar_bar_destroy_wait(bar));
        CHECK(live(sim).reserved_bytes == before);
    }
}

/* A VBAR without addresses: distinct ones that are never mapped, and one reason for all faults. */
static VbarBar check_has_none(VbarDevice device, uint64_t bytes, uint64_t *address) {
    VbarBar bar;
    OK(vbar_bar_create(device, bytes, &bar));
    VbarBarInfo info = {.size = sizeof info};
    OK(vbar_bar_info(bar, &info));
    CHECK(info.has_addresses == 0 && info.bytes == bytes && info.address != 0);
    CHECK(info.address % page_bytes() == 0);
    /* No pointer of this process can be equal to it. */
    CHECK(info.address >> 47 != 0 && info.address >> 47 != (UINT64_MAX >> 47));
    VbarFault told;
    OK(vbar_bar_fault(bar, 0, 1, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_OFFLOADED && told.reason == VBAR_REASON_NO_ADDRESSES);
    CHECK(told.token.id == 0 && told.address == 0);
    VbarAllocation allocation;
    OK(vbar_bar_allocate(bar, 512, &allocation));
    OK(vbar_allocation_fault(allocation, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_OFFLOADED && told.reason == VBAR_REASON_NO_ADDRESSES);
    *address = info.address;
    return bar;
}

static void what_does_not_fit_is_offloaded(VbarDevice device, VbarSim sim) {
    /* Of 8 GiB, three of 3 GiB do not fit; one more fits when one has gone. */
    uint64_t bytes = UINT64_C(3) << 30, one, other;
    VbarBar bars[2], next;
    for (size_t at = 0; at < 2; at++) OK(vbar_bar_create(device, bytes, &bars[at]));
    VbarBar without = check_has_none(device, bytes, &one);
    VbarBar second = check_has_none(device, bytes, &other);
    CHECK(one + bytes <= other || other + bytes <= one);
    CHECK(live(sim).reserved_bytes >= 2 * bytes && live(sim).reserved_bytes < 3 * bytes);
    OK(vbar_bar_destroy_wait(bars[0]));
    OK(vbar_bar_create(device, bytes, &next));
    VbarFault told;
    OK(vbar_bar_fault(next, bytes - 1, 1, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_token_unpin(told.token, 0));
    CHECK(statistics(device).refusal_count[VBAR_REASON_NO_ADDRESSES] == 4);
    OK(vbar_bar_destroy_wait(next));
    OK(vbar_bar_destroy_wait(bars[1]));
    OK(vbar_bar_destroy_wait(without));
    OK(vbar_bar_destroy_wait(second));
}

/* A driver without virtual memory management opens, and offloads everything. */
static void without_memory_management_everything_is_offloaded(void) {
    VbarDeviceOptions options = test_options(8);
    options.driver = "sim:capacity=64M,granularity=64K,vmm=0";
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    uint64_t address;
    VbarBar bar = check_has_none(device, page_bytes(), &address);
    OK(vbar_bar_destroy_wait(bar));
    close_device(device);
}

int main(void) {
    start();
    CHECK(!on_gpu());
    VbarDevice device = open_device(8);
    VbarSim sim;
    OK(vbar_sim_open(device, &sim));
    small_bars_take_small_ranges(device, sim);
    bars_come_and_go_for_ever(device, sim);
    what_does_not_fit_is_offloaded(device, sim);
    OK(vbar_sim_close(sim));
    close_device(device);
    without_memory_management_everything_is_offloaded();
    return 0;
}
