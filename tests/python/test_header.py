"""``_abi*.py`` and the enumerations against the headers: sizes, offsets, numbers, signatures.

A C program that includes the header prints what the compiler makes of it; signatures are read from
the header's text.
"""

import ctypes
import enum
import inspect
import re
import subprocess
import unittest

import vbar
from support import ROOT, Case
from vbar import _abi, _abi_sim, _abi_torch, _errors

HEADER = (ROOT / "include/vbar.h").read_text() + (ROOT / "include/vbar_sim.h").read_text()

#: Our name of a struct, an enumeration or a number, by the header's.
STRUCTS = {
    name: value
    for name, value in {**vars(_abi), **vars(_abi_sim), **vars(_abi_torch)}.items()
    if inspect.isclass(value) and issubclass(value, ctypes.Structure)
}
ENUMS = {
    "VbarReason": vbar.Reason,
    "VbarShortfall": vbar.Shortfall,
    "VbarPageState": vbar.PageState,
    "VbarBudgetSource": vbar.BudgetSource,
    "VbarWaitKind": vbar.WaitKind,
    "VbarEviction": vbar.Eviction,
    "VbarContextWaits": vbar.ContextWaits,
    "VbarPrefer": vbar.Prefer,
    "VbarDtype": vbar.Dtype,
}
NUMBERS = {
    "VBAR_ABI_VERSION": _abi.ABI_VERSION,
    "VBAR_STREAM_NONE": _abi.STREAM_NONE,
    "VBAR_HEADROOM_NONE": _abi.HEADROOM_NONE,
    "VBAR_HOST_ALLOWANCE_NONE": _abi.HOST_ALLOWANCE_NONE,
    "VBAR_OUTCOME_RESIDENT": _abi.OUTCOME_RESIDENT,
    "VBAR_OUTCOME_REFILL": _abi.OUTCOME_REFILL,
    "VBAR_OUTCOME_OFFLOADED": _abi.OUTCOME_OFFLOADED,
    "VBAR_OUTCOME_BUSY": _abi.OUTCOME_BUSY,
    "VBAR_THREADS_DEFAULT": _abi.THREADS_DEFAULT,
    "VBAR_THREADS_ON": _abi.THREADS_ON,
    "VBAR_THREADS_OFF": _abi.THREADS_OFF,
    "VBAR_POISON_OFF": _abi.POISON_OFF,
    "VBAR_POISON_ON": _abi.POISON_ON,
    "VBAR_SCRUB_OFF": _abi.SCRUB_OFF,
    "VBAR_SCRUB_ON": _abi.SCRUB_ON,
    "VBAR_HOST_MAPPED_OFF": _abi.HOST_MAPPED_OFF,
    "VBAR_HOST_MAPPED_ON": _abi.HOST_MAPPED_ON,
    "VBAR_HOST_LOCK_EITHER": _abi.HOST_LOCK_EITHER,
    "VBAR_HOST_LOCK_REQUIRED": _abi.HOST_LOCK_REQUIRED,
    "VBAR_HELD_PINS_KEEP": _abi.HELD_PINS_KEEP,
    "VBAR_HELD_PINS_RELEASE": _abi.HELD_PINS_RELEASE,
    "VBAR_DLPACK_FORM_VERSIONED": _abi.DLPACK_VERSIONED,
    "VBAR_DLPACK_FORM_UNVERSIONED": _abi.DLPACK_UNVERSIONED,
    "VBAR_DLPACK_ACCESS_READ_ONLY": _abi.DLPACK_READ_ONLY,
    "VBAR_DLPACK_ACCESS_WRITABLE": _abi.DLPACK_WRITABLE,
    "VBAR_TORCH_RAISE_NOTHING": _abi_torch.RAISE_NOTHING,
    "VBAR_TORCH_RAISE_RUNTIME_ERROR": _abi_torch.RAISE_RUNTIME_ERROR,
    "VBAR_TORCH_RAISE_OUT_OF_MEMORY_ERROR": _abi_torch.RAISE_OUT_OF_MEMORY_ERROR,
    "VBAR_TORCH_BLOCK_STATE_ALLOCATED": _abi_torch.BLOCK_ALLOCATED,
    "VBAR_TORCH_BLOCK_STATE_AWAITING_FREE": _abi_torch.BLOCK_AWAITING_FREE,
    "VBAR_TORCH_BLOCK_STATE_FREE": _abi_torch.BLOCK_FREE,
    "VBAR_TORCH_GRAPH_STEP_ENTER": _abi_torch.GRAPH_STEP_ENTER,
    "VBAR_TORCH_GRAPH_STEP_LEAVE": _abi_torch.GRAPH_STEP_LEAVE,
    "VBAR_TORCH_GRAPH_STEP_NEXT": _abi_torch.GRAPH_STEP_NEXT,
    "VBAR_TORCH_GRAPH_STEP_PAUSE": _abi_torch.GRAPH_STEP_PAUSE,
    "VBAR_TORCH_GRAPH_STEP_RESUME": _abi_torch.GRAPH_STEP_RESUME,
    "VBAR_TORCH_GRAPH_STEP_ABORT": _abi_torch.GRAPH_STEP_ABORT,
}

