"""Tensors with numbers in them: rows behind each other, on the host or at a device's address.

What is at a device's address is read and written by the simulated device, which counts what touches
bytes that are not mapped. As torch, every operation first asks a subclass that has a
``__torch_function__`` of its own; attributes are asked for as ``__get__`` of a descriptor.
"""

import contextlib
import ctypes
import functools
import math
import random
import struct
import types

#: The simulated device of what is at device addresses; a test sets it.
sim = None
#: What makes bytes on a CUDA device: without, such tensors are in the host's memory.
allocator = None
Tensor = None
_grad = [True]
_dice = random.Random(1)
#: Operations that read or wrote tensors, by name.
done = []


class dtype:
    def __init__(self, name, itemsize, code):
        self.name, self.itemsize, self.code = name, itemsize, code

    def __repr__(self):
        return f"torch.{self.name}"


DTYPES = {
    name: dtype(name, size, code)
    for name, size, code in [
        ("uint8", 1, "B"),
        ("float16", 2, "e"),
        # Of as many bytes, which is what matters here; its numbers are those of the other.
        ("bfloat16", 2, "e"),
        ("float32", 4, "f"),
        ("float64", 8, "d"),
        ("int64", 8, "q"),
    ]
}


class device:
    def __init__(self, given):
        if not isinstance(given, str):
            self.type, self.index = given.type, given.index
            return
        self.type, _, index = given.partition(":")
        self.index = int(index) if index else (0 if self.type == "cuda" else None)

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __repr__(self):
        return f"device({self.type!r}, {self.index})"


class HostStorage:
    def __init__(self, nbytes):
        self.buffer = (ctypes.c_char * max(nbytes, 1))()
        self.address = ctypes.addressof(self.buffer)

    def read(self, at, nbytes):
        return self.buffer[at : at + nbytes]

    def write(self, at, data):
        self.buffer[at : at + len(data)] = data


class BufferStorage:
    """Memory of somebody else's on the host."""

    def __init__(self, memory):
        self.memory, self.address = memory, ctypes.addressof(memory)

    def read(self, at, nbytes):
        return ctypes.string_at(self.address + at, nbytes)

    def write(self, at, data):
        ctypes.memmove(self.address + at, data, len(data))


class MetaStorage:
    address = 0

    def read(self, at, nbytes):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    def write(self, at, data):
        pass


class DeviceStorage:
    def __init__(self, address, owner):
        self.address, self.owner = address, owner

    def read(self, at, nbytes):
        return sim.read(self.address + at, nbytes) if nbytes else b""

    def write(self, at, data):
        sim.write(self.address + at, data)


def make(storage, offset, shape, kind, where, cls=None, requires_grad=False):
    made = object.__new__(cls or Tensor)
    made._told = (storage, offset, tuple(shape), kind, where)
    made._requires_grad = requires_grad
    return made


def empty(shape, kind, where=None):
    where = device(where or "cpu")
    nbytes = math.prod(shape) * kind.itemsize
    if where.type == "cuda" and allocator is not None:
        own = allocator(nbytes)
        return make(DeviceStorage(own.data_ptr(), own), 0, shape, kind, where)
    storage = MetaStorage() if where.type == "meta" else HostStorage(nbytes)
    return make(storage, 0, shape, kind, where)


def tensor(values, dtype=None, device=None):
    kind = dtype or DTYPES["float32"]
    shape = (len(values),) if isinstance(values, list) else ()
    made = empty(shape, kind, device)
    _write(made, values if shape else [values])
    return made


def empty_like(own):
    _, _, shape, kind, where = own._told
    return empty(shape, kind, where)


