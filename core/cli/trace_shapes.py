"""``opgraft trace-shapes``: record the calls of forms of a model or a program."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from opgraft.base.text import printable
from opgraft.cli.answers import answers_apart
from opgraft.cli.evidence import write_text
from opgraft.cli.exec import run_program
from opgraft.cli.output import GivenPath, print_table
from opgraft.cli.verify import is_function
from opgraft.config.checkpoints import find_checkpoint
from opgraft.testing.shapes import FormCall, ModelShapes, written


@click.command(
    "trace-shapes",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "is_module", is_flag=True, help="MODEL is the name of a module, a program.")
@click.option(
    "--meta",
    "on_meta",
    is_flag=True,
    help="Compute shapes only, without weights: a folder with a config.json is enough.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=32,
    show_default=True,
    help="Of the prompt, which one token follows.",
)
@click.option(
    "--save",
    "file",
    metavar="FILE",
    type=GivenPath(path_type=Path, dir_okay=False),
    default=Path("opgraft-shapes.json"),
    show_default=True,
    help="Where the record goes.",
)
@click.argument("model")
@click.argument("arguments", metavar="[ARG]...", nargs=-1, type=click.UNPROCESSED)
def command(
    is_module: bool,
    on_meta: bool,
    tokens: int,
    file: Path,
    model: str,
    arguments: tuple[str, ...],
) -> None:
    """Record the ops, shapes, dtypes and counts of a run of MODEL, and write them to --save.

    MODEL is a model as for 'opgraft run', or module:function, of a function that returns a PyTorch
    model and the arguments of a call. Or MODEL is a program, a file that ends with .py: it runs
    with each ARG, as by 'opgraft exec'. All ops run their native definitions. 'opgraft
    conformance', 'opgraft plugins check' and 'opgraft tune' replay a record by --shapes.
    """
    is_program = is_module or model.endswith(".py")
    if is_program and on_meta:
        raise click.UsageError("a program computes with its own weights: leave --meta out")
    if arguments and not is_program:
        raise click.UsageError(f"only a program takes arguments: leave {arguments[0]!r} out")
    if not is_program and not is_function(model):
        find_checkpoint(model)
    # The program may change the folder.
    file = file.absolute()
    # Imports torch, which --help does without.
    from opgraft.cli.traced_shapes import recording_natives, trace_model

    if is_program:
        with recording_natives() as counts:
            code, *_ = run_program(model, arguments, is_module=is_module)
        _save(ModelShapes(Path(model).name, counts), file)
        # The end of a normal command would cut off the threads that the program leaves.
        sys.exit(code)
    # Plugins may print when they are loaded.
    with answers_apart():
        counts = trace_model(model, tokens, on_meta=on_meta)
        _save(ModelShapes(Path(model).name, counts), file)
        rows = [_call_row(call, count) for call, count in counts.items()]
        print_table(("count", "form", "arguments"), rows)


def _save(shapes: ModelShapes, file: Path) -> None:
    write_text(file, written([shapes]))
    calls = sum(shapes.counts.values())
    told = f"{calls} calls of {len(shapes.counts)} kinds, written to {file}"
    click.echo(printable(told), err=True)


def _call_row(call: FormCall, count: int) -> tuple[object, ...]:
    arguments = [f"{name}={value}" for name, value in call.arguments]
    return count, call.form, ", ".join(arguments)
