"""As torch.nn: what a module keeps, how it is called, and a few layers."""

import types

from . import _dense


class Parameter(_dense.Tensor):
    def __new__(cls, data, requires_grad=True):
        return _dense.make(*data._told, cls=cls, requires_grad=requires_grad)

    def __init__(self, *_given, **_named):
        pass


class Module:
    def __init__(self):
        attributes = self.__dict__
        attributes["training"] = True
        attributes["_parameters"], attributes["_buffers"], attributes["_modules"] = {}, {}, {}
        attributes["_non_persistent_buffers_set"] = set()

    def __setattr__(self, name, value):
        if isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            self._modules[name] = value
        elif name in self._buffers:
            self._buffers[name] = value
        else:
            self.__dict__[name] = value

    def __getattr__(self, name):
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__[kind]:
                return self.__dict__[kind][name]
        raise AttributeError(name)

    def register_parameter(self, name, param):
        self._parameters[name] = param

    def register_buffer(self, name, tensor, persistent=True):
        self._buffers[name] = tensor
        if not persistent:
            self._non_persistent_buffers_set.add(name)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            inner = f"{prefix}.{name}" if prefix else name
            yield from child.named_modules(memo, inner, remove_duplicate)

    def modules(self):
        for _, module in self.named_modules():
            yield module

    def parameters(self):
        seen = {}
        for module in self.modules():
            for value in module._parameters.values():
                if value is not None:
                    seen[id(value)] = value
        return iter(seen.values())

    def state_dict(self):
        found = {}
        for prefix, module in self.named_modules(remove_duplicate=False):
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    if value is None or name in module._non_persistent_buffers_set:
                        continue
                    found[f"{prefix}.{name}" if prefix else name] = value.detach()
        return found

    def _apply(self, function):
        for child in self._modules.values():
            child._apply(function)
        for value in self._parameters.values():
            if value is not None:
                value.data = function(value)
        for name, value in self._buffers.items():
            if value is not None:
                self._buffers[name] = function(value)
        return self

    def eval(self):
        self.training = False
        return self

    def to(self, to):
        return self._apply(lambda value: value.to(to))


class Linear(Module):
    def __init__(self, width, rows, bias=True, device=None, dtype=None):
        super().__init__()
        kind = dtype or _dense.DTYPES["float32"]
        # Numbers where they are asked for; else there are zeros.
        made = _dense.randn if device else _made_empty
        self.weight = Parameter(made(rows, width, dtype=kind, device=device))
        self.register_parameter("bias", None)
        if bias:
            self.bias = Parameter(_dense.empty((rows,), kind, device))

    def forward(self, x):
        return _dense.linear(x, self.weight, self.bias)


class Embedding(Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = Parameter(_dense.empty((rows, width), _dense.DTYPES["float32"]))

    def forward(self, indexes):
        return _dense.embedding(indexes, self.weight)


class MultiheadAttention(Module):
    """Uses its child's weight without calling it, as PyTorch's does, and says what that was."""

    def __init__(self, width):
        super().__init__()
        self.in_proj_weight = Parameter(_dense.empty((width, width), _dense.DTYPES["float32"]))
        self.out_proj = Linear(width, width, bias=False)

    def forward(self, x):
        self.seen = type(self.out_proj.weight)
        return _dense.linear(_dense.linear(x, self.in_proj_weight), self.out_proj.weight)


class LayerNorm(Module):
    """Scales and shifts, and does not normalise."""

    def __init__(self, width, device=None, dtype=None):
        super().__init__()
        kind = dtype or _dense.DTYPES["float32"]
        self.weight = Parameter(_dense.full((width,), 0.5, kind, device))
        self.bias = Parameter(_dense.full((width,), 0.25, kind, device))

    def forward(self, x):
        scales = _dense._read(self.weight)
        scaled = [one * scales[at % len(scales)] for at, one in enumerate(_dense._read(x))]
        return _dense._like(x, scaled) + self.bias


class ModuleList(Module):
    def __init__(self, modules):
        super().__init__()
        for at, module in enumerate(modules):
            self._modules[str(at)] = module

    def __iter__(self):
        return iter(self._modules.values())


def _made_empty(*shape, dtype, device):
    return _dense.empty(shape, dtype, device)


@_dense.op
def _gelu(x):
    return _dense._like(x, [max(0.0, one) for one in _dense._read(x)])


functional = types.SimpleNamespace(gelu=_gelu)
