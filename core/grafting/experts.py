"""Recognises experts whose weights stand in two parameters, as those of transformers' models.

Which experts compute depends on the values of their input, which no trace follows. So they are recognised by running
them on random tokens, with small random weights of the same layout, in each precision.
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
_OF_WEIGHTS = ("create_weights", "process_weights_after_loading")


class _Sizes(NamedTuple):
    experts: int
    hidden: int
    intermediate: int

    def small(self) -> _Sizes:
        """Return small sizes of which those are equal that are equal here, rows of gate and up among them."""
        intermediate = 24
        hidden = {self.intermediate: intermediate, 2 * self.intermediate: 2 * intermediate}.get(
            self.hidden, 16
        )
        of_others = {
            self.hidden: hidden,
            self.intermediate: intermediate,
            2 * self.intermediate: 2 * intermediate,
        }
        return _Sizes(of_others.get(self.experts, 3), hidden, intermediate)

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that a module may keep of them."""
        return *self, 2 * self.intermediate


class _Layout(NamedTuple):
    """The sizes of experts, and whether the last two dimensions of their weights are exchanged."""

    sizes: _Sizes
    transposed: bool


def experts_adapter() -> Adapter:
    """Return the row, which remembers what it ran: use it for one walk over a model."""
    return Adapter("experts", Experts, partial(_experts, once_per_kind(_activation_of, _kind_of)))


def _experts(
    activation_of: Callable[[nn.Module], str | None], module: nn.Module
) -> Mapping[str, Any] | None:
    """Return the arguments for ``Experts`` if a module computes them.

    Raises:
        LeaveAlone: it has such parameters and computes something else, or other code has a part in it.
    """
    layout = _layout_of(module)
    if layout is None:
        return None
    _check_implementation(module)
    check_interface(type(module))
    _check_method()
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
    """Find the activation with which the functional form computes what a module of a known layout does."""
    act, layout = module._modules.get(_ACTIVATION), _layout_of(module)
    candidates = [each for each in ACTIVATIONS if act is None or each == epilogue_of(act)]
    return next((each for each in candidates if layout and _computes(module, layout, each)), None)


def _kind_of(module: nn.Module) -> Hashable:
    """Tell modules apart by what they have, but their activations by what these compute."""
    alone = copy.copy(module)
    alone.__dict__["_modules"] = {}
    act = module._modules.get(_ACTIVATION)
    return kind_of(alone), type(act), epilogue_of(act)


def _layout_of(module: nn.Module) -> _Layout | None:
    """Read the layout off the shapes of the parameters, ``None`` if they are not those of experts."""
    held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    children = {name for name, child in module._modules.items() if child is not None}
    if (
        held.keys() not in ({*_WEIGHTS}, {*_WEIGHTS, *_BIASES})
        or children - {_ACTIVATION}
        or module._buffers
    ):
        return None
    up, down = (held[name].shape for name in _WEIGHTS)
    if len(up) != 3 or len(down) != 3:
        return None
    for transposed in (False, True):
        rows, hidden = (up[2], up[1]) if transposed else (up[1], up[2])
        expected = (up[0], rows // 2, hidden) if transposed else (up[0], hidden, rows // 2)
        if tuple(down) == expected and rows % 2 == 0:
            return _Layout(_Sizes(up[0], hidden, rows // 2), transposed)
    return None


def _check_implementation(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` where experts are spread over ranks, or where other code has registered their function."""
    if getattr(module, "_is_expert_parallel", False):
        raise LeaveAlone("its experts are spread over ranks")
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    registry = getattr(sys.modules.get("transformers.integrations.moe"), _REGISTRY, {})
    function = registry.get(name)
    if function is not None and function.__module__.partition(".")[0] != "transformers":
        raise LeaveAlone(f"other code has registered its experts implementation {name!r}")


def _check_method() -> None:
    """Raise ``LeaveAlone`` where the weight method that is active may look for weights that a model does not have."""
    method = maybe_get_oot_by_class(UnquantizedFusedMoEMethod)
    own = [
        name
        for name in _OF_WEIGHTS
        if getattr(method, name) is not getattr(UnquantizedFusedMoEMethod, name)
    ]
    if own:
        raise LeaveAlone(
            f"{method.__qualname__} defines {own[0]}, and may keep weights in a form of its own"
        )


class _Trial(NamedTuple):
    """Random tokens: how many, experts of each, and the size of elements, large enough for limits to be reached."""

    dtype: torch.dtype
    tokens: int = 5
    top_k: int = 2
    scale: float = 3


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
    """Return whether a module computes on random tokens what the functional form does, in training too."""
    generator = torch.Generator().manual_seed(0)
    return all(
        _agrees(
            _small(module, layout.sizes, trial.dtype, generator, training),
            trial,
            layout,
            activation,
            generator,
        )
        for training, trial in product((False, True), _TRIALS)
    )


def _small(
    module: nn.Module, sizes: _Sizes, dtype: torch.dtype, generator: torch.Generator, training: bool
) -> nn.Module:
    """Copy a module with random weights of small sizes, and those sizes where it has the true ones as attributes."""
    smaller = dict(zip(sizes.numbers(), sizes.small().numbers(), strict=True))
    twin = detached(module)
    held = vars(twin)
    held.update(
        {k: smaller[v] for k, v in held.items() if type(v) is int and v in smaller},
        training=training,
    )
    held["_parameters"] = {
        name: tensor
        if tensor is None
        else _random(generator, dtype, *(smaller[size] for size in tensor.shape)) / 2
        for name, tensor in module._parameters.items()
    }
    return twin


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu", dtype=torch.float32, generator=generator).to(dtype)


def _agrees(
    module: nn.Module, trial: _Trial, layout: _Layout, activation: str, generator: torch.Generator
) -> bool:
    weights = [module._parameters[name] for name in _WEIGHTS]
    w13, w2 = (
        weight.mT if layout.transposed else weight for weight in weights if weight is not None
    )
    biases = [module._parameters.get(name) for name in _BIASES]
    x = _random(generator, w13.dtype, trial.tokens, w13.shape[2]) * trial.scale
    shares, ids = torch.rand(trial.tokens, len(w13), generator=generator).topk(trial.top_k)
    before = detached(module)
    try:
        with torch.no_grad():
            found = module(x.clone(), ids.clone(), shares.to(w13.dtype))
    except Exception:  # whatever code of the model's author raises
        return w13.dtype is torch.float64  # which kernels that models are made for may not take
    wanted = fused_experts.native(x, w13, w2, shares, ids, activation, *biases)
    tolerance = 0.05 if w13.dtype in (torch.bfloat16, torch.float16) else 1e-5
    alike = isinstance(found, Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    scale = float(wanted.abs().max())
    return (
        alike
        and not changed_attribute(module, before)
        and bool(((found - wanted).abs() <= tolerance * scale).all())
    )
