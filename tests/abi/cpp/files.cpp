// Weights that come from files: safetensors models and their tables, and other formats bound by
// path and by descriptor at any offset.

#include <fcntl.h>

#include "check.hpp"

using check::Folder;
using check::PAGE;
using check::pattern;
using check::Sim;
using vbar::Dtype;
using vbar::Status;

static std::string little_endian(std::uint64_t number) {
    std::string bytes;
    for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(number >> shift));
    return bytes;
}

// A safetensors file of three tensors: a matrix of F32, a vector of BF16 and a scalar of U8.
static std::string safetensors() {
    const std::string header =
        "{\"__metadata__\":{\"format\":\"test\"},"
        "\"layers.10.weight\":{\"dtype\":\"F32\",\"shape\":[64,128],\"data_offsets\":[0,32768]},"
        "\"layers.9.bias\":{\"dtype\":\"BF16\",\"shape\":[500],\"data_offsets\":[32768,33768]},"
        "\"scale\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[33768,33769]}}";
    return little_endian(header.size()) + header + pattern(32768, 1) + pattern(1000, 2) +
           pattern(1, 3);
}

TEST(a_model_tells_its_table) {
    Sim sim;
    Folder folder;
    const std::string path = folder.write("model.safetensors", safetensors());
    const vbar::Model model = sim.device.open_model(path);
    const VbarModelInfo info = model.info();
    CHECK(info.tensor_count == 3 && info.total_bytes == 33769 && info.file_count == 1);
    CHECK_EQ(model.tensor_count(), 3U);
    CHECK_EQ(std::string(model.metadata("format")), "test");
    CHECK_THROWS(not_found, model.metadata("author"));

    // Names in their natural order: 9 before 10.
    CHECK_EQ(model.tensor(0).name, "layers.9.bias");
    const vbar::Tensor weight = model.tensor("layers.10.weight");
    CHECK(weight.index == 1 && weight.dtype == Dtype::f32 && weight.bytes == 32768);
    CHECK(weight.shape.size() == 2 && weight.shape[0] == 64 && weight.shape[1] == 128);
    CHECK(weight.file == 0 && weight.file_offset > 8);
    CHECK_EQ(std::string(model.file(weight.file)), path);
    CHECK_THROWS(invalid_argument, model.file(1));
    const vbar::Tensor scale = model.tensor("scale");
    CHECK(scale.shape.empty() && scale.dtype == Dtype::u8 && scale.bytes == 1);
    const vbar::BarView bar = model.bar();
    CHECK_EQ(weight.address, bar.info().address + weight.bar_offset);
    CHECK_EQ(weight.address % 512, 0U);
    CHECK_THROWS(invalid_argument, model.tensor(3));
    CHECK_SAYS(CHECK_THROWS(not_found, model.tensor("layers.11.weight")), "layers.11.weight");
    CHECK_THROWS(invalid_argument, model.tensor(std::string("scale\0x", 7)));
    // The model owns its VBAR.
    CHECK_EQ(vbar_bar_destroy(bar.get()), VBAR_STATUS_INVALID_ARGUMENT);
    CHECK_THROWS(invalid_argument, bar.allocate(8));
}

TEST(a_faulted_tensor_has_the_files_bytes) {
    Sim sim;
    Folder folder;
    vbar::Model model = sim.device.open_model(folder.write("model.safetensors", safetensors()));
    const vbar::Tensor weight = model.tensor("layers.10.weight");
    {
        auto one = model.fault(weight, sim.stream);
        auto two = model.fault(model.tensor("layers.9.bias").index, sim.stream);
        CHECK(one && two);
        CHECK_EQ(one->address(), weight.address);
        CHECK_EQ(sim.sum(one->address(), one->bytes()), check::sum(pattern(32768, 1)));
        CHECK_EQ(sim.sum(two->address(), two->bytes()), check::sum(pattern(1000, 2)));
    }
    CHECK(model.bar().free_memory(UINT64_MAX).bytes > 0);
    CHECK_SAYS(CHECK_THROWS(invalid_argument, model.bar().set_watermark(1)), "no watermark");
    auto again = model.fault(weight, sim.stream);
    CHECK_EQ(again->address(), weight.address);
    CHECK_EQ(sim.sum(again->address(), again->bytes()), check::sum(pattern(32768, 1)));
    CHECK_THROWS(invalid_argument, model.fault(17, sim.stream));

    vbar::Model moved = std::move(model);
    CHECK(!model && moved);
    CHECK_THROWS(stale_handle, model.fault(weight, sim.stream));
    CHECK_EQ(moved.close(), Status::ok);
    CHECK_EQ(moved.close(), Status::ok);
    // The guard outlives it.
    CHECK_EQ(again->unpin(), Status::ok);
}

