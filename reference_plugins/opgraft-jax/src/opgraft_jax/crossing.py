"""Tensors from torch to JAX and back, by DLPack.

Nothing is copied on the CPU where a tensor is contiguous and begins at an address that 64 divides, as those that torch
allocates do. Views with gaps are copied by torch, and what begins elsewhere by JAX. On another device every tensor is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from opgraft_jax.device import VARIABLE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that both have by default: JAX makes float32 of float64 and int32 of int64, which is no crossing."""


@functools.cache
def device() -> Any:
    """Return JAX's device of this process, initialised."""
    return jax.devices(os.environ.get(VARIABLE, "cpu"))[0]


def to_jax(x: Tensor) -> Any:
    """Hand a tensor of the host to JAX, which must not be written to before the result is there."""
    array = jax.dlpack.from_dlpack(x.detach().contiguous())
    return array if device().platform == "cpu" else jax.device_put(array, device())


def to_torch(array: Any) -> Tensor:
    """Take over an array that nobody else has, once it is computed."""
    if device().platform != "cpu":
        array = jax.device_put(array, jax.devices("cpu")[0])
    tensor: Tensor = from_dlpack(array.block_until_ready())
    return tensor


def call(program: Callable[..., Any], *tensors: Tensor | None, **settings: Any) -> list[Tensor]:
    """Run a program of JAX on tensors; return its results."""
    arrays = [None if x is None else to_jax(x) for x in tensors]
    return [to_torch(result) for result in program(*arrays, **settings)]
