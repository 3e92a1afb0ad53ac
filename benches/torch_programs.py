"""Two programs whose requests for memory are worth a trace: training, and sampling images.

Random weights and inputs, the same of a seed; what they compute is of no use to anybody, what they
ask the allocator for is that of such programs. `torch_replay.py --record` runs them.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A block of a transformer; with `condition`, scaled and shifted by it as in a DiT."""

    def __init__(self, width, heads, causal, condition=0):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(condition, 6 * width) if condition else None

    def forward(self, x, condition=None):
        parts = [None] * 6
        if self.modulation is not None:
            parts = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        x = x + self.scaled(self.attend(self.shifted(self.first(x), parts[0], parts[1])), parts[2])
        wide = F.gelu(self.up(self.shifted(self.second(x), parts[3], parts[4])))
        return x + self.scaled(self.down(wide), parts[5])

    def attend(self, x):
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    @staticmethod
    def shifted(x, scale, shift):
        return x if scale is None else x * (1 + scale) + shift

    @staticmethod
    def scaled(x, scale):
        return x if scale is None else x * scale


class Decoder(nn.Module):
    """A language model of 180 M parameters."""

    def __init__(self, width=1024, layers=12, heads=16, vocabulary=32_000, length=1024):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def training(steps=5, batch=6):
    """Steps of AdamW in mixed precision, over sequences of another length each."""
    torch.manual_seed(1)
    lengths = torch.randint(200, 1025, (steps,)).tolist()
    model = Decoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for length in lengths:
        words = torch.randint(32_000, (batch, length + 1)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del logits
        last = loss.item()
    return last


class TextEncoder(nn.Module):
    """As CLIP's, 12 layers."""

    def __init__(self, width=768, layers=12):
        super().__init__()
        self.words = nn.Embedding(49_408, width)
        self.blocks = nn.ModuleList(Block(width, 12, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Denoiser(nn.Module):
    """A DiT of 16 blocks, which reads the words beside the patches."""

    def __init__(self, width=1152, layers=16, heads=16):
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.text, self.time = nn.Linear(768, width), nn.Linear(256, width)
        blocks = (Block(width, heads, causal=False, condition=width) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, latent, time, text):
        batch, _, height, width = latent.shape
        steps = torch.arange(128, device=latent.device, dtype=torch.float32) * -0.07
        angles = time.float()[:, None] * steps.exp()
        condition = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(latent.dtype))
        x = torch.cat([self.text(text), self.patches(latent).flatten(2).transpose(1, 2)], 1)
        for block in self.blocks:
            x = block(x, condition)
        x = self.out(self.norm(x[:, text.shape[1] :]))
        x = x.view(batch, height // 2, width // 2, 2, 2, 4)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(batch, 4, height, width)


class Residual(nn.Module):
    """Two convolutions, and what comes in beside them."""

    def __init__(self, channels, out):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, channels), nn.GroupNorm(32, out)])
        self.first, self.second = (nn.Conv2d(n, out, 3, padding=1) for n in (channels, out))
        self.beside = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x):
        inner = self.first(F.silu(self.norms[0](x)))
        return self.beside(x) + self.second(F.silu(self.norms[1](inner)))


class ImageDecoder(nn.Module):
    """As a VAE's, eight times larger in each direction."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Conv2d(4, 512, 3, padding=1), Block(512, 1, causal=False)
        stages = []
        for channels, out in [(512, 512), (512, 512), (512, 256), (256, 128)]:
            stages += [Residual(channels, out), Residual(out, out)]
            if out != 128:
                up = nn.Upsample(scale_factor=2, mode="nearest")
                stages += [nn.Sequential(up, nn.Conv2d(out, out, 3, padding=1))]
        self.stages = nn.ModuleList(stages)
        self.norm, self.last = nn.GroupNorm(32, 128), nn.Conv2d(128, 3, 3, padding=1)

    def forward(self, latent):
        x = self.first(latent)
        batch, channels, height, width = x.shape
        x = self.attention(x.flatten(2).transpose(1, 2))
        x = x.transpose(1, 2).reshape(batch, channels, height, width)
        for stage in self.stages:
            x = stage(x)
        return self.last(F.silu(self.norm(x)))


@torch.no_grad()
def sampling(images=6, steps=8):
    """Images of another size each. A model is on the device while its phase lasts, the denoiser
    stays; every third step a preview is made and copied away on a stream of its own."""
    torch.manual_seed(2)
    sizes = [tuple(side * 64 for side in torch.randint(8, 17, (2,)).tolist()) for _ in range(images)]
    encoder, decoder = TextEncoder().bfloat16(), ImageDecoder().bfloat16()
    denoiser = Denoiser().bfloat16().cuda()
    beside, total = torch.cuda.Stream(), 0
    for height, width in sizes:
        encoder.cuda()
        length = int(torch.randint(32, 257, ()))
        words = torch.randint(49_408, (2, length)).cuda()
        text = encoder(words)
        encoder.cpu()
        latent = torch.randn(1, 4, height // 8, width // 8, device="cuda", dtype=torch.bfloat16)
        for step in range(steps):
            time = torch.full((2,), 1000 - step * 100, device="cuda")
            with_text, without = denoiser(torch.cat([latent] * 2), time, text).chunk(2)
            latent = latent - 0.1 * (without + 4.0 * (with_text - without))
            if step % 3 == 2:
                preview = F.interpolate(latent[:, :3].float(), scale_factor=4)
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    (preview * 127 + 128).clamp(0, 255).byte().to("cpu", non_blocking=True)
                preview.record_stream(beside)
                del preview
        decoder.cuda()
        image = decoder(latent)
        decoder.cpu()
        total += int((image.float() * 127 + 128).clamp(0, 255).byte().cpu().sum())
        del image, latent, text, words
    return total


PROGRAMS = {"training": training, "sampling": sampling}
