"""The mixer of PLaMo 2 as the code of its checkpoints is built: its functions lead to ops, and it computes the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from opgraft import CustomOp, graft, ops, ungraft
from support import plamo2
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, HEAD, STATE, WIDTH = 24, 4, 6, 5, 4
OPS = ("CausalConv1d", "CausalConv1dUpdate", "SelectiveStateUpdate", "MambaChunkScan")
EXPECTED = {
    "_causal_conv1d": "causal_conv1d",
    "_causal_conv1d_update": "causal_conv1d_update",
    "ssd_update_state": "selective_state_update",
    "ssd_chunk_scan_combined": "mamba_chunk_scan",
}


def _causal_conv1d_update(conv_state: Tensor, weight: Tensor, xBC: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803  # the letters of the paper
    line = torch.cat([conv_state, xBC.to(conv_state.dtype)], -1)
    conv_state.copy_(line[..., 1:])
    return F.silu((line * weight[:, 0].to(line.dtype)).sum(-1, keepdim=True)), conv_state


def _causal_conv1d(conv_state: Any, weight: Tensor, x: Tensor, seq_idx: Any) -> tuple[Tensor, Any]:
    before = (
        x.new_zeros(*x.shape[:2], weight.shape[-1] - 1)
        if conv_state is None
        else conv_state.clone()
    )
    rows = []
    for t in range(x.shape[-1]):
        if t and seq_idx is not None:
            before = before * (seq_idx[:, t - 1] == seq_idx[:, t])[:, None, None]
        row, before = _causal_conv1d_update(before.clone(), weight, x[..., t : t + 1])
        rows.append(row)
    return torch.cat(rows, -1), None if conv_state is None else before


def ssd_update_state(
    ssm_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_softplus: bool,
) -> Tensor:  # fmt: skip
    step = dt.float() + dt_bias
    step = (F.softplus(step) if dt_softplus else step)[..., None, None]
    b, c = (
        each.repeat_interleave(x.shape[1] // each.shape[1], 1).float()[:, :, None]
        for each in (B, C)
    )
    ssm_state.copy_((step * A[:, None, None]).exp() * ssm_state + step * x[..., None] * b)
    y = (ssm_state * c).sum(-1) + D[:, None] * x
    return (y * F.silu(z.float())).to(x.dtype)[:, None]


def ssd_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, z: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_softplus: bool, return_final_states: bool, seq_idx: Any, ssm_state: Any,
) -> Any:  # fmt: skip
    if ssm_state is None:
        ssm_state = torch.zeros(x.shape[0], *x.shape[2:], B.shape[-1])
    rows = []
    for t in range(x.shape[1]):
        if t and seq_idx is not None:
            ssm_state = ssm_state * (seq_idx[:, t - 1] == seq_idx[:, t])[:, None, None, None]
        given = x[:, t], dt[:, t], A, B[:, t], C[:, t], D, z[:, t], dt_bias
        rows.append(ssd_update_state(ssm_state, *given, dt_softplus))
    y = torch.cat(rows, 1)
    return (y, ssm_state) if return_final_states else y


class Mixer(plamo2.Mamba):
    """The weights of the one in plain PyTorch; computed by those functions, over batches, from states that it keeps."""

    def forward(self, hidden: Tensor, states: Any = None, seq_idx: Any = None) -> Tensor:
        batch, tokens, _ = hidden.shape
        z, x = self.in_proj(hidden).view(batch, tokens, self.heads, 2, self.head).unbind(3)
        conv, ssm = (None, None) if states is None else states
        line, steps_once = x.flatten(2).mT, states is not None and tokens == 1
        if steps_once:
            line, conv = _causal_conv1d_update(conv, self.conv1d.weight, line)
        else:
            line, conv = _causal_conv1d(conv, self.conv1d.weight, line, seq_idx=seq_idx)
        x = line.mT.to(hidden.dtype)
        b, c, dt = self.bcdt_proj(x).split([self.state, self.state, self.rank], -1)
        b, c = (
            plamo2.normalised(*each) for each in ((b, self.B_norm_weight), (c, self.C_norm_weight))
        )
        dt, decay = (
            self.dt_proj(plamo2.normalised(dt, self.dt_norm_weight)),
            -self.A_log.float().exp(),
        )
        x, b, c = x.reshape(z.shape), b[:, :, None], c[:, :, None]
        if steps_once:
            y = ssd_update_state(
                ssm, x[:, 0], dt[:, 0], decay, b[:, 0], c[:, 0], D=self.D, z=z[:, 0], dt_bias=self.dt_bias,
                dt_softplus=True,
            )  # fmt: skip
        else:
            y, ssm = ssd_chunk_scan_combined(
                x, dt, decay, b, c, 256, D=self.D, z=z, dt_bias=self.dt_bias, dt_softplus=True,
                return_final_states=True, seq_idx=seq_idx, ssm_state=ssm,
            )  # fmt: skip
        if states is not None:
            states[:] = conv, ssm
        return self.out_proj(y.reshape(batch, tokens, -1))


CALLS: Counter[str] = Counter()


@pytest.fixture
def kernels() -> Counter[str]:
    """Kernels for the ops, which count their calls."""

    def counted(name: str) -> type:
        def forward_oot(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS[name] += 1
            return self.forward_native(*args, **kwargs)

        return type(f"Fast{name}", (getattr(ops, name),), {"forward_oot": forward_oot})

    for name in OPS:
        CustomOp.register_oot(counted(name), name=name)
    CALLS.clear()
    return CALLS


def mixer() -> Mixer:
    made = Mixer(HIDDEN, HEADS, HEAD, STATE, WIDTH).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def empty_states(batch: int) -> list[Tensor]:
    return [torch.zeros(batch, HEADS * HEAD, WIDTH - 1), torch.zeros(batch, HEADS, HEAD, STATE)]


def in_parts(module: Any, x: Tensor) -> list[Tensor]:
    """Compute a prompt in parts, of several tokens and of one, and return the states too."""
    states = empty_states(len(x))
    with torch.no_grad():
        made = [module(part, states) for part in x.split((6, 1, 2, 1, 1), 1)]
    return [torch.cat(made, 1), *states]


def test_parts_of_prompts_and_single_tokens(kernels: Counter[str]) -> None:
    """All four functions lead to ops: whole prompts and parts give what they gave, states too, and ungraft is exact."""
    model, x = nn.ModuleDict({"mixer": mixer()}), torch.randn(2, 11, HIDDEN)
    with torch.no_grad():
        whole = model["mixer"](x)
        by_token = torch.stack([plamo2.Mamba.forward(model["mixer"], each) for each in x])
    wanted = in_parts(model["mixer"], x)
    torch.testing.assert_close(whole, by_token, atol=1e-5, rtol=1e-5)
    report = graft(model)
    assert {
        row.source: row.op for row in report.replaced if row.adapter == "function of a state space"
    } == EXPECTED
    with torch.no_grad():
        torch.testing.assert_close(model["mixer"](x), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_parts(model["mixer"], x), wanted, atol=1e-5, rtol=1e-5)
    assert kernels == {
        "CausalConv1d": 3,
        "MambaChunkScan": 3,
        "CausalConv1dUpdate": 3,
        "SelectiveStateUpdate": 3,
    }
    ungraft(model)
    assert type(model["mixer"]) is Mixer
    with torch.no_grad():
        assert torch.equal(model["mixer"](x), whole)


def test_what_stays_with_the_file(kernels: Counter[str]) -> None:
    """Packed sequences and gradients go through the functions of the file, and give what they gave."""
    model, x = nn.ModuleDict({"mixer": mixer()}), torch.randn(1, 7, HIDDEN)
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, 2]], dtype=torch.int32)
    recorded = model["mixer"](x)
    with torch.no_grad():
        wanted = model["mixer"](x, seq_idx=packed)
    graft(model)
    with torch.no_grad():
        assert torch.equal(model["mixer"](x, seq_idx=packed), wanted)
    assert torch.equal(model["mixer"](x), recorded)
    assert not kernels


def test_bfloat16(kernels: Counter[str]) -> None:
    """A mixer in bfloat16 is no farther from the same weights in float32 than before, but for a tenth."""
    made, x = mixer().to(torch.bfloat16), torch.randn(4, 30, HIDDEN).to(torch.bfloat16)
    model = nn.ModuleDict({"mixer": made})
    with torch.no_grad():
        truth = mixer()
        truth.load_state_dict({name: weight.float() for name, weight in made.state_dict().items()})
        wanted, plain = truth(x.float()), made(x)
        graft(model)
        distances = [
            (each.float() - wanted).square().mean().sqrt() for each in (model["mixer"](x), plain)
        ]
    assert kernels["MambaChunkScan"] == 1
    assert 0 < distances[0] <= 1.1 * distances[1]
