"""``HostBuffer`` and the functions beside it: memory of the host that grows in place, and files.

A buffer's addresses never move while it has bytes: they are reserved when it first grows, and
memory is put behind them as it does. Whoever page-locked a part of it, ComfyUI by way of PyTorch as
a rule, the part is unlocked before its memory goes.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from typing import Any, Callable, Iterator

from .._device import Device, descriptor_of
from .._errors import Error, InvalidArgument, NotFound
from . import _devices, _libc

logger = logging.getLogger("vbar.comfy")

#: Threads that touch memory, and that read and write files: eight keep a disk busy, and one for each
#: processor copies what is in the page cache as fast as it can be copied.
_TOUCH_THREADS = 6
_FILE_THREADS = min(max(len(os.sched_getaffinity(0)), 8), 16)
#: What a thread reads, writes or touches at a time.
_PIECE = 4 << 20
#: What is copied to the device behind each other while the rest is read.
_WINDOW = 64 << 20

_threads: concurrent.futures.ThreadPoolExecutor | None = None
_threads_lock = threading.Lock()


class _Touching:
    """Threads that touch memory ahead of need, of which nothing is given back meanwhile.

    Not under the buffer's lock: whoever has that may be reading a file for as long, or waiting for
    these threads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._start = self._end = 0
        #: Of which process, for a forked child has none of them.
        self._under_way, self._process = 0, 0

    def allow(self, start: int, end: int) -> None:
        """From now on these addresses may be touched, and no others."""
        with self._changed:
            self._start, self._end = start, end

    def touch(self, at: int, length: int) -> None:
        """Touches a piece, unless it has been given back since that was asked for."""
        with self._changed:
            if at < self._start or at + length > self._end:
                return
            if self._process != os.getpid():
                self._under_way, self._process = 0, os.getpid()
            self._under_way += 1
        try:
            _libc.touch(at, length)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def forbid(self, start: int) -> None:
        """Addresses from there on are given back: returns when nobody touches any."""
        with self._changed:
            self._end = max(min(self._end, start), self._start)
            while self._under_way and self._process == os.getpid():
                self._changed.wait()


