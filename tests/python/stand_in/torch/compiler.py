"""As torch.compiler: there is no compiler here. A test says that one is tracing, and what is traced
is run instead, operations and all.
"""

import contextlib

_tracing = [False]
_exporting = [False]


def is_dynamo_compiling():
    return _tracing[-1]


def is_exporting():
    return _exporting[-1]


@contextlib.contextmanager
def said(state):
    """For tests: a block in which one of the above says so."""
    state.append(True)
    try:
        yield
    finally:
        state.pop()
