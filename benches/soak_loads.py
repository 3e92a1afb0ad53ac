"""The loads of `soak.py` that need no PyTorch: weights on a simulated device, and another program
that takes memory of a real one; and what all loads in Python share.

A load is a process (or, in C, a thread of one) that does what the lines say which it reads, and
answers each but ``go`` with a line of JSON; soak.c tells what they are. Between ``stop`` and the
next ``go`` it does nothing, so that what is counted then can be compared with what others count.
"""

import collections
import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import struct
import sys
import threading
import time
import traceback

import vbar
import vbar.sim

MIB = 1 << 20
#: Pressure and other programs explain these; with any other reason a load ends.
PRESSURE = {
    vbar.Reason.TOO_LARGE,
    vbar.Reason.BUDGET,
    vbar.Reason.ALL_PINNED,
    vbar.Reason.ABOVE_WATERMARK,
    vbar.Reason.DRIVER_MEMORY,
    vbar.Reason.FENCE_UNKNOWN,
    vbar.Reason.FENCE_PENDING,
}


def write_model(path, sizes, seed):
    """Writes a safetensors file of random bytes: tensors ``t0``, ``t1``... of these sizes."""
    header, end, dice = {}, 0, random.Random(seed)
    for at, size in enumerate(sizes):
        offsets, end = [end, end + size], end + size
        header[f"t{at}"] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in sizes:
            for begin in range(0, size, 16 * MIB):
                file.write(dice.randbytes(min(16 * MIB, size - begin)))
    return str(path)


