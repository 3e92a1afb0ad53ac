"""Starting ComfyUI on vbar: whose `comfy_aimdo` is found, when PyTorch gets its allocator, and what
stays as it was. Each test is a process of its own, with a stand-in for ComfyUI's main program.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

from test_torch_install import Stand
from test_torch_install import setUpModule, tearDownModule  # noqa: F401

#: What is installed before: a package without an `__init__`, as the original is.
ORIGINAL = "lib = 'the original'\n\ndef init(*_, **__):\n    return True\n"

#: In the order of ComfyUI's: variables, where PyTorch is, the package, its init, PyTorch, a use of
#: CUDA, devices.
MAIN = """
    import copy, importlib.util, logging, os, pickle, sys
    logging.basicConfig()
    found = importlib.util.find_spec("torch")
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (other.origin, other.loader.get_filename("torch")) == (found.origin, found.origin)
    assert found.submodule_search_locations and found.loader.get_filename("torch") == found.origin
    assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
    assert "torch" not in sys.modules, "torch should never be imported before this point"
    os.environ["STAND_IN_DEVICES"] = "1"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import beside
    import comfy_aimdo.control
    comfy_aimdo.control.init(simple_vram_headroom=None, nvml_pressure=True)
    import torch
    torch.cuda.current_device()
    if torch._C._current is not None:
        torch._C._read_settings()
    import comfy_aimdo.host_buffer, comfy_aimdo.model_vbar
    devices = ((index, 0) for index in [0])
    print("devices", getattr(comfy_aimdo.control, "init_devices", lambda _: None)(devices))
    print("arguments", sys.argv[1:], os.path.basename(sys.argv[0]))
    print("folder", os.path.basename(sys.path[0]))
    print("file", os.path.basename(os.path.dirname(comfy_aimdo.control.__file__)),
          comfy_aimdo.control.lib == "the original")
    print("plug", torch._C._current is not None)
    print("loader", type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__)
    print("finders", [type(one).__name__ for one in sys.meta_path if "Torch" in type(one).__name__])
