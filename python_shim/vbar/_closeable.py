"""What a ``with`` block closes at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ._unshared import Unshared

if TYPE_CHECKING:
    from types import TracebackType

_Closeable = TypeVar("_Closeable", bound="Closeable")


class Closeable(Unshared):
    """Closed at the end of a block, also of one that raises."""

    def __enter__(self: _Closeable) -> _Closeable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close. A second time does nothing."""
        raise NotImplementedError
