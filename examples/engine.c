/*
 * A small inference engine whose model is larger than the memory that it may use.
 *
 *     cc -std=c11 engine.c -o engine $(pkg-config --cflags --libs vbar) -ldl
 *     ./engine                         a model of its own, 34 MiB, in 10 MiB
 *     ./engine MODEL [BUDGET_MIB]      a safetensors model, in half of its size
 *
 * Two sequences run through all layers, pass after pass, each on a stream of its own. Before a
 * layer is launched its weight is faulted for the stream: it is resident (its device address never
 * changes, so it was taken once, at load), or it is offloaded and the host computes the layer. The
 * results are compared with those of the host alone.
 *
 * On a GPU a layer is a kernel of this program: out = in + W in, in whole numbers of 32 bits that
 * wrap, so that device and host agree to the last bit, whatever the weights are. The driver is
 * opened with dlopen; no CUDA toolkit is needed. The simulated device runs no foreign kernels: its
 * own checksum stands for the layer there.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <vbar.h>
#include <vbar_sim.h>

#define MIB (UINT64_C(1) << 20)
#define PAGE_BYTES (2 * MIB)
#define PASSES 4
#define SEQUENCES 2
/* Numbers of an activation; a power of two. */
#define WIDTH 1024
/* A state has two activations: a layer reads the one and writes the other. */
#define STATE_WORDS (2 * WIDTH)
#define STATE_BYTES (STATE_WORDS * sizeof(uint32_t))

/* A weight as the engine knows it after the model was opened. */
struct layer {
    const char *name;
    uint64_t address; /* on the device; it never changes */
    uint64_t bytes;
    uint64_t file_offset;
    uint32_t file;
};

struct sequence {
    VbarStream stream;
    VbarFault state; /* its activations on the device, pinned as long as it runs */
    uint32_t host[STATE_WORDS];
    uint32_t expected[STATE_WORDS];
};

struct engine {
    VbarDevice device;
    const struct compute *compute;
    VbarModel model;
    VbarBar model_bar;
    int *files; /* descriptors of the model's files, for the host's copies */
    struct layer *layers;
    uint64_t layer_count;
    unsigned char *host_weight; /* room for the largest layer */
    VbarBar state_bar;
    struct sequence sequences[SEQUENCES];
};

/* What an engine needs of a device; there is one for CUDA and one for the simulated device. */
struct compute {
    const char *kernel;
    void (*open)(struct engine *engine);
    VbarStream (*stream_create)(struct engine *engine);
    void (*stream_destroy)(struct engine *engine, VbarStream stream);
    void (*synchronize)(struct engine *engine, VbarStream stream);
    void (*upload)(struct engine *engine, uint64_t target, const void *source, size_t bytes,
                   VbarStream stream);
    void (*download)(struct engine *engine, void *target, uint64_t source, size_t bytes,
                     VbarStream stream);
    /* Layer number `index`: reads the weight at a device address, changes the state at another. */
    void (*layer)(struct engine *engine, uint64_t index, uint64_t weight, uint64_t bytes,
                  uint64_t state, VbarStream stream);
    /* The same on the host. */
    void (*host_layer)(uint64_t index, const unsigned char *weight, uint64_t bytes,
                       uint32_t *state);
};

static void die(const char *what, const char *why) {
    fprintf(stderr, "engine: %s: %s\n", what, why);
    exit(1);
}

static void check(VbarStatus status, const char *call) {
    if (status == VBAR_STATUS_OK) return;
    fprintf(stderr, "engine: %s: %s: %s\n", call, vbar_status_text(status), vbar_last_message());
    exit(1);
}

/* A call of the library that must succeed. */
#define VBAR(call) check((call), #call)

/* ---- CUDA: the driver's functions, with prototypes of our own ---- */

static struct {
    int (*cuCtxSetCurrent)(void *context);
    int (*cuModuleLoadData)(void **module, const void *image);
    int (*cuModuleGetFunction)(void **function, void *module, const char *name);
    int (*cuLaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void *stream, void **arguments, void **extra);
    int (*cuStreamCreate)(void **stream, unsigned flags);
    int (*cuStreamDestroy)(void *stream);
    int (*cuStreamSynchronize)(void *stream);
    int (*cuMemcpyHtoDAsync)(uint64_t target, const void *source, size_t bytes, void *stream);
    int (*cuMemcpyDtoHAsync)(void *target, uint64_t source, size_t bytes, void *stream);
    int (*cuGetErrorName)(int code, const char **name);
    void *function;
} cuda;

