// Runs every test of the C++ interface, or those whose names contain an argument.

#include "check.hpp"

static bool wanted(const char *name, int count, char **words) {
    for (int at = 1; at < count; at++) {
        if (std::strstr(name, words[at])) return true;
    }
    return count == 1;
}

int main(int count, char **words) {
    int passed = 0;
    int failed = 0;
    for (const check::Test &test : check::tests()) {
        if (!wanted(test.name, count, words)) continue;
        try {
            test.run();
            passed++;
        } catch (const std::exception &error) {
            failed++;
            std::printf("%s: %s\n", test.name, error.what());
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
