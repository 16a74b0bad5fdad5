"""Layers that carry a state: their maths token by token, the same in parts as at once, and replaced by a plugin."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Site
from opgraft import ops
from opgraft.engine.runner.cache_layout import CacheLayout
from opgraft.errors import LayerError
from opgraft.ops.attention import AttentionBatch, LayerStates, attending
from torch import Tensor, nn

HIDDEN = 12
PLAMO = {
    "hidden_size": HIDDEN,
    "mamba_num_heads": 4,
    "hidden_size_per_head": 6,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "rms_norm_eps": 1e-6,
}
MIXERS: dict[str, Callable[[], Any]] = {
    "short_conv": lambda: ops.ShortConv(
        SimpleNamespace(conv_L_cache=3, conv_bias=True), HIDDEN, 0, prefix="m"
    ),
    "mamba_mixer": lambda: ops.MambaMixer(HIDDEN, 5, 4, 24, 3, True, True, True, prefix="m"),
    "mamba_mixer2": lambda: ops.MambaMixer2(HIDDEN, 5, 4, 24, True, True, 2, 4, 6, prefix="m"),
    "plamo2_mamba_mixer": lambda: ops.Plamo2MambaMixer(
        of_config(SimpleNamespace(**PLAMO)), prefix="m"
    ),
}


def of_config(config: SimpleNamespace) -> SimpleNamespace:
    """An engine's settings, of which the mixer of PLaMo 2 reads its model's config."""
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config))


def made(name: str) -> Any:
    """A mixer with weights drawn at random."""
    mixer = MIXERS[name]()
    generator = torch.Generator().manual_seed(1)
    for parameter in mixer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    if hasattr(mixer, "A"):
        mixer.A.data = -mixer.A.data.exp()
    return mixer


def mixed(mixer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(mixer, ops.MambaMixer2):
        return mixer(x)
    output = torch.full_like(x, torch.nan)
    mixer(x, output)
    return output


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", MIXERS)
@torch.inference_mode()
def test_parts_are_the_whole(name: str) -> None:
    """In parts of any size, single tokens too, beside another sequence in slots of a pool, tokens are as at once."""
    mixer, x, other = made(name), drawn(19, HIDDEN), drawn(7, HIDDEN)
    expected, beside = mixed(mixer, x), mixed(mixer, other)
    layout = CacheLayout({}, [], [], 4, torch.float32, {"m": mixer})
    pool = layout.allocate_states(5, torch.device("cpu"))
    for slots in pool.values():
        slots[[0, 2, 3]] = torch.nan
    tensors = layout.states_of_layers(pool)["m"]
    found: list[Tensor] = []
    others: list[Tensor] = []
    start = begun = 0
    for count, more in ((5, 3), (1, 1), (1, 1), (3, 0), (8, 1), (1, 1)):
        batch = AttentionBatch.of_sequences([count, more], [start + count, begun + more])
        object.__setattr__(batch, "states", {"m": LayerStates(tensors, torch.tensor([4, 1]))})
        with attending(batch):
            y = mixed(mixer, torch.cat([x[start : start + count], other[begun : begun + more]]))
        found.append(y[:count])
        others.append(y[count:])
        start, begun = start + count, begun + more
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(others), beside, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_plamo2_token_by_token() -> None:
    """PLaMo 2's mixer is its recurrence, written by hand."""
    mixer, x = made("plamo2_mamba_mixer"), drawn(9, HIDDEN)
    z, u = (x @ mixer.in_proj.weight.T).chunk(2, -1)
    line = torch.cat([torch.zeros(3, 24), u])
    u = torch.stack([(line[t : t + 4] * mixer.conv1d.weight[:, 0].T).sum(0) for t in range(9)])
    u = u * torch.sigmoid(u)

    def norm(part: Tensor, weight: Tensor) -> Tensor:
        return part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    b, c, dt = (u @ mixer.bcdt_proj.weight.T).split([5, 5, 64], -1)
    b, c = norm(b, mixer.B_norm.weight), norm(c, mixer.C_norm.weight)
    dt = norm(dt, mixer.dt_norm.weight) @ mixer.dt_proj.weight.T + mixer.dt_bias
    dt = torch.log1p(dt.exp())
    state, rows = torch.zeros(4, 6, 5), []
    for t in range(9):
        heads = u[t].reshape(4, 6)
        decay = (dt[t] * mixer.A).exp()[:, None, None]
        state = state * decay + (dt[t][:, None] * heads)[..., None] * b[t]
        rows.append((state @ c[t] + mixer.D[:, None] * heads).flatten())
    y = torch.stack(rows) * z * torch.sigmoid(z)
    torch.testing.assert_close(mixed(mixer, x), y @ mixer.out_proj.weight.T, atol=1e-5, rtol=1e-4)


