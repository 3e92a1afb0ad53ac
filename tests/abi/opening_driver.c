/*
 * Stands in for the CUDA driver of a machine without a device: cuInit calls what the environment
 * variable VBAR_TEST_IN_INIT has the address of, then says that there is none. The test that
 * compiles it adds the other functions, which nobody calls.
 */
#include <stdint.h>
#include <stdlib.h>

int cuInit(unsigned flags) {
    const char *address = getenv("VBAR_TEST_IN_INIT");
    (void)flags;
    if (address) {
        int (*call)(void) = (int (*)(void))(uintptr_t)strtoull(address, NULL, 10);
        if (call() != 0) return 999;
    }
    return 100;
}
