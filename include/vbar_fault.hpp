// vbar for C++17: what a fault comes to, and the pins that it gives.
//
// Owns `Guard`, which keeps bytes resident, `Guards`, several of them that end together, `Fill`,
// which is asked to write bytes, and `Fault` and `Faults`, which tell which of them there is. vbar.hpp makes them and includes this file.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_FAULT_HPP
#define VBAR_FAULT_HPP

#include <vector>

#include "vbar_types.hpp"

namespace vbar {
inline namespace VBAR_FAILURES {

class BarView;

// The pins of one fault: what `Guard` and `Fill` have in common.
class Pins {
public:
    Pins(const Pins &) = delete;
    Pins &operator=(const Pins &) = delete;

    // Whether it holds pins: not after a move, an unpin or a commit.
    explicit operator bool() const noexcept { return fault_.token.id != 0; }
    // Device address of the first byte (a `CUdeviceptr`), and its length in bytes; 0 without pins.
    [[nodiscard]] std::uint64_t address() const noexcept { return fault_.address; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return fault_.bytes; }
    // The address as a pointer: for kernels and copies, the host cannot follow it.
    template <class T = void> [[nodiscard]] T *data() const noexcept {
        return reinterpret_cast<T *>(static_cast<std::uintptr_t>(fault_.address));
    }
    // Equal to an earlier signature of the same range exactly when no page of it lost its bytes.
    [[nodiscard]] std::uint64_t signature() const noexcept { return fault_.signature; }
    // The stream that it was faulted for: it must live until the pins are given back.
    [[nodiscard]] Stream stream() const noexcept { return stream_; }
    [[nodiscard]] VbarToken get() const noexcept { return fault_.token; }

    // Remembers that another stream uses the bytes too; call it after that work was enqueued. It
    // makes nothing wait: fault for that stream, or let it wait on an event of this one.
    // Errors: stale_token, unsupported while the stream is captured, what the driver says.
    Result<void> try_also_used_on(Stream stream) const {
        return Result<void>::of(vbar_token_also_used_on(fault_.token, stream.get()));
    }
#if VBAR_HAS_EXCEPTIONS
    void also_used_on(Stream stream) const { try_also_used_on(stream).value(); }
#endif

    // Gives the pins back, as the destructor does, and tells how it went; `vbar_last_message()` has
    // the sentence. All work that uses the bytes was enqueued before. The pins go in any case.
    // `stream` is `no_stream` where the guard's own was destroyed meanwhile.
    // Errors: stale_token when there are none, or when they were taken back by force.
    [[nodiscard]] Status unpin(Stream stream) noexcept {
        const VbarToken token = release();
        return static_cast<Status>(vbar_token_unpin(token, stream.get()));
    }
    [[nodiscard]] Status unpin() noexcept { return unpin(stream_); }
    // Gives the pins back, if there are any. A failure is in the library's log.
    void reset() noexcept {
        if (*this) {
            static_cast<void>(unpin());
        }
    }
    // Hands the token to the caller, who gives it to `vbar_token_unpin`.
    [[nodiscard]] VbarToken release() noexcept {
        return std::exchange(fault_, VbarFault{}).token;
    }

protected:
    Pins() noexcept = default;
    Pins(const VbarFault &fault, Stream stream) noexcept : fault_(fault), stream_(stream) {}
    Pins(Pins &&other) noexcept
        : fault_(std::exchange(other.fault_, VbarFault{})), stream_(other.stream_) {}
    Pins &operator=(Pins &&other) noexcept {
        if (this != &other) {
            reset();
            fault_ = std::exchange(other.fault_, VbarFault{});
            stream_ = other.stream_;
        }
        return *this;
    }
    ~Pins() { reset(); }

private:
    VbarFault fault_{};
    Stream stream_ = no_stream;
};

// Bytes that are resident, pinned, and valid for the stream given, until the guard ends. By then
// all work that uses them was enqueued on that stream; they stay until that work is done.
class [[nodiscard]] Guard : public Pins {
public:
    // Holds nothing.
    Guard() noexcept = default;
    Guard(Guard &&) noexcept = default;
    Guard &operator=(Guard &&) noexcept = default;
    // Takes over a resident fault of the C functions.
    Guard(const VbarFault &fault, Stream stream) noexcept : Pins(fault, stream) {}

    // Hands the pins to a consumer of DLPack that works on stream(): a `DLManagedTensorVersioned *`
    // or, as asked, a `DLManagedTensor *`, whose deleter gives them back on any thread. The guard
    // holds nothing then; after a failure it is as it was.
    // Errors: stale_token, invalid_argument outside the guard's pages, unsupported types.
    Result<void *> try_export_dlpack(const DlpackTensor &tensor) {
        if (tensor.offset > bytes()) {
            return Error(Status::invalid_argument, "the tensor starts past the guard's bytes");
        }
        VbarDlpackTensor raw = detail::sized<VbarDlpackTensor>();
        raw.address = address() + tensor.offset;
        raw.shape = tensor.shape.data();
        raw.rank = static_cast<std::uint32_t>(tensor.shape.size());
        raw.dtype = static_cast<std::uint32_t>(tensor.dtype);
        raw.form = static_cast<std::uint32_t>(tensor.form);
        raw.access = static_cast<std::uint32_t>(tensor.access);
        void *managed = nullptr;
        if (const VbarStatus status = vbar_dlpack_export(get(), stream().get(), &raw, &managed)) {
            return Error(status);
        }
        static_cast<void>(release());
        return managed;
    }
#if VBAR_HAS_EXCEPTIONS
    void *export_dlpack(const DlpackTensor &tensor) { return try_export_dlpack(tensor).value(); }
#endif
};

// An allocation whose bytes must be written, by this caller alone: write them on stream(), then
// commit. One that ends without gives its pins back, and the next fault asks for a refill again.
class [[nodiscard]] Fill : private Guard {
public:
    Fill(Fill &&) noexcept = default;
    Fill &operator=(Fill &&) noexcept = default;
    // Takes over a fault of the C functions whose outcome is a refill.
    Fill(const VbarFault &fault, Stream stream) noexcept : Guard(fault, stream) {}

    using Pins::operator bool;
    using Pins::address;
    using Pins::bytes;
    using Pins::data;
    using Pins::get;
    using Pins::release;
    using Pins::reset;
    using Pins::signature;
    using Pins::stream;
    using Pins::unpin;

    // Declares that everything that writes the bytes was enqueued on `stream` (`no_stream`: they
    // are in place), and passes the pins to a guard. After a failure they are here still.
    // Errors: stale_token, unsupported while the stream is captured, what the driver says.
    Result<Guard> try_commit(Stream stream) {
        if (const VbarStatus status = vbar_token_commit(get(), stream.get())) {
            return Error(status);
        }
        return std::move(static_cast<Guard &>(*this));
    }
    Result<Guard> try_commit() { return try_commit(stream()); }
#if VBAR_HAS_EXCEPTIONS
    Guard commit(Stream stream) { return try_commit(stream).value(); }
    Guard commit() { return try_commit().value(); }
#endif

private:
    friend class Fault;
};

// What a fault came to. True when the bytes are resident: then it is used as its guard is.
//
//     if (auto weight = bar.fault(0, bytes, stream)) launch(weight->address(), stream);
//     else compute_on_host();                         // weight.reason() says why
//
// Only an allocation is ever to be refilled, or busy.
class [[nodiscard]] Fault {
public:
    // Takes over what a C function told. An outcome that has no name here is as good as offloaded.
    Fault(const VbarFault &fault, Stream stream) noexcept
        : held_(fault, stream), outcome_(static_cast<Outcome>(fault.outcome)),
          reason_(static_cast<Reason>(fault.reason)) {
        if (outcome_ != Outcome::resident && outcome_ != Outcome::refill) {
            held_.reset();
        }
    }

    // Resident, and the guard was not taken.
    explicit operator bool() const noexcept { return outcome_ == Outcome::resident && held_; }
    [[nodiscard]] Guard &operator*() { return *checked(); }
    [[nodiscard]] Guard *operator->() { return checked(); }
    // The guard, for the caller to keep.
    [[nodiscard]] Guard take() { return std::move(*checked()); }
    // What is to be written, else nullptr.
    [[nodiscard]] Fill *refill() noexcept {
        return outcome_ == Outcome::refill ? &held_ : nullptr;
    }
    // Resident, but pages of it are in the host's memory, which the device reads over the link. Only
    // with `HostMapped::on`.
    [[nodiscard]] bool host_mapped() const noexcept { return reason_ == Reason::host_mapped; }
    // Bytes of device frames that an offloaded range needs, whole pages; with a budget of less it
    // is too large. 0 for what is pinned.
    [[nodiscard]] std::uint64_t needed_bytes() const noexcept {
        return offloaded() ? held_.bytes() : 0;
    }
    // Not resident, by decision: use the host's copy.
    [[nodiscard]] bool offloaded() const noexcept { return outcome_ == Outcome::offloaded; }
    // Another caller fills the allocation.
    [[nodiscard]] bool busy() const noexcept { return outcome_ == Outcome::busy; }
    [[nodiscard]] Outcome outcome() const noexcept { return outcome_; }
    // `Reason::none` unless offloaded, or in the host's memory.
    [[nodiscard]] Reason reason() const noexcept { return reason_; }

private:
    Guard *checked() {
        if (outcome_ != Outcome::resident) {
            detail::raise(Error(Status::invalid_argument,
                                "a fault that is not resident has no guard: test it first"));
        }
        return &held_;
    }

    Fill held_;
    Outcome outcome_;
    Reason reason_;
};

namespace detail {

// Calls a C function that faults, in both styles: nothing but the call where it is a hit.
template <class Call, class... Arguments>
Result<Fault> tried(Stream stream, Call call, Arguments... arguments) {
    VbarFault fault;
    if (const VbarStatus status = call(arguments..., &fault)) {
        return failure(status);
    }
    return Fault(fault, stream);
}
#if VBAR_HAS_EXCEPTIONS
template <class Call, class... Arguments>
Fault served(Stream stream, Call call, Arguments... arguments) {
    VbarFault fault;
    if (const VbarStatus status = call(arguments..., &fault)) {
        raise(failure(status));
    }
    return Fault(fault, stream);
}
#endif

} // namespace detail

// The guards of ranges that were faulted together, in their order. At their end they give their pins
// back together, which costs less than one by one; one that is moved out gives back its own.
class [[nodiscard]] Guards {
public:
    // Holds nothing.
    Guards() noexcept = default;
    Guards(Guards &&) noexcept = default;
    Guards &operator=(Guards &&other) noexcept {
        if (this != &other) {
            reset();
            guards_ = std::move(other.guards_);
            tokens_ = std::move(other.tokens_);
            stream_ = other.stream_;
        }
        return *this;
    }
    // Makes room for `count` guards of one stream: nothing fails while they are taken over.
    Guards(std::size_t count, Stream stream) : stream_(stream) {
        guards_.reserve(count);
        tokens_.reserve(count);
    }
    // Takes over a resident fault of the C functions for that stream.
    void add(const VbarFault &fault) noexcept { guards_.emplace_back(fault, stream_); }
    ~Guards() { reset(); }

    [[nodiscard]] bool empty() const noexcept { return guards_.empty(); }
    [[nodiscard]] std::size_t size() const noexcept { return guards_.size(); }
    // `index` is below size().
    [[nodiscard]] Guard &operator[](std::size_t index) noexcept { return guards_[index]; }
    [[nodiscard]] auto begin() noexcept { return guards_.begin(); }
    [[nodiscard]] auto end() noexcept { return guards_.end(); }
    // The guards, each by itself from now on.
    [[nodiscard]] std::vector<Guard> take() noexcept { return std::move(guards_); }

    // Gives all pins back, as the destructor does, and tells how it went: the pins go in any case.
    // Errors: stale_token when some were taken back by force.
    [[nodiscard]] Status unpin() noexcept {
        tokens_.clear();
        for (Guard &guard : guards_) {
            if (guard) {
                tokens_.push_back(guard.release());
            }
        }
        guards_.clear();
        if (tokens_.empty()) {
            return Status::ok;
        }
        return static_cast<Status>(
            vbar_tokens_unpin(tokens_.data(), tokens_.size(), stream_.get()));
    }
    // As unpin(). A failure is in the library's log.
    void reset() noexcept { static_cast<void>(unpin()); }

private:
    std::vector<Guard> guards_;
    // Room for all, made at the beginning: an end cannot fail.
    std::vector<VbarToken> tokens_;
    Stream stream_ = no_stream;
};

// What a fault of several ranges came to: a guard for each, in their order, or none of them.
class [[nodiscard]] Faults {
public:
    Faults(Guards guards, Outcome outcome, Reason reason) noexcept
        : guards_(std::move(guards)), outcome_(outcome), reason_(reason) {}

    // All of them are resident.
    explicit operator bool() const noexcept { return outcome_ == Outcome::resident; }
    [[nodiscard]] Outcome outcome() const noexcept { return outcome_; }
    [[nodiscard]] Reason reason() const noexcept { return reason_; }
    // 0 when they are offloaded.
    [[nodiscard]] std::size_t size() const noexcept { return guards_.size(); }
    // `index` is below size().
    [[nodiscard]] Guard &operator[](std::size_t index) noexcept { return guards_[index]; }
    [[nodiscard]] auto begin() noexcept { return guards_.begin(); }
    [[nodiscard]] auto end() noexcept { return guards_.end(); }
    // All guards, for the caller to keep, or to end with `Guards::unpin`.
    [[nodiscard]] Guards &guards() noexcept { return guards_; }
    // The guards, each by itself, for the caller to keep.
    [[nodiscard]] std::vector<Guard> take() noexcept { return guards_.take(); }

private:
    Guards guards_;
    Outcome outcome_;
    Reason reason_;
};

// A piece of a VBAR whose bytes the program writes itself: a name, which ends with the VBAR.
class Allocation {
public:
    // Names nothing.
    Allocation() noexcept = default;

    // Device address of the first byte, which never changes.
    [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    // Its first byte in the VBAR.
    [[nodiscard]] std::uint64_t bar_offset() const noexcept { return bar_offset_; }
    [[nodiscard]] VbarAllocation get() const noexcept { return allocation_; }

    // Makes it resident for work on `stream`, which on a refill is the one that will write.
    // Errors: stale_handle, timed_out, cancelled, too_many_pins, device_lost, process_ending, what
    // the driver says. Nothing is pinned then.
    Result<Fault> try_fault(Stream stream) const {
        return detail::tried(stream, vbar_allocation_fault, allocation_, stream.get());
    }
    // As try_fault, waiting while another caller fills.
    Result<Fault> try_fault_wait(Stream stream) const {
        return detail::tried(stream, vbar_allocation_fault_wait, allocation_, stream.get());
    }
    // Declares the bytes no good: the next fault asks for a refill. Give guards back first.
    Result<void> try_invalidate() const {
        return Result<void>::of(vbar_allocation_invalidate(allocation_));
    }
#if VBAR_HAS_EXCEPTIONS
    Fault fault(Stream stream) const {
        return detail::served(stream, vbar_allocation_fault, allocation_, stream.get());
    }
    Fault fault_wait(Stream stream) const {
        return detail::served(stream, vbar_allocation_fault_wait, allocation_, stream.get());
    }
    void invalidate() const { try_invalidate().value(); }
#endif

private:
    friend class BarView;

    VbarAllocation allocation_{};
    std::uint64_t address_ = 0;
    std::uint64_t bar_offset_ = 0;
    std::uint64_t bytes_ = 0;
};

} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_FAULT_HPP
