"""The forms of calls by which mixers convolve and scan: the op of each, how it is called, and what is tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from opgraft.binding.custom_op import CustomOp
from torch import Tensor, nn

Options: TypeAlias = Mapping[str, Any]


class Random:
    """Draws tensors of a dtype, always the same ones.

    Args:
        dtype: of what a model computes; weights of its state space are float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def weights(self, *shape: int) -> Tensor:
        """Draw in float32."""
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def tokens(self, *shape: int) -> Tensor:
        """Draw in the dtype."""
        return self.weights(*shape).to(self._dtype)


Arguments: TypeAlias = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """The computation of functions of one kind.

    Attributes:
        op_name: the op.
        hint: a part of the names that models have for the function.
        op: the class of the op.
        settings: what the op is made with, of what a mixer has.
        call: calls the op as the function is called.
        arguments: draws the arguments of a call.
        options: the options that are tried.
        optional: the arguments that calls may leave out.
        native_gains: the native definition too is faster than the functions of models.
    """

    op_name: str
    hint: str
    op: type[CustomOp]
    settings: Callable[[Options], dict[str, Any]]
    call: Callable[..., Any]
    arguments: Callable[[Random, Options, int, int], Arguments]
    options: Mapping[str, tuple[Any, ...]]
    optional: tuple[str, ...]
    native_gains: bool = False

    def make(self, module: nn.Module) -> CustomOp:
        """Construct the op for a mixer."""
        return self.op(**self.settings(vars(module)))

    def trials(self, function: Callable[..., Any]) -> list[Options]:
        """Return every combination of options, and under the name of each optional argument whether it is given.

        It is if ``function`` requires it, not if it has no such argument, and otherwise both.
        """
        parameters = inspect.signature(function).parameters
        choices = dict(self.options)
        for name in self.optional:
            parameter = parameters.get(name)
            optional = parameter is not None and parameter.default is not parameter.empty
            choices[name] = (False, True) if optional else (parameter is not None,)
        return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]

    def draw(self, dtype: torch.dtype, options: Options, batch: int, tokens: int) -> Arguments:
        """Draw the arguments of a call with such options, always the same ones."""
        args, kwargs = self.arguments(Random(dtype), options, batch, tokens)
        return args, {
            name: value for name, value in kwargs.items() if options.get(name) is not False
        }

    def native(self, options: Options) -> Any:
        """Return the native definition with such options, whatever kernels are bound here."""
        return _Native(self.op, self.settings(options))


class _Native:
    """An op as its native definition, with its settings as attributes."""

    def __init__(self, cls: Any, settings: dict[str, Any]) -> None:
        self.activation = settings.get("activation")
        self._op, self._forward = cls(**settings), cls.forward_native

    def __call__(self, *args: Any) -> Any:
        return self._forward(self._op, *args)