class HostBuffer:
    """See the module's text.

    Args:
        size: bytes that it has from the beginning.
        prewarm: bytes beyond its end that are touched ahead of need.
        max_grow_size: bytes that it may grow to, when that is more.
        mark_cold: whether cached pages of files that were read here are the first that the system
            takes when it is short of memory, since the buffer has their bytes. They are not
            dropped: other programs may read them, and so does whoever cuts this buffer.

    Raises:
        RuntimeError: there is no memory for ``size``.
    """

    def __init__(
        self, size: Any = 0, prewarm: Any = 0, max_grow_size: Any = 0, mark_cold: bool = True
    ) -> None:
        self._lock = threading.RLock()
        self._touching = _Touching()
        self._mark_cold = bool(mark_cold)
        self._prewarm = _devices.saturated(prewarm)
        wanted = _devices.saturated(size)
        self._capacity = max(wanted, _devices.saturated(max_grow_size)) + self._prewarm
        self._base = 0
        #: Bytes from the start on that have memory, whole pages of the system.
        self._committed = 0
        #: First bytes of what was extended, in their order.
        self._chunks: list[int] = []
        #: First bytes of ranges that could not be unlocked.
        self._stuck: set[int] = set()
        #: First byte and length of what was locked here.
        self._locked: dict[int, int] = {}
        #: Bytes that it has.
        self.size = 0
        _devices.add_host(self)
        if wanted:
            self.extend(wanted, register=False)

    def __repr__(self) -> str:
        return f"<HostBuffer: {self.size} of {self._capacity} bytes at {self._base:#x}>"

    def extend(self, size: Any, reallocate: bool = False, register: bool = True) -> int:
        """Grows by a chunk, or makes the last one another length.

        Args:
            size: bytes of the chunk.
            reallocate: whether the last chunk is the one; its bytes are undefined then.
            register: whether the chunk is page-locked.

        Returns:
            The chunk's address.

        Raises:
            RuntimeError: there is no room or no memory for it, or it cannot be locked; the buffer
                is as it was.
        """
        size = _devices.saturated(size)
        with self._lock:
            before = self.size
            again = reallocate and bool(self._chunks)
            start = self._chunks[-1] if again else before
            if start + size > self._capacity:
                raise RuntimeError(
                    f"a chunk of {size} bytes at {start} is beyond the {self._capacity} bytes that "
                    "were reserved"
                )
            unlocked = self._unlock_last(start) if again else 0
            try:
                self._grow_to(start + size)
            except RuntimeError:
                if unlocked:
                    self._lock_again(start, unlocked)
                raise
            address = self._base + start
            if register and size:
                try:
                    self._lock_range(start, size)
                except RuntimeError:
                    if not again:
                        self._shrink_to(before)
                    raise
            if not again:
                self._chunks.append(start)
            elif start + size < before:
                self._shrink_to(start + size)
            self.size = start + size
            return address

    def truncate(self, size: Any, do_unregister: bool = True) -> None:
        """Drops the end. At 0 the addresses go, and come anew when it grows again.

        Args:
            size: bytes that stay. As many as there are is fine, and does nothing.
            do_unregister: whether a locked range that begins there is unlocked, whoever locked it.

        Raises:
            RuntimeError: it has fewer bytes; nothing is changed.
        """
        size = _devices.saturated(size)
        with self._lock:
            if size > self.size:
                raise RuntimeError(f"cannot keep {size} bytes of {self.size}")
            if size == self.size:
                return
            tail = {start for start in {*self._chunks, *self._stuck} if start >= size} | {size}
            for start in [start for start in self._locked if start + self._locked[start] > size]:
                kept = size - start
                self._unlock(start)
                tail.discard(start)
                if kept > 0:
                    self._lock_again(start, kept)
            self._unlock_cut(size)
            if do_unregister:
                for start in sorted(tail):
                    self._unlock_foreign(start)
            self._chunks = [start for start in self._chunks if start < size]
            self._shrink_to(size)
            self.size = size

    def get_raw_address(self) -> int:
        """The address of the first byte; 0 when it has none."""
        return self._base if self.size else 0

    def register(self, offset: Any, size: Any) -> None:
        """Page-locks a range. Raises ``RuntimeError``."""
        with self._lock:
            offset, size = int(offset), int(size)
            if offset < 0 or size <= 0 or offset + size > self.size:
                raise RuntimeError(f"{size} bytes at {offset} are not within {self.size}")
            self._lock_range(offset, size)

    def unregister(self, offset: Any) -> None:
        """Unlocks a range by its first byte, whoever locked it. Raises ``RuntimeError``."""
        with self._lock:
            if int(offset) in self._locked:
                self._unlock(int(offset))
            elif not self._unlock_foreign(int(offset)):
                raise RuntimeError(f"no locked range begins at {offset}")

    def read_file_slice(
        self,
        file: Any,
        file_offset: int,
        size: int,
        offset: int = 0,
        stream: Any = 0,
        device_ptr: int = 0,
        device: Any = -1,
    ) -> None:
        """Reads bytes of a file into the buffer, which grows to have them, and copies them on.

        Args:
            file: a descriptor, or something that has one.
            file_offset: first byte in the file.
            size: length in bytes.
            offset: first byte in the buffer.
            stream: on which they are copied, 0 for the default one.
            device_ptr: the device address that they are copied to; 0 for none. What is page-locked
                stays as it is until that is done.
            device: index of the device; -1 and ``None`` are PyTorch's current one.

        Raises:
            RuntimeError: the file cannot be read, or ends before; the copy fails.
        """
        with self._lock:
            if offset + size > self.size:
                self.extend(offset + size - self.size, register=False)
            base = self._base + offset
        descriptor = _descriptor(file)
        context = _devices.get_or_current(device) if device_ptr else None
        # One that goes no further is for the device all the same, later.
        traffic = context.traffic if context is not None else _devices.any_traffic()
        for at in range(0, size, _WINDOW):
            length = min(_WINDOW, size - at)
            with traffic.reading(length):
                _read(descriptor, file_offset + at, base + at, length)
            if self._mark_cold:
                _libc.cool(descriptor, file_offset + at, length)
            if context is not None:
                _try(
                    f"a copy of {length} bytes to {device_ptr + at:#x}",
                    context.device.copy_from_host,
                    base + at,
                    length,
                    device_ptr + at,
                    _handle(stream),
                )

    def __del__(self) -> None:
        try:
            self.truncate(0)
        except Exception:
            # At the end of the interpreter what this needs may be gone; so is the process, then.
            pass

    def _grow_to(self, end: int) -> None:
        """Memory up to a byte, and touched a little beyond."""
        if not end:
            return
        try:
            if not self._base:
                self._base, self._committed = _libc.reserve(_whole(self._capacity)), 0
            start, wanted = self._committed, _whole(end)
            if wanted > start:
                _libc.commit(self._base + start, wanted - start)
                self._committed = wanted
            # What was touched ahead costs a look; whoever locks it touches with one thread.
            begin = self.size // _libc.PAGE * _libc.PAGE
            _each(self._base + begin, max(wanted - begin, 0), _libc.touch, _TOUCH_THREADS)
        except OSError as error:
            if not self.size and not self._committed:
                self._release()
            raise RuntimeError(f"a buffer of {end} bytes: {error}") from error
        self._touch_ahead(end)

    def _touch_ahead(self, end: int) -> None:
        """Memory that the next chunks will have, on other threads."""
        ahead = min(_whole(end + self._prewarm), _whole(self._capacity))
        start = self._committed
        if ahead <= start:
            return
        try:
            _libc.commit(self._base + start, ahead - start)
        except OSError:
            # It is asked for when it is needed.
            return
        self._committed = ahead
        self._touching.allow(self._base, self._base + ahead)
        for at, length in _pieces(ahead - start):
            _pool().submit(self._touch_if_there, self._base + start + at, length)

    def _touch_if_there(self, at: int, length: int) -> None:
        # Of the buffer, so that it is not collected, which waits for this, on this thread.
        self._touching.touch(at, length)

    def _shrink_to(self, size: int) -> None:
        """Gives memory behind a byte back. What the system does not take stays, and is used when
        it grows again.
        """
        if not size:
            self._release()
            return
        kept = _whole(size)
        if kept < self._committed and not self._stuck:
            self._touching.forbid(self._base + kept)
            try:
                _libc.decommit(self._base + kept, self._committed - kept)
                self._committed = kept
            except OSError as error:
                logger.debug("%r: what is cut stays: %s", self, error)
                self._touching.allow(self._base, self._base + self._committed)

    def _release(self) -> None:
        base, self._base, self._committed = self._base, 0, 0
        stuck, self._stuck = self._stuck, set()
        if not base:
            return
        self._touching.forbid(base)
        if stuck:
            # The device may read and write it still, whatever was mapped there next.
            logger.warning("%d bytes at %#x stay, since they are locked", self._capacity, base)
            return
        try:
            _libc.release(base, _whole(self._capacity))
        except OSError as error:
            logger.warning("%d bytes at %#x stay: %s", self._capacity, base, error)

    def _unlock_all(self, device: Device) -> None:
        """Before the device goes, by which what is locked would be unlocked later."""
        with self._lock:
            for start in {*self._chunks, *self._locked}:
                self._locked.pop(start, None)
                self._unlock_by(device, start)

    def _unlock_last(self, start: int) -> int:
        """Unlocks the last chunk, whoever locked it: it gets another length. Its length if it was
        locked here.
        """
        size = self._locked.get(start, 0)
        if size:
            self._unlock(start)
        else:
            self._unlock_foreign(start)
        return size

    def _unlock_cut(self, size: int) -> None:
        """A chunk that is cut in its midst: what stays of it stays locked, whoever locked it."""
        start = max((start for start in self._chunks if start < size), default=None)
        if start is not None and start not in self._locked and self.size > size:
            ends_at_cut = any(other == size for other in self._chunks)
            if not ends_at_cut and self._unlock_foreign(start):
                self._lock_again(start, size - start)

    def _lock_range(self, start: int, size: int) -> None:
        device = _devices.any_context().device
        _try(f"locking {size} bytes", device.lock_host, self._base + start, size)
        self._locked[start] = size

    def _lock_again(self, start: int, size: int) -> None:
        try:
            self._lock_range(start, size)
        except RuntimeError as error:
            logger.warning("what is left of a locked range is not locked: %s", error)

    def _unlock(self, start: int) -> None:
        del self._locked[start]
        if not self._unlock_foreign(start):
            logger.debug("%r: the range at %d was unlocked already", self, start)

    def _unlock_foreign(self, start: int) -> bool:
        """Whether a locked range began there."""
        for context in list(_devices.contexts.values())[:1]:
            return self._unlock_by(context.device, start)
        return False

    def _unlock_by(self, device: Device, start: int) -> bool:
        try:
            device.unlock_host(self._base + start)
            self._stuck.discard(start)
            return True
        except NotFound:
            self._stuck.discard(start)
            return False
        except Error as error:
            # Its memory is not given back while it may be locked.
            self._stuck.add(start)
            logger.warning("%r: the range at %d stays locked: %s", self, start, error)
            return False


