"""Random weights for the examples with PyTorch: in a safetensors file, or in a module.

Both are the same numbers, so that a module that reads the file can be compared with one that never
did. Nothing is downloaded, and no more than one tensor is in memory while the file is written.
"""

import json
import struct
import time
import zlib

import torch

#: As safetensors call them.
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def values(name, like, device):
    """The numbers of a parameter: of its name, and nothing else."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.dim() > 1:
        # Of a size that lets deep models stay finite.
        return made.normal_(0, (like.numel() // like.shape[0]) ** -0.5, generator=generator)
    made.normal_(0, 0.02, generator=generator)
    return made if name.endswith("bias") else made + 1


def write(path, module, device="cuda"):
    """Writes a file for a module, which may be on ``meta``; its bytes, and the time it took."""
    began = time.perf_counter()
    header, end = {}, 0
    # A tied parameter is there once, by its first name.
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        begin, end = end, end + parameter.numel() * parameter.dtype.itemsize
        header[name] = {
            "dtype": NAMES[parameter.dtype],
            "shape": list(parameter.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # The data begins at a page of the file, so that most of it can be read past the page cache.
    text += b" " * (-(len(text) + 8) % 4096)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, parameter in parameters.items():
            file.write(values(name, parameter, device).view(torch.uint8).cpu().numpy().data)
    return end, time.perf_counter() - began


def fill(module, device="cuda"):
    """Gives the same numbers to a module as ordinary tensors; the module."""
    made = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = torch.nn.Parameter(values(name, parameter, device), False)
    state = {
        name: made[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    module.load_state_dict(state, assign=True)
    # What it computed for itself, in buffers.
    return module.to(device)


def link_rate(device="cuda"):
    """Bytes a second from page-locked memory to the device: what streaming cannot exceed."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    best = 0.0
    for _ in range(8):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, source.nbytes / (time.perf_counter() - began))
    return best
