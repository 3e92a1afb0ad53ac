/*
 * Hostile calls of models. See hostile.c.
 */
#include "hostile.h"

#include <fcntl.h>

#define OPEN_FAILS(path, status, words) \
    do { \
        FAILS(vbar_model_open(world.device, path, untouched()), status, words); \
        CHECK(is_untouched()); \
    } while (0)

CASE(vbar_model_open) {
    BAD_PLACES(VbarModel, bad, vbar_model_open(world.device, world.path, bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_model_open(bad, world.path, untouched()));
    OPEN_FAILS(NULL, VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    OPEN_FAILS("", VBAR_STATUS_INVALID_ARGUMENT, "empty");
    OPEN_FAILS("/nonexistent", VBAR_STATUS_IO, "No such file");
    OPEN_FAILS("/nonexistent/\xff\xfe.safetensors", VBAR_STATUS_IO, "No such file");
    OPEN_FAILS("/dev/zero", VBAR_STATUS_FORMAT, "not a regular file");
    OPEN_FAILS("/proc/self", VBAR_STATUS_FORMAT, "safetensors");
    OPEN_FAILS(world.raw_path, VBAR_STATUS_FORMAT, "not a safetensors file");
    char *path = malloc(100000);
    CHECK(path != NULL);
    memset(path, 'a', 99999);
    path[99999] = '\0';
    OPEN_FAILS(path, VBAR_STATUS_IO, "too long");
    free(path);
}

#define DESCRIPTOR_FAILS(descriptor, name, status, words) \
    do { \
        FAILS(vbar_model_open_descriptor(world.device, descriptor, name, untouched()), status, \
              words); \
        CHECK(is_untouched()); \
    } while (0)

CASE(vbar_model_open_descriptor) {
    int descriptor = open(world.path, O_RDONLY);
    CHECK(descriptor >= 0);
    BAD_PLACES(VbarModel, bad,
               vbar_model_open_descriptor(world.device, descriptor, "name", bad));
    EACH_BAD_ID(DEVICE, VbarDevice, bad,
                vbar_model_open_descriptor(bad, descriptor, "name", untouched()));
    DESCRIPTOR_FAILS(-1, "name", VBAR_STATUS_INVALID_ARGUMENT, "descriptor -1");
    DESCRIPTOR_FAILS(INT32_MIN, NULL, VBAR_STATUS_INVALID_ARGUMENT, "descriptor");
    DESCRIPTOR_FAILS(INT32_MAX, "name", VBAR_STATUS_IO, "descriptor 2147483647");
    DESCRIPTOR_FAILS(descriptor, "\xff", VBAR_STATUS_INVALID_ARGUMENT, "UTF-8");
    int ends[2];
    CHECK(pipe(ends) == 0);
    DESCRIPTOR_FAILS(ends[0], "a pipe", VBAR_STATUS_FORMAT, "a pipe: not a regular file");
    close(ends[0]);
    close(ends[1]);
    int other = open(world.raw_path, O_RDONLY);
    DESCRIPTOR_FAILS(other, NULL, VBAR_STATUS_FORMAT, "descriptor");
    close(other);
    other = open(world.path, O_WRONLY);
    CHECK(other >= 0);
    DESCRIPTOR_FAILS(other, "write-only", VBAR_STATUS_IO, "write-only");
    close(other);
    /* It was not closed, and a model outlives the caller's descriptor. */
    VbarModel model;
    OK(vbar_model_open_descriptor(world.device, descriptor, NULL, &model));
    CHECK(close(descriptor) == 0);
    VbarFault fault;
    OK(vbar_model_fault(model, 0, VBAR_STREAM_NONE, &fault));
    CHECK(fault.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_token_unpin(fault.token, VBAR_STREAM_NONE));
    OK(vbar_model_close(model));
}

CASE(vbar_model_close) {
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_close(bad));
}

CASE(vbar_model_info) {
    BAD_STRUCTS(VbarModelInfo, bad, vbar_model_info(world.model, bad));
    EACH_BAD_ID(MODEL, VbarModel, bad,
                vbar_model_info(bad, untouched_struct(sizeof(VbarModelInfo))));
}

CASE(vbar_model_tensor) {
    BAD_STRUCTS(VbarTensor, bad, vbar_model_tensor(world.model, 0, bad));
    EACH_BAD_ID(MODEL, VbarModel, bad,
                vbar_model_tensor(bad, 0, untouched_struct(sizeof(VbarTensor))));
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] < 3) continue;
        FAILS(vbar_model_tensor(world.model, edges[at], untouched_struct(sizeof(VbarTensor))),
              VBAR_STATUS_INVALID_ARGUMENT, "3 tensors");
        CHECK(is_untouched());
    }
}

