"""What the tests of Triton kernels share.

Launches are recorded instead of made, and compiled for absent GPUs; Triton's interpreter computes as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from on_gpu.interpreter import exact_arithmetic
from torch import Tensor

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
}
"""What Triton calls the dtypes."""


class Launch(NamedTuple):
    """A launch as the host code asked for it."""

    kernel: Any
    programs: int
    tile: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compiled(self, target: Any) -> Any:
        """The kernel compiled for ``target``, specialised on the arguments as a launch would."""
        import triton
        from triton.compiler import ASTSource

        constants = {
            **self.constants,
            "tile_rows": self.tile.rows,
            "tile_columns": self.tile.columns,
        }
        types, attributes = {}, {}
        for index, (parameter, value) in enumerate(
            zip(self.kernel.params, self.arguments, strict=False)
        ):
            types[parameter.name] = _type(value)
            if parameter.do_not_specialize:
                continue
            if isinstance(value, int) and value == 1:
                constants[parameter.name] = 1
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        types |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(self.kernel, types, constants, attributes)
        return triton.compile(source, target=target, options={"num_warps": self.tile.warps})


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record launches instead of making them. Tensors on the device ``meta`` stand for those of a GPU."""
    from opgraft.ops.activation import triton as triton_activation
    from opgraft.ops.attention import triton as triton_attention
    from opgraft.ops.attention.latent import triton as triton_latents
    from opgraft.ops.attention.quantized import triton as triton_quantized_attention
    from opgraft.ops.fused.quantization import triton as triton_fused
    from opgraft.ops.layernorm import triton as triton_norm
    from opgraft.ops.moe.fused import triton as triton_experts
    from opgraft.ops.quantization import triton as triton_quant
    from opgraft.ops.rotary import triton as triton_rotary
    from opgraft.ops.state_space import triton_chunks, triton_conv, triton_scan

    recorded: list[Launch] = []

    def record(kernel: Any, programs: int, tile: Any, *arguments: Any, **constants: Any) -> None:
        recorded.append(Launch(kernel, programs, tile, arguments, constants))

    for module in (
        triton_activation,
        triton_attention,
        triton_chunks,
        triton_conv,
        triton_experts,
        triton_fused,
        triton_latents,
        triton_norm,
        triton_quant,
        triton_quantized_attention,
        triton_rotary,
        triton_scan,
    ):
        monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr(triton_quant, "_supported", lambda: tuple(triton_quant.NAMES.values()))
    return recorded


@pytest.fixture
def on_meta() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Arguments with their tensors on the device ``meta``."""
    return lambda arguments: {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


@pytest.fixture(name="exact_arithmetic")
def with_exact_arithmetic() -> Iterator[None]:
    """Have Triton's interpreter compute as the hardware does."""
    with exact_arithmetic():
        yield
