/*
 * Ids that are closed, twice, in every order, and used afterwards: an error each time, and nobody
 * else's pin, page or id is touched.
 */
#include "check.h"
#include "models.h"

static VbarToken fault(VbarBar bar, uint64_t first, uint64_t pages) {
    VbarFault told;
    OK(vbar_bar_fault(bar, first * page_bytes(), pages * page_bytes(), 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT && told.token.id != 0);
    return told.token;
}

static uint32_t pins(VbarBar bar, uint32_t page) {
    VbarPage told;
    OK(vbar_bar_residency(bar, page, 1, &told));
    return told.pin_count;
}

/* Scenario 5: a token given back twice does not take the pin of a neighbour on the same page. */
static void a_second_unpin_takes_no_other_pin(VbarDevice device) {
    VbarBar bar;
    OK(vbar_bar_create(device, 2 * page_bytes(), &bar));
    VbarToken first = fault(bar, 0, 1), second = fault(bar, 0, 1);
    CHECK(first.id != second.id && pins(bar, 0) == 2);
    OK(vbar_token_unpin(first, 0));
    for (int round = 0; round < 100; round++) {
        FAILS(vbar_token_unpin(first, 0), VBAR_STATUS_STALE_TOKEN, "holds no pins");
    }
    CHECK(pins(bar, 0) == 1);
    VbarFreed freed;
    OK(vbar_bar_free_memory(bar, page_bytes(), &freed));
    CHECK(freed.bytes == 0 && freed.shortfall == VBAR_SHORTFALL_ALL_PINNED);
    CHECK(freed.pinned_count == 1);
    /* The next token may have the first one's slot, never its id. */
    VbarToken third = fault(bar, 0, 1);
    CHECK(third.id != first.id);
    FAILS(vbar_token_unpin(first, 0), VBAR_STATUS_STALE_TOKEN, NULL);
    CHECK(pins(bar, 0) == 2);
    OK(vbar_token_unpin(third, 0));
    OK(vbar_token_unpin(second, 0));
    OK(vbar_bar_destroy_wait(bar));
}

/* A token outlives its VBAR's id, and its memory goes when it is given back. */
static void a_token_outlives_its_bar(VbarDevice device) {
    VbarBar bar;
    OK(vbar_bar_create(device, 2 * page_bytes(), &bar));
    VbarAllocation allocation;
    OK(vbar_bar_allocate(bar, 4096, &allocation));
    VbarToken token = fault(bar, 1, 1);
    OK(vbar_bar_destroy(bar));
    FAILS(vbar_bar_destroy(bar), VBAR_STATUS_STALE_HANDLE, "0x");
    FAILS(vbar_bar_destroy_wait(bar), VBAR_STATUS_STALE_HANDLE, "0x");
    FAILS(vbar_allocation_invalidate(allocation), VBAR_STATUS_STALE_HANDLE, "allocation");
    VbarFault told;
    FAILS(vbar_bar_fault(bar, 0, 1, 0, &told), VBAR_STATUS_STALE_HANDLE, "VBAR");
    CHECK(statistics(device).resident_page_count == 1);
    OK(vbar_token_also_used_on(token, 0));
    OK(vbar_token_unpin(token, 0));
    FAILS(vbar_token_unpin(token, 0), VBAR_STATUS_STALE_TOKEN, NULL);
}

/* A wait for what does not come ends by its time-out; the VBAR is closed all the same. */
static void destroy_wait_has_an_end(void) {
    VbarDeviceOptions options = test_options(4);
    /* A device of its own where that can be: the time-out is set when it is opened. */
    char driver[256];
    snprintf(driver, sizeof driver, "%s%s", test_driver(), on_gpu() ? "" : ",seed=5");
    options.driver = driver;
    options.wait_timeout_ms = 50;
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    VbarBar bar;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    VbarToken token = fault(bar, 0, 1);
    FAILS(vbar_bar_destroy_wait(bar), VBAR_STATUS_TIMED_OUT, NULL);
    FAILS(vbar_bar_destroy_wait(bar), VBAR_STATUS_STALE_HANDLE, NULL);
    OK(vbar_token_unpin(token, 0));
    close_device(device);
}

/* Device ids are closed one by one; what was made with one lives on. */
static void a_bar_outlives_its_device_id(void) {
    VbarDevice first = open_device(8), second = open_device(8);
    CHECK(first.id != second.id);
    VbarBar bar;
    OK(vbar_bar_create(first, 2 * page_bytes(), &bar));
    OK(vbar_device_close(first));
    FAILS(vbar_device_close(first), VBAR_STATUS_STALE_HANDLE, "device");
    VbarToken token = fault(bar, 0, 2);
    OK(vbar_token_unpin(token, 0));
    VbarRange range = {.bar = bar, .bytes = 1};
    VbarFault told;
    /* The other id is of the same device. */
    OK(vbar_device_fault_many(second, &range, 1, 0, &told));
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_bar_destroy_wait(bar));
    close_device(second);
}

