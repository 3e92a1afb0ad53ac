// vbar for C++17: the words that vbar.hpp speaks in.
//
// Owns numbers by name, streams, ranges of elements, and the two styles of failure: exceptions
// (`Error`) and results (`Result`). Makes no object of the library; vbar.hpp includes this file.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_TYPES_HPP
#define VBAR_TYPES_HPP

#if __cplusplus < 201703L
#error "vbar.hpp needs C++17: compile with -std=c++17 or newer"
#endif

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "vbar.h"

// Whether functions that throw exist. Files with and without may be linked into one program: their
// types have different names.
#if defined(__cpp_exceptions)
#define VBAR_HAS_EXCEPTIONS 1
#define VBAR_FAILURES throwing
#else
#define VBAR_HAS_EXCEPTIONS 0
#define VBAR_FAILURES returning
#endif

namespace vbar {
inline namespace VBAR_FAILURES {

// Numbers. vbar.h says what each means. A number without a name here comes from a newer library:
// an unknown status is an error, an unknown reason, state or type a new one.

enum class Status : std::int32_t {
    ok = VBAR_STATUS_OK,
    invalid_argument = VBAR_STATUS_INVALID_ARGUMENT,
    stale_handle = VBAR_STATUS_STALE_HANDLE,
    stale_token = VBAR_STATUS_STALE_TOKEN,
    driver_missing = VBAR_STATUS_DRIVER_MISSING,
    driver = VBAR_STATUS_DRIVER,
    device_lost = VBAR_STATUS_DEVICE_LOST,
    device_not_registered = VBAR_STATUS_DEVICE_NOT_REGISTERED,
    already_open = VBAR_STATUS_ALREADY_OPEN,
    unsupported = VBAR_STATUS_UNSUPPORTED,
    no_addresses = VBAR_STATUS_NO_ADDRESSES,
    too_many_mappings = VBAR_STATUS_TOO_MANY_MAPPINGS,
    io = VBAR_STATUS_IO,
    format = VBAR_STATUS_FORMAT,
    file_changed = VBAR_STATUS_FILE_CHANGED,
    timed_out = VBAR_STATUS_TIMED_OUT,
    cancelled = VBAR_STATUS_CANCELLED,
    host_memory = VBAR_STATUS_HOST_MEMORY,
    too_many_pins = VBAR_STATUS_TOO_MANY_PINS,
    process_ending = VBAR_STATUS_PROCESS_ENDING,
    closed = VBAR_STATUS_CLOSED,
    not_found = VBAR_STATUS_NOT_FOUND,
    internal = VBAR_STATUS_INTERNAL,
};

enum class Outcome : std::uint32_t {
    resident = VBAR_OUTCOME_RESIDENT,
    refill = VBAR_OUTCOME_REFILL,
    offloaded = VBAR_OUTCOME_OFFLOADED,
    busy = VBAR_OUTCOME_BUSY,
};

enum class Reason : std::uint32_t {
    none = VBAR_REASON_NONE,
    too_large = VBAR_REASON_TOO_LARGE,
    budget = VBAR_REASON_BUDGET,
    all_pinned = VBAR_REASON_ALL_PINNED,
    above_watermark = VBAR_REASON_ABOVE_WATERMARK,
    driver_memory = VBAR_REASON_DRIVER_MEMORY,
    mappings = VBAR_REASON_MAPPINGS,
    no_addresses = VBAR_REASON_NO_ADDRESSES,
    capture = VBAR_REASON_CAPTURE,
    fence_unknown = VBAR_REASON_FENCE_UNKNOWN,
    fence_pending = VBAR_REASON_FENCE_PENDING,
    quarantined = VBAR_REASON_QUARANTINED,
    host_mapped = VBAR_REASON_HOST_MAPPED,
};

enum class Shortfall : std::uint32_t {
    none = VBAR_SHORTFALL_NONE,
    nothing_resident = VBAR_SHORTFALL_NOTHING_RESIDENT,
    at_floor = VBAR_SHORTFALL_AT_FLOOR,
    all_pinned = VBAR_SHORTFALL_ALL_PINNED,
    fence_unknown = VBAR_SHORTFALL_FENCE_UNKNOWN,
    timed_out = VBAR_SHORTFALL_TIMED_OUT,
};

enum class PageState : std::uint32_t {
    absent = VBAR_PAGE_STATE_ABSENT,
    claimed = VBAR_PAGE_STATE_CLAIMED,
    issued = VBAR_PAGE_STATE_ISSUED,
    resident = VBAR_PAGE_STATE_RESIDENT,
    host_mapped = VBAR_PAGE_STATE_HOST_MAPPED,
    evicting = VBAR_PAGE_STATE_EVICTING,
    quarantined = VBAR_PAGE_STATE_QUARANTINED,
};

enum class Dtype : std::uint32_t {
    other = VBAR_DTYPE_OTHER,
    boolean = VBAR_DTYPE_BOOL,
    f4 = VBAR_DTYPE_F4,
    f6_e2m3 = VBAR_DTYPE_F6_E2M3,
    f6_e3m2 = VBAR_DTYPE_F6_E3M2,
    u8 = VBAR_DTYPE_U8,
    i8 = VBAR_DTYPE_I8,
    f8_e5m2 = VBAR_DTYPE_F8_E5M2,
    f8_e4m3 = VBAR_DTYPE_F8_E4M3,
    f8_e8m0 = VBAR_DTYPE_F8_E8M0,
    f8_e4m3fnuz = VBAR_DTYPE_F8_E4M3FNUZ,
    f8_e5m2fnuz = VBAR_DTYPE_F8_E5M2FNUZ,
    i16 = VBAR_DTYPE_I16,
    u16 = VBAR_DTYPE_U16,
    f16 = VBAR_DTYPE_F16,
    bf16 = VBAR_DTYPE_BF16,
    i32 = VBAR_DTYPE_I32,
    u32 = VBAR_DTYPE_U32,
    f32 = VBAR_DTYPE_F32,
    c64 = VBAR_DTYPE_C64,
    f64 = VBAR_DTYPE_F64,
    i64 = VBAR_DTYPE_I64,
    u64 = VBAR_DTYPE_U64,
};

enum class BudgetSource : std::uint32_t {
    limit = VBAR_BUDGET_SOURCE_LIMIT,
    driver_free = VBAR_BUDGET_SOURCE_DRIVER_FREE,
    driver_refused = VBAR_BUDGET_SOURCE_DRIVER_REFUSED,
    shrunk = VBAR_BUDGET_SOURCE_SHRUNK,
};

// Whether host memory that a VBAR is bound to must be page-locked.
enum class HostLock : std::uint32_t {
    either = VBAR_HOST_LOCK_EITHER,
    required = VBAR_HOST_LOCK_REQUIRED,
};

enum class WaitKind : std::uint32_t {
    claim = VBAR_WAIT_KIND_CLAIM,
    staging = VBAR_WAIT_KIND_STAGING,
    frame = VBAR_WAIT_KIND_FRAME,
    old_mapping = VBAR_WAIT_KIND_OLD_MAPPING,
    ready = VBAR_WAIT_KIND_READY,
    release = VBAR_WAIT_KIND_RELEASE,
    context = VBAR_WAIT_KIND_CONTEXT,
    read = VBAR_WAIT_KIND_READ,
    register_ = VBAR_WAIT_KIND_REGISTER,
};

// How a request that cannot be served is told to PyTorch.
enum class TorchRaise : std::uint32_t {
    nothing = VBAR_TORCH_RAISE_NOTHING,
    runtime_error = VBAR_TORCH_RAISE_RUNTIME_ERROR,
    out_of_memory_error = VBAR_TORCH_RAISE_OUT_OF_MEMORY_ERROR,
};

// What a program does with a memory graph.
enum class TorchGraphStep : std::uint32_t {
    enter = VBAR_TORCH_GRAPH_STEP_ENTER,
    leave = VBAR_TORCH_GRAPH_STEP_LEAVE,
    next = VBAR_TORCH_GRAPH_STEP_NEXT,
    pause = VBAR_TORCH_GRAPH_STEP_PAUSE,
    resume = VBAR_TORCH_GRAPH_STEP_RESUME,
    abort = VBAR_TORCH_GRAPH_STEP_ABORT,
};

enum class TorchBlockState : std::uint32_t {
    allocated = VBAR_TORCH_BLOCK_STATE_ALLOCATED,
    awaiting_free = VBAR_TORCH_BLOCK_STATE_AWAITING_FREE,
    free = VBAR_TORCH_BLOCK_STATE_FREE,
};

enum class LogLevel : std::uint32_t {
    off = VBAR_LOG_LEVEL_OFF,
    error = VBAR_LOG_LEVEL_ERROR,
    warn = VBAR_LOG_LEVEL_WARN,
    info = VBAR_LOG_LEVEL_INFO,
    debug = VBAR_LOG_LEVEL_DEBUG,
    trace = VBAR_LOG_LEVEL_TRACE,
};

enum class Eviction : std::uint32_t {
    aliasing = VBAR_EVICTION_ALIASING,
    strict = VBAR_EVICTION_STRICT,
};

enum class Threads : std::uint32_t {
    // None, or what the device has where it is open already.
    unset = VBAR_THREADS_DEFAULT,
    // "vbar pressure" and "vbar engine", which fetches weights ahead of need, and some that read.
    on = VBAR_THREADS_ON,
    off = VBAR_THREADS_OFF,
};

enum class ContextWaits : std::uint32_t {
    allowed = VBAR_CONTEXT_WAITS_ALLOWED,
    never = VBAR_CONTEXT_WAITS_NEVER,
};

enum class Poison : std::uint32_t { off = VBAR_POISON_OFF, on = VBAR_POISON_ON };

// Whether a frame is cleared before another page has it.
enum class Scrub : std::uint32_t { off = VBAR_SCRUB_OFF, on = VBAR_SCRUB_ON };

// What a range comes to that needs more device frames than it can have; `Fault::host_mapped`.
enum class HostMapped : std::uint32_t { off = VBAR_HOST_MAPPED_OFF, on = VBAR_HOST_MAPPED_ON };

// Where the bytes of a bound file are read from, when page-locked memory does not hold them.
enum class Prefer : std::uint32_t {
    automatic = VBAR_PREFER_AUTO,
    ram = VBAR_PREFER_RAM,
    disk = VBAR_PREFER_DISK,
};

enum class HeldPins : std::uint32_t {
    keep = VBAR_HELD_PINS_KEEP,
    release = VBAR_HELD_PINS_RELEASE,
};

// Which of DLPack's two structs is wanted.
enum class DlpackForm : std::uint32_t {
    versioned = VBAR_DLPACK_FORM_VERSIONED,
    unversioned = VBAR_DLPACK_FORM_UNVERSIONED,
};

// Whether a consumer of DLPack may write.
enum class DlpackAccess : std::uint32_t {
    read_only = VBAR_DLPACK_ACCESS_READ_ONLY,
    writable = VBAR_DLPACK_ACCESS_WRITABLE,
};

// A sentence for a status; a short word for a reason; the safetensors name of a type. The strings
// live for ever. Thread-safe.
[[nodiscard]] inline const char *text(Status status) noexcept {
    return vbar_status_text(static_cast<std::int32_t>(status));
}
[[nodiscard]] inline const char *text(Reason reason) noexcept {
    return vbar_reason_text(static_cast<std::uint32_t>(reason));
}
[[nodiscard]] inline const char *text(Dtype dtype) noexcept {
    return vbar_dtype_text(static_cast<std::uint32_t>(dtype));
}

// The library's version, "0.1.0".
[[nodiscard]] inline const char *version() noexcept { return vbar_version(); }

// A stream: made of a `CUstream` or `cudaStream_t`, or of the same as an unsigned number. nullptr
// is the legacy default stream. It must be valid during the call only, but a guard's stream until
// the guard is gone: a guard names it again when it unpins.
class Stream {
public:
    constexpr Stream(std::nullptr_t) noexcept : value_(0) {}
    template <class T, class = std::enable_if_t<std::is_class_v<T> || std::is_void_v<T>>>
    Stream(T *handle) noexcept : value_(reinterpret_cast<std::uintptr_t>(handle)) {}
    // Unsigned only: a negative number would be `no_stream`, which is a promise.
    template <class T, class = std::enable_if_t<std::is_unsigned_v<T> && !std::is_same_v<T, bool>>,
              class = void>
    constexpr Stream(T handle) noexcept : value_(handle) {}

    [[nodiscard]] constexpr VbarStream get() const noexcept { return value_; }

    friend constexpr bool operator==(Stream one, Stream other) noexcept {
        return one.value_ == other.value_;
    }
    friend constexpr bool operator!=(Stream one, Stream other) noexcept {
        return one.value_ != other.value_;
    }

private:
    VbarStream value_;
};

// No stream: a promise that the work that the call speaks of has finished.
inline constexpr Stream no_stream{VBAR_STREAM_NONE};
// CUDA's CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
inline constexpr Stream legacy_stream{1U};
inline constexpr Stream per_thread_stream{2U};

// Elements that somebody else owns, as `std::span`: made of an array, or of anything with data()
// and size(), `std::span` included, and taken by the constructors of `std::span`. It lives no
// longer than what it was made of.
template <class T> class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(T *elements, std::size_t count) noexcept : elements_(elements), count_(count) {}
    template <class C, class E = std::remove_pointer_t<decltype(std::data(std::declval<C &>()))>,
              class = std::enable_if_t<std::is_convertible_v<E (*)[], T (*)[]> &&
                                       !std::is_same_v<std::decay_t<C>, Span>>>
    constexpr Span(C &&owner) noexcept : elements_(std::data(owner)), count_(std::size(owner)) {}

    [[nodiscard]] constexpr T *data() const noexcept { return elements_; }
    [[nodiscard]] constexpr std::size_t size() const noexcept { return count_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return count_ == 0; }
    [[nodiscard]] constexpr T *begin() const noexcept { return elements_; }
    [[nodiscard]] constexpr T *end() const noexcept { return elements_ + count_; }
    // `index` is below size(), as in std::span.
    [[nodiscard]] constexpr T &operator[](std::size_t index) const noexcept {
        return elements_[index];
    }

private:
    T *elements_ = nullptr;
    std::size_t count_ = 0;
};

// What failed: a status to branch on; what() is a sentence with the numbers, and the driver's code
// by name where there is one. Thrown by every function whose name has no try_, carried by the
// `Result` of the others.
class Error : public std::runtime_error {
public:
    Error(Status status, const char *message) : std::runtime_error(message), status_(status) {}
    // What the call of this thread said that failed last.
    explicit Error(VbarStatus status)
        : Error(static_cast<Status>(status), vbar_last_message()) {}

