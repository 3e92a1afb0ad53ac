"""The load of `soak.py` with PyTorch: tensors on several streams, modules larger than the budget.

PyTorch allocates with vbar. What modules compute is compared bit by bit with what the same ones did
as ordinary modules; tensors of one number each are added up on another stream than they were made
on, and dropped before that is done.
"""

import math
import os

import torch
from soak_loads import MIB, Load
from stream import write_model
from torch import nn

import vbar
import vbar.torch

#: Of the first model, the layers that are patched, and the rank of a patch.
PATCHED, RANK = 4, 16


class Layer(nn.Module):
    def __init__(self, width, **where):
        super().__init__()
        self.norm = nn.LayerNorm(width, **where)
        self.up = nn.Linear(width, 4 * width, bias=False, **where)
        self.down = nn.Linear(4 * width, width, bias=False, **where)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, count, width, **where):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, **where) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Streamed:
    """A module from its file, and what it must compute: of each version of its patches."""

    def __init__(self, load, name, count, width, patched):
        self.load, self.count, self.width = load, count, width
        self.path = os.path.join(load.options["folder"], f"{name}.safetensors")
        self.patched = [f"layers.{at}.up.weight" for at in range(patched)]
        self.version = 0
        tokens = load.options.get("tokens", 256)
        self.x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        self.factors = {
            version: (
                torch.randn(4 * width, RANK, device="cuda", dtype=torch.bfloat16) * 0.01,
                torch.randn(RANK, width, device="cuda", dtype=torch.bfloat16) * 0.01,
            )
            for version in ((1, 2) if patched else ())
        }
        self._write()
        self.start()

    def _write(self):
        """As an ordinary module it says what is wanted, and leaves its file."""
        module = Stack(self.count, self.width, device="cuda", dtype=torch.bfloat16).eval()
        state = module.state_dict()
        write_model(self.path, state)
        self.nbytes = sum(each.nbytes for each in state.values())
        self.wanted = {0: module(self.x).cpu()}
        for version in self.factors:
            saved = {name: state[name].clone() for name in self.patched}
            for name in self.patched:
                self.patch_of(version)(state[name])
            self.wanted[version] = module(self.x).cpu()
            for name, value in saved.items():
                state[name].copy_(value)

    def patch_of(self, version):
        if version == 0:
            return None
        down, up = self.factors[version]
        return lambda weight: weight.addmm_(down, up)

    def start(self):
        with vbar.torch.empty_model():
            self.module = Stack(self.count, self.width, dtype=torch.bfloat16).eval()
        self.streaming = vbar.torch.stream(
            self.module,
            self.path,
            device=self.load.device,
            patch=dict.fromkeys(self.patched, self.patch_of(self.version)) or None,
        )

    def repatch(self, version):
        self.version = version
        self.streaming.repatch(dict.fromkeys(self.patched, self.patch_of(version)))

    def bars(self):
        own = self.streaming._bar
        return [self.streaming.model.bar, *([own] if own else [])]


