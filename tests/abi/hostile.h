/*
 * Hostile calls of every function: what the cases share. See hostile.c.
 */
#ifndef VBAR_TESTS_HOSTILE_H
#define VBAR_TESTS_HOSTILE_H

#include "check.h"

/* What has ids. */
enum Kind { DEVICE, BAR, ALLOCATION, TOKEN, MODEL, SIM, SIM_GRAPH, KIND_COUNT };

struct Case {
    const char *function;
    void (*run)(void);
};

/* The cases of one file, and the table that lists them. */
#define CASE(function) static void hostile_##function(void)
#define ENTRY(function) {#function, hostile_##function}

extern const struct Case status_cases[], device_cases[], bar_cases[], token_cases[];
extern const struct Case model_cases[], dlpack_cases[], sim_cases[], torch_cases[];
extern const struct Case transfer_cases[];

/* Things that live while the cases run. */
struct World {
    VbarDevice device;
    /* None on a GPU. */
    VbarSim sim;
    VbarSimGraph graph;
    /* Not bound, of 8 pages; `allocation` and `token` are of it. */
    VbarBar bar;
    VbarAllocation allocation;
    /* Of a fault of the first page of `bar`. */
    VbarToken token;
    VbarModel model;
    /* Of `model`. */
    VbarBar model_bar;
    /* Of `model`. */
    const char *path;
    /* Its two files of bytes: a model, and one that is none. */
    const char *raw_path;
    uint64_t page;
};
extern struct World world;

/* Ids that name nothing of a kind: made up, closed, and of other kinds. */
size_t bad_id_count(void);
uint64_t bad_id(enum Kind kind, size_t at);

/* A place for results that must stay as it is: a call that fails writes nothing. */
void *untouched(void);
/* The same, a struct that grows by now: its size field is set. */
void *untouched_struct(size_t size);
bool is_untouched(void);
/* The same, not aligned for anything. */
void *unaligned(void);

/* Numbers near every edge, 0 among them. */
extern const uint64_t edges[];
extern const size_t edge_count;

/* A call with each bad id fails and writes nothing. */
#define EACH_BAD_ID(kind, type, bad, call) \
    do { \
        for (size_t at_ = 0; at_ < bad_id_count(); at_++) { \
            type bad = {bad_id(kind, at_)}; \
            FAILS(call, (kind) == TOKEN ? VBAR_STATUS_STALE_TOKEN : VBAR_STATUS_STALE_HANDLE, \
                  (bad).id == 0 ? "0" : "0x"); \
            CHECK(is_untouched()); \
        } \
    } while (0)

/* A call that writes through `place` refuses NULL and a place that is not aligned. */
#define BAD_PLACES(type, place, call) \
    do { \
        type *place = NULL; \
        FAILS(call, VBAR_STATUS_INVALID_ARGUMENT, "NULL"); \
        place = unaligned(); \
        FAILS(call, VBAR_STATUS_INVALID_ARGUMENT, "not aligned"); \
        CHECK(is_untouched()); \
    } while (0)

/* A call that writes a struct that grows refuses sizes that no version has as well. */
#define BAD_STRUCTS(type, place, call) \
    do { \
        BAD_PLACES(type, place, call); \
        const size_t sizes_[] = {0, 1, sizeof(size_t), sizeof(type) - 1, 65537, SIZE_MAX}; \
        for (size_t at_ = 0; at_ < COUNT_OF(sizes_); at_++) { \
            type *place = untouched_struct(sizes_[at_]); \
            FAILS(call, VBAR_STATUS_INVALID_ARGUMENT, "size field"); \
            CHECK(is_untouched()); \
        } \
    } while (0)

#endif
