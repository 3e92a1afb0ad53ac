/*
 * The load of soak.py that is written in C: models larger than the budget, weights of its own, ids
 * that come and go, knobs. Every byte that it reads from the device is compared with what it must
 * be: the file's, or what was written there last.
 *
 *     cc -std=c11 soak.c -o soak -lvbar -ldl && ./soak in=0 out=1 driver=sim model=PATH ...
 *
 * As a shared object, `soak_run` is the same load on a thread of another program. It does what the
 * lines say that it reads, and answers each with a line of JSON:
 *
 *     go COUNT  rounds, and with 0 as many as there are until the next line comes
 *     stop      waits for all of its work, and sets every knob back
 *     bare      gives all memory back, as far as it is this load's to give
 *     sample    what it counts, and what the library and the simulated device count
 *     time      seconds of a pass over its first model, with nothing else to do
 *     end       closes everything
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "soak.h"

/* Waits for a copy that is under way, and compares what it brought. */
static bool settle_slot(struct load *load, struct slot *slot) {
    if (!slot->wanted) return true;
    if (!synchronize(load, slot->stream)) return false;
    if (memcmp(slot->buffer, slot->wanted, slot->bytes) != 0) {
        uint64_t at = 0;
        while (slot->buffer[at] == slot->wanted[at]) at++;
        if (!load->wrong++) {
            snprintf(load->first_wrong, sizeof load->first_wrong,
                     "byte %" PRIu64 " of %" PRIu64 " is %02x and not %02x, in round %" PRIu64, at,
                     slot->bytes, slot->buffer[at], slot->wanted[at], load->rounds);
        }
    }
    load->verified += slot->bytes;
    slot->wanted = NULL;
    return true;
}

static bool settle_slots(struct load *load) {
    for (size_t at = 0; at < SLOTS; at++) {
        if (!settle_slot(load, &load->slots[at])) return false;
    }
    return true;
}

static bool injected(const struct load *load, const char *what) {
    return strcmp(load->inject, what) == 0;
}

/* Enqueues the copy of what a fault made resident, and gives its pins back: the bytes have to stay
 * for the copy all the same. */
static bool check_and_unpin(struct load *load, const VbarFault *fault,
                            const unsigned char *wanted, uint64_t bytes, VbarStream stream) {
    struct slot *slot = &load->slots[load->next_slot++ % SLOTS];
    if (!settle_slot(load, slot)) return false;
    if (injected(load, "byte") && drawn(load, 20) == 0) {
        unsigned char wrong = wanted[bytes / 2] ^ 0x5a;
        if (!to_device(load, fault->address + bytes / 2, &wrong, 1, stream)) return false;
        if (!synchronize(load, stream)) return false;
    }
    if (load->simulated) {
        if (!DONE(vbar_sim_copy_to_host(load->device, slot->buffer, fault->address, bytes,
                                        stream))) {
            return false;
        }
    } else if (!CUDA(load->cuda.to_host(slot->buffer, fault->address, bytes, (void *)stream))) {
        return false;
    }
    slot->wanted = wanted, slot->bytes = bytes, slot->stream = stream;
    return DONE(vbar_token_unpin(fault->token, stream));
}

/* Whether a fault has pins; counts those that were refused, which pressure explains. */
static bool has_pins(struct load *load, const VbarFault *fault) {
    if (fault->outcome != VBAR_OUTCOME_OFFLOADED) return true;
    switch (fault->reason) {
    case VBAR_REASON_TOO_LARGE:
    case VBAR_REASON_BUDGET:
    case VBAR_REASON_ALL_PINNED:
    case VBAR_REASON_ABOVE_WATERMARK:
    case VBAR_REASON_DRIVER_MEMORY:
    case VBAR_REASON_FENCE_UNKNOWN:
    case VBAR_REASON_FENCE_PENDING:
        load->refused++;
        load->reasons[fault->reason]++;
        return false;
    default: break;
    }
    snprintf(load->failure, sizeof load->failure, "a fault is offloaded: %s",
             vbar_reason_text(fault->reason));
    load->ending = true;
    return false;
}

