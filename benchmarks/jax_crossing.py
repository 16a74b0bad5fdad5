"""The ops of opgraft-jax over opgraft's own, and the share of it that tensors' way to JAX and back takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import torch
from opgraft import functional, load_plugins
from opgraft_jax import crossing
from timing import Row, ratio, report
from torch import Tensor

TOKENS, WIDTH = (1, 16, 512), 4096
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 9
FORMS: dict[str, tuple[Callable[..., object], ...]] = {
    "gelu (jax.numpy)": (functional.gelu, functional.gelu.native),
    "layer_norm (jax.numpy)": (
        lambda x: functional.layer_norm(x, (WIDTH,)),
        lambda x: functional.layer_norm.native(x, (WIDTH,)),
    ),
    "silu_and_mul (Pallas, interpreted)": (functional.silu_and_mul, functional.silu_and_mul.native),
    "rms_norm (Pallas, interpreted)": (functional.rms_norm, functional.rms_norm.native),
}


def there_and_back(x: Tensor) -> Tensor:
    return crossing.to_torch(crossing.to_jax(x))


def rows(x: Tensor) -> Iterator[Row]:
    label = f"{len(x)}x{WIDTH} {str(x.dtype).removeprefix('torch.')}"
    number = max(3, 50 // len(x))
    array, columns = crossing.to_jax(x), torch.cat((x, x), -1)[:, : x.shape[1]]
    gelu: Callable[..., object] = jax.jit(partial(jax.nn.gelu, approximate=False))
    timed = partial(ratio, limit=None, number=number, rounds=ROUNDS)
    for name, (ours, native) in FORMS.items():
        yield timed(
            f"{name} {label} / torch", subject=partial(ours, x), baseline=partial(native, x)
        )
    whole = partial(functional.gelu, x)
    yield timed(
        f"gelu of what JAX has {label} / with crossing",
        subject=lambda: jax.block_until_ready(gelu(array)),
        baseline=whole,
    )
    yield timed(
        f"crossing {label} / gelu with crossing", subject=partial(there_and_back, x), baseline=whole
    )
    yield timed(
        f"crossing of a view with gaps {label} / of a whole tensor",
        subject=partial(there_and_back, columns),
        baseline=partial(there_and_back, x),
    )


def measure() -> list[Row]:
    load_plugins()
    with torch.inference_mode():
        return [
            row
            for tokens in TOKENS
            for dtype in DTYPES
            for row in rows(torch.randn(tokens, WIDTH).to(dtype))
        ]


if __name__ == "__main__":
    report("What it costs that tensors cross between torch and JAX.", measure)
