"""vbar behind a pool of PyTorch's own allocator: for who cannot change the allocator."""

from __future__ import annotations

import warnings
from typing import Any

from ._install import InstallError, check_version, configure, expandable_segments, is_installed
from ._install import keep, make_plug, version_of

#: PyTorch's object for our functions, of all pools; before 2.11 a pool has only its address.
_made: list[Any] = []


def mem_pool(*, use_on_oom: bool = False, no_split: bool = False, **options: Any) -> Any:
    """A ``torch.cuda.MemPool`` whose memory is vbar's, of PyTorch's current device.

    For programs whose allocator stays PyTorch's own::

        pool = vbar.torch.mem_pool()
        with torch.cuda.use_mem_pool(pool):
            activations = model(inputs)

    PyTorch caches in it as always: vbar sees segments of 2 MiB and more, not tensors, so that its
    statistics, graphs and errors are PyTorch's. What comes of that:

    * A pool keeps what it has cached while it lives, whatever else needs memory:
      ``torch.cuda.empty_cache()`` gives nothing of it back, and weights are not brought in for it.
      Drop the pool, and its tensors, to give all of it back; one pool a phase is a good measure.
    * It is of the device that is current when it is made, and of the thread that uses it: backward
      passes run on threads of their own and allocate outside, unless
      ``torch.autograd.set_multithreading_enabled(False)``.
    * Inside the pool's block PyTorch before 2.13 does not search again after it gave memory back,
      and defers frees of tensors with ``record_stream``.
    * When weights, which vbar evicts, are not enough, an allocation raises
      ``torch.OutOfMemoryError`` as always.

    Args:
        use_on_oom: whether PyTorch may take free memory of the pool when it has none elsewhere.
        no_split: whether each tensor gets a segment of its own (PyTorch 2.10 and newer).
        **options: as for :func:`configure`.

    Raises:
        InstallError: vbar is PyTorch's allocator already, which has no such pools, or this PyTorch
            cannot make one.
    """
    import torch

    if is_installed():
        raise InstallError(
            "vbar is PyTorch's allocator in this process: its memory is vbar's already, and "
            "torch.cuda.MemPool needs PyTorch's own"
        )
    check_version(torch)
    old = version_of(torch) < (2, 10)
    if no_split and old:
        raise InstallError(f"torch {torch.__version__} has no no_split: 2.10 or newer is needed")
    _check_settings(torch, old)
    if not _made:
        made = make_plug(torch, "vbar_torch_segment_malloc", "vbar_torch_segment_free")
        keep(made)
        _made.append(made)
    configure(**options)
    more = {"no_split": True} if no_split else {}
    return torch.cuda.MemPool(_made[0], use_on_oom=use_on_oom, **more)


def _check_settings(torch: Any, old: bool) -> None:
    name = expandable_segments()
    if name is None:
        return
    text = f"{name} asks for expandable_segments, which pools with an allocator of their own "
    if old:
        raise InstallError(text + f"do not work with in torch {torch.__version__}: remove it")
    warnings.warn(text + "do not have: it is ignored for them", RuntimeWarning, stacklevel=3)
