"""Every function of the ABI with NULL, garbage ids and sizes near 2^64, through ctypes.

The process must survive and every call must come back with a status. Pointers are NULL or good: to
point anywhere is the caller's doing in C too.
"""

import ctypes
import itertools
import unittest

import vbar
from support import PAGE, Case, check_program, open_device, pattern
from vbar import _abi

IDS = (0, 1, 2**64 - 1, 0xDEADBEEF, 1 << 60, 1 << 63 | 1)
NUMBERS = (0, 1, PAGE, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**64 - PAGE)

#: What has no status: texts, the destructor of capsules, and the raising of a flag.
NO_STATUS = {
    "vbar_abi_version",
    "vbar_version",
    "vbar_status_text",
    "vbar_last_message",
    "vbar_dlpack_capsule_destructor",
    "vbar_flag_raise",
}
#: What garbage turns on or off for the tests behind it.
LATER = {"vbar_log_set_level", "vbar_thread_set_wait_check", "vbar_dlpack_set_capsule_functions"}


def garbage(kind):
    """Values for an argument: of pointers NULL, and one that is good."""
    if kind is ctypes.c_char_p:
        return [None, b"", b"\xff\xfe", b"no such thing"]
    if kind is ctypes.c_void_p:
        return [None]
    if hasattr(kind, "contents"):
        # Zeros: a struct that grows says a size of 0 then. Room for any count that is tried.
        room = ctypes.create_string_buffer(1 << 16)
        return [None, ctypes.cast(room, kind)]
    if kind is ctypes.c_size_t:
        # Counts of what a pointer has room for, or that nothing has room for; or streams.
        return [0, 1, 2, 2**63, 2**64 - 1]
    bits = 8 * ctypes.sizeof(kind)
    values = {number % (1 << bits) for number in (*NUMBERS, *IDS)}
    return [kind(value).value for value in sorted(values)]