/* Compiled by the driver for whatever device it has: threads 0 to 1023 make one number each. */
static const char ptx[] =
    ".version 6.4\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".visible .entry layer(.param .u64 weight, .param .u64 words,\n"
    "                      .param .u64 input, .param .u64 output)\n"
    "{\n"
    "    .reg .pred %p;\n"
    "    .reg .u32 %thread, %block, %size, %first, %row, %sum, %w, %x;\n"
    "    .reg .u64 %weight, %words, %input, %output, %offset, %index, %at;\n"
    "    ld.param.u64 %weight, [weight];\n"
    "    ld.param.u64 %words, [words];\n"
    "    ld.param.u64 %input, [input];\n"
    "    ld.param.u64 %output, [output];\n"
    "    cvta.to.global.u64 %weight, %weight;\n"
    "    cvta.to.global.u64 %input, %input;\n"
    "    cvta.to.global.u64 %output, %output;\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    mov.u32 %block, %ctaid.x;\n"
    "    mov.u32 %size, %ntid.x;\n"
    "    mad.lo.u32 %first, %block, %size, %thread;\n"
    "    mul.wide.u32 %offset, %first, 4;\n"
    "    add.u64 %at, %input, %offset;\n"
    "    ld.global.u32 %sum, [%at];\n"
    "    cvt.u64.u32 %index, %first;\n"
    "    mov.u32 %row, 0;\n"
    "next:\n"
    "    setp.ge.u64 %p, %index, %words;\n"
    "    @%p bra done;\n"
    "    shl.b64 %at, %index, 2;\n"
    "    add.u64 %at, %at, %weight;\n"
    "    ld.global.u32 %w, [%at];\n"
    "    mul.wide.u32 %at, %row, 4;\n"
    "    add.u64 %at, %at, %input;\n"
    "    ld.global.u32 %x, [%at];\n"
    "    mad.lo.u32 %sum, %w, %x, %sum;\n"
    "    add.u64 %index, %index, 1024;\n"
    "    add.u32 %row, %row, 1;\n"
    "    and.b32 %row, %row, 1023;\n"
    "    bra next;\n"
    "done:\n"
    "    add.u64 %at, %output, %offset;\n"
    "    st.global.u32 [%at], %sum;\n"
    "    ret;\n"
    "}\n";

static void cuda_check(int code, const char *call) {
    const char *name = "an unknown code";
    if (code == 0) return;
    cuda.cuGetErrorName(code, &name);
    die(call, name);
}

/* A call of the driver that must succeed. */
#define CUDA(call) cuda_check(cuda.call, #call)

static void cuda_find(void *driver, const char *name, void *function) {
    void *symbol = dlsym(driver, name);
    if (!symbol) die(name, "not in libcuda.so.1");
    memcpy(function, &symbol, sizeof symbol);
}

static void cuda_open(struct engine *engine) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *module;
    if (!driver) die("libcuda.so.1", dlerror());
    cuda_find(driver, "cuCtxSetCurrent", &cuda.cuCtxSetCurrent);
    cuda_find(driver, "cuModuleLoadData", &cuda.cuModuleLoadData);
    cuda_find(driver, "cuModuleGetFunction", &cuda.cuModuleGetFunction);
    cuda_find(driver, "cuLaunchKernel", &cuda.cuLaunchKernel);
    cuda_find(driver, "cuStreamCreate", &cuda.cuStreamCreate);
    cuda_find(driver, "cuStreamDestroy_v2", &cuda.cuStreamDestroy);
    cuda_find(driver, "cuStreamSynchronize", &cuda.cuStreamSynchronize);
    cuda_find(driver, "cuMemcpyHtoDAsync_v2", &cuda.cuMemcpyHtoDAsync);
    cuda_find(driver, "cuMemcpyDtoHAsync_v2", &cuda.cuMemcpyDtoHAsync);
    cuda_find(driver, "cuGetErrorName", &cuda.cuGetErrorName);
    /* The library has opened the device: its context is the one to work in. */
    VbarDeviceInfo info = {.size = sizeof info};
    VBAR(vbar_device_info(engine->device, &info));
    CUDA(cuCtxSetCurrent(info.context));
    CUDA(cuModuleLoadData(&module, ptx));
    CUDA(cuModuleGetFunction(&cuda.function, module, "layer"));
}

