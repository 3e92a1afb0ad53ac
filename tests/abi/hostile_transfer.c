/*
 * Hostile calls of copies that a program asks for itself. See hostile.c.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hostile.h"

static const int32_t no_descriptors[] = {-1, INT32_MIN};

/* A page of a bar of its own, which is pinned: the world's may have lost theirs. */
static VbarBar own_bar;
static VbarFault own_page;

static uint64_t pin(void) {
    OK(vbar_bar_create(world.device, world.page, &own_bar));
    OK(vbar_bar_fault(own_bar, 0, world.page, 0, &own_page));
    CHECK(own_page.token.id != 0);
    return own_page.address;
}

static void unpin(void) {
    OK(vbar_token_unpin(own_page.token, 0));
    uint32_t pinned_count;
    OK(vbar_bar_end_of_run(own_bar, 0, VBAR_HELD_PINS_KEEP, &pinned_count));
    CHECK(pinned_count == 0);
    OK(vbar_bar_destroy_wait(own_bar));
}

static int open_raw(int flags) {
    int descriptor = open(world.raw_path, flags);
    CHECK(descriptor >= 0);
    return descriptor;
}

CASE(vbar_device_read_file) {
    int file = open_raw(O_RDONLY);
    uint64_t target = pin();
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_read_file(bad, file, 0, 16, target, 0));
    for (size_t at = 0; at < COUNT_OF(no_descriptors); at++) {
        FAILS(vbar_device_read_file(world.device, no_descriptors[at], 0, 16, target, 0),
              VBAR_STATUS_INVALID_ARGUMENT, "descriptor");
    }
    FAILS(vbar_device_read_file(world.device, 999999, 0, 16, target, 0), VBAR_STATUS_IO, "999999");
    FAILS(vbar_device_read_file(world.device, file, UINT64_MAX, 16, target, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_read_file(world.device, file, 0, 16, UINT64_MAX, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_read_file(world.device, file, 0, 16, target, VBAR_STREAM_NONE),
          VBAR_STATUS_INVALID_ARGUMENT, "stream");
    /* A file that ends before. */
    FAILS(vbar_device_read_file(world.device, file, 3 * world.page - 8, 16, target, 0),
          VBAR_STATUS_IO, "reading bytes");
    FAILS(vbar_device_read_file(world.device, file, UINT64_C(1) << 62, 16, target, 0),
          VBAR_STATUS_IO, "reading bytes");
    FAILS(vbar_device_read_file(world.device, file, UINT64_MAX - 64, 16, target, 0),
          VBAR_STATUS_IO, "reading bytes");
    OK(vbar_device_read_file(world.device, file, 0, 0, target, 0));
    OK(vbar_device_read_file(world.device, file, 3 * world.page - 16, 16, target, 0));
    close(file);
    unpin();
}

CASE(vbar_device_write_file) {
    int file = open_raw(O_RDONLY);
    uint64_t source = pin();
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_write_file(bad, file, 0, 16, source, 0));
    FAILS(vbar_device_write_file(world.device, -1, 0, 16, source, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "descriptor");
    FAILS(vbar_device_write_file(world.device, file, UINT64_MAX - 7, 16, source, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_write_file(world.device, file, 0, 16, UINT64_MAX - 7, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_write_file(world.device, file, 0, 16, source, VBAR_STREAM_NONE),
          VBAR_STATUS_INVALID_ARGUMENT, "stream");
    /* It is open for reading. */
    FAILS(vbar_device_write_file(world.device, file, 0, 16, source, 0), VBAR_STATUS_IO,
          "writing bytes");
    OK(vbar_device_write_file(world.device, file, 0, 0, source, 0));
    close(file);
    unpin();
}

CASE(vbar_device_copy_from_host) {
    static const char bytes[16];
    uint64_t target = pin();
    EACH_BAD_ID(DEVICE, VbarDevice, bad,
                vbar_device_copy_from_host(bad, bytes, sizeof bytes, target, 0));
    FAILS(vbar_device_copy_from_host(world.device, NULL, 16, target, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "memory");
    FAILS(vbar_device_copy_from_host(world.device, bytes, UINT64_MAX, target, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_copy_from_host(world.device, bytes, 16, UINT64_MAX, 0),
          VBAR_STATUS_INVALID_ARGUMENT, "2^64");
    FAILS(vbar_device_copy_from_host(world.device, bytes, 16, target, VBAR_STREAM_NONE),
          VBAR_STATUS_INVALID_ARGUMENT, "stream");
    OK(vbar_device_copy_from_host(world.device, NULL, 0, target, 0));
    OK(vbar_device_copy_from_host(world.device, bytes, sizeof bytes, target, 0));
    unpin();
}

CASE(vbar_device_lock_host) {
    void *memory = mmap(NULL, world.page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
    CHECK(memory != MAP_FAILED);
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_lock_host(bad, memory, world.page));
    FAILS(vbar_device_lock_host(world.device, NULL, 16), VBAR_STATUS_INVALID_ARGUMENT, "memory");
    FAILS(vbar_device_lock_host(world.device, memory, 0), VBAR_STATUS_INVALID_ARGUMENT, "memory");
    FAILS(vbar_device_lock_host(world.device, memory, UINT64_MAX), VBAR_STATUS_INVALID_ARGUMENT,
          "2^64");
    /* More than any process has. */
    FAILS(vbar_device_lock_host(world.device, memory, UINT64_C(1) << 62), VBAR_STATUS_DRIVER,
          "cuMemHostRegister");
    OK(vbar_device_lock_host(world.device, memory, world.page));
    FAILS(vbar_device_lock_host(world.device, memory, world.page), VBAR_STATUS_DRIVER,
          "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    OK(vbar_device_unlock_host(world.device, memory));
    CHECK(munmap(memory, world.page) == 0);
}

CASE(vbar_device_unlock_host) {
    static char bytes[16];
    EACH_BAD_ID(DEVICE, VbarDevice, bad, vbar_device_unlock_host(bad, bytes));
    FAILS(vbar_device_unlock_host(world.device, NULL), VBAR_STATUS_NOT_FOUND, "no locked range");
    FAILS(vbar_device_unlock_host(world.device, bytes), VBAR_STATUS_NOT_FOUND, "no locked range");
    char *memory = mmap(NULL, world.page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
    CHECK(memory != MAP_FAILED);
    OK(vbar_device_lock_host(world.device, memory, world.page));
    /* Within it, but not where it begins. */
    FAILS(vbar_device_unlock_host(world.device, memory + 4096), VBAR_STATUS_NOT_FOUND, "no locked");
    OK(vbar_device_unlock_host(world.device, memory));
    FAILS(vbar_device_unlock_host(world.device, memory), VBAR_STATUS_NOT_FOUND, "no locked range");
    CHECK(munmap(memory, world.page) == 0);
}

const struct Case transfer_cases[] = {
    ENTRY(vbar_device_read_file), ENTRY(vbar_device_write_file), ENTRY(vbar_device_copy_from_host),
    ENTRY(vbar_device_lock_host), ENTRY(vbar_device_unlock_host), {0},
};
