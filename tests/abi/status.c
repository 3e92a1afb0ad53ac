/* The header compiles as C and as C++, and the library answers as it says. */
#include <stdio.h>
#include <string.h>

#include "vbar.h"

int main(void) {
    if (vbar_abi_version() != VBAR_ABI_VERSION) {
        fprintf(stderr, "the library's ABI is %u, the header's %d\n", (unsigned)vbar_abi_version(),
                VBAR_ABI_VERSION);
        return 1;
    }
    if (strcmp(vbar_status_text(VBAR_STATUS_OK), "ok") != 0) return 2;
    for (int status = VBAR_STATUS_OK; status <= VBAR_STATUS_INTERNAL; status++) {
        if (strcmp(vbar_status_text(status), "unknown status") == 0) return 3;
    }
    if (strcmp(vbar_status_text(-1), "unknown status") != 0) return 4;
    printf("vbar %s\n", vbar_version());
    return 0;
}
