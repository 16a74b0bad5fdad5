"""``torch.compile`` as it is; in strict mode, nothing is compiled anew after the warm-up."""

from __future__ import annotations

import re
import threading
from typing import Any, Final, Literal

import torch
from opgraft.base.text import printable
from opgraft.compat.graphs import FIXED_SIZES
from opgraft.compilation.example import Example
from opgraft.errors import RecompilationError
from opgraft.registry.state import host_state
from torch import nn

_STANCE: Final = "fail_on_recompile"
_GUARD = re.compile(r"^\s*- (\d+/\d+: .*?)\s*(?:#.*)?$", re.MULTILINE)
"""A failed guard in torch's message: the number of the graph, the condition, and its source."""


def compiled_by_torch(model: nn.Module, backend: str, example: Example) -> Any:
    """Return the result of ``torch.compile`` for a model; in strict mode, a ``CompiledForGood``."""
    compiled = torch.compile(model, backend=backend, dynamic=backend not in FIXED_SIZES)
    if not host_state().settings().config.strict:
        return compiled
    strictly = CompiledForGood(model, compiled)
    if example.args or example.kwargs:
        strictly(*example.args, **example.kwargs)
    return strictly


class CompiledForGood:
    """A model that only the first calls may compile, without gradients.

    Args:
        model: the model.
        compiled: the result of ``torch.compile``.
        first: the number of calls that may compile.
    """

    # The stance of torch about failed guards belongs to the process.
    _turn = threading.RLock()

    def __init__(self, model: nn.Module, compiled: Any, first: int = 1) -> None:
        self.model = model
        self._compiled = compiled
        self._missing = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result.

        Raises:
            RecompilationError: the call would compile the model anew.
        """
        stance: Literal["default", "fail_on_recompile"] = "default" if self._missing else _STANCE
        with self._turn, torch.no_grad(), torch.compiler.set_stance(stance):
            try:
                found = self._compiled(*args, **kwargs)
            except RuntimeError as error:
                if not self._missing and _STANCE in str(error):
                    raise _would_recompile(self.model, str(error)) from error
                raise
        self._missing = max(self._missing - 1, 0)
        return found


def _would_recompile(model: nn.Module, message: str) -> RecompilationError:
    guards = "; ".join(_GUARD.findall(message)) or message
    return RecompilationError(
        f"strict mode: {type(model).__name__} would be compiled anew after its warm-up, as this "
        f"guard fails: {printable(guards)}. Next: call it as in its warm-up; set "
        "compilation_config.mode to FULL, whose graph serves every size of the batch; or set "
        "OPGRAFT_STRICT=0, and torch.compile compiles it anew"
    )
