"""Memory graphs of ComfyUI's package on a real GPU with PyTorch: addresses repeat, bytes are right.

Skipped where there is no GPU or no torch.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 tests/python/test_comfy_graph_gpu.py

Each test is a process of its own: PyTorch's allocator is for ever.
"""

import ctypes
import importlib.util
import textwrap
import unittest

from support import run

START = """
    import vbar.comfy
    vbar.comfy.install()
    import comfy_aimdo.control as control
    assert control.init(simple_vram_headroom=None)
    import torch
    import vbar.torch
    assert control.init_devices([(0, 0)])
    vbar.torch.check_in_use()
    device = torch.device("cuda", 0)
    # The first pass is no repetition: the third block drops what the first has no right to.
    graph = control.record(torch.cuda.current_stream(), False)
    found = []

    def noted(tensor):
        found.append(tensor.data_ptr())
        return tensor

    def block(x, weight):
        '''A layer as models have it: what it makes on the way dies on the way.'''
        hidden = noted(torch.nn.functional.gelu(noted(x @ weight)))
        scale = noted(hidden.float().pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)
        return noted(x + noted(hidden * scale) @ weight.T)

    def step(x, weights):
        for index, weight in enumerate(weights):
            graph.push(f"block {index % 2}")
            x = block(x, weight)
            graph.pop()
        return x

    torch.manual_seed(1)
    weights = [torch.randn(1024, 4096, device=device) / 64 for _ in range(6)]
    start = torch.randn(2048, 1024, device=device)
    # What libraries allocate once is none of a scope's: it outlives each.
    block(start, weights[0])
    expected = step(start, weights).cpu()
    torch.cuda.synchronize()
"""


def _has_gpu():
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        count = ctypes.c_int()
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and (
            count.value > 0
        )
    except OSError:
        return False


@unittest.skipUnless(_has_gpu(), "no GPU, or no torch")
class Graph(unittest.TestCase):
    def check(self, program):
        code, printed = run(textwrap.dedent(START) + textwrap.dedent(program))
        self.assertEqual(code, 0, printed)
        print(printed, end="")

    def test_addresses_repeat_and_bytes_are_right(self):
        self.check("""
            graph.push("sample")
            passes = []
            for at in range(8):
                found.clear()
                result = step(start, weights)
                passes.append(list(found))
                assert torch.equal(result.cpu(), expected), at
                del result
                mapped = torch.cuda.memory_stats()["num_device_alloc"]
                if at > 1:
                    assert passes[at] == passes[1], at
                    assert mapped == before, "a repeated pass has mapped"
                before = mapped
                graph._assert_breaks = at > 0
                graph.iterate("sample")
            print("peak", graph.peak_used >> 20, "MiB of", graph.physical_bytes >> 20,
                  graph.rogue_count, "rogues", flush=True)
            assert graph.rogue_count == 0 and 0 < graph.peak_used <= graph.physical_bytes
            graph.pop()
            torch.cuda.empty_cache()
            assert graph.physical_bytes == 0
        """)

    def test_a_cuda_graph_captured_within_a_scope_keeps_its_memory(self):
        self.check("""
            graph.push("sample")
            kept = start.clone()
            captured = torch.cuda.CUDAGraph()
            graph.pause(sync=True)
            with torch.cuda.graph(captured):
                result = block(kept, weights[0])
            graph.resume(sync=True)
            graph.pop()
            torch.cuda.empty_cache()
            for at in range(4):
                filler = [torch.full((1 << 22,), float(at), device=device) for _ in range(16)]
                kept.copy_(start * (at + 1))
                captured.replay()
                assert torch.equal(result, block(start * (at + 1), weights[0])), at
                assert all((one == at).all() for one in filler)
                del filler
        """)


if __name__ == "__main__":
    unittest.main()
