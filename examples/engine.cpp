// A small inference engine whose model is larger than the memory that it may use.
//
//     c++ -std=c++17 engine.cpp -o engine $(pkg-config --cflags --libs vbar) -ldl
//     ./engine                         a model of its own, 34 MiB, in 10 MiB
//     ./engine MODEL [BUDGET_MIB]      a safetensors model, in half of its size
//     ./engine --driver cuda:1 ...     that device; else VBAR_DRIVER says which, else a GPU where
//                                      there is one, else the simulated device
//
// Two sequences run through all layers, pass after pass, each on a stream of its own. Before a
// layer is launched its weight is faulted for the stream: it is resident (its device address never
// changes, so it was taken once, at load), or it is offloaded and the host computes the layer. The
// results are compared with those of the host alone.
//
// On a GPU a layer is a kernel of this program: out = in + W in, in whole numbers of 32 bits that
// wrap, so that device and host agree to the last bit, whatever the weights are. The driver is
// opened with dlopen; no CUDA toolkit is needed. The simulated device runs no foreign kernels: its
// own checksum stands for the layer there. It is the same loop as engine.c.

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <vbar.hpp>
#include <vbar_sim.hpp>

namespace {

constexpr std::uint64_t MIB = 1ULL << 20;
constexpr std::uint64_t PAGE_BYTES = 2 * MIB;
constexpr unsigned PASSES = 4;
constexpr std::size_t SEQUENCES = 2;
// Numbers of an activation; a power of two, as the kernel expects.
constexpr std::uint32_t WIDTH = 1024;
// A state has two activations: a layer reads the one and writes the other.
using State = std::array<std::uint32_t, 2 * WIDTH>;
constexpr std::uint64_t HALF_BYTES = sizeof(State) / 2;

// A weight on the host.
struct HostWeight {
    const std::uint32_t *words;
    std::uint64_t bytes;
};

// What an engine needs of a device; there is one for CUDA and one for the simulated device.
class Compute {
public:
    virtual ~Compute() = default;
    virtual const char *kernel() const = 0;
    virtual vbar::Stream create_stream() = 0;
    virtual void destroy_stream(vbar::Stream stream) noexcept = 0;
    virtual void synchronize(vbar::Stream stream) = 0;
    virtual void upload(std::uint64_t target, const State &source, vbar::Stream stream) = 0;
    virtual void download(State &target, std::uint64_t source, vbar::Stream stream) = 0;
    // Enqueues layer number `index` on the guard's stream: reads the weight, changes the state.
    virtual void layer(std::uint64_t index, const vbar::Guard &weight, std::uint64_t state) = 0;
    // The same on the host.
    virtual void host_layer(std::uint64_t index, HostWeight weight, State &state) const = 0;
};

// ---- CUDA: the driver's functions, with prototypes of our own ----

// Compiled by the driver for whatever device it has. Thread `column` of WIDTH makes one number of
// the output: its input, and the products of its column's weights with the rows' inputs.
constexpr char PTX[] = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry layer(
    .param .u64 weight, .param .u64 words, .param .u64 input, .param .u64 output
) {
    .reg .pred %done;
    .reg .u32 %thread, %block, %size, %column, %row, %sum, %factor, %x;
    .reg .u64 %weight, %words, %input, %output, %index, %place, %at;

    ld.param.u64 %weight, [weight];
    ld.param.u64 %words, [words];
    ld.param.u64 %input, [input];
    ld.param.u64 %output, [output];
    cvta.to.global.u64 %weight, %weight;
    cvta.to.global.u64 %input, %input;
    cvta.to.global.u64 %output, %output;

    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mad.lo.u32 %column, %block, %size, %thread;
    mul.wide.u32 %place, %column, 4;
    add.u64 %at, %input, %place;
    ld.global.u32 %sum, [%at];
    cvt.u64.u32 %index, %column;
    mov.u32 %row, 0;

each_row:
    setp.ge.u64 %done, %index, %words;
    @%done bra store;
    shl.b64 %at, %index, 2;
    add.u64 %at, %weight, %at;
    ld.global.u32 %factor, [%at];
    mul.wide.u32 %at, %row, 4;
    add.u64 %at, %input, %at;
    ld.global.u32 %x, [%at];
    mad.lo.u32 %sum, %factor, %x, %sum;
    add.u64 %index, %index, 1024;
    add.u32 %row, %row, 1;
    and.b32 %row, %row, 1023;
    bra each_row;

store:
    add.u64 %at, %output, %place;
    st.global.u32 [%at], %sum;
    ret;
}
)";

