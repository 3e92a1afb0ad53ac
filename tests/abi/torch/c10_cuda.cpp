/*
 * libc10_cuda.so: see c10.h. With WITHOUT_THE_TYPE it is of some version that has the exception's
 * type elsewhere.
 */
#include "c10.h"

#ifndef WITHOUT_THE_TYPE
/* What makes the compiler put the type and its table here. */
extern "C" C10_API void c10_cuda_is_out_of_memory() {
    throw c10::OutOfMemoryError({"malloc", "CUDACachingAllocator.cpp", 1}, "CUDA out of memory.");
}
#endif
