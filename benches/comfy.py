"""ComfyUI on vbar, beside the allocator that it comes with and beside none, on a GPU.

    comfy.py TREE [--original FOLDER] [--caps 4,6,all] [--cases flux,...] [--rounds 1] [--seconds 480]

TREE is an unmodified ComfyUI 0.33, of which `comfy/`, `comfyui_version.py`, `cuda_malloc.py` and
`node_helpers.py` are used; what these import must be installed, and what they import and a Flux
does not use (the list is ABSENT) is made up where it is not. FOLDER has the original
`comfy_aimdo`; without, that column is left out. scripts/comfy-bundle.sh puts both together.
Nothing is downloaded: the checkpoints have random weights, made on the GPU and written to
`--folder`, where another run finds them again. `import vbar` must work: a wheel that is installed, or
PYTHONPATH=python_shim with VBAR_LIBRARY naming the built libvbar.so.

Each measurement is a process that does what ComfyUI's main program and its executor do, without
the server, and is a line of output as it ends. Ours and the original's alternate, round by round,
so that both see the same machine. A process loads its models, samples once (that is the cold run:
nothing is on the device) and then `--runs` times more, whose median is the time; files are in the
page cache. What is printed as FAILED and fails the run: outputs that are not those of the plain
run, bit by bit, cold and warm; device memory above the cap; growth from run to run.

The floor of a case is computed here: the larger of the compute time (all in memory, no such
allocator) and of the bytes that cannot be resident over the link's rate, both measured in this
run. What weights can have of the cap is what the context, PyTorch's tensors at their peak and the
256 MiB that either allocator leaves free do not take.

With `--seconds` no measurement begins later, and the run ends with 3 when one is left out; one that
takes longer than `--limit` is ended and told as a failure. One takes 15 to 25 s: `--cases flux
--rounds 1` makes 9 of them, those with what is least sure first, each of the others 2 or 3 for each
of its caps; a case's checkpoints are made when its turn comes.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

from comfy_absent import Absent

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
    "pair": dict(models=["bf16", "second"], caps=[4.0]),
    "lora": dict(models=["bf16"], lora=True, caps=[4.0]),
    "fp8": dict(models=["fp8"], caps=[3.0]),
    "cancel": dict(models=["bf16"], cancel=True, caps=[4.0]),
    "long": dict(models=["bf16"], runs=20, caps=[4.0]),
}
#: Of which the time counts; the others are for what comes out and what is held.
TIMED = ("flux", "pair", "lora", "fp8")
#: What either allocator leaves free of the card, in bytes.
HEADROOM = 256 << 20
#: Before what a process found, on a line of its standard output.
FOUND = "found: "
GROWTH = 64 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=pathlib.Path)
    parser.add_argument("--original", type=pathlib.Path)
    parser.add_argument("--caps", help="in GiB, or all; in place of each case's own")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--runs", type=int, default=4, help="of a process, after its cold one")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", type=pathlib.Path, help="of checkpoints, which stay there")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=150, help="seconds of a process")
    parser.add_argument("--json", type=pathlib.Path, help="each measurement is added, a line each")
    parser.add_argument("--off", action="store_true", help="ours too with VBAR_COMFY_AHEAD=off")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        return child(told, json.loads(told.child))
    unknown = set(told.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}: {', '.join(CASES)}")
    if told.folder is not None:
        told.folder.mkdir(parents=True, exist_ok=True)
        return parent(told, told.folder, run_child)
    with tempfile.TemporaryDirectory() as folder:
        return parent(told, pathlib.Path(folder), run_child)


def run_child(told, folder, **asked):
    """What a process of its own found."""
    asked = dict(asked, folder=str(folder))
    command = [sys.executable, "-u", os.path.abspath(__file__), str(told.tree.resolve())]
    command += ["--steps", str(told.steps), "--size", str(told.size), "--runs", str(told.runs)]
    command += ["--child", json.dumps(asked)]
    path = [str(told.original.resolve())] if asked["kind"] == "original" else []
    path = [*path, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    if asked["kind"] == "off":
        environment["VBAR_COMFY_AHEAD"] = "off"
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=told.limit
        )
    except subprocess.TimeoutExpired:
        return {"died": f"took longer than {told.limit:g} s"}
    if done.returncode:
        return {"died": f"ended with {done.returncode}: {done.stdout.strip()[-500:]}"}
    for line in reversed(done.stdout.splitlines()):
        # Whatever else is imported may print at its end.
        if line.startswith(FOUND):
            return json.loads(line[len(FOUND) :])
    return {"died": f"ended without a result: {done.stdout.strip()[-500:]}"}


class Late(Exception):
    """There is no time for another measurement."""


def parent(told, folder, run):
    started = time.monotonic()
    cases = told.cases.split(",")
    failed, left_out, plain, made = 0, [], {}, {}

    def keep(**line):
        if told.json is not None:
            with open(told.json, "a") as file:
                print(json.dumps(line), file=file)

    def measured(**asked):
        if time.monotonic() - started > told.seconds:
            raise Late
        # The same models without any such allocator are measured once.
        known = (*CASES[asked["case"]]["models"], CASES[asked["case"]].get("lora"))
        if asked["kind"] == "none" and known in plain:
            return plain[known]
        began = time.monotonic()
        found = run(told, folder, **asked)
        found["took"] = time.monotonic() - began
        keep(**asked, **found)
        if asked["kind"] == "none":
            plain[known] = found
        return found

    def prepare(case):
        began = time.monotonic()
        names = CASES[case]["models"]
        found = run(told, folder, kind="make", cap=None, case=case, checkpoints=names)
        if "died" in found:
            sys.exit(f"no checkpoints: {found['died']}")
        # One rate for all floors: the best that the link was seen to do.
        found["link"] = max(found["link"], made.get("link", 0.0))
        made.update(found)
        keep(kind="make", case=case, **found)
        print(
            f"{made['device']}, {made['link'] / 1e9:.1f} GB/s from page-locked memory; "
            f"{', '.join(names)} in {time.monotonic() - began:.0f} s",
            flush=True,
        )

    for case in cases:
        try:
            # Without the first there is nothing, whatever the time is.
            if made and time.monotonic() - started > told.seconds:
                raise Late
            if not made or not set(CASES[case]["models"]) <= made.setdefault("names", set()):
                prepare(case)
                made.setdefault("names", set()).update(CASES[case]["models"])
            for said in compare(told, case, made, measured, keep):
                print("FAILED:", said, flush=True)
                failed += 1
        except Late:
            left_out.append(case)
    if left_out:
        print(f"no time was left for all of: {', '.join(left_out)}")
    return 1 if failed else 3 if left_out else 0


def compare(told, case, made, measured, keep):
    """Measures a case; yields what is wrong."""
    total = made["total"]
    plain = measured(kind="none", cap=None, case=case, total=total)
    if "died" in plain:
        yield f"{case}, plain: {plain['died']}"
        return
    show(case, None, "plain", plain)
    if any(output != plain["outputs"][-1] for output in plain["outputs"][1:]):
        yield f"{case}, plain: the same run has several outputs, {plain['apart']:.2g} apart"
    kinds = ["ours", *["off"] * told.off, *["original"] * bool(told.original)]
    for cap in caps_of(told, case):
        floor, streamed = floor_of(plain, cap, made, told.steps)
        times = {kind: [] for kind in kinds}
        for _ in range(told.rounds if case in TIMED else 1):
            for kind in kinds:
                found = measured(kind=kind, cap=cap, case=case, total=total)
                if "died" in found:
                    yield f"{case}, {kind}, {name_of(cap)}: {found['died']}"
                    continue
                show(case, cap, kind, found)
                times[kind].append((found["seconds"], found["cold"]))
                yield from check(case, kind, cap, plain, found)
        line = f"{case:7}{name_of(cap):>5} floor {floor:6.3f} s, {streamed / GIB:.2f} GiB a step:"
        for kind in filter(times.get, kinds):
            warm, cold = (statistics.median(each) for each in zip(*times[kind]))
            line += f"  {kind} {warm:.3f} s = {warm / floor:.2f} x floor, cold {cold:.2f} s"
            keep(kind=kind, case=case, cap=cap, floor=floor, seconds_median=warm, cold_median=cold)
        print(line, flush=True)


def caps_of(told, case):
    if told.caps:
        return [None if cap == "all" else float(cap) for cap in told.caps.split(",")]
    return CASES[case].get("caps", [4.0, 6.0, None, 3.0])


def name_of(cap):
    return "all" if cap is None else f"{cap:g}"


def show(case, cap, kind, found):
    print(
        f"{case:7}{name_of(cap):>5} {kind:9}load {found['load']:5.2f} first {found['first']:6.2f} "
        f"then {' '.join(f'{seconds:.3f}' for seconds in found['all'])} s; "
        f"{found['resident_bytes'] / GIB:.2f} GiB resident, {found['held_bytes'] / GIB:.2f} held "
        f"above a context of {found['context_bytes'] / GIB:.2f}, grew "
        f"{found['growth_bytes'] >> 20} MiB (process {found['took']:.0f} s)",
        flush=True,
    )


def floor_of(plain, cap, made, steps):
    """Seconds that no allocator gets below, and the bytes of a step that have to be streamed."""
    if cap is None:
        return plain["seconds"], 0
    room = cap * GIB - HEADROOM - plain["context_bytes"] - plain["tensor_bytes"]
    room, count = max(room, 0), plain["samples"]
    weights = plain["weight_bytes"]
    streamed = max(weights - room, 0)
    if count == 1 or not streamed:
        return max(plain["seconds"], streamed * steps / made["link"]), streamed
    # Models in turn: each comes whole once and then what it has no room for, or each keeps a part.
    one = weights / count
    rest = max(one - room, 0)
    in_all = min(streamed * steps, count * (one + rest * (steps - 1)))
    return max(plain["seconds"], in_all / made["link"]), in_all / count / steps


def check(case, kind, cap, plain, found):
    said = f"{case}, {kind}, {name_of(cap)}: "
    # The plain client is no more equal to itself than that: its cold run may differ from the others.
    if found["outputs"][0] != plain["outputs"][0]:
        yield said + "the cold output is not that of the plain run"
    if any(output != plain["outputs"][-1] for output in found["outputs"][1:]):
        yield said + f"the outputs are not those of the plain run, {found['apart']:.2g} apart"
    # The cap is of the card; what the context holds of it is not the allocator's.
    if cap is not None and found["held_bytes"] + found["context_bytes"] > cap * GIB:
        context = found["context_bytes"]
        held = (found["held_bytes"] + context) / GIB
        yield said + f"{held:.2f} GiB were held, {context / GIB:.2f} of that by the context"
    if found["growth_bytes"] > GROWTH:
        yield said + f"grew by {found['growth_bytes'] >> 20} MiB"


def child(told, asked):
    case, kind = CASES[asked["case"]], asked["kind"]
    # Before this file's own folder, which has a module of the same name as the tree's package.
    sys.path[0] = str(told.tree)
    # What scripts/comfy-bundle.sh puts beside it; what is installed comes first.
    sys.path.append(str(told.tree.parent / "site"))
    sys.argv = ["main.py", "--disable-xformers", "--use-pytorch-cross-attention"]
    if kind in ("none", "make"):
        sys.argv += ["--disable-dynamic-vram"]
        # Imported by ComfyUI in any case; not used.
        import vbar.comfy

        vbar.comfy.install(allocator=False)
    elif asked["cap"] is not None:
        # Of the card's size, which was asked in another process: CUDA is not to be used yet.
        sys.argv += ["--vram-headroom", repr(asked["total"] / GIB - asked["cap"])]
    if kind in ("ours", "off"):
        import logging

        import vbar.comfy

        vbar.comfy.install()
        # What its users see.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("    %(name)s: %(message)s"))
        logging.getLogger("vbar").addHandler(handler)
        logging.getLogger("vbar").setLevel(logging.INFO)
    client = Client(kind)
    folder = pathlib.Path(asked["folder"])
    if kind == "make":
        found = make(client, folder, asked["checkpoints"])
    else:
        # As the executor runs nodes.
        with client.torch.inference_mode():
            found = measure(client, told, folder, case)
    print(FOUND + json.dumps(found), flush=True)
    return 0


class Client:
    """ComfyUI without its server: what its main program does before the first prompt."""

    def __init__(self, kind):
        import comfy.options

        comfy.options.enable_args_parsing()
        # Sets a variable that PyTorch reads as it is imported.
        import cuda_malloc  # noqa: F401

        import comfy_aimdo.control as control

        self.is_dynamic = kind in ("ours", "off", "original")
        if self.is_dynamic:
            try:
                is_loaded = control.init(simple_vram_headroom=None, nvml_pressure=True)
            except TypeError:
                # Before 0.4.11 there was no such choice.
                is_loaded = control.init(simple_vram_headroom=None)
            # Older ones return nothing.
            assert is_loaded in (None, True), "the allocator was not loaded"
        import torch
        import transformers  # noqa: F401

        # Behind that, which asks what is installed.
        sys.meta_path.append(Absent())
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

    def resident(self, weight_bytes):
        """Bytes of weights that are on the device: without VBARs all of them."""
        if not self.is_dynamic:
            return weight_bytes
        import comfy_aimdo.model_vbar

        return comfy_aimdo.model_vbar.vbars_analyze(0)

    def counts(self):
        """What vbar has counted so far, and nothing of others."""
        # The original has such a function too, without a device of ours behind it.
        context = self.control.get_devctx(0) if self.is_dynamic else None
        told = getattr(getattr(context, "device", None), "statistics", dict)()
        return {name: value for name, value in getattr(told, "__dict__", {}).items()
                if type(value) is int}

    def end_of_node(self):
        if not self.is_dynamic:
            return
        import comfy.model_prefetch
        import comfy_aimdo.model_vbar

        self.management.reset_cast_buffers()
        comfy.model_prefetch.cleanup_prefetch_queues()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def make(client, folder, names):
    """The checkpoints that are not there yet, and how fast the link is."""
    torch = client.torch
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    plain = comfy.ops.disable_weight_init
    built = Flux(dtype=torch.bfloat16, device="meta", operations=plain, **FLUX)
    shapes = {name: tuple(value.shape) for name, value in built.state_dict().items()}
    for name in names:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            partial = path.with_suffix(".partial")
            seed = 2 if name == "second" else 1
            write_checkpoint(torch, partial, shapes, seed, fp8=name == "fp8")
            partial.rename(path)
    nbytes = GIB // 2
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, nbytes / (time.perf_counter() - start))
    total = torch.cuda.mem_get_info()[1]
    return dict(device=torch.cuda.get_device_name(), link=best, total=total)


def write_checkpoint(torch, path, shapes, seed, fp8):
    """A safetensors file, tensor by tensor: all of it is at no time in memory."""
    # Matrices only: norms and biases stay, so that types are mixed.
    is_fp8 = {name: fp8 and len(shape) == 2 for name, shape in shapes.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin = end
        elements = 1
        for length in shape:
            elements *= length
        end += elements * (1 if is_fp8[name] else 2)
        kind = "F8_E4M3" if is_fp8[name] else "BF16"
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator("cuda").manual_seed(seed)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            drawn = torch.empty(shape, dtype=torch.float32, device="cuda")
            drawn.normal_(0, 0.02, generator=generator)
            drawn = (drawn + (1 if "norm" in name else 0)).to(torch.bfloat16)
            if is_fp8[name]:
                drawn = drawn.to(torch.float8_e4m3fn)
            view = memoryview(drawn.reshape(-1).view(torch.uint8).cpu().numpy())
            while view:
                view = view[file.write(view) :]
        assert file.tell() == 8 + len(text) + end, path


def shapes_of(path):
    """Of the tensors of a safetensors file."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    return {name: told["shape"] for name, told in header.items() if name != "__metadata__"}