class Cuda final : public Compute {
public:
    // The library has opened the device: its context is the one to work in.
    explicit Cuda(void *context) {
        void *module = nullptr;
        check(set_current_(context), "cuCtxSetCurrent");
        check(load_(&module, PTX), "cuModuleLoadData");
        check(get_function_(&layer_, module, "layer"), "cuModuleGetFunction");
    }

    const char *kernel() const override { return "its own kernel"; }

    // A stream is a pointer to the driver; `vbar::Stream` takes it as it is.
    vbar::Stream create_stream() override {
        constexpr unsigned NON_BLOCKING = 1;
        void *stream = nullptr;
        check(create_(&stream, NON_BLOCKING), "cuStreamCreate");
        return stream;
    }
    void destroy_stream(vbar::Stream stream) noexcept override { destroy_(pointer(stream)); }
    void synchronize(vbar::Stream stream) override {
        check(synchronize_(pointer(stream)), "cuStreamSynchronize");
    }
    void upload(std::uint64_t target, const State &source, vbar::Stream stream) override {
        check(upload_(target, source.data(), sizeof source, pointer(stream)), "cuMemcpyHtoDAsync");
    }
    void download(State &target, std::uint64_t source, vbar::Stream stream) override {
        check(download_(target.data(), source, sizeof target, pointer(stream)),
              "cuMemcpyDtoHAsync");
    }

    void layer(std::uint64_t index, const vbar::Guard &weight, std::uint64_t state) override {
        constexpr unsigned BLOCK = 256;
        std::uint64_t address = weight.address();
        std::uint64_t words = weight.bytes() / sizeof(std::uint32_t);
        std::uint64_t input = state + index % 2 * HALF_BYTES;
        std::uint64_t output = state + (index + 1) % 2 * HALF_BYTES;
        void *arguments[] = {&address, &words, &input, &output};
        check(launch_(layer_, WIDTH / BLOCK, 1, 1, BLOCK, 1, 1, 0, pointer(weight.stream()),
                      arguments, nullptr),
              "cuLaunchKernel");
    }
    void host_layer(std::uint64_t index, HostWeight weight, State &state) const override {
        const std::uint32_t *input = state.data() + index % 2 * WIDTH;
        std::uint32_t *output = state.data() + (index + 1) % 2 * WIDTH;
        std::copy_n(input, WIDTH, output);
        for (std::uint64_t at = 0; at < weight.bytes / sizeof(std::uint32_t); at++) {
            output[at % WIDTH] += weight.words[at] * input[at / WIDTH % WIDTH];
        }
    }

private:
    // A function of the driver, found when the engine starts.
    template <class... Arguments> struct Function {
        explicit Function(const char *name)
            : call(reinterpret_cast<int (*)(Arguments...)>(dlsym(driver(), name))) {
            if (!call) throw std::runtime_error(std::string(name) + " is not in libcuda.so.1");
        }
        int operator()(Arguments... arguments) const { return call(arguments...); }
        int (*call)(Arguments...);
    };

    static void *driver() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
        return library;
    }
    static void *pointer(vbar::Stream stream) {
        return reinterpret_cast<void *>(std::uintptr_t{stream.get()});
    }
    void check(int code, const char *call) const {
        if (code != 0) {
            const char *name = "an unknown code";
            name_(code, &name);
            throw std::runtime_error(std::string(call) + ": " + name);
        }
    }

    Function<void *> set_current_{"cuCtxSetCurrent"};
    Function<void **, const void *> load_{"cuModuleLoadData"};
    Function<void **, void *, const char *> get_function_{"cuModuleGetFunction"};
    // Grid, block, shared bytes, stream, arguments.
    Function<void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
             void **, void **>
        launch_{"cuLaunchKernel"};
    Function<void **, unsigned> create_{"cuStreamCreate"};
    Function<void *> destroy_{"cuStreamDestroy_v2"};
    Function<void *> synchronize_{"cuStreamSynchronize"};
    Function<std::uint64_t, const void *, std::size_t, void *> upload_{"cuMemcpyHtoDAsync_v2"};
    Function<void *, std::uint64_t, std::size_t, void *> download_{"cuMemcpyDtoHAsync_v2"};
    Function<int, const char **> name_{"cuGetErrorName"};
    void *layer_ = nullptr;
};

// ---- The simulated device ----

class Simulated final : public Compute {
public:
    explicit Simulated(const vbar::Device &device) : device_(device) {}

