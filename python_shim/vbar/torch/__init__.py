"""PyTorch on vbar: what tensors and weights need comes from the same memory.

Before the first CUDA tensor::

    import vbar.torch

    vbar.torch.install(headroom="1G")

From then on PyTorch allocates with vbar. Models that were opened on :func:`device`, or on a
:class:`vbar.Device` of the same GPU, share its memory: a tensor that does not fit evicts weights,
then takes back what is cached, and only then raises ``torch.OutOfMemoryError``, after which the
program goes on. Weights that were evicted come back when they are used again.

What :func:`install` changes in PyTorch, beside its allocator, and why:

* ``torch.cuda.memory_allocated`` and its like raise with any other allocator than PyTorch's own.
  They answer with vbar's numbers; :func:`uninstall_statistics` undoes that.
* ``torch.backends.cudnn.benchmark`` stays off, with a warning, since cuDNN's search asks PyTorch's
  own allocator for its largest free block and fails.
* ``torch.compile(mode="reduce-overhead")`` and ``"max-autotune"`` compile without the CUDA graphs
  that they ask for, with a warning: trees of graphs need checkpoints of PyTorch's own allocator,
  and without trees what is written into inputs is lost and results are overwritten.
* The variable ``NCCL_GRAPH_REGISTER`` is set to 0 unless it is set: NCCL does not try to share what
  a captured collective uses with the other processes, which vbar's memory is not made for.

What does not work with any allocator but PyTorch's own: ``torch.cuda.MemPool`` (see
:func:`mem_pool` for the other way round), CUDA IPC (``torch.multiprocessing`` queues of CUDA
tensors), ``torch.cuda.memory._record_memory_history``, memory in the profiler.

An allocator cannot be taken back while the process lives.

:func:`record` writes what a program asks for to a file, which ``benches/torch_replay.py`` and
``cargo bench --bench torch`` replay: how much memory an order of requests takes.

Whether or not that is installed, :func:`stream` runs a module whose weights are larger than the
GPU, from its file::

    with vbar.torch.empty_model():
        module = Model(config)
    vbar.torch.stream(module, "model.safetensors", budget="8G")
"""

from __future__ import annotations

from ._empty import empty_model
from ._export import StreamError
from ._install import (
    InstallError,
    NotInUse,
    check_in_use,
    configure,
    device,
    install,
    is_installed,
)
from ._phase import release_phase
from ._pool import mem_pool
from ._record import history_to_trace, record
from ._statistics import (
    NotAnswered,
    allocations_seen,
    install_statistics,
    uninstall_statistics,
)
from ._stream import Streaming, stream, unstream
from ._units import WeightOffloaded

__all__ = [
    "InstallError",
    "NotAnswered",
    "NotInUse",
    "StreamError",
    "Streaming",
    "WeightOffloaded",
    "allocations_seen",
    "check_in_use",
    "configure",
    "device",
    "empty_model",
    "history_to_trace",
    "install",
    "install_statistics",
    "is_installed",
    "mem_pool",
    "record",
    "release_phase",
    "stream",
    "uninstall_statistics",
    "unstream",
]
