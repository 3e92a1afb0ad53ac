// A hit and the end of its guard ask operator new for nothing, in either style. That the library
// asks its own allocator for nothing is tested beside it (tests/hit_allocates_nothing.rs).

#include <cstdio>
#include <cstdlib>
#include <new>

#include "vbar_sim.hpp"

static unsigned long asked = 0;

[[gnu::noinline]] void *operator new(std::size_t bytes) {
    asked++;
    if (void *memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void *memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }

constexpr std::uint64_t PAGE = 64 * 1024;

// Whether a thousand hits asked for nothing.
template <class Hit> static bool quiet(const char *name, Hit hit) {
    const unsigned long before = asked;
    for (int step = 0; step < 1000; step++) hit();
    if (asked != before) std::printf("%s: %lu allocations\n", name, asked - before);
    return asked == before;
}

int main() {
    vbar::DeviceOptions options;
    options.driver = "sim:capacity=1M,granularity=64K,address_space=8G";
    options.page_bytes = PAGE;
    options.headroom_bytes = 0;
    options.budget_bytes = 8 * PAGE;
    const auto device = vbar::Device::open(options);
    const auto stream = vbar::sim::Stream::create(device);
    const vbar::Bar bar = device.create_bar(4 * PAGE);
    const vbar::Allocation weight = bar.allocate(PAGE);
    {
        auto fault = weight.fault(stream);
        vbar::sim::launch_pattern(device, weight.address(), PAGE, 1, stream);
        const vbar::Guard guard = fault.refill()->commit();
    }
    stream.synchronize();

    // That the counting counts.
    const unsigned long before = asked;
    operator delete(operator new(1));
    bool good = asked == before + 1;

    good &= quiet("fault", [&] { return bool(bar.fault(0, PAGE, stream)); });
    good &= quiet("try_fault", [&] { return bool(bar.try_fault(0, 100, stream)); });
    good &= quiet("moved", [&] {
        vbar::Guard guard = bar.fault(0, PAGE, stream).take();
        const vbar::Guard other = std::move(guard);
        return other.bytes() == PAGE;
    });
    good &= quiet("allocation", [&] { return bool(weight.fault(stream)); });
    good &= quiet("unpin", [&] {
        return bar.fault(0, PAGE, stream)->unpin() == vbar::Status::ok;
    });
    const vbar::Statistics statistics = device.statistics();
    good &= statistics.hit_count >= 5000 && statistics.miss_count <= 1;
    std::printf("%s\n", good ? "a hit allocates nothing" : "a hit allocates");
    return good ? 0 : 1;
}