def measure(client, told, folder, case):
    torch = client.torch
    import comfy.sample
    import comfy.sd

    start = time.perf_counter()
    paths = [folder / f"{name}.safetensors" for name in case["models"]]
    models = [comfy.sd.load_diffusion_model(str(path)) for path in paths]
    if case.get("lora"):
        models = [patched(client, model, shapes_of(path)) for model, path in zip(models, paths)]
    loaded = time.perf_counter()
    weight_bytes = sum(model.model_size() for model in models)
    held, drawn = 0, {}

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
        samples = samples.float().cpu()
        assert torch.isfinite(samples).all(), "what was sampled is not finite"
        # How far it is from that model's first, for the case that they are not equal.
        first = drawn.setdefault(id(model), samples)
        apart.append(float((samples - first).norm() / first.norm()))
        return hashlib.sha256(samples.numpy().tobytes()).hexdigest()

    apart = []
    outputs = [[draw(model, 7) for model in models]]
    cold = time.perf_counter()
    if case.get("cancel"):
        for at in (2, 5):
            try:
                draw(models[0], 7, cancel_at=at)
                raise AssertionError("it was not cancelled")
            except client.management.InterruptProcessingException:
                pass
    torch.cuda.reset_peak_memory_stats()
    seconds, first, last, counts = [], None, None, [client.counts()]
    for _ in range(case.get("runs", told.runs)):
        began = time.perf_counter()
        outputs.append([draw(model, 7) for model in models])
        seconds.append(time.perf_counter() - began)
        counts.append(client.counts())
        last = client.held()
        first = first or last
    # Without a cap: all that PyTorch held at a time, less the weights.
    peak = torch.cuda.max_memory_allocated()
    return dict(
        seconds=statistics.median(seconds),
        all=seconds,
        load=loaded - start,
        first=cold - loaded,
        cold=cold - start,
        # Of the cold run and of each after it; how far from the cold one they are at most.
        outputs=outputs,
        apart=max(apart),
        held_bytes=held,
        context_bytes=client.before,
        resident_bytes=client.resident(weight_bytes),
        growth_bytes=last - first,
        weight_bytes=weight_bytes,
        tensor_bytes=max(peak - weight_bytes, 0),
        samples=len(models),
        # Of vbar, after the cold run and each of the others.
        counts=counts,
    )


def patched(client, model, of_file):
    """A model with a LoRA of rank 16 on every matrix of its blocks."""
    torch = client.torch
    import comfy.lora

    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    generator, weights = torch.Generator().manual_seed(3), {}
    # Of the file: with VBARs the modules hold no weights.
    shapes = {f"diffusion_model.{name}": shape for name, shape in of_file.items()}
    for name, key in keys.items():
        shape = shapes.get(key, ()) if isinstance(key, str) else ()
        if not name.startswith("lora_unet_") or "blocks" not in name or len(shape) != 2:
            continue
        rows, columns = shape
        up, down = torch.empty(rows, 16), torch.empty(16, columns)
        weights[f"{name}.lora_up.weight"] = up.normal_(0, 0.01, generator=generator)
        weights[f"{name}.lora_down.weight"] = down.normal_(0, 0.01, generator=generator)
        weights[f"{name}.alpha"] = torch.tensor(16.0)
    clone = model.clone()
    assert clone.add_patches(comfy.lora.load_lora(weights, keys)), "nothing was patched"
    return clone


if __name__ == "__main__":
    sys.exit(main())
