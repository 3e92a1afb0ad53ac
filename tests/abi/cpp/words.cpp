// The words that vbar.hpp speaks in: types, streams, spans, results. Much of it the compiler tests.

#include <array>
#include <type_traits>
#if __cplusplus >= 202002L
#include <span>
#endif

#include "check.hpp"

template <class T> constexpr bool moves_only() {
    return std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
           !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
           std::is_nothrow_destructible_v<T>;
}

static_assert(moves_only<vbar::Device>() && moves_only<vbar::Bar>() && moves_only<vbar::Model>());
static_assert(moves_only<vbar::Guard>() && moves_only<vbar::Fill>() && moves_only<vbar::Fault>());
static_assert(moves_only<vbar::LogSink>() && moves_only<vbar::WaitCheck>());
static_assert(moves_only<vbar::sim::Stream>());
static_assert(moves_only<vbar::sim::Control>());
static_assert(std::is_trivially_copyable_v<vbar::BarView>);
static_assert(std::is_trivially_copyable_v<vbar::Allocation>);
// A fill is no guard: its bytes are not there yet.
static_assert(!std::is_constructible_v<vbar::Guard, vbar::Fill>);
static_assert(!std::is_convertible_v<vbar::Fault, bool>);
static_assert(std::is_base_of_v<std::exception, vbar::Error>);
static_assert(std::is_nothrow_copy_constructible_v<vbar::Error>);

// What CUDA's headers declare.
struct CUstream_st;
using CUstream = CUstream_st *;

static_assert(std::is_convertible_v<CUstream, vbar::Stream>);
static_assert(std::is_convertible_v<std::nullptr_t, vbar::Stream>);
static_assert(std::is_convertible_v<std::size_t, vbar::Stream>);
static_assert(std::is_convertible_v<vbar::sim::Stream, vbar::Stream>);
// A negative number would be the promise of `no_stream`.
static_assert(!std::is_constructible_v<vbar::Stream, int>);
static_assert(!std::is_constructible_v<vbar::Stream, bool>);
static_assert(!std::is_constructible_v<vbar::Stream, const char *>);
static_assert(!std::is_constructible_v<vbar::Stream, double>);

TEST(streams_are_made_of_handles_and_numbers) {
    CHECK_EQ(vbar::no_stream.get(), VBAR_STREAM_NONE);
    CHECK_EQ(vbar::Stream(nullptr).get(), 0U);
    CHECK_EQ(vbar::legacy_stream.get(), 1U);
    CHECK_EQ(vbar::per_thread_stream.get(), 2U);
    const auto handle = reinterpret_cast<CUstream>(std::uintptr_t{0x5000});
    CHECK_EQ(vbar::Stream(handle).get(), 0x5000U);
    CHECK(vbar::Stream(handle) == vbar::Stream(std::size_t{0x5000}));
    CHECK(vbar::Stream(static_cast<void *>(handle)) != vbar::no_stream);
}

static std::size_t count_of(vbar::Span<const std::uint32_t> numbers) { return numbers.size(); }

TEST(spans_are_made_of_what_has_elements) {
    const std::uint32_t plain[] = {1, 2, 3};
    std::array<std::uint32_t, 2> array{4, 5};
    std::vector<std::uint32_t> vector{6, 7, 8, 9};
    const std::vector<std::uint32_t> constant = vector;
    CHECK_EQ(count_of(plain), 3U);
    CHECK_EQ(count_of(array), 2U);
    CHECK_EQ(count_of(vector), 4U);
    CHECK_EQ(count_of(constant), 4U);
    CHECK_EQ(count_of({}), 0U);
    vbar::Span<std::uint32_t> mutable_span(vector);
    mutable_span[0] = 60;
    CHECK_EQ(vector[0], 60U);
    CHECK_EQ(count_of(mutable_span), 4U);
    std::uint32_t total = 0;
    for (const std::uint32_t number : vbar::Span<const std::uint32_t>(plain)) total += number;
    CHECK_EQ(total, 6U);
    static_assert(!std::is_constructible_v<vbar::Span<std::uint32_t>, decltype(constant)>);
    static_assert(!std::is_constructible_v<vbar::Span<const std::uint32_t>, std::vector<int>>);
#if __cplusplus >= 202002L
    const std::span<const std::uint32_t> standard = vbar::Span<const std::uint32_t>(plain);
    CHECK_EQ(standard.size(), 3U);
    CHECK_EQ(count_of(standard), 3U);
    CHECK_EQ(count_of(std::span<std::uint32_t>(vector)), 4U);
#endif
}

TEST(numbers_have_texts) {
    CHECK_EQ(std::string(vbar::text(vbar::Status::ok)), "ok");
    CHECK_EQ(std::string(vbar::text(vbar::Reason::too_large)), "too_large");
    CHECK_EQ(std::string(vbar::text(vbar::Dtype::bf16)), "BF16");
    CHECK_EQ(std::string(vbar::text(static_cast<vbar::Status>(-7))), "unknown status");
}

TEST(a_result_is_a_value_or_an_error) {
    vbar::Result<std::string> good = std::string("bytes");
    CHECK(good.ok() && good && good->size() == 5 && *good == "bytes");
    CHECK_EQ(good.status(), vbar::Status::ok);
    CHECK_EQ(std::string(good.message()), "");
    const std::string moved = *std::move(good);
    CHECK_EQ(moved, "bytes");

    vbar::Result<std::string> bad = vbar::Error(vbar::Status::io, "the disk is gone");
    CHECK(!bad && !bad.ok());
    CHECK_EQ(bad.status(), vbar::Status::io);
    CHECK_SAYS(bad.message(), "the disk is gone");
    CHECK_THROWS(io, bad.value());
    CHECK_THROWS(io, *bad);
    CHECK_THROWS(io, bad->size());
    const vbar::Result<std::string> copy = bad;
    CHECK_THROWS(io, copy.value());

    vbar::Result<void> done;
    CHECK(done.ok());
    done.value();
    done = vbar::Error(vbar::Status::closed, "closed");
    CHECK_EQ(done.status(), vbar::Status::closed);
    CHECK_THROWS(closed, done.value());
    // Errors are told by their base as well.
    try {
        done.value();
    } catch (const std::runtime_error &error) {
        CHECK_EQ(std::string(error.what()), "closed");
    }
}

TEST(statistics_have_no_element_past_their_arrays) {
    vbar::Statistics statistics{};
    statistics.refusal_count[VBAR_REASON_BUDGET] = 7;
    statistics.waits[VBAR_WAIT_KIND_READY] = {2, 30};
    CHECK_EQ(statistics.refusals(vbar::Reason::budget), 7U);
    CHECK_EQ(statistics.refusals(static_cast<vbar::Reason>(1000)), 0U);
    CHECK_EQ(statistics.waited(vbar::WaitKind::ready).nanos, 30U);
    CHECK_EQ(statistics.waited(static_cast<vbar::WaitKind>(16)).count, 0U);
}
