"""What the tests of vbar.comfy share: the stand-in for PyTorch, a device, and ComfyUI's package.

Importing this installs the package for the process, as a ComfyUI that is started by vbar has it.
"""

import logging
import pathlib
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).parent / "stand_in"))

import torch  # noqa: E402

import vbar.comfy  # noqa: E402
import vbar.sim  # noqa: E402
from support import Case as Folder  # noqa: E402
from support import spec  # noqa: E402

vbar.comfy.install(allocator=False)

import comfy_aimdo.control as control  # noqa: E402
from vbar.comfy import _devices  # noqa: E402

MIB = 1 << 20
#: What clients count pages in, and the pages underneath.
COMFY_PAGE, PAGE = 32 * MIB, 2 * MIB

torch.cuda.init()


class Case(Folder):
    """A test with a device of its own, of ``capacity`` MiB, all of which may be used unless told.

    At its end nothing had broken CUDA's contract, and nothing is left.
    """

    capacity = 512

    def setUp(self):
        super().setUp()
        self.open()
        self.addCleanup(self.close)

    def open(self, extra=0, **options):
        told = {"page_size": PAGE, "threads": False, **options}
        _devices._options.clear()
        _devices.set_options({"driver": spec(capacity=f"{self.capacity + 256}M"), **told})
        self.assertTrue(control.init(simple_vram_headroom=0))
        self.assertTrue(control.init_devices([(0, extra)]))
        self.context = control.get_devctx(0)
        self.device = self.context.device
        self.sim = vbar.sim.Sim(self.device)
        torch._dense.sim = self.sim
        torch.cuda.host_device, torch.cuda.streams = self.device, []
        self.compute = self.stream()
        torch.cuda.set_stream(types.SimpleNamespace(cuda_stream=self.compute.handle))

    def stream(self):
        made = self.sim.stream()
        torch.cuda.streams.append(made)
        return made

    def close(self):
        """A second time does nothing."""
        if torch._dense.sim is None:
            return
        torch._dense.sim = None
        try:
            torch.cuda.synchronize()
        finally:
            # Also where the device is lost: the next test has another.
            control.deinit()
            torch.cuda.set_stream(types.SimpleNamespace(cuda_stream=0))
            torch.cuda.streams, torch.cuda.host_device = [], None
            found = self.sim.violations()
            self.sim.close()
        self.assertEqual(found, [])

    def logged(self, level="DEBUG"):
        return self.assertLogs("vbar.comfy", level)


logging.getLogger("vbar").setLevel(logging.DEBUG)
