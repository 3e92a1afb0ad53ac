"""A decoder of transformers that is larger than its budget generates tokens, greedily.

    python3 torch_generate.py                         # 4 GB of weights in 2 GB, 48 tokens
    python3 torch_generate.py --layers 80 --budget 4G --install

The model is made of its configuration, with random weights in a temporary file; nothing is
downloaded. Each way generates a few tokens, then all of them, which is measured. Printed are: the
time to the first token and that of each later one, the bytes that were streamed for a token and the
time that the link needs for them, which is the floor; the most memory that was held; and, where the
card has room for all of it, the same model with every page resident and as an ordinary module that
never saw vbar, whose tokens have to be the same.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
import torch_weights
import transformers
from transformers.generation.streamers import BaseStreamer

import vbar.torch

GB = 1e9
#: Tokens before it is measured: what is streamed moves into page-locked memory in about ten passes.
WARM = 16


class Clock(BaseStreamer):
    """Is told of each token: when it came, and how many bytes had been streamed by then."""

    def __init__(self, device=None):
        self.device = device
        self.times, self.filled = [], []

    def put(self, value):
        # First of the prompt. A token is on the host already, so its pass has ended.
        self.times.append(time.perf_counter())
        self.filled.append(self.device.statistics().filled_bytes if self.device else 0)

    def end(self):
        pass

    def first(self):
        """Seconds until the first token."""
        return self.times[1] - self.times[0]

    def later(self):
        """Median seconds of a token, and bytes streamed for one, in the second half."""
        at = len(self.times) // 2
        seconds = statistics.median(b - a for a, b in zip(self.times[at:], self.times[at + 1 :]))
        return seconds, (self.filled[-1] - self.filled[at]) / (len(self.filled) - 1 - at)


def built(options):
    """The model with no memory for its weights."""
    config = transformers.Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 2 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 128,
        num_key_value_heads=max(1, options.width // 1024),
        tie_word_embeddings=True,
    )
    with vbar.torch.empty_model():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def generate(model, prompt, count, device=None):
    """The tokens, and the clocks of a short time, which warms up and learns, and of all of it."""
    clocks, found = [Clock(device), Clock(device)], []
    for clock, tokens in zip(clocks, (min(count, WARM), count)):
        found.append(
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                do_sample=False,
                streamer=clock,
            )
        )
    short, whole = found
    if not torch.equal(whole[:, : short.shape[1]], short):
        sys.exit("the tokens are NOT the same twice")
    return whole, *clocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048, help="a multiple of 1024")
    parser.add_argument("--vocabulary", type=int, default=150_016)
    parser.add_argument("--budget", help="such as 2G; half of the weights if not given")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--folder", help="where the file is for a while; the system's if not given")
    parser.add_argument(
        "--install", action="store_true", help="let tensors have vbar's memory and budget, too"
    )
    options = parser.parse_args()
    if options.tokens < 8:
        parser.error("--tokens: at least 8, since the second half of them is timed")
    if options.install:
        vbar.torch.install()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return run(options, os.path.join(folder, "model.safetensors"))


def run(options, path):
    model = built(options)
    nbytes, seconds = torch_weights.write(path, model)
    print(
        f"{type(model).__name__} of {options.layers} layers, {nbytes / GB:.2f} GB in bfloat16, "
        f"written in {seconds:.1f} s"
    )
    link = torch_weights.link_rate()
    torch.manual_seed(1)
    shape = (options.batch, options.prompt)
    prompt = torch.randint(0, options.vocabulary, shape, device="cuda")
    if options.install:
        vbar.torch.release_phase()
    torch.cuda.reset_peak_memory_stats()

    budget = options.budget or nbytes // 2
    streaming = vbar.torch.stream(model, path, budget)
    device = streaming.device
    tokens, first, clock = generate(model, prompt, options.tokens, device)
    seconds, streamed = clock.later()
    told = device.statistics()
    print(
        f"budget {told.budget_bytes / GB:.2f} GB: first token after {first.first() * 1e3:.0f} ms, "
        f"the second time {clock.first() * 1e3:.0f} ms, then {options.batch / seconds:.1f} "
        f"tokens/s, {seconds * 1e3:.1f} ms each"
    )
    print(
        f"streamed {streamed / GB:.2f} GB a token, for which a link of {link / GB:.1f} GB/s needs "
        f"{streamed / link * 1e3:.1f} ms: {seconds / (streamed / link or seconds):.3f} of that"
    )
    of_them = " of them" if options.install else " beside them"
    print(
        f"peak {told.peak_bytes / GB:.2f} GB of frames, tensors "
        f"{torch.cuda.max_memory_allocated() / GB:.2f} GB{of_them}"
    )

    free, _ = torch.cuda.mem_get_info()
    if free < 2.5 * nbytes:
        print("the card has no room for all of it: not compared")
        return 0
    device.budget = None
    again, _, clock = generate(model, prompt, options.tokens, device)
    resident, _ = clock.later()
    ordinary = torch_weights.fill(built(options))
    wanted, _, clock = generate(ordinary, prompt, options.tokens)
    plain, _ = clock.later()
    print(
        f"all resident {resident * 1e3:.2f} ms a token, an ordinary module {plain * 1e3:.2f} ms: "
        f"{resident / plain:.3f} of that"
    )
    same = torch.equal(tokens, wanted) and torch.equal(again, wanted)
    print(f"the tokens are {'the same' if same else 'NOT the same'} in all three")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
