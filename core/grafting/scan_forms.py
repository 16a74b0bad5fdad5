"""A form of calls in mixers: the op, the call of the op, and the trials of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from opgraft.binding.custom_op import CustomOp
from torch import Tensor

Options: TypeAlias = Mapping[str, Any]


class Random:
    """Draws tensors of a dtype. Two objects of the same dtype draw the same tensors.

    Args:
        dtype: of a model's tokens; weights of the state space are float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def weights(self, *shape: int) -> Tensor:
        """Draw in float32."""
        return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=self._generator)

    def tokens(self, *shape: int) -> Tensor:
        """Draw in the dtype of tokens."""
        return self.weights(*shape).to(self._dtype)


Arguments: TypeAlias = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True)
class ScanForm:
    """The computation of functions of one kind.

    Attributes:
        op_name: name of the op.
        hint: a part of the function's names in models.
        op: the class of the op.
        settings: returns arguments for ``op``, from the attributes of a mixer.
        call: calls the op with the arguments of the function.
        arguments: draws the arguments of a call.
        options: name of an option → the values to try.
        optional: names of optional arguments.
        native_gains: the native definition is faster than the functions of models, too.
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

    def trials(self, function: Callable[..., Any]) -> list[Options]:
        """Return every combination of options for ``function``.

        An option with the name of an optional argument is True if the call gives the argument. It
        is always True if ``function`` requires the argument, and never if ``function`` lacks the
        argument. Otherwise both are tried.
        """
        parameters = inspect.signature(function).parameters
        choices = dict(self.options)

        for name in self.optional:
            parameter = parameters.get(name)
            if parameter is None:
                choices[name] = (False,)
            elif parameter.default is parameter.empty:
                choices[name] = (True,)
            else:
                choices[name] = (False, True)

        return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]

    def draw(self, dtype: torch.dtype, options: Options, batch: int, tokens: int) -> Arguments:
        """Draw the arguments of a call, the same ones each time."""
        args, kwargs = self.arguments(Random(dtype), options, batch, tokens)
        # Drawn first and left out then, so that further arguments are the same with any options.
        given = {name: value for name, value in kwargs.items() if options.get(name) is not False}
        return args, given

    def native(self, options: Options) -> Any:
        """Return the native definition with these options, whatever kernels are bound here."""
        return _Native(self.op, self.settings(options))


class _Native:
    """The native definition of an op, with the ``activation`` of the op as an attribute."""

    def __init__(self, cls: Any, settings: dict[str, Any]) -> None:
        self.activation = settings.get("activation")
        self._op = cls(**settings)
        self._forward = cls.forward_native

    def __call__(self, *args: Any) -> Any:
        return self._forward(self._op, *args)
