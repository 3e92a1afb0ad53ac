"""Exceptions by status: one class for each number of ``VbarStatus``.

A weight that does not fit is an outcome, never an exception: see :class:`vbar.Offloaded`.
"""

from __future__ import annotations

import re


class Error(Exception):
    """A call of the library failed; the text says what, with the numbers.

    Attributes:
        status: the ``VbarStatus`` number; 0 for what this package found itself.
    """

    status: int = 0

    def __str__(self) -> str:
        # KeyError would quote the text, OSError put its number before it.
        return str(self.args[0]) if self.args else ""


class AbiError(Error, ImportError):
    """The native library is missing, or of another ABI than this package."""


class GuardReleased(Error, BufferError):
    """Pins were given back: what was a view of them exports nothing any more."""


class InvalidArgument(Error, ValueError):
    """An argument is outside what the function's documentation allows."""

    status = 1


class StaleHandle(Error):
    """A device, VBAR, allocation or model that was closed."""

    status = 2


class StaleToken(Error):
    """Pins that were given back, or taken back by a forced end of run."""

    status = 3


class DriverMissing(Error):
    """The driver's library or one of its symbols is missing, or too old."""

    status = 4


class DriverError(Error):
    """A driver call failed; the text names the call and the code."""

    status = 5


class DeviceLost(Error):
    """The device is lost until the process ends."""

    status = 6


class DeviceNotRegistered(Error):
    """No such device, or it was never opened."""

    status = 7


class AlreadyOpen(Error):
    """The device is open with another driver, context or page size."""

    status = 8


class Unsupported(Error):
    """The driver, or DLPack, cannot do what was asked."""

    status = 9


class NoAddresses(Error, MemoryError):
    """No addresses for the request."""

    status = 10


class TooManyMappings(Error):
    """The operating system allows no more mappings in this process."""

    status = 11


class FileError(Error, OSError):
    """Reading or opening a file failed. ``errno`` is set where the text names it."""

    status = 12

    def __init__(self, message: str) -> None:
        super().__init__(message)
        named = re.search(r"\(os error (\d+)\)", message)
        self.errno = int(named[1]) if named else None


class FormatError(Error, ValueError):
    """A file is not what its header, its name or the format says."""

    status = 13


class FileChanged(Error, OSError):
    """A file changed while bound."""

    status = 14


class TimedOut(Error, TimeoutError):
    """A wait ran into its time-out."""

    status = 15


class Cancelled(Error):
    """A wait was cancelled by :meth:`vbar.Device.cancel_waits`."""

    status = 16


class HostMemory(Error, MemoryError):
    """Page-locked memory could not be had."""

    status = 17


class TooManyPins(Error, OverflowError):
    """More pins than can be counted."""

    status = 18


class ProcessEnding(Error):
    """The process is exiting, or is the child of a fork, which cannot use the device."""

    status = 19


class Closed(Error):
    """The object was closed while the call was under way."""

    status = 20


class NotFound(Error, KeyError):
    """A name that is not there."""

    status = 21


class InternalError(Error):
    """A bug of the library."""

    status = 22


_BY_STATUS: dict[int, type[Error]] = {
    kind.status: kind for kind in Error.__subclasses__() if kind.status
}


def of_status(status: int, message: str | None) -> Error:
    """The exception for a status that is not 0; a number that is not known makes an ``Error``."""
    error = _BY_STATUS.get(status, Error)(message or f"status {status}")
    error.status = status
    return error