/* A stream is a pointer to the driver, a number to the library. */
static void *cuda_stream(VbarStream stream) {
    return (void *)(uintptr_t)stream;
}

static VbarStream cuda_stream_create(struct engine *engine) {
    enum { NON_BLOCKING = 1 };
    void *stream;
    (void)engine;
    CUDA(cuStreamCreate(&stream, NON_BLOCKING));
    return (VbarStream)(uintptr_t)stream;
}

static void cuda_stream_destroy(struct engine *engine, VbarStream stream) {
    (void)engine;
    CUDA(cuStreamDestroy(cuda_stream(stream)));
}

static void cuda_synchronize(struct engine *engine, VbarStream stream) {
    (void)engine;
    CUDA(cuStreamSynchronize(cuda_stream(stream)));
}

static void cuda_upload(struct engine *engine, uint64_t target, const void *source, size_t bytes,
                        VbarStream stream) {
    (void)engine;
    CUDA(cuMemcpyHtoDAsync(target, source, bytes, cuda_stream(stream)));
}

static void cuda_download(struct engine *engine, void *target, uint64_t source, size_t bytes,
                          VbarStream stream) {
    (void)engine;
    CUDA(cuMemcpyDtoHAsync(target, source, bytes, cuda_stream(stream)));
}

static void cuda_layer(struct engine *engine, uint64_t index, uint64_t weight, uint64_t bytes,
                       uint64_t state, VbarStream stream) {
    enum { BLOCK = 256 };
    uint64_t words = bytes / sizeof(uint32_t), half = STATE_BYTES / 2;
    uint64_t input = state + index % 2 * half, output = state + (index + 1) % 2 * half;
    void *arguments[] = {&weight, &words, &input, &output};
    (void)engine;
    CUDA(cuLaunchKernel(cuda.function, WIDTH / BLOCK, 1, 1, BLOCK, 1, 1, 0, cuda_stream(stream),
                        arguments, NULL));
}

static void cuda_host_layer(uint64_t index, const unsigned char *weight, uint64_t bytes,
                            uint32_t *state) {
    const uint32_t *input = state + index % 2 * WIDTH;
    uint32_t *output = state + (index + 1) % 2 * WIDTH, word;
    memcpy(output, input, STATE_BYTES / 2);
    for (uint64_t at = 0; at < bytes / sizeof word; at++) {
        memcpy(&word, weight + at * sizeof word, sizeof word);
        output[at % WIDTH] += word * input[at / WIDTH % WIDTH];
    }
}

static const struct compute cuda_compute = {
    "its own kernel",  cuda_open,   cuda_stream_create, cuda_stream_destroy,
    cuda_synchronize,  cuda_upload, cuda_download,      cuda_layer,
    cuda_host_layer,
};

/* ---- The simulated device ---- */

static void sim_open(struct engine *engine) {
    (void)engine;
}

static VbarStream sim_stream_create(struct engine *engine) {
    VbarStream stream;
    VBAR(vbar_sim_stream_create(engine->device, &stream));
    return stream;
}

static void sim_stream_destroy(struct engine *engine, VbarStream stream) {
    VBAR(vbar_sim_stream_destroy(engine->device, stream));
}

static void sim_synchronize(struct engine *engine, VbarStream stream) {
    VBAR(vbar_sim_stream_synchronize(engine->device, stream));
}

static void sim_upload(struct engine *engine, uint64_t target, const void *source, size_t bytes,
                       VbarStream stream) {
    VBAR(vbar_sim_copy_to_device(engine->device, target, source, bytes, stream));
}

static void sim_download(struct engine *engine, void *target, uint64_t source, size_t bytes,
                         VbarStream stream) {
    VBAR(vbar_sim_copy_to_host(engine->device, target, source, bytes, stream));
}

/* Adds the checksum of the weight to a 64-bit word of the state, another one for each layer. */
static void sim_layer(struct engine *engine, uint64_t index, uint64_t weight, uint64_t bytes,
                      uint64_t state, VbarStream stream) {
    uint64_t word = state + index * sizeof(uint64_t) % STATE_BYTES;
    VBAR(vbar_sim_launch_checksum(engine->device, weight, bytes, word, 0, stream));
}

