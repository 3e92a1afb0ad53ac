/*
 * Model files that are not what they should be, or do not stay so (scenario 38), and files of
 * other formats: bound by path and by descriptor, at any offset.
 */
#define _POSIX_C_SOURCE 200809L
#include "device.h"
#include "models.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#define PASSES 50

static char path[4096];

static uint64_t file_sum(const char *name) {
    FILE *file = fopen(name, "rb");
    CHECK(file != NULL);
    uint64_t sum = 0;
    for (int byte; (byte = getc(file)) != EOF;) {
        sum = (sum ^ (uint64_t)byte) * UINT64_C(0x100000001B3) + 1;
    }
    CHECK(fclose(file) == 0);
    return sum;
}

static void check_bytes(VbarDevice device, uint64_t address, uint64_t from, uint64_t bytes) {
    unsigned char *copy = malloc(bytes);
    CHECK(copy != NULL);
    copy_from_device(device, copy, address, bytes);
    CHECK(are_file_bytes(copy, from, bytes));
    free(copy);
}

static VbarTensor tensor_of(VbarModel model, const char *name, uint64_t *index) {
    VbarTensor tensor = {.size = sizeof tensor};
    OK(vbar_model_find(model, name, index));
    OK(vbar_model_tensor(model, *index, &tensor));
    return tensor;
}

/* Every byte of every tensor is the file's, pass after pass in less memory than the model. */
static void passes_are_exact_and_leave_the_file_alone(VbarDevice device) {
    uint64_t bytes = page_bytes() + page_bytes() / 2 + 7;
    uint64_t data = write_model(path, 6, bytes), sum = file_sum(path);
    struct stat before, after;
    CHECK(stat(path, &before) == 0);
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    VbarModelInfo info = {.size = sizeof info};
    OK(vbar_model_info(model, &info));
    uint64_t evicted = statistics(device).evicted_page_count;
    for (int pass = 0; pass < PASSES; pass++) {
        for (uint64_t at = 0; at < 6; at++) {
            VbarTensor tensor = {.size = sizeof tensor};
            OK(vbar_model_tensor(model, at, &tensor));
            CHECK(tensor.bytes == bytes && tensor.file_offset == data + at * bytes);
            VbarFault told;
            OK(vbar_model_fault(model, at, 0, &told));
            CHECK(told.outcome == VBAR_OUTCOME_RESIDENT && told.address == tensor.address);
            if (pass % 10 == 0) check_bytes(device, told.address, tensor.file_offset, bytes);
            OK(vbar_token_unpin(told.token, 0));
        }
        VbarFreed freed;
        OK(vbar_bar_free_memory(info.bar, UINT64_MAX, &freed));
        CHECK(freed.shortfall == VBAR_SHORTFALL_NONE || freed.shortfall ==
              VBAR_SHORTFALL_NOTHING_RESIDENT);
    }
    CHECK(statistics(device).evicted_page_count >= evicted + 9 * PASSES);
    OK(vbar_model_close(model));
    CHECK(stat(path, &after) == 0);
    CHECK(file_sum(path) == sum && after.st_size == before.st_size);
    CHECK(after.st_mtim.tv_sec == before.st_mtim.tv_sec);
    CHECK(after.st_mtim.tv_nsec == before.st_mtim.tv_nsec);
}

static void check_refused(VbarDevice device, const char *words) {
    VbarModel model = {0};
    FAILS(vbar_model_open(device, path, &model), VBAR_STATUS_FORMAT, words);
    CHECK(model.id == 0);
}

/* There is nothing to bind, and the message says of what. */
static void models_without_bytes_are_refused_at_open(VbarDevice device) {
    VbarModel model;
    write_model(path, 0, 0);
    FAILS(vbar_model_open(device, path, &model), VBAR_STATUS_INVALID_ARGUMENT,
          "files.safetensors: the model has no tensors");
    write_model(path, 3, 0);
    FAILS(vbar_model_open(device, path, &model), VBAR_STATUS_INVALID_ARGUMENT,
          "none of the model's 3 tensors has a byte");
}

/* (a) shorter or longer than the header says, (d) trailing bytes: refused when it is opened. */
static void wrong_sizes_are_refused_at_open(VbarDevice device) {
    uint64_t data = write_model(path, 2, 1000);
    CHECK(truncate(path, (off_t)(data + 1999)) == 0);
    check_refused(device, "'t1'");
    CHECK(truncate(path, (off_t)(data + 999)) == 0);
    check_refused(device, "'t");
    CHECK(truncate(path, (off_t)(data + 2001)) == 0);
    check_refused(device, "1 bytes follow the last tensor");
    CHECK(truncate(path, (off_t)(data - 1)) == 0);
    check_refused(device, "does not fit in the file");
    CHECK(truncate(path, 7) == 0);
    check_refused(device, "too few");
    CHECK(truncate(path, 0) == 0);
    check_refused(device, "0 bytes");
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite("\xff\xff\xff\xff\xff\xff\xff\xff{}", 1, 10, file) == 10);
    CHECK(fclose(file) == 0);
    check_refused(device, "18446744073709551615");
}

