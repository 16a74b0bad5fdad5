"""Ropes that depend on the length of the context: a sequence's tokens are transformers', whatever shares its batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.engine.request import Request
from opgraft.errors import ModelError
from support.engines import engine, prompts, recorded, serve
from support.random_decoders import through_transformers, written

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
TRAINED = 32
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": TRAINED},
    ),
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": TRAINED}),
}
LENGTHS = (3, 12, 2, 25, 31, 40, 32, 33, 48)
"""Of prompts: within the first context, up to its last token, and beyond it."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ropes") / request.param
    family, values = CASES[request.param]
    return folder, written(family, folder, **values)


def expect_as_generated(model: Any, request: Request, recorder: Any) -> None:
    """See that a request has the tokens and logits that transformers generates with a cache."""
    given = torch.tensor([request.prompt])
    options = {
        "do_sample": False,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    fresh = copy.deepcopy(model)  # a dynamic rope of transformers does not forget a longer context
    found = fresh.generate(given, max_new_tokens=len(request.output), **options)
    assert request.output == found.sequences[0, given.shape[1] :].tolist()
    logits = torch.stack(
        [recorder.logits[tuple(request.output[:i])] for i in range(len(request.output))]
    )
    torch.testing.assert_close(logits, torch.cat(found.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 20, "max_num_batched_tokens": 9}])
def test_below_and_beyond_the_first_context(
    checkpoint: tuple[Path, Any], limits: dict[str, int]
) -> None:
    """Short and long sequences in one batch, in chunks and after preemption too, some of which grow beyond."""
    folder, model = checkpoint
    core = engine(folder, **limits)
    pairs = [recorded(str(i), prompt, 16) for i, prompt in enumerate(prompts(*LENGTHS))]
    serve(core, [request for request, _ in pairs])
    assert any(request.num_preemptions for request, _ in pairs) == bool(limits)
    for request, recorder in pairs:
        expect_as_generated(model, request, recorder)


def test_blocks_are_shared_where_keys_are_rotated_alike(checkpoint: tuple[Path, Any]) -> None:
    """A short sequence and a long one that begin alike share nothing; two short or two equally long ones do."""
    folder, model = checkpoint
    core = engine(folder)
    whole = prompts(45)[0]
    for length, known in (
        (20, 0),
        (24, 20),
        (40, 0),
        (40, 36),
        (24, 20),
        (45, 40 if "longrope" in folder.name else 0),
    ):
        request, recorder = recorded("request", whole[:length], 2)
        serve(core, [request])
        assert request.num_cached == known
        expect_as_generated(model, request, recorder)


def test_answers_of_one_prompt(checkpoint: tuple[Path, Any]) -> None:
    """Each of several answers that grow beyond the context is that of a request of its own with its seed."""
    folder, _ = checkpoint
    prompt = prompts(29)[0]
    siblings = recorded("together", prompt, temperature=1, seed=5, n=3)[0].split()
    serve(engine(folder, max_num_seqs=2), siblings)
    alone = [recorded(str(seed), prompt, temperature=1, seed=seed)[0] for seed in (5, 6, 7)]
    serve(engine(folder, max_num_seqs=1), alone)
    assert [sibling.output for sibling in siblings] == [request.output for request in alone]


def test_a_model_whose_rope_looks_at_the_whole_batch_is_refused(tmp_path: Path) -> None:
    """A model of transformers that is not written would rotate for its longest neighbour."""
    through_transformers("smollm3", tmp_path / "model", rope_parameters=LONGROPE)
    with pytest.raises(
        ModelError,
        match=r"no attention layers with a cache: .*rotates for the longest sequence of a batch",
    ):
        engine(tmp_path / "model")
