"""What cannot leave its process: VBAR memory is mapped at addresses of one process only."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Unshared:
    """Refuses to be pickled or copied, with a reason rather than an address of nowhere."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a vbar.{type(self).__name__} cannot be copied, pickled, or sent to another process: "
            "its memory is mapped in this process only. Open the model there as well"
        )
