"""Sizes and times as people write them: ``8G``, ``1.5 GiB``; seconds."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex, Union

from ._errors import InvalidArgument

#: Bytes: a number, or a text such as ``"8G"`` (K, M, G, T are powers of 1024).
Size = Union[SupportsIndex, str]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgt])(?:i?b)?|b)?\s*", re.I)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
#: In millionths, a percent being 10,000: what the library takes.
_PPM_MAX = (1 << 32) - 1
_U64_MAX = (1 << 64) - 1
#: Digits before the point; zeros in front count as well.
_DIGITS_MAX = 40


def parse_size(size: Size, what: str = "a size") -> int:
    """A size in bytes.

    Raises:
        InvalidArgument: it is negative, does not fit in 64 bits, or is no size.
    """
    if isinstance(size, str):
        found = _TEXT.fullmatch(size)
        if found is None:
            raise InvalidArgument(f"{what}: {size!r} is no size: use bytes, or K, M, G, T")
        number, unit = found[1], _UNITS[(found[2] or "").lower()]
        # More digits than 2^64 has are too many bytes, whatever they are.
        if len(number.partition(".")[0]) > _DIGITS_MAX:
            raise InvalidArgument(f"{what}: {size[:20]}... does not fit in 64 bits")
        nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    else:
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise InvalidArgument(f"{what}: {size!r} is no whole number of bytes") from None
    return unsigned(nbytes, what)


def parse_part(text: object, what: str) -> int | None:
    """A percentage such as ``"50%"`` in millionths, rounded; ``None`` for what has no ``%``.

    Raises:
        InvalidArgument: it has a ``%`` and is no percentage above 0.
    """
    if not isinstance(text, str) or "%" not in text:
        return None
    found = _PERCENT.fullmatch(text)
    ppm = float(found[1]) * 10_000 if found else 0.0
    # Whatever has more digits than a float can take is infinite.
    if not 0.5 < ppm <= _PPM_MAX:
        shown = text if len(text) <= _DIGITS_MAX else f"{text[:20]}..."
        raise InvalidArgument(
            f"{what}: {shown!r} is no part of a device: use a percentage above 0, as 50%"
        )
    return round(ppm)


def unsigned(number: SupportsIndex, what: str, most: int = _U64_MAX) -> int:
    """A whole number from 0 to ``most``: ctypes would cut off what does not fit.

    Raises:
        InvalidArgument: it is another.
    """
    if type(number) is int and 0 <= number <= most:
        return number
    try:
        whole = operator.index(number)
    except TypeError:
        raise InvalidArgument(f"{what} is {number!r}: a whole number is expected") from None
    if not 0 <= whole <= most:
        raise InvalidArgument(f"{what} is {whole}: 0 to {most} is expected")
    return whole


def parse_seconds(seconds: float, what: str) -> int:
    """A time in whole milliseconds, at least 1.

    Raises:
        InvalidArgument: it is not positive, or no number.
    """
    try:
        # So far off that it never comes, and far from overflowing anybody's clock.
        bounded = min(float(seconds), 1e9)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{what} is {seconds!r}: seconds are expected") from None
    except OverflowError:
        raise InvalidArgument(f"{what}: more seconds than can be counted") from None
    if not bounded > 0:
        raise InvalidArgument(f"{what} is {seconds!r}: a time above 0 is expected")
    return max(1, int(bounded * 1000))
