// A device: options, information, budget, memory given back, statistics, waits, messages.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "check.hpp"

using check::PAGE;
using check::Sim;
using vbar::LogLevel;
using vbar::Status;

TEST(options_reach_the_library) {
    vbar::DeviceOptions options = check::small(16);
    options.budget_bytes = 4 * PAGE;
    options.headroom_bytes = 2 * PAGE;
    options.eviction = vbar::Eviction::strict;
    options.context_waits = vbar::ContextWaits::never;
    options.wait_timeout = std::chrono::milliseconds(50);
    options.staging_slot_count = 2;
    const auto device = vbar::Device::open(options);
    const VbarDeviceInfo info = device.info();
    CHECK(info.simulated == 1 && info.page_bytes == PAGE && info.total_bytes == 16 * PAGE);
    CHECK(info.context && info.ordinal == 0);
    CHECK_SAYS(info.driver, "simulated");
    CHECK_EQ(device.budget().budget_bytes, 4 * PAGE);
    CHECK_EQ(device.budget().headroom_bytes, 2 * PAGE);
    device.set_headroom(0);
    device.set_budget(3 * PAGE);
    CHECK_EQ(device.budget().budget_bytes, 3 * PAGE);
    CHECK_EQ(device.budget().headroom_bytes, 0U);
}

// A number that no option has is refused by the option's name, so each of them arrives.
TEST(options_that_mean_nothing_are_refused) {
    const auto refused = [](const char *name, auto change) {
        vbar::DeviceOptions options = check::small(16);
        change(options);
        const auto device = vbar::Device::try_open(options);
        CHECK_EQ(device.status(), Status::invalid_argument);
        CHECK_SAYS(device.message(), name);
    };
    using Options = vbar::DeviceOptions;
    refused("threads", [](Options &it) { it.threads = static_cast<vbar::Threads>(9); });
    refused("eviction", [](Options &it) { it.eviction = static_cast<vbar::Eviction>(9); });
    refused("context_waits", [](Options &it) { it.context_waits = vbar::ContextWaits(9); });
    refused("host_mapped", [](Options &it) { it.host_mapped = static_cast<vbar::HostMapped>(9); });
    refused("prefer", [](Options &it) { it.prefer = static_cast<vbar::Prefer>(9); });
    refused("poison", [](Options &it) { it.poison = static_cast<vbar::Poison>(9); });
    refused("scrub", [](Options &it) { it.scrub = static_cast<vbar::Scrub>(9); });
    refused("budget_ppm", [](Options &it) { it.budget_bytes = it.budget_ppm = 1; });
    refused("staging", [](Options &it) { it.staging_slot_count = 1000000; });
}

TEST(a_budget_is_a_part_of_the_device_too) {
    vbar::DeviceOptions options = check::small(16);
    options.budget_ppm = 250'000;
    const auto device = vbar::Device::open(options);
    CHECK_EQ(device.budget().budget_bytes, 4 * PAGE);
}

TEST(a_headroom_that_is_not_given_is_the_default) {
    vbar::DeviceOptions options = check::small(16);
    options.headroom_bytes.reset();
    const auto device = vbar::Device::open(options);
    CHECK_EQ(device.budget().budget_bytes, 0U);
    CHECK_EQ(device.budget().headroom_bytes, 256ULL << 20);
}

TEST(a_device_opened_twice_is_one) {
    const auto one = vbar::Device::open(check::small(16));
    vbar::DeviceOptions options = check::small(16);
    options.budget_bytes = 2 * PAGE;
    const auto two = vbar::Device::open(options);
    CHECK_EQ(one.statistics().budget_bytes, 2 * PAGE);
    CHECK_EQ(one.statistics().source(), vbar::BudgetSource::limit);
    const vbar::Bar bar = two.create_bar(PAGE);
    CHECK_EQ(one.statistics().bar_count, 1U);
}