    const char *kernel() const override { return "the simulated device's checksum"; }

    vbar::Stream create_stream() override {
        streams_.push_back(vbar::sim::Stream::create(device_));
        return streams_.back();
    }
    void destroy_stream(vbar::Stream stream) noexcept override {
        const auto is_it = [&](const vbar::sim::Stream &one) { return one == stream; };
        streams_.erase(std::remove_if(streams_.begin(), streams_.end(), is_it), streams_.end());
    }
    void synchronize(vbar::Stream stream) override {
        for (const vbar::sim::Stream &one : streams_) {
            if (one == stream) one.synchronize();
        }
    }
    void upload(std::uint64_t target, const State &source, vbar::Stream stream) override {
        vbar::sim::copy_to_device(device_, target, source.data(), sizeof source, stream);
    }
    void download(State &target, std::uint64_t source, vbar::Stream stream) override {
        vbar::sim::copy_to_host(device_, target.data(), source, sizeof target, stream);
    }

    // Adds the checksum of the weight to a 64-bit word of the state, another one for each layer.
    void layer(std::uint64_t index, const vbar::Guard &weight, std::uint64_t state) override {
        vbar::sim::launch_checksum(device_, weight.address(), weight.bytes(), state + place(index),
                                   weight.stream());
    }
    void host_layer(std::uint64_t index, HostWeight weight, State &state) const override {
        unsigned char *at = reinterpret_cast<unsigned char *>(state.data()) + place(index);
        std::uint64_t word = 0;
        std::memcpy(&word, at, sizeof word);
        word += vbar::sim::checksum(weight.words, weight.bytes);
        std::memcpy(at, &word, sizeof word);
    }

private:
    static std::uint64_t place(std::uint64_t index) {
        return index * sizeof(std::uint64_t) % sizeof(State);
    }

    const vbar::Device &device_;
    std::vector<vbar::sim::Stream> streams_;
};

// ---- The model ----

using File = std::unique_ptr<std::FILE, int (*)(std::FILE *)>;

// A safetensors file of layers of 2 MiB and an output of 14 MiB, of no sensible numbers.
File write_own_model() {
    constexpr unsigned LAYERS = 11;
    constexpr std::uint64_t ROWS = 512;
    std::string header;
    std::uint64_t end = 0;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        // The last one is larger than all of the budget.
        const bool is_output = layer + 1 == LAYERS;
        const std::uint64_t rows = is_output ? 7 * ROWS : ROWS;
        const std::uint64_t start = end;
        end += rows * WIDTH * sizeof(std::uint32_t);
        const std::string number = std::to_string(layer);
        header += header.empty() ? "{\"" : ",\"";
        header += is_output ? "output." + number : "layers." + number + ".weight";
        header += "\":{\"dtype\":\"I32\",\"shape\":[" + std::to_string(rows) + "," +
                  std::to_string(WIDTH) + "],\"data_offsets\":[" + std::to_string(start) + "," +
                  std::to_string(end) + "]}";
    }
    header += "}";
    std::vector<std::uint32_t> words(end / sizeof(std::uint32_t));
    std::uint32_t number = 1;
    for (std::uint32_t &word : words) word = number = number * 1664525U + 1013904223U;

    File file(std::tmpfile(), std::fclose);
    if (!file) throw std::runtime_error("a temporary file cannot be made");
    for (unsigned byte = 0; byte < 8; byte++) {
        std::putc(static_cast<int>(header.size() >> (8 * byte) & 0xff), file.get());
    }
    std::fwrite(header.data(), 1, header.size(), file.get());
    std::fwrite(words.data(), sizeof words[0], words.size(), file.get());
    if (std::fflush(file.get()) != 0 || std::ferror(file.get())) {
        throw std::runtime_error("a temporary file cannot be written");
    }
    return file;
}

// The layers, and their bytes on the host: an engine of another kind has a mapping of the file, or
// quantised copies.
class Weights {
public:
    Weights(const vbar::Device &device, const char *path) {
        if (path) {
            model_ = device.open_model(path);
        } else {
            files_.push_back(write_own_model());
            model_ = device.open_model(fileno(files_[0].get()), "its own model");
        }
        const VbarModelInfo info = model_.info();
        while (files_.size() < info.file_count) {
            const char *name = model_.file(static_cast<std::uint32_t>(files_.size()));
            files_.emplace_back(std::fopen(name, "rb"), std::fclose);
            if (!files_.back()) throw std::runtime_error(std::string(name) + " cannot be opened");
        }
        total_bytes_ = info.total_bytes;
        std::uint64_t bytes_max = 0;
        for (std::uint64_t index = 0; index < info.tensor_count; index++) {
            layers_.push_back(model_.tensor(index));
            bytes_max = std::max(bytes_max, layers_.back().bytes);
        }
        buffer_.resize(bytes_max / sizeof(std::uint32_t) + 1);
    }

