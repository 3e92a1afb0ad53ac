// vbar for C++17: the library's messages, for a callable or for who polls.
//
// Owns the one place that a process has for them. vbar.hpp includes this file.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_LOG_HPP
#define VBAR_LOG_HPP

#include <atomic>
#include <memory>

#include "vbar_types.hpp"

namespace vbar {
inline namespace VBAR_FAILURES {

namespace detail {
// Which sink the library delivers to.
inline std::atomic<const void *> delivered_to{nullptr};
} // namespace detail

// Takes the library's messages, until it ends: `call(level, text)` for each of `level` and more
// serious ones, on whichever thread is about to leave a call of the library, one at a time; `text`
// lives during the call, which may call the library. A throw of `call` ends the program. The
// process has one place for messages: a newer sink takes over. Make and end sinks on one thread.
class [[nodiscard]] LogSink {
public:
    // Errors: unsupported where the program has a Rust logger, which takes the messages.
    template <class F> static Result<LogSink> try_install(LogLevel level, F call) {
        const auto free = [](void *held) { delete static_cast<F *>(held); };
        LogSink sink(Held(new F(std::move(call)), free));
        VbarStatus status = vbar_log_set_callback(deliver<F>, sink.held_.get());
        if (status == VBAR_STATUS_OK) {
            detail::delivered_to = sink.held_.get();
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
            held_ = std::move(other.held_);
        }
        return *this;
    }
    ~LogSink() { end(); }

private:
    using Held = std::unique_ptr<void, void (*)(void *)>;

    explicit LogSink(Held held) noexcept : held_(std::move(held)) {}

    template <class F>
    static void deliver(std::uint32_t level, const char *message, void *user) noexcept {
        (*static_cast<F *>(user))(static_cast<LogLevel>(level), std::string_view(message));
    }

    // A sink that was taken over from is not called any more, as the C function promises.
    void end() noexcept {
        const void *own = held_.get();
        if (own && detail::delivered_to.compare_exchange_strong(own, nullptr)) {
            static_cast<void>(vbar_log_set_callback(nullptr, nullptr));
        }
        held_.reset();
    }

    Held held_;
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

} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_LOG_HPP
