/*
 * Every function of the headers with arguments that no program should pass: NULL, ids that were
 * made up, closed or belong to something else, numbers near 2^64, pointers that are not aligned,
 * texts that are not UTF-8. Each call comes back with a status and a message, writes nothing, and
 * changes nothing that lives.
 *
 *     hostile --list    the functions that have a case
 *     hostile FOLDER    all cases; FOLDER is for files
 *
 * The Rust test compares the list with the headers: a new function needs a case.
 */
#include "hostile.h"

#include "models.h"

struct World world;

const uint64_t edges[] = {
    0,
    1,
    511,
    4095,
    UINT32_MAX,
    UINT64_C(1) << 32,
    (UINT64_C(1) << 47) - 1,
    INT64_MAX,
    UINT64_C(1) << 63,
    UINT64_MAX - 65536,
    UINT64_MAX - 1,
    UINT64_MAX,
};
const size_t edge_count = COUNT_OF(edges);

/* One living id and one closed id of each kind; 0 where there is none. */
static uint64_t live[KIND_COUNT], closed[KIND_COUNT];

static const uint64_t made_up[] = {0, 1, 0xdead, UINT32_MAX, UINT64_C(1) << 63, UINT64_MAX};

static uint64_t place[1024], first;

size_t bad_id_count(void) {
    return COUNT_OF(made_up) + 2 * KIND_COUNT + 4;
}

uint64_t bad_id(enum Kind kind, size_t at) {
    if (at < COUNT_OF(made_up)) return made_up[at];
    at -= COUNT_OF(made_up);
    if (at < KIND_COUNT) return closed[at];
    at -= KIND_COUNT;
    if (at < KIND_COUNT) return at == kind ? 0 : live[at];
    at -= KIND_COUNT;
    /* Nearly the living one: slots that were never used, another generation, another kind. */
    static const uint64_t flips[] = {0x800000, 0xfffff0, UINT64_C(1) << 24, UINT64_C(1) << 60};
    return live[kind] == 0 ? 0 : live[kind] ^ flips[at];
}

void *untouched(void) {
    memset(place, 0xEE, sizeof place);
    first = place[0];
    return place;
}

void *untouched_struct(size_t size) {
    untouched();
    memcpy(place, &size, sizeof size);
    first = place[0];
    return place;
}

bool is_untouched(void) {
    bool same = place[0] == first;
    for (size_t at = 1; at < COUNT_OF(place); at++) {
        same = same && place[at] == UINT64_C(0xEEEEEEEEEEEEEEEE);
    }
    return same;
}

void *unaligned(void) {
    return (char *)untouched() + 1;
}

static VbarToken fault_token(uint64_t page) {
    VbarFault fault;
    OK(vbar_bar_fault(world.bar, page * world.page, world.page, VBAR_STREAM_NONE, &fault));
    CHECK(fault.outcome == VBAR_OUTCOME_RESIDENT);
    return fault.token;
}

/* A graph of nothing. */
static VbarSimGraph captured(VbarDevice device) {
    VbarSimGraph graph;
    VbarStream stream;
    OK(vbar_sim_stream_create(device, &stream));
    OK(vbar_sim_stream_begin_capture(device, stream, 0));
    OK(vbar_sim_stream_end_capture(device, stream, &graph));
    OK(vbar_sim_stream_destroy(device, stream));
    return graph;
}

/* Closes one thing of each kind, which leaves ids behind that name nothing. */
static void make_closed_ids(void) {
    VbarDeviceOptions options = test_options(16);
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    VbarBar bar;
    OK(vbar_bar_create(device, world.page, &bar));
    VbarAllocation allocation;
    OK(vbar_bar_allocate(bar, 512, &allocation));
    VbarModel model;
    OK(vbar_model_open(device, world.path, &model));
    VbarToken token = fault_token(1);
    OK(vbar_token_unpin(token, VBAR_STREAM_NONE));
    OK(vbar_bar_destroy(bar));
    OK(vbar_model_close(model));
    if (!on_gpu()) {
        VbarSim sim;
        OK(vbar_sim_open(device, &sim));
        OK(vbar_sim_close(sim));
        closed[SIM] = sim.id;
        VbarSimGraph graph = captured(device);
        OK(vbar_sim_graph_destroy(graph));
        closed[SIM_GRAPH] = graph.id;
    }
    OK(vbar_device_close(device));
    closed[DEVICE] = device.id;
    closed[BAR] = bar.id;
    closed[ALLOCATION] = allocation.id;
    closed[MODEL] = model.id;
    closed[TOKEN] = token.id;
}

static void make_world(char *path, char *raw_path) {
    world.page = page_bytes();
    world.path = path;
    world.raw_path = raw_path;
    write_model(path, 3, 3 * world.page / 2);
    write_file(raw_path, 3 * world.page);
    world.device = open_device(16);
    if (!on_gpu()) {
        OK(vbar_sim_open(world.device, &world.sim));
        world.graph = captured(world.device);
    }
    OK(vbar_bar_create(world.device, 8 * world.page, &world.bar));
    OK(vbar_bar_allocate(world.bar, world.page + 1, &world.allocation));
    world.token = fault_token(0);
    OK(vbar_model_open(world.device, path, &world.model));
    VbarModelInfo info = {.size = sizeof info};
    OK(vbar_model_info(world.model, &info));
    world.model_bar = info.bar;
    make_closed_ids();
    live[DEVICE] = world.device.id;
    live[BAR] = world.bar.id;
    live[ALLOCATION] = world.allocation.id;
    live[TOKEN] = world.token.id;
    live[MODEL] = world.model.id;
    live[SIM] = world.sim.id;
    live[SIM_GRAPH] = world.graph.id;
}

static void end_world(void) {
    OK(vbar_token_unpin(world.token, VBAR_STREAM_NONE));
    OK(vbar_model_close(world.model));
    OK(vbar_bar_destroy_wait(world.bar));
    if (!on_gpu()) {
        OK(vbar_sim_graph_destroy(world.graph));
        OK(vbar_sim_close(world.sim));
    }
    close_device(world.device);
}

int main(int count, char **arguments) {
    start();
    const struct Case *tables[] = {status_cases, device_cases, bar_cases, token_cases,  model_cases,
                                   dlpack_cases, sim_cases,    torch_cases, transfer_cases};
    bool list = count == 2 && strcmp(arguments[1], "--list") == 0;
    if (!list) {
        CHECK(count == 2);
        static char path[4096], raw_path[4096];
        snprintf(path, sizeof path, "%s/hostile.safetensors", arguments[1]);
        snprintf(raw_path, sizeof raw_path, "%s/hostile.raw", arguments[1]);
        make_world(path, raw_path);
    }
    for (size_t table = 0; table < COUNT_OF(tables); table++) {
        for (const struct Case *next = tables[table]; next->function; next++) {
            if (list) {
                puts(next->function);
                continue;
            }
            VbarStatistics before = statistics(world.device);
            next->run();
            VbarStatistics after = statistics(world.device);
            bool same = before.bar_count == after.bar_count &&
                        before.budget_bytes == after.budget_bytes &&
                        after.quarantined_bytes == 0 && after.resident_page_count >= 1;
            if (!same) fprintf(stderr, "after the case of %s:\n", next->function);
            CHECK(same);
        }
    }
    if (!list) end_world();
    return 0;
}