CASE(vbar_model_find) {
    BAD_PLACES(uint64_t, bad, vbar_model_find(world.model, "t0", bad));
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_find(bad, "t0", untouched()));
    FAILS(vbar_model_find(world.model, NULL, untouched()), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_model_find(world.model, "t0\xff", untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "UTF-8");
    FAILS(vbar_model_find(world.model, "", untouched()), VBAR_STATUS_NOT_FOUND, "tensor");
    FAILS(vbar_model_find(world.model, "t3", untouched()), VBAR_STATUS_NOT_FOUND, "t3");
    CHECK(is_untouched());
}

CASE(vbar_model_metadata) {
    BAD_PLACES(const char *, bad, vbar_model_metadata(world.model, "maker", bad));
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_metadata(bad, "maker", untouched()));
    FAILS(vbar_model_metadata(world.model, NULL, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    FAILS(vbar_model_metadata(world.model, "\xc3", untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "UTF-8");
    FAILS(vbar_model_metadata(world.model, "year", untouched()), VBAR_STATUS_NOT_FOUND, "year");
    CHECK(is_untouched());
}

CASE(vbar_model_file) {
    BAD_PLACES(const char *, bad, vbar_model_file(world.model, 0, bad));
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_file(bad, 0, untouched()));
    FAILS(vbar_model_file(world.model, 1, untouched()), VBAR_STATUS_INVALID_ARGUMENT, "1 files");
    FAILS(vbar_model_file(world.model, UINT32_MAX, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "4294967295");
    CHECK(is_untouched());
    const char *path;
    OK(vbar_model_file(world.model, 0, &path));
    CHECK(strcmp(path, world.path) == 0);
    /* A descriptor has no path, whatever it is called. */
    int descriptor = open(world.path, O_RDONLY);
    VbarModel nameless;
    OK(vbar_model_open_descriptor(world.device, descriptor, world.path, &nameless));
    OK(vbar_model_file(nameless, 0, &path));
    CHECK(path == NULL);
    OK(vbar_model_close(nameless));
    close(descriptor);
}

CASE(vbar_model_fault) {
    BAD_PLACES(VbarFault, bad, vbar_model_fault(world.model, 0, 0, bad));
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_fault(bad, 0, 0, untouched()));
    FAILS(vbar_model_fault(world.model, 3, 0, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "3 tensors");
    FAILS(vbar_model_fault(world.model, UINT64_MAX, 0, untouched()),
          VBAR_STATUS_INVALID_ARGUMENT, "18446744073709551615");
    CHECK(is_untouched());
    if (on_gpu()) return;
    FAILS(vbar_model_fault(world.model, 0, 0xdead, untouched()), VBAR_STATUS_DRIVER, "cuStream");
    CHECK(is_untouched());
}

CASE(vbar_model_prefetch) {
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_prefetch(bad, 0));
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] < 3) continue;
        FAILS(vbar_model_prefetch(world.model, edges[at]), VBAR_STATUS_INVALID_ARGUMENT,
              "3 tensors");
    }
    OK(vbar_model_prefetch(world.model, 2));
}

CASE(vbar_model_schedule_hint) {
    uint64_t order[] = {2, 0};
    EACH_BAD_ID(MODEL, VbarModel, bad, vbar_model_schedule_hint(bad, order, 2));
    FAILS(vbar_model_schedule_hint(world.model, NULL, 1), VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    FAILS(vbar_model_schedule_hint(world.model, unaligned(), 1), VBAR_STATUS_INVALID_ARGUMENT,
          "not aligned");
    static const size_t many[] = {SIZE_MAX, SIZE_MAX / 8, SIZE_MAX / 16 + 1};
    for (size_t at = 0; at < COUNT_OF(many); at++) {
        FAILS(vbar_model_schedule_hint(world.model, order, many[at]),
              VBAR_STATUS_INVALID_ARGUMENT, "are remembered");
    }
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] < 3) continue;
        order[1] = edges[at];
        FAILS(vbar_model_schedule_hint(world.model, order, 2), VBAR_STATUS_INVALID_ARGUMENT,
              "3 tensors");
    }
    CHECK(is_untouched());
    order[1] = 0;
    OK(vbar_model_schedule_hint(world.model, order, 2));
    OK(vbar_model_schedule_hint(world.model, NULL, 0));
}

const struct Case model_cases[] = {
    ENTRY(vbar_model_open),  ENTRY(vbar_model_open_descriptor), ENTRY(vbar_model_close),
    ENTRY(vbar_model_info),  ENTRY(vbar_model_tensor),          ENTRY(vbar_model_find),
    ENTRY(vbar_model_metadata), ENTRY(vbar_model_file), ENTRY(vbar_model_fault),
    ENTRY(vbar_model_prefetch), ENTRY(vbar_model_schedule_hint),
    {0},
};
