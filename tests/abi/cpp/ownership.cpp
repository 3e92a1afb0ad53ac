// Who owns what: moves, ends, explicit closes, and that nothing is given back twice.

#include <optional>

#include "check.hpp"

using check::PAGE;
using check::Sim;
using vbar::Status;

static std::uint32_t pins_of(const vbar::BarView &bar, std::uint32_t page = 0) {
    return bar.residency(page, 1)[0].pin_count;
}

TEST(a_guard_unpins_at_its_end) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    {
        auto one = bar.fault(0, PAGE, sim.stream);
        CHECK(one && one->bytes() == PAGE && one->address() == bar.info().address);
        CHECK(one->stream() == sim.stream && one->signature() != 0);
        auto two = bar.fault(0, PAGE, sim.stream);
        CHECK_EQ(pins_of(bar), 2U);
        CHECK_EQ(two->signature(), one->signature());
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(one->data<float>()), one->address());
    }
    CHECK_EQ(pins_of(bar), 0U);
}

TEST(a_guard_that_was_moved_from_holds_nothing) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(4 * PAGE);
    vbar::Guard first = bar.fault(0, PAGE, sim.stream).take();
    vbar::Guard second = std::move(first);
    CHECK(!first && first.address() == 0 && first.bytes() == 0 && first.signature() == 0);
    CHECK(second && second.bytes() == PAGE);
    CHECK_EQ(first.unpin(), Status::stale_token);
    first.reset();
    CHECK_EQ(pins_of(bar), 1U);

    // Assigning gives back what the target held.
    vbar::Guard other = bar.fault(PAGE, PAGE, sim.stream).take();
    CHECK_EQ(pins_of(bar, 1), 1U);
    other = std::move(second);
    CHECK_EQ(pins_of(bar, 1), 0U);
    CHECK_EQ(pins_of(bar, 0), 1U);
    vbar::Guard &self = other;
    other = std::move(self);
    CHECK(other && pins_of(bar) == 1);
    CHECK_EQ(other.unpin(), Status::ok);
    CHECK_EQ(other.unpin(), Status::stale_token);
    CHECK_EQ(pins_of(bar), 0U);
    // An end after an unpin takes nobody's pin.
    {
        const vbar::Guard kept = bar.fault(0, PAGE, sim.stream).take();
        { const vbar::Guard gone = std::move(other); }
        CHECK_EQ(pins_of(bar), 1U);
    }
}

TEST(a_released_token_is_the_callers) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    VbarToken token{};
    {
        auto fault = bar.fault(0, PAGE, sim.stream);
        token = fault->release();
        CHECK(!*fault && !fault);
    }
    CHECK_EQ(pins_of(bar), 1U);
    CHECK_EQ(vbar_token_unpin(token, sim.stream.get()), VBAR_STATUS_OK);
    CHECK_EQ(vbar_token_unpin(token, sim.stream.get()), VBAR_STATUS_STALE_TOKEN);

    // And a guard takes over what the C functions gave.
    VbarFault raw{};
    CHECK_EQ(vbar_bar_fault(bar.get(), 0, PAGE, sim.stream.get(), &raw), VBAR_STATUS_OK);
    { const vbar::Guard guard(raw, sim.stream); }
    CHECK_EQ(vbar_token_unpin(raw.token, sim.stream.get()), VBAR_STATUS_STALE_TOKEN);
}

TEST(an_outcome_of_a_newer_library_gives_its_pins_back) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    VbarFault raw{};
    CHECK_EQ(vbar_bar_fault(bar.get(), 0, PAGE, sim.stream.get(), &raw), VBAR_STATUS_OK);
    raw.outcome = 99;
    {
        vbar::Fault fault(raw, sim.stream);
        CHECK(!fault && !fault.offloaded() && !fault.busy() && !fault.refill());
        CHECK_EQ(fault.outcome(), static_cast<vbar::Outcome>(99));
        CHECK_EQ(pins_of(bar), 0U);
        CHECK_THROWS(invalid_argument, fault->address());
    }
}