class Garbage(Case):
    def check_survives(self, name):
        kinds = _abi.FUNCTIONS[name][1]
        function = getattr(vbar.load(), name)
        choices = [garbage(kind) for kind in kinds]
        statuses = set()
        # All of the first two arguments with each other, the rest one at a time.
        for values in self.some(choices):
            status = function(*values)
            self.assertIn(status, range(23), (name, values))
            statuses.add(status)
            if status:
                self.assertTrue(vbar.load().vbar_last_message(), (name, values))
        return statuses

    def some(self, choices):
        for pair in itertools.product(*choices[:2]):
            yield [*pair, *(values[-1] for values in choices[2:])]
            yield [*pair, *(values[0] for values in choices[2:])]
        for at, values in enumerate(choices):
            for value in values:
                for others in (0, -1):
                    rest = [other[others] for other in choices]
                    yield [*rest[:at], value, *rest[at + 1 :]]

    def test_every_function_survives_what_is_no_id(self):
        refused = {}
        for name in sorted(set(_abi.FUNCTIONS) - NO_STATUS - LATER):
            if name in ("vbar_device_open", "vbar_log_poll"):
                continue
            with self.subTest(name):
                refused[name] = self.check_survives(name)
        # Of no tokens at all, each was given back.
        refused["vbar_tokens_unpin"].discard(0)
        for name, statuses in refused.items():
            # No garbage id names anything.
            self.assertNotIn(0, statuses, name)

    def test_every_function_survives_numbers_of_its_own_kind(self):
        path = self.model_of({"a": ("U8", (64,), pattern(64))})
        with open_device(budget=2 * PAGE) as device, device.open_model(path) as model:
            bar = device.create_bar(4 * PAGE)
            weight = bar.allocate(64)
            handles = {
                "vbar_device": device._id,
                "vbar_stream": device._id,
                "vbar_bar": bar._id,
                "vbar_allocation": weight._id,
                "vbar_model": model._id,
            }
            ends = {"vbar_device_close", "vbar_bar_destroy", "vbar_bar_destroy_wait"}
            ends |= {"vbar_model_close", "vbar_device_open"}
            for name in sorted(set(_abi.FUNCTIONS) - NO_STATUS - LATER - ends):
                handle = handles.get("_".join(name.split("_")[:2]))
                if handle is None or "descriptor" in name:
                    continue
                with self.subTest(name):
                    kinds = _abi.FUNCTIONS[name][1]
                    choices = [[handle], *(garbage(kind) for kind in kinds[1:])]
                    for values in self.some(choices):
                        # Streams are the driver's: it may not be given a pointer to anywhere.
                        values = [
                            value if kind is not _abi.Stream else 0
                            for kind, value in zip(kinds, values)
                        ]
                        fault = getattr(vbar.load(), name)
                        self.assertIn(fault(*values), range(23), (name, values))
            # It all still works.
            device.budget = None
            device.headroom = 0
            bar.prioritise()
            with model.fault("a") as bytes:
                self.assertTrue(bytes)

    def test_devices_are_opened_with_garbage(self):
        library, device = vbar.load(), _abi.Device()
        fields = [name for name, *_ in _abi.DeviceOptions._fields_]
        for field in set(fields) - {"size", "driver", "context"}:
            for number in NUMBERS:
                size, driver = ctypes.sizeof(_abi.DeviceOptions), b"sim:capacity=32M"
                options = _abi.DeviceOptions(size=size, driver=driver, headroom_bytes=1)
                setattr(options, field, number)
                status = library.vbar_device_open(options, device)
                self.assertIn(status, range(23), (field, number))
                if status == 0:
                    self.assertEqual(library.vbar_device_close(device), 0)
        for size in (0, 1, 7, 1 << 17, 2**64 - 1):
            options = _abi.DeviceOptions(size=size, driver=b"sim")
            self.assertEqual(library.vbar_device_open(options, device), 1)
        wrong = (b"", b"sim:x", b"sim:capacity=-1", b"\xff", b"cuda:x", b"x" * 10000)
        for driver in wrong:
            options = _abi.DeviceOptions(size=ctypes.sizeof(_abi.DeviceOptions), driver=driver)
            status = library.vbar_device_open(options, None)
            self.assertEqual(status, 1, driver)
        self.assertEqual(library.vbar_device_open(None, None), 1)

    def test_messages_and_checks_survive_garbage(self):
        program = """
            import ctypes, vbar
            library = vbar.load()
            for level in range(7):
                print(library.vbar_log_set_level(level), end=" ")
            level, length = ctypes.c_uint32(), ctypes.c_size_t()
            room = ctypes.create_string_buffer(8)
            print(library.vbar_log_poll(None, 0, None, None), end=" ")
            print(library.vbar_log_poll(None, 8, level, length), end=" ")
            print(library.vbar_log_poll(room, 0, level, length), end=" ")
            print(library.vbar_log_poll(room, 8, level, length), end=" ")
            print(library.vbar_thread_set_wait_check(None, None), end=" ")
            print(library.vbar_dlpack_set_capsule_functions(*[None] * 4), end=" ")
            library.vbar_dlpack_capsule_destructor(None)
            for status in (-2**31, -1, 0, 1, 99, 2**31 - 1):
                assert library.vbar_status_text(status)
        """
        self.assertEqual(check_program(self, program), "0 0 0 0 0 0 1 1 1 1 0 0 1 ")

    def test_tokens_are_given_back_once_whoever_tries(self):
        with open_device() as device:
            bar, library = device.create_bar(PAGE), vbar.load()
            guard = bar.fault(0, 64)
            token = guard._token
            self.assertEqual(library.vbar_token_unpin(token, 0), 0)
            for other in (token, token + 1, token - 1, token ^ 1 << 40, device._id, bar._id):
                self.assertEqual(library.vbar_token_unpin(other, 0), vbar.StaleToken.status)
            with self.assertRaises(vbar.StaleToken):
                guard.close()
            self.assertEqual(bar.residency()[0].pin_count, 0)


if __name__ == "__main__":
    unittest.main()
