"""``ModelMMAP``: a file's bytes as the host reads them, and its descriptor."""

from __future__ import annotations

import logging
import os
from typing import Any

from . import _libc

logger = logging.getLogger("vbar.comfy")


class ModelMMAP:
    """A private mapping of a file, for reading.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened or mapped.
    """

    def __init__(self, path: Any) -> None:
        self._address, self._nbytes = 0, 0
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._nbytes = os.fstat(self._descriptor).st_size
        if self._nbytes:
            self._address = _libc.map_file(self._descriptor, self._nbytes)

    def get(self) -> int:
        """The address of the first byte; 0 of an empty file."""
        return self._address

    def get_file_handle(self) -> int:
        """The file's descriptor, which is open for as long as this lives."""
        return self._descriptor

    def bounce(self) -> bool:
        """Lets go of the pages that were read, which come from the file again when they are next
        read; whether it did. The mapping stays where it is.
        """
        if not self._address:
            return False
        try:
            _libc.drop(self._address, self._nbytes)
        except OSError as error:
            logger.debug("a mapping keeps its pages: %s", error)
            return False
        return True

    def close(self) -> None:
        """Unmap and close. A second time does nothing."""
        address, self._address = self._address, 0
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if address:
                _libc.release(address, self._nbytes)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # It was never opened, or the interpreter is at its end.
            pass