/* (b) cut off between open and fault: a status, no signal, nothing held; what is resident stays. */
static void a_file_cut_off_meanwhile_is_an_error(VbarDevice device) {
    write_model(path, 3, 2 * page_bytes());
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    uint64_t index;
    VbarTensor tensor = tensor_of(model, "t0", &index);
    VbarFault told;
    OK(vbar_model_fault(model, index, 0, &told));
    check_bytes(device, told.address, tensor.file_offset, tensor.bytes);
    uint64_t resident = statistics(device).resident_page_count;
    CHECK(truncate(path, 100) == 0);
    for (int round = 0; round < 3; round++) {
        tensor_of(model, "t2", &index);
        VbarFault refused = {0};
        FAILS(vbar_model_fault(model, index, 0, &refused), VBAR_STATUS_FILE_CHANGED,
              "files.safetensors");
        CHECK(refused.token.id == 0);
        CHECK(statistics(device).resident_page_count == resident);
    }
    check_bytes(device, told.address, tensor.file_offset, tensor.bytes);
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_model_close(model));
    CHECK(statistics(device).resident_page_count == 0);
}

/* Written to meanwhile, its size as it was: told at the next fill. */
static void a_file_written_meanwhile_is_told(VbarDevice device) {
    uint64_t data = write_model(path, 2, 2 * page_bytes());
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    /* Clocks of file systems tick a few milliseconds apart. */
    const struct timespec tick = {.tv_nsec = 50000000};
    CHECK(nanosleep(&tick, NULL) == 0);
    int file = open(path, O_WRONLY);
    CHECK(file >= 0 && pwrite(file, "other", 5, (off_t)data) == 5);
    CHECK(close(file) == 0);
    VbarFault told;
    FAILS(vbar_model_fault(model, 0, 0, &told), VBAR_STATUS_FILE_CHANGED, "modification time");
    OK(vbar_model_close(model));
}

/* As a GGUF file is bound: tensors at offsets that no page and no alignment of ours knows. */
static void odd_offsets_are_bound(VbarDevice device, bool by_descriptor) {
    uint64_t page = page_bytes();
    write_file(path, 5 * page);
    int descriptor = open(path, O_RDONLY);
    CHECK(descriptor >= 0);
    VbarBindSource source = {.path = by_descriptor ? NULL : path, .descriptor = descriptor};
    const VbarBindSegment segments[] = {
        {.bar_offset = 3 * page + 32, .source_offset = 1237, .bytes = page + 1},
        {.bar_offset = 0, .source_offset = 3 * page - 3, .bytes = 2 * page + 3},
        {.bar_offset = 2 * page + 512, .source_offset = 5, .bytes = 1},
        /* The same bytes a second time, and none. */
        {.bar_offset = 2 * page + 1024, .source_offset = 5, .bytes = 33},
        {.bar_offset = 2 * page + 2048, .source_offset = 5 * page, .bytes = 0},
    };
    VbarBar bar;
    OK(vbar_bar_create(device, 5 * page, &bar));
    OK(vbar_bar_bind(bar, &source, 1, segments, COUNT_OF(segments)));
    CHECK(close(descriptor) == 0);
    for (int pass = 0; pass < 3; pass++) {
        for (size_t at = 0; at < COUNT_OF(segments); at++) {
            const VbarBindSegment *segment = &segments[at];
            VbarFault told;
            OK(vbar_bar_fault(bar, segment->bar_offset, segment->bytes, 0, &told));
            CHECK(told.outcome == VBAR_OUTCOME_RESIDENT && told.bytes == segment->bytes);
            check_bytes(device, told.address, segment->source_offset, segment->bytes);
            OK(vbar_token_unpin(told.token, 0));
        }
        VbarFreed freed;
        OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    }
    FAILS(vbar_bar_bind(bar, &source, 1, segments, 1),
          by_descriptor ? VBAR_STATUS_IO : VBAR_STATUS_INVALID_ARGUMENT, NULL);
    OK(vbar_bar_destroy_wait(bar));
}

