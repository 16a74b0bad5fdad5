"""Models for passes that find nothing in transformers': layers that quantise, and layers that ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import opgraft
import torch
from clocks import Seconds, taken
from opgraft import CompilationConfig
from opgraft.distributed import get_tp_group
from opgraft.ops import (
    ColumnParallelLinear,
    Linear,
    QuantFP8,
    RMSNorm,
    RowParallelLinear,
    ScaledDotProductAttention,
    SiluAndMul,
)
from support.exchanges import communication
from support.traffic import traffic_of
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

HEAD_SIZE = 64


class QuantizedLayer(nn.Module):
    """Attention and a gated feed-forward layer, whose linear maps take what was quantised to 8 bits."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = Linear(hidden, 3 * hidden, False), Linear(hidden, hidden, False)
        self.gate_up, self.down = (
            Linear(hidden, 2 * intermediate, False),
            Linear(intermediate, hidden, False),
        )
        self.attention, self.act = ScaledDotProductAttention(), SiluAndMul()
        self.per_token, self.given = QuantFP8(False, (1, -1)), QuantFP8(True, (-1, -1))
        self.register_buffer("scale", torch.tensor([0.02]))

    def _read(self, x: Tensor) -> Tensor:
        quantized, scale = self.per_token(x)
        read: Tensor = quantized.to(x.dtype) * scale.to(x.dtype)
        return read

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        heads = (
            self.qkv(self._read(self.norms[0](x)))
            .view(rows, tokens, 3, -1, HEAD_SIZE)
            .transpose(1, 3)
        )
        attended = (
            self.attention(*heads.unbind(2), is_causal=True)
            .transpose(1, 2)
            .reshape(rows, tokens, hidden)
        )
        x = x + self.out(self.given(attended, self.scale)[0].to(x.dtype) * self.scale.to(x.dtype))
        out: Tensor = x + self.down(
            self._read(self.act(self.gate_up(self._read(self.norms[1](x)))))
        )
        return out


class Quantized(nn.Module):
    """Such layers between an embedding and logits."""

    def __init__(self, vocabulary: int, hidden: int, intermediate: int, layers: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.embedding, self.head = (
            nn.Embedding(vocabulary, hidden),
            Linear(hidden, vocabulary, False),
        )
        self.layers = nn.ModuleList(QuantizedLayer(hidden, intermediate) for _ in range(layers))

    def forward(self, ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        del use_cache
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))


class Shared(nn.Module):
    """Feed-forward layers of a residual stream that ranks share."""

    def __init__(self, hidden: int, intermediate: int, layers: int) -> None:
        super().__init__()
        given: dict[str, Any] = {"bias": False, "return_bias": False}
        self.norms = nn.ModuleList(RMSNorm(hidden) for _ in range(layers))
        self.ups = nn.ModuleList(
            ColumnParallelLinear(hidden, intermediate, **given) for _ in range(layers)
        )
        self.downs = nn.ModuleList(
            RowParallelLinear(intermediate, hidden, **given) for _ in range(layers)
        )
        for each in self.parameters():
            nn.init.normal_(
                each, std=hidden**-0.5, generator=torch.Generator().manual_seed(each.shape[0])
            )
            each.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        normed, residual = x, x
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            normed, residual = norm(down(up(normed)), residual)
        return [normed, residual]


def shared(
    state: dict[str, Any], sizes: tuple[int, ...], name: str, rounds: int
) -> tuple[Any, ...]:
    """Compare a pass on and off on this rank: what calls of each took, and bytes that they send, and move in all.

    The sizes are those of hidden states and of what is between the maps of a layer, of layers and of rows.
    """
    hidden, intermediate, layers, rows = sizes
    model = state.setdefault("model", Shared(hidden, intermediate, layers).eval())
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(0))
    runs: list[Callable[[], Any]] = []
    for on in (True, False):
        switches = {"sequence_parallelism": name != "all_reduce_rms_norm", name: on}
        config = CompilationConfig(level=1, pass_config=switches)
        runs.append(functools.partial(opgraft.compile(model, config, args=(x[:4],)), x))
    times: list[list[Seconds]] = [[], []]
    for turn in range(rounds + 1):
        for run, seconds in list(zip(runs, times, strict=True))[:: 1 if turn % 2 else -1]:
            get_tp_group().all_reduce(torch.zeros(1))
            seconds.append(taken(run, 4))
    exchanged = [communication(run)[2].total() for run in runs]
    return [each[1:] for each in times], exchanged, [traffic_of(run) for run in runs]