TEST(an_order_and_wishes_are_advice_and_checked) {
    Sim sim;
    Folder folder;
    const vbar::Model model =
        sim.device.open_model(folder.write("model.safetensors", safetensors()));
    const vbar::BarView bar = model.bar();
    model.prefetch(2);
    bar.prefetch(0, 8);
    const std::vector<std::uint64_t> order{1, 0, 2};
    model.schedule_hint(order);
    const std::vector<VbarRange> ranges{bar.range(0, 8), bar.range(512, 8), bar.range(0, 0)};
    const std::vector<std::size_t> counts{2, 1};
    sim.device.schedule_hint(ranges, counts);
    sim.device.schedule_hint({}, {});

    const std::vector<std::size_t> fewer{2}, more{2, 2}, none{0, 3};
    for (const auto &wrong : {fewer, more, none}) {
        CHECK_THROWS(invalid_argument, sim.device.schedule_hint(ranges, wrong));
    }
    const std::vector<std::uint64_t> past{0, 3};
    CHECK_THROWS(invalid_argument, model.schedule_hint(past));
    CHECK_THROWS(invalid_argument, model.prefetch(3));
    CHECK_THROWS(invalid_argument, bar.prefetch(UINT64_MAX, 2));
    // There is no engine here that would do anything.
    const vbar::Statistics told = sim.device.statistics();
    CHECK(told.ahead_page_count == 0 && told.engine_plan_count == 0 && told.used_bytes == 0);
}

TEST(a_model_is_opened_by_descriptor) {
    Sim sim;
    Folder folder;
    const int file = open(folder.write("m.safetensors", safetensors()).c_str(), O_RDONLY);
    CHECK(file >= 0);
    const vbar::Model model = sim.device.open_model(file, "a model");
    close(file);
    auto fault = model.fault(model.tensor("layers.10.weight"), sim.stream);
    CHECK_EQ(sim.sum(fault->address(), fault->bytes()), check::sum(pattern(32768, 1)));
    CHECK_THROWS(invalid_argument, sim.device.open_model(-1, "none"));
}

TEST(a_bad_model_is_an_error) {
    Sim sim;
    Folder folder;
    CHECK_SAYS(CHECK_THROWS(io, sim.device.open_model(folder.at("none.safetensors"))), "none.safe");
    CHECK_THROWS(format, sim.device.open_model(folder.write("short.safetensors", "abc")));
    const std::string whole = safetensors();
    const std::string cut = whole.substr(0, whole.size() - 1);
    CHECK_THROWS(format, sim.device.open_model(folder.write("cut.safetensors", cut)));
    const std::string good = folder.write("good.safetensors", whole);
    CHECK_THROWS(invalid_argument, sim.device.open_model(good + std::string("\0.bak", 5)));
    CHECK_THROWS(invalid_argument, sim.device.open_model(""));
}

// Tensors as GGUF has them: data at odd places of a file, after a header of any length.
struct Packed {
    std::uint64_t file_offset;
    std::uint64_t bytes;
    std::uint64_t seed;
    std::uint64_t bar_offset;
};

static const Packed PACKED[] = {
    {37, 3 * PAGE + 5, 21, 0}, {37 + 3 * PAGE + 5 + 13, 777, 22, 4 * PAGE}, {3, 34, 23, 5 * PAGE}};

static std::string packed_file() {
    std::string bytes = pattern(5 * PAGE, 20);
    for (const Packed &tensor : PACKED) {
        bytes.replace(tensor.file_offset, tensor.bytes, pattern(tensor.bytes, tensor.seed));
    }
    return bytes;
}

static void check_bound(const Sim &sim, const vbar::Bar &bar, const VbarBindSource &source) {
    std::vector<VbarBindSegment> segments;
    for (const Packed &tensor : PACKED) {
        segments.push_back(vbar::segment(tensor.bar_offset, tensor.file_offset, tensor.bytes));
    }
    const VbarBindSource sources[] = {source};
    bar.bind(sources, segments);
    for (int pass = 0; pass < 2; pass++) {
        for (const Packed &tensor : PACKED) {
            auto fault = bar.fault(tensor.bar_offset, tensor.bytes, sim.stream);
            CHECK(fault);
            CHECK_EQ(sim.sum(fault->address(), fault->bytes()),
                     check::sum(pattern(tensor.bytes, tensor.seed)));
        }
        sim.stream.synchronize();
        CHECK(bar.free_memory(UINT64_MAX).bytes > 0);
    }
    CHECK_EQ(bar.try_bind(sources, segments).status(), Status::invalid_argument);
}