static void sim_host_layer(uint64_t index, const unsigned char *weight, uint64_t bytes,
                           uint32_t *state) {
    char *place = (char *)state + index * sizeof(uint64_t) % STATE_BYTES;
    uint64_t word;
    memcpy(&word, place, sizeof word);
    word += vbar_sim_checksum(weight, bytes);
    memcpy(place, &word, sizeof word);
}

static const struct compute sim_compute = {
    "the simulated device's checksum", sim_open,   sim_stream_create, sim_stream_destroy,
    sim_synchronize,                   sim_upload, sim_download,      sim_layer,
    sim_host_layer,
};

/* ---- The model ---- */

#define OWN_LAYERS 11
#define OWN_ROWS 512

/* Rows of a layer of our own model; the last one is larger than all of the budget. */
static uint64_t own_rows(unsigned layer) {
    return layer + 1 < OWN_LAYERS ? OWN_ROWS : 7 * OWN_ROWS;
}

/* A safetensors file of layers of 2 MiB and an output of 14 MiB, of no sensible numbers. */
static int write_own_model(void) {
    char header[4096];
    size_t length = 0;
    uint64_t end = 0;
    FILE *file = tmpfile();
    if (!file) die("a temporary file", "it cannot be made");
    for (unsigned layer = 0; layer < OWN_LAYERS; layer++) {
        char name[32];
        uint64_t start = end;
        end += own_rows(layer) * WIDTH * sizeof(uint32_t);
        snprintf(name, sizeof name, layer + 1 < OWN_LAYERS ? "layers.%u.weight" : "output.%u",
                 layer);
        length += (size_t)snprintf(header + length, sizeof header - length,
                                   "%c\"%s\":{\"dtype\":\"I32\",\"shape\":[%" PRIu64
                                   ",%d],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                                   layer == 0 ? '{' : ',', name, own_rows(layer), WIDTH, start,
                                   end);
    }
    header[length++] = '}';
    for (unsigned byte = 0; byte < 8; byte++) putc((int)(length >> (8 * byte) & 0xff), file);
    fwrite(header, 1, length, file);
    uint32_t number = 1;
    for (uint64_t word = 0; word < end / sizeof number; word++) {
        number = number * UINT32_C(1664525) + UINT32_C(1013904223);
        fwrite(&number, sizeof number, 1, file);
    }
    if (fflush(file) != 0 || ferror(file)) die("a temporary file", "it cannot be written");
    /* The stream stays open, and with it the file, until the program ends. */
    return fileno(file);
}

static void load_model(struct engine *engine, const char *path) {
    int own = path ? -1 : write_own_model();
    if (path) VBAR(vbar_model_open(engine->device, path, &engine->model));
    else VBAR(vbar_model_open_descriptor(engine->device, own, "its own", &engine->model));
    VbarModelInfo info = {.size = sizeof info};
    VBAR(vbar_model_info(engine->model, &info));
    engine->files = calloc(info.file_count, sizeof *engine->files);
    if (!engine->files) die("files", "no memory");
    for (uint32_t file = 0; file < info.file_count; file++) {
        const char *name; /* none of a model that was opened by descriptor */
        VBAR(vbar_model_file(engine->model, file, &name));
        engine->files[file] = name ? open(name, O_RDONLY) : own;
        if (engine->files[file] < 0) die(name, "it cannot be opened");
    }
    engine->model_bar = info.bar;
    engine->layer_count = info.tensor_count;
    engine->layers = calloc(info.tensor_count, sizeof *engine->layers);
    if (!engine->layers) die("layers", "no memory");
    uint64_t bytes_max = 1;
    for (uint64_t index = 0; index < info.tensor_count; index++) {
        VbarTensor tensor = {.size = sizeof tensor};
        VBAR(vbar_model_tensor(engine->model, index, &tensor));
        engine->layers[index] = (struct layer){tensor.name, tensor.address, tensor.bytes,
                                               tensor.file_offset, tensor.file};
        if (tensor.bytes > bytes_max) bytes_max = tensor.bytes;
    }
    engine->host_weight = malloc(bytes_max);
    if (!engine->host_weight) die("a layer on the host", "no memory");
    printf("%" PRIu64 " layers, %.1f MiB\n", info.tensor_count,
           (double)info.total_bytes / (double)MIB);
}

