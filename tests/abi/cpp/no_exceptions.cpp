// The style that returns, in a file compiled with -fno-exceptions and -fno-rtti: what failures.cpp
// runs. Nothing in here could throw if it wanted to.

#include "vbar_sim.hpp"

#if VBAR_HAS_EXCEPTIONS || defined(__cpp_rtti)
#error "compile this file with -fno-exceptions -fno-rtti"
#endif

namespace {

constexpr std::uint64_t PAGE = 64 * 1024;

// Gives back the line that failed.
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) return __LINE__;                                                         \
    } while (false)

int fills_and_reads(const vbar::Device &device, vbar::Stream stream) {
    const vbar::Result<vbar::Bar> bar = device.try_create_bar(4 * PAGE);
    REQUIRE(bar.ok());
    const vbar::Result<vbar::Allocation> weight = bar->try_allocate(PAGE);
    REQUIRE(weight && weight->bytes() == PAGE);
    vbar::Result<vbar::Fault> fault = weight->try_fault(stream);
    REQUIRE(fault && fault->refill() && !*fault);
    REQUIRE(vbar::sim::try_launch_pattern(device, weight->address(), PAGE, 1, stream).ok());
    vbar::Result<vbar::Guard> guard = fault->refill()->try_commit();
    REQUIRE(guard.ok() && guard->bytes() == PAGE);
    REQUIRE(guard->try_also_used_on(stream).ok());
    REQUIRE(guard->unpin() == vbar::Status::ok);
    REQUIRE(guard->unpin() == vbar::Status::stale_token);
    REQUIRE(weight->try_fault(stream).value());
    REQUIRE(bar->try_fault(0, 99 * PAGE, stream).status() == vbar::Status::invalid_argument);
    const VbarRange ranges[] = {bar->range(0, PAGE), bar->range(2 * PAGE, PAGE)};
    vbar::Result<vbar::Faults> faults = device.try_fault_many(ranges, stream);
    REQUIRE(faults && *faults && faults->size() == 2);
    return 0;
}

int fails_by_status(const vbar::Device &device) {
    vbar::DeviceOptions options;
    options.driver = "no such driver";
    const vbar::Result<vbar::Device> none = vbar::Device::try_open(options);
    REQUIRE(!none && none.status() == vbar::Status::invalid_argument);
    REQUIRE(std::string_view(none.message()).find("no such driver") != std::string_view::npos);
    const vbar::Result<vbar::Model> model = device.try_open_model("/nowhere/model.safetensors");
    REQUIRE(model.status() == vbar::Status::io);
    REQUIRE(vbar::Model().try_tensor(0).status() == vbar::Status::stale_handle);
    REQUIRE(vbar::Model().try_prefetch(0).status() == vbar::Status::stale_handle);
    REQUIRE(vbar::Model().try_schedule_hint({}).status() == vbar::Status::stale_handle);
    REQUIRE(vbar::BarView().try_prefetch(0, 1).status() == vbar::Status::stale_handle);
    REQUIRE(device.try_schedule_hint({}, {}).ok());
    REQUIRE(device.try_statistics()->used_bytes <= 8 * PAGE);
    REQUIRE(vbar::try_set_log_level(static_cast<vbar::LogLevel>(99)).status() ==
            vbar::Status::invalid_argument);
    return 0;
}

} // namespace

extern "C" int run_without_exceptions() {
    vbar::DeviceOptions options;
    options.driver = "sim:capacity=512K,granularity=64K,address_space=8G,seed=99";
    options.page_bytes = PAGE;
    options.headroom_bytes = 0;
    const vbar::Result<vbar::Device> device = vbar::Device::try_open(options);
    REQUIRE(device.ok());
    const vbar::Result<vbar::sim::Control> control = vbar::sim::Control::try_open(*device);
    const vbar::Result<vbar::sim::Stream> stream = vbar::sim::Stream::try_create(*device);
    REQUIRE(control && stream);
    if (const int line = fills_and_reads(*device, *stream)) return line;
    if (const int line = fails_by_status(*device)) return line;
    REQUIRE(stream->try_synchronize().ok());
    REQUIRE(control->try_violations()->empty());
    return 0;
}
