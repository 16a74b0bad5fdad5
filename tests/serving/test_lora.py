"""Requests with LoRA adapters, compared with transformers and PEFT in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opgraft import LoRARequest
from support import adapters
from support.adapters import EVERYWHERE, PROMPTS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore::UserWarning")

ADAPTERS = {
    "attention": {},
    "everywhere": {"target_modules": EVERYWHERE, "r": 8, "seed": 2},
    "stable": {"use_rslora": True, "r": 3, "target_modules": ["gate_proj", "down_proj"], "seed": 3},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 6, "down_proj": 2},
        "alpha_pattern": {"k_proj": 3, r".*\.mlp\.up_proj": 20},
        "seed": 4,
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return adapters.saved_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of all adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapters.saved_adapter(base, root / name, **settings)
        for name, settings in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def answers(base: Path, folders: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """The answers of PEFT to all prompts, by adapter; ``None`` stands for the base model."""
    wanted: dict[str | None, Any] = {None: None, **folders}
    return {name: adapters.expected(base, folder, PROMPTS) for name, folder in wanted.items()}


@pytest.fixture(scope="module")
def requests(folders: dict[str, Path]) -> dict[str, LoRARequest]:
    """A request for each adapter."""
    return {
        name: LoRARequest(name, number, str(folder))
        for number, (name, folder) in enumerate(folders.items(), 1)
    }


@pytest.fixture(scope="module")
def llm(base: Path) -> Any:
    """An engine that takes adapters."""
    with adapters.engine(base) as made:
        yield made


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_one_adapter(llm: Any, requests: Any, answers: Any, name: str | None) -> None:
    """Answers with an adapter are those of PEFT, and those without one those of the base model."""
    assert adapters.greedy(llm, PROMPTS, requests.get(name)) == answers[name]
    assert answers[name] != answers[None] or name is None


def test_many_adapters_in_a_batch(llm: Any, requests: Any, answers: Any) -> None:
    """Requests of one batch have adapters of their own, or none."""
    names = [*ADAPTERS, None]
    prompts = PROMPTS * len(names)
    wanted = [name for name in names for _ in PROMPTS]
    given = [requests.get(name) for name in wanted]
    # Mixed, so that requests of an adapter do not follow one another.
    order = sorted(range(len(prompts)), key=lambda place: place % len(PROMPTS))
    found = adapters.greedy(llm, [prompts[i] for i in order], [given[i] for i in order])
    expected = [answer for name in names for answer in answers[name]]
    assert found == [expected[i] for i in order]
