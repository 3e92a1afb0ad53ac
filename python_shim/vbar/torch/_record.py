"""Records of what a program asks PyTorch's allocator for, as texts that can be replayed.

An event a line: ``malloc ID BYTES STREAM`` with the bytes as they were asked for, ``record ID
STREAM`` where a block is used on another stream too, ``free ID``. A ``#`` begins a comment, streams
are numbered as they appear, 0 is the default one. ``benches/torch_replay.py`` and ``cargo bench
--bench torch`` replay them.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, Mapping

from .. import _abi_torch
from .._call import call
from .._errors import InvalidArgument
from ._install import NotInUse, is_installed

_UNKNOWN_DEVICE = "the history has {} devices, and no number {}"


@contextlib.contextmanager
def record(path: str | os.PathLike[str], *, ordinal: int | None = None) -> Iterator[None]:
    """Write to a file what PyTorch asks vbar for within a ``with`` block.

    Each request, each free and each ``record_stream`` of a device, of all threads, in their order;
    what lives when the block begins comes first. Requests take a lock and write text while this
    lasts, about a microsecond each. The file is complete when the block has ended, also by an
    exception; what a process that ends within it has not written is lost.

    Args:
        path: of the file, which is replaced.
        ordinal: PyTorch's number of the device; ``None`` is its current one.

    Raises:
        NotInUse: :func:`vbar.torch.install` was not called. Of PyTorch's own allocator
            :func:`history_to_trace` makes such a file.
        InvalidArgument: the device is being recorded already.
        FileError: the file cannot be written.
    """
    if not is_installed():
        raise NotInUse(
            "PyTorch allocates elsewhere: call vbar.torch.install() first, or make the trace of "
            "PyTorch's own history with vbar.torch.history_to_trace()"
        )
    if ordinal is None:
        import torch

        ordinal = int(torch.cuda.current_device())
    library = _abi_torch.library()
    call(library.vbar_torch_record_start, ordinal, os.fsencode(path))
    try:
        yield
    finally:
        call(library.vbar_torch_record_stop, ordinal, None)


def history_to_trace(
    snapshot: Mapping[str, Any], path: str | os.PathLike[str], *, ordinal: int = 0
) -> int:
    """Make the same file of what PyTorch's own allocator recorded, without vbar.

    Before the part of the program that is meant,
    ``torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 20)``; after it, this
    with ``torch.cuda.memory._snapshot()``. PyTorch's history has no ``record_stream``: such blocks are
    freed at once in the trace. Frees of what was allocated before the history began are left out.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` returned.
        path: of the file, which is replaced.
        ordinal: PyTorch's number of the device.

    Returns:
        How many events were written.

    Raises:
        InvalidArgument: the history has no such device.
        OSError: the file cannot be written.
    """
    traces = snapshot["device_traces"]
    if not 0 <= ordinal < len(traces):
        raise InvalidArgument(_UNKNOWN_DEVICE.format(len(traces), ordinal))
    ids: dict[int, int] = {}
    streams: dict[int, int] = {0: 0}
    written = made = 0
    with open(path, "w", encoding="ascii") as file:
        for entry in traces[ordinal]:
            address = entry.get("addr")
            if entry["action"] == "alloc":
                number = streams.setdefault(entry["stream"], len(streams))
                made += 1
                ids[address] = made
                file.write(f"malloc {made} {entry['size']} {number}\n")
            elif entry["action"] == "free_requested" and address in ids:
                file.write(f"free {ids.pop(address)}\n")
            else:
                continue
            written += 1
    return written