TEST(memory_is_counted_and_given_back) {
    Sim sim(8);
    const vbar::Bar bar = sim.device.create_bar(8 * PAGE);
    { CHECK(bar.fault(0, 4 * PAGE, sim.stream)); }
    { CHECK(bar.fault(0, 4 * PAGE, sim.stream)); }
    sim.stream.synchronize();
    vbar::Statistics statistics = sim.device.statistics();
    CHECK(statistics.used_bytes == 4 * PAGE && statistics.peak_bytes == 4 * PAGE);
    CHECK(statistics.resident_page_count == 4 && statistics.mapped_page_count == 4);
    CHECK(statistics.hit_count == 1 && statistics.miss_count == 1);
    CHECK_EQ(statistics.source(), vbar::BudgetSource::driver_free);

    const auto pinned = bar.fault(0, PAGE, sim.stream);
    const vbar::Freed freed = sim.device.free_memory(UINT64_MAX);
    CHECK_EQ(freed.bytes, 3 * PAGE);
    CHECK_EQ(freed.shortfall, vbar::Shortfall::all_pinned);
    CHECK_EQ(freed.pinned_count, 1U);
    CHECK_EQ(sim.device.statistics().evicted_page_count, 3U);
    CHECK_EQ(sim.device.trim_host_frames(), 0U);
    CHECK_EQ(sim.device.trim_host(0), 0U);
    CHECK_EQ(sim.device.trim(0), sim.device.statistics().free_bytes);
    CHECK_EQ(sim.device.statistics().used_bytes, PAGE);
}

// An engine's layer as a graph: faulted and unpinned in the capture, run as often as it likes.
TEST(a_captured_graph_keeps_its_pages) {
    Sim sim(8);
    const vbar::Bar bar = sim.device.create_bar(2 * PAGE);
    { CHECK(bar.fault(0, PAGE, sim.stream)); }
    sim.stream.synchronize();
    const std::uint64_t address = bar.info().address;

    sim.stream.begin_capture();
    CHECK_EQ(bar.fault(PAGE, PAGE, sim.stream).reason(), vbar::Reason::capture);
    {
        auto weight = bar.fault(0, PAGE, sim.stream);
        CHECK(weight);
        vbar::sim::launch_pattern(sim.device, weight->address(), 64, 7, sim.stream);
    }
    vbar::sim::Graph graph = sim.stream.end_capture();
    CHECK(graph);
    CHECK_EQ(bar.free_memory(UINT64_MAX).shortfall, vbar::Shortfall::all_pinned);

    std::uint64_t wanted[8], found[8];
    vbar::sim::pattern(wanted, sizeof wanted, 7);
    for (const std::uint64_t seed : {1, 2}) {
        vbar::sim::launch_pattern(sim.device, address, 64, seed, sim.stream);
        graph.launch(sim.stream);
        sim.stream.synchronize();
        sim.control.peek(address, found, sizeof found);
        CHECK(std::equal(std::begin(wanted), std::end(wanted), found));
    }

    const vbar::sim::Graph moved = std::move(graph);
    CHECK(!graph && moved);
    CHECK_THROWS(stale_handle, graph.launch(sim.stream));
    graph = vbar::sim::Graph(sim.device.get(), VbarSimGraph{});
    // A wait within a capture breaks it.
    sim.stream.begin_capture(vbar::sim::CaptureMode::this_thread);
    CHECK_THROWS(driver, sim.stream.synchronize());
    CHECK_SAYS(CHECK_THROWS(driver, sim.stream.end_capture()), "INVALIDATED");
}

