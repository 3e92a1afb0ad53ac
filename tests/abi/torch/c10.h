/*
 * Stand-ins for what PyTorch's libraries have of exceptions: the same names, the same order of
 * virtual functions. `c10::Error` is made in libc10.so, the type `c10::OutOfMemoryError` belongs to
 * libc10_cuda.so, which throws it for PyTorch's own allocator.
 */
#ifndef VBAR_TESTS_TORCH_C10_H
#define VBAR_TESTS_TORCH_C10_H

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#define C10_API __attribute__((visibility("default")))

namespace c10 {

/* 24 bytes, which are passed in memory. */
struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

class C10_API Error : public std::exception {
    std::string message;
    std::vector<std::string> context;
    std::string whole;

  public:
    Error(SourceLocation location, std::string text);
    const char *what() const noexcept override;
    virtual const char *what_without_backtrace() const noexcept;
};

/* No destructor of its own is exported, and no constructor. */
class C10_API OutOfMemoryError : public Error {
    using Error::Error;
};

namespace detail {
[[noreturn]] C10_API void torchCheckFail(const char *function, const char *file, uint32_t line,
                                         const char *text);
}

} // namespace c10

#endif
