// What faults come to: resident, refilled, offloaded, busy; several at once; what guards tell.

#include "check.hpp"

using check::PAGE;
using check::Sim;
using vbar::Outcome;
using vbar::Reason;
using vbar::Status;

// Writes the pattern of `seed` where the fault asks for it.
static vbar::Guard filled(const Sim &sim, vbar::Fault fault, std::uint64_t seed) {
    vbar::Fill *fill = fault.refill();
    CHECK(fill);
    vbar::sim::launch_pattern(sim.device, fill->address(), fill->bytes(), seed, fill->stream());
    return fill->commit();
}

TEST(a_fault_reads_as_its_guard) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(2 * PAGE);
    if (auto guard = bar.fault(100, 200, sim.stream)) {
        CHECK_EQ(guard->address(), bar.info().address + 100);
        CHECK_EQ((*guard).bytes(), 200U);
        CHECK_EQ(guard.outcome(), Outcome::resident);
        CHECK_EQ(guard.reason(), Reason::none);
        CHECK(!guard.offloaded() && !guard.busy() && !guard.refill());
    } else {
        CHECK(!"resident");
    }
}

TEST(an_offloaded_range_says_why_and_pins_nothing) {
    Sim sim(4);
    const vbar::Bar bar = sim.device.create_bar(8 * PAGE);
    auto fault = bar.fault(0, 8 * PAGE, sim.stream);
    CHECK(!fault && fault.offloaded());
    CHECK_EQ(fault.outcome(), Outcome::offloaded);
    CHECK_EQ(fault.reason(), Reason::too_large);
    CHECK_EQ(fault.needed_bytes(), 8 * PAGE);
    CHECK(!fault.host_mapped());
    CHECK_EQ(std::string(vbar::text(fault.reason())), "too_large");
    CHECK_SAYS(CHECK_THROWS(invalid_argument, fault->address()), "test it first");
    CHECK_THROWS(invalid_argument, fault.take());

    const auto all = bar.fault(0, 4 * PAGE, sim.stream);
    CHECK(all);
    const vbar::Bar other = sim.device.create_bar(PAGE);
    CHECK_EQ(other.fault(0, PAGE, sim.stream).reason(), Reason::all_pinned);
    CHECK(sim.device.statistics().refusals(Reason::all_pinned) > 0);
}

TEST(a_weight_is_written_read_evicted_and_asked_for_again) {
    Sim sim(4);
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    const vbar::Allocation weight = bar.allocate(2 * PAGE);
    const std::uint64_t expected = check::sum(check::pattern(2 * PAGE, 7));
    std::uint64_t signature = 0;
    {
        const vbar::Guard guard = filled(sim, weight.fault(sim.stream), 7);
        CHECK(guard && guard.address() == weight.address() && guard.bytes() == 2 * PAGE);
        CHECK_EQ(sim.sum(guard.address(), guard.bytes()), expected);
        signature = guard.signature();
    }
    {
        auto fault = weight.fault(sim.stream);
        CHECK(fault && fault->signature() == signature);
    }
    const vbar::Freed freed = bar.free_memory(UINT64_MAX);
    CHECK_EQ(freed.bytes, 2 * PAGE);
    // Asked for everything, it gave all there was.
    CHECK_EQ(freed.shortfall, vbar::Shortfall::nothing_resident);
    bar.prioritise();
    auto again = weight.fault(sim.stream);
    CHECK_EQ(again.outcome(), Outcome::refill);
    CHECK(again.refill()->signature() != signature);
    const vbar::Guard guard = filled(sim, std::move(again), 7);
    CHECK_EQ(sim.sum(guard.address(), guard.bytes()), expected);
}

TEST(a_fill_that_ends_without_a_commit_is_asked_for_again) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    { auto fault = weight.fault(sim.stream); CHECK(fault.refill()); }
    CHECK_EQ(bar.residency(0, 1)[0].pin_count, 0U);
    auto fault = weight.fault(sim.stream);
    CHECK(fault.refill() && *fault.refill());
    vbar::Guard guard = filled(sim, std::move(fault), 1);
    CHECK(guard);
    // Only what asked for a refill can be committed, and once.
    CHECK_EQ(vbar_token_commit(guard.get(), 0), VBAR_STATUS_INVALID_ARGUMENT);
    guard.reset();
    weight.invalidate();
    CHECK(weight.fault(sim.stream).refill());
}

TEST(a_commit_that_fails_keeps_the_fill) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    auto fault = weight.fault(sim.stream);
    vbar::Fill *fill = fault.refill();
    CHECK(fill);
    vbar::sim::launch_pattern(sim.device, fill->address(), PAGE, 1, sim.stream);
    sim.control.fail("cuEventRecord", 0, UINT64_MAX, 999);
    CHECK_THROWS(driver, fill->commit());
    CHECK(*fill && fill->bytes() == PAGE);
    CHECK_EQ(weight.fault(sim.stream).outcome(), Outcome::busy);
    sim.control.heal();
    const vbar::Guard guard = fill->commit();
    CHECK(guard && !*fill);
    CHECK_THROWS(stale_token, fill->commit());
}

