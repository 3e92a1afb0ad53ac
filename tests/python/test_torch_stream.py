"""vbar.torch.stream on the simulated device, with a stand-in for PyTorch's modules and tensors.

The stand-in's operations read device addresses through the simulated device, which counts every
read of what is not mapped: each test ends by looking at that, and at the pins that are left.
"""

import contextlib
import copy
import gc
import json
import pathlib
import pickle
import struct
import sys
import threading
import types
import unittest
import warnings
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent / "stand_in"))

import torch  # noqa: E402
from support import MIB, PAGE, Case, Sim, open_device, write_model  # noqa: E402

import vbar  # noqa: E402
import vbar.torch  # noqa: E402
from vbar.torch import StreamError, WeightOffloaded, _export, _units  # noqa: E402

WIDTH = 4
CODES = {"F32": "f", "F16": "e", "F64": "d", "I64": "q"}


def numbers(count, seed):
    """Numbers that every type has exactly."""
    return [((at * 7 + seed * 3) % 17 - 8) / 4 for at in range(count)]


def told(shape, seed, dtype="F32"):
    """A tensor for `write_model`."""
    count = 1
    for length in shape:
        count *= length
    return dtype, shape, struct.pack(f"<{count}{CODES[dtype]}", *numbers(count, seed))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.empty((WIDTH,)))
        self.register_buffer("shift", torch.empty((WIDTH,)))
        self.register_buffer("constant", torch.tensor([1.0] * WIDTH), persistent=False)

    def forward(self, x):
        return self.up(x) + self.scale + self.shift + self.constant.to(x.device)


class Stack(torch.nn.Module):
    """An embedding whose weight is that of the last layer, too, and blocks in between."""

    def __init__(self, count=3):
        super().__init__()
        self.count = count
        self.embedding = torch.nn.Embedding(8, WIDTH)
        for at in range(count):
            setattr(self, f"block{at}", Block())
        self.head = torch.nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indexes):
        x = self.embedding(indexes)
        for at in range(self.count):
            x = getattr(self, f"block{at}")(x)
        return self.head(x)


def stack_tensors(count=3, dtype="F32", apart=0):
    """The file's; `apart` pads so that each block has pages of its own."""
    tensors = {"embedding.weight": told((8, WIDTH), 1, dtype)}
    for at in range(count):
        if apart:
            tensors[f"block{at}.aa"] = ("U8", (apart,), bytes(apart))
        tensors[f"block{at}.up.weight"] = told((WIDTH, WIDTH), 10 + at, dtype)
        tensors[f"block{at}.up.bias"] = told((WIDTH,), 20 + at, dtype)
        tensors[f"block{at}.scale"] = told((WIDTH,), 30 + at, dtype)
        tensors[f"block{at}.shift"] = told((WIDTH,), 40 + at, dtype)
    return tensors


def ordinary(tensors, count=3):
    """The same module with ordinary tensors."""
    module = Stack(count)
    for name, value in module.state_dict().items():
        if name in tensors:
            dtype, shape, raw = tensors[name]
            held = struct.unpack(f"<{len(raw) // struct.calcsize(CODES[dtype])}{CODES[dtype]}", raw)
            flat = torch.tensor(list(held))
            value.copy_(flat)
    return module


def as_ordinary(module):
    return {id(value) for child in module.modules() for value in child._parameters.values()}


INDEXES = [3, 0, 7]


