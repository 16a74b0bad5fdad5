"""Parts of the engine that a plugin replaces: right ones are used, and what wrong ones do harms nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from conftest import Site
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import StepResult
from support.engines import engine, expect_empty, news, prompts
from support.random_decoders import written

LENGTHS = (3, 9, 1, 6, 12, 4, 2, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replaced") / "llama"
    written("Llama", folder)
    return folder


@pytest.fixture(scope="module")
def right(checkpoint: Path) -> dict[str, list[int]]:
    """The tokens of all requests, without any plugin."""
    return served(engine(checkpoint))[0]


def served(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Serve a request of each length; return the tokens of those that end well, and the errors of the others."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts(*LENGTHS))]
    core.add(requests)
    errors = {output.request_id: output.error for output in news(core) if output.error is not None}
    expect_empty(core)
    return {
        each.request_id: each.output for each in requests if each.request_id not in errors
    }, errors


BAD_RESULTS: dict[str, tuple[Callable[[StepResult], StepResult], str]] = {
    "a token is missing": (
        lambda result: replace(result, tokens=dict(list(result.tokens.items())[1:])),
        "gave no token for request 'r0'",
    ),
    "a token of nobody": (
        lambda result: replace(result, tokens={**result.tokens, "nobody": 5}),
        "has a token or an error for 'nobody'",
    ),
    "tokens behind no draft": (
        lambda result: replace(result, further={"r0": [(5, None)]}),
        "has a token or an error for 'r0'",
    ),
    "an error of nobody": (
        lambda result: replace(result, errors={"nobody": "gone"}),
        "has a token or an error for 'nobody'",
    ),
    "no times": (lambda result: replace(result, seconds=None), "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_RESULTS)
def test_a_wrong_result_of_a_runner_fails_its_step(
    checkpoint: Path, right: dict[str, list[int]], what: str
) -> None:
    """Whatever a replaced runner gives: the requests of that step fail and say so, and the others have their tokens."""
    spoil, message = BAD_RESULTS[what]
    core = engine(checkpoint)
    runner, execute = core.executor.worker.runner, core.executor.worker.runner.execute
    calls = count()
    runner.execute = lambda step: spoil(execute(step)) if next(calls) == 5 else execute(step)
    tokens, errors = served(core)
    assert len(errors) == 4
    assert all(message in error for error in errors.values())
    assert {name: right[name] for name in tokens} == tokens
    assert core.stats().counters.failed_steps == 1
    assert core.stats().counters.finished == {"stop": 0, "length": 4, "abort": 0, "error": 4}


def test_times_of_other_parts_are_not_counted(checkpoint: Path) -> None:
    """A replaced runner may name a part that it alone knows, and its tokens are taken."""
    core = engine(checkpoint)
    runner, execute = core.executor.worker.runner, core.executor.worker.runner.execute
    runner.execute = lambda step: replace(execute(step), seconds={"transfer": 1.0, "model": 2.0})
    _, errors = served(core)
    counters = core.stats().counters
    assert not errors
    assert counters.seconds["model"] == 2.0 * counters.steps
    assert "transfer" not in counters.seconds


PLUGIN = """
import opgraft
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.engine.schedule.scheduler import Scheduler

platforms = "any"


class OneAtATime(Scheduler):
    def schedule(self):
        step = super().schedule()
        assert len(step.sequences) <= 1
        return step

    def _admit(self, pending, most):
        if not self.running:
            super()._admit(pending, 1)


class Counting(KVCacheManager):
    opened = 0

    def open(self, request, prefix):
        self.opened += 1
        return super().open(request, prefix)


@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.PluggableClass.register_oot(OneAtATime, name="scheduler")
    opgraft.PluggableClass.register_oot(Counting, name="kv_cache_manager")
"""


def test_a_plugin_replaces_the_scheduler_and_the_cache_manager(
    checkpoint: Path, right: dict[str, list[int]], site: Site
) -> None:
    """Both are constructed by name: another order of requests gives the same tokens."""
    site.plugin("another-order", PLUGIN)
    core = engine(checkpoint)
    assert (type(core.scheduler).__name__, type(core.cache).__name__) == ("OneAtATime", "Counting")
    assert served(core) == (right, {})
    assert core.cache.opened == len(LENGTHS)


SAMPLER = """
import opgraft
from opgraft.engine.sampling import Sampler

platforms = "any"


class Wrong(Sampler):
    def __call__(self, logits, batch):
        sampled = super().__call__(logits, batch)
        {}


@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.PluggableClass.register_oot(Wrong, name="sampler")
"""
SAMPLED = {
    "sampled.tokens.fill_(10**6); return sampled": "the token 1000000, which no vocabulary of",
    "sampled.tokens.fill_(-2); return sampled": "the token -2, which no vocabulary of",
    "return sampled.tokens": "returned a Tensor, expected opgraft's SampledTokens",
    "return SampledTokens(sampled.tokens[:, None])": "returned tokens as torch.int64 [4, 1]",
    "return SampledTokens(sampled.tokens.float())": "returned tokens as torch.float32 [4]",
    "return SampledTokens([1])": "returned tokens as a list, expected a tensor [4]",
}
"""By the last line of a sampler, what it returned."""


@pytest.mark.parametrize("line", SAMPLED)
def test_a_wrong_sampler_is_named(checkpoint: Path, site: Site, line: str) -> None:
    """Its plugin, its place and the setting to go without it: no op is blamed for such a token."""
    source = SAMPLER.format(line).replace("import Sampler", "import SampledTokens, Sampler")
    site.plugin("odd-sampler", source)
    _, errors = served(engine(checkpoint))
    assert len(errors) == len(LENGTHS)
    for error in errors.values():
        assert SAMPLED[line] in error
        assert "Wrong of odd-sampler 1.0 at " in error
        assert "to go without it: OPGRAFT_PROVIDERS=sampler=native" in error
