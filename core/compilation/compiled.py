"""``opgraft.compile``: a model as one graph with a dynamic batch, lowered to the kernels that its ops are bound to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from opgraft.binding.arguments import expect_module
from opgraft.compilation.backends import backend_of, built
from opgraft.compilation.capture import Captured, Example, capture
from opgraft.compilation.graph_pass import GraphPass
from opgraft.compilation.inputs import InputCheck
from opgraft.compilation.lowering import lower
from opgraft.compilation.manager import run_passes
from opgraft.compilation.nodes import PARTS
from opgraft.compilation.passes import passes_of
from opgraft.compilation.verification import expect_alike, of_size_one
from opgraft.config import CompilationConfig, CompilationMode, OpgraftConfig, set_config
from opgraft.decision import Candidate, Decision
from opgraft.errors import CompilationError, ConfigError
from opgraft.plugins.host import load_plugins
from opgraft.state import host_state
from torch import Tensor, nn


class Compiled:
    """A compiled model, called as the model is. It has no gradients.

    Attributes:
        model: whose parameters it computes with. Writes to them are seen as by the model itself.
        graph: what was captured, after all passes, with semantic nodes.
        passes: the record of each pass, in order.
        decision: how it was captured, what its nodes were lowered to, and by whom.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        backend: str,
        passes: Sequence[GraphPass] = (),
        dump: str | None = None,
    ) -> None:
        self.model = model
        self._captured = captured
        self._check = InputCheck(captured.module)
        self.graph = captured.module
        self.passes = run_passes(passes, self.graph, model, Path(dump) if dump else None)
        parameters = [part for node in self.graph.graph.nodes for part in node.meta.get(PARTS, ())]
        self._joint = [(parameter, parameter.data_ptr()) for parameter in parameters]
        lowered, parts = lower(captured.module)
        self._run = built(lowered, backend)
        reason = "one graph for any size, in which each op runs the kernel that it is bound to"
        by = Candidate(backend, True, "compilation_config.backend")
        setting = "compilation_config.backend"
        subject = f"compilation of {type(model).__name__}"
        self.decision = Decision(subject, backend, reason, (by,), setting, (captured.decision, *parts))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model does.

        Raises:
            CompilationError: called otherwise than by the example, but for the dynamic sizes, or under autocast.
        """
        return self._captured.out_spec.unflatten(self._computed(self._tensors(args, kwargs)))

    def verify_one(self, example: Example) -> None:
        """Compare the graph with the model where its first dynamic size is one, which compilers treat apart.

        Raises:
            CompilationError: they differ.
        """
        spec, inputs = self._captured.in_spec, self._captured.inputs
        flat = spec.flatten_up_to((example.args, dict(example.kwargs)))
        cut = of_size_one([flat[place] for place in inputs], self._check.expected)

        def eager(tensors: list[Tensor]) -> list[Any]:
            given = list(flat)
            for place, x in zip(inputs, tensors, strict=True):
                given[place] = x
            args, kwargs = spec.unflatten(given)
            with torch.no_grad():
                found: list[Any] = self._captured.out_spec.flatten_up_to(self.model(*args, **kwargs))
            return found

        if cut is not None:
            expect_alike(self.model, eager, self._computed, cut)

    def _computed(self, tensors: list[Tensor]) -> list[Any]:
        self._check.check(tensors)
        if any(parameter.data_ptr() != address for parameter, address in self._joint):
            raise CompilationError(
                f"weights of {type(self.model).__name__} that compiled code computes at once have moved in memory, "
                "as by .to() or .data: compile it anew"
            )
        with torch.no_grad():
            return list(self._run(*(x if x.is_contiguous() else x.contiguous() for x in tensors)))

    def _tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        captured = self._captured
        try:
            flat = captured.in_spec.flatten_up_to((args, dict(kwargs)))
        except ValueError as error:
            raise CompilationError(
                f"the compiled model was called with other arguments than its example had ({error}): pass the same ones"
            ) from error
        for place, value in captured.constants.items():
            if flat[place] is not value and flat[place] != value:
                raise CompilationError(
                    f"the compiled model was called with {flat[place]!r} where its example had {value!r}, which is a "
                    "constant of the graph: compile it anew for the other value"
                )
        return [flat[place] for place in captured.inputs]


def compile(
    model: nn.Module,
    config: CompilationConfig | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Compile a model for inference: one graph for any size of the batch, in which ops run their providers' kernels.

    Args:
        model: in evaluation mode; it stays what it is.
        config: over the settings that hold here. Where nothing sets ``mode``, it is ``FULL``.
        args: an example of what the model is called with by position, of two rows or more.
        kwargs: the same by name. What is no tensor is a constant of the graph.
        dynamic_shapes: the sizes that may vary, as ``torch.export.export`` takes them; the first one of each tensor, a
            batch that they have in common, if not given.

    Returns:
        A ``Compiled``, to be called as the model is. Under the mode ``NONE`` the model itself, under
        ``STOCK_TORCH_COMPILE`` what ``torch.compile`` makes of it.

    Raises:
        ConfigError: the mode has no compiler, or there is no such backend.
        CompilationError: the model cannot be captured or compiled, computes something else when compiled, or is in
            training mode.
    """
    expect_module("compile", model)
    if model.training:
        raise CompilationError(
            f"compile: {type(model).__name__} is in training mode, and compiled code has no gradients: call "
            "model.eval() first"
        )
    load_plugins()
    with set_config(OpgraftConfig(compilation_config=config or CompilationConfig()), origin="opgraft.compile"):
        unset = host_state().settings().origins["compilation_config.mode"] == "default"
        chosen = CompilationConfig(mode=CompilationMode.FULL) if unset else CompilationConfig()
        with set_config(OpgraftConfig(compilation_config=chosen), origin="the default of opgraft.compile"):
            return _compiled(model, Example(args, kwargs or {}, dynamic_shapes))


def _compiled(model: nn.Module, example: Example) -> Any:
    settings = host_state().settings().config.compilation_config
    backend = settings.backend or "inductor"
    if settings.mode == CompilationMode.NONE:
        return model
    if settings.mode == CompilationMode.STOCK_TORCH_COMPILE:
        backend_of(backend)
        return torch.compile(model, backend=backend, dynamic=True)
    if settings.mode != CompilationMode.FULL:
        raise ConfigError(
            f"compilation_config.mode is {settings.mode!s}, which has no compiler yet: set it to FULL, "
            "STOCK_TORCH_COMPILE or NONE"
        )
    passes = passes_of(settings.user_passes or ())
    compiled = Compiled(model, capture(model, example), backend, passes, settings.dump_graphs)
    compiled.verify_one(example)
    return compiled