/* What a round may be. */

static bool open_model(struct load *load, struct model *model) {
    VbarModelInfo info = {.size = sizeof info};
    if (!DONE(vbar_model_open(load->device, model->path, &model->id))) return false;
    if (!DONE(vbar_model_info(model->id, &info))) return false;
    model->bar = info.bar, model->tensor_count = info.tensor_count;
    return true;
}

/* Every tensor of a model, one after the other. */
static void pass(struct load *load, struct model *model, VbarStream stream) {
    (void)DONE(vbar_bar_prioritise(model->bar));
    for (uint64_t at = 0; at < model->tensor_count && !load->ending; at++) {
        VbarTensor tensor = {.size = sizeof tensor};
        VbarFault fault;
        if (!DONE(vbar_model_tensor(model->id, at, &tensor))) return;
        if (!DONE(vbar_model_fault(model->id, at, stream, &fault))) continue;
        if (!has_pins(load, &fault)) continue;
        (void)check_and_unpin(load, &fault, model->file + tensor.file_offset, tensor.bytes,
                              stream);
    }
    load->passes++;
}

/* Three tensors of two models at once, or none of them. */
static void several(struct load *load, VbarStream stream) {
    VbarRange ranges[3];
    VbarFault faults[3];
    const unsigned char *wanted[3];
    for (size_t at = 0; at < COUNT_OF(ranges); at++) {
        struct model *model = &load->models[at % load->model_count];
        VbarTensor tensor = {.size = sizeof tensor};
        uint64_t index = drawn(load, model->tensor_count);
        if (!DONE(vbar_model_tensor(model->id, index, &tensor))) return;
        ranges[at] = (VbarRange){model->bar, tensor.bar_offset, tensor.bytes};
        wanted[at] = model->file + tensor.file_offset;
    }
    if (!DONE(vbar_device_fault_many(load->device, ranges, 3, stream, faults))) return;
    if (!has_pins(load, &faults[0])) return;
    for (size_t at = 0; at < COUNT_OF(ranges); at++) {
        (void)check_and_unpin(load, &faults[at], wanted[at], ranges[at].bytes, stream);
    }
}

/* Weights that the program writes: written when the library asks for it, and read. */
static void own_weights(struct load *load, VbarStream stream) {
    (void)DONE(vbar_bar_prioritise(load->own_bar));
    for (size_t at = 0; at < OWN && !load->ending; at++) {
        struct own *own = &load->own[at];
        VbarFault fault;
        if (drawn(load, 4) == 0) {
            /* No copy of the old bytes may be under way while the new ones are made. */
            if (!settle_slots(load) || !DONE(vbar_allocation_invalidate(own->id))) return;
            memset(own->bytes, (int)drawn(load, 256), own->size);
            memcpy(own->bytes, &load->random, sizeof load->random);
        }
        if (!DONE(vbar_allocation_fault_wait(own->id, stream, &fault))) continue;
        if (!has_pins(load, &fault)) continue;
        if (fault.outcome == VBAR_OUTCOME_REFILL) {
            if (!to_device(load, fault.address, own->bytes, own->size, stream)) return;
            if (!DONE(vbar_token_commit(fault.token, stream))) return;
        }
        (void)check_and_unpin(load, &fault, own->bytes, own->size, stream);
    }
    (void)settle_slots(load);
}

/* Ids that come and go. */
static void lives(struct load *load) {
    VbarBar bar;
    VbarFault fault;
    VbarDevice again;
    VbarDeviceOptions options = {.size = sizeof options, .driver = load->driver};
    options.page_bytes = load->page;
    if (!DONE(vbar_bar_create(load->device, 8 * load->page, &bar))) return;
    if (DONE(vbar_bar_fault(bar, 0, load->page, load->streams[0], &fault)) &&
        has_pins(load, &fault)) {
        (void)DONE(vbar_token_unpin(fault.token, load->streams[0]));
    }
    if (!injected(load, "bar")) (void)DONE(vbar_bar_destroy(bar));
    if (DONE(vbar_device_open(&options, &again))) (void)DONE(vbar_device_close(again));
    struct model *model = &load->models[drawn(load, load->model_count)];
    if (!settle_slots(load) || !DONE(vbar_model_close(model->id))) return;
    while (!open_model(load, model) && !load->ending) continue;
    size_t at = drawn(load, STREAMS);
    if (synchronize(load, load->streams[at]) && drop_stream(load, load->streams[at])) {
        (void)make_stream(load, &load->streams[at]);
    }
}

