"""``opgraft bench serve``: load on a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from opgraft.cli.output import GivenPath, echo, json_option, print_json, print_table, print_wrapped
from opgraft.errors import InputError
from opgraft.progress import progress_bar
from opgraft.server.keys import read_keys
from opgraft.text import printable

if TYPE_CHECKING:
    from opgraft.bench.load import Load
    from opgraft.bench.prompts import Prompt
    from opgraft.bench.report import Report, Spread

_COUNT = click.IntRange(min=1)
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


@click.command("serve")
@click.option("--url", required=True, help="Of the server, such as http://127.0.0.1:8000.")
@click.option("--model", help="That is asked for. [default: the first that the server lists]")
@click.option(
    "--api-key-file",
    type=GivenPath(path_type=Path),
    help="A file whose first line is the key to send.",
)
@click.option("--chat", is_flag=True, help="Ask for chats instead of completions.")
@click.option(
    "--dataset",
    type=GivenPath(path_type=Path),
    help="A file of prompts: JSONL, or a text in each line.",
)
@click.option(
    "--words",
    type=_COUNT,
    default=100,
    show_default=True,
    help="Of random prompts, without --dataset.",
)
@click.option(
    "--requests",
    type=_COUNT,
    default=64,
    show_default=True,
    help="That are measured, for each load.",
)
@click.option(
    "--rate", "rates", type=_ABOVE_ZERO, multiple=True, help="Requests per second; may be repeated."
)
@click.option(
    "--concurrency",
    "at_a_time",
    type=_COUNT,
    multiple=True,
    help="Requests at a time; may be repeated.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant"]),
    default="poisson",
    show_default=True,
    help="Under --rate.",
)
@click.option("--max-tokens", type=_COUNT, default=128, show_default=True, help="Of an answer.")
@click.option(
    "--ignore-eos",
    is_flag=True,
    help="Have answers always that long, where the server knows 'ignore_eos'.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of random prompts and arrivals."
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Requests not measured.",
)
@click.option(
    "--timeout",
    type=_ABOVE_ZERO,
    default=600,
    show_default=True,
    help="Seconds that a request may take.",
)
@click.option(
    "--limit-first-token", type=_ABOVE_ZERO, help="Milliseconds to the first token, for goodput."
)
@click.option(
    "--limit-per-token", type=_ABOVE_ZERO, help="Milliseconds per output token, for goodput."
)
@click.option(
    "--limit-end-to-end", type=_ABOVE_ZERO, help="Milliseconds of a whole request, for goodput."
)
@click.option("--plot", type=GivenPath(path_type=Path), help="A PNG to write; needs matplotlib.")
@json_option
def command(as_json: bool, plot: Path | None, **options: Any) -> int:
    """Put load on a server with OpenAI's interface, and measure throughput, latencies and errors.

    Without --rate and --concurrency, 8 requests run at a time. Exit code 1: a request failed.
    """
    plotting = None if plot is None else _import("plot")
    model, reports = asyncio.run(_measured(options))
    url = options["url"]
    if as_json:
        print_json(
            "opgraft.bench.serve/1",
            {"url": url, "model": model, **_given(options), "loads": _dicts(reports)},
        )
    else:
        echo(f"url    {printable(url)}")
        echo(f"model  {printable(model)}")
        for report in reports:
            _show(report)
    if plotting is not None:
        try:
            plotting.draw(reports, printable(f"{model} at {url}"), plot)
        except OSError as error:
            raise InputError(
                f"the plot cannot be written ({error}): give another file by --plot"
            ) from error
    return int(any(report.errors for report in reports))


def _import(module: str) -> Any:
    try:
        return importlib.import_module(f"opgraft.bench.{module}")
    except ImportError as error:
        raise InputError(
            f"a load test cannot be made ({error}): pip install 'opgraft[bench]'"
        ) from error


async def _measured(options: dict[str, Any]) -> tuple[str, list[Report]]:
    """Run every load, and return the name of the model with a report of each."""
    client_module, load_module, report_module = map(_import, ("client", "load", "report"))
    prompts = _prompts(options)
    reports = []
    file = options["api_key_file"]
    key = None if file is None else read_keys(file, "--api-key-file")[0]
    async with client_module.Client(options["url"], key, options["timeout"]) as client:
        model = options["model"] or await client.model()
        fields = {"temperature": 0, **({"ignore_eos": True} if options["ignore_eos"] else {})}
        question = load_module.Question(model, options["chat"], options["max_tokens"], fields)
        for load in _loads(options, load_module.Load):
            await load_module.run(client, question, prompts[: options["warm_up"]], load)
            measured = prompts[options["warm_up"] :]
            with progress_bar(f"requests ended, {load.label}", len(measured)) as ended:
                outcomes = await load_module.run(client, question, measured, load, ended)
            reports.append(
                report_module.report(load.label, outcomes, _limits(options, report_module.Limits))
            )
    return model, reports


def _prompts(options: dict[str, Any]) -> list[Prompt]:
    """Return the prompts of the warm-up and of one load."""
    module, number = _import("prompts"), options["warm_up"] + options["requests"]
    if options["dataset"] is None:
        prompts: list[Prompt] = module.random_prompts(number, options["words"], options["seed"])
        return prompts
    prompts = module.read_prompts(options["dataset"], number)
    if not options["chat"] and any(isinstance(prompt.content, list) for prompt in prompts):
        raise InputError(f"{options['dataset']} has messages of chats: ask for chats by --chat")
    return prompts


def _loads(options: dict[str, Any], kind: type[Load]) -> list[Load]:
    poisson, seed = options["arrivals"] == "poisson", options["seed"]
    rates = [kind(rate=rate, poisson=poisson, seed=seed) for rate in options["rates"]]
    together = [kind(concurrency=number) for number in options["at_a_time"]]
    return [*rates, *together] or [kind(concurrency=8)]


def _limits(options: dict[str, Any], kind: Any) -> Any:
    names = ("limit_first_token", "limit_per_token", "limit_end_to_end")
    return kind(*(options[name] and options[name] / 1e3 for name in names))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that another run needs to be the same."""
    names = ("chat", "words", "requests", "arrivals", "max_tokens", "ignore_eos", "seed", "warm_up")
    dataset = options["dataset"]
    return {
        "dataset": None if dataset is None else str(dataset),
        **{name: options[name] for name in names},
    }


def _dicts(reports: Sequence[Report]) -> list[dict[str, Any]]:
    return [report.to_dict() for report in reports]


def _show(report: Report) -> None:
    echo()
    print_wrapped(
        f"{report.load}: {report.completed} of {report.requests} requests answered in {report.seconds:.2f} s; "
        f"{report.requests_per_second:.2f} requests/s, goodput {report.goodput:.2f} requests/s, "
        f"{report.prompt_tokens_per_second:.1f} prompt tokens/s, {report.output_tokens_per_second:.1f} output tokens/s"
    )
    if report.errors:
        print_wrapped(
            "errors: " + ", ".join(f"{kind}: {count}" for kind, count in report.errors.items())
        )
        print_wrapped(f"  {kind}: {message}" for kind, message in sorted(report.messages.items()))
    rows = [
        [name, *_cells(getattr(report, key))] for key, name in _import("report").LATENCIES.items()
    ]
    print_table(["milliseconds", "mean", "p50", "p90", "p99"], rows)


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 4
    return [f"{value * 1e3:.2f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99)]
