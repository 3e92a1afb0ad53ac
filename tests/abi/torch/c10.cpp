/* libc10.so: see c10.h. */
#include "c10.h"

namespace c10 {

Error::Error(SourceLocation location, std::string text)
    : message(std::move(text)), context{location.function, location.file} {
    whole = message + "\nException raised from " + location.function + " at " + location.file + ":" +
            std::to_string(location.line);
}

const char *Error::what() const noexcept { return whole.c_str(); }

const char *Error::what_without_backtrace() const noexcept { return message.c_str(); }

void detail::torchCheckFail(const char *function, const char *file, uint32_t line,
                            const char *text) {
    throw Error({function, file, line}, text);
}

} // namespace c10
