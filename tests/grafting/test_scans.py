"""Convolutions and scans of mixers: through ops of the instance, without a change to the file or to its caches."""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from opgraft import CustomOp, graft, ops, ungraft
from torch import Tensor, nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers", minversion="5.20")
from transformers.models.mamba import modeling_mamba  # noqa: E402  # after the variable is set

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
OF_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "Bamba": {"attn_layer_indices": [1], **OF_HEADS},
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2,
        "mamba_headdim": 8, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16,
        "time_step_limit": (0.01, 0.5),
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "expert_layer_period": 8, "expert_layer_offset": 7, "use_mamba_kernels": False,
    },
    "FalconMamba": {"state_size": 8},
    "Zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 8, "n_mamba_heads": 2, "attention_head_dim": 16,
        "use_mamba_kernels": False,
    },
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 2, **OF_HEADS},
}  # fmt: skip
CONVOLUTION = {"causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d_update"}
CHANNELS = {
    "mamba_selective_scan": "selective_scan",
    "mamba_selective_state_update": "selective_state_update",
}
HEADS = {
    "mamba2_chunk_scan": "mamba_chunk_scan",
    "mamba2_selective_state_update": "selective_state_update",
}
EXPECTED = {
    **dict.fromkeys(("Mamba", "FalconMamba", "Jamba", "Zamba"), CONVOLUTION | CHANNELS),
    **dict.fromkeys(("Mamba2", "Bamba", "Zamba2", "GraniteMoeHybrid"), CONVOLUTION | HEADS),
    "Lfm2": CONVOLUTION,
}
OPS = (
    "CausalConv1d",
    "CausalConv1dUpdate",
    "SelectiveScan",
    "SelectiveStateUpdate",
    "MambaChunkScan",
)
IDS = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(1))

CALLS: Counter[str] = Counter()


