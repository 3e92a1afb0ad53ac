"""What is made resident together, and for how long: around a module's own ``forward``.

Not by forward hooks, although PyTorch has those: a hook with ``always_call`` is called after an
``Exception`` and not after Ctrl-C, and also when somebody's earlier hook has failed and ours has
not run. A block around ``forward`` ends exactly once, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Iterator

from .._guard import Offloaded, Refill
from .._many import Guards, Ranges
from .._unshared import Unshared
from ._entries import Entry, Slot
from ._parameters import StreamError

if TYPE_CHECKING:
    from .._device import Device
    from .._guard import Guard
    from .._values import Reason
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

    def pinned(self) -> contextlib.AbstractContextManager[Any]:
        """The block. What is enqueued within it, on that stream, sees the bytes.

        Raises:
            WeightOffloaded: they do not fit, and nothing is pinned.
        """
        device = self.streaming.open_device()
        return self._with_filled(device) if self._filled else self._fault(device)

    def _fault(self, device: Device) -> Guards:
        guards = device.fault_many(self._ranges)
        if isinstance(guards, Offloaded):
            names = ", ".join(entry.name for entry in self.entries[:4])
            more = f" and {len(self.entries) - 4} more" if len(self.entries) > 4 else ""
            raise WeightOffloaded(names + more, guards.reason, guards.needed_bytes)
        # Whoever is interrupted before the block begins drops them, and the pins go.
        return guards

    @contextlib.contextmanager
    def _with_filled(self, device: Device) -> Iterator[None]:
        # Those that are filled come first: what they are filled from must find a place.
        with contextlib.ExitStack() as stack:
            for entry in self._filled:
                stack.enter_context(self._filled_guard(entry))
            stack.enter_context(self._fault(device))
            yield

    def _filled_guard(self, entry: Entry) -> Guard:
        """Pins an allocation whose bytes are the file's, cast and patched, once for each fill."""
        allocation, streaming = entry.allocation, self.streaming
        assert allocation is not None
        tries = 0
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
                tries += 1
                if tries > 1 or not streaming.lift_watermark():
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

    def __init__(self, streaming: Streaming, module: Any, held: list[tuple[Slot, Entry]]) -> None:
        entries = list(dict.fromkeys(entry for _, entry in held))
        self._streaming, self._module = streaming, module
        self._pinner = Pinner(streaming, entries)
        #: By the id of a module's dictionary: that, and what it has within and outside.
        places: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        for slot, entry in held:
            place = places.setdefault(id(slot.values), (slot.values, {}, {}))
            place[1][slot.name], place[2][slot.name] = entry.plain, entry.guarded
        self._places = list(places.values())

    def install(self, torch: Any) -> None:
        """Puts the block around the module's ``forward``."""
        module = self._module
        module.__dict__[ATTRIBUTE] = self
        self._own = module.__dict__.get("forward")
        module.__dict__["forward"] = self._wrapped(torch, module.forward)

    def remove(self) -> None:
        """Takes it away."""
        attributes = self._module.__dict__
        attributes.pop(ATTRIBUTE, None)
        attributes.pop("forward", None)
        if self._own is not None:
            attributes["forward"] = self._own

    def _wrapped(self, torch: Any, forward: Any) -> Any:
        pinned, places = self._pinner.pinned, self._places
        refuse_gradients = self._streaming.refuse_gradients

        # Without the attributes: by those the compiler would find what it wraps instead of this.
        @functools.wraps(forward, updated=())
        def streamed_forward(*args: Any, **kwargs: Any) -> Any:
            refuse_gradients(args, kwargs)
            with pinned():
                # The last to leave puts the guarded ones back. In between another thread may do
                # so, or this module within itself: those pin once more, and compute the same.
                try:
                    for values, plain, _ in places:
                        values.update(plain)
                    return forward(*args, **kwargs)
                finally:
                    for values, _, guarded in places:
                        values.update(guarded)

        # Of the compiler's graphs this is no part; what is called from here is compiled.
        disable = getattr(getattr(torch, "compiler", None), "disable", None)
        return streamed_forward if disable is None else disable(streamed_forward, recursive=False)


#: Where a module has its unit.
ATTRIBUTE = "_vbar_streamed"
