// vbar for C++17: devices, VBARs, allocations, models and guards that clean up after themselves.
//
// Header-only over vbar.h: link with -lvbar, nothing else. What a call means is said in vbar.h;
// this says who owns what.
//
// Ownership. `Device`, `Bar`, `Model`, `Guard` and `Fill` own: they move, are not copied, and give
// back when they end. Each keeps alive in the library what it needs, so they may end in any order.
// `BarView` and `Allocation` are copyable names of what a `Bar` or `Model` owns. Using what was
// moved from, or a name whose owner is gone, is `Status::stale_handle` and never undefined.
// Destructors throw nothing and never wait.
//
// Failure, two styles. `try_fault(...)` returns a `Result<Fault>`, `fault(...)` a `Fault` or throws
// `Error`, and so for every pair. With -fno-exceptions there are only the first; -fno-rtti is fine.
// That a range is offloaded, must be refilled or is being filled is no failure: see `Fault`.
//
// Threads. What is const here may be called by any number of threads at once on one object. Moving,
// assigning, closing and ending an object are for one thread at a time, as with any C++ object; it
// need not be the thread that made it.
//
// Cost. A hit allocates nothing and locks nothing: a fault, and the end of its guard, are the two C
// calls `vbar_bar_fault` and `vbar_token_unpin` with their arguments.
//
// SPDX-License-Identifier: MIT OR Apache-2.0

#ifndef VBAR_HPP
#define VBAR_HPP

#include <vector>

#include "vbar_callbacks.hpp"
#include "vbar_fault.hpp"
#include "vbar_types.hpp"

