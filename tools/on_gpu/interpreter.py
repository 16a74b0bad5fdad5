"""Triton's interpreter, corrected: it computes as the hardware does."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

IN_MEMORY = {
    "fp32": (torch.float32, torch.uint32),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp16": (torch.float16, torch.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "fp8e5": (torch.float8_e5m2, torch.uint8),
}
"""By Triton's names of dtypes torch's, and the integers of that size, as which the interpreter keeps some of them."""


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Round conversions as the hardware does: the interpreter's own truncate to bf16 and drop carries of the mantissa.

    Products of bf16 matrices are those of their numbers: the interpreter's own are those of their bits.
    """
    import numpy as np  # Triton's interpreter needs it, opgraft does not
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor
    takes_scope = len(inspect.signature(patch_tensor).parameters) > 1

    def convert(values: Any, taken: Any, made: Any, rounding: object) -> Any:
        (source, bits), (target, target_bits) = IN_MEMORY[taken.name], IN_MEMORY[made.name]
        given = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
        numbers = given.view(bits).view(source).to(target)
        return numbers.view(target_bits).numpy().reshape(values.shape)

    def in_float32(x: Any) -> Any:
        if x.dtype != tl.bfloat16:
            return x
        wide = convert(x.data, x.dtype, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def product(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(builder, in_float32(a), in_float32(b), *others)

    def with_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        # Triton 3.6 leaves this to numpy, which from 2.5 on converts no array of one element.
        scope[0].set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with (
        mock.patch.object(
            interpreter, "_patch_lang_tensor", with_index if takes_scope else patch_tensor
        ),
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", product),
        warnings.catch_warnings(),
    ):
        # numpy warns of what floating-point arithmetic does on purpose: exp overflows to infinity, 0 / 0 is NaN.
        warnings.filterwarnings(
            "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
        )
        yield
