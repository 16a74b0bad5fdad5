"""An engine that has served its requests, or refused or aborted them, holds nothing of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import FINISH_REASONS
from opgraft.errors import OpgraftError
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.text_engine import TextEngine
from support.engines import add, expect_empty, settings
from support.held import ROUNDS, in_each, rounds
from support.random_decoders import written

SMALLEST = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
ROWS = 12


class Visitors:
    """Random requests that come, are aborted, are refused, and end."""

    def __init__(self, engine: TextEngine) -> None:
        self.engine = engine
        self.random = random.Random(5)  # noqa: S311  # no secret
        self.number = self.refused = self.computed = self.sampled = 0
        self.reasons = dict.fromkeys(FINISH_REASONS, 0)
        self.living: list[str] = []
        engine.core.executor.worker.runner.model.register_forward_pre_hook(self._count)

    def serve(self, count: int) -> None:
        """Serve that many more requests, all to their ends."""
        last = self.number + count
        while self.number < last or self.engine.has_work:
            while self.number < last and len(self.living) < 2 * ROWS:
                self._add()
            if self.living and self.random.random() < 0.2:
                self._abort()
            for output in self.engine.step():
                if output.finished:
                    self.living.remove(output.request_id)
                    self._note(output)

    def _count(self, model: Any, inputs: Any) -> None:
        self.computed += len(inputs[0])

    def _note(self, output: RequestOutput) -> None:
        """Count what somebody was told who read the whole output."""
        assert all(answer.error is None for answer in output.outputs)
        for answer in output.outputs:
            self.sampled += len(answer.token_ids)
            self.reasons[str(answer.finish_reason)] += 1

    def _add(self) -> None:
        draw, name = self.random, str(self.number)
        prompt = [draw.choice((3, 3, 4)) for _ in range(draw.choice((1, 4, 9, 20, 63, 64)))]
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 3)), max_tokens=draw.randint(1, 6), logprobs=draw.choice((None, None, 2)),
            prompt_logprobs=draw.choice((None, None, None, 1)), stop_token_ids=[5, 6, 7], seed=self.number,
        )  # fmt: skip
        self.number += 1
        try:
            add(self.engine, name, prompt, params, cache_salt=draw.choice((None, None, name)))
        except OpgraftError:
            assert len(prompt) == 64
            self.refused += 1
        else:
            self.living.append(name)

    def _abort(self) -> None:
        name = self.living.pop(self.random.randrange(len(self.living)))
        self._note(self.engine.abort(name))

    def expect_nothing_held(self) -> None:
        expect_empty(self.engine.core)
        assert not any((self.living, self.engine._open, self.engine._owner))

    def expect_counted(self) -> None:
        """See that the engine has counted what its model computed and what readers were told."""
        counters = self.engine.stats().counters
        assert counters.finished == self.reasons
        assert counters.prompt_tokens + counters.decode_tokens == self.computed
        assert counters.sampled_tokens == self.sampled


@pytest.mark.parametrize(
    ("family", "requests"),
    [pytest.param(family, 10_000, marks=pytest.mark.slow) for family in ("Llama", "Gemma3")],
)
def test_many_requests_leave_nothing(family: str, requests: int, tmp_path: Path) -> None:
    """Neither blocks nor rows nor objects nor memory of requests that ended, were aborted or refused remain.

    What ran, and how it ended, is what the counters say.
    """
    written(
        family, tmp_path / "model", **SMALLEST, num_hidden_layers=2, head_dim=8, sliding_window=6
    )
    engine = TextEngine(
        settings(tmp_path / "model", num_blocks=64, max_num_seqs=ROWS, max_num_batched_tokens=40)
    )
    visitors = Visitors(engine)
    visitors.serve(200)
    visitors.expect_nothing_held()
    growth: list[int] = []
    for _ in rounds(growth):
        visitors.serve(requests // ROUNDS)
        visitors.expect_nothing_held()
    counts = visitors.refused, *(visitors.reasons[reason] for reason in ("abort", "stop", "length"))
    assert min(counts) > requests // 10, counts
    visitors.expect_counted()
    assert in_each(growth) < requests // ROUNDS // 2, growth
