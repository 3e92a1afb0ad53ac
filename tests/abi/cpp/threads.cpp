// Many threads on one device: what is const may be called by all of them at once.

#include <atomic>
#include <future>
#include <thread>

#include "check.hpp"

using check::PAGE;
using check::Sim;

TEST(threads_read_weights_under_pressure) {
    Sim sim(12);
    constexpr std::uint64_t WEIGHTS = 16;
    const vbar::Bar bar = sim.device.create_bar(WEIGHTS * PAGE);
    std::vector<vbar::Allocation> weights;
    std::vector<std::uint64_t> sums;
    for (std::uint64_t at = 0; at < WEIGHTS; at++) {
        weights.push_back(bar.allocate(PAGE));
        sums.push_back(check::sum(check::pattern(PAGE, at)));
    }
    // Each thread has its stream; who gets a refill writes, and nobody else meanwhile.
    const auto work = [&](std::uint64_t thread) {
        const auto stream = vbar::sim::Stream::create(sim.device);
        const check::Word word(sim.device, stream);
        int resident = 0;
        for (std::uint64_t step = 0; step < 60; step++) {
            const std::uint64_t at = (step * (2 * thread + 1)) % WEIGHTS;
            vbar::Fault fault = weights[at].fault(stream);
            if (vbar::Fill *fill = fault.refill()) {
                vbar::sim::launch_pattern(sim.device, fill->address(), PAGE, at, stream);
                const vbar::Guard guard = fill->commit();
            } else if (fault) {
                CHECK_EQ(word.sum(fault->address(), PAGE), sums[at]);
                resident++;
            }
            bar.prioritise();
        }
        stream.synchronize();
        return resident;
    };
    std::vector<std::future<int>> threads;
    for (std::uint64_t thread = 0; thread < 4; thread++) {
        threads.push_back(std::async(std::launch::async, work, thread));
    }
    int resident = 0;
    for (std::future<int> &thread : threads) resident += thread.get();
    CHECK(resident > 0);
    for (const vbar::Page &page : bar.residency(0, WEIGHTS)) CHECK_EQ(page.pin_count, 0U);
}

TEST(a_guard_ends_on_another_thread) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    vbar::Guard guard = bar.fault(0, PAGE, sim.stream).take();
    auto ended = std::async(std::launch::async,
                            [held = std::move(guard)]() mutable { return held.unpin(); });
    CHECK_EQ(ended.get(), vbar::Status::ok);
    CHECK_EQ(bar.residency(0, 1)[0].pin_count, 0U);
}

TEST(a_bar_ends_while_others_fault_in_it) {
    Sim sim(8);
    vbar::Bar bar = sim.device.create_bar(8 * PAGE);
    const vbar::BarView view = bar;
    std::atomic<bool> started{false};
    auto other = std::async(std::launch::async, [&] {
        const auto stream = vbar::sim::Stream::create(sim.device);
        for (std::uint64_t step = 0;; step++) {
            const auto fault = view.try_fault(step % 8 * PAGE, PAGE, stream);
            started = true;
            if (!fault) return fault.status();
        }
    });
    while (!started) std::this_thread::yield();
    CHECK_EQ(bar.close(), vbar::Status::ok);
    const vbar::Status status = other.get();
    CHECK(status == vbar::Status::stale_handle || status == vbar::Status::closed);
}

TEST(each_thread_has_its_own_sentence) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const auto failing = [&](std::uint64_t offset) {
        for (int step = 0; step < 200; step++) {
            const auto fault = bar.try_fault(offset, 1, sim.stream);
            CHECK_SAYS(fault.message(), std::to_string(offset));
        }
    };
    auto one = std::async(std::launch::async, failing, 1000001);
    auto two = std::async(std::launch::async, failing, 2000002);
    one.get();
    two.get();
}
