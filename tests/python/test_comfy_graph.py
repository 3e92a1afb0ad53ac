"""Memory graphs as clients of ComfyUI's package have them, on the simulated device: scopes, breaks,
what happens where they make no sense, and a sequence of calls with its bytes.

Each test is a process of its own: PyTorch's allocator is for ever. Needs ``c++`` for the stand-in.
"""

import pathlib
import textwrap
import unittest

from test_torch_install import Case, setUpModule, tearDownModule  # noqa: F401

TRACE = pathlib.Path(__file__).with_name("comfy_traces") / "graph.jsonl"

START = f"""
    import gc, json, logging, threading, types, weakref
    import torch, vbar, vbar.comfy, vbar.sim, vbar.torch
    from support import refused
    MIB = 1 << 20
    vbar.comfy.install(allocator=False)
    from comfy_aimdo import control, malloc_graph
    trace = {str(TRACE)!r}
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("vbar.comfy").addHandler(handler)
    logging.getLogger("vbar.comfy").setLevel(logging.INFO)

    def warned(words):
        levels = [level for level, text in said if words in text]
        said.clear()
        return levels == ["WARNING"]

    def take(nbytes):
        return torch.empty(nbytes, device="cuda")
"""

INSTALLED = textwrap.dedent(START) + """
vbar.torch.install(driver="sim:capacity=64M", page_size="2M", headroom=0, threads=False)
"""


