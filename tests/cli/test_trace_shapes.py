"""``opgraft trace-shapes``: the record of a model is what a counting kernel sees; programs are traced, too."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from opgraft import OpgraftConfig, set_config
from opgraft.cli import trace_shapes
from opgraft.cli.verified_models import decoder_steps
from opgraft.models.build import load_model
from opgraft.serving.engine_settings import engine_config
from opgraft.testing.shapes import TOKENS, ModelShapes, read

COUNTING = """
from collections import Counter
from opgraft.ops import RMSNorm
platforms = "any"
SEEN = Counter()

@RMSNorm.register_oot
class Counting(RMSNorm):
    def forward_oot(self, x, residual=None):
        form = "rms_norm" if residual is None else "fused_add_rms_norm"
        SEEN[form, tuple(x.shape), str(x.dtype)] += 1
        return self.forward_native(x, residual)
"""

RUNS = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    model(torch.arange(3, 9)[None])
print(sys.argv[2:])
"""

PROMPT = 9


def traced(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(trace_shapes.command, arguments, catch_exceptions=False)


def norms_of(shapes: ModelShapes) -> Counter[tuple[str, tuple[int | str, ...], str]]:
    """Return the counts of the norms by form, shape and dtype."""
    found: Counter[tuple[str, tuple[int | str, ...], str]] = Counter()
    for call, count in shapes.counts.items():
        if call.form.endswith("rms_norm"):
            x = call.tensors["x"]
            found[call.form, x.shape, f"torch.{x.dtype}"] += count
    return found


def counted(folder: Path) -> Counter[tuple[str, tuple[int | str, ...], str]]:
    """Return what the counting kernel sees of the same steps."""
    config = engine_config(str(folder), None, {}).resolved()
    model = load_model(config)
    seen = sys.modules["acme"].SEEN
    seen.clear()
    with torch.no_grad():
        for step in decoder_steps(model, torch.zeros(PROMPT + 1, dtype=torch.int64), config):
            with step.attending():
                step.call(model)
    found: Counter[tuple[str, tuple[int | str, ...], str]] = Counter()
    for (form, (_, *others), dtype), count in seen.items():
        found[form, (TOKENS, *others), dtype] += count
    return found


def test_the_record_is_what_a_counting_kernel_sees(
    site, causal_folder: Path, tmp_path: Path
) -> None:
    """Forms, shapes, dtypes and counts of a prompt and one token more; without weights the record is the same."""
    site.plugin("acme", COUNTING)
    file, other = tmp_path / "shapes.json", tmp_path / "meta.json"
    with set_config(OpgraftConfig(plugins=("acme",))):
        result = traced("--tokens", str(PROMPT), "--save", str(file), str(causal_folder))
        seen = counted(causal_folder)
        traced("--meta", "--tokens", str(PROMPT), "--save", str(other), str(causal_folder))
    assert result.exit_code == 0, result.output
    assert "fused_add_rms_norm" in result.output
    (shapes,) = read(file)
    assert sum(seen.values()) > 6
    assert norms_of(shapes) == seen
    assert read(other) == (shapes,)


def test_a_program_is_traced_as_it_runs(cli, causal_folder: Path, tmp_path: Path) -> None:
    """The calls of the models that it builds, with its own arguments; its output and its exit code stay its own."""
    program, file = tmp_path / "runs.py", tmp_path / "shapes.json"
    program.write_text(RUNS)
    result = cli(
        "trace-shapes", "--save", str(file), str(program), str(causal_folder), "--json", "x"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['--json', 'x']\n"
    (shapes,) = read(file)
    assert shapes.model == "runs.py"
    (((form, shape, _), count), *others) = norms_of(shapes).items()
    assert (form, shape[:2], count, others) == ("rms_norm", (1, 6), 5, [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--meta", "p.py"), "a program computes with its own weights: leave --meta out"),
        (("model", "more"), "only a program takes arguments: leave 'more' out"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], told: str) -> None:
    """Before anything runs."""
    result = traced(*arguments)
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize(
    "command", [("conformance", "cpu"), ("plugins", "check", "cpu"), ("tune", "rms_norm")]
)
def test_each_command_refuses_an_unknown_record(cli, command: tuple[str, ...]) -> None:
    """By one sentence on stderr, with the records that there are."""
    result = cli(*command, "--shapes", "lama")
    assert result.returncode == 2, result.stderr
    assert "shapes 'lama': did you mean 'llama'?" in result.stderr
