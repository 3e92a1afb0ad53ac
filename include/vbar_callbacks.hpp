// vbar for C++17: callables that the library calls, for its messages, while it waits, and when it is
// done with memory that a VBAR was bound to.
//
// Owns the one place that a process has for messages, and the one that a thread has for a check of
// its waits: each is given back when its object ends. vbar.hpp includes this file.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_CALLBACKS_HPP
#define VBAR_CALLBACKS_HPP

#include <atomic>
#include <memory>

#include "vbar_types.hpp"

namespace vbar {
inline namespace VBAR_FAILURES {

namespace detail {

// A callable of any type, on the heap, where its address stays.
class Callable {
public:
    template <class F>
    explicit Callable(F call)
        : held_(new F(std::move(call)), [](void *held) { delete static_cast<F *>(held); }) {}
    [[nodiscard]] void *get() const noexcept { return held_.get(); }
    void reset() noexcept { held_.reset(); }

private:
    std::unique_ptr<void, void (*)(void *)> held_;
};

// Whose messages are delivered, and who is asked on this thread.
inline std::atomic<const void *> delivered_to{nullptr};
inline thread_local const void *asked_here = nullptr;

} // namespace detail

// Takes the library's messages, until it ends: `call(level, text)` for each of `level` and more
// serious ones, on whichever thread is about to leave a call of the library, one at a time; `text`
// lives during the call, which may call the library. A throw of `call` ends the program. The
// process has one place for messages: a newer sink takes over. Make and end sinks on one thread.
class [[nodiscard]] LogSink {
public:
    // Errors: unsupported where the program has a Rust logger, which takes the messages.
    template <class F> static Result<LogSink> try_install(LogLevel level, F call) {
        LogSink sink{detail::Callable(std::move(call))};
        VbarStatus status = vbar_log_set_callback(deliver<F>, sink.call_.get());
        if (status == VBAR_STATUS_OK) {
            detail::delivered_to = sink.call_.get();
            status = vbar_log_set_level(static_cast<std::uint32_t>(level));
        }
        if (status != VBAR_STATUS_OK) {
            return Error(status);
        }
        return sink;
    }
#if VBAR_HAS_EXCEPTIONS
    template <class F> static LogSink install(LogLevel level, F call) {
        return try_install(level, std::move(call)).value();
    }
#endif
    LogSink(LogSink &&) noexcept = default;
    LogSink &operator=(LogSink &&other) noexcept {
        if (this != &other) {
            end();
            call_ = std::move(other.call_);
        }
        return *this;
    }
    ~LogSink() { end(); }

private:
    explicit LogSink(detail::Callable call) noexcept : call_(std::move(call)) {}

    template <class F>
    static void deliver(std::uint32_t level, const char *message, void *user) noexcept {
        (*static_cast<F *>(user))(static_cast<LogLevel>(level), std::string_view(message));
    }

    // A sink that was taken over from is not called any more, as the C function promises.
    void end() noexcept {
        const void *own = call_.get();
        if (own && detail::delivered_to.compare_exchange_strong(own, nullptr)) {
            static_cast<void>(vbar_log_set_callback(nullptr, nullptr));
        }
        call_.reset();
    }

    detail::Callable call_;
};

// Which messages are kept, for a sink or for `try_poll_log`; `off`, the default, is none.
inline Result<void> try_set_log_level(LogLevel level) {
    return Result<void>::of(vbar_log_set_level(static_cast<std::uint32_t>(level)));
}
// The oldest message that nobody took, if there is one; cut off at 4095 bytes.
inline Result<std::optional<LogMessage>> try_poll_log() {
    char message[4096];
    std::uint32_t level = 0;
    std::size_t bytes = 0;
    if (const VbarStatus status = vbar_log_poll(message, sizeof message, &level, &bytes)) {
        return Error(status);
    }
    if (level == 0) {
        return std::optional<LogMessage>();
    }
    return std::optional<LogMessage>(LogMessage{static_cast<LogLevel>(level), message});
}
#if VBAR_HAS_EXCEPTIONS
inline void set_log_level(LogLevel level) { try_set_log_level(level).value(); }
inline std::optional<LogMessage> poll_log() { return try_poll_log().value(); }
#endif

// Ends waits of the thread that makes it, on all devices, until it ends: `stop()` is asked about
// every 5 ms while a call of the library waits there, with no lock held; true ends the wait with
// `Status::cancelled`. A throw of `stop` ends the program. A thread has one check: a newer one
// takes over. Make and end checks on the thread that they are for.
class [[nodiscard]] WaitCheck {
public:
    template <class F> static Result<WaitCheck> try_install(F stop) {
        WaitCheck check{detail::Callable(std::move(stop))};
        if (const VbarStatus status = vbar_thread_set_wait_check(ask<F>, check.stop_.get())) {
            return Error(status);
        }
        detail::asked_here = check.stop_.get();
        return check;
    }
#if VBAR_HAS_EXCEPTIONS
    template <class F> static WaitCheck install(F stop) {
        return try_install(std::move(stop)).value();
    }
#endif
    WaitCheck(WaitCheck &&) noexcept = default;
    WaitCheck &operator=(WaitCheck &&other) noexcept {
        if (this != &other) {
            end();
            stop_ = std::move(other.stop_);
        }
        return *this;
    }
    ~WaitCheck() { end(); }

private:
    explicit WaitCheck(detail::Callable stop) noexcept : stop_(std::move(stop)) {}

    template <class F> static std::int32_t ask(void *user) noexcept {
        return (*static_cast<F *>(user))() ? 1 : 0;
    }

    void end() noexcept {
        if (stop_.get() && detail::asked_here == stop_.get()) {
            detail::asked_here = nullptr;
            static_cast<void>(vbar_thread_set_wait_check(nullptr, nullptr));
        }
        stop_.reset();
    }

    detail::Callable stop_;
};

// Host memory, which must stay as it is until `release` is called with `context`: exactly once,
// when no copy reads it any more, or before a binding that fails returns. Without a `release` that
// is until `Bar::destroy_wait` or the device's `close` has succeeded.
[[nodiscard]] inline VbarBindSource memory_at(const void *memory, std::uint64_t bytes,
                                              HostLock lock = HostLock::either,
                                              VbarRelease release = nullptr,
                                              void *context = nullptr) noexcept {
    VbarBindSource source{};
    source.descriptor = -1;
    source.host_lock = static_cast<std::uint32_t>(lock);
    source.memory = memory;
    source.memory_bytes = bytes;
    source.release = release;
    source.context = context;
    return source;
}
// The same, for programs that look rather than be called: `*released`, 0 before, is 1 then. Read it
// as an atomic number, with acquire order.
[[nodiscard]] inline VbarBindSource memory_at(const void *memory, std::uint64_t bytes,
                                              std::uint32_t *released,
                                              HostLock lock = HostLock::either) noexcept {
    return memory_at(memory, bytes, lock, vbar_flag_raise, released);
}
// Host memory that a shared owner keeps: the library's share goes when no copy reads it any more.
// What this returns is bound once, or the share stays. Takes memory for the share itself.
template <typename T>
[[nodiscard]] VbarBindSource memory_of(std::shared_ptr<T> owner, const void *memory,
                                       std::uint64_t bytes, HostLock lock = HostLock::either) {
    const VbarRelease release = [](void *share) { delete static_cast<std::shared_ptr<T> *>(share); };
    return memory_at(memory, bytes, lock, release, new std::shared_ptr<T>(std::move(owner)));
}

} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_CALLBACKS_HPP
