"""Modules that a tree of ComfyUI imports and a Flux does not use, where they are not installed."""

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("PIL", "cv2", "scipy", "torchaudio", "torchvision")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not installed, as far as an import needs them. Last of all finders."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in ABSENT:
            return None
        if "." not in name:
            print(f"    {name} is not installed: it is made up", file=sys.stderr)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MadeUp(spec.name)

    def exec_module(self, module):
        pass


class MadeUp(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Whatever(name, (), {"__module__": self.__name__})


class Whatever(type):
    """A base class, the type of an annotation, a function: whatever it is, nobody may use it."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Whatever(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})

    def __call__(cls, *_, **__):
        if cls.__module__.split(".")[0] in ABSENT:
            raise RuntimeError(f"{cls.__module__}.{cls.__name__} is used, and is not installed")
        return super().__call__(*_, **__)