def replacement(name: str) -> type:
    def forward_oot(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return self.forward_native(*args, **kwargs)

    return type(
        f"Fast{name}", (getattr(ops, name),), {"forward_oot": forward_oot, "__module__": __name__}
    )


REPLACEMENTS = {f"Fast{name}": replacement(name) for name in OPS}
globals().update(REPLACEMENTS)  # where pickles look for them


@pytest.fixture
def kernels() -> Counter[str]:
    """Kernels for all the ops, which count their calls; most ops are put in where there is a kernel only."""
    for name, cls in REPLACEMENTS.items():
        CustomOp.register_oot(cls, name=name.removeprefix("Fast"))
    CALLS.clear()
    return CALLS


def called(seen: list[Any], *args: Any) -> None:
    seen.append(args)


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("A_log"):
            nn.init.normal_(parameter, std=0.2)
    return model


def without_gated_norms(model: Any) -> Any:
    """The model without what takes seconds to recognise."""
    for mixer in model.modules():
        if type(mixer).__name__.endswith("Mixer"):
            mixer.norm = nn.Identity()
    return model


def logits(model: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS, **more).logits
    return result


def rows_of(report: Any) -> dict[str, str]:
    return {
        row.source: row.op for row in report.replaced if row.adapter == "function of a state space"
    }


def generated(model: Any) -> Tensor:
    """Tokens for a batch with padding, with transformers' cache."""
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    found: Tensor = model.generate(IDS, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return found


def continued(model: Any) -> list[Tensor]:
    """Logits of a prompt that continues a cache, in parts of one token and of several."""
    found = []
    with torch.no_grad():
        first = model(IDS[:, :6], use_cache=True)
        name = "cache_params" if "cache_params" in first else "past_key_values"
        for part in IDS[:, 6:].split((2, 1, 2), 1):
            found.append(model(part, **{name: first[name]}, use_cache=True).logits)
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    model.train().zero_grad()
    model(IDS, labels=IDS).loss.backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


LONG = ("Bamba", "GraniteMoeHybrid", "Zamba2")
"""Families whose gated norms take seconds to recognise, as those of Mamba 2 do."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.slow] * (family in LONG)) for family in FAMILIES],
)
def test_families(family: str, kernels: Counter[str]) -> None:
    """Prompts, their continuations and single tokens go through the ops and give the same; training does not.

    Ungraft restores classes and every bit.
    """
    model = build(family)
    plain = logits(model), continued(model), generated(model), gradients(model)
    classes, state = (
        {name: type(part) for name, part in model.named_modules()},
        list(model.state_dict()),
    )
    assert rows_of(graft(model)) == EXPECTED[family]
    torch.testing.assert_close(logits(model), plain[0], atol=1e-5, rtol=1e-5)
    scans = {"Lfm2": []}.get(
        family, ["MambaChunkScan" if "mamba2_chunk_scan" in EXPECTED[family] else "SelectiveScan"]
    )
    assert kernels.keys() == {"CausalConv1d", *scans}
    torch.testing.assert_close(continued(model), plain[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(generated(model), plain[2])
    assert kernels["CausalConv1dUpdate"] >= 8
    assert bool(kernels["SelectiveStateUpdate"]) == (family != "Lfm2")
    kernels.clear()
    torch.testing.assert_close(gradients(model), plain[3], atol=1e-6, rtol=1e-4)
    assert not kernels
    assert list(model.state_dict()) == state
    ungraft(model)
    assert {name: type(part) for name, part in model.named_modules()} == classes
    assert torch.equal(logits(model), plain[0])


@pytest.mark.parametrize(
    "family", ["Mamba", pytest.param("Mamba2", marks=pytest.mark.slow), "Lfm2"]
)
def test_bfloat16(family: str, kernels: Counter[str]) -> None:
    """A mixer is no farther from the same weights in float32 than before, but for a tenth."""
    kinds = ("Mixer", "ShortConv")
    mixer = next(
        part for part in build(family).modules() if type(part).__name__.endswith(kinds)
    ).to(torch.bfloat16)
    x = torch.randn(4, 50, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    model = nn.ModuleDict({"mixer": mixer})
    with torch.no_grad():
        truth, plain = copy.deepcopy(mixer).float()(x.float()), mixer(x)
        graft(model)
        distances = [
            (each.float() - truth).square().mean().sqrt() for each in (model["mixer"](x), plain)
        ]
    assert kernels["CausalConv1d"] == 1
    assert 0 < distances[0] <= 1.1 * distances[1]


def test_copies_and_hooks(kernels: Counter[str]) -> None:
    """Copies and pickles of a grafted model run the ops; hooks on mixers and their class stay, grafting twice too."""
    model, seen = build("Mamba"), []
    before = logits(model)
    mixer = next(part for part in model.modules() if isinstance(part, modeling_mamba.MambaMixer))
    mixer.register_forward_hook(partial(called, seen))
    graft(model)
    assert not rows_of(graft(model))
    assert isinstance(mixer, modeling_mamba.MambaMixer)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # its own
        kernels.clear()
        torch.testing.assert_close(logits(each), before, atol=1e-5, rtol=1e-5)
        assert kernels["CausalConv1d"] == 2
    assert len(seen) == 1


def test_without_kernels() -> None:
    """Functions stay where the op has its native definition only, and that is no faster; scans of chunks go."""
    report = graft(without_gated_norms(build("Mamba2")))
    assert rows_of(report) == {"mamba2_chunk_scan": "mamba_chunk_scan"}
    stayed = {
        row.source: row.reason
        for row in report.left_alone
        if "conv1d_" in row.source or "update" in row.source
    }
    assert stayed == {
        name: f"here {op} is its native definition, which is no faster"
        for name, op in (EXPECTED["Mamba2"].items() - {("mamba2_chunk_scan", "mamba_chunk_scan")})
    }


def test_the_file_stays(kernels: Counter[str]) -> None:
    """Functions and classes of the file are what they were, and other models use them."""
    function, forward = modeling_mamba.mamba_selective_scan, modeling_mamba.MambaMixer.forward
    model, other = build("Mamba"), build("Mamba")
    assert "mamba_selective_scan" in rows_of(graft(model))
    assert modeling_mamba.mamba_selective_scan is function
    assert modeling_mamba.MambaMixer.forward is forward
    logits(other)
    assert not kernels


def test_packed_rows_are_refused_as_before(kernels: Counter[str]) -> None:
    """What the function of the file refuses is refused, with its message."""
    model = without_gated_norms(build("Bamba"))
    assert "mamba2_chunk_scan" in rows_of(graft(model))
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        logits(model, seq_idx=torch.zeros_like(IDS))


def plamo_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """A step of heads as a model of nobody's may write it."""
    heads, groups = hidden_states.shape[1], B.shape[1]
    step = F.softplus(dt + dt_bias)[..., None].float()
    b, c = (each.float().repeat_interleave(heads // groups, 1)[:, :, None] for each in (B, C))
    new = (step * A).exp() * state + step * hidden_states[..., None] * b
    state.copy_(new)
    return ((new * c).sum(-1) + D * hidden_states).to(hidden_states.dtype)


def ungated_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """As that, without its last term."""
    return plamo_state_update(state, hidden_states, dt, A, B, C, D * 0, dt_bias, dt_softplus)


def kept_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """As that, but the state stays what it was."""
    return plamo_state_update(state.clone(), hidden_states, dt, A, B, C, D, dt_bias, dt_softplus)


def reading_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
):
    """A convolution that looks at what else it is given."""
    out = modeling_mamba.causal_conv1d_fn.__wrapped__(hidden_states, weight, bias, activation)
    return out * kwargs.get("scale", 1.0)


def scaled_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: Any = None,
    scale: float = 1.0,
) -> Tensor:
    """A convolution with an argument more."""
    out: Tensor = modeling_mamba.causal_conv1d_fn.__wrapped__(
        hidden_states, weight, bias, activation
    )
    return out * scale


def fast_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None
) -> Tensor:
    """A function that another package brings."""
    return hidden_states


def chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return fast(*args, **kwargs)

    fast = fast_conv1d_fn
    return wrapped


faster_conv1d_fn = chosen(modeling_mamba.causal_conv1d_fn.__wrapped__)


class Plamo(nn.Module):
    """A mixer of nobody's, with a step of its file."""

    def forward(self, *args: Any) -> Tensor:
        return plamo_state_update(*args)


class Ungated(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return ungated_state_update(*args)


class Kept(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return kept_state_update(*args)


class Reading(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return reading_conv1d_fn(*args)


class Scaled(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return scaled_conv1d_fn(*args)


class Chosen(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        return faster_conv1d_fn(*args)


def step() -> list[Any]:
    torch.manual_seed(0)
    x, dt = torch.randn(3, 4, 5), torch.randn(3, 4, 1).expand(-1, -1, 5)
    decay = -torch.rand(4, 1, 1).expand(-1, 5, 6)
    b, c = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    return [torch.randn(3, 4, 5, 6), x, dt, decay, b, c, torch.randn(4, 5), torch.randn(4, 5), True]


def test_mixers_of_other_libraries(kernels: Counter[str]) -> None:
    """A function of any file is recognised by what it computes, with the state that it writes."""
    model = nn.ModuleDict({"mixer": Plamo()})
    expected, given = step(), step()
    wanted = model["mixer"](*expected)
    assert rows_of(graft(model)) == {"plamo_state_update": "selective_state_update"}
    torch.testing.assert_close(model["mixer"](*given), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given[0], expected[0], atol=1e-5, rtol=1e-5)
    assert kernels == {"SelectiveStateUpdate": 1}


OTHER = "computes something else than"
LEFT = {
    "another result": (Ungated, OTHER),
    "another state": (Kept, OTHER),
    "arguments without names": (Reading, OTHER),
    "arguments more": (Scaled, OTHER),
    "another function": (Chosen, "test_scans.fast_conv1d_fn"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_the_same_stays(what: str, kernels: Counter[str]) -> None:
    """A function that computes something else in some call, or calls another, stays, with the reason."""
    cls, reason = LEFT[what]
    report = graft(nn.ModuleDict({"mixer": cls()}))
    assert not rows_of(report)
    assert any(reason in row.reason for row in report.left_alone)


def test_a_decorator_that_cannot_be_followed(kernels: Counter[str]) -> None:
    """A forward whose decorator does not hold it plainly stays."""

    class Held(Plamo):
        forward = functools.wraps(Plamo.forward)(lambda self, *args: Plamo.forward(self, *args))

    report = graft(nn.ModuleDict({"mixer": Held()}))
    assert not rows_of(report)
    assert any(
        "decorated in a way that cannot be followed" in row.reason for row in report.left_alone
    )
