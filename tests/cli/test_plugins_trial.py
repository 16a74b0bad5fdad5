"""``opgraft plugins trial``: plugins that make a model worse are found, and others raise no alarm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from opgraft.cli.trial_run import run_alone
from opgraft.cli.trial_verdict import TrialRun, faults_of
from support.small_words import word_llama

RUN = TrialRun(
    status="activated",
    reason="",
    dtype="float32",
    start=3.0,
    kernels={"linear: Linear.forward_native of opgraft": 9},
    tokens=[[1, 2, 3], [4, 5, 6]],
    logprobs=[[-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2]],
    repeats=True,
    step=0.010,
    ops={"linear": 0.006, "rms_norm": 0.001},
    peak=1 << 30,
    growth=0.0,
)
NAN = float("nan")


def changed(**values: Any) -> TrialRun:
    return dataclasses.replace(RUN, **values)


def words_of(*runs: TrialRun) -> list[str]:
    """The faults of runs with the plugin, beside equal ones without it."""
    return [fault.words for fault in faults_of([(RUN, run) for run in runs])]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (changed(status="failed", reason="no library"), "the plugin fails: no library"),
        (changed(logprobs=[[-0.5, -1.0, -2.1], [-0.1, -3.0, -0.2]]), "change by up to 0.1"),
        (changed(logprobs=[[-0.5, -1.0, NAN], [-0.1, -3.0, -0.2]]), "change by up to inf"),
        (changed(repeats=False), "other answers from round to round"),
        (changed(step=0.012), "a step takes 1.20 times as long"),
        (changed(ops={"linear": 0.006, "rms_norm": 0.002}), "rms_norm takes 2.00 times as long"),
        (changed(start=9.0), "the model is ready after 3.00 times as long"),
        (changed(peak=5 << 28), "takes 1.25 times as much memory"),
        (changed(growth=float(1 << 20)), "leaves 1.0 MiB behind"),
    ],
)
def test_what_got_worse(run: TrialRun, words: str) -> None:
    """Each figure has its sentence, alone."""
    (found,) = words_of(run, run)
    assert words in found


@pytest.mark.parametrize(
    "runs",
    [
        (RUN, RUN),
        (changed(step=0.02, ops={"linear": 0.02}), RUN),
        (RUN, changed(start=30.0, peak=8 << 30, growth=1e9)),
        (changed(step=0.011), changed(step=0.011)),
        (changed(step=0.001, ops={}, start=0.1, peak=0, growth=-1e9),) * 2,
        (changed(logprobs=[[-0.5, -1.001, -2.0], [-0.1, -3.004, -0.2]]),) * 2,
        (changed(status="rejected", reason="applies on cuda only"),) * 2,
        (changed(ops={"linear": 0.006, "rms_norm": 0.0016}),) * 2,
    ],
)
def test_what_is_no_fault(runs: tuple[TrialRun, TrialRun]) -> None:
    """One slow run of two, gains, rounding, little, and a plugin for another platform."""
    assert words_of(*runs) == []


def test_a_changed_token_ends_the_comparison() -> None:
    """Behind another token, the answers go on from other texts; at the token, the two are about as likely."""
    within = changed(tokens=[[1, 9, 7], [4, 5, 6]], logprobs=[[-0.5, -1.0, -9.0], RUN.logprobs[1]])
    assert words_of(within, within) == []
    within = changed(tokens=[[1, 9, 3], [4, 5, 6]], logprobs=[[-0.5, -1.5, -2.0], RUN.logprobs[1]])
    (found,) = words_of(within, within)
    assert "change by up to 0.5" in found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose answers depend on every kernel."""
    return word_llama(
        tmp_path_factory.mktemp("trial"),
        hidden_size=64,
        intermediate_size=128,
        initializer_range=0.3,
        max_position_embeddings=256,
    )


def test_a_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has answers with log-probabilities, kernels, time per op and memory, and repeats itself."""
    monkeypatch.setattr("opgraft.cli.trial_run._ENOUGH", 0.0)
    run = TrialRun(**run_alone("none", str(model), "4"))
    assert run.status == "absent"
    assert run.dtype == "float32"
    assert run.repeats
    assert [len(row) for row in run.tokens] == [len(row) for row in run.logprobs] == [4, 4, 4]
    assert all(value < 0 for row in run.logprobs for value in row)
    assert any(row.startswith("rms_norm: ") for row in run.kernels)
    assert run.ops["linear"] > 0
    assert run.ops["linear"] > 0
    assert sum(run.ops.values()) < 3 * run.step
    assert run.peak > 1 << 26


def test_a_plugin_that_is_not_installed(cli) -> None:
    """The error comes before any run."""
    result = cli("plugins", "trial", "none_such")
    assert result.returncode == 2
    assert "no plugin 'none_such' is installed" in result.stderr


HEAD = """
import os, threading, time
import opgraft, torch
from opgraft.ops import {target}
platforms = "any"
STATE = []
{top}
class Mine({target}):
    def forward_oot(self, *args, **kwargs):
        {before}
        found = super().forward_native(*args, **kwargs)
        {after}
        return found
