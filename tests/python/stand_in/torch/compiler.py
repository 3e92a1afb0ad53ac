"""As torch.compiler: there is no compiler here, and what it would skip is marked."""


def disable(function, recursive=True):
    function._torchdynamo_disable = True
    function.disabled_recursive = recursive
    return function