#: What the header's types are in ctypes; of pointers, what they may be.
SCALARS = {
    "void": None,
    "void *": ctypes.c_void_p,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "VbarStatus": ctypes.c_int32,
    "VbarStream": ctypes.c_size_t,
    "VbarWaitCheck": ctypes.c_void_p,
    "VbarDevice": ctypes.c_uint64,
    "VbarBar": ctypes.c_uint64,
    "VbarAllocation": ctypes.c_uint64,
    "VbarModel": ctypes.c_uint64,
    "VbarToken": ctypes.c_uint64,
    "VbarSim": ctypes.c_uint64,
    "VbarSimGraph": ctypes.c_uint64,
}
FUNCTIONS = {**_abi.FUNCTIONS, **_abi_sim.FUNCTIONS, **_abi_torch.FUNCTIONS}
POINTEES = {
    "char": {ctypes.c_char_p},
    "void": {ctypes.c_void_p},
    "char *": {ctypes.POINTER(ctypes.c_char_p)},
    "void *": {ctypes.POINTER(ctypes.c_void_p)},
}


def declarations():
    """Of each function of the header its result and the types of its arguments."""
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    found = {}
    for result, name, arguments in re.findall(
        r"^(\w[\w ]*?[ *]+)(vbar_\w+)\(([^)]*)\);", text, flags=re.M
    ):
        listed = [argument.strip() for argument in arguments.split(",")]
        types = [re.sub(r"\w+$", "", one).strip() for one in listed if one != "void"]
        found[name] = (result.strip(), types)
    return found


def fitting(declared):
    """The ctypes that a type of the header may have here."""
    plain = re.sub(r"\b(const|struct)\b", "", declared).strip()
    if plain.endswith("*"):
        pointee = plain[:-1].strip()
        if pointee in POINTEES:
            return POINTEES[pointee]
        ours = STRUCTS.get(pointee.replace("Vbar", "", 1)) or SCALARS[pointee]
        return {ctypes.POINTER(ours)}
    # A struct by value.
    return {SCALARS[plain] if plain in SCALARS else STRUCTS[plain.replace("Vbar", "", 1)]}