    [[nodiscard]] Status status() const noexcept { return status_; }

private:
    Status status_;
};

namespace detail {

// What the call of this thread said that failed last, out of the way of those that do not fail.
[[gnu::cold]] [[gnu::noinline]] inline Error failure(VbarStatus status) { return Error(status); }

// Throws an error; where there are no exceptions, prints it and aborts.
[[noreturn]] [[gnu::cold]] inline void raise(const Error &error) {
#if VBAR_HAS_EXCEPTIONS
    throw error;
#else
    std::fprintf(stderr, "vbar: %s (%s)\n", error.what(), text(error.status()));
    std::abort();
#endif
}

template <class T> [[nodiscard]] T sized() noexcept {
    T value{};
    value.size = sizeof(T);
    return value;
}

// A C function would read a text up to its first zero byte, and so take another name or path.
[[nodiscard]] inline bool has_zero(const std::string &text) noexcept {
    return text.find('\0') != std::string::npos;
}

[[nodiscard]] inline Error zero_inside() {
    return Error(Status::invalid_argument, "a text has a zero byte inside");
}

[[nodiscard]] inline Error other_range_count() {
    return Error(Status::invalid_argument, "the steps have not as many ranges as there are");
}

[[nodiscard]] inline Error negative_timeout() {
    return Error(Status::invalid_argument, "a wait's time-out is negative");
}

} // namespace detail

// A value, or why there is none. Reading the value of a failure throws the error; where there are
// no exceptions it prints it and aborts.
template <class T> class [[nodiscard]] Result {
public:
    Result(T value) noexcept(std::is_nothrow_move_constructible_v<T>)
        : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) noexcept : state_(std::in_place_index<1>, std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return ok(); }
    // `Status::ok` for a value.
    [[nodiscard]] Status status() const noexcept {
        const Error *error = std::get_if<1>(&state_);
        return error ? error->status() : Status::ok;
    }
    // Empty for a value.
    [[nodiscard]] const char *message() const noexcept {
        const Error *error = std::get_if<1>(&state_);
        return error ? error->what() : "";
    }