static int32_t at_once(void *user) {
    (void)user;
    return 1;
}

/* Budget, ranks, and memory given back. */
static void knobs(struct load *load) {
    struct model *model = &load->models[drawn(load, load->model_count)];
    uint64_t freed_bytes;
    VbarFreed freed;
    uint64_t eighth = load->budget / 8;
    switch (drawn(load, 10)) {
    case 0: (void)DONE(vbar_device_set_budget(load->device, eighth * (5 + drawn(load, 6)))); break;
    case 1:
        (void)DONE(vbar_device_set_headroom(load->device,
                                            load->headroom + (drawn(load, 3) << 20)));
        break;
    case 2: (void)DONE(vbar_device_free_memory(load->device, eighth, &freed)); break;
    case 3: (void)DONE(vbar_bar_free_memory(model->bar, ALL_BYTES, &freed)); break;
    case 4: (void)DONE(vbar_device_trim(load->device, 0, &freed_bytes)); break;
    case 5: (void)DONE(vbar_device_trim_host(load->device, eighth, &freed_bytes)); break;
    case 6: (void)DONE(vbar_bar_set_class(model->bar, (int32_t)drawn(load, 3) - 1)); break;
    case 7: (void)DONE(vbar_model_prefetch(model->id, drawn(load, model->tensor_count))); break;
    case 8: (void)DONE(vbar_device_cancel_waits(load->device)); break;
    default:
        /* Waits of this thread end at once. */
        if (!DONE(vbar_thread_set_wait_check(at_once, NULL))) break;
        several(load, load->streams[0]);
        (void)DONE(vbar_thread_set_wait_check(NULL, NULL));
    }
}

/* What other programs take of a simulated device. */
static void press(struct load *load) {
    if (!load->simulated || !load->outside) return;
    (void)DONE(vbar_sim_set_outside_bytes(load->sim, drawn(load, load->outside)));
}

static void a_round(struct load *load) {
    static void *grown;
    load->rounds++;
    press(load);
    knobs(load);
    uint64_t die = load->rounds % 4;
    if (die == 0) lives(load);
    /* Now: a stream may be another one than before. */
    VbarStream stream = load->streams[drawn(load, STREAMS)];
    if (die == 1) several(load, stream);
    if (die == 2) own_weights(load, stream);
    pass(load, &load->models[load->rounds % load->model_count], stream);
    if (injected(load, "descriptor") && dup(0) < 0) load->ending = true;
    if (injected(load, "list")) {
        void **next = calloc(1, 1 << 20);
        if (next) memset(next, 1, 1 << 20), *next = grown, grown = next;
    }
}

/* What lines ask for. */

static bool set_back(struct load *load) {
    return DONE(vbar_device_set_budget(load->device, load->budget)) &&
           DONE(vbar_device_set_headroom(load->device, load->headroom));
}

static bool stop(struct load *load) {
    if (!settle_slots(load)) return false;
    for (size_t at = 0; at < STREAMS; at++) {
        if (!synchronize(load, load->streams[at])) return false;
        for (size_t other = 0; other <= load->model_count; other++) {
            bool is_model = other < load->model_count;
            VbarBar bar = is_model ? load->models[other].bar : load->own_bar;
            uint32_t pinned;
            if (!DONE(vbar_bar_end_of_run(bar, load->streams[at], VBAR_HELD_PINS_KEEP, &pinned)) ||
                !DONE(vbar_bar_set_class(bar, 0))) {
                return false;
            }
        }
    }
    if (load->outside && !DONE(vbar_sim_set_outside_bytes(load->sim, 0))) return false;
    return set_back(load);
}

