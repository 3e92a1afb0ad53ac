"""Writes the traces of this folder: what a ComfyUI of 0.33 calls, in its order, one call a line.

    python3 write.py

A line is a JSON list: what is called, and on what. `test_comfy_traces.py` says what each does. A
client's decisions are in the trace as they are in its code: "ring" copies nothing for a weight that
turned out to be resident. The first line is about the card and the files.
"""

import json
import pathlib

MIB = 1 << 20


class Trace:
    def __init__(self, name, cap_mib, **files):
        self.path = pathlib.Path(__file__).with_name(f"{name}.jsonl")
        self.lines = [{"cap_mib": cap_mib, "files": files}]
        self.stream = 0
        self.models = {}
        for file in files:
            self.call("mmap", file)

    def call(self, *words):
        self.lines.append(list(words))

    def write(self):
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        self.path.write_text(text)

    def create(self, model, file):
        """A patcher: its host buffers have no room yet."""
        self.models[model] = file
        for subset in ("weights", "patches", "weights-loaded", "patches-loaded"):
            self.call("hostbuf", f"{model}.{subset}", 0, 0, 0)

    def load(self, model, first=True, dirty=False):
        sizes = self.lines[0]["files"][self.models[model]]
        total = sum(sizes)
        if first:
            self.call("vbar", model, 10 * total)
            for subset, prewarm in (
                ("weights", 64), ("patches", 8), ("weights-loaded", 64), ("patches-loaded", 8)
            ):
                self.call("hostbuf", f"{model}.{subset}", 0, prewarm * MIB, 2 * total)
        self.call("prioritize", model)
        at = 0
        for index, size in enumerate(sizes):
            if first:
                self.call("alloc", model, f"{model}.{index}", size, self.models[model], at)
            if dirty:
                self.call("dirty", f"{model}.{index}")
            at += size

    def rotate(self):
        """The next of two offload streams; the one before is ordered behind the compute stream."""
        self.call("turn", self.stream)
        self.stream = 1 - self.stream
        return self.stream

    def layer(self, name, source="pin", patch=None, cast=None, cancel=False):
        """One layer without prefetch."""
        self.call("fault", name)
        stream = self.rotate()
        self.call("stage_raw" if cast else "stage", name, stream)
        if source == "pin":
            self.call("pin", name)
            self.call("slice", name, stream)
        else:
            self.call("ring", name, stream)
        self.call("join", stream)
        if cancel:
            return
        if cast:
            self.call("cast", name, cast)
        if patch:
            self.call("patch", name, patch)
        self.call("use", name)
        self.call("unpin", name)
        self.call("turn", stream)

    def step(self, model, **options):
        for index in range(len(self.lines[0]["files"][self.models[model]])):
            self.layer(f"{model}.{index}", **options)

    def block_steps(self, model, size, steps):
        """Blocks ahead of their use: a pop begins the next one and ends the one before."""
        names = [f"{model}.{at}" for at in range(len(self.lines[0]["files"][self.models[model]]))]
        blocks = [names[at : at + size] for at in range(0, len(names), size)]
        for _ in range(steps):
            before = None
            for block in [*blocks, None]:
                if before is not None:
                    for name in before[1]:
                        self.call("use", name)
                    self.call("turn", before[0])
                    for name in before[1]:
                        self.call("unpin", name)
                    self.call("unblock", before[1])
                before = None
                if block is not None:
                    stream = self.rotate()
                    for name in block:
                        self.call("fault", name)
                        self.call("stage", name, stream)
                        self.call("pin", name)
                        self.call("slice", name, stream)
                    self.call("join", stream)
                    self.call("block", block)
                    before = stream, block


def sample():
    """A model that is larger than the card: twice four steps."""
    trace = Trace("sample", 72, model=[3 * MIB] * 24)
    trace.create("m", "model")
    trace.load("m")
    for node in range(2):
        if node:
            trace.load("m", first=False)
        for step in range(4):
            trace.step("m")
            # What is resident after the first step stays.
            trace.call("hits", 0 if not (node or step) else 10)
        trace.call("node")
    trace.write()


def switch():
    """A text encoder, a diffusion model and a decoder in turn, twice; the encoder is fast."""
    trace = Trace(
        "switch", 72, encoder=[2 * MIB] * 10, model=[3 * MIB] * 16, decoder=[MIB + 4096] * 12
    )
    for model, file in (("e", "encoder"), ("m", "model"), ("d", "decoder")):
        trace.create(model, file)
    for prompt in range(2):
        for model, steps, source in (("e", 1, "ring"), ("m", 3, "pin"), ("d", 1, "ring")):
            trace.load(model, first=not prompt)
            for _ in range(steps):
                trace.step(model, source=source)
            trace.call("node")
    # Another program takes most of the card, and gives it back.
    trace.call("outside", 460)
    trace.load("m", first=False)
    trace.step("m")
    trace.call("node")
    trace.call("outside", 0)
    trace.load("m", first=False)
    trace.step("m")
    trace.step("m")
    trace.call("hits", 8)
    trace.call("node")
    trace.write()


