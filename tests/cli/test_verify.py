"""``opgraft verify``: models of every kind, a plugin that is wrong, and the script that makes the call again."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from opgraft.cli import verify
from opgraft.cli.verified_models import made_by
from opgraft.errors import InputError

WRONG = """
import torch
from opgraft.ops import {base}
platforms = "any"

@{base}.register_oot
class Acme({base}):
    def forward_oot(self, *args, **kwargs):
        out = self.forward_native(*args, **kwargs)
        return {out}
"""
SILU = WRONG.format(base="SiluAndMul", out="out * (1 + 1e-3)")
DECODING = WRONG.format(base="PagedAttention", out="out * (1 + 1e-3 * (len(out) == 1))")
TWICE = WRONG.format(
    base="RMSNorm", out="out * 2 if isinstance(out, torch.Tensor) else (out[0] * 2, out[1])"
)

MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8, 1e-6)
    def forward(self, x):
        return self.norm(x) + x

def tuples():
    return Own(), (torch.randn(3, 8),)

def names():
    return Own(), {"x": torch.randn(3, 8)}

class Keeping(Own):
    def forward(self, x, cache):
        cache.append(x)
        return self.norm(sum(cache))

def kept():
    return Keeping(), (torch.randn(3, 8), [])

def nothing():
    return Own()
"""


def errors_of(answer: object) -> list[str]:
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    return [error.message for error in validator("opgraft.verify/1").iter_errors(answer)]


def verified(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(verify.command, arguments)


def made_again(script: str, python: str, site: Path) -> subprocess.CompletedProcess[str]:
    """Run the script by itself, elsewhere than it was written."""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [python, script]
    return subprocess.run(
        command, env=environ, cwd="/", capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("options", "source", "path", "calls"),
    [
        ((), SILU, "model.layers.0.mlp.act_fn", 2),
        ((), DECODING, "model.layers.0.self_attn.attn.attend_pages", 2),
        (("--graft",), TWICE, "model.layers.0.input_layernorm", 1),
    ],
)
def test_the_first_op_that_is_wrong(
    site, causal_folder: Path, tmp_path: Path, options, source: str, path: str, calls: int
) -> None:
    """It is named with its inputs, and all before it is within its tolerance."""
    site.plugin("acme", source)
    result = verified(
        str(causal_folder),
        "the cat sleeps on",
        *options,
        "--json",
        "--save",
        str(tmp_path / "found"),
    )
    answer = json.loads(result.stdout)
    assert (result.exit_code, errors_of(answer)) == (1, [])
    departure = answer["departure"]
    assert (departure["path"], departure["calls"]) == (path, calls)
    assert "Acme.forward_oot" in {op["kernel"] for op in departure["ops"]}
    before = answer["places"][: [place["path"] for place in answer["places"]].index(path)]
    assert [place["reason"] for place in before] == [""] * len(before)


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("--graft",)])
def test_the_script_of_a_model(
    site, causal_folder: Path, tmp_path: Path, warm_python: str, options: tuple[str, ...]
) -> None:
    """It makes the call again in a process of its own, over a cache too, and tells the same."""
    site.plugin("acme", TWICE if options else DECODING)
    result = verified(str(causal_folder), *options, "--json", "--save", str(tmp_path / "found"))
    departure = json.loads(result.stdout)["departure"]
    again = made_again(departure["script"], warm_python, site.folder)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (1, departure["reason"]), (
        again.stderr
    )


def test_a_model_within_its_tolerances(
    causal_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 0, nothing is written, and random tokens do where no prompt is given."""
    monkeypatch.chdir(tmp_path)
    result = verified(str(causal_folder), "--tokens", "3")
    assert (result.exit_code, list(tmp_path.iterdir())) == (0, []), result.output
    assert "2        silu_and_mul by SiluAndMul.forward_native of opgraft" in result.stdout


def test_a_model_of_a_function(cli, site, warm_python: str, tmp_path: Path) -> None:
    """A model of any class, which a module of the current folder makes, is grafted and compared; the script too."""
    site.plugin("acme", TWICE)
    (tmp_path / "own_model.py").write_text(MODEL)
    result = cli("verify", "own_model:names", "--save", "found")
    assert result.returncode == 1, result.stderr
    assert "first departure: norm: rms_norm by Acme.forward_oot of acme 1.0" in result.stdout
    assert "called with x: float32 [3, 8], from " in result.stdout
    assert "to make that call again: python found/reproduce.py" in result.stdout
    again = made_again(str(tmp_path / "found/reproduce.py"), warm_python, site.folder)
    assert (again.returncode, "called with float32 [3, 8]" in again.stdout) == (1, True), (
        again.stderr
    )


def test_each_call_has_inputs_of_its_own(site) -> None:
    """A model that writes to what it is called with finds the same the next time."""
    (site.folder / "own_model.py").write_text(MODEL)
    pair = made_by("own_model:kept")
    (step,) = pair.steps(pair.native)
    assert torch.equal(step.call(pair.native), step.call(pair.native))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("own_model:nothing",), "gives no model: TypeError: cannot unpack"),
        (("own_model:absent",), "gives no model: AttributeError"),
        (("own_model:tuples", "the cat"), "leave PROMPT and --graft out"),
        (("absent",), "absent"),
        (
            ("smollm2", "--graft"),
            "is a GGUF file, which transformers has no class for: leave --graft out",
        ),
        (("smollm2", "--model.name", "minilm"), "leave --model.name out"),
    ],
)
def test_what_cannot_be_verified(
    site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    """What is no model, or more than is taken, is usage, and says what to give."""
    monkeypatch.chdir(tmp_path)
    (site.folder / "own_model.py").write_text(MODEL)
    result = verified(*arguments)
    assert isinstance(result.exception, InputError) or result.exit_code == 2, result.output
    assert reason in f"{result.output} {result.exception}"