static bool bare(struct load *load) {
    VbarFreed freed;
    uint64_t bytes;
    /* So that threads of the library fetch nothing ahead, until the budget is set back. */
    return DONE(vbar_device_set_budget(load->device, load->page)) &&
           DONE(vbar_device_free_memory(load->device, ALL_BYTES, &freed)) &&
           DONE(vbar_device_trim(load->device, 0, &bytes)) &&
           DONE(vbar_device_trim_host(load->device, 0, &bytes));
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* The least of three, behind two that bring everything to where it usually is. */
static double time_of_a_pass(struct load *load) {
    double least = 1e9;
    (void)set_back(load);
    for (int turn = 0; turn < 5; turn++) {
        double began = now();
        pass(load, &load->models[0], load->streams[0]);
        (void)settle_slots(load);
        double seconds = now() - began;
        if (turn >= 2 && seconds < least) least = seconds;
    }
    return least;
}

static void answer(struct load *load, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void answer(struct load *load, const char *format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof text - 1) abort();
    text[length++] = '\n';
    for (int at = 0; at < length;) {
        ssize_t wrote = write(load->out, text + at, (size_t)(length - at));
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) {
            load->ending = true;
            return;
        }
        at += (int)wrote;
    }
}

static void sample(struct load *load) {
    VbarStatistics told = {.size = sizeof told};
    VbarSimLive live = {.size = sizeof live};
    uint64_t violations = 0;
    char alive[400] = "", reasons[400] = "";
    for (uint32_t at = 0; at < COUNT_OF(load->reasons); at++) {
        size_t length = strlen(reasons);
        if (!load->reasons[at]) continue;
        snprintf(reasons + length, sizeof reasons - length, "%s\"%s\":%" PRIu64,
                 length ? "," : "", vbar_reason_text(at), load->reasons[at]);
    }
    /* Threads of the library may be at work: both numbers are of one moment when the one did not
     * change meanwhile. */
    for (int turn = 0; turn < 100; turn++) {
        if (!DONE(vbar_device_statistics(load->device, &told))) return;
        uint64_t used_bytes = told.used_bytes;
        if (load->simulated && !DONE(vbar_sim_live(load->sim, &live))) return;
        if (!DONE(vbar_device_statistics(load->device, &told))) return;
        if (told.used_bytes == used_bytes && (!load->simulated || live.used_bytes == used_bytes)) {
            break;
        }
        struct timespec while_they_work = {.tv_nsec = 5000000};
        nanosleep(&while_they_work, NULL);
    }
    if (load->simulated) {
        if (!DONE(vbar_sim_violation_count(load->sim, &violations))) return;
        snprintf(alive, sizeof alive,
                 ",\"live_bytes\":%" PRIu64 ",\"reservations\":%" PRIu64
                 ",\"reserved\":%" PRIu64 ",\"mappings\":%" PRIu64 ",\"events\":%" PRIu64
                 ",\"streams\":%" PRIu64 ",\"violations\":%" PRIu64,
                 live.used_bytes, live.reservation_count, live.reserved_bytes,
                 live.mapping_count, live.event_count, live.stream_count, violations);
    }
    answer(load,
           "{\"rounds\":%" PRIu64 ",\"passes\":%" PRIu64 ",\"verified\":%" PRIu64
           ",\"wrong\":%" PRIu64 ",\"refused\":%" PRIu64 ",\"interrupted\":%" PRIu64
           ",\"first_wrong\":\"%s\",\"used\":%" PRIu64 ",\"budget\":%" PRIu64
           ",\"quarantined\":%" PRIu64 ",\"bars\":%u,\"closing\":%u,\"lingering\":%u"
           ",\"library_locked\":%" PRIu64 ",\"filled\":%" PRIu64 ",\"evicted\":%" PRIu64
           ",\"reasons\":{%s}%s}",
           load->rounds, load->passes, load->verified, load->wrong, load->refused,
           load->interrupted, load->first_wrong, told.used_bytes, told.budget_bytes,
           told.quarantined_bytes, told.bar_count, told.closing_bar_count, told.lingering_count,
           told.locked_bytes, told.filled_bytes, told.evicted_page_count, reasons, alive);
}

