/* The smallest whole program: every weight of a model, one after the other, in 4 GiB. */
#include <inttypes.h>
#include <stdio.h>
#include <vbar.h>

int main(int count, char **arguments) {
    /* A GPU where there is one, else the simulated device. */
    VbarDeviceOptions options = {.size = sizeof options, .driver = "auto"};
    options.budget_bytes = UINT64_C(4) << 30;
    VbarDevice device;
    VbarModel model;
    VbarModelInfo info = {.size = sizeof info};
    VbarStream stream = 0; /* your CUstream, as a number */
    VbarFault weight;
    if (vbar_device_open(&options, &device)) goto failed;
    /* Every tensor gets an address that never changes. Nothing is in device memory yet. */
    if (vbar_model_open(device, count > 1 ? arguments[1] : NULL, &model)) goto failed;
    if (vbar_model_info(model, &info)) goto failed;
    for (uint64_t tensor = 0; tensor < info.tensor_count; tensor++) {
        if (vbar_model_fault(model, tensor, stream, &weight)) goto failed;
        /* Resident: launch work on `stream` that reads it here. Else use the host's copy. */
        printf("%" PRIu64 " bytes at %#" PRIx64 "\n", weight.bytes, weight.address);
        if (weight.token.id && vbar_token_unpin(weight.token, stream)) goto failed;
    }
    return vbar_model_close(model) || vbar_device_close(device);
failed:
    fprintf(stderr, "%s\n", vbar_last_message());
    return 1;
}
