"""What ``explain`` says of an engine is what its steps call, and who provides the parts around the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import opgraft
import pytest
from opgraft import CustomOp
from opgraft.binding import functional
from opgraft.binding.explaining import Explanation
from opgraft.engine.core import EngineCore
from opgraft.engine.sampling import Sampler
from opgraft.ops.attention import Attention
from support.engines import engine, prompts, recorded, serve
from support.random_decoders import DECODERS, THROUGH_TRANSFORMERS, through_transformers, written
from torch import nn


@contextmanager
def calls(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[str], set[str]]]:
    """The paths of the modules that are called, and the names of the forms that are bound."""
    modules: set[str] = set()
    forms: set[str] = set()
    bound = functional._bound

    def noted(form: Any) -> Any:
        forms.add(form.name)
        return bound(form)

    def note(path: str) -> Callable[..., None]:
        return lambda *_: modules.add(path)

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in model.named_modules()]
    with monkeypatch.context() as patch:
        patch.setattr(functional, "_bound", noted)
        yield modules, forms
    for hook in hooks:
        hook.remove()


def expect_true(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> Explanation:
    """See that a served request calls each row that is said to run, and no other."""
    model = core.executor.worker.runner.model
    explained = core.explain()
    ops = {
        path: module.op_class.__qualname__
        for path, module in model.named_modules()
        if isinstance(module, CustomOp)
    }
    own = [row for row in explained.rows if row.op_class == ops[row.path]]
    with calls(model, monkeypatch) as (called, bound):
        serve(core, [recorded("a", prompts(9)[0])[0], recorded("b", prompts(3)[0])[0]])
    assert [row.path for row in own] == list(ops)
    assert {row.path for row in own if row.runs} == called & set(ops)
    assert {row.op for row in explained.rows if row not in own} == bound
    return explained


@pytest.mark.parametrize(
    "family", ["llama", "llama 3, with biases, tied", "gemma2", "qwen3", *THROUGH_TRANSFORMERS]
)
def test_rows_that_run_are_what_a_step_calls(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention the ops over pages run, and of an output layer the form that its weight method calls."""
    if family in THROUGH_TRANSFORMERS:
        through_transformers(family, tmp_path)
    else:
        written(DECODERS[family][0], tmp_path, **DECODERS[family][1])
    explained = expect_true(engine(tmp_path), monkeypatch)
    runs = {row.op: row.runs for row in explained.rows}
    assert (runs["attention"], runs["paged_attention"], runs["write_kv_cache"]) == (
        True,
        True,
        True,
    )
    assert not runs["scaled_dot_product_attention"]
    assert not runs.get("parallel_lm_head")


def test_a_model_alone_is_told_without_pages(tmp_path: Path) -> None:
    """Outside of an engine nothing is written to pages; with a cap no other op attends."""
    written("Llama", tmp_path)
    model = engine(tmp_path).executor.worker.runner.model
    assert {row.op for row in opgraft.explain(model).rows if not row.runs} == {
        "write_kv_cache",
        "paged_attention",
        "parallel_lm_head",
    }
    capped = opgraft.explain(Attention(2, 8, 1.0, logits_soft_cap=5.0))
    assert [row.op for row in capped.rows if row.runs] == ["attention"]


def test_parts_of_the_engine_have_rows(tmp_path: Path) -> None:
    """Each replaceable class around the model is named with its provider, a replacement as what it is."""

    class Chosen(Sampler):
        def __call__(self, *arguments: Any) -> Any:
            return super().__call__(*arguments)

    Sampler.register_oot(Chosen)
    written("Llama", tmp_path)
    explained = engine(tmp_path).explain()
    rows = {row.name: row for row in explained.classes}
    parts = {"scheduler", "kv_cache_manager", "executor", "worker", "model_runner", "sampler"}
    assert set(rows) >= {*parts, "LlamaForCausalLM", "decoder_plan"}
    assert {name for name, row in rows.items() if row.provider.name != "opgraft"} == {"sampler"}
    assert rows["sampler"].cls.endswith("Chosen")
    assert "provided by" in rows["sampler"].reason
    assert rows["decoder_plan"].remark == "computes nothing, so the modules of layers are called"
    assert rows["decoder_plan"].path == "model.plan"
    assert rows["executor"].to_dict() == {
        "path": "executor",
        "name": "executor",
        "class": "InProcessExecutor",
        "provider": rows["executor"].provider.to_dict(),
        "reason": "no active replacement applies",
        "remark": "",
    }
    assert "computes nothing" in str(explained)


def test_an_object_from_before_a_replacement_is_told_as_it_is(tmp_path: Path) -> None:
    """What was constructed before a plugin came keeps its class, and its row says so."""

    class Later(Sampler):
        def __call__(self, *arguments: Any) -> Any:
            return super().__call__(*arguments)

    written("Llama", tmp_path)
    core = engine(tmp_path)
    Sampler.register_oot(Later)
    (row,) = [row for row in core.explain().classes if row.name == "sampler"]
    assert (row.cls, row.provider.name) == ("Sampler", "opgraft")
    assert row.reason.startswith("constructed as it is; now ")


def test_a_layer_that_inherits_forward_is_its_replacements(tmp_path: Path) -> None:
    """What ``Attention.forward`` calls is a replacement's, so the row names the replacement."""

    class Paged(Attention):
        def attend_batch(self, *arguments: Any) -> Any:
            return super().attend_batch(*arguments)

    Attention.register_oot(Paged)
    written("Llama", tmp_path)
    rows = [row for row in engine(tmp_path).explain().rows if row.op == "attention"]
    assert len(rows) == 3
    assert all(
        row.kernel.endswith("Paged.forward") and row.provider.name != "opgraft" for row in rows
    )