    const vbar::Model &model() const { return model_; }
    const std::vector<vbar::Tensor> &layers() const { return layers_; }
    std::uint64_t total_bytes() const { return total_bytes_; }

    // A layer's bytes; they live until the next ones are read.
    HostWeight read(const vbar::Tensor &layer) {
        char *target = reinterpret_cast<char *>(buffer_.data());
        for (std::uint64_t done = 0; done < layer.bytes;) {
            const auto place = static_cast<off_t>(layer.file_offset + done);
            const int file = fileno(files_[layer.file].get());
            const ssize_t got = pread(file, target + done, layer.bytes - done, place);
            if (got <= 0) {
                throw std::runtime_error(std::string(layer.name) + ": the file cannot be read");
            }
            done += static_cast<std::uint64_t>(got);
        }
        return {buffer_.data(), layer.bytes};
    }

private:
    std::vector<File> files_;
    vbar::Model model_;
    std::vector<vbar::Tensor> layers_;
    std::uint64_t total_bytes_ = 0;
    std::vector<std::uint32_t> buffer_;
};

// ---- The engine ----

// A stream that goes when its sequence does, the library told before.
class OwnStream {
public:
    OwnStream(const vbar::Device &device, Compute &compute)
        : device_(device), compute_(compute), stream_(compute.create_stream()) {}
    OwnStream(const OwnStream &) = delete;
    OwnStream &operator=(const OwnStream &) = delete;
    ~OwnStream() {
        // Its fences outlive it.
        static_cast<void>(vbar_stream_retire(device_.get(), stream_.get()));
        compute_.destroy_stream(stream_);
    }
    vbar::Stream get() const { return stream_; }

private:
    const vbar::Device &device_;
    Compute &compute_;
    vbar::Stream stream_;
};

// A sequence: its activations are memory that the engine writes itself, and stay where they are as
// long as the guard lives.
class Sequence {
public:
    Sequence(const vbar::Device &device, Compute &compute, const vbar::Bar &bar)
        : compute_(compute), stream_(device, compute) {
        vbar::Fault fault = bar.allocate(sizeof(State)).fault(stream_.get());
        vbar::Fill *fill = fault.refill();
        if (!fill) {
            throw std::runtime_error(std::string("no activations: ") + vbar::text(fault.reason()));
        }
        compute.upload(fill->address(), host_, stream_.get());
        activations_ = fill->commit();
    }

    // What a pass starts with.
    void start(std::uint32_t number) {
        for (std::uint32_t at = 0; at < WIDTH; at++) host_[at] = at * 2654435761U + number;
        std::fill(host_.begin() + WIDTH, host_.end(), 0);
        expected_ = host_;
        compute_.upload(activations_.address(), host_, stream_.get());
    }

    // Enqueues a layer. Returns whether it runs on the device.
    bool run(Weights &weights, const vbar::Tensor &layer) {
        if (auto weight = weights.model().fault(layer, stream_.get())) {
            if (weight->address() != layer.address) throw std::logic_error("an address changed");
            compute_.layer(layer.index, *weight, activations_.address());
            // The guard ends here, behind the launch: the weight stays until that is done, and not
            // longer than it must.
            return true;
        }
        // It does not fit: the activations go to the host and back.
        compute_.download(host_, activations_.address(), stream_.get());
        compute_.synchronize(stream_.get());
        compute_.host_layer(layer.index, weights.read(layer), host_);
        compute_.upload(activations_.address(), host_, stream_.get());
        return false;
    }

    void run_expected(const vbar::Tensor &layer, HostWeight weight) {
        compute_.host_layer(layer.index, weight, expected_);
    }

    bool is_right() {
        compute_.download(host_, activations_.address(), stream_.get());
        compute_.synchronize(stream_.get());
        return host_ == expected_;
    }

    vbar::Stream stream() const { return stream_.get(); }

private:
    Compute &compute_;
    State host_{};
    State expected_{};
    OwnStream stream_;
    // After the stream, so that it ends first.
    vbar::Guard activations_;
};

