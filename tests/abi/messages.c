/*
 * Scenario 60: what a call says when it fails. The driver's function and its code by name, the
 * page, the bytes that were asked for, the bytes in use, the budget and where that comes from.
 *
 * Simulated only: it fails when it is told to.
 */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "models.h"

#define INVALID_VALUE 1
#define CODE_NAME "CUDA_ERROR_INVALID_VALUE"

static VbarDevice device;
static VbarSim sim;

static void check_has(int line, const char *word) {
    if (strstr(vbar_last_message(), word)) return;
    char what[256];
    snprintf(what, sizeof what, "the message has \"%s\"", word);
    report(__FILE__, line, what, VBAR_STATUS_DRIVER);
}

#define HAS(word) check_has(__LINE__, word)

/* Memory as it is after the failure. */
static void check_memory(int line, const char *source) {
    VbarStatistics now = statistics(device);
    char words[128];
    snprintf(words, sizeof words, "%" PRIu64 " bytes used", now.used_bytes);
    check_has(line, words);
    snprintf(words, sizeof words, "budget %" PRIu64 " bytes", now.budget_bytes);
    check_has(line, words);
    check_has(line, source);
}

#define HAS_MEMORY(source) check_memory(__LINE__, source)

/* A fault of one page and of three, at each step of it. */
static void faults_tell_the_driver_and_the_pages(void) {
    static const char *const verbs[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    for (size_t at = 0; at < COUNT_OF(verbs); at++) {
        VbarBar bar;
        VbarFault told;
        char bytes[64];
        OK(vbar_bar_create(device, 8 * page_bytes(), &bar));
        OK(vbar_sim_fail(sim, verbs[at], 0, UINT64_MAX, INVALID_VALUE));
        FAILS(vbar_bar_fault(bar, 5 * page_bytes(), 1, 0, &told), VBAR_STATUS_DRIVER, verbs[at]);
        HAS(CODE_NAME);
        HAS("page 5 ");
        snprintf(bytes, sizeof bytes, "%" PRIu64 " bytes", page_bytes());
        HAS(bytes);
        HAS_MEMORY("explicit");
        FAILS(vbar_bar_fault(bar, 3 * page_bytes(), 3 * page_bytes(), 0, &told),
              VBAR_STATUS_DRIVER, verbs[at]);
        HAS(CODE_NAME);
        HAS("pages 3..6 ");
        snprintf(bytes, sizeof bytes, "%" PRIu64 " bytes", 3 * page_bytes());
        HAS(bytes);
        HAS_MEMORY("explicit");
        OK(vbar_sim_heal(sim));
        OK(vbar_bar_destroy_wait(bar));
    }
}

static void an_automatic_budget_is_told(void) {
    VbarBar bar;
    VbarFault told;
    OK(vbar_device_set_budget(device, 0));
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_sim_fail(sim, "cuMemCreate", 0, UINT64_MAX, INVALID_VALUE));
    FAILS(vbar_bar_fault(bar, 0, 1, 0, &told), VBAR_STATUS_DRIVER, "cuMemCreate");
    HAS(CODE_NAME);
    HAS("page 0 ");
    HAS_MEMORY("driver-free memory less headroom");
    OK(vbar_sim_heal(sim));
    OK(vbar_bar_destroy_wait(bar));
    OK(vbar_device_set_budget(device, 8 * page_bytes()));
}

/* The copy of a weight that fails names the tensor's pages, the file that does names itself. */
static void fills_tell_the_page_and_the_file(const char *path) {
    VbarModel model;
    VbarFault told;
    write_model(path, 2, page_bytes());
    OK(vbar_model_open(device, path, &model));
    OK(vbar_sim_fail(sim, "cuMemcpyHtoDAsync", 0, UINT64_MAX, INVALID_VALUE));
    FAILS(vbar_model_fault(model, 1, 0, &told), VBAR_STATUS_DRIVER, "cuMemcpyHtoDAsync");
    HAS(CODE_NAME);
    HAS("page");
    HAS_MEMORY("explicit");
    OK(vbar_sim_heal(sim));
    CHECK(truncate(path, 10) == 0);
    FAILS(vbar_model_fault(model, 1, 0, &told), VBAR_STATUS_FILE_CHANGED, "messages.safetensors");
    HAS("its size");
    HAS("page");
    HAS_MEMORY("explicit");
    OK(vbar_model_close(model));
}

static void other_calls_tell_what_they_did(void) {
    VbarFreed freed;
    VbarBar bar;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_sim_fail(sim, "cuMemGetInfo", 0, UINT64_MAX, INVALID_VALUE));
    FAILS(vbar_device_set_budget(device, 7 * page_bytes()), VBAR_STATUS_DRIVER, "cuMemGetInfo");
    HAS(CODE_NAME);
    HAS_MEMORY("explicit");
    OK(vbar_sim_heal(sim));
    OK(vbar_device_set_budget(device, 8 * page_bytes()));
    OK(vbar_sim_fail(sim, "cuCtxGetCurrent", 0, UINT64_MAX, INVALID_VALUE));
    FAILS(vbar_bar_free_memory(bar, page_bytes(), &freed), VBAR_STATUS_DRIVER, "cuCtxGetCurrent");
    HAS(CODE_NAME);
    HAS_MEMORY("explicit");
    OK(vbar_sim_heal(sim));
    OK(vbar_bar_destroy_wait(bar));
}

/* A device that is lost says so on every call, with the code that it was lost by. */
static void a_lost_device_tells_how(void) {
    VbarDeviceOptions options = test_options(8);
    options.driver = "sim:capacity=64M,granularity=64K,address_space=8G,seed=60";
    VbarDevice lost;
    VbarSim lost_sim;
    VbarBar bar;
    VbarFault told;
    OK(vbar_device_open(&options, &lost));
    OK(vbar_sim_open(lost, &lost_sim));
    OK(vbar_bar_create(lost, page_bytes(), &bar));
    OK(vbar_sim_lose_device(lost_sim, 700));
    for (int call = 0; call < 3; call++) {
        FAILS(vbar_bar_fault(bar, 0, 1, 0, &told), VBAR_STATUS_DEVICE_LOST,
              "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
    OK(vbar_bar_destroy(bar));
    OK(vbar_device_close(lost));
    OK(vbar_sim_close(lost_sim));
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2 && !on_gpu());
    char path[4096];
    snprintf(path, sizeof path, "%s/messages.safetensors", arguments[1]);
    device = open_device(8);
    OK(vbar_sim_open(device, &sim));
    faults_tell_the_driver_and_the_pages();
    an_automatic_budget_is_told();
    fills_tell_the_page_and_the_file(path);
    other_calls_tell_what_they_did();
    a_lost_device_tells_how();
    OK(vbar_sim_close(sim));
    close_device(device);
    return 0;
}
