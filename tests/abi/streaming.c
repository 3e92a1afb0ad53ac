/*
 * A model larger than its budget, pass after pass, with threads of the library's own: the engine
 * learns the order and plans, and every byte is the file's.
 */
#include "device.h"
#include "models.h"

#define TENSORS 24
#define PASSES 6

int main(int count, char **arguments) {
    start();
    CHECK(count == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/streaming.safetensors", arguments[1]);
    uint64_t bytes = page_bytes() - 512;
    uint64_t data = write_model(path, TENSORS, bytes);
    VbarDeviceOptions options = test_options(10);
    options.threads = VBAR_THREADS_ON;
    VbarDevice device;
    OK(vbar_device_open(&options, &device));
    VbarModel model;
    OK(vbar_model_open(device, path, &model));
    unsigned char *read = malloc(bytes);
    CHECK(read != NULL);
    for (int pass = 0; pass < PASSES; pass++) {
        for (unsigned at = 0; at < TENSORS; at++) {
            char name[16];
            uint64_t tensor;
            VbarFault told;
            snprintf(name, sizeof name, "t%u", at);
            OK(vbar_model_find(model, name, &tensor));
            OK(vbar_model_fault(model, tensor, 0, &told));
            CHECK(told.outcome == VBAR_OUTCOME_RESIDENT && told.bytes == bytes);
            copy_from_device(device, read, told.address, bytes);
            CHECK(are_file_bytes(read, data + at * bytes, bytes));
            OK(vbar_token_unpin(told.token, 0));
        }
    }
    free(read);
    VbarStatistics now = statistics(device);
    CHECK(now.engine_plan_count > 0 && now.engine_trust > 0);
    CHECK(now.used_bytes <= 10 * page_bytes());
    OK(vbar_model_close(model));
    close_device(device);
    return 0;
}
