"""A text encoder, a diffusion transformer and a decoder draw a picture in one budget.

    python3 torch_sample.py                   # 8 GB of weights in 4 GB, 8 steps, two pictures
    python3 torch_sample.py --budget 3G --steps 20

Three modules in the shape of a modern pipeline, with random weights in temporary files: each is one
call of vbar.torch.stream, and PyTorch's tensors share the budget with their weights. Nobody moves
a model on or off the device, the phases just run. A line for each phase says what it took, how many
bytes were streamed, at which rate and how that compares with the link, and how much of each model
is resident after it. The picture is noise; it has to be, bit by bit, the one that ordinary modules
draw, when the card has room for them.
"""

import argparse
import os
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
import torch_weights
from torch import nn

import vbar
import vbar.torch

GB = 1e9
HEAD = 128


def attention(query, key, value):
    """Of `(batch, tokens, width)`, by heads."""
    batch, _, width = query.shape

    def split(x):
        return x.view(batch, -1, width // HEAD, HEAD).transpose(1, 2)

    found = F.scaled_dot_product_attention(split(query), split(key), split(value))
    return found.transpose(1, 2).reshape(batch, -1, width)


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class EncoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.middle = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = Mlp(width, width * 5 // 2)

    def forward(self, x):
        x = x + self.out(attention(*self.qkv(self.before(x)).chunk(3, dim=-1)))
        return x + self.mlp(self.middle(x))


class Encoder(nn.Module):
    """Words to `(batch, words, width)`."""

    def __init__(self, width, count, words=32128):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(EncoderLayer(width) for _ in range(count))
        self.norm = nn.RMSNorm(width)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Stream(nn.Module):
    """One side of a double block: what it gives to the attention, and what it makes of it."""

    def __init__(self, width):
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query_norm, self.key_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def before(self, x, vector):
        parts = self.modulation(F.silu(vector))[:, None].chunk(6, dim=-1)
        shift, scale = parts[:2]
        x = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return (self.query_norm(query), self.key_norm(key), value), parts[2:]

    def after(self, x, attended, parts):
        gate, shift, scale, last = parts
        x = x + gate * self.out(attended)
        return x + last * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


class Double(nn.Module):
    """Picture and text, each with weights of its own, attend to each other."""

    def __init__(self, width):
        super().__init__()
        self.image, self.text = Stream(width), Stream(width)

    def forward(self, image, text, vector):
        of_text, text_parts = self.text.before(text, vector)
        of_image, image_parts = self.image.before(image, vector)
        both = (torch.cat(pair, dim=1) for pair in zip(of_text, of_image))
        told, seen = attention(*both).split([text.shape[1], image.shape[1]], dim=1)
        return self.image.after(image, seen, image_parts), self.text.after(text, told, text_parts)


class Single(nn.Module):
    """Both as one sequence; attention and MLP beside each other."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.modulation = nn.Linear(width, 3 * width)
        self.query_norm, self.key_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.into, self.out = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)

    def forward(self, x, vector):
        shift, scale, gate = self.modulation(F.silu(vector))[:, None].chunk(3, dim=-1)
        within = self.into(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        query, key, value, inner = within.split([self.width] * 3 + [4 * self.width], dim=-1)
        attended = attention(self.query_norm(query), self.key_norm(key), value)
        inner = F.gelu(inner, approximate="tanh")
        return x + gate * self.out(torch.cat((attended, inner), dim=-1))


class Denoiser(nn.Module):
    """The direction in which a noisy picture of `(batch, 16, height, width)` shall go."""

    def __init__(self, width, doubles, singles, text_width):
        super().__init__()
        self.width = width
        self.image_in, self.text_in = nn.Linear(64, width), nn.Linear(text_width, width)
        self.time_in = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.doubles = nn.ModuleList(Double(width) for _ in range(doubles))
        self.singles = nn.ModuleList(Single(width) for _ in range(singles))
        self.last_modulation, self.last = nn.Linear(width, 2 * width), nn.Linear(width, 64)
        exponents = torch.arange(128, dtype=torch.float32) / 128
        self.register_buffer("frequencies", 10_000**-exponents, persistent=False)

    def forward(self, latents, text, when):
        shape = latents.shape
        image = self.image_in(F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2))
        text = self.text_in(text)
        angles = 1000 * when[:, None] * self.frequencies
        vector = self.time_in(torch.cat((angles.cos(), angles.sin()), dim=-1).to(image.dtype))
        for block in self.doubles:
            image, text = block(image, text, vector)
        x = torch.cat((text, image), dim=1)
        for block in self.singles:
            x = block(x, vector)
        shift, scale = self.last_modulation(F.silu(vector))[:, None].chunk(2, dim=-1)
        x = x[:, text.shape[1] :]
        x = self.last(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        x = x.transpose(1, 2).reshape(shape[0], 64, shape[2] // 2, shape[3] // 2)
        return F.pixel_shuffle(x, 2)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.beside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.beside(x) + self.conv2(F.silu(self.norm2(y)))


class Decoder(nn.Module):
    """Latents to a picture eight times as wide and high."""

    def __init__(self, widths=(512, 512, 256, 128)):
        super().__init__()
        self.first = nn.Conv2d(16, widths[0], 3, padding=1)
        pairs = zip((widths[0], *widths), widths)
        stages = (nn.Sequential(Residual(a, b), Residual(b, b)) for a, b in pairs)
        self.stages = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(32, widths[-1])
        self.last = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        for at, stage in enumerate(self.stages):
            x = stage(x if at == 0 else F.interpolate(x, scale_factor=2))
        return self.last(F.silu(self.norm(x)))


def built(options):
    """The three, with no memory for their weights, by their names."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with vbar.torch.empty_model():
            modules = {
                "encoder": Encoder(2048, options.layers),
                "denoiser": Denoiser(options.width, options.doubles, options.singles, 2048),
                "decoder": Decoder(),
            }
    finally:
        torch.set_default_dtype(before)
    return {name: module.eval() for name, module in modules.items()}


@torch.inference_mode()
def draw(modules, options, seed, phase):
    """The picture; `phase` is a block around each part."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.randint(0, 32128, (1, options.words), device="cuda", generator=generator)
    shape = (1, 16, options.size // 8, options.size // 8)
    latents = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
    with phase("encoder"):
        text = modules["encoder"](words)
    times = torch.linspace(1, 0, options.steps + 1, device="cuda")
    for at in range(options.steps):
        with phase("denoiser", f"step {at + 1}"):
            velocity = modules["denoiser"](latents, text, times[at : at + 1])
            latents = latents + (times[at + 1] - times[at]).to(latents.dtype) * velocity
    with phase("decoder"):
        return modules["decoder"](latents)


class Phases:
    """Prints a line for each phase: what it took and streamed, what is resident then."""

    def __init__(self, streams, link):
        self.streams, self.link = streams, link
        self.device = streams["encoder"].device

    def __call__(self, name, what=""):
        self.name, self.what = name, what
        return self

    def __enter__(self):
        torch.cuda.synchronize()
        self.filled, self.began = self.device.statistics().filled_bytes, time.perf_counter()

    def __exit__(self, *_):
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        streamed = self.device.statistics().filled_bytes - self.filled
        rate = streamed / seconds
        print(
            f"  {self.name:8} {self.what:8} {seconds * 1e3:7.1f} ms, {streamed / GB:5.2f} GB "
            f"streamed, {rate / GB:4.1f} GB/s, {rate / self.link:4.0%} of the link; "
            f"{self.resident()}"
        )

    def resident(self):
        """How much of each is on the device."""
        said = []
        for name, streaming in self.streams.items():
            pages = streaming.model.bar.residency()
            count = sum(page.state == vbar.PageState.RESIDENT for page in pages)
            said.append(f"{name} {count / len(pages):.0%}")
        return ", ".join(said) + " resident"


class Silent:
    def __call__(self, name, what=""):
        return self

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24, help="of the encoder, 2048 wide")
    parser.add_argument("--width", type=int, default=2560, help="of the denoiser")
    parser.add_argument("--doubles", type=int, default=6, help="blocks of two streams")
    parser.add_argument("--singles", type=int, default=14, help="blocks of one")
    parser.add_argument("--budget", help="such as 4G; half of the weights if not given")
    parser.add_argument("--size", type=int, default=1024, help="of the picture, a multiple of 16")
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", help="where the files are for a while")
    options = parser.parse_args()
    vbar.torch.install()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return run(options, folder)


def run(options, folder):
    modules = built(options)
    paths = {name: os.path.join(folder, f"{name}.safetensors") for name in modules}
    total = 0
    for name, module in modules.items():
        nbytes, seconds = torch_weights.write(paths[name], module)
        total += nbytes
        print(f"{name}: {nbytes / GB:.2f} GB in bfloat16, written in {seconds:.1f} s")
    link = torch_weights.link_rate()
    vbar.torch.release_phase()

    budget = options.budget or total // 2
    streams = {
        name: vbar.torch.stream(module, paths[name], budget) for name, module in modules.items()
    }
    device = streams["encoder"].device
    torch.cuda.reset_peak_memory_stats()
    pictures = []
    for seed in range(2):
        print(f"picture {seed + 1}, in a budget of {device.statistics().budget_bytes / GB:.2f} GB:")
        pictures.append(draw(modules, options, seed, Phases(streams, link)).cpu())
        # What the phases cached; weights stay.
        vbar.torch.release_phase()
    print(
        f"peak {device.statistics().peak_bytes / GB:.2f} GB of frames, of which tensors at most "
        f"{torch.cuda.max_memory_allocated() / GB:.2f} GB"
    )
    finite = all(bool(picture.isfinite().all()) for picture in pictures)

    free, _ = torch.cuda.mem_get_info()
    if free < 1.5 * total:
        print("the card has no room for all of it: not compared")
        return 0 if finite else 1
    device.budget = None
    ordinary = {name: torch_weights.fill(module) for name, module in built(options).items()}
    same = True
    for seed, picture in enumerate(pictures):
        began = time.perf_counter()
        same = torch.equal(draw(ordinary, options, seed, Silent()).cpu(), picture) and same
        seconds = time.perf_counter() - began
        print(f"ordinary modules, all resident: picture {seed + 1} in {seconds:.2f} s")
    print(f"the pictures are {'the same' if same else 'NOT the same'}")
    print(f"their numbers are {'finite' if finite else 'NOT finite'}")
    return 0 if same and finite else 1


if __name__ == "__main__":
    sys.exit(main())