/* A layer's bytes for the host; another engine has a mapping of the file, or quantised copies. */
static const unsigned char *read_weight(struct engine *engine, const struct layer *layer) {
    for (uint64_t done = 0; done < layer->bytes;) {
        ssize_t got = pread(engine->files[layer->file], engine->host_weight + done,
                            layer->bytes - done, (off_t)(layer->file_offset + done));
        if (got <= 0) die(layer->name, "the file cannot be read");
        done += (uint64_t)got;
    }
    return engine->host_weight;
}

/* ---- The engine ---- */

static void open_device(struct engine *engine) {
    /* A GPU where there is one, else the simulated device; VBAR_DRIVER says which by name. */
    VbarDeviceOptions options = {.size = sizeof options, .driver = "auto"};
    options.page_bytes = PAGE_BYTES;
    VBAR(vbar_device_open(&options, &engine->device));
    VbarDeviceInfo info = {.size = sizeof info};
    VBAR(vbar_device_info(engine->device, &info));
    engine->compute = info.simulated ? &sim_compute : &cuda_compute;
    printf("vbar %s on %s\n", vbar_version(), info.driver);
    printf("a layer is %s\n", engine->compute->kernel);
    engine->compute->open(engine);
}

/* The activations of a sequence: memory that the engine writes itself. As long as the token is
 * held they stay where they are. */
static void open_sequence(struct engine *engine, struct sequence *sequence) {
    VbarAllocation allocation;
    sequence->stream = engine->compute->stream_create(engine);
    VBAR(vbar_bar_allocate(engine->state_bar, STATE_BYTES, &allocation));
    VBAR(vbar_allocation_fault(allocation, sequence->stream, &sequence->state));
    if (sequence->state.outcome != VBAR_OUTCOME_REFILL) {
        die("the activations", vbar_reason_text(sequence->state.reason));
    }
}

/* What a sequence starts a pass with. */
static void start_pass(struct engine *engine, struct sequence *sequence, unsigned number) {
    for (uint32_t at = 0; at < STATE_WORDS; at++) {
        sequence->host[at] = at < WIDTH ? at * 2654435761u + number : 0;
    }
    memcpy(sequence->expected, sequence->host, STATE_BYTES);
    engine->compute->upload(engine, sequence->state.address, sequence->host, STATE_BYTES,
                            sequence->stream);
    if (sequence->state.outcome == VBAR_OUTCOME_REFILL) {
        VBAR(vbar_token_commit(sequence->state.token, sequence->stream));
        sequence->state.outcome = VBAR_OUTCOME_RESIDENT;
    }
}

/* The layer on the host: the activations go there and back. */
static void run_on_host(struct engine *engine, struct sequence *sequence, uint64_t index) {
    const struct compute *compute = engine->compute;
    const struct layer *layer = &engine->layers[index];
    uint64_t state = sequence->state.address;
    compute->download(engine, sequence->host, state, STATE_BYTES, sequence->stream);
    compute->synchronize(engine, sequence->stream);
    compute->host_layer(index, read_weight(engine, layer), layer->bytes, sequence->host);
    compute->upload(engine, state, sequence->host, STATE_BYTES, sequence->stream);
}

/* Enqueues a layer of a sequence. Returns whether it runs on the device. */
static int run_layer(struct engine *engine, struct sequence *sequence, uint64_t index) {
    const struct layer *layer = &engine->layers[index];
    VbarFault weight;
    VBAR(vbar_model_fault(engine->model, index, sequence->stream, &weight));
    if (weight.outcome != VBAR_OUTCOME_RESIDENT) {
        run_on_host(engine, sequence, index);
        return 0;
    }
    if (weight.address != layer->address) die(layer->name, "its address changed");
    engine->compute->layer(engine, index, layer->address, layer->bytes, sequence->state.address,
                           sequence->stream);
    /* The launch is behind us: the weight stays until it is done, and not longer than it must. */
    VBAR(vbar_token_unpin(weight.token, sequence->stream));
    return 1;
}

static void compute_expected(struct engine *engine) {
    for (uint64_t index = 0; index < engine->layer_count; index++) {
        const struct layer *layer = &engine->layers[index];
        const unsigned char *weight = read_weight(engine, layer);
        for (unsigned at = 0; at < SEQUENCES; at++) {
            uint32_t *state = engine->sequences[at].expected;
            engine->compute->host_layer(index, weight, layer->bytes, state);
        }
    }
}

