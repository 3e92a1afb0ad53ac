// The C++ tests' own few words: tests that register themselves, checks that say what was wrong, a
// small simulated device, files that go when a test ends. Tests nothing.

#ifndef CHECK_HPP
#define CHECK_HPP

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "vbar_sim.hpp"

namespace check {

constexpr std::uint64_t KIB = 1024;
// A page of the small device.
constexpr std::uint64_t PAGE = 64 * KIB;

struct Test {
    const char *name;
    void (*run)();
};

inline std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

struct Registered {
    Registered(const char *name, void (*run)()) { tests().push_back({name, run}); }
};

struct Failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] inline void failed(const char *file, int line, const std::string &what) {
    throw Failed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class T> std::string show(const T &value) {
    if constexpr (std::is_enum_v<T>) {
        return std::to_string(static_cast<long long>(value));
    } else if constexpr (std::is_arithmetic_v<T>) {
        return std::to_string(value);
    } else {
        return std::string(value);
    }
}

template <class A, class B>
void equal(const char *file, int line, const char *text, const A &one, const B &other) {
    if (!(one == other)) {
        failed(file, line, std::string(text) + ": " + show(one) + " and " + show(other));
    }
}

// The message of the error that `work` throws, which must have this status.
inline std::string thrown(const char *file, int line, vbar::Status status,
                          const std::function<void()> &work) {
    try {
        work();
    } catch (const vbar::Error &error) {
        equal(file, line, "status thrown", error.status(), status);
        return error.what();
    }
    failed(file, line, "nothing was thrown");
}

#define TEST(name)                                                                                 \
    static void name();                                                                            \
    static const check::Registered registered_##name(#name, name);                                 \
    static void name()
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) check::failed(__FILE__, __LINE__, #condition);                           \
    } while (false)
#define CHECK_EQ(one, other) check::equal(__FILE__, __LINE__, #one " == " #other, one, other)
#define CHECK_THROWS(status, ...)                                                                  \
    check::thrown(__FILE__, __LINE__, vbar::Status::status,                                        \
                  [&] { static_cast<void>(__VA_ARGS__); })
#define CHECK_SAYS(text, part)                                                                     \
    do {                                                                                           \
        const std::string said = text;                                                             \
        if (said.find(part) == std::string::npos) check::failed(__FILE__, __LINE__, said);         \
    } while (false)

// Options of a small simulated device, of `pages` pages of 64 KiB. It reserves no more addresses
// than valgrind lets a program have.
inline vbar::DeviceOptions small(std::uint64_t pages, const std::string &more = "") {
    vbar::DeviceOptions options;
    options.driver = "sim:capacity=" + std::to_string(pages * PAGE) +
                     ",granularity=64K,address_space=8G,poison=1" + more;
    options.headroom_bytes = 0;
    options.page_bytes = PAGE;
    return options;
}

// A word of device memory that checksums of one stream are added to.
class Word {
public:
    Word(const vbar::Device &device, vbar::Stream stream)
        : device_(device), stream_(stream), bar_(device.create_bar(PAGE)) {
        // Kept longer than weights are, whoever is newer.
        bar_.set_class(1);
        vbar::Fault fault = bar_.allocate(8).fault(stream);
        if (!fault.refill()) failed(__FILE__, __LINE__, "no room for a word");
        guard_ = fault.refill()->commit();
    }

    // The checksum of device bytes, as a kernel on the stream reads them after all before it.
    std::uint64_t sum(std::uint64_t address, std::uint64_t bytes) const {
        std::uint64_t told = 0;
        const std::uint64_t word = guard_.address();
        vbar::sim::copy_to_device(device_, word, &told, sizeof told, stream_);
        vbar::sim::launch_checksum(device_, address, bytes, word, stream_);
        vbar::sim::copy_to_host(device_, &told, word, sizeof told, stream_);
        if (vbar_sim_stream_synchronize(device_.get(), stream_.get()) != VBAR_STATUS_OK) {
            failed(__FILE__, __LINE__, vbar_last_message());
        }
        return told;
    }

private:
    const vbar::Device &device_;
    vbar::Stream stream_;
    vbar::Bar bar_;
    vbar::Guard guard_;
};

// A small device with a stream. At its end no breach of CUDA's contract was found.
class Sim {
public:
    explicit Sim(std::uint64_t pages = 16, const std::string &more = "")
        : device(vbar::Device::open(small(pages, more))), control(vbar::sim::Control::open(device)),
          stream(vbar::sim::Stream::create(device)) {}
    ~Sim() {
        for (const std::string &violation : control.violations()) {
            std::fprintf(stderr, "violation: %s\n", violation.c_str());
            std::abort();
        }
    }

    // The checksum of device bytes, as a kernel on the stream reads them after all before it.
    std::uint64_t sum(std::uint64_t address, std::uint64_t bytes) const {
        return Word(device, stream).sum(address, bytes);
    }

    vbar::Device device;
    vbar::sim::Control control;
    vbar::sim::Stream stream;
};

// A folder that goes with its files.
class Folder {
public:
    Folder() {
        const char *parent = std::getenv("TMPDIR");
        path_ = std::string(parent ? parent : "/tmp") + "/vbar-cpp-XXXXXX";
        if (!mkdtemp(path_.data())) failed(__FILE__, __LINE__, path_ + ": " + strerror(errno));
    }
    ~Folder() {
        for (const std::string &file : files_) std::remove(file.c_str());
        rmdir(path_.c_str());
    }
    Folder(const Folder &) = delete;
    Folder &operator=(const Folder &) = delete;

    std::string write(const std::string &name, const std::string &bytes) {
        const std::string path = path_ + "/" + name;
        std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
        files_.push_back(path);
        return path;
    }
    std::string at(const std::string &name) const { return path_ + "/" + name; }

private:
    std::string path_;
    std::vector<std::string> files_;
};

// `bytes` bytes that differ from those of every other seed.
inline std::string pattern(std::uint64_t bytes, std::uint64_t seed) {
    std::string made(bytes, '\0');
    vbar::sim::pattern(made.data(), made.size(), seed);
    return made;
}

inline std::uint64_t sum(const std::string &bytes) {
    return vbar::sim::checksum(bytes.data(), bytes.size());
}

} // namespace check

#endif // CHECK_HPP