PLUGIN = """
import torch
from opgraft import ops

platforms = "any"
CALLS = []

def counted(cls, method):
    inherited = getattr(cls, method)
    def call(self, *args, **kwargs):
        CALLS.append(cls.__name__)
        return inherited(self, *args, **kwargs)
    made = type("Vendor" + cls.__name__, (cls,), {"__module__": __name__, method: call})
    return cls.register_oot(made)

for cls in (ops.ShortConv, ops.MambaMixer, ops.MambaMixer2, ops.Plamo2MambaMixer):
    counted(cls, "forward")
for cls in (ops.Mixer2RMSNormGated, ops.CausalConv1d, ops.SelectiveScan, ops.MambaChunkScan):
    counted(cls, "forward_native")
"""


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("short_conv", ["ShortConv", "CausalConv1d"]),
        ("mamba_mixer", ["MambaMixer", "CausalConv1d", "SelectiveScan"]),
        ("mamba_mixer2", ["MambaMixer2", "CausalConv1d", "MambaChunkScan", "Mixer2RMSNormGated"]),
        ("plamo2_mamba_mixer", ["Plamo2MambaMixer", "CausalConv1d", "MambaChunkScan"]),
    ],
)
def test_a_distribution_replaces_mixers(site: Site, name: str, calls: list[str]) -> None:
    """A plugin's classes are constructed in the place of each mixer, of its norm and of the ops that it calls."""
    x = drawn(7, HIDDEN)
    expected = mixed(made(name), x)
    site.plugin("vendor-mixers", PLUGIN)
    import vendor_mixers

    mixer = made(name)
    vendor_mixers.CALLS.clear()
    torch.testing.assert_close(mixed(mixer, x), expected)
    assert calls == vendor_mixers.CALLS
    assert mixer.op_class.__qualname__ == f"Vendor{calls[0]}"


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gated_norm(groups: int, dtype: torch.dtype) -> None:
    """It gates, and normalises by groups unless it has none, as the maths in float64; empty and strided inputs too."""
    norm = ops.Mixer2RMSNormGated(24, max(groups, 1), use_rms_norm=groups > 0, eps=1e-5)
    if norm.weight is not None:
        norm.weight.copy_(torch.randn(24))
    for tokens in (0, 1, 7):
        x, gate = (torch.randn(tokens, 48, dtype=dtype)[:, ::2] for _ in range(2))
        expected = x.double() * torch.nn.functional.silu(gate.double())
        if norm.weight is not None:
            parts = expected.unflatten(-1, (groups, 24 // groups))
            expected = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
            expected = expected * norm.weight.double()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(norm(x, gate).double(), expected, rtol=tolerance, atol=tolerance)


def test_sizes_that_do_not_fit() -> None:
    """Sizes that contradict each other are refused."""
    with pytest.raises(
        ValueError, match="mamba_mixer2: 4 heads of 5 in 2 groups, expected 24 elements"
    ):
        ops.MambaMixer2(HIDDEN, 5, 4, 24, True, True, 2, 4, 5)
    with pytest.raises(ValueError, match="mamba_mixer2: n_groups is 0"):
        ops.MambaMixer2(HIDDEN, 5, 4, 24, True, True, 0, 4, 6)
    with pytest.raises(ValueError, match="mamba_mixer2: conv_kernel_size is 0"):
        ops.MambaMixer2(HIDDEN, 5, 0, 24, True, True, 2, 4, 6)
    with pytest.raises(ValueError, match="short_conv: conv_L_cache is 0"):
        ops.ShortConv(SimpleNamespace(conv_L_cache=0, conv_bias=True), HIDDEN, 0)
    with pytest.raises(ValueError, match="plamo2_mamba_mixer: mamba_d_state is -1"):
        ops.Plamo2MambaMixer(of_config(SimpleNamespace(**{**PLAMO, "mamba_d_state": -1})))
    with pytest.raises(ValueError, match="mamba_mixer: ssm_state_size is -5"):
        ops.MambaMixer(HIDDEN, -5, 4, 24, 3, True, True, False)
    with pytest.raises(
        ValueError, match="mixer2_gated_rms_norm: full_n_groups is 5, expected a divisor of 24"
    ):
        ops.Mixer2RMSNormGated(24, 5)
    with pytest.raises(ValueError, match="causal_conv1d: activation is 'relu', expected one of"):
        ops.MambaMixer(HIDDEN, 5, 4, 24, 3, True, True, False, activation="relu")


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_that_do_not_fit(name: str) -> None:
    """Sequences side by side, as transformers has them, and an output of another size are refused by name."""
    mixer = made(name)
    with pytest.raises(
        ValueError, match=r"hidden_states has shape \(2, 5, 12\), expected \[tokens, hidden_size\]"
    ):
        mixed(mixer, drawn(2, 5, HIDDEN))
    if name != "mamba_mixer2":  # which returns its result
        with pytest.raises(
            ValueError,
            match=r"output has shape \(4, 12\), expected that of hidden_states, \(5, 12\)",
        ):
            mixer(drawn(5, HIDDEN), torch.empty(4, HIDDEN))


@torch.inference_mode()
def test_multipliers_of_the_projection() -> None:
    """They multiply what the projection gives, as if its rows and bias were larger."""
    mixer, x = made("mamba_mixer2"), drawn(7, HIDDEN)
    multipliers = torch.rand(mixer.in_proj.weight.shape[0]) + 0.5
    found = mixer(x, multipliers)
    with pytest.raises(ValueError, match=r"mamba_mixer2: mup_vector has shape \(5,\)"):
        mixer(x, multipliers[:5])
    mixer.in_proj.weight.mul_(multipliers[:, None])
    mixer.in_proj.bias.mul_(multipliers)
    torch.testing.assert_close(found, mixer(x))


def test_states_of_another_shape() -> None:
    """A layer that is given states of another layer says so."""
    mixer = made("short_conv")
    batch = AttentionBatch.of_sequences([2])
    object.__setattr__(
        batch, "states", {"m": LayerStates((torch.zeros(3, 5, 2),), torch.tensor([0]))}
    )
    with (
        attending(batch),
        pytest.raises(LayerError, match=r"have shapes \(\(5, 2\),\), expected \(\(12, 2\),\)"),
    ):
        mixed(mixer, drawn(2, HIDDEN))
