"""Tensors of a streamed module, as everybody sees them who is not within one of its forwards.

Their memory is backed only while it is pinned, and a kernel that reads it at another time costs the
process its CUDA context. So these are subclasses that PyTorch asks before it does anything with
them: they pin first, for as long as the operation is enqueued; what shares their memory, as
``detach`` and a slice do, is one of them again. What would let the memory out of sight, or write
bytes that are a file's, is refused with a sentence.

Some of PyTorch's C++ code does not ask (``torch.as_tensor`` of another type), nor does anything
where it is told not to; there the dispatcher does, once more below. It cannot where graphs are lent
weights, since the compiler knows such tensors by what they are asked first. Nobody asks who has
their address: ``data_ptr()``, a C++ extension, ``torch.utils.dlpack.to_dlpack``.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, Iterator, NoReturn

from ._export import StreamError, is_exported, no_export

if TYPE_CHECKING:
    from ._units import Entry

#: Attributes that need no bytes.
_METADATA = frozenset(
    "device dtype shape layout is_cuda is_cpu is_meta is_leaf is_sparse is_quantized ndim "
    "requires_grad grad grad_fn names itemsize nbytes is_nested output_nr _version".split()
)
#: Methods that need none.
_QUESTIONS = frozenset(
    "size dim stride numel nelement element_size is_floating_point is_complex is_contiguous "
    "data_ptr storage_offset get_device is_pinned is_shared is_inference is_signed ndimension "
    "__len__".split()
)
#: What hands the memory out, to be read at any time.
_ESCAPES = frozenset(
    "untyped_storage storage _typed_storage __dlpack__ share_memory_ set_ resize_ "
    "record_stream".split()
)


@functools.lru_cache(maxsize=None)
def guarded_types(lends: bool) -> tuple[Any, Any]:
    """The subclasses of ``torch.nn.Parameter`` and of ``torch.Tensor``; made once, with torch.

    Args:
        lends: whether graphs are lent them.
    """
    import torch

    from ._compiled import one_operation

    kinds: list[Any] = []
    is_traced = torch.compiler.is_dynamo_compiling
    in_a_graph = one_operation(torch, kinds) if lends else None

    def ask(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if lends and is_traced():
            return _traced(torch, in_a_graph, func, args, kwargs or {})
        return _outside(torch, func, args, kwargs or {})

    def ask_below(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _below(torch, func, args, kwargs or {})

    def refuse_pickle(self: Any, protocol: Any) -> NoReturn:
        raise StreamError(
            f"{self._vbar_entry.name} is streamed from a file, and is not pickled: save that file, "
            "or copies, `{name: tensor.cpu() for name, tensor in module.state_dict().items()}`"
        )

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        copy = self.clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        memo[id(self)] = copy
        return copy

    def make(name: str, base: Any) -> Any:
        members = {
            "__doc__": "A tensor of a streamed module: it pins before it is read.",
            "__module__": __name__,
            "__torch_function__": classmethod(ask),
            "__reduce_ex__": refuse_pickle,
            "__deepcopy__": copied,
        }
        if not lends:
            members["__torch_dispatch__"] = classmethod(ask_below)
        return type(name, (base,), members)

    kinds += [make("StreamedParameter", torch.nn.Parameter), make("StreamedTensor", torch.Tensor)]
    return kinds[0], kinds[1]


def guard(entry: Entry, plain: Any) -> Any:
    """What stands for ``plain`` as long as nobody has pinned the entry."""
    import torch

    parameter, tensor = guarded_types(entry.streaming.lends)
    kind = parameter if isinstance(plain, torch.nn.Parameter) else tensor
    made = torch.Tensor._make_subclass(kind, plain, False)
    made._vbar_entry, made._vbar_plain = entry, plain
    return made


class _Block(ctypes.Structure):
    """A ``DLManagedTensor`` of bytes, and its shape behind it, as one piece of C memory."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    ]


_DEVICE_CUDA, _UNSIGNED = 2, 1


