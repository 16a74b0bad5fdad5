"""``opgraft plugins trial``: one model with and without a plugin."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
from opgraft.cli.isolation import Limits, going_without, isolated
from opgraft.cli.output import (
    COMMAND_LINE,
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_table,
    print_wrapped,
    with_model_settings,
)
from opgraft.cli.trial_verdict import Trial, TrialRun, faults_of
from opgraft.config.checkpoints import find_checkpoint
from opgraft.errors import InputError, close_matches
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state

_MODEL = "smollm2"
_PAIRS = 2
_MOST_PAIRS = 4
"""More pairs than usual run only if the first ones tell of a loss of speed."""

_PATIENCE = 300.0
"""Seconds for a run without a word."""


@click.command("trial", cls=SettingsCommand)
@click.argument("name")
@click.argument("model", required=False, default=_MODEL)
@click.option(
    "--tokens", type=click.IntRange(2), default=16, show_default=True, help="Of each answer."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=_PATIENCE,
    show_default=True,
    help="Seconds for a run of the model.",
)
@json_option
@with_model_settings
def command(name: str, model: str, tokens: int, time_limit: float, as_json: bool) -> None:
    """Run MODEL, or SmolLM2, with and without the plugin NAME, and compare the two.

    Compares kernels, tokens, log-probabilities, time per op and in total, the time to start, and
    memory. Each run has a process of its own, and the runs take turns. Exit code 1: something got
    worse.
    """
    if host_state().settings().origins["model.name"] == COMMAND_LINE:
        raise click.UsageError("MODEL names the model: leave --model.name out")
    plugins = _plugins_named(name)
    find_checkpoint(model)
    trial = _tried(plugins, model, tokens, time_limit)
    print_trial(", ".join(plugins), model, trial, as_json)
    sys.exit(1 if trial.worse else 0)


def _plugins_named(name: str) -> list[str]:
    """Return the names of the plugin, or of each plugin of the distribution, with a name.

    Raises:
        InputError: no plugin has the name.
    """
    offers = discover().of_group(PLUGIN_GROUP)
    named = [offer.name for offer in offers if offer.answers_to(name)]
    if named:
        return named
    near = close_matches(name, [offer.name for offer in offers])
    raise InputError(f"no plugin {name!r} is installed: {near}")


def _tried(plugins: Sequence[str], model: str, tokens: int, time_limit: float) -> Trial:
    """Run a model with and without plugins, in turns.

    Raises:
        InputError: the model fails without the plugins.
    """
    pairs: list[tuple[TrialRun, TrialRun]] = []
    while True:
        without = _run(plugins, model, tokens, time_limit, going_without(plugins))
        if isinstance(without, Finding):
            raise InputError(f"{model} cannot be run without {', '.join(plugins)}: {without}")
        within = _run(plugins, model, tokens, time_limit, {})
        if isinstance(within, Finding):
            return Trial(pairs, (f"the model fails with it: {within}",), unpaired=without)
        pairs.append((without, within))
        if len(pairs) < _PAIRS:
            continue
        faults = faults_of(pairs)
        # Another program may have taken the processor from a run.
        if len(pairs) == _MOST_PAIRS or not any(fault.of_time for fault in faults):
            return Trial(pairs, tuple(fault.words for fault in faults))


def _run(
    plugins: Sequence[str], model: str, tokens: int, time_limit: float, given: Mapping[str, str]
) -> TrialRun | Finding:
    """Run a model in a process of its own, and return the finding if the process fails."""
    outcome = isolated(
        "opgraft.cli.trial_run",
        "run_alone",
        ",".join(plugins),
        model,
        str(tokens),
        limits=Limits(time_limit),
        given=given,
    )
    if outcome.crash is not None:
        return outcome.crash
    return TrialRun(**outcome.result)


def print_trial(plugin: str, model: str, trial: Trial, as_json: bool) -> None:
    """Print the runs and the faults."""
    if as_json:
        _print_as_json(plugin, model, trial)
    else:
        _print_as_text(plugin, trial)


def _print_as_text(plugin: str, trial: Trial) -> None:
    # Without a run to compare, there are no figures.
    if trial.unpaired is not None:
        print_wrapped(f"worse: {words}" for words in trial.worse)
        return
    _, within = trial.pairs[-1]
    if within.status != "activated":
        print_wrapped(f"{plugin} is {within.status}: {within.reason}")
    kernels = list(trial.changed_kernels())
    if kernels:
        print_table(("op", f"without {plugin}", f"with {plugin}"), kernels)
        echo()
    times = []
    for name, before, after in trial.times():
        times.append((name, _in_words(before), _in_words(after)))
    print_table(("a step", "without", "with"), times)
    echo()
    print_wrapped(trial.summary())
    print_wrapped(f"worse: {words}" for words in trial.worse)
    if not trial.worse:
        echo("nothing got worse")


def _in_words(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


def _print_as_json(plugin: str, model: str, trial: Trial) -> None:
    runs: list[dict[str, Any]] = []
    for without, within in trial.pairs:
        runs.append({"without": _as_json(without), "with": _as_json(within)})
    if trial.unpaired is not None:
        runs.append({"without": _as_json(trial.unpaired), "with": None})
    data = {"plugin": plugin, "model": model, "runs": runs, "worse": list(trial.worse)}
    print_json("opgraft.plugins.trial/1", data)


def _as_json(run: TrialRun) -> dict[str, Any]:
    """Return a run as plain data. JSON has no word for NaN or infinity, so they become null."""
    data = asdict(run)
    for answer in data["logprobs"]:
        for place in answer:
            for token, value in place.items():
                if not math.isfinite(value):
                    place[token] = None
    return data
