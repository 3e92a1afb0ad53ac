"""Safetensors models: a mapping of names to tensors, and faults by name."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from typing import Any, Iterable, Iterator, Mapping, Union

from . import _abi
from ._bar import Bar
from ._call import call, text_of
from ._closeable import Closeable
from ._device import Device, c_path, c_text, descriptor_of
from ._dtypes import Dtype
from ._guard import Guard, Offloaded, Pins, fault_of
from ._owner import Owned
from ._streams import Stream, handle_of
from ._values import Reason

#: A path, a descriptor, or something that has one.
ModelPath = Union[str, bytes, "os.PathLike[Any]", int, Any]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a model, as its file describes it."""

    name: str
    dtype: Dtype
    #: Elements in each dimension, the slowest first.
    shape: tuple[int, ...]
    #: Length in bytes.
    nbytes: int
    #: Device address, 512-byte aligned; it never changes.
    address: int
    #: First byte in the model's VBAR.
    bar_offset: int
    #: First byte in its file.
    file_offset: int
    #: Number of its file in :attr:`Model.files`.
    file: int
    #: Path of its file, for the host's copy; ``None`` where it was opened by descriptor.
    path: str | None


class Model(Closeable, Mapping[str, Tensor]):
    """A safetensors model, bound to a VBAR of its own: every tensor has an address, none memory.

    A mapping of names to :class:`Tensor`, in the natural order of names. Closing it, or dropping
    it, never blocks: its memory goes when the work that uses it is done and its guards are gone.
    """

    def __init__(self, device: Device, source: ModelPath, name: str | None = None) -> None:
        lib = device._lib
        self._device, self._lib, self._owned = device, lib, Owned(lib.vbar_model_close)
        if isinstance(source, (str, bytes, os.PathLike)):
            self._id = self._owned.open(lib.vbar_model_open, device._id, c_path(source))
        else:
            called = None if name is None else c_text(name, "name")
            told = device._id, descriptor_of(source), called
            self._id = self._owned.open(lib.vbar_model_open_descriptor, *told)
        try:
            self._read_all()
        except BaseException:
            # What is raised has this frame, which has the model.
            self._owned.release()
            raise

    def _read_all(self) -> None:
        info = _abi.ModelInfo(size=ctypes.sizeof(_abi.ModelInfo))
        call(self._lib.vbar_model_info, self._id, info)
        #: Its VBAR, for ranks, marks and memory given back. It ends with the model.
        self.bar: Bar = Bar._of_model(self._device, info.bar)
        #: Bytes of all tensors together.
        self.nbytes: int = info.total_bytes
        #: Files.
        self.file_count: int = info.file_count
        #: Paths of the files; ``None`` of one that was opened by descriptor.
        self.files: tuple[str | None, ...] = tuple(map(self._path, range(info.file_count)))
        self._tensors = [self._read(index) for index in range(info.tensor_count)]
        self._indexes = {tensor.name: index for index, tensor in enumerate(self._tensors)}

    def __repr__(self) -> str:
        return f"<vbar.Model of {len(self._tensors)} tensors, {self.nbytes} bytes>"

    # A model is itself, whatever another one has in it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._index(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._indexes

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Close the model and its VBAR. A second time does nothing."""
        self._owned.close()

    def fault(self, name: str, stream: Stream = None) -> Guard | Offloaded:
        """Make a tensor resident for work on ``stream``, and pin it.

        Use the result as a context manager; it is false when the tensor is offloaded::

            with model.fault("layers.0.weight") as weight:
                if weight:
                    tensor = torch.from_dlpack(weight.view())
                else:
                    print(weight.reason)

        Args:
            name: the tensor's name.
            stream: as for :meth:`vbar.Bar.fault`.

        Raises:
            NotFound: there is no such tensor. A ``KeyError``.
            FileError, FileChanged: the file cannot be read, or is another one now.
            TimedOut, Cancelled: a wait ended.
        """
        index = self._index(name)
        handle = handle_of(stream, self._device._torch_ordinal)
        fault = self._fault_raw(index, handle)
        if not fault.token:
            return Offloaded(Reason(fault.reason), fault.bytes)
        again = functools.partial(self._fault_raw, index)
        return Guard(self._device, fault, handle, stream, again, self._tensors[index])

    def _fault_raw(self, index: int, stream: int) -> Pins:
        return fault_of(self._lib.vbar_model_fault, self._id, index, stream)

    def prefetch(self, name: str) -> None:
        """Say that a tensor will be wanted soon, once; as :meth:`vbar.Bar.prefetch`.

        Raises:
            NotFound: there is no such tensor. A ``KeyError``.
        """
        call(self._lib.vbar_model_prefetch, self._id, self._index(name))

    def schedule_hint(self, names: Iterable[str]) -> None:
        """Say in which order the tensors will be faulted, one by one, again and again.

        Advice, as :meth:`vbar.Device.schedule_hint`.

        Raises:
            NotFound: there is no such tensor. A ``KeyError``.
        """
        indexes = [self._index(name) for name in names]
        array = (ctypes.c_uint64 * len(indexes))(*indexes)
        call(self._lib.vbar_model_schedule_hint, self._id, array, len(indexes))

    def metadata(self, key: str) -> str:
        """A value of the model's ``__metadata__``.

        Raises:
            NotFound: there is no such key. A ``KeyError``.
        """
        value = ctypes.c_char_p()
        call(self._lib.vbar_model_metadata, self._id, c_text(key, "key"), value)
        return text_of(value.value or b"")

    def _index(self, name: str) -> int:
        index = self._indexes.get(name)
        if index is not None:
            return index
        # As of any mapping; about what no file can call a tensor the library is not asked.
        if not isinstance(name, str) or "\0" in name or not _is_text(name):
            raise KeyError(name)
        # The library says it, with names that are like it.
        found = ctypes.c_uint64()
        call(self._lib.vbar_model_find, self._id, c_text(name, "name"), found)
        return found.value

    def _read(self, index: int) -> Tensor:
        told = _abi.Tensor(size=ctypes.sizeof(_abi.Tensor))
        call(self._lib.vbar_model_tensor, self._id, index, told)
        return Tensor(
            name=text_of(ctypes.string_at(told.name, told.name_bytes)),
            dtype=Dtype(told.dtype),
            shape=tuple(told.shape[: told.rank]) if told.rank else (),
            nbytes=told.bytes,
            address=told.address,
            bar_offset=told.bar_offset,
            file_offset=told.file_offset,
            file=told.file,
            path=self.files[told.file],
        )

    def _path(self, file: int) -> str | None:
        path = ctypes.c_char_p()
        call(self._lib.vbar_model_file, self._id, file, path)
        return None if path.value is None else os.fsdecode(path.value)


def _is_text(name: str) -> bool:
    """Whether a file can have it: a lone surrogate is no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