/* Bytes that somebody faulted before are not the file's, so it is too late to bind. */
static void a_bar_that_was_used_is_not_bound(VbarDevice device) {
    write_file(path, 2 * page_bytes());
    VbarBar bar;
    VbarFault told;
    OK(vbar_bar_create(device, 2 * page_bytes(), &bar));
    OK(vbar_bar_fault(bar, 0, page_bytes(), 0, &told));
    VbarBindSource source = {.path = path};
    VbarBindSegment segment = {.bytes = page_bytes()};
    FAILS(vbar_bar_bind(bar, &source, 1, &segment, 1), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    OK(vbar_token_unpin(told.token, 0));
    FAILS(vbar_bar_bind(bar, &source, 1, &segment, 1), VBAR_STATUS_INVALID_ARGUMENT, NULL);
    VbarFreed freed;
    OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    OK(vbar_bar_destroy_wait(bar));
}

/* Memory of the program, beside a file: its owner is told once, when the VBAR is gone. */
static void memory_is_bound(VbarDevice device) {
    uint64_t page = page_bytes();
    write_file(path, 2 * page);
    unsigned char *memory = malloc(3 * page);
    CHECK(memory != NULL);
    for (uint64_t at = 0; at < 3 * page; at++) memory[at] = file_byte(at);
    uint32_t released = 0;
    const VbarBindSource sources[] = {
        {.memory = memory, .memory_bytes = 3 * page, .release = vbar_flag_raise,
         .context = &released},
        {.path = path},
    };
    const VbarBindSegment segments[] = {
        {.bar_offset = 0, .source_offset = 9, .bytes = page + 100},
        {.bar_offset = page + 512, .source_offset = 77, .bytes = page, .source = 1},
        {.bar_offset = 3 * page, .source_offset = 2 * page, .bytes = page},
    };
    VbarBar bar;
    OK(vbar_bar_create(device, 4 * page, &bar));
    VbarStatistics before = statistics(device);
    OK(vbar_bar_bind(bar, sources, 2, segments, COUNT_OF(segments)));
    for (int pass = 0; pass < 3; pass++) {
        for (size_t at = 0; at < COUNT_OF(segments); at++) {
            VbarFault told;
            OK(vbar_bar_fault(bar, segments[at].bar_offset, segments[at].bytes, 0, &told));
            CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
            check_bytes(device, told.address, segments[at].source_offset, segments[at].bytes);
            OK(vbar_token_unpin(told.token, 0));
        }
        VbarFreed freed;
        OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    }
    VbarStatistics after = statistics(device);
    CHECK(after.source_host_pageable_bytes - before.source_host_pageable_bytes >=
          3 * (2 * page + 100));
    CHECK(after.source_host_locked_bytes == before.source_host_locked_bytes);
    CHECK(released == 0);
    OK(vbar_bar_destroy_wait(bar));
    CHECK(released == 1);
    free(memory);
}

/* Every byte that a fill takes is counted once, by where it came from. */
static void bytes_are_counted_by_source(uint32_t prefer, uint64_t allowance) {
    uint64_t page = page_bytes();
    write_model(path, 2, 2 * page);
    /* A device of its own. The other one is the same GPU, whose options stay. */
    if (on_gpu()) return;
    VbarDeviceOptions options = test_options(8);
    options.prefer = prefer;
    options.host_allowance_bytes = allowance;
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    for (uint64_t index = 0; index < 2; index++) {
        VbarFault told;
        OK(vbar_model_fault(model, index, 0, &told));
        OK(vbar_token_unpin(told.token, 0));
    }
    VbarStatistics now = statistics(device);
    CHECK(now.filled_bytes >= 4 * page);
    uint64_t sources = now.source_locked_cache_bytes + now.source_registered_bytes +
                       now.source_page_cache_bytes + now.source_disk_bytes;
    CHECK(sources == now.filled_bytes);
    CHECK(now.source_direct_bytes <= now.source_disk_bytes);
    CHECK(prefer != VBAR_PREFER_RAM || now.source_direct_bytes == 0);
    CHECK(now.locked_bytes ==
          now.locked_ring_bytes + now.locked_cache_bytes + now.locked_registered_bytes +
              now.locked_saved_bytes);
    CHECK(allowance != VBAR_HOST_ALLOWANCE_NONE || now.locked_bytes == 0);
    uint64_t freed;
    OK(vbar_device_trim_host(device, 0, &freed));
    /* One slot stays, where there are any. */
    CHECK(freed <= now.locked_bytes && freed >= now.locked_cache_bytes);
    CHECK(statistics(device).locked_bytes == now.locked_bytes - freed);
    CHECK(statistics(device).locked_cache_bytes == 0);
    OK(vbar_model_close(model));
    OK(vbar_device_close(device));
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2);
    snprintf(path, sizeof path, "%s/files.safetensors", arguments[1]);
    VbarDevice device = open_device(8);
    passes_are_exact_and_leave_the_file_alone(device);
    models_without_bytes_are_refused_at_open(device);
    wrong_sizes_are_refused_at_open(device);
    a_file_cut_off_meanwhile_is_an_error(device);
    a_file_written_meanwhile_is_told(device);
    odd_offsets_are_bound(device, false);
    odd_offsets_are_bound(device, true);
    a_bar_that_was_used_is_not_bound(device);
    memory_is_bound(device);
    close_device(device);
    for (uint32_t prefer = VBAR_PREFER_AUTO; prefer <= VBAR_PREFER_DISK; prefer++) {
        bytes_are_counted_by_source(prefer, 0);
        bytes_are_counted_by_source(prefer, 64 * page_bytes());
        bytes_are_counted_by_source(prefer, VBAR_HOST_ALLOWANCE_NONE);
    }
    return 0;
}
