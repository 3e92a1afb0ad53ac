// The smallest whole program: every weight of a model, one after the other, in 4 GiB.
#include <cstdio>

#include <vbar.hpp>

int main(int count, char **arguments) try {
    if (count != 2) return std::fputs("usage: smallest MODEL\n", stderr), 1;
    // A GPU where there is one, else the simulated device.
    vbar::DeviceOptions options;
    options.driver = "auto";
    options.budget_bytes = 4ULL << 30;
    const auto device = vbar::Device::open(options);

    // Every tensor gets an address that never changes. Nothing is in device memory yet.
    const auto model = device.open_model(arguments[1]);
    const vbar::Stream stream = nullptr; // a CUstream or cudaStream_t
    for (std::uint64_t tensor = 0; tensor < model.tensor_count(); tensor++) {
        // Resident, pinned, and valid for work on `stream`: launch it here. When the guard ends
        // the bytes stay until that work is done, and not longer than they must.
        if (auto weight = model.fault(tensor, stream))
            std::printf("%llu bytes at %p\n", (unsigned long long)weight->bytes(), weight->data());
        else // Not resident, and the reason says why: use the host's copy.
            std::printf("offloaded: %s\n", vbar::text(weight.reason()));
    }
} catch (const vbar::Error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