class Load:
    """What lines ask for, and what is counted.

    ``options`` is a dictionary: ``inject`` says which mistake is made on purpose, ``thread`` has
    the arguments of a load in C that runs beside this one, as a thread.
    """

    #: The device that it works on, if it is one of the library's.
    device = None

    def __init__(self, options, source, target):
        self.options, self.source, self.target = options, source, target
        self.inject = options.get("inject")
        self.dice = random.Random(options.get("seed", 1))
        self.counts = dict.fromkeys(("rounds", "passes", "verified", "wrong", "refused",
                                     "interrupted"), 0)
        self.reasons = collections.Counter()
        self.first_wrong, self.leaked, self._armed, self._thread = "", [], False, None
        signal.signal(signal.SIGALRM, self._interrupt)

    # What a load is made of.

    def a_round(self):
        raise NotImplementedError

    def stop(self):
        """Waits for all of its work, and sets every knob back."""

    def bare(self):
        """Gives back all memory that can be given back."""

    def a_timed_pass(self):
        raise NotImplementedError

    def told(self):
        """What is sampled beside the counts."""
        return {}

    def close(self):
        """Lets go of everything."""

    # Lines.

    def serve(self):
        """Until the last line, or the end of the input: nobody is there any more."""
        self._start_thread()
        self._answer({"ready": True})
        while (line := self._line()) not in ("", "end"):
            verb, _, count = line.partition(" ")
            if verb == "go":
                self._go(int(count))
            elif verb == "stop":
                self.stop()
                self._answer({})
            elif verb == "bare":
                self.bare()
                self._answer({})
            elif verb == "most":
                self.most = int(count)
                self._answer({})
            elif verb == "time":
                self._answer({"seconds": self._seconds_of_a_pass()})
            elif verb == "sample":
                self._answer(self._sample())
            else:
                raise ValueError(line)
        self.close()
        if self._thread is not None:
            self._thread.join()
        self._answer({"ended": True})

    def _go(self, count):
        done = 0
        if self.device is not None:
            self.set_knobs_back()
        while done < count if count else not select.select([self.source], [], [], 0)[0]:
            self.counts["rounds"] += 1
            self.a_round()
            done += 1
            if self.inject == "bar" and self.device is not None:
                self.leaked.append(self.device.create_bar(8 * self.device.page_size))
            elif self.inject == "descriptor":
                os.dup(0)
            elif self.inject == "list":
                self.leaked.append(bytearray(b"x" * MIB))

    def _seconds_of_a_pass(self):
        """The least of three, behind two that bring everything to where it usually is."""
        seconds = []
        if self.device is not None:
            self.set_knobs_back()
        for _ in range(5):
            began = time.perf_counter()
            self.a_timed_pass()
            seconds.append(time.perf_counter() - began)
        return min(seconds[2:])

    def _sample(self):
        gc.collect()
        found = {**self.counts, "first_wrong": self.first_wrong, "reasons": self.reasons}
        if self.device is None:
            found.update(self.told())
        else:
            # Threads of the library may be at work: what is told by others is of the same moment
            # when the library's own number did not change meanwhile.
            for _ in range(100):
                before = self.device.statistics().used_bytes
                found.update(self.told())
                told = self.device.statistics()
                if before == told.used_bytes == found.get("live_bytes", before):
                    break
                time.sleep(0.005)
            found.update(
                used=told.used_bytes,
                budget=told.budget_bytes,
                quarantined=told.quarantined_bytes,
                bars=told.bar_count,
                closing=told.closing_bar_count,
                lingering=told.lingering_count,
                library_locked=told.locked_bytes,
                filled=told.filled_bytes,
                evicted=told.evicted_page_count,
            )
        found["blocks"] = sys.getallocatedblocks()
        return found

    def _line(self):
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.source, 1)
            if not byte:
                return ""
            line += byte
        return line.decode().strip()

    def _answer(self, told):
        data = json.dumps(told).encode() + b"\n"
        while data:
            data = data[os.write(self.target, data) :]

    def _start_thread(self):
        told = self.options.get("thread")
        if told is None:
            return
        # The same library as this package's: the object was linked to its file.
        shared = ctypes.CDLL(told["object"])
        given = [argument.encode() for argument in told["arguments"]]
        words = (ctypes.c_char_p * len(given))(*given)
        self._thread = threading.Thread(target=shared.soak_run, args=(len(given), words))
        self._thread.daemon = True
        self._thread.start()

    # Bytes, and Ctrl-C.

    def check(self, found, wanted, nbytes, what):
        """Counts bytes that were read, and whether they were right."""
        self.counts["verified"] += nbytes
        if found != wanted:
            self.counts["wrong"] += 1
            self.first_wrong = self.first_wrong or f"{what}, in round {self.counts['rounds']}"

    def refused(self, reason):
        if reason not in PRESSURE:
            raise RuntimeError(f"a fault is offloaded: {reason}")
        self.counts["refused"] += 1
        self.reasons[str(reason)] += 1

    def _interrupt(self, number, frame):
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def interrupted(self, work, seconds):
        """Does some work that an exception ends after some time, wherever it is then, as Ctrl-C
        does; whether it did.
        """
        before = self.counts["interrupted"]
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, seconds)
                work()
            finally:
                self._armed = False
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self.counts["interrupted"] > before

    def check_pins(self, bars):
        """Nothing may be pinned when nobody has a guard."""
        gc.collect()
        held = sum(page.pin_count for bar in bars for page in bar.residency())
        if held:
            raise RuntimeError(f"{held} pins are left")

    def turn_a_knob(self):
        """Budget, headroom, and memory given back."""
        device, budget = self.device, self.options["budget"]
        knob = self.dice.randrange(8)
        with contextlib.suppress(vbar.Cancelled):
            if knob == 0:
                device.budget = budget * self.dice.randint(5, 10) // 8
            elif knob == 1:
                device.headroom = self.options["headroom"] + self.dice.randrange(3) * MIB
            elif knob == 2:
                device.free_memory(self.dice.randrange(budget))
            elif knob == 3:
                device.free_memory()
            elif knob == 4:
                device.trim(self.dice.randrange(budget))
            elif knob == 5:
                device.trim_host(self.dice.randrange(budget))
            elif knob == 6:
                device.cancel_waits()
            else:
                device.refresh()

    def give_all_back(self):
        # So that threads of the library fetch nothing ahead, until the budget is set back.
        self.device.budget = self.options["page"]
        self.device.free_memory()
        self.device.trim()
        self.device.trim_host()

    def set_knobs_back(self):
        self.device.budget = self.options["budget"]
        self.device.headroom = self.options["headroom"]