class Graph(Case):
    def check(self, program, start=INSTALLED, **settings):
        return super().check(program, start, **settings)

    def test_a_repeated_scope_has_the_same_addresses_and_maps_nothing(self):
        self.check("""
            device = vbar.torch.device(0)
            sim = vbar.sim.Sim(device)
            graph = control.record(torch.cuda.current_stream())
            assert isinstance(graph, malloc_graph.MallocGraph)
            graph._comfy_active = True
            told = weakref.ref(graph)

            def step():
                held = [take(3 * MIB), take(700), take(100_000)]
                found = [tensor.data_ptr() for tensor in held]
                del held[1]
                found.append(take(5 * MIB).data_ptr())
                return found

            graph.push("sample")
            first = step()
            assert graph.iterate("sample") is False
            maps = sim.calls("cuMemMap")
            for _ in range(5):
                assert step() == first
                assert graph.iterate() is False
            assert sim.calls("cuMemMap") == maps > 0
            assert graph.pop() is False
            assert graph.peak_used == 8 * MIB + 100_352 and graph.rogue_count == 0
            assert graph.virtual_bytes == graph.physical_bytes >= graph.peak_used
            assert graph.physical_bytes <= torch.cuda.memory_reserved()
            step()
            assert said == [], said
            del graph
            assert told() is None
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0
            assert sim.violations() == []
        """)

    def test_a_sequence_of_calls(self):
        self.check("""
            device = vbar.torch.device(0)
            sim = vbar.sim.Sim(device)
            lines = [json.loads(line) for line in open(trace)][1:]
            graph = control.record(0)
            live, ways, kept = {}, {}, []
            outside = []

            def check(tensor, nbytes, seed):
                found = sim.read(tensor.data_ptr(), nbytes, 0)
                assert found == sim.pattern(nbytes, seed), "the bytes are another's"

            def fill(nbytes):
                tensor, seed = take(nbytes), len(kept) + len(outside) + len(live) + nbytes
                for other, size, _ in [*live.values(), *outside]:
                    begin, end = other.data_ptr(), other.data_ptr() + size
                    assert tensor.data_ptr() + nbytes <= begin or end <= tensor.data_ptr()
                sim.launch_pattern(tensor.data_ptr(), nbytes, seed, 0)
                return tensor, nbytes, seed

            def give(name):
                check(*live[name])
                del live[name]

            for number, (what, *words) in enumerate(lines, 2):
                place = f"line {number}: {what} {words}"
                if what == "way":
                    way, kept = words[0], []
                elif what == "take":
                    live[words[0]] = fill(words[1])
                    kept.append(live[words[0]][0].data_ptr())
                elif what == "give":
                    give(words[0])
                elif what == "outside":
                    used = graph.peak_used
                    outside.append(fill(words[0]))
                    assert graph.peak_used == used, place
                    if len(outside) > 20:
                        check(*outside.pop(0))
                elif what == "same":
                    assert ways.setdefault(way, kept) == kept, place
                elif what == "rogues":
                    assert graph.rogue_count == words[0], (place, graph.rogue_count)
                elif what == "iterate":
                    assert graph.iterate(words[0]) is words[1], place
                elif what == "pop":
                    assert graph.pop() in ({True, False} if words[0] is None else {words[0]}), place
                else:
                    getattr(graph, what)(*words)
            for tensor in outside:
                check(*tensor)
            assert said == [], said
            assert len(ways) == 2 and not live
            assert sim.violations() == []
        """)

    def test_what_makes_no_sense_is_told_and_raises_only_where_it_is_to(self):
        self.check("""
            graph, other = control.record(0), control.record(0)
            assert graph.pop() is True and warned("not begun")
            assert graph.iterate("step") is True and warned("outside a scope")
            graph.resume()
            graph.pause()
            graph.resume(sync=True)
            graph.push("step")
            # The thread has a graph: this one's scopes are none, and told as broken.
            other.push("step")
            assert warned("another graph")
            before = other.peak_used
            tensor = take(MIB)
            assert (other.peak_used, graph.rogue_count) == (before, 0)
            other.push()
            assert other.iterate("step") is True and other.pop() is True
            assert other.pop() is True
            del tensor
            assert graph.pop() is False
            other.push("step")
            assert other.pop() is False
            # A scope of another thread.
            graph.push("step")
            results = []
            thread = threading.Thread(target=lambda: results.append(graph.pop()))
            thread.start()
            thread.join()
            assert results == [True] and warned("on this thread")
            graph.use_stream("what")
            assert warned("is no stream")
            graph.push()
            graph.abort()
            assert graph.pop() is True and warned("not begun")
            strict = malloc_graph.record(0, assert_breaks=True)
            refused(RuntimeError, "aimdo memory compile error: a scope", strict.pop)
            graph.push("step")
            refused(RuntimeError, "aimdo memory compile error: scopes of another", strict.push)
            graph.pop()
            strict.push("step")
            assert strict.iterate("step") is False
            take(MIB)
            assert strict.iterate("step") is False
            take(2 * MIB)
            refused(RuntimeError, "compile error: a scope went another way", strict.pop)
            strict.push("step")
            assert strict.pop() is False
            refused(RuntimeError, "is no stream", malloc_graph.record, "what", True)
            assert malloc_graph.record("what").push() is None and warned("is no stream")
        """)

    def test_pauses_may_begin_and_end_outside_of_scopes(self):
        self.check("""
            graph = control.record(0)
            def served():
                before = graph.peak_used
                # More than ever before.
                served.size += MIB
                take(served.size)
                return graph.peak_used > before
            served.size = 0
            graph.pause(sync=True)
            graph.push("step")
            assert not served()
            graph.resume(sync=True)
            assert served()
            graph.pause()
            graph.pause()
            graph.pop()
            graph.push("step")
            assert not served()
            graph.resume()
            assert not served()
            graph.resume()
            assert served()
            graph.abort()
            graph.push("step")
            assert served()
            assert said == [], said
        """)

    def test_streams_are_taken_in_all_their_forms(self):
        self.check("""
            device = vbar.torch.device(0)
            sim = vbar.sim.Sim(device)
            side = sim.stream()
            as_torch = types.SimpleNamespace(cuda_stream=side.handle, device=torch.device("cuda:0"))
            graph = control.record(as_torch)
            graph.push("step")
            take(MIB)
            assert graph.peak_used == 0, "that was another stream"
            torch.cuda.set_stream(as_torch)
            take(MIB)
            assert graph.peak_used == MIB
            within = types.SimpleNamespace(stream=types.SimpleNamespace(cuda_stream=0))
            assert graph.use_stream(within) is within
            take(2 * MIB)
            assert graph.peak_used == MIB
            assert graph.use_stream(side.handle) == side.handle
            take(2 * MIB)
            assert graph.peak_used == 2 * MIB
            graph.pop()
            del graph
            assert said == [], said
            assert sim.violations() == []
        """)

    def test_tensors_outlive_their_graph_and_graphs_the_interpreter(self):
        self.check("""
            graph = control.record(0)
            graph.push("step")
            kept = take(3 * MIB)
            graph.pop()
            assert graph.rogue_count == 1
            del graph
            gc.collect()
            assert torch.cuda.memory_allocated() == 3 * MIB
            assert take(3 * MIB).data_ptr() != kept.data_ptr()
            del kept
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0
            # Dropped by the interpreter's exit, with an open scope and a tensor.
            left = control.record(0)
            left.push("step")
            left.itself = [left, take(MIB)]
            import sys
            sys.kept = left
        """)

    def test_out_of_memory_within_a_scope_is_pytorchs_error(self):
        self.check("""
            graph = control.record(0)
            graph.push("step")
            held = take(40 * MIB)
            refused(torch.OutOfMemoryError, "out of memory", take, 40 * MIB)
            del held
            assert take(60 * MIB).data_ptr()
            assert graph.pop() is True
            assert said == [], said
        """)

    def test_where_pytorch_allocates_by_itself_a_graph_does_nothing_and_says_so_once(self):
        self.check("""
            for _ in range(3):
                graph = control.record(0, True)
                graph._comfy_active = True
                graph.push("step")
                graph.push()
                assert graph.pop() is False
                graph.pause(sync=True)
                graph.resume(sync=True)
                assert graph.use_stream(5) == 5
                assert graph.iterate("step") is False
                assert graph.pop() is False
                told = graph.peak_used, graph.virtual_bytes, graph.physical_bytes
                assert (*told, graph.rogue_count) == (0, 0, 0, 0)
                graph.push()
                graph.abort()
            assert [level for level, text in said if "do nothing" in text] == ["INFO"], said
        """, start=START)


if __name__ == "__main__":
    unittest.main()
