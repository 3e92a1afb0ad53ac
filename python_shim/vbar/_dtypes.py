"""Element types: the format's names, how many bits, and what other libraries call them."""

from __future__ import annotations

from typing import Any

from ._errors import InvalidArgument
from ._values import _Numbered


class Dtype(_Numbered):
    """Type of a tensor's elements, with the names of safetensors."""

    #: A type that the library has no number for.
    OTHER = 0
    BOOL = 1
    F4 = 2
    F6_E2M3 = 3
    F6_E3M2 = 4
    U8 = 5
    I8 = 6
    F8_E5M2 = 7
    F8_E4M3 = 8
    F8_E8M0 = 9
    F8_E4M3FNUZ = 10
    F8_E5M2FNUZ = 11
    I16 = 12
    U16 = 13
    F16 = 14
    BF16 = 15
    I32 = 16
    U32 = 17
    F32 = 18
    C64 = 19
    F64 = 20
    I64 = 21
    U64 = 22

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Bits of an element; 0 where this package does not know."""
        return _BITS.get(self, 0)

    @property
    def typestr(self) -> str | None:
        """NumPy's type string, ``"<f4"``; ``None`` for what NumPy has no type for."""
        return _TYPESTR.get(self)

    @classmethod
    def of(cls, dtype: Any) -> Dtype:
        """The type that ``dtype`` names: a :class:`Dtype`, its name, NumPy's name or type, or
        torch's.

        Raises:
            InvalidArgument: it names none.
        """
        if isinstance(dtype, cls):
            return dtype
        # "torch.bfloat16", "float32", numpy.dtype("float32"), numpy.float32, jax.numpy.bfloat16
        text = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
        text = text.rpartition(".")[2]
        found = cls.__members__.get(text.upper()) or _OTHER_NAMES.get(text.lower())
        if found is None:
            raise InvalidArgument(f"{dtype!r} is no element type: give one of {_names()}")
        return found


def _names() -> str:
    return ", ".join(name for name in Dtype.__members__ if name != "OTHER")


_BITS = {
    Dtype.BOOL: 8,
    Dtype.F4: 4,
    Dtype.F6_E2M3: 6,
    Dtype.F6_E3M2: 6,
    Dtype.U8: 8,
    Dtype.I8: 8,
    Dtype.F8_E5M2: 8,
    Dtype.F8_E4M3: 8,
    Dtype.F8_E8M0: 8,
    Dtype.F8_E4M3FNUZ: 8,
    Dtype.F8_E5M2FNUZ: 8,
    Dtype.I16: 16,
    Dtype.U16: 16,
    Dtype.F16: 16,
    Dtype.BF16: 16,
    Dtype.I32: 32,
    Dtype.U32: 32,
    Dtype.F32: 32,
    Dtype.C64: 64,
    Dtype.F64: 64,
    Dtype.I64: 64,
    Dtype.U64: 64,
}

_TYPESTR = {
    Dtype.BOOL: "|b1",
    Dtype.U8: "|u1",
    Dtype.I8: "|i1",
    Dtype.I16: "<i2",
    Dtype.U16: "<u2",
    Dtype.F16: "<f2",
    Dtype.I32: "<i4",
    Dtype.U32: "<u4",
    Dtype.F32: "<f4",
    Dtype.C64: "<c8",
    Dtype.F64: "<f8",
    Dtype.I64: "<i8",
    Dtype.U64: "<u8",
}

_OTHER_NAMES = {
    "bool_": Dtype.BOOL,
    "uint8": Dtype.U8,
    "int8": Dtype.I8,
    "uint16": Dtype.U16,
    "int16": Dtype.I16,
    "uint32": Dtype.U32,
    "int32": Dtype.I32,
    "uint64": Dtype.U64,
    "int64": Dtype.I64,
    "float16": Dtype.F16,
    "half": Dtype.F16,
    "bfloat16": Dtype.BF16,
    "float32": Dtype.F32,
    "float64": Dtype.F64,
    "complex64": Dtype.C64,
    "float8_e4m3fn": Dtype.F8_E4M3,
    "float8_e4m3fnuz": Dtype.F8_E4M3FNUZ,
    "float8_e5m2": Dtype.F8_E5M2,
    "float8_e5m2fnuz": Dtype.F8_E5M2FNUZ,
    "float8_e8m0fnu": Dtype.F8_E8M0,
    "float4_e2m1fn": Dtype.F4,
    "float4_e2m1fn_x2": Dtype.F4,
}