class Weights(Load):
    """Three models in turn, and patched weights, on a simulated device whose kernels add up what
    they read.
    """

    def __init__(self, options, source, target):
        super().__init__(options, source, target)
        self.device = vbar.Device(
            options["driver"],
            budget=options["budget"],
            headroom=options["headroom"],
            page_size=options["page"],
            threads=True,
        )
        self.sim = vbar.sim.Sim(self.device)
        self.streams = [self.sim.stream() for _ in range(3)]
        self.paths = options["models"]
        self.models = [self.device.open_model(path) for path in self.paths]
        self.bytes = [self._bytes_of(model) for model in self.models]
        self.sums = [
            {name: self.sim.checksum(data) for name, data in each.items()} for each in self.bytes
        ]
        self._make_words()
        # A patch is added to the file's bytes when the weight is filled.
        self.patched = self.device.create_bar(4 * options["page"])
        self.weights = [self.patched.allocate(options["page"] * 3 // 4) for _ in range(4)]
        self.versions = [0] * 4

    @staticmethod
    def _bytes_of(model):
        found = {}
        for name, tensor in model.items():
            with open(tensor.path, "rb") as file:
                file.seek(tensor.file_offset)
                found[name] = file.read(tensor.nbytes)
        return found

    def _make_words(self):
        """Words on the device for what kernels add up; they stay."""
        self.words = self.device.create_bar(self.options["page"])
        self.words_guard = self.words.fault(0, 4096, stream=self.streams[0])

    def a_round(self):
        self._press()
        self.turn_a_knob()
        at = self.counts["rounds"] % 5
        if at == 0:
            self._live()
        # Now: a stream may be another one than before.
        stream = self.dice.choice(self.streams)
        if at == 1:
            self._patch(stream)
        elif at == 2:
            self._several(stream)
        elif at == 3:
            seconds = self.dice.uniform(0.0005, 0.02)
            self.interrupted(lambda: self._workflow(stream), seconds)
            self._synchronize()
            self.check_pins([*(model.bar for model in self.models), self.patched])
            return
        self._workflow(stream)

    def _press(self):
        if self.options["outside"]:
            self.sim.set_outside_bytes(self.dice.randrange(self.options["outside"]))

    def _workflow(self, stream):
        """As a program of three models has it: one, the second several times, the third."""
        for index in (0, 1, 1, 2):
            self._pass(index, stream)

    def _pass(self, index, stream):
        model, sums, launched = self.models[index], self.sums[index], []
        model.bar.prioritise()
        self.sim.write(self.words.address, bytes(8 * len(model)), stream)
        for at, name in enumerate(model):
            try:
                with model.fault(name, stream=stream) as weight:
                    if not weight:
                        self.refused(weight.reason)
                        continue
                    if self.inject == "byte" and self.dice.randrange(20) == 0:
                        place = weight.nbytes // 2
                        wrong = bytes([self.bytes[index][name][place] ^ 0x5A])
                        self.sim.write(weight.address + place, wrong, stream)
                    # It reads when the pins were given back long ago.
                    word, delay = self.words.address + 8 * at, self.dice.randrange(50)
                    self.sim.launch_checksum(weight.address, weight.nbytes, word, stream, delay)
                    launched.append((at, name))
            except vbar.Cancelled:
                self.counts["interrupted"] += 1
        found = struct.unpack(f"<{len(model)}Q",
                              self.sim.read(self.words.address, 8 * len(model), stream))
        for at, name in launched:
            self.check(found[at], sums[name], len(self.bytes[index][name]),
                       f"the checksum of {name} of model {index}")
        self.counts["passes"] += 1

    def _several(self, stream):
        """A tensor of each model at once, or none of them."""
        names = [self.dice.choice(list(model)) for model in self.models]
        ranges = [
            (model.bar, model[name].bar_offset, model[name].nbytes)
            for model, name in zip(self.models, names)
        ]
        try:
            with self.device.fault_many(ranges, stream=stream) as guards:
                if not guards:
                    return self.refused(guards.reason)
                for index, name in enumerate(names):
                    tensor = self.models[index][name]
                    found = self.sim.read(tensor.address, tensor.nbytes, stream)
                    self.check(found, self.bytes[index][name], tensor.nbytes, f"{name} of several")
        except vbar.Cancelled:
            self.counts["interrupted"] += 1

    def _patch(self, stream):
        """Weights that are filled and patched when they lost their bytes, or the patch changed."""
        self.patched.prioritise()
        for at, weight in enumerate(self.weights):
            if self.dice.randrange(3) == 0:
                weight.invalidate()
                self.versions[at] += 1
            wanted = struct.pack("<QQ", at, self.versions[at]) * (weight.nbytes // 16)
            try:
                with weight.fault(stream=stream, wait=True) as fault:
                    if isinstance(fault, vbar.Refill):
                        self.sim.write(fault.address, wanted, stream)
                        fault.commit()
                    if not fault:
                        self.refused(fault.reason)
                        continue
                    found = self.sim.read(weight.address, len(wanted), stream)
                    self.check(found, wanted, len(wanted), f"patched weight {at}")
            except vbar.Cancelled:
                self.counts["interrupted"] += 1

    def _live(self):
        """What comes and goes: a model, a VBAR, a stream, the device's other id."""
        at = self.dice.randrange(3)
        self._synchronize()
        self.models[at].close()
        self.models[at] = self.device.open_model(self.paths[at])
        bar = self.device.create_bar("1G")
        with contextlib.suppress(vbar.Cancelled):
            with bar.fault(0, MIB, stream=self.streams[0]) as guard:
                if not guard:
                    self.refused(guard.reason)
        bar.close()
        self.device.retire_stream(self.streams[1])
        self.streams[1].close()
        self.streams[1] = self.sim.stream()
        vbar.Device(self.options["driver"], page_size=self.options["page"], threads=None).close()

    def _synchronize(self):
        for stream in self.streams:
            stream.synchronize()

    def stop(self):
        self._synchronize()
        for stream in self.streams:
            for bar in (*(model.bar for model in self.models), self.patched):
                bar.end_of_run(stream)
        if self.options["outside"]:
            self.sim.set_outside_bytes(0)
        self.set_knobs_back()
        self.check_pins([*(model.bar for model in self.models), self.patched])

    def bare(self):
        self.give_all_back()

    def a_timed_pass(self):
        self._pass(0, self.streams[0])

    def told(self):
        live = self.sim.live()
        violations = self.sim.violations()
        return {
            "live_bytes": live.used_bytes,
            "reservations": live.reservation_count,
            "reserved": live.reserved_bytes,
            "mappings": live.mapping_count,
            "events": live.event_count,
            "streams": live.stream_count,
            "violations": len(violations),
            "first_violation": violations[0] if violations else "",
        }

    def close(self):
        self.words_guard.close()
        for model in self.models:
            model.close()
        self.patched.close()
        self.words.close()
        self.device.close()


class Neighbour(Load):
    """Another program: takes device memory as the driver gives it, and none of the library's.

    At first all but ``arena`` bytes; then pieces come and go at random, at a time as much as the
    line ``most`` has said, so that what is free is sometimes less than the headroom.
    """

    most = 0

    def __init__(self, options, source, target):
        from neighbours import Outsider

        super().__init__(options, source, target)
        self.outsider, self.pieces = Outsider(), []
        self.base = max(0, self.outsider.free_bytes() - options["arena"])
        self.base = self.outsider.take(self.base)
        self.kept = len(self.outsider.taken)
        self.nvml = Nvml.found()

    def a_round(self):
        time.sleep(self.dice.uniform(0.002, 0.15))
        if self.dice.randrange(12) == 0:
            return self.bare()
        room = self.most - sum(self.pieces)
        # The driver itself needs some for what it loads late.
        free = self.outsider.free_bytes() - 128 * MIB
        wanted = min(self.dice.randrange(max(room, 1)), free)
        if wanted > 32 * MIB:
            # Whole units of the driver's, so that what is taken is what is missing.
            taken = self.outsider.take(wanted // (2 * MIB) * (2 * MIB))
            if taken:
                self.pieces.append(taken)
        self.counts["passes"] += 1

    def bare(self):
        while len(self.outsider.taken) > self.kept:
            self.outsider._call("cuMemFree_v2", self.outsider.taken.pop())
        self.pieces.clear()

    def a_timed_pass(self):
        pass

    def told(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.outsider._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return {
            "free": free.value,
            "total": total.value,
            "taken": self.base + sum(self.pieces),
            "nvml": self.nvml and self.nvml.used_bytes(),
        }

    def close(self):
        self.bare()
        self.outsider.leave()


class Nvml:
    """What the management library says is in use, of the first device that is visible."""

    class _Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self, library):
        self.library, self.handle = library, ctypes.c_void_p()
        index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._call("nvmlInit_v2")
        if index.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", int(index), ctypes.byref(self.handle))
        else:
            self._call("nvmlDeviceGetHandleByUUID", index.encode(), ctypes.byref(self.handle))

    @classmethod
    def found(cls):
        """None where there is none, which the report says."""
        try:
            return cls(ctypes.CDLL("libnvidia-ml.so.1"))
        except (OSError, RuntimeError, AttributeError) as error:
            print(f"NVML: {error}", file=sys.stderr, flush=True)
            return None

    def _call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def used_bytes(self):
        memory = self._Memory()
        self._call("nvmlDeviceGetMemoryInfo", self.handle, ctypes.byref(memory))
        return memory.used


def main():
    """``soak_loads.py KIND OPTIONS SOURCE TARGET``: a load, its options as JSON, descriptors."""
    import faulthandler

    faulthandler.enable()
    kind, options, source, target = sys.argv[1:]
    kinds = {"weights": Weights, "neighbour": Neighbour}
    if kind == "torch":
        from soak_torch import Torch

        kinds[kind] = Torch
    load = None
    try:
        load = kinds[kind](json.loads(options), int(source), int(target))
        load.serve()
    except BaseException as error:
        traceback.print_exc()
        text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        os.write(int(target), text.encode() + b"\n")
        # What it holds may be what failed: nothing of it is taken down in an orderly way.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
