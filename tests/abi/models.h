/*
 * Small safetensors files for the C tests, of bytes that can be computed again.
 */
#ifndef VBAR_TESTS_MODELS_H
#define VBAR_TESTS_MODELS_H

#include "check.h"

/* Byte `at` of every file that is written here. No two pages of it are alike. */
static inline unsigned char file_byte(uint64_t at) {
    uint64_t mixed = (at + 1) * UINT64_C(0x9E3779B97F4A7C15);
    return (unsigned char)(mixed >> 56);
}

/* Writes `bytes` such bytes, the first of them byte `from`. */
static inline void write_bytes(FILE *file, uint64_t from, uint64_t bytes) {
    for (uint64_t at = from; at < from + bytes; at++) {
        CHECK(putc(file_byte(at), file) != EOF);
    }
}

/* A file of `bytes` bytes. */
static inline void write_file(const char *path, uint64_t bytes) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    write_bytes(file, 0, bytes);
    CHECK(fclose(file) == 0);
}

/* A model of tensors "t0", "t1"... of U8, each of `tensor_bytes` bytes; where they start. */
static inline uint64_t write_model(const char *path, unsigned tensor_count,
                                   uint64_t tensor_bytes) {
    char header[4096];
    int length = snprintf(header, sizeof header, "{\"__metadata__\":{\"maker\":\"a test\"}");
    for (unsigned at = 0; at < tensor_count; at++) {
        uint64_t from = at * tensor_bytes;
        length += snprintf(header + length, sizeof header - (size_t)length,
                           ",\"t%u\":{\"dtype\":\"U8\",\"shape\":[%" PRIu64
                           "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                           at, tensor_bytes, from, from + tensor_bytes);
        CHECK((size_t)length < sizeof header - 1);
    }
    header[length++] = '}';
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    for (unsigned byte = 0; byte < 8; byte++) {
        CHECK(putc((int)((uint64_t)length >> (8 * byte) & 0xff), file) != EOF);
    }
    CHECK(fwrite(header, 1, (size_t)length, file) == (size_t)length);
    uint64_t data = 8 + (uint64_t)length;
    write_bytes(file, data, tensor_count * tensor_bytes);
    CHECK(fclose(file) == 0);
    return data;
}

/* Whether `bytes` bytes are those of the file from `from` on. */
static inline bool are_file_bytes(const unsigned char *bytes, uint64_t from, uint64_t count) {
    for (uint64_t at = 0; at < count; at++) {
        if (bytes[at] != file_byte(from + at)) return false;
    }
    return true;
}

#endif