def bytes_at(torch: Any, address: int, nbytes: int, ordinal: int) -> Any:
    """A tensor of bytes at a device address that need not be backed yet. It holds no pins.

    By DLPack, since PyTorch believes that: of ``__cuda_array_interface__`` it asks the driver,
    which knows only what is mapped. The description is C memory, which the consumer frees by C's
    own ``free``, so it may be dropped whenever and wherever PyTorch likes.
    """
    # Not ``ctypes.pythonapi``, whose signatures everybody may set.
    python = ctypes.PyDLL(None)
    python.malloc.restype, python.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    at = python.malloc(ctypes.sizeof(_Block))
    if not at:
        raise MemoryError("no memory for the description of a tensor")
    block = _Block.from_address(at)
    block.data, block.byte_offset, block.length = address, 0, nbytes
    block.device_type, block.device_id = _DEVICE_CUDA, ordinal
    block.dtype_code, block.dtype_bits, block.dtype_lanes = _UNSIGNED, 8, 1
    block.ndim, block.shape, block.strides = 1, at + _Block.length.offset, None
    block.context, block.deleter = None, ctypes.cast(python.free, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(python.PyCapsule_New(at, _CAPSULE_NAME, None))


#: Capsules keep a pointer to their name.
_CAPSULE_NAME = b"dltensor"


def _traced(torch: Any, in_a_graph: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """As :func:`_outside`, read by the compiler."""
    name = getattr(func, "__name__", "")
    if name in _QUESTIONS:
        return func(*_plain(args), **_plain(kwargs))
    if name in _ESCAPES or name == "__set__" or _writes(name):
        # Refused there, or the end of a graph.
        return _outside(torch, func, args, kwargs)
    return in_a_graph(func, args, kwargs)


def _is_described() -> bool:
    """Whether the compiler asks of which shape and kind a tensor is; it reads no bytes."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def _outside(torch: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What PyTorch asks instead of doing it: with pins, with ordinary tensors."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    guarded = list(_guarded_in((args, kwargs)))
    entries = list(dict.fromkeys(each._vbar_entry for each in guarded))
    if name == "__set__" and attribute in ("data", "requires_grad", "grad"):
        return _set(func, attribute, args[0], args[1])
    if name == "requires_grad_":
        if len(args) > 1 and args[1] or kwargs.get("requires_grad", len(args) < 2):
            raise StreamError(_inference_only(args[0]._vbar_entry.name))
        return args[0]
    plain_args, plain_kwargs = _plain((args, kwargs))
    if name in _QUESTIONS or (name == "__get__" and attribute in _METADATA):
        return func(*plain_args, **plain_kwargs)
    if name == "untyped_storage" and entries[0].loan is not None and _is_described():
        return func(*plain_args, **plain_kwargs)
    _refuse_outlets(name, attribute, args, kwargs, entries)
    entries[0].streaming.refuse_gradients(plain_args, plain_kwargs)
    with entries[0].streaming.pinned(entries):
        result = func(*plain_args, **plain_kwargs)
    return _wrapped(torch, result, guarded)


def _below(torch: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What nobody asked about, when it comes to an operation: with pins, unless it writes."""
    guarded = list(_guarded_in((args, kwargs)))
    entries = list(dict.fromkeys(each._vbar_entry for each in guarded))
    for at, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if written and next(_guarded_in(value), None) is not None:
            raise StreamError(_no_write(str(func), entries[0].name))
    with entries[0].streaming.pinned(entries):
        return _wrapped(torch, func(*_plain(args), **_plain(kwargs)), guarded)


def _refuse_outlets(name: str, attribute: str, args: Any, kwargs: Any, entries: Any) -> None:
    called = entries[0].name
    if name in _ESCAPES or attribute == "__cuda_array_interface__":
        if is_exported():
            raise no_export()
        raise StreamError(
            f"{name} would hand out the memory of {called}, which is streamed and not always "
            "there: take a copy, by clone() or cpu()"
        )
    writes = _writes(name) and args and hasattr(args[0], "_vbar_entry")
    if writes or next(_guarded_in(kwargs.get("out")), None) is not None:
        raise StreamError(_no_write(name, called))


def _no_write(name: str, called: str) -> str:
    return (
        f"{name} would write {called}, whose bytes are a file's and are read again after an "
        "eviction: change it by patch=, or call vbar.torch.unstream(module) first"
    )


def _writes(name: str) -> bool:
    # `__iadd__` and its like write as `add_` does; `__init__` and `__invert__` do not.
    return name.endswith("_") and not name.endswith("__") or name in _WRITING_OPERATORS


_WRITING_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__".split()
)


def _set(func: Any, attribute: str, own: Any, value: Any) -> Any:
    called, plain = own._vbar_entry.name, own._vbar_plain
    if attribute == "requires_grad":
        if value:
            raise StreamError(_inference_only(called))
        return None
    if attribute == "grad":
        if value is not None:
            raise StreamError(_inference_only(called))
        return None
    given = getattr(value, "_vbar_plain", value)
    same = given.device == plain.device and given.dtype == plain.dtype
    if not same or given.shape != plain.shape or given.data_ptr() != plain.data_ptr():
        # As of `module.to(...)` where that is no move.
        raise StreamError(
            f"{called} is streamed, at an address that never changes: it cannot be moved, cast or "
            "replaced. Call vbar.torch.unstream(module) first"
        )
    return None


def _inference_only(called: str) -> str:
    return f"{called} is streamed: for inference only, it has no gradient"


def _guarded_in(value: Any) -> Iterator[Any]:
    if hasattr(value, "_vbar_entry"):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _guarded_in(each)
    elif isinstance(value, dict):
        yield from _guarded_in(list(value.values()))


def _plain(value: Any) -> Any:
    """The same with ordinary tensors."""
    if hasattr(value, "_vbar_entry"):
        return value._vbar_plain
    if isinstance(value, tuple) and type(value) is not tuple and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _wrapped(torch: Any, result: Any, guarded: list[Any]) -> Any:
    """What came of it; guarded again where it is the entry's own memory."""
    if isinstance(result, torch.Tensor):
        for own in guarded:
            if result is own._vbar_plain:
                return own
        if result.is_cuda and result.numel():
            for own in guarded:
                if own._vbar_entry.holds(result.data_ptr()):
                    return guard(own._vbar_entry, result)
        return result
    if type(result) in (tuple, list):
        return type(result)(_wrapped(torch, each, guarded) for each in result)
    return result
