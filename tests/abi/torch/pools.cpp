/*
 * Graph pools as PyTorch begins and ends them: a std::function passed by value, kept, asked from
 * other threads, and destroyed once. Run under valgrind where there is one.
 */
#include "plug.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

static const MempoolId_t FIRST{0, 1}, SECOND{7, 0};
static VbarDevice device;

/* Counts how often it lives; large enough that a function cannot hold it in itself. */
struct Counted {
    static std::atomic<int> alive;
    std::vector<int> memory = std::vector<int>(1000, 1);
    char more[64] = {};
    Counted() { alive++; }
    Counted(const Counted &other) : memory(other.memory) { alive++; }
    ~Counted() { alive--; }
};
std::atomic<int> Counted::alive;

static VbarTorchPool plain(MempoolId_t id) { return {id.first, id.second}; }

/* The segment that a block is in. */
static VbarTorchSegment segment_of(void *address) {
    std::vector<VbarTorchSegment> segments(1024);
    std::vector<VbarTorchBlock> blocks(4096);
    size_t segment_count = 0, block_count = 0;
    OK(vbar_torch_snapshot(0, segments.data(), segments.size(), &segment_count, blocks.data(),
                           blocks.size(), &block_count));
    CHECK(segment_count <= segments.size() && block_count <= blocks.size());
    for (size_t at = 0; at < segment_count; at++) {
        uint64_t offset = uint64_t(uintptr_t(address)) - segments[at].address;
        if (offset < segments[at].bytes) return segments[at];
    }
    CHECK(!"the block is in no segment");
    return {};
}

static bool is_in(void *address, MempoolId_t pool) {
    VbarTorchPool found = segment_of(address).pool;
    return found.first == pool.first && found.second == pool.second;
}

static const MempoolId_t ORDINARY{0, 0};
static const size_t SIZE = 200000;

static void a_function_that_owns_memory() {
    VbarStream side;
    OK(vbar_sim_stream_create(device, &side));
    void *held = nullptr;
    {
        Counted counted;
        std::atomic<int> asked{0};
        begin_allocate_to_pool(0, FIRST, [counted, &asked, side](cudaStream_t stream) {
            CHECK(counted.memory.size() == 1000 && counted.memory[999] == 1);
            asked++;
            return stream == stream_of(side);
        });
        /* The argument is gone; what was moved out of it is there. */
        CHECK(Counted::alive == 2);
        void *ours = alloc_fn(SIZE, 0, stream_of(side));
        void *theirs = alloc_fn(SIZE, 0, nullptr);
        CHECK(asked == 2);
        CHECK(is_in(ours, FIRST) && is_in(theirs, ORDINARY));
        /* Frees go where the block is from, with nobody asked. */
        free_fn(theirs, SIZE, 0, nullptr);
        std::thread([&] {
            void *other = alloc_fn(SIZE, 0, stream_of(side));
            CHECK(is_in(other, FIRST));
            free_fn(other, SIZE, 0, stream_of(side));
        }).join();
        CHECK(asked == 3);
        end_allocate_to_pool(0, FIRST);
        CHECK(Counted::alive == 1);
        void *later = alloc_fn(SIZE, 0, stream_of(side));
        CHECK(asked == 3 && is_in(later, ORDINARY));
        free_fn(later, SIZE, 0, stream_of(side));
        held = ours;
    }
    /* Until it is released the pool's memory is its own. */
    CHECK(is_in(held, FIRST));
    free_fn(held, SIZE, 0, stream_of(side));
    release_pool(0, FIRST);
    CHECK(Counted::alive == 0);
    OK(vbar_sim_stream_synchronize(device, side));
    OK(vbar_stream_retire(device, side));
    OK(vbar_sim_stream_destroy(device, side));
}

/* CUDA may refuse to say anything about a stream: then the filter throws. */
static void a_function_that_throws() {
    Counted counted;
    begin_allocate_to_pool(0, FIRST, [counted](cudaStream_t) -> bool {
        throw std::runtime_error("operation would make the legacy stream depend on a capturing one");
    });
    for (int turn = 0; turn < 10; turn++) {
        bool caught = false;
        try {
            alloc_fn(SIZE, 0, nullptr);
        } catch (const std::runtime_error &error) {
            caught = contains(error.what(), "legacy stream");
        }
        CHECK(caught);
    }
    /* Nobody holds a lock. */
    end_allocate_to_pool(0, FIRST);
    CHECK(Counted::alive == 1);
    void *address = alloc_fn(SIZE, 0, nullptr);
    CHECK(address && is_in(address, ORDINARY));
    free_fn(address, SIZE, 0, nullptr);
    release_pool(0, FIRST);
}

