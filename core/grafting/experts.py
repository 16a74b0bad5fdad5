"""Recognise experts with all weights in two parameters, such as those of transformers' models.

The values of the input choose the experts, and no trace follows such a choice. So experts are
recognised by trials on random tokens, with small random weights of the same layout, in each
precision.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from opgraft.grafting.interface import check_interface
from opgraft.grafting.side_effects import changed_attribute, detached
from opgraft.grafting.traced import kind_of, once_per_kind
from opgraft.ops import Experts, UnquantizedFusedMoEMethod, maybe_get_oot_by_class
from opgraft.ops.composites.composite import epilogue_of
from opgraft.ops.moe.fused.functional import ACTIVATIONS, fused_experts
from opgraft.registry.adapter import Adapter, LeaveAlone
from torch import Tensor, nn

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = tuple(f"{name}_bias" for name in _WEIGHTS)
_REGISTRY = "ALL_EXPERTS_FUNCTIONS"
_ACTIVATION = "act_fn"
_WEIGHT_HOOKS = ("create_weights", "process_weights_after_loading")

_SMALL_EXPERTS, _SMALL_HIDDEN, _SMALL_INTERMEDIATE = 3, 16, 24


class _Sizes(NamedTuple):
    experts: int
    hidden: int
    intermediate: int

    def small(self) -> _Sizes:
        """Return small sizes, equal to each other if the true sizes and rows are equal."""
        known = {
            self.intermediate: _SMALL_INTERMEDIATE,
            2 * self.intermediate: 2 * _SMALL_INTERMEDIATE,
        }
        hidden = known.get(self.hidden, _SMALL_HIDDEN)
        known.setdefault(self.hidden, hidden)
        experts = known.get(self.experts, _SMALL_EXPERTS)
        return _Sizes(experts, hidden, _SMALL_INTERMEDIATE)

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that a module may keep as attributes."""
        return *self, 2 * self.intermediate


class _Layout(NamedTuple):
    """The sizes of experts, and whether the last two dimensions of the weights are exchanged."""

    sizes: _Sizes
    transposed: bool


Recogniser = Callable[[nn.Module], Mapping[str, Any] | None]
"""Returns the arguments for ``Experts``, or ``None`` for a module of another kind."""


def experts_adapter() -> Adapter:
    """Return the row. The row keeps results of trials: use the row for one walk over a model."""
    return Adapter("experts", Experts, partial(_experts, experts_recogniser()))


def experts_recogniser() -> Recogniser:
    """Return a function that recognises experts, with results of trials for one model."""
    return partial(_arguments, once_per_kind(_activation_of, _kind_of))


def has_experts(module: nn.Module) -> bool:
    """Return True if the parameters of a module have the layout of experts."""
    return _layout_of(module) is not None


