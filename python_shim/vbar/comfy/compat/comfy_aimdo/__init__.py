"""The package that ComfyUI imports by this name, with vbar underneath.

A regular package, so that it is found before one without an ``__init__``, wherever that is. Only
``vbar.comfy`` puts its folder on the path.
"""