TEST(one_caller_fills_and_others_are_told) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    auto fault = weight.fault(sim.stream);
    CHECK(fault.refill());
    auto second = weight.fault(sim.stream);
    CHECK(second.busy() && !second && !second.offloaded() && !second.refill());
    CHECK_EQ(second.reason(), Reason::none);
    const vbar::Guard guard = filled(sim, std::move(fault), 3);
    CHECK(weight.fault(sim.stream));
    CHECK(weight.fault_wait(sim.stream));
}

TEST(a_fill_is_committed_on_the_stream_that_wrote) {
    Sim sim;
    const auto writer = vbar::sim::Stream::create(sim.device);
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    const std::string bytes = check::pattern(PAGE, 5);
    auto fault = weight.fault(writer);
    CHECK(fault.refill());
    vbar::sim::copy_to_device(sim.device, weight.address(), bytes.data(), bytes.size(), writer);
    vbar::Guard guard = fault.refill()->commit(writer);
    // Another stream faults for itself, and so comes after the write.
    auto reader = weight.fault(sim.stream);
    CHECK_EQ(sim.sum(reader->address(), PAGE), check::sum(bytes));
    writer.synchronize();
    CHECK_EQ(guard.unpin(), Status::ok);
}

TEST(a_second_stream_keeps_the_bytes_too) {
    Sim sim(2);
    const auto second = vbar::sim::Stream::create(sim.device);
    const vbar::Bar words = sim.device.create_bar(PAGE);
    const vbar::Allocation word = words.allocate(8);
    auto wanted = word.fault(sim.stream);
    CHECK(wanted.refill());
    const std::uint64_t zero = 0;
    vbar::sim::copy_to_device(sim.device, word.address(), &zero, sizeof zero, sim.stream);
    const vbar::Guard held = wanted.refill()->commit();
    sim.stream.synchronize();

    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    vbar::Guard guard = filled(sim, weight.fault(sim.stream), 11);
    sim.stream.synchronize();
    // A kernel that is not done when its guard ends.
    vbar::sim::launch_checksum(sim.device, weight.address(), PAGE, word.address(), second, 20000);
    guard.also_used_on(second);
    held.also_used_on(second);
    guard.reset();
    // The next weight takes the frame, and waits on its stream for both that used it.
    const vbar::Bar newer = sim.device.create_bar(PAGE);
    const vbar::Allocation next = newer.allocate(PAGE);
    auto fault = next.fault(sim.stream);
    const vbar::Guard other = filled(sim, std::move(fault), 12);
    sim.stream.synchronize();
    second.synchronize();
    std::uint64_t told = 0;
    vbar::sim::copy_to_host(sim.device, &told, word.address(), sizeof told, second);
    second.synchronize();
    CHECK_EQ(told, check::sum(check::pattern(PAGE, 11)));
}

TEST(several_ranges_are_resident_together_or_not_at_all) {
    Sim sim(4);
    const vbar::Bar one = sim.device.create_bar(4 * PAGE);
    const vbar::Bar two = sim.device.create_bar(4 * PAGE);
    const std::vector<VbarRange> ranges{one.range(0, PAGE), two.range(100, PAGE),
                                        one.range(PAGE, 8)};
    auto faults = sim.device.fault_many(ranges, sim.stream);
    CHECK(faults && faults.size() == 3 && faults.reason() == Reason::none);
    CHECK_EQ(faults[1].address(), two.info().address + 100);
    for (const vbar::Guard &guard : faults) CHECK(guard && guard.stream() == sim.stream);
    CHECK_EQ(faults[2].unpin(), Status::ok);
    std::vector<vbar::Guard> guards = faults.take();
    CHECK(guards.size() == 3 && !guards[2] && guards[0]);

    const VbarRange too_many[] = {one.range(2 * PAGE, 2 * PAGE), two.range(2 * PAGE, 2 * PAGE)};
    auto refused = sim.device.fault_many(too_many, sim.stream);
    CHECK(!refused && refused.size() == 0 && refused.begin() == refused.end());
    CHECK_EQ(refused.outcome(), Outcome::offloaded);
    CHECK(refused.reason() != Reason::none);
    CHECK_EQ(one.residency(2, 1)[0].pin_count, 0U);

    CHECK(sim.device.fault_many({}, sim.stream));
    const VbarRange outside[] = {one.range(0, PAGE), one.range(0, 99 * PAGE)};
    CHECK_THROWS(invalid_argument, sim.device.fault_many(outside, sim.stream));
    guards.clear();
    CHECK_EQ(one.residency(0, 1)[0].pin_count, 0U);
}

