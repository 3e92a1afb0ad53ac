"""ComfyUI on vbar, unmodified: a package of the name that it imports, with vbar underneath.

    python -m vbar.comfy path/to/ComfyUI/main.py --listen     # ComfyUI's own arguments follow

or, in a program that imports ComfyUI itself, before it does and before the first use of CUDA::

    import vbar.comfy

    vbar.comfy.install()

From then on ``import comfy_aimdo`` finds the package in ``vbar/comfy/compat``, and PyTorch
allocates with vbar as :func:`vbar.torch.install` says, so that weights and activations share one
budget. A ``comfy_aimdo`` that is installed stays as it is and is found again by processes that do
not install this one.
"""

from __future__ import annotations

from ._install import InstallError, install, is_installed

__all__ = ["InstallError", "install", "is_installed"]
