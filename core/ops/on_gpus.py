"""Giving ops the kernels in Triton, which serve the GPUs of several vendors.

None has a backward: where a gradient is required, the native definition runs. Where Triton is not installed they are
not chosen, and the decision says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from opgraft.binding.marks import inference_only, needs
from opgraft.ops.on_triton import TRITON, triton_missing


def on_gpus(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a method that calls kernels in ``TRITON``."""
    return needs(triton_missing)(inference_only(forward))


def kernel_on_gpus(form: str, *attributes: str, argument: str = "x") -> Callable[..., Any]:
    """A method for an op of one tensor: the kernel of ``form`` with that tensor and then these attributes of the op.

    ``argument`` is what the op calls its tensor; replacements are checked against the signature that says so.
    """

    def forward(self: Any, *x: Any, **named_x: Any) -> Any:
        settings = [getattr(self, name) for name in attributes]
        return TRITON[form](*x, *named_x.values(), *settings)

    names = ("self", argument)
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    return on_gpus(forward)
