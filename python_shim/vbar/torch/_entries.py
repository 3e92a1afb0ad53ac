"""Which tensors of a module are which of a model's, and what is known of each.

Nothing of a module is changed here: what does not fit together is found out first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

from .._dtypes import Dtype
from .._errors import InvalidArgument
from ._export import StreamError
from ._parameters import bytes_at, guard

if TYPE_CHECKING:
    from .._bar import Allocation
    from .._model import Tensor as Described
    from ._compiled import Loan
    from ._stream import Streaming

#: What changes a weight after it was filled: in place, or by what it returns.
Patch = Callable[[Any], Any]

_TORCH_NAMES = {
    Dtype.BOOL: "bool",
    Dtype.U8: "uint8",
    Dtype.I8: "int8",
    Dtype.F8_E5M2: "float8_e5m2",
    Dtype.F8_E4M3: "float8_e4m3fn",
    Dtype.F8_E8M0: "float8_e8m0fnu",
    Dtype.F8_E4M3FNUZ: "float8_e4m3fnuz",
    Dtype.F8_E5M2FNUZ: "float8_e5m2fnuz",
    Dtype.I16: "int16",
    Dtype.U16: "uint16",
    Dtype.F16: "float16",
    Dtype.BF16: "bfloat16",
    Dtype.I32: "int32",
    Dtype.U32: "uint32",
    Dtype.F32: "float32",
    Dtype.C64: "complex64",
    Dtype.F64: "float64",
    Dtype.I64: "int64",
    Dtype.U64: "uint64",
}


class Slot:
    """A place of a module that has a tensor: where it is registered, and by which name."""

    __slots__ = ("module", "name", "full_name", "values", "persistent")

    def __init__(self, module: Any, name: str, full_name: str, values: Any, persistent: bool):
        self.module, self.name, self.full_name = module, name, full_name
        #: The module's ``_parameters`` or ``_buffers``.
        self.values: dict[str, Any] = values
        self.persistent = persistent


class Entry:
    """A tensor of the module that is one of the file: a parameter that is tied is one of them."""

    def __init__(self, streaming: Streaming, slots: list[Slot], described: Described) -> None:
        self.streaming, self.slots, self.described = streaming, slots, described
        #: The name in the file.
        self.name = described.name
        #: What was in the slots before.
        self.before: Any = slots[0].values[slots[0].name]
        self.is_parameter = slots[0].values is slots[0].module._parameters
        self.requires_grad = bool(self.before.requires_grad)
        self.dtype: Any = None
        #: Where it is filled to, when it is patched or cast; else the file's own place.
        self.allocation: Allocation | None = None
        #: Of the patches that its bytes have; counts from 1.
        self.version = 0
        #: The file's bytes as a tensor, and what the module has: ordinary, and guarded.
        self.source: Any = None
        self.plain: Any = None
        self.guarded: Any = None
        #: What graphs are lent views of, and what they are lent by who is in no forward.
        self.lent: Any = None
        self.loan: Loan | None = None
        self.address, self.nbytes = described.address, described.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return self.described.shape

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def dtype_in_file(self, torch: Any) -> Any:
        """PyTorch's type of the file's."""
        return torch_dtype(torch, self.described.dtype)

    def holds(self, address: int) -> bool:
        """Whether a device address is of this tensor's memory."""
        return self.address <= address < self.address + self.nbytes

    def make_tensors(self, torch: Any, ordinal: int) -> None:
        """Makes what the module will have. Needs no memory behind it."""
        read = torch_dtype(torch, self.described.dtype)
        self.source = self._view(torch, ordinal, self.described.address, read)
        plain = self.source
        if self.allocation is not None:
            self.address, self.nbytes = self.allocation.address, self.allocation.nbytes
            plain = self._view(torch, ordinal, self.address, self.dtype)
        if self.is_parameter:
            plain = torch.nn.Parameter(plain, requires_grad=False)
        self.plain, self.guarded = plain, guard(self, plain)
        if self.streaming.lends:
            # Of a storage of its own: an operation that lends it was given the other.
            self.lent = self._view(torch, ordinal, self.address, plain.dtype)

    def _view(self, torch: Any, ordinal: int, address: int, dtype: Any) -> Any:
        if not self.elements:
            return torch.empty(self.shape, dtype=dtype, device=f"cuda:{ordinal}")
        flat = bytes_at(torch, address, self.elements * dtype.itemsize, ordinal)
        return flat.view(dtype).view(self.shape)

    def put(self, value: Any) -> None:
        """Puts a tensor where this one is registered."""
        for slot in self.slots:
            slot.values[slot.name] = value


