/*
 * How a request that cannot be served reaches PyTorch, with stand-ins for its libraries.
 *
 *     raise FOLDER typed      libc10.so and libc10_cuda.so are loaded as Python loads them
 *     raise FOLDER fallback   the exception's type is in neither
 *     raise FOLDER absent     neither is loaded
 */
#include "plug.h"

#include <atomic>
#include <thread>
#include <vector>

static const size_t TOO_MUCH = size_t(1) << 40;

static void load(const char *folder, const char *name) {
    std::string path = std::string(folder) + "/" + name;
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(1);
    }
}

static uint32_t told_raise() {
    uint32_t raise = 0;
    OK(vbar_torch_raise(&raise));
    return raise;
}

/* What was thrown by a request, by its most special type. */
struct Thrown {
    enum Kind { NOTHING, ERROR, OUT_OF_MEMORY } kind = NOTHING;
    void *address = nullptr;
    std::string what;
    std::string text;
};

static Thrown request(size_t size, int device = 0) {
    Thrown thrown;
    try {
        thrown.address = alloc_fn(size, device, nullptr);
    } catch (const c10::OutOfMemoryError &error) {
        thrown.kind = Thrown::OUT_OF_MEMORY;
        thrown.what = error.what();
        thrown.text = error.what_without_backtrace();
    } catch (const c10::Error &error) {
        thrown.kind = Thrown::ERROR;
        thrown.what = error.what();
        thrown.text = error.what_without_backtrace();
    }
    return thrown;
}

/* Memory can be had, used and given back as if nothing had been. */
static void goes_on() {
    uint64_t before = torch_statistics().allocated_bytes.all.current;
    std::vector<void *> held;
    for (size_t size : {size_t(1), size_t(512), size_t(100000), size_t(300000)}) {
        void *address = alloc_fn(size, 0, nullptr);
        CHECK(address != nullptr && uintptr_t(address) % 512 == 0);
        for (void *other : held) CHECK(other != address);
        held.push_back(address);
    }
    CHECK(torch_statistics().allocated_bytes.all.current > before);
    /* What PyTorch says of size, device and stream is not looked at. */
    for (void *address : held) free_fn(address, 7, 0, stream_of(0xdead));
    CHECK(torch_statistics().allocated_bytes.all.current == before);
}

static void check_out_of_memory(Thrown thrown, Thrown::Kind kind) {
    const char *start = "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total "
                        "capacity of 64.00 MiB of which ";
    CHECK(thrown.kind == kind);
    CHECK(thrown.address == nullptr);
    CHECK(thrown.text.rfind(start, 0) == 0);
    CHECK(thrown.what.rfind(start, 0) == 0 && thrown.what.size() > thrown.text.size());
    CHECK(contains(vbar_last_message(), "Tried to allocate 1024.00 GiB"));
}

static void check_other_errors() {
    Thrown thrown = request(512, -1);
    CHECK(thrown.kind == Thrown::ERROR && contains(thrown.text.c_str(), "device -1"));
    thrown = request(512, 9);
    CHECK(thrown.kind == Thrown::ERROR && contains(thrown.text.c_str(), "does not exist"));
    bool raised = false;
    try {
        vbar_torch_memory_fraction(1.5, 0);
    } catch (const c10::Error &error) {
        raised = contains(error.what(), "0 to 1 is expected");
    }
    CHECK(raised);
}

static void typed() {
    CHECK(told_raise() == VBAR_TORCH_RAISE_OUT_OF_MEMORY_ERROR);
    goes_on();
    for (int turn = 0; turn < 20; turn++) {
        check_out_of_memory(request(TOO_MUCH), Thrown::OUT_OF_MEMORY);
        goes_on();
    }
    Thrown huge = request(size_t(1) << 60);
    CHECK(huge.kind == Thrown::OUT_OF_MEMORY);
    CHECK(huge.text == "CUDA out of memory. Tried to allocate more than 1EB memory.");
    CHECK(request(SIZE_MAX).kind == Thrown::OUT_OF_MEMORY);
    check_other_errors();
    /* Kept beyond the throw, copied and thrown again, as Python's layer does. */
    std::exception_ptr kept;
    try {
        alloc_fn(TOO_MUCH, 0, nullptr);
    } catch (...) {
        kept = std::current_exception();
    }
    try {
        std::rethrow_exception(kept);
    } catch (const c10::OutOfMemoryError &error) {
        c10::OutOfMemoryError copy = error;
        CHECK(std::string(copy.what()) == error.what());
    }
    kept = nullptr;
    /* Many at once; what is on the frames in between is destroyed. */
    static std::atomic<int> guards;
    struct Guard {
        Guard() { guards++; }
        ~Guard() { guards--; }
    };
    std::vector<std::thread> threads;
    static std::atomic<int> caught;
    for (int at = 0; at < 8; at++) {
        threads.emplace_back([] {
            for (int turn = 0; turn < 25; turn++) {
                try {
                    Guard guard;
                    alloc_fn(TOO_MUCH, 0, nullptr);
                } catch (const c10::OutOfMemoryError &) {
                    caught++;
                }
            }
        });
    }
    for (auto &thread : threads) thread.join();
    CHECK(caught == 200 && guards == 0);
    goes_on();
    CHECK(torch_statistics().oom_count >= 222);
}

static void fallback() {
    CHECK(told_raise() == VBAR_TORCH_RAISE_RUNTIME_ERROR);
    goes_on();
    check_out_of_memory(request(TOO_MUCH), Thrown::ERROR);
    check_other_errors();
    goes_on();
}

static void absent() {
    CHECK(told_raise() == VBAR_TORCH_RAISE_NOTHING);
    goes_on();
    Thrown thrown = request(TOO_MUCH);
    CHECK(thrown.kind == Thrown::NOTHING && thrown.address == nullptr);
    CHECK(contains(vbar_last_message(), "CUDA out of memory. Tried to allocate 1024.00 GiB"));
    thrown = request(512, -1);
    CHECK(thrown.kind == Thrown::NOTHING && thrown.address == nullptr);
    CHECK(contains(vbar_last_message(), "device -1"));
    goes_on();
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 3);
    configure(64);
    std::string mode = arguments[2];
    if (mode == "absent") return absent(), 0;
    /* Not there yet: nothing that was found is remembered as missing. */
    CHECK(told_raise() == VBAR_TORCH_RAISE_NOTHING);
    CHECK(request(TOO_MUCH).kind == Thrown::NOTHING);
    load(arguments[1], "libc10.so");
    load(arguments[1], mode == "typed" ? "libc10_cuda.so" : "other/libc10_cuda.so");
    return mode == "typed" ? typed() : fallback(), 0;
}
