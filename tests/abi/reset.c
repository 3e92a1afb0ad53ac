/*
 * Needs a GPU: something else in the process resets the device (cuDevicePrimaryCtxReset, which is
 * cudaDeviceReset) while VBARs, pins and copies are there. No call crashes or hangs, each comes back
 * with a status, which is printed; closing leaves the process as good as it was.
 *
 *     cc -std=c11 reset.c -o reset -lvbar -ldl && VBAR_TEST_DRIVER=cuda ./reset FOLDER
 */
#include "check.h"
#include "device.h"
#include "models.h"

static void tell(const char *what, int status) {
    printf("%-10s %s: %s\n", what, vbar_status_text(status),
           status == VBAR_STATUS_OK ? "" : vbar_last_message());
}

/* What may come of a call then: success, as far as the driver still has what it needs, or one of
 * its errors. */
static void check_told(const char *what, int status) {
    tell(what, status);
    CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_DRIVER ||
          status == VBAR_STATUS_DEVICE_LOST);
}

static void check_reset(const char *path, int threads) {
    VbarDeviceOptions options = test_options(4);
    VbarDevice device;
    VbarModel model;
    VbarBar bar, other;
    VbarFault held, told;
    VbarFreed freed;
    options.threads = threads ? VBAR_THREADS_ON : VBAR_THREADS_OFF;
    OK(vbar_device_open(&options, &device));
    OK(vbar_model_open(device, path, &model));
    OK(vbar_bar_create(device, 4 * page_bytes(), &bar));
    OK(vbar_bar_fault(bar, 0, page_bytes(), 0, &held));
    OK(vbar_model_fault(model, 0, 0, &told));
    OK(vbar_token_unpin(told.token, 0));
    int (*reset)(int ordinal);
    find_cuda("cuDevicePrimaryCtxReset_v2", &reset);
    CHECK(reset(0) == 0);
    for (int round = 0; round < 2; round++) {
        int status = vbar_bar_fault(bar, 2 * page_bytes(), page_bytes(), 0, &told);
        check_told("miss", status);
        if (status == VBAR_STATUS_OK && told.token.id) {
            check_told("unpin", vbar_token_unpin(told.token, 0));
        }
        status = vbar_model_fault(model, 1, 0, &told);
        check_told("fill", status);
        if (status == VBAR_STATUS_OK && told.token.id) {
            check_told("unpin", vbar_token_unpin(told.token, 0));
        }
        check_told("refresh", vbar_device_refresh(device));
        check_told("free", vbar_bar_free_memory(bar, UINT64_MAX, &freed));
        status = vbar_bar_create(device, page_bytes(), &other);
        check_told("create", status);
        if (status == VBAR_STATUS_OK) check_told("destroy", vbar_bar_destroy(other));
    }
    check_told("held", vbar_token_unpin(held.token, 0));
    OK(vbar_bar_destroy(bar));
    OK(vbar_model_close(model));
    OK(vbar_device_close(device));
}

int main(int count, char **arguments) {
    start();
    CHECK(count == 2 && on_gpu());
    char path[4096];
    snprintf(path, sizeof path, "%s/reset.safetensors", arguments[1]);
    uint64_t data = write_model(path, 2, page_bytes());
    for (int threads = 0; threads < 2; threads++) check_reset(path, threads);
    /* A device that is opened now is in a context of its own, and right. */
    static unsigned char bytes[4096];
    VbarDevice device = open_device(8);
    VbarModel model;
    VbarFault told;
    OK(vbar_model_open(device, path, &model));
    OK(vbar_model_fault(model, 0, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    copy_from_device(device, bytes, told.address, sizeof bytes);
    CHECK(are_file_bytes(bytes, data, sizeof bytes));
    OK(vbar_token_unpin(told.token, 0));
    OK(vbar_model_close(model));
    OK(vbar_device_close(device));
    puts("the device is as good as before");
    return 0;
}
