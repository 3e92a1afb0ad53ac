"""What is made resident together, and for how long: around a module's own ``forward``.

Not by forward hooks, although PyTorch has those: a hook with ``always_call`` is called after an
``Exception`` and not after Ctrl-C, and also when somebody's earlier hook has failed and ours has
not run. A block around ``forward`` ends exactly once, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator

from .._guard import Offloaded, Refill
from .._hold import Hold, Lease
from .._many import Ranges
from .._unshared import Unshared
from .._values import Reason
from . import _compiled
from ._entries import Entry, Slot
from ._export import StreamError, keep_from_export, let_export, no_trace

if TYPE_CHECKING:
    from .._guard import Guard
    from ._stream import Streaming


class WeightOffloaded(StreamError):
    """Weights do not fit into the device's memory, now or ever; ``reason`` says why."""

    def __init__(self, names: str, reason: Reason, needed_bytes: int) -> None:
        super().__init__(
            f"{names} cannot be resident now: {reason.name}, {needed_bytes} bytes are needed. Give "
            "the device a larger budget, free tensors, or open it with host_mapped=True, which "
            "lets it read over the link what is too large"
        )
        self.reason = reason
        self.needed_bytes = needed_bytes


#: How long a forward waits for others' pins, and between two looks, in seconds.
_PATIENCE, _PAUSE = 0.5, 0.001


