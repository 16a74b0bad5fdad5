"""``OpSpec``: the reference of an op, apart from its native definition, and inputs for checks."""

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
"""Absolute and relative tolerance for a reference in float64, by the dtype of the input."""

HALF_NORM: Mapping[torch.dtype, Tolerance] = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (1e-2, 1.6e-2),
}
"""Tolerances in half types for ops with several roundings, such as norms."""


class Layout(enum.Enum):
    """The layout of a tensor in memory. All memory between the elements is NaN."""

    PACKED = "contiguous"
    ELEMENTS = "a gap behind each element"
    ROWS = "packed rows that are parts of longer ones"
    SWAPPED = "the first two of three dimensions or more the other way round"

    def place(self, values: Tensor) -> Tensor:
        """Return ``values`` in this layout; contiguous if they have too few dimensions."""
        *lead, size = values.shape
        if self is Layout.ELEMENTS:
            view = values.new_full((*lead, 3 * size), math.nan)[..., 1::3]
        elif self is Layout.ROWS:
            view = values.new_full((*lead, size + 5), math.nan)[..., 2 : size + 2]
        elif self is Layout.SWAPPED and len(lead) > 1:
            swapped = values.transpose(0, 1)
            memory = torch.empty_like(swapped, memory_format=torch.contiguous_format)
            view = memory.transpose(0, 1)
        else:
            return values
        return view.copy_(values)


class Draw:
    """Random tensors of one dtype, the same for the same seed.

    Attributes:
        dtype: the dtype of tensors with normally distributed values.
        layout: the layout of these tensors in memory.
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
    """The implementation of another project.

    Attributes:
        name: the documented name, such as ``torch.nn.functional.gelu``.
        call: takes the arguments of the form, by name. Returns ``None`` for arguments without a
            counterpart in the other project.
    """

    name: str
    call: Callable[..., Any]


def of_transformers(name: str, call: Callable[..., Any]) -> Outside:
    """Return an implementation of transformers, imported with the first call.

    So the import of a spec works without transformers.

    Args:
        name: the dotted name below ``transformers``.
        call: gets the imported object, then the arguments of the form by name.
    """
    module, _, attribute = f"transformers.{name}".rpartition(".")

    def import_and_call(**arguments: Any) -> Any:
        implementation = getattr(importlib.import_module(module), attribute)
        return call(implementation, **arguments)

    return Outside(f"{module}.{attribute}", import_and_call)


@dataclass(frozen=True)
class OpSpec:
    """The proof of a functional form.

    Attributes:
        functional: the functional form, with its native definition and its fake rule.
        inputs: takes a source of random tensors, leading dimensions and a size; returns arguments
            by name.
        reference: written without a look at the native definition. Takes the arguments with
            floating-point tensors in float64. For an in-place form, returns the expected values of
            the mutated arguments.
        module: takes the arguments; returns an op, and the arguments of a call with the same
            result, by position or by name. ``None`` for forms without a module.
        variants: settings by the name of a variant. They replace arguments of ``inputs``. A
            function among them is called as ``inputs`` is, for the argument.
        leads: leading dimensions of small inputs; the second must have no zero.
        sizes: the sizes for ``leads``.
        large: pairs of leading dimensions and size of realistic inputs.
        dtypes: the dtypes of the inputs.
        tolerances: tolerances other than ``TOLERANCES``. With one for ``float4_e2m1fn_x2``, results
            in ``uint8`` are compared as such numbers.
        outside: implementations of other projects.
        differentiable: gradients are defined.
        flops: floating-point operations of a call with the arguments.
        device: a ``torch.device`` type: the device of arguments, and of a module's own tensors.
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
        """Return absolute and relative tolerance for inputs of ``dtype``."""
        return {**TOLERANCES, **self.tolerances}[dtype]

    def arguments(
        self,
        variant: str,
        dtype: torch.dtype,
        lead: Sequence[int],
        size: int,
        layout: Layout = Layout.PACKED,
    ) -> Arguments:
        """Draw fresh arguments. Equal parameters draw equal values."""
        draw = Draw((self.functional.name, variant, tuple(lead), size), dtype, layout)
        arguments = self.inputs(draw, lead, size)
        for name, value in self.variants[variant].items():
            arguments[name] = value(draw, lead, size) if callable(value) else value
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = placed(value, self.device)
        return arguments

    def traffic(self, arguments: Arguments) -> int:
        """Count the fewest bytes to move by a call: one read per argument, one write per result."""
        taken = [value for value in arguments.values() if isinstance(value, Tensor)]
        made = tensors(self.functional.fake(**arguments))
        if not made:
            made = [arguments[name] for name in self.functional.mutates]
        return sum(x.numel() * x.element_size() for x in (*taken, *made))


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result: one, several or none."""
    if isinstance(result, Tensor):
        return [result]
    return [value for value in result or () if isinstance(value, Tensor)]


def placed(x: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, with equal strides and equal memory between the elements."""
    if x.device.type == device:
        return x
    elements = x.untyped_storage().nbytes() // x.itemsize
    # The whole memory moves: a copy of the tensor alone would lose the gaps.
    whole = x.as_strided((elements,), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def in_float64(arguments: Arguments) -> Arguments:
    """Return the arguments in the memory of the host, floating-point tensors in float64."""
    wide = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            dtype = torch.float64 if value.is_floating_point() else value.dtype
            value = value.to(HOST, dtype)
        wide[name] = value
    return wide


def with_parameters(op: nn.Module, **parameters: Tensor | None) -> nn.Module:
    """Put tensors into the parameters and buffers of an op, and return the op.

    A parameter keeps its attributes, such as the loader. ``None`` changes nothing.
    """
    for name, value in parameters.items():
        if value is None:
            continue
        if name not in op._parameters:
            op._buffers[name] = value
            continue
        own = op._parameters[name]
        parameter = nn.Parameter(value)
        if own is not None:
            parameter.__dict__.update(vars(own))
        op._parameters[name] = parameter
    return op