    [[nodiscard]] T &value() & { return *checked(this); }
    [[nodiscard]] const T &value() const & { return *checked(this); }
    [[nodiscard]] T value() && { return std::move(*checked(this)); }
    [[nodiscard]] T &operator*() & { return *checked(this); }
    [[nodiscard]] const T &operator*() const & { return *checked(this); }
    [[nodiscard]] T operator*() && { return std::move(*checked(this)); }
    [[nodiscard]] T *operator->() { return checked(this); }
    [[nodiscard]] const T *operator->() const { return checked(this); }

private:
    template <class Self>
    static auto checked(Self *self) -> decltype(std::get_if<0>(&self->state_)) {
        if (const Error *error = std::get_if<1>(&self->state_)) {
            detail::raise(*error);
        }
        return std::get_if<0>(&self->state_);
    }

    std::variant<T, Error> state_;
};

// Done, or why not.
template <> class [[nodiscard]] Result<void> {
public:
    Result() noexcept = default;
    Result(Error error) noexcept : error_(std::move(error)) {}
    // Of a status of the C functions.
    static Result of(VbarStatus status) {
        return status == VBAR_STATUS_OK ? Result() : Result(Error(status));
    }

    [[nodiscard]] bool ok() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return ok(); }
    [[nodiscard]] Status status() const noexcept { return error_ ? error_->status() : Status::ok; }
    [[nodiscard]] const char *message() const noexcept { return error_ ? error_->what() : ""; }
    // Throws the error of a failure.
    void value() const {
        if (error_) {
            detail::raise(*error_);
        }
    }