def read_file_to_device(
    file: Any,
    file_offset: int,
    size: int,
    stream: Any,
    device_ptr: int,
    device: Any,
    mark_cold: bool = True,
) -> None:
    """Reads bytes of a file and enqueues their copies to a device address on a stream.

    Returns when they are read and the last copy is enqueued. With ``mark_cold`` the file's cached
    pages are then the first that the system takes when it is short of memory; without, which is
    for what is read again soon, they stay in its own order.

    Raises:
        RuntimeError: the file cannot be read, or ends before; a copy fails.
    """
    context = _devices.get_or_current(device)
    told = _descriptor(file), file_offset, size, device_ptr, _handle(stream)
    with context.traffic.reading(size):
        _try(f"{size} bytes of a file to {device_ptr:#x}", context.device.read_file, *told)
    if mark_cold and size:
        _libc.cool(told[0], file_offset, size)


def write_device_to_file(
    file: Any, file_offset: int, size: int, stream: Any, device_ptr: int, device: Any
) -> None:
    """Writes bytes of the device, as they are behind the work on a stream, to a file.

    Raises:
        RuntimeError: it cannot be written; a copy fails.
    """
    source = _devices.get_or_current(device).device
    told = _descriptor(file), file_offset, size, device_ptr, _handle(stream)
    _try(f"{size} bytes at {device_ptr:#x} to a file", source.write_file, *told)