static bool input_waits(const struct load *load) {
    struct pollfd one = {.fd = load->in, .events = POLLIN};
    return poll(&one, 1, 0) > 0;
}

static bool read_line(struct load *load, char *line, size_t capacity) {
    size_t length = 0;
    for (;;) {
        char byte;
        ssize_t got = read(load->in, &byte, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0 || length + 1 >= capacity) return false;
        if (byte == '\n') break;
        line[length++] = byte;
    }
    line[length] = '\0';
    return true;
}

/* Until the last line, or a failure; then everything is closed. */
static void serve(struct load *load) {
    char line[64];
    while (!load->ending && read_line(load, line, sizeof line)) {
        if (strncmp(line, "go ", 3) == 0) {
            uint64_t count = strtoull(line + 3, NULL, 10);
            (void)set_back(load);
            for (uint64_t at = 0; !load->ending; at++) {
                if (count ? at == count : input_waits(load)) break;
                a_round(load);
            }
            continue;
        }
        if (strcmp(line, "sample") == 0) {
            sample(load);
        } else if (strcmp(line, "time") == 0) {
            answer(load, "{\"seconds\":%.6f}", time_of_a_pass(load));
        } else if (strcmp(line, "stop") == 0) {
            if (stop(load)) answer(load, "{}");
        } else if (strcmp(line, "bare") == 0) {
            if (bare(load)) answer(load, "{}");
        } else {
            break;
        }
    }
}

static bool map_file(struct load *load, struct model *model) {
    int file = open(model->path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about)) {
        snprintf(load->failure, sizeof load->failure, "%s: %s", model->path, strerror(errno));
        return false;
    }
    void *mapped = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return false;
    model->file = mapped, model->file_bytes = (uint64_t)about.st_size;
    return true;
}

static bool host_buffer(struct load *load, unsigned char **buffer, uint64_t bytes) {
    if (load->simulated) {
        *buffer = malloc(bytes);
        return *buffer != NULL;
    }
    void *made = NULL;
    if (!CUDA(load->cuda.host_alloc(&made, bytes))) return false;
    *buffer = made;
    return true;
}

static bool start(struct load *load) {
    VbarDeviceOptions options = {.size = sizeof options, .driver = load->driver};
    VbarDeviceInfo info = {.size = sizeof info};
    options.page_bytes = load->page, options.budget_bytes = load->budget;
    options.headroom_bytes = load->headroom ? load->headroom : VBAR_HEADROOM_NONE;
    options.threads = VBAR_THREADS_ON;
    options.context_waits = VBAR_CONTEXT_WAITS_NEVER;
    if (!DONE(vbar_device_open(&options, &load->device))) return false;
    if (!DONE(vbar_device_info(load->device, &info))) return false;
    load->simulated = info.simulated != 0;
    if (load->simulated) {
        if (!DONE(vbar_sim_open(load->device, &load->sim))) return false;
    } else if (!find_cuda(load) || !CUDA(load->cuda.set_current(info.context))) {
        return false;
    }
    for (size_t at = 0; at < STREAMS; at++) {
        if (!make_stream(load, &load->streams[at])) return false;
    }
    load->slot_bytes = 2 * load->page;
    for (size_t at = 0; at < load->model_count; at++) {
        struct model *model = &load->models[at];
        if (!map_file(load, model) || !open_model(load, model)) return false;
        for (uint64_t index = 0; index < model->tensor_count; index++) {
            VbarTensor tensor = {.size = sizeof tensor};
            if (!DONE(vbar_model_tensor(model->id, index, &tensor))) return false;
            if (tensor.bytes > load->slot_bytes) load->slot_bytes = tensor.bytes;
        }
    }
    for (size_t at = 0; at < SLOTS; at++) {
        if (!host_buffer(load, &load->slots[at].buffer, load->slot_bytes)) return false;
    }
    if (!DONE(vbar_bar_create(load->device, 2 * OWN * load->page, &load->own_bar))) return false;
    for (size_t at = 0; at < OWN; at++) {
        struct own *own = &load->own[at];
        /* Smaller and larger than a page, so that some share theirs. */
        own->size = load->page / 4 + at * load->page / 3;
        own->size -= own->size % 512;
        own->bytes = malloc(own->size);
        if (!own->bytes || !DONE(vbar_bar_allocate(load->own_bar, own->size, &own->id))) {
            return false;
        }
        memset(own->bytes, (int)at, own->size);
    }
    return true;
}