private:
    std::optional<Error> error_;
};

// How to open a device. An empty one asks for the defaults.
struct DeviceOptions {
    // "cuda", "cuda:1", "sim", "sim:capacity=8G,seed=7", or "auto". Empty: what the environment
    // variable VBAR_DRIVER says, else "cuda".
    std::string driver;
    // The device's ordinal in that driver; "cuda:1" has its own.
    std::uint32_t ordinal = 0;
    // Whether the library may have threads of its own; it has none unless asked.
    Threads threads = Threads::unset;
    // Most device memory for frames, in bytes; 0: what is free, less the headroom.
    std::uint64_t budget_bytes = 0;
    // The budget in millionths of the device's memory, in its place; 0: none.
    std::uint32_t budget_ppm = 0;
    // Device memory left free for others, in bytes; empty: 256 MiB.
    std::optional<std::uint64_t> headroom_bytes;
    // Size of pages, in bytes, a power of two and a multiple of the granularity; 0: 16 MiB.
    std::uint64_t page_bytes = 0;
    // The `CUcontext` to work in; nullptr: the device's primary context.
    void *context = nullptr;
    Eviction eviction = Eviction::aliasing;
    ContextWaits context_waits = ContextWaits::allowed;
    // Longest time that one call waits; 0: 30 seconds.
    std::chrono::milliseconds wait_timeout{0};
    // Page-locked slots between file and device, at most 64; 0: 4.
    std::uint32_t staging_slot_count = 0;
    Poison poison = Poison::off;
    // That of the first opening while the device is open.
    Scrub scrub = Scrub::off;
    HostMapped host_mapped = HostMapped::off;
    // This and `host_allowance_bytes` are those of the first opening while the device is open.
    Prefer prefer = Prefer::automatic;
    // Most host memory that may be page-locked, in bytes; empty: what the system can spare, which
    // bounds a number too; 0: none, and copies are slower.
    std::optional<std::uint64_t> host_allowance_bytes;
};