TEST(a_bar_is_bound_by_path) {
    Sim sim;
    Folder folder;
    const std::string path = folder.write("model.gguf", packed_file());
    const vbar::Bar bar = sim.device.create_bar(6 * PAGE);
    check_bound(sim, bar, vbar::file_at(path.c_str()));
}

TEST(a_bar_is_bound_by_descriptor) {
    Sim sim;
    Folder folder;
    const std::string path = folder.write("model.gguf", packed_file());
    const int file = open(path.c_str(), O_RDONLY);
    const vbar::Bar bar = sim.device.create_bar(6 * PAGE);
    const VbarBindSource source = vbar::file_of(file);
    CHECK(file >= 0);
    check_bound(sim, bar, source);
    close(file);
}

// The owner counts who still has the bytes.
TEST(a_bar_is_bound_to_memory) {
    Sim sim;
    const auto owner = std::make_shared<const std::string>(packed_file());
    {
        vbar::Bar bar = sim.device.create_bar(6 * PAGE);
        const VbarBindSource sources[] = {
            vbar::memory_of(owner, owner->data(), owner->size())};
        const Packed &tensor = PACKED[0];
        const VbarBindSegment segments[] = {
            vbar::segment(tensor.bar_offset, tensor.file_offset, tensor.bytes)};
        bar.bind(sources, segments);
        {
            auto fault = bar.fault(tensor.bar_offset, tensor.bytes, sim.stream);
            CHECK(fault);
            CHECK_EQ(sim.sum(fault->address(), fault->bytes()),
                     check::sum(pattern(tensor.bytes, tensor.seed)));
        }
        CHECK_EQ(owner.use_count(), 2);
        CHECK(sim.device.statistics().source_host_pageable_bytes >= tensor.bytes);
        sim.stream.synchronize();
        bar.end_of_run(sim.stream);
        bar.destroy_wait();
        CHECK_EQ(owner.use_count(), 1);
    }
    const vbar::Bar other = sim.device.create_bar(6 * PAGE);
    const VbarBindSegment segments[] = {vbar::segment(0, 0, 100)};
    const VbarBindSource required[] = {
        vbar::memory_of(owner, owner->data(), owner->size(), vbar::HostLock::required)};
    CHECK_EQ(other.try_bind(required, segments).status(), Status::invalid_argument);
    CHECK_EQ(owner.use_count(), 1);
    std::uint32_t released = 0;
    const VbarBindSource sources[] = {
        vbar::memory_at(owner->data(), owner->size(), &released)};
    other.bind(sources, segments);
    CHECK_EQ(released, 0U);
    CHECK(other.fault(0, 100, sim.stream));
    std::uint32_t refused = 0;
    const VbarBindSource again[] = {vbar::memory_at(owner->data(), owner->size(), &refused)};
    CHECK_EQ(other.try_bind(again, segments).status(), Status::invalid_argument);
    CHECK(refused == 1 && released == 0);
}

TEST(a_range_larger_than_the_budget_is_read_from_the_host) {
    Folder folder;
    const std::string path = folder.write("packed.bin", packed_file());
    vbar::DeviceOptions options = check::small(16);
    options.budget_bytes = 2 * PAGE;
    options.host_mapped = vbar::HostMapped::on;
    const vbar::Device device = vbar::Device::open(options);
    const vbar::sim::Stream stream = vbar::sim::Stream::create(device);
    const vbar::Bar bar = device.create_bar(6 * PAGE);
    const VbarBindSource sources[] = {vbar::file_at(path.c_str())};
    const Packed &tensor = PACKED[0];
    const VbarBindSegment segments[] = {vbar::segment(0, tensor.file_offset, tensor.bytes)};
    bar.bind(sources, segments);
    auto fault = bar.fault(0, tensor.bytes, stream);
    CHECK(fault && fault.host_mapped() && !fault.offloaded() && fault.needed_bytes() == 0);
    CHECK_EQ(fault.reason(), vbar::Reason::host_mapped);
    CHECK_EQ(std::string(vbar::text(fault.reason())), "host_mapped");
    CHECK(fault->bytes() == tensor.bytes && fault->address() == bar.info().address);
    CHECK_EQ(device.statistics().host_mapped_bytes, 4 * PAGE);
    CHECK_EQ(device.statistics().used_bytes, 0U);
    // The budget is the others', as here the word's that the sum goes to.
    CHECK_EQ(check::Word(device, stream).sum(fault->address(), fault->bytes()),
             check::sum(pattern(tensor.bytes, tensor.seed)));
    CHECK_EQ(device.trim_host_frames(), 0U);

    const VbarRange ranges[] = {{bar.get(), 0, PAGE}, {bar.get(), 0, 3 * PAGE}};
    auto all = device.fault_many(ranges, stream);
    CHECK(all && all.size() == 2 && all.reason() == vbar::Reason::host_mapped);
    all.take().clear();
    fault->reset();
    CHECK(!fault);
    stream.synchronize();
    CHECK_EQ(device.trim_host_frames(), 4 * PAGE);
    CHECK_EQ(device.statistics().host_mapped_bytes, 0U);
}

