"""What is prepared beside the engine: grammars that are kept, and requests that do not wait for each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from opgraft import SamplingParams
from opgraft.serving import grammars
from opgraft.serving.async_llm import AsyncLLM
from support.random_decoders import written


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, trained: Any) -> Iterator[AsyncLLM]:
    """A decoder of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("preparing") / "llama"
    written("Llama", folder, vocab_size=400)
    trained.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"max_model_len": 64, "cache.num_blocks": 16, "load.progress": False}
    llm = AsyncLLM(str(folder), dtype="float32", **settings)
    yield llm
    llm.shutdown()


def test_grammars_are_kept_within_bounds(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last are kept, as far as their specs have few characters together."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammars, "_MOST_CHARACTERS", 100)
    first, second, third = (
        SamplingParams(structured_output={"choice": [letter * 30]}) for letter in "abc"
    )
    for params in (first, second, first, third):
        asyncio.run(llm.compile(params))
    kept = [
        llm.engine.inputs.grammars.find(params) is not None for params in (first, second, third)
    ]
    assert kept == [True, False, True]


def test_a_spec_that_is_no_json_gets_its_own_grammar(llm: AsyncLLM) -> None:
    """Specs that cannot be told apart by their JSON are compiled for each request, and not kept."""
    pytest.importorskip("llguidance")
    for text in ("cat", "mat"):
        params = SamplingParams(structured_output=MappingProxyType({"choice": [text]}))
        assert llm.engine.inputs.grammars.of(params).spec == {"choice": [text]}
        assert llm.engine.inputs.grammars.find(params) is None


def test_requests_are_prepared_beside_each_other(llm: AsyncLLM) -> None:
    """One that takes long to prepare does not hold up the next."""
    prepared = threading.Event()

    async def prepare() -> list[Any]:
        return list(await asyncio.gather(llm.prepare(prepared.wait, 20), llm.prepare(prepared.set)))

    assert asyncio.run(prepare()) == [True, None]