namespace detail {
// The same in C's words, where 0 asks for the default. The text is the options' own.
inline VbarDeviceOptions raw(const DeviceOptions &options) {
    VbarDeviceOptions raw = detail::sized<VbarDeviceOptions>();
    raw.driver = options.driver.empty() ? nullptr : options.driver.c_str();
    raw.ordinal = options.ordinal;
    raw.threads = static_cast<std::uint32_t>(options.threads);
    raw.budget_bytes = options.budget_bytes;
    raw.budget_ppm = options.budget_ppm;
    if (options.headroom_bytes) {
        const std::uint64_t bytes = *options.headroom_bytes;
        raw.headroom_bytes = bytes == 0 ? VBAR_HEADROOM_NONE : bytes;
    }
    raw.page_bytes = options.page_bytes;
    raw.context = options.context;
    raw.eviction = static_cast<std::uint32_t>(options.eviction);
    raw.context_waits = static_cast<std::uint32_t>(options.context_waits);
    raw.wait_timeout_ms = static_cast<std::uint64_t>(options.wait_timeout.count());
    raw.staging_slot_count = options.staging_slot_count;
    raw.poison = static_cast<std::uint32_t>(options.poison);
    raw.scrub = static_cast<std::uint32_t>(options.scrub);
    raw.host_mapped = static_cast<std::uint32_t>(options.host_mapped);
    raw.prefer = static_cast<std::uint32_t>(options.prefer);
    if (options.host_allowance_bytes) {
        const std::uint64_t bytes = *options.host_allowance_bytes;
        raw.host_allowance_bytes = bytes == 0 ? VBAR_HOST_ALLOWANCE_NONE : bytes;
    }
    return raw;
}
} // namespace detail