/* Runs all layers for all sequences. Returns how many results were wrong. */
static unsigned run_pass(struct engine *engine, unsigned pass) {
    unsigned on_device = 0, on_host = 0, wrong = 0;
    for (unsigned at = 0; at < SEQUENCES; at++) {
        start_pass(engine, &engine->sequences[at], pass * SEQUENCES + at);
    }
    for (uint64_t index = 0; index < engine->layer_count; index++) {
        for (unsigned at = 0; at < SEQUENCES; at++) {
            int resident = run_layer(engine, &engine->sequences[at], index);
            on_device += resident != 0;
            on_host += resident == 0;
        }
    }
    compute_expected(engine);
    for (unsigned at = 0; at < SEQUENCES; at++) {
        struct sequence *sequence = &engine->sequences[at];
        engine->compute->download(engine, sequence->host, sequence->state.address, STATE_BYTES,
                                  sequence->stream);
        engine->compute->synchronize(engine, sequence->stream);
        wrong += memcmp(sequence->host, sequence->expected, STATE_BYTES) != 0;
    }
    printf("pass %u: %u layers on the device, %u on the host, %u of %d results wrong\n", pass + 1,
           on_device, on_host, wrong, SEQUENCES);
    return wrong;
}

static void close_engine(struct engine *engine) {
    uint32_t pinned;
    for (unsigned at = 0; at < SEQUENCES; at++) {
        struct sequence *sequence = &engine->sequences[at];
        VBAR(vbar_token_unpin(sequence->state.token, sequence->stream));
        VBAR(vbar_bar_end_of_run(engine->model_bar, sequence->stream, VBAR_HELD_PINS_KEEP,
                                 &pinned));
        if (pinned != 0) die("the end of the run", "weights are pinned still");
        /* Before the stream goes: its fences outlive it. */
        VBAR(vbar_stream_retire(engine->device, sequence->stream));
        engine->compute->stream_destroy(engine, sequence->stream);
    }
    VBAR(vbar_model_close(engine->model));
    VBAR(vbar_bar_destroy_wait(engine->state_bar));
    VBAR(vbar_device_close(engine->device));
    free(engine->host_weight);
    free(engine->files);
    free(engine->layers);
}

static void print_statistics(struct engine *engine) {
    VbarStatistics told = {.size = sizeof told};
    VBAR(vbar_device_statistics(engine->device, &told));
    printf("%" PRIu64 " hits, %" PRIu64 " misses, %" PRIu64 " pages evicted, %.1f MiB filled, "
           "at most %.1f MiB held\n",
           told.hit_count, told.miss_count, told.evicted_page_count,
           (double)told.filled_bytes / (double)MIB, (double)told.peak_bytes / (double)MIB);
}

/* Half of the model, and for our own what its output does not fit in. */
static uint64_t budget_of(const struct engine *engine, int count, char **arguments) {
    uint64_t bytes = 0;
    if (count > 2) return strtoull(arguments[2], NULL, 10) * MIB;
    if (count < 2) return 10 * MIB;
    for (uint64_t index = 0; index < engine->layer_count; index++) {
        bytes += engine->layers[index].bytes;
    }
    return bytes / 2 + 2 * PAGE_BYTES;
}

int main(int count, char **arguments) {
    static struct engine engine;
    unsigned wrong = 0;
    open_device(&engine);
    load_model(&engine, count > 1 ? arguments[1] : NULL);
    uint64_t budget = budget_of(&engine, count, arguments);
    VBAR(vbar_device_set_budget(engine.device, budget));
    printf("budget %.1f MiB\n", (double)budget / (double)MIB);
    VBAR(vbar_bar_create(engine.device, SEQUENCES * STATE_BYTES, &engine.state_bar));
    for (unsigned at = 0; at < SEQUENCES; at++) open_sequence(&engine, &engine.sequences[at]);
    for (unsigned pass = 0; pass < PASSES; pass++) wrong += run_pass(&engine, pass);
    print_statistics(&engine);
    close_engine(&engine);
    puts(wrong == 0 ? "all results are right" : "some results are wrong");
    return wrong != 0;
}