TEST(a_graph_that_ended_lets_its_pages_go) {
    Sim sim(8);
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    { CHECK(bar.fault(0, PAGE, sim.stream)); }
    sim.stream.begin_capture();
    { CHECK(bar.fault(0, PAGE, sim.stream)); }
    { const vbar::sim::Graph graph = sim.stream.end_capture(); }
    // A thread of the driver tells the library.
    while (bar.residency(0, 1)[0].pin_count != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_EQ(bar.free_memory(UINT64_MAX).bytes, PAGE);
}

TEST(a_wait_times_out) {
    vbar::DeviceOptions options = check::small(8);
    options.wait_timeout = std::chrono::milliseconds(20);
    const auto device = vbar::Device::open(options);
    vbar::Bar bar = device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    auto fill = weight.fault(vbar::no_stream);
    CHECK(fill.refill());
    const std::string text = CHECK_THROWS(timed_out, weight.fault_wait(vbar::no_stream));
    const std::size_t at = text.find("waited ");
    CHECK_SAYS(text, " ms ");
    // Not the 30 seconds of the default.
    CHECK(at != std::string::npos && std::stoi(text.substr(at + 7)) < 10000);
    const VbarBar closed = bar.get();
    // The guard keeps the memory; the VBAR is closed all the same.
    CHECK_THROWS(timed_out, bar.destroy_wait());
    CHECK(!bar);
    CHECK_THROWS(stale_handle, vbar::BarView(closed).info());
}

TEST(a_wait_is_cancelled) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    auto fill = weight.fault(sim.stream);
    Status status = Status::ok;
    std::atomic<bool> done{false};
    std::thread waiter([&] {
        status = weight.try_fault_wait(sim.stream).status();
        done = true;
    });
    while (!done) {
        sim.device.cancel_waits();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    waiter.join();
    CHECK_EQ(status, Status::cancelled);
}

TEST(a_thread_ends_its_own_waits) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    auto fill = weight.fault(sim.stream);
    int asked = 0;
    {
        auto check = vbar::WaitCheck::install([&] { return ++asked == 3; });
        CHECK_THROWS(cancelled, weight.fault_wait(sim.stream));
        CHECK_EQ(asked, 3);
        // A newer one takes over, and the end of the older takes nothing from it.
        check = vbar::WaitCheck::install([&] { return true; });
        CHECK_THROWS(cancelled, weight.fault_wait(sim.stream));
        // Other threads are not asked.
        sim.device.set_wait_timeout(std::chrono::milliseconds(10));
        Status other = Status::ok;
        std::thread([&] { other = weight.try_fault_wait(sim.stream).status(); }).join();
        CHECK_EQ(other, Status::timed_out);
        const vbar::WaitCheck moved = std::move(check);
        CHECK_THROWS(cancelled, weight.fault_wait(sim.stream));
    }
    CHECK_THROWS(timed_out, weight.fault_wait(sim.stream));
    CHECK_EQ(asked, 3);
    CHECK_THROWS(invalid_argument, sim.device.set_wait_timeout(std::chrono::milliseconds(-1)));
}

TEST(a_stream_is_retired) {
    Sim sim;
    {
        const auto stream = vbar::sim::Stream::create(sim.device);
        const vbar::Bar bar = sim.device.create_bar(PAGE);
        CHECK(bar.fault(0, PAGE, stream));
        sim.device.retire_stream(stream);
    }
    sim.device.retire_stream(sim.stream);
}

TEST(a_file_goes_to_the_device_and_back) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(3 * PAGE);
    auto guard = bar.fault(0, 3 * PAGE, sim.stream);
    CHECK(guard);
    std::vector<char> wanted(2 * PAGE + 12345), found(wanted.size());
    for (std::size_t at = 0; at < wanted.size(); at++) wanted[at] = static_cast<char>(at * 31 / 7);
    const std::unique_ptr<FILE, int (*)(FILE *)> file(std::tmpfile(), &std::fclose);
    const int descriptor = fileno(file.get());
    CHECK_EQ(pwrite(descriptor, wanted.data(), wanted.size(), 100),
             static_cast<ssize_t>(wanted.size()));
    const std::uint64_t address = guard->address();
    sim.device.read_file(descriptor, 100, wanted.size(), address + 512, sim.stream);
    // Behind the copies on the stream, without a wait of the program's.
    sim.device.write_file(descriptor, 1 << 20, wanted.size(), address + 512, sim.stream);
    CHECK_EQ(pread(descriptor, found.data(), found.size(), 1 << 20),
             static_cast<ssize_t>(found.size()));
    CHECK(found == wanted);
    CHECK_THROWS(invalid_argument, sim.device.read_file(-1, 0, 1, address, sim.stream));

    // From memory of its own, locked and not.
    std::reverse(wanted.begin(), wanted.end());
    const std::size_t bytes = (wanted.size() + 4095) / 4096 * 4096;
    const std::unique_ptr<void, void (*)(void *)> memory(std::aligned_alloc(4096, bytes), &free);
    std::copy(wanted.begin(), wanted.end(), static_cast<char *>(memory.get()));
    for (const bool locked : {false, true}) {
        if (locked) sim.device.lock_host(memory.get(), bytes);
        sim.device.copy_from_host(memory.get(), wanted.size(), address, sim.stream);
        sim.device.write_file(descriptor, 0, wanted.size(), address, sim.stream);
        if (locked) sim.device.unlock_host(memory.get());
        CHECK_EQ(pread(descriptor, found.data(), found.size(), 0),
                 static_cast<ssize_t>(found.size()));
        CHECK(found == wanted);
        std::reverse(wanted.begin(), wanted.end());
        std::copy(wanted.begin(), wanted.end(), static_cast<char *>(memory.get()));
    }
    CHECK_THROWS(not_found, sim.device.unlock_host(memory.get()));
}