TEST(bytes_are_counted_by_source) {
    Folder folder;
    const std::string path = folder.write("packed.bin", packed_file());
    vbar::DeviceOptions options = check::small(16);
    options.prefer = vbar::Prefer::ram;
    options.host_allowance_bytes = 0;
    const vbar::Device device = vbar::Device::open(options);
    const vbar::sim::Stream stream = vbar::sim::Stream::create(device);
    const vbar::Bar bar = device.create_bar(6 * PAGE);
    const VbarBindSource sources[] = {vbar::file_at(path.c_str())};
    const Packed &tensor = PACKED[0];
    const VbarBindSegment segments[] = {vbar::segment(0, tensor.file_offset, tensor.bytes)};
    bar.bind(sources, segments);
    { CHECK(bar.fault(0, tensor.bytes, stream)); }
    const vbar::Statistics told = device.statistics();
    CHECK_EQ(told.source_page_cache_bytes + told.source_disk_bytes, told.filled_bytes);
    CHECK(told.filled_bytes >= tensor.bytes && told.source_direct_bytes == 0);
    CHECK(told.locked_bytes == 0 && told.locked_ring_bytes == 0 && told.locked_cache_bytes == 0);
    CHECK_EQ(device.trim_host(0), 0U);
}

TEST(binding_fails_by_status) {
    Sim sim;
    Folder folder;
    const std::string path = folder.write("model.gguf", packed_file());
    const VbarBindSource sources[] = {vbar::file_at(path.c_str())};
    const auto bound = [&](const VbarBindSegment &segment) {
        const vbar::Bar bar = sim.device.create_bar(6 * PAGE);
        const std::vector<VbarBindSegment> segments{segment};
        return bar.try_bind(sources, segments).status();
    };
    CHECK_EQ(bound(vbar::segment(0, 0, 100)), Status::ok);
    CHECK_EQ(bound(vbar::segment(0, 0, 100, 1)), Status::invalid_argument);
    CHECK_EQ(bound(vbar::segment(7 * PAGE, 0, 100)), Status::invalid_argument);
    CHECK(bound(vbar::segment(0, 5 * PAGE, 1)) != Status::ok);
    CHECK(bound(vbar::segment(0, UINT64_MAX, 100)) != Status::ok);

    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const VbarBindSource missing[] = {vbar::file_at("/nowhere/model.gguf")};
    const VbarBindSegment one[] = {vbar::segment(0, 0, 100)};
    CHECK_EQ(bar.try_bind(missing, one).status(), Status::io);
    CHECK_EQ(bar.try_bind({}, one).status(), Status::invalid_argument);
    // A failed binding leaves the VBAR as it was.
    bar.bind(sources, one);
    CHECK(bar.fault(0, 100, sim.stream));
}

TEST(a_file_that_changes_is_noticed) {
    Sim sim;
    Folder folder;
    const std::string path = folder.write("model.gguf", packed_file());
    const vbar::Bar bar = sim.device.create_bar(PAGE);
    const VbarBindSource sources[] = {vbar::file_at(path.c_str())};
    const VbarBindSegment segments[] = {vbar::segment(0, 0, 100)};
    bar.bind(sources, segments);
    folder.write("model.gguf", packed_file() + "more");
    CHECK_THROWS(file_changed, bar.fault(0, 100, sim.stream));
    CHECK_EQ(bar.residency(0, 1)[0].pin_count, 0U);
}