static void finish(struct load *load) {
    (void)stop(load);
    (void)DONE(vbar_bar_destroy(load->own_bar));
    for (size_t at = 0; at < load->model_count; at++) {
        (void)DONE(vbar_model_close(load->models[at].id));
        munmap((void *)load->models[at].file, load->models[at].file_bytes);
    }
    for (size_t at = 0; at < STREAMS; at++) (void)drop_stream(load, load->streams[at]);
    for (size_t at = 0; at < SLOTS; at++) {
        if (load->simulated) free(load->slots[at].buffer);
        else (void)CUDA(load->cuda.host_free(load->slots[at].buffer));
    }
    for (size_t at = 0; at < OWN; at++) free(load->own[at].bytes);
    (void)DONE(vbar_device_close(load->device));
    if (load->simulated) (void)DONE(vbar_sim_close(load->sim));
}

/* What follows `name=`, or NULL. */
static const char *value_of(const char *argument, const char *name) {
    size_t length = strlen(name);
    bool is_it = strncmp(argument, name, length) == 0 && argument[length] == '=';
    return is_it ? argument + length + 1 : NULL;
}

int soak_run(int count, char **arguments);
int soak_run(int count, char **arguments) {
    struct load *load = calloc(1, sizeof *load);
    if (!load) return 1;
    load->in = 0, load->out = 1, load->inject = "", load->page = 2 << 20, load->random = 1;
    for (int at = 0; at < count; at++) {
        const char *told;
        if ((told = value_of(arguments[at], "in"))) load->in = atoi(told);
        if ((told = value_of(arguments[at], "out"))) load->out = atoi(told);
        if ((told = value_of(arguments[at], "driver"))) load->driver = told;
        if ((told = value_of(arguments[at], "inject"))) load->inject = told;
        if ((told = value_of(arguments[at], "budget"))) load->budget = strtoull(told, NULL, 10);
        if ((told = value_of(arguments[at], "headroom"))) load->headroom = strtoull(told, NULL, 10);
        if ((told = value_of(arguments[at], "page"))) load->page = strtoull(told, NULL, 10);
        if ((told = value_of(arguments[at], "outside"))) load->outside = strtoull(told, NULL, 10);
        if ((told = value_of(arguments[at], "seed"))) load->random += strtoull(told, NULL, 10);
        if ((told = value_of(arguments[at], "model")) && load->model_count < MODELS_MAX) {
            load->models[load->model_count++].path = told;
        }
    }
    if (load->model_count && start(load)) {
        answer(load, "{\"ready\":true}");
        serve(load);
        if (!load->failure[0]) {
            finish(load);
            if (!load->failure[0]) answer(load, "{\"ended\":true}");
        }
    }
    int failed = load->failure[0] || !load->model_count;
    if (failed) {
        /* The text goes to whoever reads the lines, as it is but for what JSON would trip over. */
        for (char *at = load->failure; *at; at++) {
            if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ') *at = '\'';
        }
        fprintf(stderr, "soak: %s\n", load->failure);
        answer(load, "{\"failed\":\"%s\"}", load->failure);
    }
    free(load);
    return failed;
}

#ifndef SOAK_SHARED
int main(int count, char **arguments) {
    return soak_run(count - 1, arguments + 1);
}
#endif