def frombuffer(memory, dtype):
    nbytes = ctypes.sizeof(memory)
    assert nbytes, "both buffer length and count must not be 0"
    return make(BufferStorage(memory), 0, (nbytes // dtype.itemsize,), dtype, device("cpu"))


def as_tensor(data, device=None):
    """Of what has ``__cuda_array_interface__``, which is kept and not copied."""
    told = data.__cuda_array_interface__
    (address, read_only), kind = told["data"], told["typestr"]
    assert kind == "|u1" and not read_only and told["strides"] is None and told["version"] >= 2
    where = globals()["device"](device)
    return make(DeviceStorage(address, data), 0, told["shape"], DTYPES["uint8"], where)


def arange(count, dtype=None):
    return tensor(list(range(count)), dtype)


def manual_seed(seed):
    _dice.seed(seed)


def randn(*shape, dtype=None, device=None):
    """Small numbers, so that what is computed of them stays within what a type can have."""
    made = empty(shape, dtype or DTYPES["float32"], device)
    _write(made, [_dice.uniform(-0.1, 0.1) for _ in range(math.prod(shape))])
    return made


def full(shape, value, dtype=None, device=None):
    made = empty(shape, dtype or DTYPES["float32"], device)
    _write(made, [value] * math.prod(shape))
    return made


def equal(one, other):
    return one.shape == other.shape and one.tolist() == other.tolist()


def is_grad_enabled():
    return _grad[-1]


@contextlib.contextmanager
def no_grad():
    _grad.append(False)
    try:
        yield
    finally:
        _grad.pop()


@contextlib.contextmanager
def inference_mode(mode=True):
    with no_grad() if mode else contextlib.nullcontext():
        yield


def _asked(value):
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _asked(each)
    elif isinstance(value, Dense) and type(value).__torch_function__ is not None:
        yield type(value)


def op(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        kinds = list(_asked([args, list(kwargs.values())]))
        if kinds:
            return kinds[0].__torch_function__(call, tuple(kinds), args, kwargs)
        done.append(function.__name__)
        return function(*args, **kwargs)

    return call


class Attribute:
    def __init__(self, name, read, write=None):
        self.__name__, self._read, self._write = name, read, write

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        if type(instance).__torch_function__ is not None:
            kinds = (type(instance),)
            return type(instance).__torch_function__(self.__get__, kinds, (instance,), {})
        return self._read(instance)

    def __set__(self, instance, value):
        if type(instance).__torch_function__ is not None:
            kinds = (type(instance),)
            type(instance).__torch_function__(self.__set__, kinds, (instance, value), {})
        elif self._write is None:
            raise AttributeError(self.__name__)
        else:
            self._write(instance, value)


def _read(own):
    storage, offset, shape, kind, _ = own._told
    count = math.prod(shape)
    return struct.unpack(f"<{count}{kind.code}", storage.read(offset, count * kind.itemsize))


def _write(own, values):
    storage, offset, shape, kind, _ = own._told
    assert len(values) == math.prod(shape)
    storage.write(offset, struct.pack(f"<{len(values)}{kind.code}", *values))


def _rows(own):
    flat, width = _read(own), own._told[2][1]
    return [flat[at : at + width] for at in range(0, len(flat), width)]


def _like(own, values, shape=None, kind=None):
    made = empty(own._told[2] if shape is None else shape, kind or own._told[3], own._told[4])
    made._requires_grad = own._requires_grad and is_grad_enabled()
    _write(made, values)
    return made


def _alias(own, **changed):
    storage, offset, shape, kind, where = own._told
    told = {"offset": offset, "shape": shape, "kind": kind, **changed}
    return make(storage, told["offset"], told["shape"], told["kind"], where)


def _set_data(own, value):
    own._told = value._told


class Dense:
    __torch_function__ = None

    device = Attribute("device", lambda own: own._told[4])
    dtype = Attribute("dtype", lambda own: own._told[3])
    shape = Attribute("shape", lambda own: own._told[2])
    nbytes = Attribute(
        "nbytes", lambda own: math.prod(own._told[2]) * own._told[3].itemsize
    )
    is_cuda = Attribute("is_cuda", lambda own: own._told[4].type == "cuda")
    data = Attribute("data", _alias, _set_data)
    requires_grad = Attribute(
        "requires_grad",
        lambda own: own._requires_grad,
        lambda own, value: setattr(own, "_requires_grad", value),
    )

    @staticmethod
    def _make_subclass(cls, data, require_grad=False):
        return make(*data._told, cls=cls, requires_grad=require_grad)

    @op
    def data_ptr(self):
        return self._told[0].address + self._told[1]

    @op
    def numel(self):
        return math.prod(self._told[2])

    @op
    def element_size(self):
        return self._told[3].itemsize

    @op
    def detach(self):
        return _alias(self)

    @op
    def view(self, to):
        _, _, shape, kind, _ = self._told
        if isinstance(to, tuple):
            assert math.prod(to) == math.prod(shape)
            return _alias(self, shape=to)
        last = shape[-1] * kind.itemsize // to.itemsize
        return _alias(self, kind=to, shape=(*shape[:-1], last))

    @op
    def __getitem__(self, index):
        _, offset, shape, kind, _ = self._told
        row = math.prod(shape[1:])
        if isinstance(index, slice):
            start, stop, step = index.indices(shape[0])
            assert step == 1
            moved = offset + start * row * kind.itemsize
            return _alias(self, offset=moved, shape=(max(stop - start, 0), *shape[1:]))
        return _alias(self, offset=offset + index * row * kind.itemsize, shape=shape[1:])

    @op
    def expand(self, shape):
        assert self._told[2] == () and self._told[4].type == "cpu"
        made = _like(self, list(_read(self)) * math.prod(shape), shape)
        # One element, whatever the shape.
        made.expanded = True
        return made

    @op
    def clone(self):
        return _like(self, _read(self))

    @op
    def to(self, to, copy=False):
        where = self._told[4]
        to = where if to is None else to
        kind = to if isinstance(to, dtype) else self._told[3]
        to = where if isinstance(to, dtype) else device(to)
        if to == where and kind is self._told[3] and not copy:
            return self
        made = empty(self._told[2], kind, to)
        if to.type != "meta":
            _write(made, _read(self))
        return made

    def cpu(self):
        return self.to("cpu")

    @op
    def copy_(self, other):
        _write(self, _read(other))
        return self

    @op
    def addmm_(self, one, other):
        columns = list(zip(*_rows(other)))
        added = [sum(map(float.__mul__, row, column)) for row in _rows(one) for column in columns]
        _write(self, [value + more for value, more in zip(_read(self), added)])
        return self

    @op
    def __setitem__(self, index, value):
        _write(self[index], [value])

    @op
    def sum(self, dtype=None):
        return tensor([sum(_read(self))], dtype or self._told[3], self._told[4].type)

    @op
    def numpy(self):
        storage, offset, _, _, where = self._told
        assert where.type == "cpu"
        return types.SimpleNamespace(data=storage.read(offset, self.nbytes))

    def record_stream(self, stream):
        self._told[0].owner.record_stream(stream)

    @op
    def add_(self, other):
        _write(self, [one + other for one in _read(self)])
        return self

    @op
    def requires_grad_(self, requires_grad=True):
        self._requires_grad = requires_grad
        return self

    @op
    def untyped_storage(self):
        return self._told[0]

    @op
    def __int__(self):
        (only,) = _read(self)
        return int(only)

    @op
    def tolist(self):
        return list(_read(self))

    @op
    def __repr__(self):
        return f"tensor({list(_read(self))})"

    @op
    def __add__(self, other):
        # A row is added to every row.
        values, added = _read(self), _read(other)
        return _like(self, [one + added[at % len(added)] for at, one in enumerate(values)])

    @op
    def __mul__(self, factor):
        return _like(self, [one * factor for one in _read(self)])


@op
def linear(x, weight, bias=None):
    values, rows, width = _read(x), weight._told[2][0], weight._told[2][1]
    flat, added = _read(weight), _read(bias) if bias is not None else [0] * rows
    made = []
    for at in range(0, len(values), width):
        for row in range(rows):
            of_row = flat[row * width : (row + 1) * width]
            made.append(sum(map(float.__mul__, values[at : at + width], of_row)) + added[row])
    result = _like(x, made, (len(values) // width, rows))
    result._requires_grad = is_grad_enabled() and (x._requires_grad or weight._requires_grad)
    return result


@op
def embedding(indexes, weight):
    width, flat = weight._told[2][1], _read(weight)
    rows = [flat[int(at) * width : (int(at) + 1) * width] for at in _read(indexes)]
    return _like(weight, sum(map(list, rows), []), (len(rows), width))