static void a_model_outlives_no_string(VbarDevice device, const char *path) {
    write_model(path, 3, page_bytes());
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    VbarModelInfo info = {.size = sizeof info};
    OK(vbar_model_info(model, &info));
    VbarFault told;
    OK(vbar_model_fault(model, 1, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_model_close(model));
    FAILS(vbar_model_close(model), VBAR_STATUS_STALE_HANDLE, "model");
    FAILS(vbar_bar_destroy(info.bar), VBAR_STATUS_STALE_HANDLE, "VBAR");
    VbarBarInfo bar = {.size = sizeof bar};
    FAILS(vbar_bar_info(info.bar, &bar), VBAR_STATUS_STALE_HANDLE, "VBAR");
    FAILS(vbar_model_fault(model, 1, 0, &told), VBAR_STATUS_STALE_HANDLE, "model");
    OK(vbar_token_unpin(told.token, 0));
}

/* A refill that nobody commits is asked for again; one commit is enough, and only of a refill. */
static void a_refill_is_committed_once(VbarDevice device) {
    VbarBar bar;
    VbarAllocation allocation;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &bar));
    OK(vbar_bar_allocate(bar, 4096, &allocation));
    OK(vbar_allocation_fault(allocation, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_REFILL);
    VbarFault other;
    OK(vbar_allocation_fault(allocation, 0, &other));
    CHECK(other.outcome == VBAR_OUTCOME_BUSY && other.token.id == 0);
    OK(vbar_token_unpin(told.token, 0));
    FAILS(vbar_token_commit(told.token, 0), VBAR_STATUS_STALE_TOKEN, NULL);
    OK(vbar_allocation_fault(allocation, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_REFILL);
    OK(vbar_token_commit(told.token, 0));
    FAILS(vbar_token_commit(told.token, 0), VBAR_STATUS_INVALID_ARGUMENT, "refill");
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_allocation_fault(allocation, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_bar_destroy_wait(bar));
}

/* Scenario 4: pins that a run left behind are told and taken back; their tokens are stale. */
static void an_end_of_run_takes_pins_back(VbarDevice device) {
    VbarBar bar;
    OK(vbar_bar_create(device, 4 * page_bytes(), &bar));
    VbarToken token = fault(bar, 0, 4);
    uint32_t pinned;
    OK(vbar_bar_end_of_run(bar, 0, VBAR_HELD_PINS_KEEP, &pinned));
    CHECK(pinned == 4 && pins(bar, 3) == 1);
    OK(vbar_bar_end_of_run(bar, 0, VBAR_HELD_PINS_RELEASE, &pinned));
    CHECK(pinned == 4 && pins(bar, 3) == 0);
    FAILS(vbar_token_unpin(token, 0), VBAR_STATUS_STALE_TOKEN, NULL);
    VbarFreed freed;
    OK(vbar_bar_free_memory(bar, UINT64_MAX, &freed));
    CHECK(freed.bytes == 4 * page_bytes() && statistics(device).resident_page_count == 0);
    OK(vbar_bar_destroy_wait(bar));
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/life.safetensors", arguments[1]);
    VbarDevice device = open_device(8);
    a_second_unpin_takes_no_other_pin(device);
    a_token_outlives_its_bar(device);
    a_model_outlives_no_string(device, path);
    a_refill_is_committed_once(device);
    an_end_of_run_takes_pins_back(device);
    close_device(device);
    destroy_wait_has_an_end();
    a_bar_outlives_its_device_id();
    return 0;
}
