"""A module on a model file: its weights are in a bar, and resident while a forward needs them."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping

from .._bar import Bar
from .._device import Device
from .._errors import InvalidArgument
from .._model import Model
from .._sizes import Size
from .._streams import handle_of
from .._unshared import Unshared
from . import _install
from ._compiled import Loan, may_lend
from ._cuda_graphs import keep_graphs_out
from ._entries import Entry, Patch, Slot, match, patches_by_entry
from ._export import StreamError
from ._units import ATTRIBUTE, WeightOffloaded, Pinner, Unit

if TYPE_CHECKING:
    from .._model import ModelPath

_ROOT = "_vbar_streaming"
#: PyTorch's own modules that give their children's weights to one large operation.
_USE_CHILDREN = ("MultiheadAttention", "TransformerEncoderLayer")
#: Where allocations of a VBAR begin, so that what they need is known before.
_ALIGNMENT = 512


def stream(
    module: Any,
    model: ModelPath,
    budget: Size = "auto",
    *,
    device: Device | None = None,
    ordinal: int | None = None,
    dtypes: str = "same",
    patch: Mapping[str, Patch | None] | None = None,
    move_kept: bool = True,
    one_graph: bool = False,
    **options: Any,
) -> Streaming:
    """Run a module whose weights are larger than the GPU: they come from the file when needed.

    For inference only: parameters lose their ``requires_grad``, and a forward whose input needs a
    gradient is refused. Two lines, of which the first is not needed for a module that fits into
    host memory::

        with vbar.torch.empty_model():
            module = Model(config)
        vbar.torch.stream(module, "model.safetensors", budget="8G")

    Parameters and persistent buffers that the file has by their names in ``state_dict`` become
    tensors at addresses of a bar, which never change. Around the ``forward`` of each module its own
    ones are faulted together on PyTorch's current stream and unpinned, also when it raises, also by
    Ctrl-C. Results are those of the ordinary module, bit by bit. Everything else that is done with
    such a tensor (``state_dict()``, printing, a parent that uses a child's weight) pins it for that
    operation; what would write it, move it, or hand its memory out raises a :class:`StreamError`.
    A forward must not keep views of its weights, nor use them on other streams than its own, and
    while one runs no other thread may take its module's tensors, of which it has the bare ones.
    What takes an address rather than a tensor pins nothing: a kernel or an extension of somebody
    else's (Triton, C++) has to get the weights of the module whose forward calls it, or copies.

    Args:
        module: a ``torch.nn.Module``; may be built in :func:`empty_model`. Tied parameters stay
            tied, and one name in the file is enough for them.
        model: a safetensors file, a sharded model's index, or a folder.
        budget: most device memory for frames, in bytes, as ``"8G"``, or as a part of the device's
            memory (not of the model's bytes), as ``"50%"``; ``"auto"`` is what is free. It is the
            device's: all that is streamed there shares it.
        device: an open device; ``None`` opens PyTorch's, the one of its allocator after
            :func:`install`.
        ordinal: PyTorch's number of that one; ``None`` is its current one.
        dtypes: ``"same"`` refuses types that differ, ``"file"`` takes the file's, ``"module"``
            casts to the module's whenever a tensor is filled.
        patch: functions by name, called with the tensor on the GPU after each fill and before
            anything reads it, exactly once for a fill; what they write or return is what forwards
            see, as for LoRA. ``None`` for one that :meth:`Streaming.repatch` will give. What is
            patched or cast has frames of its own beside the file's, while it is resident.
        move_kept: moves tensors that are not in the file to the device; else they stay where they
            are. Either way they keep their values, and are in :attr:`Streaming.kept`.
        one_graph: lets ``torch.compile`` of PyTorch 2.11 make one graph of it, as said below.
        **options: as for :class:`vbar.Device` when it is opened here; with ``host_mapped=True``
            what cannot be resident is read over the link instead of :class:`WeightOffloaded`.

    ``torch.compile`` in its default mode compiles what is within each forward; the faults are no
    part of a graph, so ``fullgraph=True`` is refused by the compiler. With ``one_graph=True`` they
    are: faults are operations of the graph, and the weights that they lend it are pinned until the
    last kernel that reads them was enqueued, or the graph ends by an exception. An exception that
    somebody keeps may keep them, by its traceback. Inductor's kernels end where loans do, so that
    its results are not bit by bit those that it computes with the ordinary module, which rounds in
    fewer places; they are the same ones in every pass, whatever is resident.

    A mode that asks for CUDA graphs has none where streamed weights are used, with a warning.
    ``torch.export`` and ``torch.jit.trace`` raise.

    Raises:
        StreamError: shapes or types differ, a tensor is on ``meta`` and not in the file, the module
            is streamed already, or ``one_graph`` with another PyTorch. Nothing was changed.
        FileError, FormatError: as :meth:`vbar.Device.open_model`.
        InvalidArgument: an option is outside what is allowed, or a patch is of no tensor.
    """
    import torch

    if dtypes not in ("same", "file", "module"):
        raise InvalidArgument(f"dtypes is {dtypes!r}: same, file or module is expected")
    if any(ATTRIBUTE in child.__dict__ or _ROOT in child.__dict__ for child in module.modules()):
        raise StreamError("the module is streamed already, or a part of it: unstream it first")
    if one_graph and not may_lend(torch):
        raise StreamError(f"one_graph is for PyTorch 2.11, and this is {torch.__version__}")
    with contextlib.ExitStack() as undo:
        if device is None:
            device = undo.enter_context(_open(torch, budget, ordinal, options))
            owned: Device | None = device
        else:
            owned = None
            if options or budget != "auto":
                raise InvalidArgument("budget and options are those of the device that is given")
        opened = undo.enter_context(device.open_model(model))
        streaming = Streaming(torch, module, device, opened, model, one_graph)
        undo.callback(streaming._close_bar)
        streaming._prepare(dtypes, patch, move_kept)
        streaming._install(owned)
        undo.pop_all()
    return streaming


def unstream(module: Any, device: Any = "cpu") -> None:
    """Put ordinary tensors back into a streamed module, and close its model.

    Args:
        module: what was given to :func:`stream`.
        device: where the tensors go, for PyTorch; the GPU may be too small for all of them. Those
            that are not in the file stay where they are.

    Raises:
        StreamError: the module is not streamed.
        WeightOffloaded: a tensor could not be read; the module is as it was.
    """
    streaming = module.__dict__.get(_ROOT)
    if streaming is None:
        raise StreamError("the module is not streamed: give the one that stream() was given")
    streaming.unstream(device)


class Streaming(Unshared):
    """What :func:`stream` made of a module. The module has it, it need not be kept."""

    def __init__(
        self,
        torch: Any,
        module: Any,
        device: Device,
        model: Model,
        path: ModelPath,
        lends: bool,
    ) -> None:
        self._torch = torch
        #: Whether graphs of the compiler are lent its weights.
        self.lends = lends
        #: The module.
        self.module = module
        #: Where it is streamed.
        self.device = device
        #: The file, bound to a bar of its own.
        self.model = model
        #: What was opened.
        self.path = os.fspath(path) if isinstance(path, os.PathLike) else path
        #: Names of the module's tensors that are not in the file, and are ordinary ones.
        self.kept: tuple[str, ...] = ()
        #: Names of the file that the module does not have.
        self.unused: tuple[str, ...] = ()
        self._entries: list[Entry] = []
        self._units: list[Unit] = []
        #: For what is patched or cast.
        self._bar: Bar | None = None
        self._owned_device: Device | None = None
        self._patches: dict[Entry, Patch | None] = {}
        self._versions: dict[Entry, int] = {}
        #: Places of ordinary tensors: what will be there, and whether it needed gradients.
        self._moved: list[tuple[list[Slot], Any]] = []
        self._trainable: list[Any] = []
        self._pinners: dict[tuple[Entry, ...], Pinner] = {}
        #: Whether it was not unstreamed.
        self.is_open = True
        #: PyTorch's current stream on the device, as a handle.
        self.current_stream = _current_stream_of(torch, device)
        #: What operations within a graph seem to write: see :mod:`vbar.torch._compiled`.
        self.order: Any = None

    def __repr__(self) -> str:
        count, state = len(self._entries), "" if self.is_open else ", unstreamed"
        return f"<vbar.torch.Streaming of {count} tensors, {self.model.nbytes} bytes{state}>"

    def repatch(self, patch: Mapping[str, Patch | None]) -> None:
        """Change patches: each of those tensors is filled again from the file when it is next used.

        Call it where the forwards are called, on their thread and stream, and not while one runs.

        Raises:
            InvalidArgument: a tensor was not in ``patch`` of :func:`stream`, where ``None`` does.
        """
        self.open_device()
        given = patches_by_entry(self._entries, patch)
        for entry in given:
            if entry not in self._patches:
                raise InvalidArgument(
                    f"patch: {entry.name} was not in patch= of stream(), which gives it a place "
                    "for its patched bytes: name it there, with None for no patch yet"
                )
        for entry, function in given.items():
            self._patches[entry] = function
            self._versions[entry] += 1

    def unstream(self, device: Any = "cpu") -> None:
        """As :func:`vbar.torch.unstream`."""
        self.open_device()
        torch = self._torch
        # All of them first: should one fail, nothing was changed.
        back = []
        for entry in self._entries:
            with torch.no_grad(), self.pinned([entry]):
                copy = entry.plain.detach().to(device, copy=True)
            if entry.is_parameter:
                copy = torch.nn.Parameter(copy, requires_grad=entry.requires_grad)
            back.append(copy)
        self.is_open = False
        for unit in self._units:
            unit.remove()
        for entry, copy in zip(self._entries, back):
            entry.put(copy)
        for value in self._trainable:
            value.requires_grad_(True)
        self.module.__dict__.pop(_ROOT, None)
        self._close_bar()
        self.model.close()
        if self._owned_device is not None:
            self._owned_device.close()

    # What units, entries and guarded tensors need of it.

    def open_device(self) -> Device:
        """The device.

        Raises:
            StreamError: the module was unstreamed.
        """
        if not self.is_open:
            raise StreamError("the module was unstreamed: its tensors of before have no memory")
        return self.device

    def pinned(self, entries: Iterable[Entry]) -> contextlib.AbstractContextManager[Any]:
        """A block in which tensors are pinned, for who is not within a forward."""
        key = tuple(entries)
        pinner = self._pinners.get(key)
        if pinner is None:
            pinner = Pinner(key[0].streaming, [each for each in key if each.streaming is self])
            others = [each for each in key if each.streaming is not self]
            if others:
                # Of two models in one operation.
                return _both(pinner, others[0].streaming.pinned(others))
            self._pinners[key] = pinner
        return pinner.pinned()

    def version_of(self, entry: Entry) -> int:
        """Of the patch that an entry shall have."""
        return self._versions[entry]

    def lift_watermark(self) -> bool:
        """Lets all pages of what is filled here be resident; whether that may help."""
        if self._bar is None:
            return False
        self._bar.prioritise()
        return True

    def fill(self, entry: Entry) -> None:
        """Enqueues what writes an entry's own frames: the file's bytes, cast, then its patch."""
        function = self._patches.get(entry)
        with self._torch.no_grad():
            target = entry.plain.detach()
            with self.model.fault(entry.name) as source:
                if not source:
                    raise WeightOffloaded(entry.name, source.reason, source.needed_bytes)
                target.copy_(entry.source)
            if function is not None:
                result = function(target)
                if result is not None and result is not target:
                    target.copy_(result)

    def refuse_gradients(self, *given: Any) -> None:
        """Refuses what would be read again by a backward pass, when nothing is pinned.

        Raises:
            StreamError: a tensor in there needs a gradient.
        """
        if self._torch.is_grad_enabled() and self._needs_gradient(given):
            raise StreamError(
                "a streamed module is for inference only, and its input needs a gradient: call it "
                "under torch.no_grad() or torch.inference_mode(), or detach() the input"
            )

    def _needs_gradient(self, value: Any) -> bool:
        if isinstance(value, self._torch.Tensor):
            return bool(value.requires_grad)
        if isinstance(value, (tuple, list)):
            return any(map(self._needs_gradient, value))
        if isinstance(value, dict):
            return any(map(self._needs_gradient, value.values()))
        return False

    # In the order in which they are called; only the last one changes the module.

    def _prepare(
        self, dtypes: str, patch: Mapping[str, Patch | None] | None, move_kept: bool
    ) -> None:
        torch, ordinal = self._torch, self.device.ordinal
        self._entries, kept = match(self, torch, self.model, dtypes)
        self._patches = patches_by_entry(self._entries, patch)
        self._make_places()
        for entry in self._entries:
            entry.make_tensors(torch, ordinal)
        self.kept = tuple(slots[0].full_name for slots in kept)
        used = {slot.full_name for entry in self._entries for slot in entry.slots}
        self.unused = tuple(name for name in self.model if name not in used)
        for slots in kept:
            value = slots[0].values[slots[0].name]
            moved = value.detach().to(f"cuda:{ordinal}") if move_kept else value
            if value.device == moved.device:
                moved = value
            elif isinstance(value, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=value.requires_grad)
            self._moved.append((slots, moved))
        if self.lends:
            # An ordinary tensor wherever this is called.
            with torch.inference_mode(False):
                self.order = torch.empty((1,), dtype=torch.uint8, device=f"cuda:{ordinal}")
        self._make_units()

    def _make_places(self) -> None:
        """Frames of their own for what is not as the file has it."""
        filled = [
            entry
            for entry in self._entries
            if entry.elements
            and (entry in self._patches or entry.dtype != entry.dtype_in_file(self._torch))
        ]
        if not filled:
            return
        sizes = [entry.elements * entry.dtype.itemsize for entry in filled]
        total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        self._bar = self.device.create_bar(total)
        for entry, size in zip(filled, sizes):
            entry.allocation = self._bar.allocate(size)
            self._versions[entry] = 1

    def _make_units(self) -> None:
        held: dict[int, tuple[Any, list[tuple[Slot, Entry]]]] = {}
        users = self._users_of_children()
        for entry in self._entries:
            for slot in entry.slots:
                for user in [slot.module, *users.get(id(slot.module), ())]:
                    _, pairs = held.setdefault(id(user), (user, []))
                    pairs.append((slot, entry))
        self._units = [Unit(self, user, pairs) for user, pairs in held.values()]

    def _users_of_children(self) -> dict[int, list[Any]]:
        """By a module's id, those above it that use its weights without calling it.

        Any other parent may do so too: its operations pin for themselves, one by one, and PyTorch's
        fast paths are not for tensors that do.
        """
        found = (getattr(self._torch.nn, name, None) for name in _USE_CHILDREN)
        kinds = tuple(kind for kind in found if kind is not None)
        users: dict[int, list[Any]] = {}
        for module in self.module.modules():
            if isinstance(module, kinds):
                for child in module.modules():
                    if child is not module:
                        users.setdefault(id(child), []).append(module)
        return users

    def _install(self, owned: Device | None) -> None:
        self._owned_device = owned
        for slots, value in self._moved:
            for slot in slots:
                slot.values[slot.name] = value
            if value.requires_grad:
                value.requires_grad_(False)
                self._trainable.append(value)
        self._moved = []
        for entry in self._entries:
            if self.lends:
                entry.loan = Loan(self._torch, self, [entry], Pinner(self, [entry]).owned)
            entry.put(entry.guarded)
            # Its memory goes, if it had any.
            entry.before = None
        for unit in self._units:
            unit.install(self._torch)
        keep_graphs_out(self._torch)
        self.module.__dict__[_ROOT] = self

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def _both(pinner: Pinner, other: Any) -> Iterator[None]:
    with pinner.pinned(), other:
        yield


def _current_stream_of(torch: Any, device: Device) -> Callable[[], int]:
    """What tells PyTorch's current stream on a device, as a handle; a hit takes no longer."""
    ordinal = device._torch_ordinal
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if ordinal is None or raw is None:
        return functools.partial(handle_of, None, ordinal)
    return functools.partial(raw, ordinal)


def _open(torch: Any, budget: Size, ordinal: int | None, options: dict[str, Any]) -> Device:
    """PyTorch's device; the budget is set where one is given."""
    wanted = None if budget == "auto" else budget
    index = int(torch.cuda.current_device()) if ordinal is None else ordinal
    if not _install.is_installed():
        return Device(ordinal=index, budget=wanted, **options)
    if options:
        _install.configure(**options)
    device = _install.device(index)
    if wanted is not None:
        device.budget = wanted
    return device