@opgraft.hookimpl
def opgraft_register_ops():
    {hook}
    {target}.register_oot(Mine)
"""


def plugin(
    target: str = "SiluAndMul",
    *,
    top: str = "",
    before: str = "pass",
    after: str = "pass",
    hook: str = "pass",
) -> str:
    return HEAD.format(target=target, top=top, before=before, after=after, hook=hook)


WORSE = {
    "wrong by a tenth": (plugin(after="found = found * 1.1"), "log-probabilities change"),
    "another result each time": (
        plugin(after="found = found + torch.randn_like(found) * 0.1"),
        "log-probabilities change",
    ),
    "rounds to two digits": (
        plugin(after="found = found.to(torch.float8_e4m3fn).to(found.dtype)"),
        "log-probabilities change",
    ),
    "makes NaN late": (
        plugin(
            before="STATE.append(0)",
            after="found = found * (float('nan') if len(STATE) > 40 else 1)",
        ),
        "",
    ),
    "fails late": (
        plugin(before="STATE.append(0); STATE[len(STATE) > 40 and 10**9]"),
        "the model fails",
    ),
    "ends the process": (
        plugin(before="STATE.append(0); len(STATE) > 40 and os._exit(3)"),
        "the model fails",
    ),
    "sleeps in each call": (plugin(before="time.sleep(0.002)"), "times as long"),
    "is slow to load": (plugin(top="time.sleep(8)"), "ready after"),
    "keeps its results": (
        plugin(before="STATE.append(torch.ones(30000))"),
        "MiB behind",
    ),
    "takes much memory": (plugin(hook="STATE.append(torch.ones(1 << 26))"), "as much memory"),
}
HONEST = {
    "computes the same": plugin(),
    "replaces the norm": plugin("RMSNorm"),
    "replaces linear layers": plugin("Linear"),
    "replaces the rotation": plugin("RotaryEmbedding"),
    "brings a function": """
import opgraft
from opgraft.ops import SiluAndMul
from torch.nn import functional as F
platforms = "any"
def silu_and_mul(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
class Mine(SiluAndMul):
    functional_oot = {"silu_and_mul": silu_and_mul}
@opgraft.hookimpl
def opgraft_register_ops():
    SiluAndMul.register_oot(Mine)
""",
    "has a priority": plugin().replace("register_oot(Mine)", "register_oot(Mine, priority=5)"),
    "replaces an op that no step needs": plugin("GELU"),
    "computes in float64": plugin(after="found = found.double().to(found.dtype)"),
    "rounds otherwise": plugin(after="found = found * (1 + 1e-6)"),
    "keeps a little": plugin(before="STATE.append(0)"),
    "takes a little memory": plugin(hook="STATE.append(torch.ones(1 << 20))"),
    "is for another platform": plugin().replace('"any"', '("cuda",)'),
    "vetoes itself": plugin() + "@opgraft.hookimpl\ndef opgraft_veto():\n    return 'old driver'\n",
    "has settings alone": """
import opgraft
platforms = "any"
@opgraft.hookimpl
def opgraft_config():
    return opgraft.OpgraftConfig(check_values=False)
""",
    "has a condition that does not hold": plugin().replace(
        "register_oot(Mine)", "register_oot(Mine, when=lambda platform: False)"
    ),
    "states its contracts": plugin(top="contracts = {'kernel': 1}"),
    "loads in a moment": plugin(top="time.sleep(0.2)"),
    "looks at its input": plugin(before="args[0].shape"),
    "has a thread that waits": plugin(
        hook="threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "has an adapter": """
import opgraft
from opgraft.ops import SiluAndMul
platforms = "any"
@opgraft.hookimpl
def opgraft_graft_adapters():
    return [opgraft.Adapter("mine", SiluAndMul, lambda module: None)]
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORSE)
def test_a_plugin_that_makes_something_worse(cli, site, model: Path, name: str) -> None:
    """The exit code is 1, and a sentence says what got worse."""
    source, words = WORSE[name]
    site.plugin("acme", source)
    result = cli("plugins", "trial", "acme", str(model), "--json", "--time-limit", "120")
    assert result.returncode == 1, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["worse"]
    assert any(words in each for each in told["worse"]), told["worse"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_plugin(cli, site, model: Path, name: str) -> None:
    """The exit code is 0, and the answer compares the runs."""
    site.plugin("acme", HONEST[name])
    allowed = {"OPGRAFT_PLUGINS": "acme"} if name == "computes the same" else {}
    result = cli("plugins", "trial", "acme", str(model), **allowed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing got worse" in result.stdout
    assert "0 tokens of 48 changed" in " ".join(result.stdout.split())
