"""Tensors from torch to JAX and back, by DLPack.

On the CPU both share the memory of a tensor, if the tensor is contiguous and begins at a multiple
of 64 bytes. Tensors that torch allocates do. torch copies views with gaps, and JAX copies tensors
that begin elsewhere. For another device every tensor is copied.
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
"""The dtypes of the ops. By default JAX turns float64 into float32, and int64 into int32."""


@functools.cache
def device() -> Any:
    """Return JAX's device of this process. The first call initialises it."""
    kind = os.environ.get(VARIABLE, "cpu")
    return jax.devices(kind)[0]


def to_jax(x: Tensor) -> Any:
    """Return a tensor of the host as JAX's array, on JAX's device.

    The memory may be shared, so nobody may write to the tensor until JAX has computed the result.
    """
    array = jax.dlpack.from_dlpack(x.detach().contiguous())
    if device().platform == "cpu":
        return array
    return jax.device_put(array, device())


def to_torch(array: Any) -> Tensor:
    """Return an array as a tensor of the host, once JAX has computed the array.

    The memory may be shared, so the caller must not use the array afterwards.
    """
    if device().platform != "cpu":
        host = jax.devices("cpu")[0]
        array = jax.device_put(array, host)
    # JAX returns arrays before their values are computed.
    tensor: Tensor = from_dlpack(array.block_until_ready())
    return tensor


def call(program: Callable[..., Any], *tensors: Tensor | None, **settings: Any) -> list[Tensor]:
    """Return the results of a JAX program.

    Args:
        program: a function that returns a tuple of arrays, such as ``programs.gelu``.
        tensors: the arguments of the program. None stays None.
        settings: the program's settings by name.
    """
    arrays = [None if x is None else to_jax(x) for x in tensors]
    results = program(*arrays, **settings)
    return [to_torch(result) for result in results]