def torch_dtype(torch: Any, dtype: Dtype) -> Any:
    """PyTorch's type of a file's."""
    found = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
    if found is None:
        raise StreamError(f"torch {torch.__version__} has no type for {dtype}")
    return found


def slots_of(module: Any) -> Iterator[Slot]:
    """Every place of a module and its children that has a tensor, in ``state_dict``'s order."""
    seen: set[tuple[int, str]] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        for values in (child._parameters, child._buffers):
            for name, value in values.items():
                full = f"{prefix}.{name}" if prefix else name
                # A module under two names has each of its places once, but both of its names.
                if value is None or (id(child), full) in seen:
                    continue
                seen.add((id(child), full))
                transient = getattr(child, "_non_persistent_buffers_set", ())
                persistent = values is child._parameters or name not in transient
                yield Slot(child, name, full, values, persistent)


def match(
    streaming: Streaming, torch: Any, model: Mapping[str, Described], dtypes: str
) -> tuple[list[Entry], list[list[Slot]]]:
    """The tensors that are in the file, and the places whose tensors are not.

    Raises:
        StreamError: shapes or types differ, or a tensor has no bytes at all; says of which.
    """
    together: dict[int, list[Slot]] = {}
    for slot in slots_of(streaming.module):
        together.setdefault(id(slot.values[slot.name]), []).append(slot)
    entries, kept, wrong = [], [], []
    for slots in together.values():
        # As `load_state_dict` would: the last name of those that the file has.
        named = [slot for slot in slots if slot.persistent and slot.full_name in model]
        if not named:
            kept.append(slots)
            if slots[0].values[slots[0].name].device.type == "meta":
                wrong.append(f"{slots[0].full_name} is on meta, and not in the file")
            continue
        entry = Entry(streaming, slots, model[named[-1].full_name])
        entries.append(entry)
        wrong.extend(_differences(torch, entry, dtypes))
    if not entries and not wrong:
        wrong.append("none of the module's tensors has a name that is in the file")
    if wrong:
        more = f", and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise StreamError(
            f"{type(streaming.module).__name__} and {streaming.path!r} do not fit together, and "
            f"nothing was changed: {'; '.join(wrong[:12])}{more}"
        )
    return entries, kept


def _differences(torch: Any, entry: Entry, dtypes: str) -> Iterator[str]:
    wanted, read = entry.before, torch_dtype(torch, entry.described.dtype)
    entry.dtype = wanted.dtype if dtypes == "module" else read
    if tuple(wanted.shape) != entry.shape:
        shape = list(wanted.shape)
        yield f"{entry.name} is {list(entry.shape)} in the file and {shape} in the module"
    if dtypes == "same" and wanted.dtype != read:
        yield (
            f"{entry.name} is {read} in the file and {wanted.dtype} in the module (dtypes='file' "
            "takes the file's, dtypes='module' casts when it is filled)"
        )


def patches_by_entry(
    entries: list[Entry], patch: Mapping[str, Patch | None] | None
) -> dict[Entry, Patch | None]:
    """Patches by what they are of; any of a tied tensor's names will do.

    Raises:
        InvalidArgument: no such tensor is streamed, or one has two patches, or it is no function.
    """
    names = {slot.full_name: entry for entry in entries for slot in entry.slots}
    found: dict[Entry, Patch | None] = {}
    for name, function in (patch or {}).items():
        entry = names.get(name)
        if entry is None:
            raise InvalidArgument(f"patch: {name!r} is no tensor of the module that is streamed")
        if entry in found:
            raise InvalidArgument(f"patch: {name!r} is tied to another one that is patched")
        if function is not None and not callable(function):
            raise InvalidArgument(f"patch: that of {name!r} is no function, but {function!r}")
        found[entry] = function
    return found
