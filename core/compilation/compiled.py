"""``opgraft.compile``: a model as one graph with a dynamic batch, lowered to the kernels that its ops are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opgraft.binding.arguments import expect_module
from opgraft.compilation.backends import backend_of
from opgraft.compilation.capture import DYNAMO, WAYS, Example, capture
from opgraft.compilation.code import Code, generate
from opgraft.compilation.inputs import InputCheck, Signature
from opgraft.compilation.verification import expect_alike, of_size
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
        sizes: by size of the batch, the code of those sizes that have their own.
        decision: how it was captured, what its nodes were lowered to, and by whom.
    """

    def __init__(
        self, model: nn.Module, signature: Signature, code: Code, sizes: Mapping[int, Code], decision: Decision
    ) -> None:
        self.model = model
        self.graph, self.passes = code.graph, code.passes
        self.sizes = sizes
        self.decision = decision
        self._signature = signature
        self._check = InputCheck(signature.expected)
        self._code = code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model does.

        Raises:
            CompilationError: called otherwise than by the example, but for the dynamic sizes, or under autocast.
        """
        return self._signature.out_spec.unflatten(self._computed(self._signature.tensors(args, kwargs)))

    def verify(self, example: Example) -> None:
        """Compare the code with the model for a batch of one, and for the sizes that have code of their own.

        Raises:
            CompilationError: they differ.
        """
        signature, flat = self._signature, self._signature.flat(example.args, example.kwargs)

        def eager(tensors: list[Tensor]) -> list[Any]:
            args, kwargs = signature.filled(flat, tensors)
            with torch.no_grad():
                found: list[Any] = signature.out_spec.flatten_up_to(self.model(*args, **kwargs))
            return found

        for size in sorted({1, *self.sizes}):
            cut = of_size([flat[place] for place in signature.inputs], signature.expected, size)
            if cut is not None:
                expect_alike(self.model, eager, self._computed, cut, size)

    def _computed(self, tensors: list[Tensor]) -> list[Any]:
        self._check.check(tensors)
        code = self.sizes.get(self._check.size_of(tensors) or 0, self._code) if self.sizes else self._code
        code.expect_unmoved(self.model)
        with torch.no_grad():
            return list(code.run(*(x if x.is_contiguous() else x.contiguous() for x in tensors)))


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
        config: over the settings that hold here. Where nothing sets ``level`` or ``mode``, the level is 2.
        args: an example of what the model is called with by position, of two rows or more.
        kwargs: the same by name. What is no tensor is a constant of the graph.
        dynamic_shapes: the sizes that may vary, as ``torch.export.export`` takes them; the first one of each tensor, a
            batch that they have in common, if not given.

    Returns:
        A ``Compiled``, to be called as the model is. Under the mode ``NONE`` the model itself, under
        ``STOCK_TORCH_COMPILE`` what ``torch.compile`` makes of it.

    Raises:
        ConfigError: there is no such backend or pass, or settings contradict each other.
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
    with (
        set_config(OpgraftConfig(compilation_config=config or CompilationConfig()), origin="opgraft.compile"),
        set_config(host_state().settings().compiling(), origin="the default of opgraft.compile"),
    ):
        return _compiled(model, Example(args, kwargs or {}, dynamic_shapes))


def _compiled(model: nn.Module, example: Example) -> Any:
    settings = host_state().settings().config.compilation_config
    settings.expect_followed()
    if settings.mode is CompilationMode.NONE:
        return model
    if settings.mode is CompilationMode.STOCK_TORCH_COMPILE:
        backend = settings.backend or "inductor"
        backend_of(backend)
        return torch.compile(model, backend=backend, dynamic=True)
    compiled = _built(model, example, settings)
    compiled.verify(example)
    return compiled


def _built(model: nn.Module, example: Example, settings: CompilationConfig) -> Compiled:
    """Capture a model, and generate code for any size and for each of ``compile_sizes``."""
    ways = WAYS if settings.mode is CompilationMode.FULL else (DYNAMO,)
    captured = capture(model, example, ways)
    code = generate(model, captured, settings)
    sizes = {}
    for size in settings.compile_sizes:
        sized = capture(model, _of_size(model, example, captured.signature, size), ways)
        sizes[size] = generate(model, sized, settings, size)
    setting, backend = "compilation_config.backend", settings.backend
    reason = "one graph for any size, in which each op runs the kernel that it is bound to"
    by, subject = Candidate(str(backend), True, setting), f"compilation of {type(model).__name__}"
    decision = Decision(subject, backend, reason, (by,), setting, (captured.decision, *code.lowerings))
    return Compiled(model, captured.signature, code, sizes, decision)


def _of_size(model: nn.Module, example: Example, signature: Signature, size: int) -> Example:
    """Return an example of one size of the batch, and of no other.

    Raises:
        ConfigError: the graph has not exactly one dynamic size.
    """
    dynamic = sorted({name for each in signature.expected for name in each.dynamic.values()})
    if len(dynamic) != 1:
        raise ConfigError(
            f"compilation_config.compile_sizes is set, and the graph of {type(model).__name__} has "
            f"{', '.join(dynamic) or 'none'} for dynamic sizes, where one is expected: leave it out"
        )
    flat = signature.flat(example.args, example.kwargs)
    cut = of_size([flat[place] for place in signature.inputs], signature.expected, size)
    args, kwargs = signature.filled(flat, cut or ())
    return Example(args, kwargs, ())