def _experts(recognise: Recogniser, module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments for ``Experts``, with the parameters of the module.

    Raises:
        LeaveAlone: as ``_arguments``; or the active weight method looks for other parameters.
    """
    # A layer of experts makes its own parameters. Here those of the module stay.
    if has_experts(module):
        _check_method()
    return recognise(module)


def _arguments(
    activation_of: Callable[[nn.Module], str | None], module: nn.Module
) -> Mapping[str, Any] | None:
    """Return the arguments for ``Experts`` if a module computes experts.

    Raises:
        LeaveAlone: the module has such parameters and computes something else, or other code takes
            part in the computation.
    """
    layout = _layout_of(module)
    if layout is None:
        return None

    _check_implementation(module)
    check_interface(type(module))
    activation = activation_of(module)
    if activation is None:
        raise LeaveAlone(
            f"it computes something else than fused_experts with {', '.join(ACTIVATIONS)}"
        )

    return {
        "num_experts": layout.sizes.experts,
        "hidden_size": layout.sizes.hidden,
        "intermediate_size": layout.sizes.intermediate,
        "activation": activation,
        "bias": module._parameters.get(_BIASES[0]) is not None,
        "transposed": layout.transposed,
        "act": module._modules.get(_ACTIVATION),
    }


def _activation_of(module: nn.Module) -> str | None:
    """Return the activation for which the functional form computes the same as a module."""
    layout = _layout_of(module)
    if layout is None:
        return None
    act = module._modules.get(_ACTIVATION)
    candidates = [each for each in ACTIVATIONS if act is None or each == epilogue_of(act)]
    return next((each for each in candidates if _computes(module, layout, each)), None)


def _kind_of(module: nn.Module) -> Hashable:
    """Return a different key for each kind of module and of activation."""
    alone = copy.copy(module)
    alone.__dict__["_modules"] = {}
    act = module._modules.get(_ACTIVATION)
    return kind_of(alone), type(act), epilogue_of(act)


def _layout_of(module: nn.Module) -> _Layout | None:
    """Read the layout off the shapes of the parameters; ``None`` for other modules."""
    held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if held.keys() not in ({*_WEIGHTS}, {*_WEIGHTS, *_BIASES}):
        return None

    children = {name for name, child in module._modules.items() if child is not None}
    if children - {_ACTIVATION} or module._buffers:
        return None

    up, down = (held[name].shape for name in _WEIGHTS)
    if len(up) != 3 or len(down) != 3:
        return None

    experts = up[0]
    for transposed in (False, True):
        hidden, rows = up[1:] if transposed else reversed(up[1:])
        # Gate and up have half of the rows each.
        intermediate = rows // 2
        expected = (intermediate, hidden) if transposed else (hidden, intermediate)
        if tuple(down) == (experts, *expected) and rows % 2 == 0:
            return _Layout(_Sizes(experts, hidden, intermediate), transposed)

    return None


def _check_implementation(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` if experts are spread over ranks, or computed by other code."""
    if getattr(module, "_is_expert_parallel", False):
        raise LeaveAlone("its experts are spread over ranks")
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    registry = getattr(sys.modules.get("transformers.integrations.moe"), _REGISTRY, {})
    function = registry.get(name)
    if function is not None and function.__module__.partition(".")[0] != "transformers":
        raise LeaveAlone(f"other code has registered its experts implementation {name!r}")


def _check_method() -> None:
    """Raise ``LeaveAlone`` if the active weight method may look for other weights."""
    method = maybe_get_oot_by_class(UnquantizedFusedMoEMethod)
    for name in _WEIGHT_HOOKS:
        if getattr(method, name) is not getattr(UnquantizedFusedMoEMethod, name):
            raise LeaveAlone(
                f"{method.__qualname__} defines {name}, and may keep weights in a form of its own"
            )


class _Trial(NamedTuple):
    """One call with random tokens.

    Attributes:
        dtype: of tokens and weights.
        tokens: number of tokens.
        top_k: experts of each token.
        scale: of the elements, large enough to reach the limits of an activation.
    """

    dtype: torch.dtype
    tokens: int = 5
    top_k: int = 2
    scale: float = 3

    def tolerance(self) -> float:
        return 0.05 if self.dtype in (torch.bfloat16, torch.float16) else 1e-5


_TRIALS = (
    _Trial(torch.float32),
    _Trial(torch.float32, tokens=1, top_k=1),
    _Trial(torch.float32, tokens=130),
    _Trial(torch.float32, scale=1e4),
    _Trial(torch.bfloat16),
    _Trial(torch.float16),
    _Trial(torch.float64),
)


def _computes(module: nn.Module, layout: _Layout, activation: str) -> bool:
    """Return True if a module agrees with the functional form on random tokens, in training too."""
    # A model that is built for a device has that device as the default one.
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        for training, trial in product((False, True), _TRIALS):
            small = _small(module, layout.sizes, trial.dtype, generator, training)
            if not _agrees(small, trial, layout, activation, generator):
                return False
    return True


def _small(
    module: nn.Module, sizes: _Sizes, dtype: torch.dtype, generator: torch.Generator, training: bool
) -> nn.Module:
    """Copy a module with small random weights, and with small sizes in place of the true ones."""
    # The true weights would take much memory in every dtype.
    smaller = dict(zip(sizes.numbers(), sizes.small().numbers(), strict=True))
    twin = detached(module)
    held = vars(twin)
    held["training"] = training

    for name, value in held.items():
        if type(value) is int and value in smaller:
            held[name] = smaller[value]

    parameters: dict[str, Tensor | None] = {}

    for name, tensor in module._parameters.items():
        parameters[name] = None
        if tensor is not None:
            shape = [smaller[size] for size in tensor.shape]
            parameters[name] = _random(generator, dtype, *shape) / 2

    held["_parameters"] = parameters
    return twin


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, generator=generator).to(dtype)


def _agrees(
    module: Any, trial: _Trial, layout: _Layout, activation: str, generator: torch.Generator
) -> bool:
    w13, w2 = (module._parameters[name] for name in _WEIGHTS)
    if layout.transposed:
        w13 = w13.mT
        w2 = w2.mT
    biases = [module._parameters.get(name) for name in _BIASES]

    experts, _, hidden = w13.shape
    x = _random(generator, w13.dtype, trial.tokens, hidden) * trial.scale
    scores = torch.rand(trial.tokens, experts, generator=generator)
    shares, ids = scores.topk(trial.top_k)
    before = detached(module)

    try:
        with torch.no_grad():
            # Copies, as a module may write to its arguments.
            result = module(x.clone(), ids.clone(), shares.to(w13.dtype))
    except Exception:  # code of the model's author may raise anything
        # Kernels for models need not take float64.
        return w13.dtype is torch.float64

    # Later calls of a module that has changed may return other values.
    if changed_attribute(module, before):
        return False
    expected = fused_experts.native(x, w13, w2, shares, ids, activation, *biases)
    return _is_near(result, expected, trial.tolerance())


def _is_near(result: Any, expected: Tensor, tolerance: float) -> bool:
    """Return True if a result has the form and, within the tolerance, the values."""
    if not isinstance(result, Tensor):
        return False
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return False
    difference = (result - expected).abs()
    most = tolerance * float(expected.abs().max())
    return bool((difference <= most).all())
