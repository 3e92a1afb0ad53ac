/*
 * Structs that grow: an older program's are shorter, a newer program's are longer.
 *
 * The library writes what the caller's version has and nothing more. It takes options that are
 * longer than its own as long as what it does not know is 0; else it would silently not do what
 * was asked.
 */
#include "check.h"
#include "models.h"

#define MORE 64

/* A struct as a newer header would have it. */
#define NEWER(type) \
    struct { \
        type known; \
        unsigned char more[MORE]; \
    }

static bool all_are(const unsigned char *bytes, size_t count, unsigned char value) {
    for (size_t at = 0; at < count; at++) {
        if (bytes[at] != value) return false;
    }
    return true;
}

/* An output: of a longer one the end stays as it is, and so does its size field. */
#define CHECK_OUTPUT(type, call) \
    do { \
        NEWER(type) newer; \
        memset(&newer, 0xEE, sizeof newer); \
        newer.known.size = sizeof newer; \
        type *place = &newer.known; \
        OK(call); \
        CHECK(newer.known.size == sizeof newer); \
        CHECK(all_are(newer.more, sizeof newer.more, 0xEE)); \
        type own; \
        memset(&own, 0xEE, sizeof own); \
        own.size = sizeof own; \
        place = &own; \
        OK(call); \
        CHECK(own.size == sizeof own); \
        size_t skip = sizeof own.size; \
        CHECK(memcmp((char *)&own + skip, (char *)&newer.known + skip, sizeof own - skip) == 0); \
        /* The last field was written: it is not what was there. */ \
        CHECK(!all_are((unsigned char *)&own + sizeof own - 4, 4, 0xEE)); \
    } while (0)

static void check_options(void) {
    NEWER(VbarDeviceOptions) newer;
    memset(&newer, 0, sizeof newer);
    newer.known = test_options(4);
    newer.known.size = sizeof newer;
    VbarDevice device;
    OK(vbar_device_open(&newer.known, &device));
    uint64_t budget, headroom;
    OK(vbar_device_budget(device, &budget, &headroom));
    CHECK(budget == 4 * page_bytes() && headroom == 0);
    OK(vbar_device_close(device));
    for (size_t at = 0; at < MORE; at++) {
        newer.more[at] = 1;
        FAILS(vbar_device_open(&newer.known, &device), VBAR_STATUS_INVALID_ARGUMENT,
              "older than the program");
        newer.more[at] = 0;
    }
    static const size_t sizes[] = {
        0, 1, 8, offsetof(VbarDeviceOptions, host_allowance_bytes) - 1, 65537, SIZE_MAX};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        newer.known.size = sizes[at];
        FAILS(vbar_device_open(&newer.known, &device), VBAR_STATUS_INVALID_ARGUMENT,
              "size field");
    }
}

/* Options that end where memory ends: not a byte more is read. */
static void check_options_at_the_end(void) {
    VbarDeviceOptions *options = malloc(sizeof *options);
    CHECK(options != NULL);
    *options = test_options(4);
    VbarDevice device;
    OK(vbar_device_open(options, &device));
    OK(vbar_device_close(device));
    free(options);
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2);
    check_options();
    check_options_at_the_end();

    VbarDevice device = open_device(8);
    char path[4096];
    snprintf(path, sizeof path, "%s/sizes.safetensors", arguments[1]);
    write_model(path, 2, page_bytes());
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    VbarModelInfo info = {.size = sizeof info};
    OK(vbar_model_info(model, &info));
    CHECK(info.tensor_count == 2 && info.file_count == 1 && info.reserved == 0);
    CHECK_OUTPUT(VbarDeviceInfo, vbar_device_info(device, place));
    CHECK_OUTPUT(VbarBarInfo, vbar_bar_info(info.bar, place));
    CHECK_OUTPUT(VbarModelInfo, vbar_model_info(model, place));
    CHECK_OUTPUT(VbarTensor, vbar_model_tensor(model, 1, place));
    CHECK_OUTPUT(VbarStatistics, vbar_device_statistics(device, place));
    if (!on_gpu()) {
        VbarSim sim;
        OK(vbar_sim_open(device, &sim));
        CHECK_OUTPUT(VbarSimLive, vbar_sim_live(sim, place));
        OK(vbar_sim_close(sim));
    }
    OK(vbar_model_close(model));
    close_device(device);
    return 0;
}