TEST(what_was_written_and_saved_comes_back) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(2 * PAGE);
    CHECK_THROWS(invalid_argument, bar.prepare_save(0, 2 * PAGE + 1));
    CHECK_THROWS(invalid_argument, bar.save(0, PAGE, sim.stream));
    bar.prepare_save(0, PAGE);
    {
        auto guard = bar.fault(0, PAGE, sim.stream);
        vbar::sim::launch_pattern(sim.device, guard->address(), PAGE, 7, sim.stream);
        bar.save(0, PAGE, sim.stream);
    }
    bar.end_of_run(sim.stream);
    CHECK(bar.free_memory(UINT64_MAX).bytes == PAGE);
    auto again = bar.fault(0, PAGE, sim.stream);
    CHECK(again);
    std::vector<char> found(PAGE), wanted(PAGE);
    vbar::sim::copy_to_host(sim.device, found.data(), again->address(), PAGE, sim.stream);
    sim.stream.synchronize();
    vbar::sim::pattern(wanted.data(), PAGE, 7);
    CHECK(found == wanted);
    const vbar::Statistics told = sim.device.statistics();
    CHECK(told.locked_saved_bytes >= PAGE && told.locked_excess_bytes == 0);
    bar.drop_save(0, PAGE);
}

TEST(a_stream_waits_for_another) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    auto guard = bar.fault(0, PAGE, sim.stream);
    const auto other = vbar::sim::Stream::create(sim.device);
    // It waits before it writes.
    vbar::sim::launch_pattern(sim.device, guard->address(), PAGE, 7, sim.stream, 20000);
    // Without this the copy would be a race, which the device counts and `Sim` looks for at its end.
    other.wait_for(sim.stream);
    std::vector<char> found(PAGE), wanted(PAGE);
    vbar::sim::copy_to_host(sim.device, found.data(), guard->address(), PAGE, other);
    other.synchronize();
    vbar::sim::pattern(wanted.data(), PAGE, 7);
    CHECK(found == wanted);
}

struct Heard {
    std::mutex mutex;
    std::vector<std::string> messages;

    vbar::LogSink sink(LogLevel level) {
        return vbar::LogSink::install(level, [this](LogLevel, std::string_view text) {
            const std::lock_guard lock(mutex);
            messages.emplace_back(text);
        });
    }
    std::size_t count() {
        const std::lock_guard lock(mutex);
        return messages.size();
    }
};

// Opens and closes a device, which the library has something to say about.
static void say() { CHECK(vbar::Device::open(check::small(4))); }

TEST(messages_go_to_the_newest_sink_while_it_lives) {
    Heard one;
    Heard two;
    {
        vbar::LogSink first = one.sink(LogLevel::trace);
        say();
        CHECK(one.count() > 0);
        vbar::LogSink second = two.sink(LogLevel::trace);
        const std::size_t before = one.count();
        say();
        CHECK(two.count() > 0 && one.count() == before);
        // The end of one that was taken over from takes nothing from the newer one.
        first = two.sink(LogLevel::trace);
        const std::size_t so_far = two.count();
        say();
        CHECK(two.count() > so_far);
        vbar::LogSink moved = std::move(first);
        const std::size_t later = two.count();
        say();
        CHECK(two.count() > later);
    }
    const std::size_t at_end = two.count();
    // Nobody hears it now: it waits for who polls.
    say();
    CHECK_EQ(two.count(), at_end);
    const auto message = vbar::poll_log();
    CHECK(message && message->level != LogLevel::off && !message->text.empty());
    vbar::set_log_level(LogLevel::off);
    while (vbar::poll_log()) {
    }
    say();
    CHECK(!vbar::poll_log());
    const auto nobody = [](LogLevel, std::string_view) {};
    CHECK_THROWS(invalid_argument, vbar::LogSink::install(static_cast<LogLevel>(77), nobody));
}

TEST(a_sink_may_call_the_library) {
    std::string version;
    const vbar::LogSink sink = vbar::LogSink::install(
        LogLevel::trace, [&](LogLevel, std::string_view) { version = vbar::version(); });
    say();
    CHECK_EQ(version, std::string(vbar::version()));
    vbar::set_log_level(LogLevel::off);
}
