// Guards that a consumer of DLPack takes: the pins are its own from then on.

#include "check.hpp"

using check::PAGE;
using check::Sim;
using vbar::Dtype;

// The structs of dlpack.h, as a consumer has them.
struct DLTensor {
    void *data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    std::int64_t *shape;
    std::int64_t *strides;
    std::uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(DLManagedTensor *);
};
struct DLManagedTensorVersioned {
    std::uint32_t major;
    std::uint32_t minor;
    void *context;
    void (*deleter)(DLManagedTensorVersioned *);
    std::uint64_t flags;
    DLTensor tensor;
};

static std::uint32_t pins_of(const vbar::BarView &bar) { return bar.residency(0, 1)[0].pin_count; }

TEST(a_consumer_of_dlpack_keeps_the_pins) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    vbar::Guard guard = bar.fault(0, PAGE, sim.stream).take();
    const std::uint64_t address = guard.address();
    const std::uint64_t shape[] = {3, 16};
    vbar::DlpackTensor wanted{shape, Dtype::bf16};
    wanted.offset = 512;
    auto *managed = static_cast<DLManagedTensorVersioned *>(guard.export_dlpack(wanted));
    CHECK(!guard && guard.bytes() == 0);
    CHECK_EQ(managed->major, 1U);
    CHECK_EQ(managed->flags, 1U);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(managed->tensor.data), address + 512);
    CHECK(managed->tensor.ndim == 2 && managed->tensor.shape[1] == 16);
    CHECK(managed->tensor.strides[0] == 16 && managed->tensor.bits == 16);
    CHECK_EQ(pins_of(bar), 1U);
    managed->deleter(managed);
    CHECK_EQ(pins_of(bar), 0U);

    guard = bar.fault(0, PAGE, sim.stream).take();
    wanted.form = vbar::DlpackForm::unversioned;
    auto *old = static_cast<DLManagedTensor *>(guard.export_dlpack(wanted));
    CHECK_EQ(old->tensor.shape[0], 3);
    old->deleter(old);
    wanted.form = vbar::DlpackForm::versioned;
    wanted.access = vbar::DlpackAccess::writable;
    guard = bar.fault(0, PAGE, sim.stream).take();
    managed = static_cast<DLManagedTensorVersioned *>(guard.export_dlpack(wanted));
    CHECK_EQ(managed->flags, 0U);
    managed->deleter(managed);
    CHECK_EQ(pins_of(bar), 0U);
}

TEST(what_dlpack_refuses_stays_with_the_guard) {
    Sim sim;
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    vbar::Guard guard = bar.fault(0, PAGE, sim.stream).take();
    const std::uint64_t large[] = {PAGE};
    CHECK_THROWS(invalid_argument, guard.export_dlpack({large, Dtype::f32}));
    const std::uint64_t one[] = {1};
    vbar::DlpackTensor past{one, Dtype::f32};
    past.offset = UINT64_MAX - 3;
    CHECK_THROWS(invalid_argument, guard.export_dlpack(past));
    CHECK_THROWS(unsupported, guard.export_dlpack({one, Dtype::f6_e2m3}));
    CHECK(guard && pins_of(bar) == 1);
    CHECK_EQ(guard.unpin(), vbar::Status::ok);
    CHECK_THROWS(stale_token, guard.export_dlpack({one, Dtype::f32}));
}
