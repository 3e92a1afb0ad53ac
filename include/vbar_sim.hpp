// vbar for C++17: the simulated device, for tests of programs that use the library.
//
// Header-only over vbar_sim.h, which says what each call means; in the manner of vbar.hpp: a try_
// returns a `Result`, its namesake throws. Nothing here works on a real device: `unsupported`.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_SIM_HPP
#define VBAR_SIM_HPP

#include "vbar.hpp"
#include "vbar_sim.h"

namespace vbar {
inline namespace VBAR_FAILURES {
namespace sim {

// Which calls a capture forbids: the numbers of `CUstreamCaptureMode`.
enum class CaptureMode : std::uint32_t { global = 0, this_thread = 1, relaxed = 2 };

// What was captured on a stream. Ending it lets go what it kept resident, once its launches ran.
class [[nodiscard]] Graph {
public:
    // Owns nothing.
    Graph() noexcept = default;
    // Takes over a graph of the C functions.
    Graph(VbarDevice device, VbarSimGraph graph) noexcept : device_(device), graph_(graph) {}
    Graph(Graph &&other) noexcept : device_(other.device_), graph_(other.release()) {}
    Graph &operator=(Graph &&other) noexcept {
        if (this != &other) {
            destroy();
            device_ = other.device_;
            graph_ = other.release();
        }
        return *this;
    }
    ~Graph() { destroy(); }

    explicit operator bool() const noexcept { return graph_.id != 0; }
    [[nodiscard]] VbarSimGraph get() const noexcept { return graph_; }
    // Hands the graph to the caller, who gives it to `vbar_sim_graph_destroy`.
    [[nodiscard]] VbarSimGraph release() noexcept { return std::exchange(graph_, VbarSimGraph{}); }

    // Enqueues everything that was captured, in the order of its recording.
    Result<void> try_launch(vbar::Stream stream) const {
        return Result<void>::of(vbar_sim_graph_launch(device_, graph_, stream.get()));
    }
#if VBAR_HAS_EXCEPTIONS
    void launch(vbar::Stream stream) const { try_launch(stream).value(); }
#endif

private:
    void destroy() noexcept {
        if (graph_.id != 0) {
            static_cast<void>(vbar_sim_graph_destroy(release()));
        }
    }

    VbarDevice device_{};
    VbarSimGraph graph_{};
};

// A stream of a simulated device, destroyed with it. It must end before its device does.
class [[nodiscard]] Stream {
public:
    // Makes a non-blocking stream. Errors: stale_handle, unsupported.
    static Result<Stream> try_create(const Device &device) {
        VbarStream stream = 0;
        if (const VbarStatus status = vbar_sim_stream_create(device.get(), &stream)) {
            return Error(status);
        }
        return Stream(device.get(), stream);
    }
    Stream(Stream &&other) noexcept
        : device_(std::exchange(other.device_, VbarDevice{})), stream_(other.stream_) {}
    Stream &operator=(Stream &&other) noexcept {
        if (this != &other) {
            destroy();
            device_ = std::exchange(other.device_, VbarDevice{});
            stream_ = other.stream_;
        }
        return *this;
    }
    ~Stream() { destroy(); }

    operator vbar::Stream() const noexcept { return stream_; }
    [[nodiscard]] VbarStream get() const noexcept { return stream_; }

    // Waits until everything that was enqueued has run.
    Result<void> try_synchronize() const {
        return Result<void>::of(vbar_sim_stream_synchronize(device_, stream_));
    }
    // Later work here waits for what was enqueued on another stream by now.
    Result<void> try_wait_for(vbar::Stream other) const {
        return Result<void>::of(vbar_sim_stream_wait(device_, stream_, other.get()));
    }
    // Nothing more runs until it is released.
    Result<void> try_hold() const {
        return Result<void>::of(vbar_sim_stream_hold(device_, stream_));
    }
    Result<void> try_release() const {
        return Result<void>::of(vbar_sim_stream_release(device_, stream_));
    }
    // Until the end of the capture what is enqueued is recorded and does not run.
    Result<void> try_begin_capture(CaptureMode mode = CaptureMode::global) const {
        return Result<void>::of(
            vbar_sim_stream_begin_capture(device_, stream_, static_cast<std::uint32_t>(mode)));
    }
    // Errors: driver where there is no capture, or it was broken.
    Result<Graph> try_end_capture() const {
        VbarSimGraph graph{};
        if (const VbarStatus status = vbar_sim_stream_end_capture(device_, stream_, &graph)) {
            return Error(status);
        }
        return Graph(device_, graph);
    }
#if VBAR_HAS_EXCEPTIONS
    static Stream create(const Device &device) { return try_create(device).value(); }
    void synchronize() const { try_synchronize().value(); }
    void wait_for(vbar::Stream other) const { try_wait_for(other).value(); }
    void hold() const { try_hold().value(); }
    void release() const { try_release().value(); }
    void begin_capture(CaptureMode mode = CaptureMode::global) const {
        try_begin_capture(mode).value();
    }
    Graph end_capture() const { return try_end_capture().value(); }
#endif

private:
    Stream(VbarDevice device, VbarStream stream) noexcept : device_(device), stream_(stream) {}

    void destroy() noexcept {
        if (device_.id != 0) {
            static_cast<void>(vbar_stream_retire(device_, stream_));
            static_cast<void>(vbar_sim_stream_destroy(device_, stream_));
        }
    }

    VbarDevice device_{};
    VbarStream stream_ = 0;
};

// What launches and copies on a simulated device. Addresses are device addresses; those of kernels
// are multiples of 8. Delays are microseconds that the kernel waits before it starts.

// Adds the checksum of `bytes` bytes at `source` to the 64-bit word at `target`.
inline Result<void> try_launch_checksum(const Device &device, std::uint64_t source,
                                        std::uint64_t bytes, std::uint64_t target,
                                        vbar::Stream stream, std::uint64_t delay_us = 0) {
    return Result<void>::of(vbar_sim_launch_checksum(device.get(), source, bytes, target, delay_us,
                                                     stream.get()));
}
// Writes the pattern of `seed` over `bytes` bytes at `target`.
inline Result<void> try_launch_pattern(const Device &device, std::uint64_t target,
                                       std::uint64_t bytes, std::uint64_t seed,
                                       vbar::Stream stream, std::uint64_t delay_us = 0) {
    return Result<void>::of(vbar_sim_launch_pattern(device.get(), target, bytes, seed, delay_us,
                                                    stream.get()));
}
// Touches nothing.
inline Result<void> try_launch_sleep(const Device &device, vbar::Stream stream,
                                     std::uint64_t delay_us) {
    return Result<void>::of(vbar_sim_launch_sleep(device.get(), delay_us, stream.get()));
}
// `source` stays as it is until the copy has run.
inline Result<void> try_copy_to_device(const Device &device, std::uint64_t target,
                                       const void *source, std::size_t bytes,
                                       vbar::Stream stream) {
    return Result<void>::of(
        vbar_sim_copy_to_device(device.get(), target, source, bytes, stream.get()));
}
// `target` is not touched until the copy has run.
inline Result<void> try_copy_to_host(const Device &device, void *target, std::uint64_t source,
                                     std::size_t bytes, vbar::Stream stream) {
    return Result<void>::of(
        vbar_sim_copy_to_host(device.get(), target, source, bytes, stream.get()));
}
#if VBAR_HAS_EXCEPTIONS
inline void launch_checksum(const Device &device, std::uint64_t source, std::uint64_t bytes,
                            std::uint64_t target, vbar::Stream stream,
                            std::uint64_t delay_us = 0) {
    try_launch_checksum(device, source, bytes, target, stream, delay_us).value();
}
inline void launch_pattern(const Device &device, std::uint64_t target, std::uint64_t bytes,
                           std::uint64_t seed, vbar::Stream stream, std::uint64_t delay_us = 0) {
    try_launch_pattern(device, target, bytes, seed, stream, delay_us).value();
}
inline void launch_sleep(const Device &device, vbar::Stream stream, std::uint64_t delay_us) {
    try_launch_sleep(device, stream, delay_us).value();
}
inline void copy_to_device(const Device &device, std::uint64_t target, const void *source,
                           std::size_t bytes, vbar::Stream stream) {
    try_copy_to_device(device, target, source, bytes, stream).value();
}
inline void copy_to_host(const Device &device, void *target, std::uint64_t source,
                         std::size_t bytes, vbar::Stream stream) {
    try_copy_to_host(device, target, source, bytes, stream).value();
}
#endif

// The checksum of bytes of the host, as the kernel computes it.
[[nodiscard]] inline std::uint64_t checksum(const void *source, std::size_t bytes) noexcept {
    return vbar_sim_checksum(source, bytes);
}
// Writes to the host what the kernel writes on the device.
inline Result<void> try_pattern(void *target, std::size_t bytes, std::uint64_t seed) {
    return Result<void>::of(vbar_sim_pattern(target, bytes, seed));
}
#if VBAR_HAS_EXCEPTIONS
inline void pattern(void *target, std::size_t bytes, std::uint64_t seed) {
    try_pattern(target, bytes, seed).value();
}
#endif

// The simulated device behind an open one: makes trouble, and tells what it found. It outlives the
// `Device`, so that a test can look at what was left.
class [[nodiscard]] Control {
public:
    // Errors: unsupported on a real device.
    static Result<Control> try_open(const Device &device) {
        VbarSim sim{};
        if (const VbarStatus status = vbar_sim_open(device.get(), &sim)) {
            return Error(status);
        }
        return Control(sim);
    }
    Control(Control &&other) noexcept : sim_(std::exchange(other.sim_, VbarSim{})) {}
    Control &operator=(Control &&other) noexcept {
        if (this != &other) {
            close();
            sim_ = std::exchange(other.sim_, VbarSim{});
        }
        return *this;
    }
    ~Control() { close(); }

    // Copies bytes at a mapped device address to the host, now, whatever streams do.
    Result<void> try_peek(std::uint64_t address, void *target, std::size_t bytes) const {
        return Result<void>::of(vbar_sim_peek(sim_, address, target, bytes));
    }
    // How many bytes of the device other programs use from now on.
    Result<void> try_set_outside_bytes(std::uint64_t bytes) const {
        return Result<void>::of(vbar_sim_set_outside_bytes(sim_, bytes));
    }
    // Lets `count` calls of a verb ("cuMemMap") fail with `code` (a `CUresult`), after `skip`
    // good ones; UINT64_MAX is all of them.
    Result<void> try_fail(const char *verb, std::uint64_t skip, std::uint64_t count,
                          std::int32_t code) const {
        return Result<void>::of(vbar_sim_fail(sim_, verb, skip, count, code));
    }
    // Lets memory, copy and event calls fail with this probability, by `seed`.
    Result<void> try_fail_rate(double probability, std::uint64_t seed) const {
        return Result<void>::of(vbar_sim_fail_rate(sim_, probability, seed));
    }
    // Ends all failures. A lost device stays lost.
    Result<void> try_heal() const { return Result<void>::of(vbar_sim_heal(sim_)); }
    // Loses the device: every later call that touches it returns `code` (a `CUresult`).
    Result<void> try_lose_device(std::int32_t code) const {
        return Result<void>::of(vbar_sim_lose_device(sim_, code));
    }
    // How often a driver verb was called.
    Result<std::uint64_t> try_calls(const char *verb) const {
        std::uint64_t count = 0;
        if (const VbarStatus status = vbar_sim_calls(sim_, verb, &count)) {
            return Error(status);
        }
        return count;
    }
    // What is alive.
    Result<VbarSimLive> try_live() const {
        VbarSimLive live = detail::sized<VbarSimLive>();
        if (const VbarStatus status = vbar_sim_live(sim_, &live)) {
            return Error(status);
        }
        return live;
    }
    // The breaches of CUDA's contract that were found: a sentence each, with the page's history,
    // cut off at 4095 bytes.
    Result<std::vector<std::string>> try_violations() const {
        std::uint64_t count = 0;
        VbarStatus status = vbar_sim_violation_count(sim_, &count);
        std::vector<std::string> told;
        char text[4096];
        for (std::uint64_t index = 0; status == VBAR_STATUS_OK && index < count; index++) {
            status = vbar_sim_violation(sim_, index, text, sizeof text);
            told.emplace_back(status == VBAR_STATUS_OK ? text : "");
        }
        if (status != VBAR_STATUS_OK) {
            return Error(status);
        }
        return told;
    }
#if VBAR_HAS_EXCEPTIONS
    static Control open(const Device &device) { return try_open(device).value(); }
    void peek(std::uint64_t address, void *target, std::size_t bytes) const {
        try_peek(address, target, bytes).value();
    }
    void set_outside_bytes(std::uint64_t bytes) const { try_set_outside_bytes(bytes).value(); }
    void fail(const char *verb, std::uint64_t skip, std::uint64_t count, std::int32_t code) const {
        try_fail(verb, skip, count, code).value();
    }
    void fail_rate(double probability, std::uint64_t seed) const {
        try_fail_rate(probability, seed).value();
    }
    void heal() const { try_heal().value(); }
    void lose_device(std::int32_t code) const { try_lose_device(code).value(); }
    std::uint64_t calls(const char *verb) const { return try_calls(verb).value(); }
    VbarSimLive live() const { return try_live().value(); }
    std::vector<std::string> violations() const { return try_violations().value(); }
#endif

private:
    explicit Control(VbarSim sim) noexcept : sim_(sim) {}

    void close() noexcept {
        if (sim_.id != 0) {
            static_cast<void>(vbar_sim_close(std::exchange(sim_, VbarSim{})));
        }
    }

    VbarSim sim_{};
};

} // namespace sim
} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_SIM_HPP