def write_host_to_file(file: Any, file_offset: int, size: int, host_ptr: int) -> None:
    """Writes memory of the host to a file, by several threads.

    Raises:
        RuntimeError: it cannot be written.
    """
    descriptor = _descriptor(file)

    def write(address: int, length: int) -> None:
        at, done = file_offset + address - host_ptr, 0
        with _libc.view(address, length) as view:
            while done < length:
                done += os.pwrite(descriptor, view[done:], at + done)

    try:
        _each(host_ptr, size, write, _FILE_THREADS)
    except OSError as error:
        raise RuntimeError(f"writing {size} bytes at {file_offset}: {error}") from error


def cleanup_file_reader() -> None:
    """Gives the page-locked memory back that files go through."""
    for context in list(_devices.contexts.values()):
        try:
            context.device.trim_host()
        except Error as error:
            logger.warning("page-locked memory stays: %s", error)


def _read(descriptor: int, file_offset: int, target: int, size: int) -> None:
    def read(address: int, length: int) -> None:
        at, done = file_offset + address - target, 0
        with _libc.view(address, length) as view:
            while done < length:
                count = os.preadv(descriptor, [view[done:]], at + done)
                if not count:
                    raise EOFError(f"the file ends at {at + done}")
                done += count

    try:
        _each(target, size, read, _FILE_THREADS)
    except (OSError, EOFError) as error:
        raise RuntimeError(f"reading {size} bytes at {file_offset}: {error}") from error


def _each(start: int, size: int, act: Callable[[int, int], None], threads: int) -> None:
    """Acts on pieces of a range, several at a time; the first that fails is told when all ended."""
    if size <= _PIECE:
        if size:
            act(start, size)
        return
    pieces, taking = _pieces(size), threading.Lock()

    def work() -> None:
        while True:
            with taking:
                piece = next(pieces, None)
            if piece is None:
                return
            act(start + piece[0], piece[1])

    count = min(threads, -(-size // _PIECE))
    done = [_pool().submit(work) for _ in range(count)]
    concurrent.futures.wait(done)
    for one in done:
        one.result()


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(_PIECE, size - at)) for at in range(0, size, _PIECE))


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = concurrent.futures.ThreadPoolExecutor(_FILE_THREADS, "vbar.comfy")
        return _threads


def _forget_threads() -> None:
    # A forked child has none of them.
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


def _descriptor(file: Any) -> int:
    try:
        return descriptor_of(file)
    except InvalidArgument as error:
        raise RuntimeError(str(error)) from error


def _handle(stream: Any) -> int:
    return 0 if stream is None else int(getattr(stream, "cuda_stream", stream))


def _try(what: str, act: Callable[..., None], *arguments: Any) -> None:
    try:
        act(*arguments)
    except Error as error:
        raise RuntimeError(f"{what}: {error}") from error


def _whole(nbytes: int) -> int:
    """Whole pages of the system."""
    return -(-nbytes // _libc.PAGE) * _libc.PAGE