namespace vbar {
inline namespace VBAR_FAILURES {

// The name of a VBAR that a `Bar` or a `Model` owns.
class BarView {
public:
    // Names nothing.
    BarView() noexcept = default;
    explicit BarView(VbarBar bar) noexcept : bar_(bar) {}

    [[nodiscard]] VbarBar get() const noexcept { return bar_; }
    // Bytes of it, for `Device::try_fault_many`.
    [[nodiscard]] VbarRange range(std::uint64_t bar_offset,
                                  std::uint64_t bytes) const noexcept {
        return VbarRange{bar_, bar_offset, bytes};
    }

    // Every call here fails with stale_handle when the VBAR is gone.

    // Address, length, pages and marks.
    Result<VbarBarInfo> try_info() const {
        VbarBarInfo info = detail::sized<VbarBarInfo>();
        if (const VbarStatus status = vbar_bar_info(bar_, &info)) {
            return Error(status);
        }
        return info;
    }
    // Binds a VBAR that was never used to files and memory (`file_at`, `file_of`, `memory_at`,
    // `memory_of`): from now on a fault fills what it maps.
    // Errors: invalid_argument, io, format.
    Result<void> try_bind(Span<const VbarBindSource> sources,
                          Span<const VbarBindSegment> segments) const {
        return Result<void>::of(vbar_bar_bind(bar_, sources.data(), sources.size(),
                                              segments.data(), segments.size()));
    }
    // Takes the next `bytes` of a VBAR that is not bound, 512-byte aligned.
    // Errors: no_addresses when they do not fit, invalid_argument on a bound VBAR.
    Result<Allocation> try_allocate(std::uint64_t bytes) const {
        Allocation made;
        VbarStatus status = vbar_bar_allocate(bar_, bytes, &made.allocation_);
        if (status == VBAR_STATUS_OK) {
            status = vbar_allocation_place(made.allocation_, &made.address_, &made.bar_offset_,
                                           &made.bytes_);
        }
        if (status != VBAR_STATUS_OK) {
            return Error(status);
        }
        return made;
    }
    // Makes `bytes` from `bar_offset` on resident for work on `stream`, and pins them.
    // Errors: invalid_argument outside the VBAR, io and file_changed of a bound one, timed_out,
    // cancelled, too_many_pins, device_lost, process_ending, what the driver says.
    Result<Fault> try_fault(std::uint64_t bar_offset, std::uint64_t bytes, Stream stream) const {
        return detail::tried(stream, vbar_bar_fault, bar_, bar_offset, bytes, stream.get());
    }
    // Advice: these bytes of a bound VBAR will be wanted soon, once. Nothing without `Threads::on`.
    // Errors: invalid_argument outside the VBAR or on one that is not bound.
    Result<void> try_prefetch(std::uint64_t bar_offset, std::uint64_t bytes) const {
        return Result<void>::of(vbar_bar_prefetch(bar_, bar_offset, bytes));
    }
    // Takes page-locked memory for bytes that the program writes, to save them once they are
    // written; from here on no watermark keeps them out.
    // Errors: host_memory, invalid_argument for no bytes, outside the VBAR, over another range, and
    // on a bound VBAR.
    Result<void> try_prepare_save(std::uint64_t bar_offset, std::uint64_t bytes) const {
        return Result<void>::of(vbar_bar_prepare_save(bar_, bar_offset, bytes));
    }
    // Saves bytes that were prepared and are pinned, behind the work on `stream`: from now on their
    // pages come back with them. Unpin them on that stream, whose later work does not wait for it.
    // Errors: invalid_argument for what is not pinned or was not prepared, unsupported for a stream
    // that is being captured.
    Result<void> try_save(std::uint64_t bar_offset, std::uint64_t bytes, Stream stream) const {
        return Result<void>::of(vbar_bar_save(bar_, bar_offset, bytes, stream.get()));
    }
    // Forgets what was saved of bytes: waits for its copies, then they may be written.
    // Errors: timed_out, cancelled; forgotten all the same, and another call waits anew.
    Result<void> try_drop_save(std::uint64_t bar_offset, std::uint64_t bytes) const {
        return Result<void>::of(vbar_bar_drop_save(bar_, bar_offset, bytes));
    }
    // Makes it the newest of its class and lifts its watermark; makes it the oldest.
    Result<void> try_prioritise() const { return Result<void>::of(vbar_bar_prioritise(bar_)); }
    Result<void> try_deprioritise() const { return Result<void>::of(vbar_bar_deprioritise(bar_)); }
    // 0 at first; a larger class is kept longer.
    Result<void> try_set_class(std::int32_t priority_class) const {
        return Result<void>::of(vbar_bar_set_class(bar_, priority_class));
    }
    // Keeps the first pages from eviction until the end of the run.
    Result<void> try_set_floor(std::uint32_t page_count) const {
        return Result<void>::of(vbar_bar_set_floor(bar_, page_count));
    }
    // Pages at or above are not faulted in, and freed now unless pinned.
    // Errors: invalid_argument on a bound VBAR, whose pages all are.
    Result<void> try_set_watermark(std::uint32_t page_count) const {
        return Result<void>::of(vbar_bar_set_watermark(bar_, page_count));
    }
    // Gives memory back to the driver, from the end down; UINT64_MAX asks for everything. Waits for
    // fences, never for pins.
    Result<Freed> try_free_memory(std::uint64_t bytes) const {
        VbarFreed freed{};
        if (const VbarStatus status = vbar_bar_free_memory(bar_, bytes, &freed)) {
            return Error(status);
        }
        return Freed{freed.bytes, static_cast<Shortfall>(freed.shortfall), freed.pinned_count};
    }
    // Ends a run whose work was enqueued on `stream`, and tells how many pages still had pins. With
    // `HeldPins::release` their guards are stale: they end as usual, and give nothing back.
    Result<std::uint32_t> try_end_of_run(Stream stream, HeldPins held = HeldPins::keep) const {
        std::uint32_t pinned = 0;
        if (const VbarStatus status = vbar_bar_end_of_run(
                bar_, stream.get(), static_cast<std::uint32_t>(held), &pinned)) {
            return Error(status);
        }
        return pinned;
    }
    // The state of `count` pages from `first` on.
    Result<std::vector<Page>> try_residency(std::uint32_t first, std::size_t count) const {
        std::vector<VbarPage> told(count);
        if (const VbarStatus status = vbar_bar_residency(bar_, first, count, told.data())) {
            return Error(status);
        }
        std::vector<Page> pages;
        pages.reserve(count);
        for (const VbarPage &page : told) {
            pages.push_back({page.generation, static_cast<PageState>(page.state), page.pin_count});
        }
        return pages;
    }
#if VBAR_HAS_EXCEPTIONS
    VbarBarInfo info() const { return try_info().value(); }
    void bind(Span<const VbarBindSource> sources, Span<const VbarBindSegment> segments) const {
        try_bind(sources, segments).value();
    }
    Allocation allocate(std::uint64_t bytes) const { return try_allocate(bytes).value(); }
    Fault fault(std::uint64_t bar_offset, std::uint64_t bytes, Stream stream) const {
        return detail::served(stream, vbar_bar_fault, bar_, bar_offset, bytes, stream.get());
    }
    void prefetch(std::uint64_t bar_offset, std::uint64_t bytes) const {
        try_prefetch(bar_offset, bytes).value();
    }
    void prepare_save(std::uint64_t bar_offset, std::uint64_t bytes) const {
        try_prepare_save(bar_offset, bytes).value();
    }
    void save(std::uint64_t bar_offset, std::uint64_t bytes, Stream stream) const {
        try_save(bar_offset, bytes, stream).value();
    }
    void drop_save(std::uint64_t bar_offset, std::uint64_t bytes) const {
        try_drop_save(bar_offset, bytes).value();
    }
    void prioritise() const { try_prioritise().value(); }
    void deprioritise() const { try_deprioritise().value(); }
    void set_class(std::int32_t priority_class) const { try_set_class(priority_class).value(); }
    void set_floor(std::uint32_t page_count) const { try_set_floor(page_count).value(); }
    void set_watermark(std::uint32_t page_count) const { try_set_watermark(page_count).value(); }
    Freed free_memory(std::uint64_t bytes) const { return try_free_memory(bytes).value(); }
    std::uint32_t end_of_run(Stream stream, HeldPins held = HeldPins::keep) const {
        return try_end_of_run(stream, held).value();
    }
    std::vector<Page> residency(std::uint32_t first, std::size_t count) const {
        return try_residency(first, count).value();
    }
#endif

protected:
    VbarBar bar_{};
};

// A VBAR: addresses for one model, memory only where it is needed. Ending it never blocks: its
// memory goes when the work that uses it is done and its guards are gone.
class [[nodiscard]] Bar : public BarView {
public:
    // Owns nothing.
    Bar() noexcept = default;
    // Takes over a VBAR of the C functions.
    explicit Bar(VbarBar bar) noexcept : BarView(bar) {}
    Bar(Bar &&other) noexcept : BarView(other.release()) {}
    Bar &operator=(Bar &&other) noexcept {
        if (this != &other) {
            static_cast<void>(close());
            bar_ = other.release();
        }
        return *this;
    }
    ~Bar() { static_cast<void>(close()); }

    explicit operator bool() const noexcept { return bar_.id != 0; }
    // Ends it now and tells how that went; ok where there is nothing to end.
    [[nodiscard]] Status close() noexcept {
        const VbarBar bar = release();
        return bar.id == 0 ? Status::ok : static_cast<Status>(vbar_bar_destroy(bar));
    }
    // Ends it and waits until its memory was given back. It is closed also when that fails.
    // Errors: timed_out, also while guards of it are held; cancelled.
    Result<void> try_destroy_wait() { return Result<void>::of(vbar_bar_destroy_wait(release())); }
#if VBAR_HAS_EXCEPTIONS
    void destroy_wait() { try_destroy_wait().value(); }
#endif
    // Hands the VBAR to the caller, who gives it to `vbar_bar_destroy`.
    [[nodiscard]] VbarBar release() noexcept { return std::exchange(bar_, VbarBar{}); }
};

// A safetensors model, bound to a VBAR of its own. Ending it is as ending a `Bar`.
class [[nodiscard]] Model {
public:
    // Owns nothing.
    Model() noexcept = default;
    // Takes over a model of the C functions.
    explicit Model(VbarModel model) noexcept : model_(model) {}
    Model(Model &&other) noexcept : model_(other.release()) {}
    Model &operator=(Model &&other) noexcept {
        if (this != &other) {
            static_cast<void>(close());
            model_ = other.release();
        }
        return *this;
    }
    ~Model() { static_cast<void>(close()); }

    explicit operator bool() const noexcept { return model_.id != 0; }
    [[nodiscard]] VbarModel get() const noexcept { return model_; }
    // As `Bar::close`. Names, shapes and metadata that were told end with it.
    [[nodiscard]] Status close() noexcept {
        const VbarModel model = release();
        return model.id == 0 ? Status::ok : static_cast<Status>(vbar_model_close(model));
    }
    // Hands the model to the caller, who gives it to `vbar_model_close`.
    [[nodiscard]] VbarModel release() noexcept { return std::exchange(model_, VbarModel{}); }

    // Every call here fails with stale_handle when the model is gone.

    // Tensors, bytes, files.
    Result<VbarModelInfo> try_info() const {
        VbarModelInfo info = detail::sized<VbarModelInfo>();
        if (const VbarStatus status = vbar_model_info(model_, &info)) {
            return Error(status);
        }
        return info;
    }
    // Its VBAR, for ranks, marks and memory given back; it ends with the model.
    Result<BarView> try_bar() const {
        Result<VbarModelInfo> info = try_info();
        if (!info) {
            return Error(info.status(), info.message());
        }
        return BarView(info->bar);
    }
    // The path that a file was opened by, for the host's copy of a tensor: its bytes are at
    // `Tensor::file_offset` of it. nullptr where the model was opened by descriptor; it ends with
    // the model. `index` is a `Tensor::file`.
    // Errors: invalid_argument past the last.
    Result<const char *> try_file(std::uint32_t index) const {
        const char *path = nullptr;
        if (const VbarStatus status = vbar_model_file(model_, index, &path)) {
            return Error(status);
        }
        return path;
    }
    // A tensor by its index, from 0, in the natural order of names.
    // Errors: invalid_argument past the last.
    Result<Tensor> try_tensor(std::uint64_t index) const {
        VbarTensor told = detail::sized<VbarTensor>();
        if (const VbarStatus status = vbar_model_tensor(model_, index, &told)) {
            return Error(status);
        }
        return Tensor{index,
                      std::string_view(told.name, told.name_bytes),
                      Span<const std::uint64_t>(told.shape, told.rank),
                      static_cast<Dtype>(told.dtype),
                      told.bytes,
                      told.address,
                      told.bar_offset,
                      told.file_offset,
                      told.file};
    }
    // A tensor by its name, UTF-8.
    // Errors: not_found; invalid_argument for a name with a zero byte.
    Result<Tensor> try_tensor(const std::string &name) const {
        if (detail::has_zero(name)) {
            return detail::zero_inside();
        }
        std::uint64_t index = 0;
        if (const VbarStatus status = vbar_model_find(model_, name.c_str(), &index)) {
            return Error(status);
        }
        return try_tensor(index);
    }
    // A value of the model's `__metadata__`, UTF-8; it lives until the model is closed.
    // Errors: not_found; invalid_argument for a key with a zero byte.
    Result<const char *> try_metadata(const std::string &key) const {
        if (detail::has_zero(key)) {
            return detail::zero_inside();
        }
        const char *value = nullptr;
        if (const VbarStatus status = vbar_model_metadata(model_, key.c_str(), &value)) {
            return Error(status);
        }
        return value;
    }
    // Makes a tensor resident for work on `stream`, and pins it. Errors: as `BarView::try_fault`.
    Result<Fault> try_fault(std::uint64_t index, Stream stream) const {
        return detail::tried(stream, vbar_model_fault, model_, index, stream.get());
    }
    Result<Fault> try_fault(const Tensor &tensor, Stream stream) const {
        return try_fault(tensor.index, stream);
    }
    // Advice: a tensor will be wanted soon, once; as `BarView::try_prefetch`.
    Result<void> try_prefetch(std::uint64_t index) const {
        return Result<void>::of(vbar_model_prefetch(model_, index));
    }
    // Advice: the order in which its tensors will be faulted, again and again, by their indexes.
    // Errors: invalid_argument for an index past the last.
    Result<void> try_schedule_hint(Span<const std::uint64_t> indexes) const {
        return Result<void>::of(
            vbar_model_schedule_hint(model_, indexes.data(), indexes.size()));
    }
#if VBAR_HAS_EXCEPTIONS
    VbarModelInfo info() const { return try_info().value(); }
    BarView bar() const { return try_bar().value(); }
    std::uint64_t tensor_count() const { return info().tensor_count; }
    Tensor tensor(std::uint64_t index) const { return try_tensor(index).value(); }
    Tensor tensor(const std::string &name) const { return try_tensor(name).value(); }
    const char *file(std::uint32_t index) const { return try_file(index).value(); }
    const char *metadata(const std::string &key) const { return try_metadata(key).value(); }
    Fault fault(std::uint64_t index, Stream stream) const {
        return detail::served(stream, vbar_model_fault, model_, index, stream.get());
    }
    Fault fault(const Tensor &tensor, Stream stream) const { return fault(tensor.index, stream); }
    void prefetch(std::uint64_t index) const { try_prefetch(index).value(); }
    void schedule_hint(Span<const std::uint64_t> indexes) const {
        try_schedule_hint(indexes).value();
    }
#endif

private:
    VbarModel model_{};
};

// An open device. What was made with it lives on when it ends.
class [[nodiscard]] Device {
public:
    // Owns nothing.
    Device() noexcept = default;
    // Takes over a device of the C functions.
    explicit Device(VbarDevice device) noexcept : device_(device) {}
    Device(Device &&other) noexcept : device_(other.release()) {}
    Device &operator=(Device &&other) noexcept {
        if (this != &other) {
            static_cast<void>(close());
            device_ = other.release();
        }
        return *this;
    }
    ~Device() { static_cast<void>(close()); }

    // Opens a device. One that is open already is shared: driver, context and page size must match,
    // budget, headroom, time-out and threads given again are applied as changes.
    // Errors: driver_missing, driver, device_not_registered, already_open, invalid_argument;
    // unsupported for a library of another ABI than this header's.
    static Result<Device> try_open(const DeviceOptions &options = {});

    explicit operator bool() const noexcept { return device_.id != 0; }
    [[nodiscard]] VbarDevice get() const noexcept { return device_; }
    // Ends it now and tells how that went; ok where there is nothing to end.
    [[nodiscard]] Status close() noexcept {
        const VbarDevice device = release();
        return device.id == 0 ? Status::ok : static_cast<Status>(vbar_device_close(device));
    }
    // Hands the device to the caller, who gives it to `vbar_device_close`.
    [[nodiscard]] VbarDevice release() noexcept { return std::exchange(device_, VbarDevice{}); }

    // Every call here fails with stale_handle when the device is closed.

    // Name, driver, context, sizes.
    Result<VbarDeviceInfo> try_info() const {
        VbarDeviceInfo info = detail::sized<VbarDeviceInfo>();
        if (const VbarStatus status = vbar_device_info(device_, &info)) {
            return Error(status);
        }
        return info;
    }
    Result<Statistics> try_statistics() const {
        Statistics statistics{};
        statistics.size = sizeof(VbarStatistics);
        if (const VbarStatus status = vbar_device_statistics(device_, &statistics)) {
            return Error(status);
        }
        return statistics;
    }
    // A VBAR of `bytes`, rounded up to whole pages: addresses that cost nothing.
    Result<Bar> try_create_bar(std::uint64_t bytes) const {
        VbarBar bar{};
        if (const VbarStatus status = vbar_bar_create(device_, bytes, &bar)) {
            return Error(status);
        }
        return Bar(bar);
    }
    // A safetensors model: a file, a sharded model's index, or a folder.
    // Errors: io, format, no_addresses; invalid_argument for a path with a zero byte.
    Result<Model> try_open_model(const std::string &path) const {
        if (detail::has_zero(path)) {
            return detail::zero_inside();
        }
        VbarModel model{};
        if (const VbarStatus status = vbar_model_open(device_, path.c_str(), &model)) {
            return Error(status);
        }
        return Model(model);
    }
    // As try_open_model for one file that is open already, of which the library keeps a duplicate.
    // `name` is what messages call it.
    Result<Model> try_open_model(int descriptor, const std::string &name) const {
        if (detail::has_zero(name)) {
            return detail::zero_inside();
        }
        VbarModel model{};
        if (const VbarStatus status =
                vbar_model_open_descriptor(device_, descriptor, name.c_str(), &model)) {
            return Error(status);
        }
        return Model(model);
    }
    // Makes several ranges resident for work on `stream`, or none of them.
    // Errors: as `BarView::try_fault`.
    Result<Faults> try_fault_many(Span<const VbarRange> ranges, Stream stream) const {
        // Room first: past the call nothing may fail while tokens have no owner.
        std::vector<VbarFault> told(ranges.size());
        Guards guards(ranges.size(), stream);
        if (const VbarStatus status = vbar_device_fault_many(
                device_, ranges.data(), ranges.size(), stream.get(), told.data())) {
            return Error(status);
        }
        const VbarFault all{0, 0, 0, {0}, VBAR_OUTCOME_RESIDENT, VBAR_REASON_NONE};
        const VbarFault &first = told.empty() ? all : told.front();
        const auto outcome = static_cast<Outcome>(first.outcome);
        if (outcome == Outcome::resident || first.token.id != 0) {
            for (const VbarFault &fault : told) {
                guards.add(fault);
            }
        }
        return Faults(std::move(guards), outcome, static_cast<Reason>(first.reason));
    }
    // Advice: the order in which ranges of bound VBARs will be faulted, again and again. A step is
    // what one fault makes resident together: the next `range_counts[step]` of the ranges.
    // Errors: invalid_argument where the counts do not come to the ranges, for a step of none, a
    // range outside its VBAR or of one that is not bound.
    Result<void> try_schedule_hint(Span<const VbarRange> ranges,
                                   Span<const std::size_t> range_counts) const {
        std::size_t left = ranges.size();
        for (const std::size_t count : range_counts) {
            if (count > left) {
                return detail::other_range_count();
            }
            left -= count;
        }
        if (left != 0) {
            return detail::other_range_count();
        }
        return Result<void>::of(vbar_device_schedule_hint(device_, ranges.data(),
                                                          range_counts.data(),
                                                          range_counts.size()));
    }
    // The explicit budget in bytes, 0 for an automatic one; memory above it is given back at once.
    Result<void> try_set_budget(std::uint64_t bytes) const {
        return Result<void>::of(vbar_device_set_budget(device_, bytes));
    }
    // Device memory left free for others, in bytes; 0 is none.
    Result<void> try_set_headroom(std::uint64_t bytes) const {
        return Result<void>::of(vbar_device_set_headroom(device_, bytes));
    }
    // Both as they were set; what may be held now is in the statistics.
    Result<Budget> try_budget() const {
        Budget told{};
        if (const VbarStatus status =
                vbar_device_budget(device_, &told.budget_bytes, &told.headroom_bytes)) {
            return Error(status);
        }
        return told;
    }
    // Notices pressure now, as the next miss would.
    Result<void> try_refresh() const { return Result<void>::of(vbar_device_refresh(device_)); }
    // Gives frames that no page has back until at most `keep_bytes` are held; tells the bytes.
    Result<std::uint64_t> try_trim(std::uint64_t keep_bytes) const {
        std::uint64_t freed = 0;
        if (const VbarStatus status = vbar_device_trim(device_, keep_bytes, &freed)) {
            return Error(status);
        }
        return freed;
    }
    // Gives page-locked host memory back until at most `keep_bytes` are held; tells the bytes.
    Result<std::uint64_t> try_trim_host(std::uint64_t keep_bytes) const {
        std::uint64_t freed = 0;
        if (const VbarStatus status = vbar_device_trim_host(device_, keep_bytes, &freed)) {
            return Error(status);
        }
        return freed;
    }
    // Gives host frames back that nobody uses; tells the bytes.
    Result<std::uint64_t> try_trim_host_frames() const {
        std::uint64_t freed = 0;
        if (const VbarStatus status = vbar_device_trim_host_frames(device_, &freed)) {
            return Error(status);
        }
        return freed;
    }
    // Gives memory of all VBARs back, lowest rank first; as `BarView::try_free_memory`.
    Result<Freed> try_free_memory(std::uint64_t bytes) const {
        VbarFreed freed{};
        if (const VbarStatus status = vbar_device_free_memory(device_, bytes, &freed)) {
            return Error(status);
        }
        return Freed{freed.bytes, static_cast<Shortfall>(freed.shortfall), freed.pinned_count};
    }
    // The longest time that one call waits, for waits that start afterwards.
    // Errors: invalid_argument for a negative time.
    Result<void> try_set_wait_timeout(std::chrono::milliseconds timeout) const {
        if (timeout.count() < 0) {
            return detail::negative_timeout();
        }
        return Result<void>::of(
            vbar_device_set_wait_timeout(device_, static_cast<std::uint64_t>(timeout.count())));
    }
    // Ends every wait that is under way on the device with `Status::cancelled`.
    Result<void> try_cancel_waits() const {
        return Result<void>::of(vbar_device_cancel_waits(device_));
    }
    // Call it before a stream is destroyed.
    Result<void> try_retire_stream(Stream stream) const {
        return Result<void>::of(vbar_stream_retire(device_, stream.get()));
    }
    // Reads bytes of an open file to a device address, by copies on `stream`; returns when the last
    // one is enqueued. Pin what is behind the address until they are done.
    Result<void> try_read_file(int descriptor, std::uint64_t file_offset, std::uint64_t bytes,
                               std::uint64_t target, Stream stream) const {
        return Result<void>::of(vbar_device_read_file(device_, descriptor, file_offset, bytes,
                                                      target, stream.get()));
    }
    // Writes bytes of the device, as they are behind what is enqueued on `stream`, to an open file.
    Result<void> try_write_file(int descriptor, std::uint64_t file_offset, std::uint64_t bytes,
                                std::uint64_t source, Stream stream) const {
        return Result<void>::of(vbar_device_write_file(device_, descriptor, file_offset, bytes,
                                                       source, stream.get()));
    }
    // Enqueues a copy of host memory to a device address. Memory that is page-locked stays as it is
    // until the copy is done.
    Result<void> try_copy_from_host(const void *memory, std::uint64_t bytes, std::uint64_t target,
                                    Stream stream) const {
        return Result<void>::of(
            vbar_device_copy_from_host(device_, memory, bytes, target, stream.get()));
    }
    // Page-locks memory of the program's, which stays mapped until it is unlocked.
    Result<void> try_lock_host(void *memory, std::uint64_t bytes) const {
        return Result<void>::of(vbar_device_lock_host(device_, memory, bytes));
    }
    // Ends the page-lock of memory that begins here, whoever locked it; no copy of it is pending.
    Result<void> try_unlock_host(void *memory) const {
        return Result<void>::of(vbar_device_unlock_host(device_, memory));
    }
#if VBAR_HAS_EXCEPTIONS
    static Device open(const DeviceOptions &options = {}) { return try_open(options).value(); }
    VbarDeviceInfo info() const { return try_info().value(); }
    Statistics statistics() const { return try_statistics().value(); }
    Bar create_bar(std::uint64_t bytes) const { return try_create_bar(bytes).value(); }
    Model open_model(const std::string &path) const { return try_open_model(path).value(); }
    Model open_model(int descriptor, const std::string &name) const {
        return try_open_model(descriptor, name).value();
    }
    Faults fault_many(Span<const VbarRange> ranges, Stream stream) const {
        return try_fault_many(ranges, stream).value();
    }
    void schedule_hint(Span<const VbarRange> ranges, Span<const std::size_t> range_counts) const {
        try_schedule_hint(ranges, range_counts).value();
    }
    void set_budget(std::uint64_t bytes) const { try_set_budget(bytes).value(); }
    void set_headroom(std::uint64_t bytes) const { try_set_headroom(bytes).value(); }
    Budget budget() const { return try_budget().value(); }
    void refresh() const { try_refresh().value(); }
    std::uint64_t trim(std::uint64_t keep_bytes) const { return try_trim(keep_bytes).value(); }
    std::uint64_t trim_host(std::uint64_t keep_bytes) const {
        return try_trim_host(keep_bytes).value();
    }
    std::uint64_t trim_host_frames() const { return try_trim_host_frames().value(); }
    Freed free_memory(std::uint64_t bytes) const { return try_free_memory(bytes).value(); }
    void set_wait_timeout(std::chrono::milliseconds timeout) const {
        try_set_wait_timeout(timeout).value();
    }
    void cancel_waits() const { try_cancel_waits().value(); }
    void retire_stream(Stream stream) const { try_retire_stream(stream).value(); }
    void read_file(int descriptor, std::uint64_t file_offset, std::uint64_t bytes,
                   std::uint64_t target, Stream stream) const {
        try_read_file(descriptor, file_offset, bytes, target, stream).value();
    }
    void write_file(int descriptor, std::uint64_t file_offset, std::uint64_t bytes,
                    std::uint64_t source, Stream stream) const {
        try_write_file(descriptor, file_offset, bytes, source, stream).value();
    }
    void copy_from_host(const void *memory, std::uint64_t bytes, std::uint64_t target,
                        Stream stream) const {
        try_copy_from_host(memory, bytes, target, stream).value();
    }
    void lock_host(void *memory, std::uint64_t bytes) const {
        try_lock_host(memory, bytes).value();
    }
    void unlock_host(void *memory) const { try_unlock_host(memory).value(); }
#endif

private:
    VbarDevice device_{};
};

inline Result<Device> Device::try_open(const DeviceOptions &options) {
    if (vbar_abi_version() != VBAR_ABI_VERSION) {
        return Error(Status::unsupported, "the loaded libvbar has another ABI than vbar.h");
    }
    if (detail::has_zero(options.driver)) {
        return detail::zero_inside();
    }
    if (options.wait_timeout.count() < 0) {
        return detail::negative_timeout();
    }
    const VbarDeviceOptions raw = detail::raw(options);
    VbarDevice device{};
    if (const VbarStatus status = vbar_device_open(&raw, &device)) {
        return Error(status);
    }
    return Device(device);
}

} // namespace VBAR_FAILURES
} // namespace vbar

#endif // VBAR_HPP
