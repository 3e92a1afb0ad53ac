"""As torch.library: operations by their names, which are called as they are."""

import types

ops = types.SimpleNamespace()
#: By name: the schema, the tags, and what describes results.
defined = {}


class Library:
    def __init__(self, namespace, kind):
        assert kind == "FRAGMENT"
        self.namespace = namespace
        vars(ops).setdefault(namespace, types.SimpleNamespace())

    def define(self, schema, tags=()):
        name, _, rest = schema.partition("(")
        assert name not in defined, "an operation is defined once"
        defined[name] = {"schema": rest, "tags": tags}

    def impl(self, name, kernel, key):
        assert name in defined and key == "CompositeExplicitAutograd"
        setattr(vars(ops)[self.namespace], name, types.SimpleNamespace(default=kernel))


def register_fake(name, described, lib=None):
    namespace, _, name = name.partition("::")
    assert namespace == lib.namespace
    defined[name]["fake"] = described
