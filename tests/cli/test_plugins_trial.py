"""``opgraft plugins trial``: plugins that make a model worse are found, and others raise no alarm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opgraft.cli.isolation import going_without
from opgraft.cli.plugins_trial import print_trial
from opgraft.cli.trial_run import run_alone
from opgraft.cli.trial_verdict import Trial, TrialRun, faults_of
from opgraft.config import OpgraftConfig, set_config
from support.small_words import word_llama

SCHEMAS = Path(__file__).parents[2] / "docs/reference/schemas"
TOKENS = [[1, 2, 3], [4, 5, 6]]


def by_token(
    first: list[float], second: list[float], tokens: list[list[int]] = TOKENS, **others: float
) -> list[list[dict[str, float]]]:
    """The log-probabilities of two answers; those of other tokens, such as ``t9``, at each place."""
    likely = {name.removeprefix("t"): value for name, value in others.items()}
    answers = []
    for row, values in zip(tokens, (first, second), strict=True):
        places = zip(row, values, strict=True)
        answers.append([{**likely, str(token): value} for token, value in places])
    return answers


RUN = TrialRun(
    status="activated",
    reason="",
    dtype="float32",
    start=3.0,
    kernels={"linear: Linear.forward_native of opgraft": 9},
    tokens=TOKENS,
    logprobs=by_token([-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2]),
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
        (changed(logprobs=by_token([-0.5, -1.0, -2.1], [-0.1, -3.0, -0.2])), "change by up to 0.1"),
        (changed(logprobs=by_token([-0.5, -1.0, NAN], [-0.1, -3.0, -0.2])), "change by up to inf"),
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
        (changed(logprobs=by_token([-0.5, -1.001, -2.0], [-0.1, -3.004, -0.2])),) * 2,
        (changed(status="rejected", reason="applies on cuda only"),) * 2,
        (changed(ops={"linear": 0.006, "rms_norm": 0.0016}),) * 2,
    ],
)
def test_what_is_no_fault(runs: tuple[TrialRun, TrialRun]) -> None:
    """One slow run of two, gains, rounding, little, and a plugin for another platform."""
    assert words_of(*runs) == []


OTHER = [[1, 9, 7], [4, 5, 6]]
"""The tokens of an answer that goes on otherwise."""


@pytest.mark.parametrize(
    ("rival", "logprobs", "words"),
    [
        # Rounding decides between two tokens. Behind them, the texts differ.
        (-1.001, by_token([-0.5, -0.999, -9.0], [-0.1, -3.0, -0.2], OTHER, t2=-1.0), []),
        # The plugin gives the token of another id: its log-probability is that of the former one.
        (
            -7.0,
            by_token([-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2], OTHER, t2=-7.0),
            ["2 tokens changed", "log-probabilities change by up to 6"],
        ),
        # The former token is none of the likeliest.
        (
            -7.0,
            by_token([-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2], OTHER),
            ["2 tokens changed"],
        ),
        # The plugin gives the second-best token, with its true log-probability.
        (
            -1.1,
            by_token([-0.5, -1.1, -2.0], [-0.1, -3.0, -0.2], OTHER, t2=-1.0),
            ["2 tokens changed"],
        ),
        # The two are close, and the plugin gives the less likely one.
        (
            -1.001,
            by_token([-0.5, -1.001, -2.0], [-0.1, -3.0, -0.2], OTHER, t2=-1.0),
            ["2 tokens changed"],
        ),
    ],
)
def test_other_tokens(
    rival: float, logprobs: list[list[dict[str, float]]], words: list[str]
) -> None:
    """Another token is a fault, unless both runs give both tokens about the same log-probability."""
    before = by_token([-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2], t9=rival)
    pair = changed(logprobs=before), changed(tokens=OTHER, logprobs=logprobs)
    assert [fault.words for fault in faults_of([pair, pair])] == words


def test_every_token_changed() -> None:
    """The rows of the head are rolled by one: all log-probabilities are equal, and all tokens differ."""
    tokens = [[token + 1 for token in row] for row in TOKENS]
    logprobs = by_token([-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2], tokens)
    within = changed(tokens=tokens, logprobs=logprobs)
    assert words_of(within, within) == ["6 tokens changed"]


def test_answers_of_one_pair() -> None:
    """A fault of the answers counts in any pair, and is told once."""
    wrong = changed(logprobs=by_token([-0.5, -1.0, NAN], [-0.1, -3.0, -0.2]), repeats=False)
    slightly = changed(logprobs=by_token([-0.5, -1.0, -2.1], [-0.1, -3.0, -0.2]))
    told = [
        "log-probabilities change by up to inf",
        "the same request gets other answers from round to round",
    ]
    assert words_of(wrong, RUN) == words_of(wrong, slightly) == told
    failed = changed(status="failed", reason="no library")
    assert words_of(failed, RUN) == ["the plugin fails: no library"]


def test_the_answer_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A log-probability that is no number is null, and so is the run of a model that fails."""
    broken = changed(logprobs=by_token([NAN, -1.0, -2.0], [-0.1, float("-inf"), -0.2]))
    print_trial("acme", "llama", Trial([(RUN, broken)], ("it fails",), unpaired=RUN), True)
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    schema = json.loads((SCHEMAS / "opgraft.plugins.trial.1.json").read_text())
    assert list(Draft202012Validator(schema).iter_errors(told)) == []
    first, second = told["runs"]
    assert first["with"]["logprobs"][0][0] == {"1": None}
    assert first["with"]["logprobs"][1][1] == {"5": None}
    assert first["without"] == second["without"]
    assert second["with"] is None


