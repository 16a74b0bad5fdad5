"""Help, usage errors and misspelt models import no torch, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from opgraft import cli

COMMAND_LINES = """
run --help
serve --help
chat --help
plan --help
run
run MODEL --nonsense
run MODEL hi --max-tokens 0
run MODEL hi --model.name other
run MODEL hi --input lines.txt
run MODEL hi --compare --temperature 1
run MODEL --input missing.txt
run MODEL hi --cache.num_blocks many
run MODEL hi --config missing.toml
serve
serve MODEL --port many
serve MODEL --model.name other
serve MODEL --api-key=
chat MODEL --temperature -1
chat MODEL --model.name other
plan MODEL
plan MODEL --devices 0
plan MODEL --devices 2 --memory much
plan MODEL --devices 2 --device nonsense
verify --help
trace --help
trace MODEL
trace MODEL --perfetto trace.json --steps 0
verify MODEL --tokens 1
run misspelt
run misspelt hi --json
run org/misspelt hi
run missing.gguf hi
run missing/folder hi --compare
serve misspelt
chat misspelt
plan misspelt --devices 2 --device h100
verify misspelt
verify smolm2 --graft
tune rms_norm --dtype float8
tune rms_norm --seconds 0
cache export
cache import missing
cache import missing --sha256 0
cache import missing --key missing
"""

SCRIPT = """
import sys
from opgraft import cli

for line in sys.stdin.read().strip().splitlines():
    code = cli._run(line.split())
    print("ANSWER", code, line)
"""
NO_TORCH = "print('TORCH IS IMPORTED')\nraise ImportError('no torch')\n"


def lines_of(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[str]:
    """The help of each command of a group, and two usage errors of each."""
    for name in group.list_commands(click.Context(group)):
        line = " ".join((*words, name))
        yield f"{line} --help"
        yield f"{line} --nonsense"
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from lines_of(command, (*words, name))
        else:
            required = [each for each in command.params if each.required]
            yield from [line] * bool(required)


def test_help_usage_errors_and_misspelt_models_import_no_torch(tmp_path: Path) -> None:
    """Each command line ends with 0 or 2, although there is a torch that cannot be imported."""
    lines = [*lines_of(cli.cli), *COMMAND_LINES.strip().splitlines()]
    torch = tmp_path / "first" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(NO_TORCH, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(torch.parent)},
    )
    assert "TORCH IS IMPORTED" not in ran.stdout
    answers = [line.split(" ", 2) for line in ran.stdout.splitlines() if line.startswith("ANSWER")]
    assert [row[2] for row in answers] == lines, ran.stderr
    for _, code, line in answers:
        assert code == ("0" if line.endswith("--help") else "2"), line