class Torch(Load):
    """Three modules in turn, one that is streamed and unstreamed, and tensors in between."""

    def __init__(self, options, source, target):
        super().__init__(options, source, target)
        vbar.torch.install(
            driver=options["driver"],
            budget=options["budget"],
            headroom=options["headroom"],
            page_size=options["page"],
        )
        torch.manual_seed(options["seed"])
        vbar.torch.check_in_use()
        self.device = vbar.torch.device(0)
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        #: Tensors: of each its number, and the stream that it was made on.
        self.kept, self.sums = [], []
        layers = options["layers"]
        # Of a layer's bytes there are sixteen for each pair of its width.
        width = math.isqrt(options["model_bytes"] // layers // 16) // 64 * 64
        with torch.no_grad():
            self.models = []
            for at in range(3):
                patched = min(PATCHED, layers) if at == 0 else 0
                self.models.append(Streamed(self, f"model{at}", layers, width, patched))
                torch.cuda.empty_cache()
            self.small = Streamed(self, "small", 2, max(64, width // 8), 0)
        torch.cuda.synchronize()
        # What libraries make for each stream, they make once.
        for stream in self.streams:
            for model in (*self.models, self.small):
                self._pass(model, stream)

    def a_round(self):
        self.turn_a_knob()
        stream = self.dice.choice(self.streams)
        at = self.counts["rounds"] % 6
        if at == 0:
            self._stream_and_unstream(stream)
        elif at == 1:
            self.models[0].repatch(self.dice.randrange(3))
        elif at == 2:
            seconds = self.dice.uniform(0.001, 0.2)
            self.interrupted(lambda: self._workflow(stream), seconds)
            torch.cuda.synchronize()
            self.check_pins(self._bars())
        elif at == 3:
            self._within_pressure(vbar.torch.release_phase)
        self._tensors()
        if at == 4:
            self._workflow(stream)
        else:
            self._pass(self.dice.choice(self.models), stream)

    def _bars(self):
        return [bar for model in (*self.models, self.small) for bar in model.bars()]

    def _workflow(self, stream):
        """As a program of three models has it: one, the second several times, the third."""
        for at in (0, 1, 1, 2):
            self._pass(self.models[at], stream)

    def _pass(self, model, stream):
        found = self._within_pressure(lambda: self._computed(model, stream))
        if found is not None:
            right = torch.equal(found, model.wanted[model.version])
            self.check(right, True, model.nbytes, f"{model.path}, patch {model.version}")
        self.counts["passes"] += 1

    @staticmethod
    def _computed(model, stream):
        with torch.no_grad(), torch.cuda.stream(stream):
            return model.module(model.x).cpu()

    def _within_pressure(self, work):
        """What some work gives; None where it was refused, which pressure explains."""
        try:
            return work()
        except vbar.torch.WeightOffloaded as error:
            self.refused(error.reason)
        except torch.OutOfMemoryError:
            self.counts["refused"] += 1
            self.reasons["out_of_memory"] += 1
        except vbar.Cancelled:
            self.counts["interrupted"] += 1
        except RuntimeError as error:
            # What PyTorch raises of a request whose wait another thread has ended.
            if "was cancelled" not in str(error):
                raise
            self.counts["interrupted"] += 1
        return None

    def _stream_and_unstream(self, stream):
        """An ordinary module again, its bytes those of the file; then streamed anew."""
        small = self.small
        self._within_pressure(lambda: vbar.torch.unstream(small.module, "cuda"))
        if small.streaming.is_open:
            # Refused: it is as it was.
            return self._pass(small, stream)
        torch.cuda.synchronize()
        self._pass(small, stream)
        small.start()
        self._pass(small, stream)

    def _tensors(self):
        most = self.options["budget"] // 32
        for _ in range(6):
            nbytes = int(2 ** self.dice.uniform(9, math.log2(most)))
            value, stream = self.dice.randrange(1, 250), self.dice.choice(self.streams)
            made = self._within_pressure(lambda: self._made(nbytes, value, stream))
            if made is not None:
                self.kept.append((made, value, stream))
            del made
        self.dice.shuffle(self.kept)
        while self.kept and sum(each.nbytes for each, *_ in self.kept) > 4 * most:
            self._add_up_and_drop()
        self._settle_sums()

    def _made(self, nbytes, value, stream):
        with torch.cuda.stream(stream):
            tensor = torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")
            if self.inject == "byte" and self.dice.randrange(20) == 0:
                tensor[nbytes // 2] = value ^ 0x5A
            return tensor

    def _add_up_and_drop(self):
        """Reads a tensor on another stream, and drops it before that is done."""
        tensor, value, stream = self.kept.pop()
        other = self.dice.choice(self.streams)
        other.wait_stream(stream)
        nbytes = tensor.nbytes

        def added_up():
            with torch.cuda.stream(other):
                return tensor.sum(dtype=torch.int64)

        total = self._within_pressure(added_up)
        tensor.record_stream(other)
        if total is not None:
            self.sums.append((total, value * nbytes, nbytes, other))

    def _settle_sums(self):
        for total, wanted, nbytes, stream in self.sums:
            stream.synchronize()
            self.check(int(total.cpu()), wanted, nbytes, f"a tensor of {nbytes} bytes")
        self.sums.clear()

    def stop(self):
        while self.kept:
            self._add_up_and_drop()
        self._settle_sums()
        torch.cuda.synchronize()
        for stream in (*self.streams, torch.cuda.current_stream()):
            for bar in self._bars():
                bar.end_of_run(stream)
        self.set_knobs_back()
        self.check_pins(self._bars())

    def bare(self):
        vbar.torch.release_phase()
        self.give_all_back()

    def a_timed_pass(self):
        self._pass(self.models[1], self.streams[0])

    def told(self):
        return {
            "tensor_bytes": torch.cuda.memory_allocated(),
            "tensor_reserved": torch.cuda.memory_reserved() / MIB,
        }

    def close(self):
        for model in (*self.models, self.small):
            model.streaming.model.close()
        self.device.close()
