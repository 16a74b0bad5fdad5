"""``OpSpec``: what an op must compute, told without its native definition, and on which inputs that is checked."""

from __future__ import annotations

import enum
import importlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from opgraft.binding.functional import Functional
from opgraft.platform import HOST
from torch import Tensor, nn

Tolerance = tuple[float, float]
Arguments = dict[str, Any]

TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: (1e-8, 1e-8),
    torch.float32: (1e-5, 1.3e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-3, 1.6e-2),
}
"""Absolute and relative tolerance against a reference in float64, by the dtype of the input."""

HALF_NORM: Mapping[torch.dtype, Tolerance] = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (1e-2, 1.6e-2),
}
"""The tolerances in half types of norms and other ops that round more than once."""


class Layout(enum.Enum):
    """The way in which a tensor lies in memory; whatever lies between its elements is NaN."""

    PACKED = "contiguous"
    ELEMENTS = "a gap behind each element"
    ROWS = "packed rows that are parts of longer ones"
    SWAPPED = "the first two of three dimensions or more the other way round"

    def place(self, values: Tensor) -> Tensor:
        """Lay ``values`` out as a view of that layout; contiguous where they have too few dimensions for it."""
        *lead, size = values.shape
        if self is Layout.ELEMENTS:
            view = values.new_full((*lead, 3 * size), math.nan)[..., 1::3]
        elif self is Layout.ROWS:
            view = values.new_full((*lead, size + 5), math.nan)[..., 2 : size + 2]
        elif self is Layout.SWAPPED and len(lead) > 1:
            view = torch.empty_like(
                values.transpose(0, 1), memory_format=torch.contiguous_format
            ).transpose(0, 1)
        else:
            return values
        return view.copy_(values)


class Draw:
    """Random tensors of one dtype, the same for the same seed.

    Attributes:
        dtype: of the tensors with normally distributed values.
        layout: how those lie in memory.
    """

    def __init__(self, seed: object, dtype: torch.dtype, layout: Layout = Layout.PACKED) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
        self.dtype = dtype
        self.layout = layout

    def __call__(self, *shape: int) -> Tensor:
        """Draw normally distributed values."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)
        return self.layout.place(values)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Draw integers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, tuple(shape), generator=self.generator)


@dataclass(frozen=True)
class Outside:
    """Another project's implementation of the same.

    Attributes:
        name: as documentation calls it, such as ``torch.nn.functional.gelu``.
        call: takes the arguments of the form, by name; ``None`` where it does not do what they ask for.
    """

    name: str
    call: Callable[..., Any]


def of_transformers(name: str, call: Callable[..., Any]) -> Outside:
    """Compare with what is called ``name`` below ``transformers``, which ``call`` gets before the arguments.

    It is imported when it is called: specs are there without transformers.
    """
    module, _, attribute = f"transformers.{name}".rpartition(".")

    def imported(**arguments: Any) -> Any:
        return call(getattr(importlib.import_module(module), attribute), **arguments)

    return Outside(f"{module}.{attribute}", imported)


@dataclass(frozen=True)
class OpSpec:
    """The proof that goes with a functional form.

    Attributes:
        functional: the functional form, with its native definition and its fake rule.
        inputs: arguments by name, from a source of random tensors, leading dimensions and a size.
        reference: written without a look at the native definition; takes the arguments with floating-point tensors in
            float64. For an in-place variant it returns what is expected in the arguments that it mutates.
        module: takes the arguments and returns an op and what to call it with, by position or by name, for the same
            result; ``None`` for forms that no module stands for.
        variants: by name, settings that take the place of those in ``inputs``; a function is called as ``inputs`` is.
        leads: leading dimensions of small inputs, the second without a zero; ``sizes`` what goes with them.
        large: pairs of leading dimensions and size of realistic inputs.
        dtypes: of the inputs.
        tolerances: where they differ from ``TOLERANCES``; with one for ``float4_e2m1fn_x2``, results in ``uint8`` are
            such numbers, and compared as that.
        outside: implementations by others.
        differentiable: whether gradients are defined.
        flops: floating-point operations of a call with the arguments.
        device: where arguments are handed over, and modules hold what they do not get; a ``torch.device`` type.
    """

    functional: Functional[..., Any]
    inputs: Callable[[Draw, Sequence[int], int], Arguments]
    reference: Callable[..., Any]
    flops: Callable[..., int]
    module: Callable[..., tuple[nn.Module, tuple[Any, ...] | Arguments]] | None = None
    variants: Mapping[str, Arguments] = field(default_factory=lambda: {"": {}})
    leads: tuple[tuple[int, ...], ...] = ((1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0))
    sizes: tuple[int, ...] = (1, 9, 769)
    large: tuple[tuple[tuple[int, ...], int], ...] = (((83,), 5125), ((2048,), 512))
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    outside: tuple[Outside, ...] = ()
    differentiable: bool = True
    device: str = HOST

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Give absolute and relative tolerance for inputs of ``dtype``."""
        return {**TOLERANCES, **self.tolerances}[dtype]

    def arguments(
        self,
        variant: str,
        dtype: torch.dtype,
        lead: Sequence[int],
        size: int,
        layout: Layout = Layout.PACKED,
    ) -> Arguments:
        """Draw fresh arguments, the same for the same question."""
        draw = Draw((self.functional.name, variant, tuple(lead), size), dtype, layout)
        arguments = self.inputs(draw, lead, size)
        for name, value in self.variants[variant].items():
            arguments[name] = value(draw, lead, size) if callable(value) else value
        return {
            name: placed(v, self.device) if isinstance(v, Tensor) else v
            for name, v in arguments.items()
        }

    def traffic(self, arguments: Arguments) -> int:
        """Count the bytes that a call must move at least: each tensor taken is read once, each result written once."""
        taken = [value for value in arguments.values() if isinstance(value, Tensor)]
        made = tensors(self.functional.fake(**arguments)) or [
            arguments[name] for name in self.functional.mutates
        ]
        return sum(t.numel() * t.element_size() for t in (*taken, *made))


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result: one, several or none."""
    if isinstance(result, Tensor):
        return [result]
    return [value for value in result or () if isinstance(value, Tensor)]


def placed(x: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, with its strides and all that lies between its elements."""
    if x.device.type == device:
        return x
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def in_float64(arguments: Arguments) -> Arguments:
    """Return the arguments in the memory of the host, floating-point tensors in float64."""
    return {
        name: _wide(value) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def _wide(x: Tensor) -> Tensor:
    return x.to(HOST, torch.float64) if x.is_floating_point() else x.to(HOST)


def with_parameters(op: nn.Module, **parameters: Tensor | None) -> nn.Module:
    """Return ``op`` with these tensors in its parameters, which keep their loaders, and buffers; ``None`` is let be."""
    for name, value in parameters.items():
        if value is not None:
            if name in op._parameters:
                own = op._parameters[name]
                parameter = op._parameters[name] = nn.Parameter(value)
                parameter.__dict__.update({} if own is None else vars(own))
            else:
                op._buffers[name] = value
    return op
