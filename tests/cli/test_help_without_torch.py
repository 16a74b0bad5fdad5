"""Help, usage errors and misspelt models import no torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
"""

SCRIPT = """
import sys
from opgraft import cli

for line in sys.stdin.read().strip().splitlines():
    code = cli._run(line.split())
    print("ANSWER", code, "torch" in sys.modules, line)
"""


def test_help_usage_errors_and_misspelt_models_import_no_torch(tmp_path: Path) -> None:
    """Each command line ends with 0 or 2, and torch is not imported after any of them."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=COMMAND_LINES,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    answers = [line.split(" ", 3) for line in ran.stdout.splitlines() if line.startswith("ANSWER")]
    assert [row[3] for row in answers] == COMMAND_LINES.strip().splitlines(), ran.stderr
    for _, code, imported, line in answers:
        expected = "0" if line.endswith("--help") else "2"
        assert (code, imported) == (expected, "False"), line