static void two_graphs_share_a_pool() {
    auto all = [](cudaStream_t) { return true; };
    begin_allocate_to_pool(0, FIRST, all);
    end_allocate_to_pool(0, FIRST);
    begin_allocate_to_pool(0, FIRST, all);
    /* The first graph is reset while the second one is captured. */
    release_pool(0, FIRST);
    void *address = alloc_fn(SIZE, 0, nullptr);
    CHECK(is_in(address, FIRST));
    /* The innermost of two different ones. */
    begin_allocate_to_pool(0, SECOND, all);
    void *inner = alloc_fn(SIZE, 0, nullptr);
    CHECK(is_in(inner, SECOND));
    end_allocate_to_pool(0, SECOND);
    end_allocate_to_pool(0, FIRST);
    free_fn(inner, SIZE, 0, nullptr);
    free_fn(address, SIZE, 0, nullptr);
    release_pool(0, SECOND);
    release_pool(0, FIRST);
}

/* A capture that fails half-way is never ended: its graph is only released. */
static void a_capture_that_failed() {
    Counted counted;
    begin_allocate_to_pool(0, FIRST, [counted](cudaStream_t) { return true; });
    CHECK(Counted::alive == 2);
    release_pool(0, FIRST);
    CHECK(Counted::alive == 1);
    void *address = alloc_fn(SIZE, 0, nullptr);
    CHECK(is_in(address, ORDINARY));
    free_fn(address, SIZE, 0, nullptr);
}

/* A small function is in the words themselves. */
static void functions_of_every_size() {
    const char bytes[1] = {1};
    const uintptr_t two[2] = {1, 2}, nine[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    auto check = [](std::function<bool(cudaStream_t)> filter) {
        begin_allocate_to_pool(0, SECOND, std::move(filter));
        void *address = alloc_fn(SIZE, 0, nullptr);
        CHECK(is_in(address, SECOND));
        free_fn(address, SIZE, 0, nullptr);
        end_allocate_to_pool(0, SECOND);
        release_pool(0, SECOND);
    };
    check([](cudaStream_t) { return true; });
    check([bytes](cudaStream_t) { return bytes[0] == 1; });
    check([two](cudaStream_t) { return two[1] == 2; });
    check([nine](cudaStream_t) { return nine[8] == 9; });
    static auto plain_function = [](cudaStream_t) { return true; };
    check(+plain_function);
}

/* What no program should do comes back, and leaves nothing behind. */
static void hostile_hooks() {
    begin_allocate_to_pool(0, FIRST, nullptr);
    CHECK(contains(vbar_last_message(), "without a filter"));
    vbar_torch_begin_pool(0, plain(FIRST), nullptr);
    CHECK(contains(vbar_last_message(), "without a filter"));
    Counted counted;
    begin_allocate_to_pool(0, FIRST, [counted](cudaStream_t) { return true; });
    begin_allocate_to_pool(0, FIRST, [counted](cudaStream_t) { return true; });
    CHECK(contains(vbar_last_message(), "open already"));
    CHECK(Counted::alive == 2);
    end_allocate_to_pool(0, FIRST);
    end_allocate_to_pool(0, FIRST);
    CHECK(contains(vbar_last_message(), "not open"));
    release_pool(0, FIRST);
    release_pool(0, FIRST);
    CHECK(contains(vbar_last_message(), "unknown pool"));
    end_allocate_to_pool(99, SECOND);
    release_pool(-1, SECOND);
}

int main() {
    start();
    configure(256);
    OK(vbar_torch_device(0, &device));
    a_function_that_owns_memory();
    a_function_that_throws();
    two_graphs_share_a_pool();
    a_capture_that_failed();
    functions_of_every_size();
    hostile_hooks();
    VbarTorchStatistics told = torch_statistics();
    CHECK(told.allocated_bytes.all.current == 0 && told.unknown_free_count == 0);
    CHECK(Counted::alive == 0);
    OK(vbar_device_close(device));
    return 0;
}
