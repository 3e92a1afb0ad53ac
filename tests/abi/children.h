/* Processes that a test starts. */
#ifndef VBAR_TESTS_CHILDREN_H
#define VBAR_TESTS_CHILDREN_H

#include "check.h"

#include <sys/wait.h>

/* The code that a child ends with; a signal, as one that hangs is ended by, fails the test. */
static inline int code_of(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) fprintf(stderr, "ended by signal %d\n", WTERMSIG(status));
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

#endif
