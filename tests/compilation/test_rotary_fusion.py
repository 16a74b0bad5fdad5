"""The pass that joins the norms of query's and key's heads with their rotation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from engine.test_compiled_step import tokens
from opgraft import CompilationConfig
from opgraft.compilation.compiled import compile
from opgraft.engine.core import EngineCore
from opgraft.ops import ApplyRotaryEmb, RMSNorm, RotaryEmbedding
from support.engines import settings
from support.providers import CALLS, provide
from support.random_decoders import DECODERS, written
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def counts(compiled: opgraft.Compiled) -> tuple[int, int]:
    (report,) = (report for report in compiled.passes if report.name == "qk_norm_rope")
    return report.matched, report.replaced


def compiled(model: nn.Module, *args: Any) -> opgraft.Compiled:
    return opgraft.compile(model, CompilationConfig(level=1), args=args)  # type: ignore[no-any-return]


class Hidden(nn.Module):
    """A decoder of transformers, for its last hidden states."""

    def __init__(self, family: str) -> None:
        super().__init__()
        config = getattr(transformers, f"{family}Config")(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_SIZE,
        )
        torch.manual_seed(0)
        self.model = getattr(
            transformers, f"{family.replace('Text', '')}{'Text' * ('Text' in family)}Model"
        )(config)
        for name, parameter in self.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.data.normal_(1, 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids, use_cache=False).last_hidden_state
        return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("Qwen3", dtype) for dtype in LIMITS),
        ("Gemma3Text", torch.float64),
        ("Gemma3Text", torch.bfloat16),
    ],
)
def test_in_models_of_transformers(family: str, dtype: torch.dtype) -> None:
    """Each layer's norms and rotations are one node, of whatever operators the rotation consists; the result stays."""
    model = Hidden(family).to(dtype).eval().requires_grad_(False)
    opgraft.graft(model)
    found = compiled(model, torch.randint(32, (3, 5)))
    assert counts(found) == (2, 2)
    for size in (1, 2, 7):
        ids = torch.randint(32, (size, 5))
        limit = LIMITS[dtype]
        torch.testing.assert_close(found(ids), model(ids), rtol=limit, atol=limit)


def test_a_norm_of_all_heads_at_once_stays() -> None:
    """OLMo 2 normalises what is still one row for all heads, which is something else."""
    model = Hidden("Olmo2").eval().requires_grad_(False)
    opgraft.graft(model)
    assert counts(compiled(model, torch.randint(32, (3, 5)))) == (0, 0)


def test_in_a_decoder_of_opgraft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of Qwen3 in the engine has one node for each layer, and the tokens of the modules."""
    written(DECODERS["qwen3"][0], tmp_path, **DECODERS["qwen3"][1])
    made: list[opgraft.Compiled] = []

    def recorded(*args: Any, **kwargs: Any) -> opgraft.Compiled:
        made.append(compile(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("opgraft.engine.runner.compiled_model.compile", recorded)
    given = settings(tmp_path)
    core = EngineCore(dataclasses.replace(given, compilation_config=CompilationConfig(level=1)))
    assert counts(made[0]) == (3, 3)
    assert tokens(core) == tokens(EngineCore(given))


class Attending(nn.Module):
    """Query and key of one tensor, normed and rotated by ops."""

    def __init__(self, eps: float = 1e-5, by_position: bool = True) -> None:
        super().__init__()
        self.q_norm, self.k_norm = RMSNorm(HEAD_SIZE, eps=1e-5), RMSNorm(HEAD_SIZE, eps=eps)
        self.rope = RotaryEmbedding(HEAD_SIZE, HEAD_SIZE, 16, 100.0, True, torch.float32)
        self.turn = ApplyRotaryEmb()
        self.by_position = by_position

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        rows, tokens, _ = x.shape
        query, key = x.view(rows, tokens, -1, HEAD_SIZE).split([HEADS, KEY_HEADS], dim=2)
        query, key = self.q_norm(query), self.k_norm(key)
        if self.by_position:
            return *self.rope(positions, query.flatten(-2), key.flatten(-2)), x
        cos, sin = self.rope.get_cos_sin(tokens)
        return self.turn(query, cos, sin), self.turn(key, cos, sin), x


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 5, (HEADS + KEY_HEADS) * HEAD_SIZE), torch.randint(16, (rows, 5))


@pytest.mark.parametrize("by_position", [True, False])
def test_literals_are_kept(by_position: bool) -> None:
    """Norms of one epsilon are joined by either rotation, with it; norms of two stay apart."""
    for eps, expected in ((1e-5, (1, 1)), (0.5, (0, 0))):
        model = Attending(eps, by_position).eval()
        found = compiled(model, *drawn(3))
        assert counts(found) == expected
        for size in (1, 4):
            given = drawn(size)
            torch.testing.assert_close(found(*given), model(*given), rtol=1e-5, atol=1e-5)


def test_what_is_read_besides_stays_apart() -> None:
    """A norm whose result others read is computed once, for them and for the rotation."""

    class Read(Attending):
        def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            query = self.q_norm(x.view(*x.shape[:2], -1, HEAD_SIZE)).flatten(-2)
            return *self.rope(positions, query, query), query

    assert counts(compiled(Read().eval(), *drawn(3))) == (0, 0)


@pytest.mark.parametrize(
    ("names", "expected", "ran"),
    [
        (("rotary_embedding",), (1, 0), "rotary_embedding"),
        (("rotary_embedding", "qk_norm_rope"), (1, 1), "qk_norm_rope"),
    ],
)
def test_a_kernel_for_a_part_is_not_passed_over(
    names: tuple[str, ...], expected: tuple[int, int], ran: str
) -> None:
    """Where somebody provides a kernel for the rotation alone it runs; one for the joined form runs in its place."""
    provide(RotaryEmbedding, *names)
    found = compiled(Attending().eval(), *drawn(3))
    assert counts(found) == expected
    CALLS.clear()
    found(*drawn(2))
    assert [ran] == CALLS


@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("is_of_the_same", [True, False])
def test_a_kernel_of_somebody_else_is_not_replaced(is_of_the_same: bool, by_position: bool) -> None:
    """The joined kernel of one provider replaces norms of the same provider, and no other's."""
    provide(RotaryEmbedding, "qk_norm_rope")
    another = {} if is_of_the_same else {"__module__": "somebody_else"}
    provide(RMSNorm, "rms_norm", **another)
    model = Attending(by_position=by_position).eval()
    found = compiled(model, *drawn(3))
    assert counts(found) == (1, int(is_of_the_same))
    given = drawn(2)
    CALLS.clear()
    results = found(*given)
    assert (["qk_norm_rope"] if is_of_the_same else ["rms_norm"] * 2) == CALLS
    torch.testing.assert_close(results, model(*given), rtol=1e-5, atol=1e-5)
