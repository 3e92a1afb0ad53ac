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
    if (count != 2) return fputs("usage: smallest MODEL\n", stderr), 1;
    if (vbar_device_open(&options, &device)) goto failed;
    /* Every tensor gets an address that never changes. Nothing is in device memory yet. */
    if (vbar_model_open(device, arguments[1], &model)) goto failed;
    if (vbar_model_info(model, &info)) goto failed;
    for (uint64_t tensor = 0; tensor < info.tensor_count; tensor++) {
        if (vbar_model_fault(model, tensor, stream, &weight)) goto failed;
        if (weight.outcome == VBAR_OUTCOME_RESIDENT) {
            /* Pinned, and valid for work on `stream`: launch it here, before the unpin. The bytes
             * stay until that work is done, and not longer than they must. */
            printf("%" PRIu64 " bytes at %#" PRIx64 "\n", weight.bytes, weight.address);
            if (vbar_token_unpin(weight.token, stream)) goto failed;
        } else {
            /* Not resident, and the reason says why: use the host's copy. */
            printf("offloaded: %s\n", vbar_reason_text(weight.reason));
        }
    }
    return vbar_model_close(model) || vbar_device_close(device);
failed:
    fprintf(stderr, "%s\n", vbar_last_message());
    return 1;
}