TEST(a_bar_ends_once) {
    Sim sim;
    vbar::Bar bar = sim.device.create_bar(PAGE);
    const vbar::BarView view = bar;
    CHECK_EQ(view.info().page_count, 1U);
    vbar::Bar moved = std::move(bar);
    CHECK(!bar && moved);
    CHECK_SAYS(CHECK_THROWS(stale_handle, bar.info()), "the id is 0");
    CHECK_EQ(view.info().page_count, 1U);
    vbar::Bar &self = moved;
    moved = std::move(self);
    CHECK(moved);
    CHECK_EQ(moved.close(), Status::ok);
    CHECK_EQ(moved.close(), Status::ok);
    CHECK_THROWS(stale_handle, moved.destroy_wait());
    CHECK_THROWS(stale_handle, view.info());

    vbar::Bar one = sim.device.create_bar(PAGE);
    const vbar::BarView gone = one;
    one = sim.device.create_bar(2 * PAGE);
    CHECK_THROWS(stale_handle, gone.info());
    CHECK_EQ(one.info().page_count, 2U);

    const VbarBar raw = one.release();
    CHECK(!one);
    CHECK_EQ(vbar_bar_destroy(raw), VBAR_STATUS_OK);
}

TEST(an_allocation_ends_with_its_bar) {
    Sim sim;
    vbar::Allocation allocation;
    CHECK_THROWS(stale_handle, allocation.fault(sim.stream));
    {
        const vbar::Bar bar = sim.device.create_bar(PAGE);
        allocation = bar.allocate(1000);
        CHECK(allocation.bytes() == 1000 && allocation.bar_offset() == 0);
        CHECK_EQ(bar.allocate(8).bar_offset(), 1024U);
        CHECK(allocation.fault(sim.stream).refill());
    }
    CHECK_THROWS(stale_handle, allocation.fault(sim.stream));
    CHECK_THROWS(stale_handle, allocation.invalidate());
}

TEST(objects_end_in_any_order) {
    std::optional<Sim> sim(std::in_place);
    std::optional<vbar::Bar> bar = sim->device.create_bar(PAGE);
    auto guard = bar->fault(0, PAGE, vbar::no_stream);
    CHECK(guard);
    bar.reset();
    // The VBAR's memory goes with its last guard.
    CHECK_EQ(guard->unpin(vbar::no_stream), Status::ok);

    vbar::Bar late = sim->device.create_bar(PAGE);
    CHECK_EQ(sim->device.close(), Status::ok);
    CHECK_EQ(sim->device.close(), Status::ok);
    CHECK_THROWS(stale_handle, sim->device.info());
    // What was made with the device lives on.
    CHECK(late.fault(0, PAGE, vbar::no_stream));
    late.destroy_wait();
}

TEST(a_device_moves_and_nothing_is_left) {
    vbar::Device device = vbar::Device::open(check::small(8));
    const vbar::sim::Control control = vbar::sim::Control::open(device);
    vbar::Device other = std::move(device);
    CHECK(!device && other);
    CHECK_THROWS(stale_handle, device.create_bar(PAGE));
    {
        const auto stream = vbar::sim::Stream::create(other);
        vbar::Bar bar = other.create_bar(4 * PAGE);
        const vbar::Allocation allocation = bar.allocate(PAGE);
        auto fault = allocation.fault(stream);
        vbar::sim::launch_pattern(other, allocation.address(), PAGE, 1, stream);
        const vbar::Guard guard = fault.refill()->commit();
    }
    {
        vbar::Bar bar = other.create_bar(4 * PAGE);
        CHECK(bar.fault(0, 2 * PAGE, vbar::no_stream));
        bar.destroy_wait();
    }
    CHECK(control.live().reservation_count <= 1);
    other = vbar::Device();
    const VbarSimLive live = control.live();
    CHECK_EQ(live.frame_count, 0U);
    CHECK_EQ(live.reservation_count, 0U);
    CHECK_EQ(live.mapping_count, 0U);
    CHECK_EQ(live.locked_bytes, 0U);
    CHECK_EQ(live.event_count, 0U);
    CHECK_EQ(live.stream_count, 0U);
    CHECK(control.violations().empty());
}

TEST(a_model_ends_once) {
    Sim sim;
    vbar::Model none;
    CHECK_THROWS(stale_handle, none.info());
    CHECK_THROWS(stale_handle, none.bar());
    CHECK_EQ(none.close(), Status::ok);
}

TEST(sim_objects_move) {
    Sim sim;
    vbar::sim::Stream one = vbar::sim::Stream::create(sim.device);
    const VbarStream number = one.get();
    vbar::sim::Stream two = std::move(one);
    CHECK_EQ(two.get(), number);
    two = vbar::sim::Stream::create(sim.device);
    CHECK(two.get() != number);
    vbar::sim::Control control = std::move(sim.control);
    CHECK(control.calls("cuStreamCreate") > 0);
    CHECK_THROWS(stale_handle, sim.control.calls("cuStreamCreate"));
    sim.control = std::move(control);
}
