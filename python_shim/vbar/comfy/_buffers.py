"""``VRAMBuffer``: device memory that grows at one address and stays until the buffer goes.

A VBAR of its own whose pages are pinned from when they are first needed, so that it counts as
everything else does and takes memory of weights, and nobody takes its.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Tuple

from .. import _abi
from .._errors import Error
from .._guard import Pins
from .._values import Reason
from . import _devices, _paged, _pins

#: What it grows by.
_CHUNK = 16 << 20
#: Longest wait for memory whose last users have a fence: without it the prompt ends.
_PATIENCE = 30.0
#: Weights leave before it fails.
_CLASS = 1 << 20


class VRAMBuffer:
    """See the module's text.

    Args:
        max_size: bytes that it may grow to.
        device: the device's index.

    Raises:
        RuntimeError: the device was not opened.
        MemoryError: it has no addresses for it.
    """

    def __init__(self, max_size: Any, device: Any) -> None:
        self._held: list[Pins] = []
        self._lock = threading.Lock()
        self._context = context = _devices.get(device)
        self.device = device
        self.max_size = _devices.saturated(max_size)
        self._size = 0
        self._is_closed = False
        try:
            self._bar = context.device.create_bar(max(self.max_size, 1))
            self._bar.set_class(_CLASS)
            if not self._bar.info().has_addresses:
                raise MemoryError(f"no addresses for a buffer of {self.max_size} bytes")
        except Error as error:
            raise MemoryError(f"a buffer of {self.max_size} bytes: {error}") from error

    def size(self) -> int:
        """Bytes that it has now."""
        return self._size

    def get(self, size: int, offset: int = 0) -> Tuple[VRAMBuffer, int, int]:
        """Bytes of it, which grows to have them.

        Returns:
            The buffer, the first address, and ``size``.

        Raises:
            RuntimeError: it cannot grow so far, or is closed.
        """
        end = offset + size
        if size < 0 or offset < 0 or end > self.max_size:
            raise RuntimeError(f"{size} bytes at {offset} of a buffer of {self.max_size}")
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{size} bytes at {offset} of a buffer that is closed")
            if end > self._size:
                self._grow(end)
        return self, self._bar.address + offset, size

    def _grow(self, end: int) -> None:
        unit = max(_CHUNK, self._bar.page_size)
        end = min(-(-end // unit) * unit, self._bar.nbytes)
        index = self._context.index
        try:
            pins = _pins.pin(self._bar, self._size, end - self._size, index, _PATIENCE)
            while _paged.is_room_missing(pins) and _paged.make_room(self._context, math.inf):
                pins = _pins.pin(self._bar, self._size, end - self._size, index, _PATIENCE)
        except Error as error:
            raise RuntimeError(f"a buffer of {self._size} bytes cannot grow to {end}: {error}") from error
        if not pins.token:
            why = Reason(pins.reason)
            raise RuntimeError(f"a buffer of {self._size} bytes cannot grow to {end}: {why}")
        self._held.append(pins)
        self._size = end

    def close(self) -> None:
        """Gives the memory back. Its users' streams are not known, so all work is waited for. A
        second time does nothing.

        Raises:
            RuntimeError: pins were not given back as they should be; it is closed all the same.
        """
        # What another thread gets meanwhile it has before, or not at all.
        with self._lock:
            self._is_closed = True
            held, self._held = self._held, []
            self._size = 0
        try:
            try:
                if held and _devices.synchronize(self._context.index):
                    for pins in held:
                        _pins.unpin(pins, _abi.STREAM_NONE)
            finally:
                # Else each gives its pins back as it goes, behind the stream that it was got on.
                del held
                self._bar.close()
        except Error as error:
            raise RuntimeError(f"the end of a buffer: {error}") from error

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # It was never made, or the interpreter is at its end.
            pass