"""


class Start(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        original = self.folder / "installed/comfy_aimdo"
        original.mkdir(parents=True)
        for name in ("control", "host_buffer", "model_vbar"):
            (original / f"{name}.py").write_text(ORIGINAL)
        self.tree = self.folder / "ComfyUI"
        self.tree.mkdir()
        (self.tree / "beside.py").write_text("")
        self.main = self.tree / "main.py"
        self.main.write_text(textwrap.dedent(MAIN))

    def python(self, *arguments, **settings):
        environment = Stand.environment(VBAR_DRIVER="sim:capacity=1G", **settings)
        path = [str(self.folder / "installed"), environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    def start(self, *arguments, **settings):
        code, output, errors = self.python("-m", "vbar.comfy", *arguments, **settings)
        self.assertEqual(code, 0, errors)
        return dict(line.split(" ", 1) for line in output.splitlines()), errors

    def test_one_command_starts_it_on_vbar(self):
        told, errors = self.start(self.main, "--listen", "--port", "8188")
        self.assertEqual(errors, "")
        self.assertEqual(told["devices"], "True")
        self.assertEqual(told["arguments"], "['--listen', '--port', '8188'] main.py")
        self.assertEqual(told["folder"], "ComfyUI")
        self.assertEqual(told["file"], "comfy_aimdo False")
        # PyTorch had its allocator before the first use of CUDA, and nothing of ours is left in it.
        self.assertEqual(told["plug"], "True")
        self.assertEqual(told["loader"], "SourceFileLoader True")
        self.assertEqual(told["finders"], "[]")

    def test_its_folder_will_do(self):
        told, _ = self.start(self.tree)
        self.assertEqual(told["arguments"], "[] main.py")

    def test_off_is_plain(self):
        for arguments in (("--vbar-off", self.main, "-x"), (self.main, "-x", "--vbar-off")):
            told, _ = self.start(*arguments)
            self.assertEqual(told["file"], "comfy_aimdo True")
            self.assertEqual(told["arguments"], "['-x'] main.py")
            self.assertEqual((told["plug"], told["folder"]), ("False", "ComfyUI"))

    def test_the_original_is_found_again_without_us(self):
        self.start(self.main)
        files = sorted(path.name for path in (self.folder / "installed").rglob("*.py"))
        self.assertEqual(files, ["control.py", "host_buffer.py", "model_vbar.py"])
        code, output, errors = self.python(self.main)
        self.assertEqual(code, 0, errors)
        self.assertIn("file comfy_aimdo True", output)

    def test_a_restart_comes_back_on_vbar(self):
        # As ComfyUI-Manager does it, and with the functions around it.
        self.main.write_text(textwrap.dedent("""
            import logging, os, sys
            logging.basicConfig(level=logging.INFO)
            import comfy_aimdo.control
            how = sys.argv[1]
            print(how, comfy_aimdo.control.lib != "the original", sys.argv, flush=True)
            if how == "done":
                sys.exit(5)
            sys_argv = [sys.argv[0], "done", *sys.argv[2:]]
            cmds = [sys.executable] + sys_argv
            if how == "execv":
                os.execv(sys.executable, cmds)
            if how == "execve":
                os.execve(sys.executable, [sys.executable, "-X", "dev", *sys_argv], os.environ)
            if how == "execl":
                os.execl(sys.executable, *cmds)
            if how == "execvp":
                os.environ["PATH"] = os.path.dirname(sys.executable)
                os.execvp(os.path.basename(sys.executable), cmds)
            if how == "spawn":
                os.spawnv(os.P_WAIT, sys.executable, cmds)
            if how == "elsewhere":
                os.symlink(os.path.realpath(sys.executable), "python")
                os.execv(os.path.abspath("python"), cmds)
            if how == "other":
                os.execv("/bin/echo", ["echo", *cmds])
        """))
        cases = [(how, self.main) for how in ("execve", "execl", "execvp", "spawn")]
        cases += [("execv", path) for path in (self.main, "ComfyUI/main.py", "ComfyUI")]
        for how, path in cases:
            told = self.python("-m", "vbar.comfy", path, how, "--port", "8188")
            code, output, errors = told
            self.assertEqual(code, 0 if how == "spawn" else 5, errors)
            first, second = output.splitlines()
            self.assertEqual(first.split(" ")[:2], [how, "True"])
            self.assertEqual(second, first.replace(how, "done"))
            self.assertIn("restarting on vbar: ", errors)
        # What is no restart of it is as it was; so is one that was started plain.
        code, output, _ = self.python("-m", "vbar.comfy", self.main, "other")
        self.assertEqual((code, "vbar.comfy" in output), (0, False))
        # So is an interpreter of another environment, which may not have this package.
        code, output, errors = self.python("-m", "vbar.comfy", self.main, "elsewhere")
        self.assertEqual((code, output.count(" False ")), (5, 1), errors)
        code, output, errors = self.python("-m", "vbar.comfy", self.main, "execv", "--vbar-off")
        self.assertEqual((code, output.count(" False ")), (5, 2), errors)

    def test_what_is_wrong_is_said(self):
        code, output, errors = self.python("-m", "vbar.comfy", "--help")
        self.assertEqual((code, errors), (0, ""))
        self.assertIn("usage: python -m vbar.comfy", output)
        for arguments in ((), (self.folder / "none.py",)):
            code, output, errors = self.python("-m", "vbar.comfy", *arguments)
            self.assertEqual((code, output), (2, ""))
            self.assertIn("usage: python -m vbar.comfy", errors)
        self.assertIn("there is no", errors)

    def test_its_exit_code_and_traceback_are_its_own(self):
        self.main.write_text("import sys\nsys.exit(7)\n")
        self.assertEqual(self.python("-m", "vbar.comfy", self.main)[0], 7)
        late = "import atexit\natexit.register(lambda: print(name))\nname = 5\n1 / 0\n"
        self.main.write_text(late)
        code, output, errors = self.python("-m", "vbar.comfy", self.main)
        self.assertEqual((code, output), (1, "5\n"))
        self.assertIn(f'File "{self.main}", line 4', errors)

    def test_a_torch_that_cannot_be_used_is_told_and_comfyui_runs(self):
        told, errors = self.start(self.main, STAND_IN_MISSING="set_reset_fn")
        self.assertEqual((told["plug"], told["devices"]), ("False", "True"))
        self.assertIn("PyTorch keeps its own allocator", errors)
        self.assertIn("set_reset_fn", errors)

    def check(self, program, **settings):
        code, output, errors = self.python("-c", textwrap.dedent(program), **settings)
        self.assertEqual((code, errors), (0, ""), output)
        return output

    def test_a_package_that_was_imported_before_is_refused(self):
        self.check("""
            import comfy_aimdo.control
            import sys, vbar.comfy
            path, finders = list(sys.path), list(sys.meta_path)
            try:
                vbar.comfy.install()
            except vbar.comfy.InstallError as error:
                assert "was imported already" in str(error) and "installed" in str(error), error
            else:
                raise AssertionError("it was not refused")
            assert (path, finders) == (sys.path, sys.meta_path)
            assert not vbar.comfy.is_installed()
            assert comfy_aimdo.control.lib == "the original"
        """)

    def test_install_in_a_program(self):
        self.check("""
            import torch, vbar.comfy, vbar.torch
            vbar.comfy.install(page_size="2M", threads=False)
            vbar.comfy.install()
            assert vbar.comfy.is_installed() and vbar.torch.is_installed()
            from comfy_aimdo.model_vbar import ModelVBAR, lib
            assert lib is None
            import comfy_aimdo, comfy_aimdo.control as control
            assert hasattr(comfy_aimdo, "malloc_graph")
            assert control.init(simple_vram_headroom=700 << 20) and control.init_devices([0])
            # Weights and tensors have one budget: what a tensor needs, weights give.
            bar = ModelVBAR(1 << 34, 0)
            alloc = bar.alloc(300 << 20)
            assert bar.fault(*alloc[1:]) is not None
            bar.unpin(*alloc[1:])
            tensor = torch.empty(200 << 20, device="cuda")
            used = control.get_total_vram_usage()
            assert used <= 324 << 20, used
            assert bar.loaded_size() <= 124 << 20, bar.loaded_size()
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 200 << 20
            bar.prioritize()
            del tensor
            torch.cuda.empty_cache()
            assert bar.fault(*alloc[1:]) is not None
            bar.unpin(*alloc[1:])
            del bar, alloc
        """)

    def test_a_wrong_option_is_refused_at_once_and_not_in_the_import_of_pytorch(self):
        self.check("""
            import sys, vbar.comfy
            path, finders = list(sys.path), list(sys.meta_path)
            wrong = ({"pagesize": "2M"}, {"page_size": "two"}, {"page_size": []}, {"context": 1})
            for options in wrong:
                try:
                    vbar.comfy.install(**options)
                except (TypeError, ValueError) as error:
                    assert next(iter(options)) in str(error), error
                else:
                    raise AssertionError(f"{options} was not refused")
            assert (path, finders) == (sys.path, sys.meta_path)
            vbar.comfy.install(page_size="2M")
            import torch, vbar.torch
            assert vbar.torch.is_installed() and vbar.torch.device(0).page_size == 2 << 20
        """)

    def test_too_late_for_cuda_is_refused_with_nothing_changed(self):
        self.check("""
            import sys, torch, vbar.comfy
            torch.cuda.current_device()
            path = list(sys.path)
            try:
                vbar.comfy.install()
            except vbar.comfy.InstallError as error:
                assert "before the first use of CUDA" in str(error), error
            else:
                raise AssertionError("it was not refused")
            assert path == sys.path and not vbar.comfy.is_installed()
            vbar.comfy.install(allocator=False)
            assert vbar.comfy.is_installed()
        """)

    def test_the_end_of_the_process_is_quiet_with_everything_open(self):
        self.check("""
            import torch, vbar.comfy
            vbar.comfy.install()
            import comfy_aimdo.control as control, comfy_aimdo.model_vbar as model_vbar
            import comfy_aimdo.host_buffer as host_buffer, comfy_aimdo.vram_buffer as vram_buffer
            import comfy_aimdo.model_mmap as model_mmap, comfy_aimdo.torch as tensors
            control.init(simple_vram_headroom=0)
            control.init_devices([0])
            bar = model_vbar.ModelVBAR(1 << 34, 0)
            alloc = bar.alloc(5 << 20)
            model_vbar.vbar_fault(alloc)
            buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
            view = tensors.aimdo_to_tensor(buffer.get(5), "cuda:0")
            host = host_buffer.HostBuffer(0, 1 << 20, 1 << 24)
            host.extend(5 << 20)
            mapping = model_mmap.ModelMMAP(model_mmap.__file__)
            cycle = [bar, buffer, host, mapping]
            cycle.append(cycle)
        """)


if __name__ == "__main__":
    unittest.main()
