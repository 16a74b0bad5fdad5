"""Dtypes, custom ops and seeds: ``vllm.utils.torch_utils``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import opgraft
import torch
from torch.library import Library

STR_DTYPE_TO_TORCH_DTYPE: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "float": torch.float32,
        "half": torch.float16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
        "fp8": torch.uint8,
        "fp8_e4m3": torch.uint8,
        "fp8_e5m2": torch.uint8,
        "int8": torch.int8,
    }
)
"""Name in the settings → dtype. A cache in 8 bits of floating point is kept as bytes."""


def get_dtype_size(dtype: torch.dtype) -> int:
    """Return the number of bytes of an element."""
    return dtype.itemsize


def _library() -> Any:
    return Library("vllm", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it so


vllm_lib = _library()


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Library | None = None,
    dispatch_key: str | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Make a function ``torch.ops.vllm.<op_name>``.

    The arguments are those of ``opgraft.direct_register_custom_op``.

    Raises:
        ConflictError: the name is taken.
        ValueError: torch cannot make a schema of the annotations.
    """
    # Each op has a library of its own: torch removes an op with its library.
    library = target_lib or _library()
    opgraft.direct_register_custom_op(
        op_name, op_func, mutates_args, fake_impl, library, dispatch_key, tags
    )


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block, let torch create tensors of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_random_seed(seed: int | None, data_parallel_index: int = 0) -> None:
    """Seed the random numbers of Python, NumPy, torch and all devices. None changes nothing.

    Each replica of data parallelism gets a seed of its own.
    """
    if seed is None:
        return
    if data_parallel_index:
        sequence = np.random.SeedSequence((seed, data_parallel_index))
        seed = int(sequence.generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # plugins draw from NumPy's global generator
    torch.manual_seed(seed)
    opgraft.current_platform().manual_seed(seed)
