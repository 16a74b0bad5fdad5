"""opgraft's functional forms as torch ops.

vLLM's compiler sees one opaque node for each op. vLLM traces a model once and drops all guards, so
a kernel must not branch while it is traced. It branches when the node runs, for example on the
number of rows.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import opgraft
import torch
from opgraft import Provider
from opgraft.kernels import binding_of
from torch import Tensor

from opgraft_vllm.report import REPORT, Row

NAMESPACE = "opgraft_vllm"

# torch removes the ops with this object.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_chosen: dict[str, str] = {}
"""Form → the kernel that opgraft chose, with its provider."""


@functools.cache
def operator(form: Any) -> Callable[..., Any] | None:
    """Return a form as a torch op, or None if opgraft chose the native definition.

    opgraft chooses as always, by plugins, priorities, allow lists, lockfile and ``custom_ops``.
    """
    binding = binding_of(form)
    if binding.function(form.name) is None:
        return None
    row = noted(form.name, binding.kernel_name, binding.provider)

    @functools.wraps(form.native)
    def run(*args: Any, **kwargs: Any) -> Any:
        row.count()
        result = form(*args, **kwargs)
        # A compiler relies on the strides of the fake rule's result, which is contiguous.
        return result.contiguous() if isinstance(result, Tensor) else result

    # The annotations are strings, and torch cannot evaluate them in this module.
    signature = inspect.signature(form.native, eval_str=True)
    vars(run)["__signature__"] = signature
    opgraft.direct_register_custom_op(form.name, run, form.mutates, form.fake, _LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.opgraft_vllm, form.name).default
    return op


def noted(op: str, kernel: str, provider: Provider) -> Row:
    """Note a choice of opgraft, and return a row of the report for it."""
    _chosen[op] = f"{kernel} of {provider}"
    return REPORT.add(op=op, kernel=kernel, provider=str(provider), classes=[])


def digest() -> str:
    """Return a digest of the kernels that opgraft chose, for the keys of caches."""
    classes = sorted(name for row in REPORT.rows for name in row.told["classes"])
    told = [opgraft.__version__, version("opgraft-vllm"), sorted(_chosen.items()), classes]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
