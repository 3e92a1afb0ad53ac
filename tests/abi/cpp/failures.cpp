// How calls fail: a status and a sentence, thrown or returned, and nothing lost.

#include <climits>

#include "check.hpp"

using check::PAGE;
using check::Sim;
using vbar::Status;

// Compiled with -fno-exceptions and -fno-rtti: no_exceptions.cpp. The line that failed, or 0.
extern "C" int run_without_exceptions();

TEST(the_other_style_lives_in_the_same_program) { CHECK_EQ(run_without_exceptions(), 0); }

TEST(opening_fails_by_status) {
    vbar::DeviceOptions options = check::small(4);
    options.driver = "gpu";
    CHECK_SAYS(CHECK_THROWS(invalid_argument, vbar::Device::open(options)), "'gpu' is no device");
    options.driver = std::string("sim\0:colour", 11);
    CHECK_SAYS(CHECK_THROWS(invalid_argument, vbar::Device::open(options)), "zero byte");
    options = check::small(4);
    options.page_bytes = 12345;
    CHECK_THROWS(invalid_argument, vbar::Device::open(options));
    options = check::small(4);
    options.ordinal = 3;
    CHECK_THROWS(device_not_registered, vbar::Device::open(options));
    options = check::small(4);
    options.wait_timeout = std::chrono::milliseconds(-1);
    CHECK_THROWS(invalid_argument, vbar::Device::open(options));

    const auto device = vbar::Device::open(check::small(4));
    options = check::small(4);
    options.page_bytes = 2 * PAGE;
    const auto other = vbar::Device::try_open(options);
    CHECK_EQ(other.status(), Status::already_open);
    CHECK_SAYS(other.message(), "open");
}

TEST(a_result_carries_the_sentence_of_its_own_call) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const auto outside = bar.try_fault(2 * PAGE, PAGE, sim.stream);
    const auto past = bar.try_fault(UINT64_MAX - 7, 1000, sim.stream);
    const auto too_large = sim.device.try_create_bar(UINT64_MAX);
    CHECK_EQ(outside.status(), Status::invalid_argument);
    CHECK_SAYS(past.message(), "end past 2^64");
    CHECK(!too_large && std::string(too_large.message()) != past.message());
    CHECK_THROWS(invalid_argument, bar.fault(2 * PAGE, PAGE, sim.stream));
    CHECK_THROWS(invalid_argument, bar.fault(UINT64_MAX - 7, 1000, sim.stream));
    CHECK_THROWS(invalid_argument, sim.device.create_bar(0));
}

TEST(allocating_fails_by_status) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    CHECK_THROWS(no_addresses, bar.allocate(2 * PAGE));
    CHECK_EQ(bar.try_allocate(UINT64_MAX).status(), Status::no_addresses);
    CHECK_EQ(bar.try_allocate(PAGE)->bytes(), PAGE);
    CHECK_THROWS(no_addresses, bar.allocate(1));
}

TEST(a_driver_failure_names_the_drivers_code) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(2 * PAGE);
    sim.control.fail("cuMemMap", 0, 1, 999);
    const std::string text = CHECK_THROWS(driver, bar.fault(0, PAGE, sim.stream));
    CHECK_SAYS(text, "cuMemMap");
    CHECK_SAYS(text, "CUDA_ERROR_UNKNOWN");
    // Nothing was left half done.
    CHECK(bar.fault(0, PAGE, sim.stream));
    CHECK_THROWS(invalid_argument, sim.control.fail("cuNothing", 0, 1, 999));
    CHECK_THROWS(invalid_argument, sim.control.fail_rate(2.0, 1));
}

TEST(an_error_leaves_guards_as_they_are) {
    Sim sim(4);
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    const auto weight = [&](std::uint64_t page) {
        return bar.fault(page * PAGE, PAGE, sim.stream);
    };
    try {
        auto one = weight(0);
        auto two = weight(1);
        CHECK(one && two);
        sim.control.fail("cuMemCreate", 0, UINT64_MAX, 999);
        auto three = weight(2);
        CHECK(!"an error was expected");
    } catch (const vbar::Error &error) {
        CHECK_EQ(error.status(), Status::driver);
    }
    sim.control.heal();
    for (const vbar::Page &page : bar.residency(0, 4)) CHECK_EQ(page.pin_count, 0U);
}

TEST(a_lost_device_says_so_and_closes) {
    auto device = vbar::Device::open(check::small(4));
    const auto control = vbar::sim::Control::open(device);
    const vbar::Bar bar = device.create_bar(4 * PAGE);
    auto held = bar.fault(0, PAGE, vbar::no_stream);
    control.lose_device(700);
    CHECK_THROWS(device_lost, bar.fault(PAGE, PAGE, vbar::no_stream));
    CHECK_EQ(device.close(), Status::ok);
}

TEST(an_injected_rate_of_failures_loses_nothing) {
    Sim sim(8);
    const vbar::Bar bar = sim.device.create_bar(16 * PAGE);
    sim.control.fail_rate(0.2, 7);
    for (std::uint64_t at = 0; at < 400; at++) {
        const auto fault = bar.try_fault((at * 5 % 16) * PAGE, PAGE, sim.stream);
        CHECK(fault.ok() || fault.status() == Status::driver);
    }
    CHECK(sim.device.statistics().driver_retry_count > 0);
    sim.control.heal();
    sim.stream.synchronize();
    sim.device.refresh();
    bar.prioritise();
    // A VBAR does not give up a lower page for a higher one, so 8 are all that fit.
    for (std::uint64_t page = 0; page < 8; page++) {
        CHECK(bar.fault(page * PAGE, PAGE, sim.stream));
    }
    for (const vbar::Page &page : bar.residency(0, 16)) CHECK_EQ(page.pin_count, 0U);
}

TEST(addresses_and_outside_pressure_run_out) {
    Sim sim(8);
    // The device has 8 GiB of addresses: a VBAR without any opens, and its faults are offloaded.
    const vbar::Bar none = sim.device.create_bar(64ULL << 30);
    CHECK_EQ(none.info().has_addresses, 0U);
    CHECK_EQ(none.fault(0, PAGE, sim.stream).reason(), vbar::Reason::no_addresses);

    const vbar::Bar bar = sim.device.create_bar(8 * PAGE);
    sim.control.set_outside_bytes(6 * PAGE);
    sim.device.refresh();
    CHECK(sim.device.statistics().budget_bytes <= 2 * PAGE);
    CHECK(bar.fault(0, 4 * PAGE, sim.stream).offloaded());
}
