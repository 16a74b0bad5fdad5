"""PLaMo 2 in plain PyTorch, token by token as its report tells it, with the names of its checkpoints.

transformers has no class of it. The maths is that of arXiv:2509.04897 and, where that is silent, of the code that its
authors publish beside the weights: offsets of norms, gates and inputs by heads, windows that count the tokens before.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

CONFIG: dict[str, Any] = {
    "architectures": ["PlamoForCausalLM"],
    "auto_map": {"AutoConfig": "modeling_plamo.PlamoConfig"},
    "model_type": "plamo2",
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_head": 12,
    "max_position_embeddings": 64,
    "attention_window_size": 6,
    "full_attention_idx": [3],
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "mamba_num_heads": 6,
    "mamba_step": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


class Norm(nn.Module):
    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.zeros(size)), offset

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.offset + self.weight)


class Mamba(nn.Module):
    def __init__(self, hidden: int, heads: int, head: int, state: int, width: int) -> None:
        super().__init__()
        self.heads, self.head, self.state, self.width, inner = (
            heads,
            head,
            state,
            width,
            heads * head,
        )
        self.rank = max(64, hidden // 16)
        self.in_proj, self.out_proj = linear(hidden, 2 * inner), linear(inner, hidden)
        self.conv1d = nn.Conv1d(inner, inner, width, groups=inner, bias=False)
        self.bcdt_proj, self.dt_proj = (
            linear(inner, self.rank + 2 * state),
            linear(self.rank, heads),
        )
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.B_norm_weight, self.C_norm_weight = (nn.Parameter(torch.ones(state)) for _ in range(2))
        self.dt_norm_weight = nn.Parameter(torch.ones(self.rank))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = len(hidden)
        gate, x = self.in_proj(hidden).view(tokens, self.heads, 2, self.head).unbind(2)
        line = F.pad(x.reshape(tokens, -1).T, (self.width - 1, 0))
        x = F.silu(self.conv1d(line[None])[0].T)
        b, c, dt = self.bcdt_proj(x).split([self.state, self.state, self.rank], -1)
        b, c = normalised(b, self.B_norm_weight), normalised(c, self.C_norm_weight)
        steps = F.softplus(self.dt_proj(normalised(dt, self.dt_norm_weight)) + self.dt_bias)
        x = x.view(tokens, self.heads, self.head)
        state, rows = torch.zeros(self.heads, self.head, self.state), []
        for t in range(tokens):
            decay = torch.exp(-steps[t] * self.A_log.exp())[:, None, None]
            state = decay * state + (steps[t][:, None] * x[t])[..., None] * b[t]
            rows.append(state @ c[t] + self.D[:, None] * x[t])
        return self.out_proj((torch.stack(rows) * F.silu(gate)).flatten(1))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head: int, before: int) -> None:
        super().__init__()
        self.sizes, self.head, self.before = [heads, kv_heads, kv_heads], head, before
        self.qkv_proj, self.o_proj = (
            linear(hidden, sum(self.sizes) * head),
            linear(heads * head, hidden),
        )
        self.q_weight, self.k_weight = (
            nn.Parameter(torch.ones(heads, head)),
            nn.Parameter(torch.ones(kv_heads, head)),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = len(hidden)
        q, k, v = self.qkv_proj(hidden).view(tokens, -1, self.head).split(self.sizes, 1)
        q, k = rotated(normalised(q, self.q_weight)), rotated(normalised(k, self.k_weight))
        k, v = (x.repeat_interleave(self.sizes[0] // self.sizes[1], 1) for x in (k, v))
        age = torch.arange(tokens)[:, None] - torch.arange(tokens)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head**0.5
        shares = scores.masked_fill((age < 0) | (age > self.before), -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", shares, v).flatten(1))


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] / 10000 ** (torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        hidden, head, inner = (
            config.hidden_size,
            config.hidden_size_per_head,
            config.intermediate_size,
        )
        before = 10**9 if number in config.full_attention_idx else config.attention_window_size
        self.mixer: nn.Module = (
            Attention(hidden, config.num_attention_heads, config.num_key_value_heads, head, before)
            if number % config.mamba_step == config.mamba_step // 2
            else Mamba(
                hidden, config.mamba_num_heads, head, config.mamba_d_state, config.mamba_d_conv
            )
        )
        self.mlp = nn.ModuleDict(
            {"gate_up_proj": linear(hidden, 2 * inner), "down_proj": linear(inner, hidden)}
        )
        self.pre_mixer_norm, self.pre_mlp_norm = Norm(hidden, 1.0), Norm(hidden, 1.0)
        self.post_mixer_norm, self.post_mlp_norm = Norm(hidden, 1 / 5), Norm(hidden, 1 / 5**1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(x)))
        gate, up = self.mlp["gate_up_proj"](self.pre_mlp_norm(x)).chunk(2, -1)
        return x + self.post_mlp_norm(self.mlp["down_proj"](F.silu(gate) * up))


class Plamo2(nn.Module):
    """The model, called as those of transformers are."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layers = nn.ModuleDict(
            {"layers": nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))}
        )
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model = nn.ModuleDict(
            {"embed_tokens": embedding, "layers": layers, "norm": Norm(config.hidden_size, 1.0)}
        )

    def forward(self, tokens: Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.model["embed_tokens"](tokens[0])
        for layer in self.model["layers"]["layers"]:
            x = layer(x)
        return SimpleNamespace(
            logits=(self.model["norm"](x) @ self.model["embed_tokens"].weight.T)[None]
        )


def plamo2(folder: Path, **more: Any) -> Plamo2:
    """A small model with random weights, whose checkpoint is in ``folder``."""
    config = {**CONFIG, **more}
    model = Plamo2(SimpleNamespace(**config))
    generator = torch.Generator().manual_seed(len(folder.name))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model