TEST(guards_of_several_ranges_end_together) {
    Sim sim(4);
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    const std::vector<VbarRange> ranges{bar.range(0, 8), bar.range(8, 8), bar.range(PAGE, 8)};
    const auto pins = [&] { return bar.residency(0, 1)[0].pin_count; };
    vbar::Guards kept;
    CHECK(kept.empty() && kept.unpin() == Status::ok);
    {
        auto faults = sim.device.fault_many(ranges, sim.stream);
        CHECK(faults && pins() == 2);
        // One that is moved out gives back its own, whenever that is.
        const vbar::Guard first = std::move(faults[0]);
        CHECK(!faults[0] && first);
        CHECK_EQ(faults.guards().unpin(), Status::ok);
        CHECK_EQ(pins(), 1U);
        CHECK(faults.size() == 0 && faults.guards().unpin() == Status::ok);
        kept = std::move(sim.device.fault_many(ranges, sim.stream).guards());
        CHECK_EQ(pins(), 3U);
    }
    CHECK_EQ(pins(), 2U);
    CHECK(bar.end_of_run(sim.stream, vbar::HeldPins::release) > 0);
    CHECK_EQ(kept.unpin(), Status::stale_token);
    CHECK(kept.empty() && pins() == 0);
    {
        const auto faults = sim.device.fault_many(ranges, sim.stream);
        CHECK(faults && pins() == 2);
    }
    CHECK_EQ(pins(), 0U);
}

TEST(an_unpin_names_the_stream_that_used_the_bytes) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    auto stream = vbar::sim::Stream::create(sim.device);
    auto fault = bar.fault(0, PAGE, stream);
    CHECK_EQ(fault->unpin(sim.stream), Status::ok);
    fault = bar.fault(0, PAGE, stream);
    stream = vbar::sim::Stream::create(sim.device);
    // The stream was destroyed before the guard ended.
    CHECK_EQ(fault->unpin(vbar::no_stream), Status::ok);
}

TEST(a_forced_end_of_run_makes_guards_stale) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(2 * PAGE);
    auto kept = bar.fault(0, PAGE, sim.stream);
    CHECK_EQ(bar.end_of_run(sim.stream), 1U);
    CHECK_EQ(bar.residency(0, 1)[0].pin_count, 1U);
    auto more = bar.fault(0, 2 * PAGE, sim.stream);
    CHECK_EQ(bar.end_of_run(sim.stream, vbar::HeldPins::release), 2U);
    CHECK_EQ(kept->unpin(), Status::stale_token);
    CHECK_EQ(bar.residency(0, 1)[0].pin_count, 0U);
}

TEST(residency_ranks_and_marks) {
    Sim sim(4);
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    { CHECK(bar.fault(0, 2 * PAGE, sim.stream)); }
    sim.stream.synchronize();
    const std::vector<vbar::Page> pages = bar.residency(0, 4);
    CHECK(pages[0].state == vbar::PageState::resident && pages[0].generation != 0);
    CHECK_EQ(pages[3].state, vbar::PageState::absent);
    CHECK_THROWS(invalid_argument, bar.residency(3, 2));
    CHECK(bar.residency(4, 0).empty());

    bar.set_class(-3);
    bar.set_floor(1);
    bar.deprioritise();
    CHECK(bar.info().priority_class == -3 && bar.info().floor == 1);
    CHECK_EQ(bar.free_memory(UINT64_MAX).shortfall, vbar::Shortfall::at_floor);
    bar.end_of_run(sim.stream);
    bar.set_watermark(1);
    CHECK_EQ(bar.fault(PAGE, PAGE, sim.stream).reason(), Reason::above_watermark);
    bar.prioritise();
    CHECK(bar.fault(PAGE, PAGE, sim.stream));
}

// Which of two VBARs loses its page to a third one, after `change`.
template <class Change> static int loser(Change change) {
    Sim sim(2);
    const vbar::Bar one = sim.device.create_bar(PAGE);
    const vbar::Bar two = sim.device.create_bar(PAGE);
    for (const vbar::Bar *bar : {&one, &two}) {
        bar->prioritise();
        CHECK(bar->fault(0, PAGE, sim.stream));
    }
    change(one, two);
    // A page whose last use no fence covers yet, or that is still in use, is passed over while
    // another one is not: this records a fence behind both.
    two.end_of_run(sim.stream);
    sim.stream.synchronize();
    const vbar::Bar three = sim.device.create_bar(PAGE);
    three.set_class(5);
    CHECK(three.fault(0, PAGE, sim.stream));
    sim.stream.synchronize();
    CHECK_EQ(one.info().resident_count + two.info().resident_count, 1U);
    return one.info().resident_count == 0 ? 1 : 2;
}

TEST(ranks_say_who_loses_pages) {
    using Bar = const vbar::Bar &;
    CHECK_EQ(loser([](Bar, Bar) {}), 1);
    CHECK_EQ(loser([](Bar, Bar two) { two.deprioritise(); }), 2);
    CHECK_EQ(loser([](Bar one, Bar) { one.prioritise(); }), 2);
    CHECK_EQ(loser([](Bar one, Bar) { one.set_class(1); }), 2);
    CHECK_EQ(loser([](Bar, Bar two) { two.set_class(-1); }), 2);
}