def patch():
    """A patched model, other patches, none; a file of another type than the model's."""
    trace = Trace("patch", 72, model=[2 * MIB] * 16)
    trace.create("m", "model")
    trace.load("m")
    for patch in (101, 202, None):
        if patch != 101:
            trace.load("m", first=False, dirty=True)
        for step in range(3):
            trace.step("m", patch=patch)
            if step:
                trace.call("hits", 8)
        trace.call("node")
    trace.load("m", first=False, dirty=True)
    for _ in range(2):
        trace.step("m", source="ring", cast=303)
    trace.call("node")
    trace.write()


def free():
    """Everything is unloaded in between: weights, then pins; then it goes on."""
    trace = Trace("free", 96, model=[3 * MIB] * 12, other=[2 * MIB] * 8)
    for model, file in (("m", "model"), ("o", "other")):
        trace.create(model, file)
    for round_ in range(3):
        trace.load("m", first=not round_)
        trace.step("m")
        trace.call("free", "m", 5 * MIB)
        trace.step("m")
        trace.call("node")
        trace.call("free", "m", 1e32)
        trace.call("resident", "m", 0)
        trace.load("o", first=not round_)
        trace.step("o", source="ring")
        trace.call("node")
        trace.call("unpin_all", "m")
        trace.call("free", "o", 1e32)
        trace.call("resident", "o", 0)
    trace.call("drop", "m")
    trace.load("o", first=False)
    trace.step("o")
    trace.call("node")
    trace.call("drop", "o")
    trace.call("empty")
    trace.write()


def cancel():
    """Cancelled in the middle of a layer, and of a block, and run again."""
    trace = Trace("cancel", 72, model=[3 * MIB] * 16)
    trace.create("m", "model")
    trace.load("m")
    for at in (5, 11, 5, 0):
        for index in range(at):
            trace.layer(f"m.{index}")
        trace.layer(f"m.{at}", cancel=True)
        trace.call("node")
        trace.load("m", first=False)
    trace.step("m")
    trace.step("m")
    trace.call("hits", 8)
    trace.call("node")
    trace.call("pinned", "m", 0)
    trace.call("free", "m", 1e32)
    trace.call("resident", "m", 0)
    trace.write()


def blocks():
    """Blocks that are fetched ahead, each with a signature of its own."""
    trace = Trace("blocks", 120, model=[MIB, 2 * MIB, 3 * MIB] * 6)
    trace.create("m", "model")
    trace.load("m")
    trace.block_steps("m", 3, 3)
    trace.call("hits", 20)
    trace.call("node")
    trace.call("headroom", 30)
    trace.load("m", first=False)
    trace.block_steps("m", 3, 2)
    trace.call("node")
    trace.call("pinned", "m", 0)
    trace.write()


def graph():
    """Scopes around the steps of a sample and their blocks, as clients of 0.34 and later have them.

    A "way" is a step whose tensors are as large as in every other step of that way.
    """
    trace = Trace("graph", 0)

    def step(way, scale, broken):
        trace.call("way", way)
        trace.call("take", "x", 512 * 1024 * scale)
        for block in range(4):
            trace.call("push", f"block {block % 2}")
            trace.call("take", "q", 300_000 * scale)
            trace.call("take", "k", 70_000)
            trace.call("give", "q")
            trace.call("take", "v", 900 * scale)
            trace.call("pause", True)
            trace.call("outside", 40_000)
            trace.call("resume", True)
            trace.call("give", "k")
            trace.call("give", "v")
            trace.call("pop", False if block or not broken else None)
        trace.call("give", "x")
        trace.call("same")
        trace.call("iterate", "step", broken)

    for round_ in range(2):
        trace.call("push", "step")
        for at in range(3):
            step("small", 1, False)
        # Another resolution departs once.
        step("large", 3, not round_)
        step("large", 3, False)
        trace.call("rogues", 0)
        trace.call("pop", False)
    # Cancelled in the middle of a block.
    trace.call("push", "step")
    trace.call("take", "x", 512 * 1024)
    trace.call("push", "block 0")
    trace.call("take", "q", 300_000)
    trace.call("abort")
    trace.call("rogues", 2)
    trace.call("give", "q")
    trace.call("give", "x")
    trace.call("rogues", 0)
    trace.call("push", "step")
    step("small", 1, False)
    # What a step leaves is still in use in the next one.
    trace.call("take", "kept", 512 * 1024)
    trace.call("iterate", "step", True)
    trace.call("rogues", 1)
    trace.call("take", "x", 512 * 1024)
    trace.call("give", "x")
    trace.call("give", "kept")
    trace.call("iterate", "step", True)
    trace.call("pop", False)
    trace.write()


if __name__ == "__main__":
    for write in (sample, switch, patch, free, cancel, blocks, graph):
        write()