class Header(Case):
    def told_by_c(self, expressions):
        """What a C compiler makes of expressions of the header."""
        prints = "".join(f'printf("%llu\\n", (unsigned long long)({e}));\n' for e in expressions)
        source, program = self.folder / "told.c", self.folder / "told"
        source.write_text(
            '#include "vbar.h"\n#include "vbar_sim.h"\n#include <stdio.h>\n#include <stddef.h>\n'
            f"int main(void) {{\n{prints}return 0;\n}}\n"
        )
        include = f"-I{ROOT / 'include'}"
        subprocess.run(["cc", "-std=c11", include, "-o", program, source], check=True)
        said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        return [int(line) for line in said.split()]

    def test_structs_have_the_layout_of_the_header(self):
        expressions, ours = [], []
        for name, struct in STRUCTS.items():
            expressions.append(f"sizeof(Vbar{name})")
            ours.append(ctypes.sizeof(struct))
            for field, *_ in struct._fields_:
                expressions.append(f"offsetof(Vbar{name}, {field})")
                expressions.append(f"sizeof(((Vbar{name} *)0)->{field})")
                place = getattr(struct, field)
                ours += [place.offset, place.size]
        told = self.told_by_c(expressions)
        self.assertEqual(dict(zip(expressions, ours)), dict(zip(expressions, told)))

    def test_structs_have_all_fields_of_the_header(self):
        for name, struct in STRUCTS.items():
            body = re.search(rf"typedef struct Vbar{name} \{{(.*?)\n\}} Vbar{name};", HEADER, re.S)
            text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
            fields = re.findall(r"(\w+)(?:\[\d+\])?;", text)
            self.assertEqual(fields, [field for field, *_ in struct._fields_], name)

    def test_numbers_are_those_of_the_header(self):
        expressions = list(NUMBERS)
        told = self.told_by_c(expressions)
        self.assertEqual(NUMBERS, dict(zip(expressions, told)))

    def test_enumerations_have_all_numbers_of_the_header(self):
        for name, ours in ENUMS.items():
            self.assertTrue(issubclass(ours, enum.IntEnum))
            body = re.search(rf"\nenum {name}\b.*?\{{(.*?)\n\}};", HEADER, re.S)
            text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
            prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_"
            declared = {
                label.replace(prefix, "", 1): int(number)
                for label, number in re.findall(r"(\w+) = (\d+)", text)
            }
            self.assertEqual(declared, {member.name: member.value for member in ours}, name)

    def test_every_status_has_an_exception(self):
        body = re.search(r"\nenum VbarStatus\b.*?\{(.*?)\n\};", HEADER, re.S)
        numbers = {int(number) for number in re.findall(r"VBAR_STATUS_\w+ = (\d+)", body[1])}
        self.assertEqual(numbers - {0}, set(_errors._BY_STATUS))
        for number, kind in _errors._BY_STATUS.items():
            self.assertIs(getattr(vbar, kind.__name__), kind)
            self.assertIsInstance(_errors.of_status(number, "text"), kind)
        unknown = _errors.of_status(99, "text")
        self.assertEqual((type(unknown), unknown.status), (vbar.Error, 99))

    def test_functions_have_the_signatures_of_the_header(self):
        declared = declarations()
        self.assertGreater(len(declared), 50)
        for name, (result, arguments) in FUNCTIONS.items():
            self.assertIn(name, declared)
            told_result, told_arguments = declared[name]
            if told_result == "const char *":
                self.assertIs(result, ctypes.c_char_p, name)
            else:
                self.assertIs(result, SCALARS[told_result], name)
            self.assertEqual(len(arguments), len(told_arguments), name)
            for ours, theirs in zip(arguments, told_arguments):
                self.assertIn(ours, fitting(theirs), f"{name}: {theirs}")

    def test_what_is_not_called_is_left_out_for_a_reason(self):
        left_out = {
            # Python fetches messages: no thread of the library waits for the interpreter.
            "vbar_log_set_callback",
            # Enumerations here have names themselves.
            "vbar_reason_text",
            "vbar_dtype_text",
            # Who captures does it with a library of their own, and tests that with a GPU.
            "vbar_sim_stream_begin_capture",
            "vbar_sim_stream_end_capture",
            "vbar_sim_graph_launch",
            "vbar_sim_graph_destroy",
        }
        self.assertEqual(set(declarations()) - set(FUNCTIONS), left_out)

    def test_texts_of_the_library_are_our_names(self):
        library = vbar.load()
        for function, members in (("reason", vbar.Reason), ("dtype", vbar.Dtype)):
            text_of = getattr(library, f"vbar_{function}_text")
            text_of.restype, text_of.argtypes = ctypes.c_char_p, [ctypes.c_uint32]
            for member in members:
                self.assertEqual(text_of(member).decode().lower(), str(member).lower())


if __name__ == "__main__":
    unittest.main()
