"""``opgraft trace`` records steps with the kernels of ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

pytest.importorskip("transformers")

SCHEMA = Path(__file__).parents[2] / "docs/reference/schemas/opgraft.trace.1.json"
SMALL = ("--cache.num_blocks", "300", "--load.progress", "false")


def test_steps_and_kernels_are_recorded(cli, causal_folder: Path, tmp_path: Path) -> None:
    """The trace has one range for each step, and the ranges of ops lie within the steps."""
    file = tmp_path / "trace.json"
    asked = ("trace", str(causal_folder), "the cat", "--perfetto", str(file), "--steps", "3")
    result = cli(*asked, "--json", *SMALL)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(answer)
    assert (answer["file"], answer["steps"]) == (str(file), 3)
    events = json.loads(file.read_text())["traceEvents"]
    # Each range of Python has an event of this category.
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in ranges if event["name"].startswith("opgraft step ")]
    assert [step["name"] for step in steps] == [f"opgraft step {place}" for place in range(3)]
    norms = [event for event in ranges if event["name"].startswith("opgraft.rms_norm RMSNorm.")]
    of_steps = [
        sum(step["ts"] <= norm["ts"] <= step["ts"] + step["dur"] for norm in norms)
        for step in steps
    ]
    # Two layers with two norms each, and a last one.
    assert of_steps == [5, 5, 5]


def test_a_file_that_cannot_be_written(cli, causal_folder: Path, tmp_path: Path) -> None:
    """The message names the file and the reason, before the model is loaded."""
    file = tmp_path / "missing" / "trace.json"
    result = cli("trace", str(causal_folder), "--perfetto", str(file), "--steps", "1", *SMALL)
    assert result.returncode == 2
    # A loaded model would have told the size of its cache.
    assert result.stderr.startswith(f"error: the trace cannot be written to {file}")


def test_fewer_steps_than_asked(cli, causal_folder: Path, tmp_path: Path) -> None:
    """If the context ends the answers, the command tells how many steps there were."""
    file = tmp_path / "trace.json"
    asked = ("trace", str(causal_folder), "the cat", "--perfetto", str(file), "--steps", "1000")
    result = cli(*asked, "--model.max_model_len", "8", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "steps of 1000: the answers ended before" in result.stderr


def test_too_many_steps(cli, tmp_path: Path) -> None:
    """More steps than fit into memory are refused."""
    result = cli("trace", "missing", "--perfetto", str(tmp_path / "trace.json"), "--steps", "1001")
    assert result.returncode == 2
    assert "1<=x<=1000" in result.stderr
