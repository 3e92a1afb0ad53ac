/*
 * What the stand-in for PyTorch in tests/python needs of C++: calls of the plug-in functions by
 * address, whose exceptions become numbers and texts. See tests/python/stand_in.
 */
#include "c10.h"

#include <cstddef>
#include <cstdio>

/* How a call ended: 0, 1 for c10::OutOfMemoryError, 2 for another c10::Error. */
template <class Call> static int caught(char *text, size_t capacity, Call call) {
    try {
        call();
        return 0;
    } catch (const c10::OutOfMemoryError &error) {
        std::snprintf(text, capacity, "%s", error.what_without_backtrace());
        return 1;
    } catch (const c10::Error &error) {
        std::snprintf(text, capacity, "%s", error.what_without_backtrace());
        return 2;
    }
}

extern "C" {

C10_API int stand_in_malloc(void *(*function)(size_t, int, void *), size_t size, int device,
                            void *stream, void **result, char *text, size_t capacity) {
    return caught(text, capacity, [&] { *result = function(size, device, stream); });
}

C10_API int stand_in_init(void (*function)(int), int count, char *text, size_t capacity) {
    return caught(text, capacity, [&] { function(count); });
}

C10_API int stand_in_reset(void (*function)(), char *text, size_t capacity) {
    return caught(text, capacity, [&] { function(); });
}

C10_API int stand_in_fraction(void (*function)(double, int), double fraction, int device, char *text,
                              size_t capacity) {
    return caught(text, capacity, [&] { function(fraction, device); });
}

C10_API int stand_in_record(void (*function)(void *, void *), void *pointer, void *stream, char *text,
                            size_t capacity) {
    return caught(text, capacity, [&] { function(pointer, stream); });
}

} /* extern "C" */