class Streams(Case):
    def setUp(self):
        super().setUp()
        # Evictions are to be whole, also when the last use is too young to have its fence.
        self.device = open_device(context_waits=vbar.ContextWaits.ALLOWED)
        self.addCleanup(self.device.close)
        self.sim = Sim(self.device)
        self.addCleanup(self.sim.close)
        torch._dense.sim = self.sim
        self.indexes = torch.tensor(INDEXES, dtype=torch.int64, device="cuda")

    def tearDown(self):
        gc.collect()
        self.assertEqual(self.sim.violations(), 0)

    def built(self, count=3):
        with vbar.torch.empty_model():
            return Stack(count)

    def stream(self, module, tensors, **more):
        path = write_model(self.folder / "model.safetensors", tensors)
        return vbar.torch.stream(module, path, device=self.device, **more)

    def check_same(self, module, tensors, count=3):
        wanted = ordinary(tensors, count).to("cuda")(self.indexes).tolist()
        self.assertEqual(module(self.indexes).tolist(), wanted)

    def check_no_pins(self, streaming):
        bars = [streaming.model.bar, *([streaming._bar] if streaming._bar else [])]
        for bar in bars:
            self.assertEqual([page.pin_count for page in bar.residency() if page.pin_count], [])

    def evict(self):
        self.device.free_memory()

    def refused(self, words, call, *arguments, kind=StreamError, **named):
        with self.assertRaises(kind) as raised:
            call(*arguments, **named)
        self.assertIn(words, str(raised.exception))
        return raised.exception

    # What it computes.

    def test_results_are_the_ordinary_ones_through_evictions(self):
        tensors, module = stack_tensors(), self.built()
        streaming = self.stream(module, tensors)
        addresses = [value.data_ptr() for value in module.parameters()]
        for _ in range(3):
            self.check_same(module, tensors)
            self.check_no_pins(streaming)
            self.evict()
        self.assertEqual([value.data_ptr() for value in module.parameters()], addresses)
        self.assertEqual(addresses[0], streaming.model["embedding.weight"].address)

    def test_a_model_larger_than_its_budget(self):
        tensors, module = stack_tensors(6, apart=PAGE), self.built(6)
        self.device.budget = 4 * PAGE
        streaming = self.stream(module, tensors)
        self.assertGreater(streaming.model.nbytes, 4 * PAGE)
        for _ in range(3):
            self.check_same(module, tensors, 6)
        self.assertLessEqual(self.device.statistics().used_bytes, 4 * PAGE)
        self.check_no_pins(streaming)
        self.assertEqual(len([name for name in streaming.unused if name.endswith(".aa")]), 6)

    def test_a_sharded_model(self):
        tensors = stack_tensors()
        names = sorted(tensors)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in halves.items():
            write_model(self.folder / file, {name: tensors[name] for name in part})
        index = self.folder / "model.safetensors.index.json"
        files = {name: file for file, part in halves.items() for name in part}
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
        module = self.built()
        vbar.torch.stream(module, index, device=self.device)
        self.check_same(module, tensors)

    def test_tied_weights_are_one_and_need_one_name(self):
        module = self.built()
        self.assertIs(module.head.weight, module.embedding.weight)
        self.stream(module, stack_tensors())
        self.assertIs(module.head.weight, module.embedding.weight)
        self.assertEqual(len(list(module.parameters())), 1 + 3 * 3)
        state = module.state_dict()
        self.assertEqual(state["head.weight"].tolist(), state["embedding.weight"].tolist())

    def test_what_is_not_in_the_file_keeps_its_values_and_is_told(self):
        tensors, module = stack_tensors(), Stack()
        del tensors["block1.scale"]
        module.block1.scale.copy_(torch.tensor([5.0] * WIDTH))
        streaming = self.stream(module, tensors)
        constants = [f"block{at}.constant" for at in range(3)]
        self.assertEqual(sorted(streaming.kept), sorted([*constants, "block1.scale"]))
        self.assertEqual(module.block1.scale.tolist(), [5.0] * WIDTH)
        self.assertEqual(module.block1.scale.device.type, "cuda")
        self.assertEqual(module.block0.constant.tolist(), [1.0] * WIDTH)
        self.assertFalse(module.block1.scale.requires_grad)

    def test_mixed_types_as_the_file_has_them_and_cast(self):
        tensors = stack_tensors()
        tensors["block0.up.weight"] = told((WIDTH, WIDTH), 10, "F16")
        tensors["block1.shift"] = told((WIDTH,), 41, "F64")
        module = self.built()
        error = self.refused("float16 in the file", self.stream, module, tensors)
        self.assertIn("block1.shift", str(error))
        self.stream(module, tensors, dtypes="file")
        self.assertIs(module.block0.up.weight.dtype, torch.float16)
        self.check_same(module, tensors)
        vbar.torch.unstream(module)
        again = self.built()
        streaming = self.stream(again, tensors, dtypes="module")
        self.assertIs(again.block0.up.weight.dtype, torch.float32)
        for _ in range(2):
            self.check_same(again, tensors)
            self.check_no_pins(streaming)
            self.evict()

    def test_two_models_in_one_forward_and_one_operation(self):
        one, other = self.built(), self.built()
        self.stream(one, stack_tensors())
        path = write_model(self.folder / "other.safetensors", stack_tensors())
        vbar.torch.stream(other, path, device=self.device)
        self.evict()
        added = one.embedding.weight + other.embedding.weight
        self.assertEqual(added.tolist(), [2 * each for each in numbers(8 * WIDTH, 1)])
        self.check_same(one, stack_tensors())
        self.check_same(other, stack_tensors())

    # Outside of forwards.

    def test_reads_outside_of_forwards_pin_first(self):
        module = self.built()
        streaming = self.stream(module, stack_tensors())
        wanted = numbers(WIDTH, 30)
        reads = [
            lambda: module.block0.scale.tolist(),
            lambda: module.state_dict()["block0.scale"].tolist(),
            lambda: module.block0.scale.detach().view((2, 2)).detach().cpu().tolist(),
            lambda: module.block0.scale.data.clone().tolist(),
            lambda: copy.deepcopy(module.block0.scale).tolist(),
            lambda: [module.block0.scale[at].tolist()[0] for at in range(WIDTH)],
        ]
        for read in reads:
            self.evict()
            self.assertEqual(read(), wanted)
            self.check_no_pins(streaming)
        # What shares the memory was taken before it went.
        state = module.state_dict()
        views = [
            state["block0.scale"],
            module.block0.scale.data,
            module.block0.scale.view((2, 2)).detach(),
        ]
        for view in views:
            self.evict()
            self.assertEqual(view.tolist(), wanted)
        self.evict()
        self.assertIn(str(wanted), repr(module.block0.scale))
        self.assertIn(str(numbers(WIDTH, 40)), repr(module.block0.shift))

    def test_a_parent_that_uses_its_childs_weight(self):
        class Parent(Stack):
            def forward(self, indexes):
                return torch._dense.linear(self.embedding(indexes), self.block0.up.weight)

        with vbar.torch.empty_model():
            module = Parent()
        streaming = self.stream(module, stack_tensors())
        self.evict()
        found = module(self.indexes).tolist()
        plain = ordinary(stack_tensors()).to("cuda")
        x = plain.embedding(self.indexes)
        self.assertEqual(found, torch._dense.linear(x, plain.block0.up.weight).tolist())
        self.check_no_pins(streaming)

    def test_attention_that_uses_its_childs_weight_sees_ordinary_tensors(self):
        with vbar.torch.empty_model():
            module = torch.nn.MultiheadAttention(WIDTH)
        tensors = {
            "in_proj_weight": told((WIDTH, WIDTH), 1),
            "out_proj.weight": told((WIDTH, WIDTH), 2),
        }
        streaming = self.stream(module, tensors)
        x = torch.tensor(numbers(WIDTH, 5), device="cuda")
        found = module(x).tolist()
        # PyTorch has faster ways, but not for tensors that ask.
        self.assertIs(module.seen, torch.nn.Parameter)
        self.assertEqual(type(module.out_proj.weight).__name__, "StreamedParameter")
        self.check_no_pins(streaming)
        vbar.torch.unstream(module, "cuda")
        self.assertEqual(module(x).tolist(), found)

    # Within a graph: the stand-in runs what PyTorch's compiler would trace.

    def traced(self):
        return torch.compiler.said(torch.compiler._tracing)

    def lent(self, module, tensors, **more):
        return self.stream(module, tensors, one_graph=True, **more)

    def test_scenario_56_what_is_traced_computes_the_same_through_evictions(self):
        tensors, module = stack_tensors(), self.built()
        streaming = self.lent(module, tensors)
        wanted = ordinary(tensors).to("cuda")(self.indexes).tolist()
        own = {id(child._parameters) for child in module.modules()}
        for _ in range(3):
            self.evict()
            del torch._dense.done[:]
            with self.traced():
                self.assertEqual(module(self.indexes).tolist(), wanted)
            self.check_no_pins(streaming)
        # Its kernels read what an operation lent, and no tensor that asks had to pin for them.
        self.assertEqual({id(child._parameters) for child in module.modules()}, own)
        self.assertEqual(type(module.block0.scale).__name__, "StreamedParameter")
        self.assertEqual(type(module.block0.shift).__name__, "StreamedTensor")

    def test_scenario_56_lent_tensors_are_pinned_until_the_last_has_died(self):
        seen = []

        class Seeing(torch.nn.Linear):
            def forward(self, x):
                seen.extend([self.weight, self.bias])
                return super().forward(x)

        with vbar.torch.empty_model():
            module = Stack()
            module.block0.up = Seeing(WIDTH, WIDTH)
        streaming = self.lent(module, stack_tensors())
        bar = streaming.model.bar
        with self.traced():
            module(self.indexes)
        for _ in range(2):
            self.evict()
            self.assertIs(type(seen[-1]), torch.Tensor)
            self.assertEqual(seen[-1].tolist(), numbers(WIDTH, 20))
            # Each of them has the pins of both.
            self.assertEqual(sum(page.pin_count for page in bar.residency()), 2)
            del seen[:-1]
        del seen[:]
        self.check_no_pins(streaming)

    def test_scenario_56_an_exception_within_a_graph_leaves_no_pin(self):
        class Failing(Block):
            def forward(self, x):
                super().forward(x)
                raise KeyboardInterrupt

        with vbar.torch.empty_model():
            module = Stack()
            module.block1 = Failing()
        streaming = self.lent(module, stack_tensors(), patch={"block1.scale": lambda given: None})
        with self.traced(), self.assertRaises(KeyboardInterrupt):
            module(self.indexes)
        self.check_no_pins(streaming)
        self.assertEqual(type(module.block1.scale).__name__, "StreamedParameter")

    def test_scenario_56_patches_offloading_and_graphs_of_before(self):
        tensors, module = stack_tensors(), self.built()
        patch = {"block1.scale": lambda given: given.add_(1)}
        streaming = self.lent(module, tensors, patch=patch)
        wanted = module(self.indexes).tolist()
        for _ in range(2):
            self.evict()
            with self.traced():
                self.assertEqual(module(self.indexes).tolist(), wanted)
            self.check_no_pins(streaming)
        bar = self.device.create_bar(64 * MIB)
        self.evict()
        with bar.fault(0, 64 * MIB, stream=vbar.NO_STREAM) as taken:
            self.assertTrue(taken)
            with self.traced():
                self.refused("host_mapped", module, self.indexes, kind=WeightOffloaded)
            self.check_no_pins(streaming)
        del taken
        bar.close()
        x = torch.tensor([1.0] * WIDTH, device="cuda").requires_grad_()
        with self.traced():
            self.refused("inference only", module.block0.up, x)
        # What was compiled does not know that the module was unstreamed; its guards do.
        of_before = module.block0.up.forward
        vbar.torch.unstream(module)
        gc.collect()
        with self.traced():
            self.refused("was unstreamed", of_before, self.indexes)

    def test_scenario_56_a_parent_that_uses_its_childs_weight_is_lent_it(self):
        class Parent(Stack):
            def forward(self, indexes):
                told.append((self.block0.up.weight.shape, self.block0.up.weight.numel()))
                x = torch._dense.linear(self.embedding(indexes), weight=self.block0.up.weight)
                return x + self.block0.up.bias

        told = []
        with vbar.torch.empty_model():
            module = Parent()
        streaming = self.lent(module, stack_tensors())
        self.evict()
        with self.traced():
            found = module(self.indexes).tolist()
        plain = ordinary(stack_tensors()).to("cuda")
        x = torch._dense.linear(plain.embedding(self.indexes), plain.block0.up.weight)
        self.assertEqual(found, (x + plain.block0.up.bias).tolist())
        self.assertEqual(told, [((WIDTH, WIDTH), WIDTH * WIDTH)])
        self.check_no_pins(streaming)
        with self.traced():
            self.refused("patch=", module.block0.scale.add_, 1.0)
            self.refused("hand out", module.block0.scale.untyped_storage)

    def test_scenario_56_what_the_compiler_asks_and_export(self):
        module = self.built()
        self.lent(module, stack_tensors())
        weight = module.block0.up.weight
        # Of its storage it wants to know how large it is.
        with mock.patch.object(torch._guards.TracingContext, "try_get", object):
            self.assertEqual(weight.untyped_storage().address, weight.data_ptr())
        self.refused("hand out", weight.untyped_storage)
        described = torch.library.defined["fault_1"]["fake"]
        exporting = {"__name__": "torch.export._trace", "weight": weight, "described": described}
        exporting["given"] = torch.empty((1,))
        self.refused("not exported", eval, "weight.untyped_storage()", exporting)
        self.refused("not exported", eval, "described(given, None, [given])", exporting)
        compiling = dict(exporting, __name__="torch._dynamo.eval_frame")
        eval("described(given, None, [given])", compiling)

    def test_export_is_refused_before_it_reads_anything(self):
        for one_graph in (False, True):
            module = self.built()
            self.stream(module, stack_tensors(), one_graph=one_graph)
            self.evict()
            outer = torch.nn.Module()
            outer.inner = module
            del torch._dense.done[:]
            # The module, one that it is in, and a part of it.
            for given in (module, outer, module.block0, module.block0.up):
                names = [name for name, _ in given.named_modules()]
                self.assertIn("", names)
                exporting = {"__name__": "torch.export._trace", "given": given}
                ask = "list(given.named_modules(remove_duplicate=False))"
                self.refused("not exported", eval, ask, exporting)
                with self.traced(), mock.patch.object(_export, "is_exported", None):
                    self.assertEqual([name for name, _ in given.named_modules()], names)
            self.assertEqual(torch._dense.done, [])
            self.assertEqual(self.device.statistics().used_bytes, 0)
            vbar.torch.unstream(module)
            self.assertEqual(len(eval(ask, dict(exporting, given=outer))), 1 + 1 + 2 + 3 * 2)
            self.assertNotIn("named_modules", module.__dict__)

    def test_weights_are_not_moved_into_one_piece(self):
        # As recurrent layers of PyTorch's do, when a forward finds others than the last one did.
        class Recurrent(Block):
            def flatten_parameters(self):
                self.scale._told = torch.tensor([0.0] * WIDTH, device="cuda")._told

            def forward(self, x):
                self.flatten_parameters()
                return super().forward(x)

        tensors = stack_tensors()
        with vbar.torch.empty_model():
            module = Stack()
            module.block1 = Recurrent()
        self.stream(module, tensors)
        address = module.block1.scale.data_ptr()
        self.check_same(module, tensors)
        self.assertEqual(module.block1.scale.data_ptr(), address)
        vbar.torch.unstream(module)
        module.block1.flatten_parameters()
        self.assertEqual(module.block1.scale.tolist(), [0.0] * WIDTH)

    def test_a_trace_is_refused(self):
        module = self.built()
        streaming = self.stream(module, stack_tensors())
        with mock.patch.object(torch._C, "_tracing_state", object()):
            self.refused("not traced", module, self.indexes)
        self.check_no_pins(streaming)
        self.check_same(module, stack_tensors())

    def test_what_asks_nobody_is_asked_below(self):
        # As C++ code of PyTorch's calls the dispatcher, with no `__torch_function__` before.
        def operation(name, run, *arguments):
            def call(*args, **kwargs):
                return run(*args, **kwargs)

            told = [
                types.SimpleNamespace(
                    name=name, alias_info=None if at is None else types.SimpleNamespace(is_write=at)
                )
                for name, at in arguments
            ]
            call._schema = types.SimpleNamespace(arguments=told)
            call.__name__ = name
            return call

        module = self.built()
        streaming = self.stream(module, stack_tensors(), patch={"block0.scale": lambda given: None})
        wanted = numbers(WIDTH, 30)
        cast = operation("_to_copy.default", lambda own: own.clone(), ("self", None))
        alias = operation("alias.default", lambda own: own.detach(), ("self", False))
        into = operation(
            "copy_.default", lambda own, src: own.copy_(src), ("self", True), ("src", None)
        )
        for weight in (module.block0.scale, module.block1.scale, module.block0.shift):
            below = type(weight).__torch_dispatch__
            found = below(cast, (type(weight),), (weight,))
            self.evict()
            self.assertIs(type(found), torch.Tensor)
            found = below(alias, (type(weight),), (weight,), {})
            self.assertEqual(found._vbar_entry, weight._vbar_entry)
            self.evict()
            copied = torch.tensor([0.0] * WIDTH, device="cuda")
            below(into, (type(weight),), (copied, weight))
            self.evict()
            self.assertEqual(copied.tolist(), weight.tolist())
            self.refused("patch=", below, into, (type(weight),), (weight, copied))
            named = {"self": weight, "src": copied}
            self.refused("patch=", below, into, (type(weight),), (), named)
            self.check_no_pins(streaming)
        self.assertEqual(module.block0.scale.tolist(), wanted)
        vbar.torch.unstream(module)
        # The compiler knows them by what they are asked first.
        self.lent(module, stack_tensors())
        self.assertFalse(hasattr(type(module.block0.scale), "__torch_dispatch__"))

    # What the compiler makes CUDA graphs of.

    def test_scenario_56_what_uses_streamed_weights_has_no_cuda_graphs(self):
        compiler = torch._TorchCompileInductorWrapper
        asked = {"triton.cudagraphs": True}

        def graph_of(*namespaces):
            targets = [types.SimpleNamespace(namespace=each) for each in namespaces]
            nodes = [types.SimpleNamespace(target=each) for each in [*targets, "output", print]]
            inner = types.SimpleNamespace(graph=types.SimpleNamespace(nodes=nodes))
            return types.SimpleNamespace(modules=lambda: [types.SimpleNamespace(), inner])

        def settings(model):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found = compiler(dict(asked))(model, [])
            self.assertEqual(len(seen), 0 if found == asked else 1)
            self.assertEqual(found == asked, found["triton.cudagraphs"])
            return found["triton.cudagraphs"], "".join(str(one.message) for one in seen)

        class Compiling(Block):
            def forward(self, x):
                # As a compiler does that is called when this is first run.
                found.append(settings(graph_of("aten")))
                return super().forward(x)

        found = []
        with vbar.torch.empty_model():
            module = Stack()
            module.block1 = Compiling()
        self.stream(module, stack_tensors())
        self.check_same(module, stack_tensors())
        vbar.torch.unstream(module, "cuda")
        module(self.indexes)
        # Within a streamed forward, and then no longer.
        self.assertEqual([on for on, _ in found], [False, True])
        self.assertIn("know nothing of faults", found[0][1])
        # One that is lent weights by operations, wherever it is compiled.
        self.assertEqual(settings(graph_of("aten", "prims")), (True, ""))
        self.assertFalse(settings(graph_of("aten", "vbar"))[0])

    def test_scenario_56_graphs_break_at_the_forwards_unless_it_is_asked_for(self):
        module = self.built()
        streaming = self.stream(module, stack_tensors())
        forward = module.block0.__dict__["forward"]
        self.assertTrue(forward._torchdynamo_disable)
        self.assertFalse(forward.disabled_recursive)
        self.assertEqual(forward.__wrapped__, Block.forward.__get__(module.block0))
        self.check_same(module, stack_tensors())
        self.check_no_pins(streaming)
        vbar.torch.unstream(module)
        with mock.patch.object(torch, "__version__", "2.12.0+cu130"):
            self.refused("2.11", self.lent, module, stack_tensors())
        self.lent(module, stack_tensors())
        self.assertFalse(hasattr(module.block0.__dict__["forward"], "_torchdynamo_disable"))

    def test_scenario_56_the_operations_are_what_the_compiler_wants_to_know(self):
        self.lent(self.built(), stack_tensors())
        defined = torch.library.defined
        two = "Tensor(a!) order, Tensor key, Tensor[] weights) -> (Tensor, Tensor)"
        self.assertEqual(defined["fault_2"]["schema"], two)
        self.assertTrue(defined["fault_1"]["schema"].endswith("-> Tensor"))
        self.assertIn("cudagraph_unsafe", defined["fault_2"]["tags"])
        used = "Tensor(a!) order, Tensor[] results, Tensor[] weights) -> ()"
        self.assertEqual(defined["used"]["schema"], used)
        given = [torch.empty((2, 3)), torch.empty((4,), dtype=torch.int64)]
        made = defined["fault_2"]["fake"](torch.empty((1,), device="cuda"), None, given)
        found = [(each.shape, each.dtype, each.device.type) for each in made]
        wanted = [((2, 3), torch.float32, "cuda"), ((4,), torch.int64, "cuda")]
        self.assertEqual(found, wanted)

    def test_scenario_56_what_a_graph_is_given_has_no_address_of_the_bar(self):
        module = self.built()
        streaming = self.lent(module, stack_tensors())
        self.evict()
        loans = [unit._loan for unit in streaming._units]
        loans += [entry.loan for entry in streaming._entries]
        self.assertEqual(len(loans), 1 + 1 + 3 * 2 + 1 + 3 * 4)
        for loan in loans:
            for entry, weight in zip(loan._entries, loan.weights):
                self.assertIs(type(weight), torch.nn.Parameter)
                self.assertEqual((weight.shape, weight.dtype), (entry.shape, entry.plain.dtype))
                self.assertEqual(weight.device.type, "cpu")
                # As whoever exports, compiles or debugs looks into it.
                weight.clone()
        self.assertEqual(self.device.statistics().used_bytes, 0)

    def test_questions_need_no_memory(self):
        module = self.built()
        self.stream(module, stack_tensors())
        self.evict()
        weight = module.block0.up.weight
        self.assertEqual(weight.device, torch.device("cuda:0"))
        self.assertEqual((weight.shape, weight.dtype), ((WIDTH, WIDTH), torch.float32))
        self.assertFalse(weight.requires_grad)
        self.assertIsInstance(weight, torch.nn.Parameter)
        self.assertEqual(self.device.statistics().used_bytes, 0)

    def test_what_would_write_or_hand_out_the_memory_is_refused(self):
        module = self.built()
        self.stream(module, stack_tensors())
        weight = module.block0.up.weight
        self.refused("patch=", weight.add_, 1.0)
        self.refused("patch=", weight.detach().copy_, torch.tensor([0.0]))
        self.refused("hand out", weight.untyped_storage)
        self.refused("inference only", weight.requires_grad_)
        self.refused("inference only", setattr, weight, "requires_grad", True)
        self.refused("unstream", module.to, "cpu")
        self.refused("unstream", module.to, torch.float16)
        self.refused("not pickled", pickle.dumps, weight)
        with self.assertRaises(TypeError):
            copy.deepcopy(module)
        # What is no move is none.
        self.assertIs(module.to("cuda"), module)
        self.assertIs(module.block0.up.weight, weight)
        self.check_same(module, stack_tensors())

    # How a forward may end.

    def test_exceptions_and_interrupts_leave_no_pin(self):
        for raised in (ValueError, KeyboardInterrupt):

            class Failing(Block):
                def forward(self, x):
                    super().forward(x)
                    raise raised("in the middle")

            with vbar.torch.empty_model():
                module = Stack()
                module.block1 = Failing()
            streaming = self.stream(module, stack_tensors())
            with self.assertRaises(raised):
                module(self.indexes)
            self.check_no_pins(streaming)
            self.assertEqual(type(module.block1.scale).__name__, "StreamedParameter")
            vbar.torch.unstream(module)

    def test_an_interrupt_at_any_line_leaves_no_pin(self):
        tensors, module = stack_tensors(1), self.built(1)
        streaming = self.lent(module, tensors, patch={"block0.scale": lambda tensor: None})
        folder = str(pathlib.Path(vbar.__file__).parent)

        def interrupt_at(wanted, within):
            """Whether a pass, from nothing resident, was interrupted at its line of that number."""
            seen = [0]

            def trace(frame, event, argument):
                if not frame.f_code.co_filename.startswith(folder):
                    return None
                if frame.f_code.co_name in compiled:
                    return None
                if event == "line":
                    seen[0] += 1
                    if seen[0] == wanted:
                        raise KeyboardInterrupt
                return trace

            self.evict()
            with within():
                sys.settrace(trace)
                try:
                    module(self.indexes)
                except KeyboardInterrupt:
                    return True
                finally:
                    sys.settrace(None)
            return False

        # What is read by the compiler and runs as a graph, of which only operations are Python.
        of_graphs = {"streamed_forward", "begin", "returned", "end", "tensors_in"}
        for within, compiled in ((contextlib.nullcontext, {}), (self.traced, of_graphs)):
            line = 1
            while interrupt_at(line, within):
                gc.collect()
                self.check_no_pins(streaming)
                line += 1
            self.assertGreater(line, 100)
            self.check_same(module, tensors, 1)
            self.assertEqual(type(module.block0.scale).__name__, "StreamedParameter")

    def test_a_module_within_itself_and_shared_and_in_threads(self):
        class Deep(Block):
            def forward(self, x, depth=3):
                return super().forward(x) if not depth else self(x, depth - 1) + self.scale

        with vbar.torch.empty_model():
            module = Stack()
            module.block0 = module.block1 = Deep()
        tensors = stack_tensors()
        streaming = self.stream(module, tensors)
        plain = Stack()
        plain.block0 = plain.block1 = Deep()
        for name, value in plain.state_dict().items():
            # As `load_state_dict`, of two names for one: the last.
            value.copy_(torch.tensor(list(self.floats(tensors, name))))
        wanted = plain.to("cuda")(self.indexes).tolist()
        self.evict()
        self.assertEqual(module(self.indexes).tolist(), wanted)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(module(self.indexes).tolist()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, [wanted] * 4)
        self.check_no_pins(streaming)

    @staticmethod
    def floats(tensors, name):
        name = "embedding.weight" if name == "head.weight" else name
        raw = tensors[name][2]
        return struct.unpack(f"<{len(raw) // 4}f", raw)

    def test_weights_that_do_not_fit_are_an_error_that_says_so(self):
        module = self.built(1)
        streaming = self.stream(module, stack_tensors(1))
        bar = self.device.create_bar(64 * MIB)
        with bar.fault(0, 64 * MIB, stream=vbar.NO_STREAM) as taken:
            self.assertTrue(taken)
            error = self.refused("host_mapped", module, self.indexes, kind=WeightOffloaded)
            self.assertIn("embedding.weight", str(error))
            self.assertIn(error.reason.name, str(error))
            self.check_no_pins(streaming)
        del taken
        bar.close()
        self.check_same(module, stack_tensors(1), 1)
        self.check_no_pins(streaming)

    def test_pins_of_other_threads_are_waited_for(self):
        tensors, module = stack_tensors(1), self.built(1)
        for patch in ({}, {"block0.scale": lambda tensor: None}):
            streaming = self.stream(module, tensors, patch=patch)
            self.evict()
            bar, found, asleep = self.device.create_bar(64 * MIB), [], threading.Event()
            bar.set_class(-1)
            guard = bar.fault(0, 64 * MIB, stream=vbar.NO_STREAM)
            self.assertTrue(guard)

            def pause(seconds):
                asleep.set()

            def run():
                try:
                    found.append(module(self.indexes).tolist())
                finally:
                    asleep.set()

            with mock.patch.object(_units, "_PATIENCE", 20.0):
                with mock.patch.object(_units.time, "sleep", pause):
                    thread = threading.Thread(target=run)
                    thread.start()
                    asleep.wait()
                    guard.close()
                    thread.join()
            wanted = ordinary(tensors, 1).to("cuda")(self.indexes).tolist()
            self.assertEqual(found, [wanted])
            self.check_no_pins(streaming)
            vbar.torch.unstream(module)
            bar.close()

    def test_what_is_too_large_is_read_over_the_link_if_that_is_allowed(self):
        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("wide", torch.empty((3, PAGE), dtype=torch.uint8))

            def forward(self, row):
                return self.wide[row][PAGE - 1].tolist()

        raw = b"".join(bytes(PAGE - 1) + bytes([row + 5]) for row in range(3))
        path = write_model(self.folder / "wide.safetensors", {"wide": ("U8", (3, PAGE), raw)})
        for host_mapped in (False, True):
            module = Wide()
            options = {"headroom": 0, "page_size": PAGE, "threads": False, "budget": PAGE}
            driver = f"sim:capacity=64M,bandwidth={10**12 - 2 - host_mapped}"
            vbar.torch.stream(module, path, driver=driver, host_mapped=host_mapped, **options)
            streaming = module._vbar_streaming
            torch._dense.sim = Sim(streaming.device)
            self.addCleanup(torch._dense.sim.close)
            if host_mapped:
                self.assertEqual([module(row) for row in range(3)], [[5], [6], [7]])
            else:
                self.refused("TOO_LARGE", module, 1, kind=WeightOffloaded)
            self.check_no_pins(streaming)
            self.assertEqual(torch._dense.sim.violations(), 0)

    def test_gradients_are_refused(self):
        module = self.built()
        self.stream(module, stack_tensors())
        x = torch.tensor([1.0] * WIDTH, device="cuda").requires_grad_()
        self.refused("inference only", module.block0, x)
        self.refused("inference only", torch._dense.linear, x, module.block0.up.weight)
        with torch.no_grad():
            module.block0(x)

    # Patches.

    def test_scenario_43_a_patch_is_applied_exactly_once_for_each_fill(self):
        applied = []

        def lora(tensor):
            applied.append(tensor.tolist())
            tensor.add_(1.0)

        module = self.built()
        streaming = self.stream(module, stack_tensors(), patch={"block1.scale": lora})
        wanted, file = [each + 1 for each in numbers(WIDTH, 31)], numbers(WIDTH, 31)
        for fills in range(1, 4):
            for _ in range(3):
                module(self.indexes)
                self.assertEqual(module.block1.scale.tolist(), wanted)
            # Every time on the file's bytes.
            self.assertEqual(applied, [file] * fills)
            self.evict()
        self.check_no_pins(streaming)
        expected = ordinary(stack_tensors())
        expected.block1.scale.copy_(torch.tensor(wanted))
        found = expected.to("cuda")(self.indexes).tolist()
        self.assertEqual(module(self.indexes).tolist(), found)

    def test_scenario_43_a_patch_that_fails_is_no_fill(self):
        fail = [True]

        def lora(tensor):
            tensor.add_(1.0)
            if fail[0]:
                raise ValueError("in the middle of a patch")

        module = self.built()
        streaming = self.stream(module, stack_tensors(), patch={"block1.scale": lora})
        for _ in range(3):
            with self.assertRaises(ValueError):
                module(self.indexes)
            self.check_no_pins(streaming)
        fail[0] = False
        module(self.indexes)
        wanted = [each + 1 for each in numbers(WIDTH, 31)]
        self.assertEqual(module.block1.scale.tolist(), wanted)

    def test_scenario_43_another_patch_is_another_fill(self):
        module = self.built()
        streaming = self.stream(module, stack_tensors(), patch={"head.weight": None})
        file = numbers(8 * WIDTH, 1)
        self.assertEqual(module.embedding.weight.tolist(), file)
        streaming.repatch({"embedding.weight": lambda tensor: tensor * 2})
        self.assertEqual(module.head.weight.tolist(), [2 * each for each in file])
        streaming.repatch({"head.weight": None})
        self.assertEqual(module.head.weight.tolist(), file)
        wrong = vbar.InvalidArgument
        self.refused("name it there", streaming.repatch, {"block0.scale": None}, kind=wrong)
        self.refused("no tensor", streaming.repatch, {"block9.scale": None}, kind=wrong)

    # Before and after.

    def test_what_does_not_fit_together_changes_nothing(self):
        tensors = stack_tensors()
        module = self.built()
        before = as_ordinary(module)
        missing = {name: each for name, each in tensors.items() if name != "block1.scale"}
        shape = {**tensors, "block1.scale": told((2, 2), 1)}
        other = {"no.such": told((2,), 1)}
        cases = [(missing, "block1.scale is on meta"), (shape, "[2, 2] in the file and [4]")]
        for wrong, words in [*cases, (other, "embedding.weight is on meta")]:
            self.refused(words, self.stream, module, wrong)
            self.assertEqual(as_ordinary(module), before)
        self.refused("none of the module's", self.stream, Stack(), other)
        wrong = vbar.InvalidArgument
        for more in ({"dtypes": "any"}, {"budget": "1M"}, {"patch": {"no": None}}):
            self.refused("", self.stream, module, tensors, kind=wrong, **more)
        self.assertEqual(as_ordinary(module), before)
        self.assertNotIn("forward", module.block0.__dict__)
        self.stream(module, tensors)
        self.refused("streamed already", self.stream, module, tensors)
        self.refused("streamed already", self.stream, module.block0, tensors)

    def test_unstream_puts_ordinary_tensors_back(self):
        module, tensors = Stack(), stack_tensors()
        self.stream(module, tensors, patch={"block0.scale": lambda tensor: tensor * 1})
        kept = module.block0.scale
        vbar.torch.unstream(module, "cuda")
        self.assertIs(type(module.block0.scale), torch.nn.Parameter)
        self.assertTrue(module.block0.scale.requires_grad)
        self.assertIs(module.head.weight, module.embedding.weight)
        self.assertNotIn("forward", module.block0.__dict__)
        self.assertFalse([key for key in module.__dict__ if "vbar" in key])
        with torch.no_grad():
            self.check_same(module, tensors)
        self.refused("unstreamed", kept.tolist)
        self.refused("not streamed", vbar.torch.unstream, module)
        gc.collect()
        self.assertEqual(self.device.statistics().bar_count, 0)

    def test_an_empty_model_has_no_parameters_but_all_its_buffers(self):
        outside = torch.nn.Parameter
        with vbar.torch.empty_model():
            module = Stack()
            shared = outside(torch.empty((2,)))
            module.one, module.other = shared, shared
            with vbar.torch.empty_model():
                module.inner = Block()
        self.assertEqual({each.device.type for each in module.parameters()}, {"meta"})
        self.assertIs(module.one, module.other)
        self.assertEqual(module.block0.constant.tolist(), [1.0] * WIDTH)
        self.assertEqual(Block().scale.device.type, "cpu")

    def test_the_device_is_opened_with_the_budget(self):
        path = write_model(self.folder / "model.safetensors", stack_tensors())
        options = {"headroom": 0, "page_size": PAGE, "threads": False}
        driver = f"sim:capacity=64M,bandwidth={10**12 - 1}"
        module = self.built()
        streaming = vbar.torch.stream(module, path, "8M", driver=driver, **options)
        self.assertEqual(streaming.device.budget, 8 * MIB)
        torch._dense.sim = Sim(streaming.device)
        self.addCleanup(torch._dense.sim.close)
        self.check_same(module, stack_tensors())
        vbar.torch.unstream(module)


if __name__ == "__main__":
    unittest.main()