def test_a_model_that_fails_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The text has the fault alone."""
    trial = Trial([], ("the model fails with it: status 3",), unpaired=RUN)
    print_trial("acme", "llama", trial, False)
    assert capsys.readouterr().out == "worse: the model fails with it: status 3\n"


def test_going_without_what_settings_name(site) -> None:
    """The names leave the allow list and ``providers``; other plugins of the distribution stay."""
    points = {"opgraft.plugins": ["acme = acme", "brix = brix"]}
    site.install("acme-dist", {"acme.py": "", "brix.py": ""}, points)
    wanted = {"rms_norm": ("acme", "native"), "silu": "acme-dist", "gelu": "brix"}
    with set_config(OpgraftConfig(plugins=("acme-dist",), providers=wanted)):
        given = going_without(["acme"])
        assert going_without([]) == {}
        both = going_without(["acme-dist"])
    assert (given["plugins_disable"], given["plugins"]) == ("acme", "brix")
    assert json.loads(given["providers"]) == {"rms_norm": ["native"], "gelu": ["brix"]}
    assert both["plugins"] == ""
    assert json.loads(both["providers"]) == {"rms_norm": ["native"]}


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
    for tokens, places in zip(run.tokens, run.logprobs, strict=True):
        for token, place in zip(tokens, places, strict=True):
            assert len(place) == 5
            assert place[str(token)] == max(place.values()) < 0
    assert any(row.startswith("rms_norm: ") for row in run.kernels)
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
        "the model fails",
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
    "rolls the head by one": (
        """
import opgraft
from opgraft.ops import LogitsProcessor
platforms = "any"
class Mine(LogitsProcessor):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).roll(1, -1)
@opgraft.hookimpl
def opgraft_register_ops():
    LogitsProcessor.register_oot(Mine)
""",
        "tokens changed",
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
    named = {"OPGRAFT_PLUGINS": "acme", "OPGRAFT_PROVIDERS": "silu_and_mul=acme"}
    allowed = named if name == "computes the same" else {}
    result = cli("plugins", "trial", "acme", str(model), **allowed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing got worse" in result.stdout
    assert "0 tokens of 48 changed" in " ".join(result.stdout.split())
