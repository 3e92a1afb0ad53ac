"""PyTorch's tensors and a model's weights in one memory: a tensor that needs room gets theirs."""

import sys

import torch

import vbar.torch

# Two lines, before the first tensor on the GPU. From here on PyTorch allocates with vbar.
vbar.torch.install(headroom="1G")

if len(sys.argv) != 2:
    sys.exit("usage: torch_tensors.py MODEL")
with vbar.torch.device(0) as device, device.open_model(sys.argv[1]) as model:
    for name in model:
        with model.fault(name) as weight:
            if weight:
                pass  # use(torch.from_dlpack(weight.view())): it is resident, with no copy
    print(f"{device.statistics().used_bytes >> 20} MiB are in frames, weights all of them")

    # Should that be more than the weights left free, as many of them as it takes are evicted; they
    # come back when they are used again.
    _, total = torch.cuda.mem_get_info()
    activations = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    print(f"{torch.cuda.memory_allocated() >> 20} MiB in a tensor")

    # What cannot be had is PyTorch's own exception, and the program goes on.
    try:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)

    # Between two phases of a program: all that was cached goes back to the driver.
    del activations
    print(f"{vbar.torch.release_phase() >> 20} MiB given back")