// How much a device may be used for, as it was set, in bytes.
struct Budget {
    // 0: automatic.
    std::uint64_t budget_bytes;
    std::uint64_t headroom_bytes;
};

// What giving memory back came to.
struct Freed {
    std::uint64_t bytes;
    // Why it was less than was asked.
    Shortfall shortfall;
    // Pages that are pinned, for `Shortfall::all_pinned`.
    std::uint32_t pinned_count;
};

// A tensor as a consumer of DLPack is to see it: rows behind each other, without gaps.
struct DlpackTensor {
    // Elements in each dimension, the slowest first.
    Span<const std::uint64_t> shape;
    Dtype dtype;
    DlpackForm form = DlpackForm::versioned;
    DlpackAccess access = DlpackAccess::read_only;
    // Its first byte after the guard's first one.
    std::uint64_t offset = 0;
};

// One page of a residency map.
struct Page {
    // Changes when the page lost its bytes, and never repeats in a process.
    std::uint64_t generation;
    PageState state;
    std::uint32_t pin_count;
};

// What a VBAR is filled from, and which bytes go where: see `BarView::try_bind`; memory is in
// vbar_callbacks.hpp.
[[nodiscard]] inline VbarBindSource file_at(const char *path) noexcept {
    VbarBindSource source{};
    source.path = path;
    source.descriptor = -1;
    return source;
}
// An open descriptor, of which the library keeps a duplicate.
[[nodiscard]] inline VbarBindSource file_of(int descriptor) noexcept {
    VbarBindSource source{};
    source.descriptor = descriptor;
    return source;
}
// `bytes` from `source_offset` of the source with that index, at `bar_offset` of the VBAR.
[[nodiscard]] inline VbarBindSegment segment(std::uint64_t bar_offset, std::uint64_t source_offset,
                                             std::uint64_t bytes,
                                             std::uint32_t source = 0) noexcept {
    return VbarBindSegment{bar_offset, source_offset, bytes, source, 0};
}

// A tensor of a model. Name and shape live until the model is closed.
struct Tensor {
    std::uint64_t index;
    std::string_view name;
    // Elements in each dimension, the slowest first; empty for a scalar.
    Span<const std::uint64_t> shape;
    Dtype dtype;
    std::uint64_t bytes;
    // Its device address, 512-byte aligned; it never changes.
    std::uint64_t address;
    // Its first byte in the model's VBAR, and in its file.
    std::uint64_t bar_offset;
    std::uint64_t file_offset;
    // Index of its file, for `Model::file`.
    std::uint32_t file;
};

// Numbers of a device: the fields of `VbarStatistics`, and its arrays by name.
struct Statistics : VbarStatistics {
    [[nodiscard]] BudgetSource source() const noexcept {
        return static_cast<BudgetSource>(budget_source);
    }
    // How often a fault was refused for a reason; 0 for one that the library has no count of.
    [[nodiscard]] std::uint64_t refusals(Reason reason) const noexcept {
        const auto index = static_cast<std::size_t>(reason);
        return index < std::size(refusal_count) ? refusal_count[index] : 0;
    }
    // Waits of the CPU of one kind: how often, and their nanoseconds together.
    [[nodiscard]] VbarWaitCount waited(WaitKind kind) const noexcept {
        const auto index = static_cast<std::size_t>(kind);
        return index < std::size(waits) ? waits[index] : VbarWaitCount{0, 0};
    }
};

// A message of the library's log.
struct LogMessage {
    LogLevel level;
    std::string text;
};

} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_TYPES_HPP