class _Patience:
    """Waits a little when everything is pinned: by forwards of other threads, which go on."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + _PATIENCE

    def waits(self, offloaded: Offloaded) -> bool:
        """Whether to try once more, behind a pause."""
        if offloaded.reason != Reason.ALL_PINNED or time.monotonic() > self._until:
            return False
        time.sleep(_PAUSE)
        return True


class Pinner:
    """Pins a set of tensors for a block, on the stream that is PyTorch's current one then."""

    def __init__(self, streaming: Streaming, entries: list[Entry]) -> None:
        self.streaming, self.entries = streaming, entries
        self._filled = [entry for entry in entries if entry.allocation is not None]
        direct = [entry for entry in entries if entry.allocation is None and entry.nbytes]
        bar = streaming.model.bar
        self._ranges = Ranges(
            (bar, entry.described.bar_offset, entry.nbytes) for entry in direct
        )
        self._current_stream = streaming.current_stream
        #: Those that nobody uses now: one, unless the module is within itself or in threads.
        self._idle: list[Hold] = []

    @property
    def pinned(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What makes the block. What is enqueued within it, on that stream, sees the bytes.

        Raises:
            WeightOffloaded: they do not fit, and nothing is pinned.
        """
        if self._filled:
            return self._with_filled
        return self._held if self._ranges else contextlib.nullcontext

    def owned(self) -> Any:
        """The pins as an object, and without a block: they end when it is dropped.

        Raises:
            WeightOffloaded: they do not fit, and nothing is pinned.
        """
        if not self._filled:
            return self._held().lease() if self._ranges else None
        self.streaming.open_device()
        owners: list[Guard | Lease] = [self._filled_guard(entry) for entry in self._filled]
        if self._ranges:
            owners.append(self._held().lease())
        return owners

    def _held(self) -> Hold:
        streaming = self.streaming
        if not streaming.is_open:
            streaming.open_device()
        handle = self._current_stream()
        try:
            hold = self._idle.pop()
            if hold.handle != handle:
                raise IndexError
        except IndexError:
            hold = Hold(streaming.device, self._ranges, handle, self._idle)
        # Whoever is interrupted from here on drops it, and the pins go.
        offloaded = hold.fault()
        if offloaded is None:
            return hold
        patience = _Patience()
        while patience.waits(offloaded):
            offloaded = hold.fault()
            if offloaded is None:
                return hold
        names = ", ".join(entry.name for entry in self.entries[:4])
        more = f" and {len(self.entries) - 4} more" if len(self.entries) > 4 else ""
        raise WeightOffloaded(names + more, offloaded.reason, offloaded.needed_bytes)

    @contextlib.contextmanager
    def _with_filled(self) -> Iterator[None]:
        self.streaming.open_device()
        # Those that are filled come first: what they are filled from must find a place.
        with contextlib.ExitStack() as stack:
            for entry in self._filled:
                stack.enter_context(self._filled_guard(entry))
            if self._ranges:
                stack.enter_context(self._held())
            yield

    def _filled_guard(self, entry: Entry) -> Guard:
        """Pins an allocation whose bytes are the file's, cast and patched, once for each fill."""
        allocation, streaming = entry.allocation, self.streaming
        assert allocation is not None
        tries, patience = 0, _Patience()
        while True:
            wanted = streaming.version_of(entry)
            guard = allocation.fault(wait=True)
            if isinstance(guard, Refill):
                try:
                    streaming.fill(entry)
                    # Before the commit, after which others may look.
                    entry.version = wanted
                    guard.commit()
                except BaseException:
                    # Not committed: whoever is next fills again, from the start.
                    guard.close()
                    raise
                return guard
            if isinstance(guard, Offloaded):
                # Pages above the watermark stay out until the VBAR is wanted again.
                tries = tries if patience.waits(guard) else tries + 1
                if not streaming.lift_watermark() or tries > 1:
                    raise WeightOffloaded(entry.name, guard.reason, guard.needed_bytes)
            elif not guard:
                raise StreamError(f"{entry.name} is being filled by another thread, without end")
            elif entry.version == streaming.version_of(entry):
                return guard
            else:
                # Patched in another way: filled again, from the file.
                guard.close()
                allocation.invalidate()


class Unit(Unshared):
    """A module and the tensors that are its own: ordinary ones while its ``forward`` runs.

    It is in the module's attributes, so that a module that is streamed is not copied or pickled
    with a ``forward`` that belongs to another.
    """

    __slots__ = ("_streaming", "_module", "_entries", "_pinner", "_places", "_own", "_loan")

    def __init__(self, streaming: Streaming, module: Any, held: list[tuple[Slot, Entry]]) -> None:
        self._entries = list(dict.fromkeys(entry for _, entry in held))
        self._streaming, self._module = streaming, module
        self._pinner = Pinner(streaming, self._entries)
        places: dict[int, _Place] = {}
        for slot, entry in held:
            place = places.setdefault(id(slot.values), _Place(slot))
            place.entries[slot.name] = entry
        self._places = list(places.values())

    def install(self, torch: Any) -> None:
        """Puts the block around the module's ``forward``."""
        module = self._module
        module.__dict__[ATTRIBUTE] = self
        self._own = module.__dict__.get("forward")
        module.__dict__["forward"] = self._wrapped(torch, module.forward)
        keep_from_export(module)
        if hasattr(module, _FLATTEN):
            # Recurrent layers move their weights into one piece of memory, where they would stay.
            module.__dict__[_FLATTEN] = _stays_as_it_is

    def remove(self) -> None:
        """Takes it away."""
        attributes = self._module.__dict__
        attributes.pop(ATTRIBUTE, None)
        if attributes.get(_FLATTEN) is _stays_as_it_is:
            del attributes[_FLATTEN]
        attributes.pop("forward", None)
        if self._own is not None:
            attributes["forward"] = self._own
        let_export(self._module)

    def _wrapped(self, torch: Any, forward: Any) -> Any:
        pinned, swaps = self._pinner.pinned, [place.swap() for place in self._places]
        is_grad_enabled = torch.is_grad_enabled
        refuse_gradients = self._streaming.refuse_gradients
        is_traced, jit_state = torch.compiler.is_dynamo_compiling, torch._C._get_tracing_state
        lends = self._streaming.lends
        begin, returned, end = self._lender(torch) if lends else (None, None, None)

        # Without the attributes: by those the compiler would find what it wraps instead of this.
        @functools.wraps(forward, updated=())
        def streamed_forward(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                refuse_gradients(args, kwargs)
                # A graph that breaks within a block like this one is given up, back to before it:
                # then all of this is run as it is below, and what it calls is compiled.
                try:
                    lent = begin()
                    result = forward(*args, **kwargs)
                    returned(result, lent)
                    return result
                finally:
                    end()
            if jit_state() is not None:
                raise no_trace()
            if is_grad_enabled():
                refuse_gradients(args, kwargs)
            with pinned():
                # The last to leave puts the guarded ones back. In between another thread may do
                # so, or this module within itself: those pin once more, and compute the same.
                try:
                    for values, plain, _ in swaps:
                        values.update(plain)
                    return forward(*args, **kwargs)
                finally:
                    for values, _, guarded in swaps:
                        values.update(guarded)

        if lends:
            return streamed_forward
        # Of the compiler's graphs this is no part; what is called from here is compiled.
        return torch.compiler.disable(streamed_forward, recursive=False)

    def _lender(self, torch: Any) -> Any:
        self._loan = _compiled.Loan(torch, self._streaming, self._entries, self._pinner.owned)
        at = {entry: index for index, entry in enumerate(self._entries)}
        places = tuple(
            (
                place.module,
                place.attribute,
                place.values,
                tuple((name, at[entry]) for name, entry in place.entries.items()),
            )
            for place in self._places
        )
        return _compiled.lender(torch, self._loan, places)


class _Place:
    """A dictionary of a module that has streamed tensors, and which by their names."""

    __slots__ = ("module", "attribute", "values", "entries")

    def __init__(self, slot: Slot) -> None:
        self.module, self.values = slot.module, slot.values
        is_parameters = slot.values is slot.module._parameters
        self.attribute = "_parameters" if is_parameters else "_buffers"
        self.entries: dict[str, Entry] = {}

    def swap(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The dictionary, and what is in it within the module's forward and outside."""
        plain = {name: entry.plain for name, entry in self.entries.items()}
        return self.values, plain, {name: entry.guarded for name, entry in self.entries.items()}


def _stays_as_it_is() -> None:
    return None


#: Where a module has its unit.
ATTRIBUTE = "_vbar_streamed"
#: What recurrent layers call before a forward, when their weights are others than the last time.
_FLATTEN = "flatten_parameters"