// Runs all layers for all sequences. Returns how many results were wrong.
unsigned run_pass(Weights &weights, const std::vector<std::unique_ptr<Sequence>> &sequences,
                  unsigned pass) {
    unsigned on_device = 0;
    unsigned on_host = 0;
    unsigned wrong = 0;
    std::uint32_t number = static_cast<std::uint32_t>(pass * SEQUENCES);
    for (const auto &sequence : sequences) sequence->start(number++);
    for (const vbar::Tensor &layer : weights.layers()) {
        for (const auto &sequence : sequences) {
            (sequence->run(weights, layer) ? on_device : on_host)++;
        }
    }
    for (const vbar::Tensor &layer : weights.layers()) {
        const HostWeight weight = weights.read(layer);
        for (const auto &sequence : sequences) sequence->run_expected(layer, weight);
    }
    for (const auto &sequence : sequences) wrong += sequence->is_right() ? 0 : 1;
    std::printf("pass %u: %u layers on the device, %u on the host, %u of %zu results wrong\n",
                pass + 1, on_device, on_host, wrong, SEQUENCES);
    return wrong;
}

double mebibytes(std::uint64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(MIB);
}

void print_statistics(const vbar::Device &device) {
    const vbar::Statistics told = device.statistics();
    const auto number = [](std::uint64_t count) { return static_cast<unsigned long long>(count); };
    std::printf("%llu hits, %llu misses, %llu pages evicted, %.1f MiB filled, "
                "at most %.1f MiB held\n",
                number(told.hit_count), number(told.miss_count), number(told.evicted_page_count),
                mebibytes(told.filled_bytes), mebibytes(told.peak_bytes));
}

// Returns whether all results were right.
bool run(const char *driver, const char *path, std::uint64_t budget_bytes) {
    vbar::DeviceOptions options;
    options.driver = driver;
    options.page_bytes = PAGE_BYTES;
    const auto device = vbar::Device::open(options);
    const VbarDeviceInfo info = device.info();
    std::unique_ptr<Compute> compute;
    if (info.simulated) {
        compute = std::make_unique<Simulated>(device);
    } else {
        compute = std::make_unique<Cuda>(info.context);
    }
    std::printf("vbar %s on %s\na layer is %s\n", vbar::version(), info.driver, compute->kernel());

    Weights weights(device, path);
    // Half of the model, and of our own what its output does not fit in.
    if (budget_bytes == 0) {
        budget_bytes = path ? weights.total_bytes() / 2 + 2 * PAGE_BYTES : 10 * MIB;
    }
    device.set_budget(budget_bytes);
    std::printf("%zu layers, %.1f MiB, budget %.1f MiB\n", weights.layers().size(),
                mebibytes(weights.total_bytes()), mebibytes(budget_bytes));

    vbar::Bar states = device.create_bar(SEQUENCES * sizeof(State));
    std::vector<std::unique_ptr<Sequence>> sequences;
    for (std::size_t at = 0; at < SEQUENCES; at++) {
        sequences.push_back(std::make_unique<Sequence>(device, *compute, states));
    }
    unsigned wrong = 0;
    for (unsigned pass = 0; pass < PASSES; pass++) wrong += run_pass(weights, sequences, pass);
    print_statistics(device);
    for (const auto &sequence : sequences) {
        if (weights.model().bar().end_of_run(sequence->stream()) != 0) {
            throw std::logic_error("weights are pinned still");
        }
    }
    sequences.clear();
    states.destroy_wait();
    std::puts(wrong == 0 ? "all results are right" : "some results are wrong");
    return wrong == 0;
}

} // namespace

int main(int count, char **arguments) try {
    std::vector<const char *> words(arguments + 1, arguments + count);
    const char *driver = "auto";
    if (words.size() >= 2 && std::string(words[0]) == "--driver") {
        driver = words[1];
        words.erase(words.begin(), words.begin() + 2);
    }
    if (words.size() > 2 || (!words.empty() && words[0][0] == '-')) {
        std::fprintf(stderr, "usage: engine [--driver NAME] [MODEL [BUDGET_MIB]]\n");
        return 2;
    }
    const char *path = words.empty() ? nullptr : words[0];
    const std::uint64_t budget = words.size() > 1 ? std::strtoull(words[1], nullptr, 10) * MIB : 0;
    return run(driver, path, budget) ? 0 : 1;
} catch (const vbar::Error &error) {
    std::fprintf(stderr, "engine: %s (%s)\n", error.what(), vbar::text(error.status()));
    return 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return 1;
}
