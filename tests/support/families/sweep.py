"""One family: a tiny model, run plainly, grafted, differentiated and ungrafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.families.inputs import candidates
from support.families.registry import model_class
from support.families.shrink import WAYS, tiny
from torch import Tensor, nn

MOST_PARAMETERS = 60_000_000


class NotRun(Exception):  # noqa: N818  # a verdict that the table shows
    """A family whose tiny model cannot be built or run plainly; the message says why."""


def build(names: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of the first class that can be built and run, with its input.

    Raises:
        NotRun: there is none; the message is that of the first class, after the last way of shrinking it.
    """
    reasons = []
    for name in names[:3]:
        for way in WAYS:
            try:
                model = _model(name, way)
                return model, _runnable(model)
            except Exception as error:  # whatever a model raises whose sizes do not fit
                reasons.append(f"{name}: {type(error).__name__}: {_first_line(error)}")
    raise NotRun(reasons[0])


def _model(name: str, way: Any) -> nn.Module:
    cls = model_class(name)
    config = tiny(cls.config_class, way)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotRun(f"{size:,} parameters after shrinking")
    torch.manual_seed(0)
    model = cls(tiny(cls.config_class, way)).float().eval()
    generator = torch.Generator().manual_seed(2)
    for (
        parameter
    ) in model.parameters():  # norms and biases that start as ones and zeros would hide an error
        if parameter.dim() == 1 and parameter.is_floating_point():
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def _runnable(model: nn.Module) -> dict[str, Any]:
    reasons = []
    for arguments in candidates(model):
        try:
            if floats(forward(model, arguments)):
                return arguments
            reasons.append("it returns no floating-point tensor")
        except Exception as error:  # whatever a model raises for input of another kind
            reasons.append(f"{type(error).__name__}: {_first_line(error)}")
    raise NotRun(reasons[0] if reasons else "no input is known for it")


def forward(model: nn.Module, arguments: dict[str, Any], gradient: bool = False) -> Any:
    """What the model returns, with the same random numbers each time."""
    torch.manual_seed(3)
    with torch.set_grad_enabled(gradient):
        return model(**arguments)


def floats(result: Any) -> list[Tensor]:
    """Every floating-point tensor in what a model returns."""
    return [tensor for tensor in _tensors(result) if tensor.is_floating_point()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def gradients(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient of each parameter, of a sum over everything that the model returns."""
    model.zero_grad()
    outputs = [
        tensor
        for tensor in floats(forward(model, arguments, gradient=True))
        if tensor.requires_grad
    ]
    if outputs:
        sum(
            tensor[tensor.isfinite()].sin().mean() for tensor in outputs if tensor.numel()
        ).backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""
