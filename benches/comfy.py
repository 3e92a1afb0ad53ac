"""ComfyUI on vbar, beside the allocator that it comes with and beside none, on a GPU.

    comfy.py TREE [--original FOLDER] [--caps 6,4,3] [--steps 8] [--rounds 3] [--cases flux,...]
        [--off]

TREE is an unmodified ComfyUI 0.33, of which `comfy/`, `comfyui_version.py`, `cuda_malloc.py` and
`node_helpers.py` are used; what these import must be installed. FOLDER has the original
`comfy_aimdo`; without, that column is left out. `--off` adds one of ours without saved weights
(`VBAR_COMFY_AHEAD=off`). Nothing is downloaded: the checkpoints have random
weights and are written to a temporary folder.

Each measurement is a process that does what ComfyUI's main program and its executor do, without
the server. Ours and the original's alternate, round by round, so that both see the same machine.
What is printed, and fails the run: outputs that are not those of the plain run, bit by bit; device
memory above the cap; growth over 20 runs. The floor of a case is computed here: the larger of the
compute time (all in memory, no such allocator) and of the bytes that cannot be resident over the
link's rate, both measured in this run. All cases take longer than ten minutes: `--cases` and
`--caps` cut them into parts.

This has not been run on a GPU yet.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

GIB = 1 << 30
#: A Flux of 7.06 GiB in bfloat16.
FLUX = dict(
    in_channels=16,
    out_channels=16,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    mlp_ratio=4.0,
    num_heads=24,
    depth=6,
    depth_single_blocks=12,
    axes_dim=[16, 56, 56],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    guidance_embed=True,
    txt_ids_dims=[],
)
#: Of every case: which checkpoints it takes, whether they are patched, how often it samples.
CASES = {
    "flux": dict(models=["bf16"]),
    "pair": dict(models=["bf16", "second"]),
    "lora": dict(models=["bf16"], lora=True),
    "fp8": dict(models=["fp8"]),
    "cancel": dict(models=["bf16"], cancel=True),
    "long": dict(models=["bf16"], runs=20),
}
#: Of which the time counts; the others are for what comes out and what is held.
TIMED = ("flux", "pair", "lora", "fp8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=pathlib.Path)
    parser.add_argument("--original", type=pathlib.Path)
    parser.add_argument("--caps", default="6,4,3")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        return child(told, json.loads(told.child))
    with tempfile.TemporaryDirectory() as folder:
        return parent(told, folder)


def parent(told, folder):
    def run(kind, cap, case, **more):
        asked = dict(kind=kind, cap=cap, case=case, folder=folder, **more)
        command = [sys.executable, __file__, str(told.tree), "--steps", str(told.steps)]
        command += ["--size", str(told.size), "--child", json.dumps(asked)]
        path = [str(told.original)] if kind == "original" else []
        path = [*path, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        if kind == "off":
            environment["VBAR_COMFY_AHEAD"] = "off"
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{kind} at {cap} GiB, {case}: ended with {done.returncode}\n{done.stdout}")
        return json.loads(done.stdout.splitlines()[-1])

    made = run("make", None, "flux")
    print(f"{made['device']}, {made['link'] / 1e9:.1f} GB/s from page-locked memory")
    kinds = ["ours", *["off"] * told.off, *["original"] * bool(told.original)]
    failed = []
    header = f"{'case':8}{'cap':>6}{'floor':>8}"
    print(header + "".join(f"{kind:>10}{'x floor':>9}{'cold':>8}" for kind in kinds))
    for case in told.cases.split(","):
        plain = run("none", None, case)
        for cap in [None, *map(float, told.caps.split(","))]:
            times = {kind: [] for kind in kinds}
            for _ in range(told.rounds if case in TIMED else 1):
                for kind in kinds:
                    found = run(kind, cap, case)
                    times[kind].append((found["seconds"], found["cold"]))
                    failed += check(case, kind, cap, plain, found)
            floor = floor_of(plain, cap, made, told.steps)
            line = f"{case:8}{cap or 'all':>6}{floor:8.3f}"
            for kind in kinds:
                warm, cold = (statistics.median(each) for each in zip(*times[kind]))
                line += f"{warm:10.3f}{warm / floor:9.2f}{cold:8.2f}"
            print(line, flush=True)
    for said in failed:
        print("FAILED:", said)
    return 1 if failed else 0


def floor_of(plain, cap, made, steps):
    """Seconds that no allocator gets below."""
    if cap is None:
        return plain["seconds"]
    # What the tensors of a step need is not there for weights.
    room = max(cap * GIB - plain["tensor_bytes"], 0)
    streamed = max(plain["weight_bytes"] - room, 0) * steps * plain["samples"]
    return max(plain["seconds"], streamed / made["link"])


def check(case, kind, cap, plain, found):
    said = f"{case}, {kind}, {cap or 'all'}: "
    if found["outputs"] != plain["outputs"]:
        yield said + "the outputs are not those of the plain run"
    if cap is not None and found["held_bytes"] > cap * GIB:
        yield said + f"{found['held_bytes'] / GIB:.2f} GiB were held"
    if found["growth_bytes"] > 64 << 20:
        yield said + f"grew by {found['growth_bytes'] >> 20} MiB"


def child(told, asked):
    case, kind = CASES[asked["case"]], asked["kind"]
    # Before this file's own folder, which has a module of the same name as the tree's package.
    sys.path[0] = str(told.tree)
    sys.argv = ["main.py", "--disable-xformers", "--use-pytorch-cross-attention"]
    if kind in ("none", "make"):
        sys.argv += ["--disable-dynamic-vram"]
        # Imported by ComfyUI in any case; not used.
        import vbar.comfy

        vbar.comfy.install(allocator=False)
    elif asked["cap"] is not None:
        # Of the card's size; asked in a process of its own, since CUDA is not to be used yet.
        program = "import torch; print(torch.cuda.mem_get_info()[1])"
        total = int(subprocess.check_output([sys.executable, "-c", program]))
        sys.argv += ["--vram-headroom", str(total / GIB - asked["cap"])]
    if kind in ("ours", "off"):
        import vbar.comfy

        vbar.comfy.install()
    client = Client(kind)
    if kind == "make":
        found = make(client, pathlib.Path(asked["folder"]))
    else:
        found = measure(client, told, asked, case)
    print(json.dumps(found))
    return 0


class Client:
    """ComfyUI without its server: what its main program does before the first prompt."""

    def __init__(self, kind):
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy_aimdo.control as control

        self.is_dynamic = kind in ("ours", "off", "original")
        if self.is_dynamic:
            assert control.init(simple_vram_headroom=None), "the allocator was not loaded"
        import torch

        import comfy.memory_management as memory_management
        import comfy.model_management as management
        import comfy.model_patcher as model_patcher
        from comfy.cli_args import args

        self.torch, self.management, self.control = torch, management, control
        if self.is_dynamic:
            extra = int(args.vram_headroom * GIB)
            devices = ((device.index, extra) for device in management.get_all_torch_devices())
            assert control.init_devices(devices), "the devices were not opened"
            model_patcher.CoreModelPatcher = model_patcher.ModelPatcherDynamic
            memory_management.aimdo_enabled = True
        self.before = self.held()

    def held(self):
        """Bytes of the device that are not free."""
        free, total = self.torch.cuda.mem_get_info()
        return total - free

    def end_of_node(self):
        if not self.is_dynamic:
            return
        import comfy.model_prefetch
        import comfy_aimdo.model_vbar

        self.management.reset_cast_buffers()
        comfy.model_prefetch.cleanup_prefetch_queues()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def make(client, folder):
    """The checkpoints, and how fast the link is."""
    torch = client.torch
    import safetensors.torch

    import comfy.ops
    from comfy.ldm.flux.model import Flux

    plain = comfy.ops.disable_weight_init
    built = Flux(dtype=torch.bfloat16, device="meta", operations=plain, **FLUX)
    for name, seed in (("bf16", 1), ("second", 2)):
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for key, value in built.state_dict().items():
            drawn = torch.empty(value.shape).normal_(0, 0.02, generator=generator)
            weights[key] = (drawn + (1 if key.endswith("scale") else 0)).to(torch.bfloat16)
        safetensors.torch.save_file(weights, str(folder / f"{name}.safetensors"))
        if seed == 1:
            # Matrices only: norms and biases stay, so that types are mixed.
            kind = torch.float8_e4m3fn
            weights = {
                key: value.to(kind) if value.ndim == 2 else value for key, value in weights.items()
            }
            safetensors.torch.save_file(weights, str(folder / "fp8.safetensors"))
        del weights
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, GIB / (time.perf_counter() - start))
    return dict(device=torch.cuda.get_device_name(), link=best)


def measure(client, told, asked, case):
    torch, folder = client.torch, pathlib.Path(asked["folder"])
    import comfy.sample
    import comfy.sd

    start = time.perf_counter()
    paths = [folder / f"{name}.safetensors" for name in case["models"]]
    models = [comfy.sd.load_diffusion_model(str(path)) for path in paths]
    if case.get("lora"):
        models = [patched(client, model) for model in models]
    weight_bytes = sum(model.model_size() for model in models)
    held = 0

    def draw(model, seed, cancel_at=None):
        nonlocal held
        generator = torch.Generator().manual_seed(seed)
        latent = torch.zeros(1, 16, told.size // 8, told.size // 8)
        noise = torch.randn(latent.shape, generator=generator)
        text = torch.randn(1, 256, 4096, generator=generator)
        pooled = torch.randn(1, 768, generator=generator)
        told_of = [[text, {"pooled_output": pooled, "guidance": 3.5}]]

        def at_step(step, *_):
            nonlocal held
            held = max(held, client.held() - client.before)
            if step == cancel_at:
                raise client.management.InterruptProcessingException()

        try:
            samples = comfy.sample.sample(
                model, noise, told.steps, 1.0, "euler", "simple", told_of, told_of, latent,
                callback=at_step, disable_pbar=True, seed=seed,
            )
            torch.cuda.synchronize()
        finally:
            client.end_of_node()
        return hashlib.sha256(samples.float().cpu().numpy().tobytes()).hexdigest()

    outputs = [draw(model, 7) for model in models]
    cold = time.perf_counter() - start
    if case.get("cancel"):
        for at in (2, 5):
            try:
                draw(models[0], 7, cancel_at=at)
                raise AssertionError("it was not cancelled")
            except client.management.InterruptProcessingException:
                pass
    torch.cuda.reset_peak_memory_stats()
    seconds, first, last = [], None, None
    for run in range(case.get("runs", 3)):
        start = time.perf_counter()
        again = [draw(model, 7) for model in models]
        seconds.append(time.perf_counter() - start)
        assert again == outputs, f"run {run} has another output than the first"
        last = client.held()
        first = first or last
    # Without a cap: all that PyTorch held at a time, less the weights.
    peak = torch.cuda.max_memory_allocated()
    return dict(
        seconds=statistics.median(seconds),
        cold=cold,
        outputs=outputs,
        held_bytes=held,
        growth_bytes=last - first,
        weight_bytes=weight_bytes,
        tensor_bytes=max(peak - weight_bytes, 0),
        samples=len(models),
    )


def patched(client, model):
    """A model with a LoRA of rank 16 on every matrix of its blocks."""
    torch = client.torch
    import comfy.lora

    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    generator, weights = torch.Generator().manual_seed(3), {}
    shapes = {key: value.shape for key, value in model.model.state_dict().items()}
    for name, key in keys.items():
        if not name.startswith("lora_unet_") or "blocks" not in name or len(shapes[key]) != 2:
            continue
        rows, columns = shapes[key]
        up, down = torch.empty(rows, 16), torch.empty(16, columns)
        weights[f"{name}.lora_up.weight"] = up.normal_(0, 0.01, generator=generator)
        weights[f"{name}.lora_down.weight"] = down.normal_(0, 0.01, generator=generator)
        weights[f"{name}.alpha"] = torch.tensor(16.0)
    clone = model.clone()
    assert clone.add_patches(comfy.lora.load_lora(weights, keys)), "nothing was patched"
    return clone


if __name__ == "__main__":
    sys.exit(main())
