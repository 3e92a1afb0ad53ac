"""As torch.compiler: there is no compiler here. A test says that one is tracing, and what is traced
is run instead, operations and all.
"""

import contextlib

_tracing = [False]
_is_exporting_flag = False


def is_dynamo_compiling():
    return _tracing[-1]


@contextlib.contextmanager
def said(state):
    """For tests: a block in which the above says so."""
    state.append(True)
    try:
        yield
    finally:
        state.pop()


def disable(function, recursive=True):
    function._torchdynamo_disable = True
    function.disabled_recursive = recursive
    return function
