"""Every table that names kernels says what runs: a plugin that replaces every class counts the calls."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from grafting.test_transformers import build, inputs
from opgraft import CustomOp
from opgraft.ops import Linear, RMSNorm
from opgraft.registry.state import host_state
from opgraft.testing.conformance import Conformance, alone
from support import counting_plugin, servers
from support.random_decoders import DECODERS, written
from support.servers import serving
from support.small_words import word_llama, word_tokenizer

transformers = pytest.importorskip("transformers")

PLUGIN = (Path(__file__).parents[1] / "support" / "counting_plugin.py").read_text(encoding="utf-8")
OPTIONS = ("--load.progress", "false", "--parallel.executor", "in_process")
TEXT = "the cat sleeps on a mat"


def decoder(folder: Path) -> Path:
    return word_llama(folder)


def encoder(folder: Path) -> Path:
    """A random encoder of two layers, with a tokenizer of a few words."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, vocab_size=64, pad_token_id=0)
    transformers.BertModel(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


COUNTED = {
    "opgraft.answer.2": "test_run_as_json",
    "opgraft.embeddings.1": "test_run_as_json",
    "opgraft.error.1": "test_an_error",
    "opgraft.ops.explain.2": "test_run_as_text_and_the_catalogue",
    "opgraft.ops.list.2": "test_run_as_text_and_the_catalogue",
    "opgraft.top.1": "test_a_server",
    "opgraft.tuning.1": "test_a_tuning",
    "opgraft.verify.1": "test_a_verification",
    "opgraft.conformance.1": "test_a_conformance_report",
    "the text of run": "test_run_as_text_and_the_catalogue",
    "the lines and /v1/decisions and /metrics of a server": "test_a_server",
    "a profile": "test_a_profile",
    "the report of graft, and opgraft.explain": "test_a_graft",
    "the text of a decision": "test_a_decision",
}
"""By an output that names kernels: the test that compares its kernels with those that ran."""

Counted = Callable[..., tuple[str, Mapping[str, Any]]]


@pytest.fixture
def counted(site, cli, tmp_path: Path) -> Counted:
    """Run a command with the counting plugin; returns what it prints, and the counts."""
    site.plugin("counting", PLUGIN)

    def run(*arguments: str) -> tuple[str, Mapping[str, Any]]:
        file = tmp_path / "counts.json"
        result = cli(*arguments, *OPTIONS, COUNTING_FILE=str(file))
        assert result.returncode == 0, result.stderr
        return result.stdout, json.loads(file.read_text())

    return run


def expect_counted(told: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Compare the rows of a table as plain data with the counts."""
    running = Counter(row["kernel"] for row in told["ops"] if row["runs"])
    assert running == counts["ran"]
    assert {row["provider"]["name"] for row in told["ops"] if row["runs"]} == {"counting"}
    assert Counter(row["class"] for row in told["classes"]) == counts["used"]
    assert {row["provider"]["name"] for row in told["classes"]} == {"counting"}


def test_each_answer_that_names_kernels_is_counted() -> None:
    """Every schema with a kernel has a test that counts."""
    schemas = (Path(__file__).parents[2] / "docs" / "reference" / "schemas").glob("*.json")
    naming = {each.stem for each in schemas if '"kernel":' in each.read_text(encoding="utf-8")}
    assert naming <= COUNTED.keys()
    assert set(COUNTED.values()) <= globals().keys()


@pytest.mark.parametrize("more", [(), ("--compare",)])
@pytest.mark.parametrize("write", [decoder, encoder])
def test_run_as_json(
    write: Callable[[Path], Path], more: tuple[str, ...], counted: Counted, tmp_path: Path
) -> None:
    """Each kernel and each class stands in the answer as often as its instances were called."""
    printed, counts = counted("run", str(write(tmp_path / "model")), TEXT, "--json", *more)
    expect_counted(json.loads(printed), counts)


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_other_decoders(family: str, counted: Counted, tmp_path: Path) -> None:
    """The same is true of every written family."""
    written(DECODERS[family][0], tmp_path / "model", **DECODERS[family][1])
    word_tokenizer().save_pretrained(tmp_path / "model")
    printed, counts = counted("run", str(tmp_path / "model"), TEXT, "--json")
    expect_counted(json.loads(printed), counts)


def test_run_as_text_and_the_catalogue(counted: Counted, cli, tmp_path: Path) -> None:
    """The table of ``run`` has the same counts, and ``ops list`` and ``ops explain`` name the kernels that ran."""
    (tmp_path / "prompts").write_text(f"{TEXT}\na dog\n")
    model = str(decoder(tmp_path / "model"))
    printed, counts = counted("run", model, "--input", str(tmp_path / "prompts"))
    rows = re.findall(r"^ *(\d+) +\S+ +(Counting\S+) of counting 1\.0", printed, re.MULTILINE)
    told: Counter[str] = Counter()
    for count, name in rows:
        told[name] += int(count)
    assert told == {**counts["ran"], **counts["used"]}
    listed = json.loads(cli("ops", "list", "--json").stdout)["ops"]
    listed += [variant for row in listed for variant in row["variants"]]
    assert {row["kernel"] for row in listed} >= set(counts["ran"])
    shown = cli("ops", "list").stdout
    cells = re.findall(r"^ *\S+ +(Counting\w+) +(\w+) +counting\b", shown, re.MULTILINE)
    kernels = [f"{cls}.forward_{key}".replace("forward_forward", "forward") for cls, key in cells]
    assert Counter(kernels) == Counter(row["kernel"] for row in listed)
    explained = json.loads(cli("ops", "explain", "rms_norm", "--json").stdout)
    assert explained["decision"]["chosen"] in counts["ran"]
    words = cli("ops", "explain", "rms_norm").stdout
    assert words.startswith(f"op rms_norm: {explained['decision']['chosen']} ")
    assert "class provided by counting 1.0" in words


def test_worker_processes(site, cli, tmp_path: Path) -> None:
    """Each of two workers runs what the table of the run says."""
    site.plugin("counting", PLUGIN)
    (tmp_path / "counts").mkdir()
    model = str(decoder(tmp_path / "model"))
    options = (*OPTIONS[:2], "--parallel.executor", "processes", "--parallel.tensor", "2")
    result = cli("run", model, TEXT, "--json", *options, COUNTING_FILE=str(tmp_path / "counts"))
    assert result.returncode == 0, result.stderr
    counts = [json.loads(file.read_text()) for file in (tmp_path / "counts").iterdir()]
    (host,) = [each for each in counts if not each["ran"]]
    first, second = (each for each in counts if each["ran"])
    if "CountingSampler" in second["used"]:
        first, second = second, first
    assert first["ran"] == second["ran"]
    assert first["used"] == {**second["used"], "CountingSampler": 1}  # the first draws all tokens
    used = {name: max(host["used"].get(name, 0), count) for name, count in first["used"].items()}
    expect_counted(
        json.loads(result.stdout), {"ran": first["ran"], "used": {**host["used"], **used}}
    )


@pytest.mark.parametrize(
    ("write", "path", "asked"),
    [(decoder, "/v1/completions", "prompt"), (encoder, "/v1/embeddings", "input")],
)
def test_a_server(
    write: Callable[[Path], Path],
    path: str,
    asked: str,
    site,
    cli,
    tmp_path: Path,
    warm_python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decisions, metrics and the table at the start of a server agree with the counts of its requests."""
    monkeypatch.setattr(servers, "PYTHON", [warm_python])
    site.plugin("counting", PLUGIN)
    file = tmp_path / "counts.json"
    variables = {"PYTHONPATH": str(site.folder), "COUNTING_FILE": str(file)}
    model = write(tmp_path / "model")
    with serving(model, *OPTIONS[2:], variables=variables) as server:
        answer = server.post(path, model=server.model, **{asked: TEXT})
        assert answer.status_code == 200, answer.text
        told = server.get("/v1/decisions").json()
        metrics = server.get("/metrics").text
        top = json.loads(cli("top", server.url, "--json", "--interval", "0.05").stdout)
        server.end()
        shown = "".join(server.shown)
    counts = json.loads(file.read_text())
    expect_counted(told, counts)
    total = sum(counts["ran"].values())
    assert f"kernels   {total} of counting 1.0" in shown
    assert set(re.findall(r'kernel_info\{.*kernel="([^"]+)"', metrics)) == set(counts["ran"])
    assert {row["kernel"] for row in top["kernels"]} == set(counts["ran"])


def test_a_decision() -> None:
    """The short text of a decision, and its table for a notebook, name the kernel that a call runs."""
    counting_plugin.opgraft_register_ops()
    norm = RMSNorm(4)
    counting_plugin.RAN.clear()
    norm(torch.ones(2, 4))
    (kernel,) = counting_plugin.RAN
    assert f": {kernel} (" in repr(norm.decision)
    assert kernel in norm.decision._repr_html_()


def test_a_verification(counted: Counted, tmp_path: Path) -> None:
    """Each place of a verification names the kernels that ran there."""
    printed, counts = counted("verify", str(decoder(tmp_path / "model")), TEXT, "--json")
    places = json.loads(printed)["places"]
    served = [each for place in places for each in place["ops"]]
    assert {each["provider"]["name"] for each in served} == {"counting"}
    assert {each["kernel"] for each in served} <= set(counts["ran"])


def test_an_error(site, cli, tmp_path: Path) -> None:
    """The kernel that an error names is one that was called."""
    site.plugin("counting", PLUGIN)
    file = tmp_path / "counts.json"
    variables = {"COUNTING_FILE": str(file), "COUNTING_FAILURE": "CountingRMSNorm"}
    result = cli("run", str(decoder(tmp_path / "model")), TEXT, "--json", *OPTIONS, **variables)
    assert result.returncode == 4, result.stderr
    told = json.loads(result.stdout)["error"]["provenance"]
    assert told["kernel"].startswith("CountingRMSNorm.")
    assert told["kernel"] in json.loads(file.read_text())["ran"]
    assert told["provider"]["name"] == "counting"


def test_a_tuning(counted: Counted) -> None:
    """The kernel of a plugin that is timed is the one that was called."""
    printed, counts = counted("tune", "relu2", "--dtype", "float32", "--seconds", "1e-4", "--json")
    timed = json.loads(printed)["ops"]["relu2"]["candidates"]
    theirs = {row["kernel"] for row in timed if row["provider"]["name"] == "counting"}
    assert theirs == set(counts["ran"])


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_a_conformance_report(every: int, site) -> None:
    """A check of values that passed has called one kernel: that of the op in the report."""
    site.plugin("counting", PLUGIN)
    with alone("counting"):
        conformance = Conformance("counting", brief=True)
        assert conformance.provider.name == "counting"
        counting = importlib.import_module("counting")
        registry = host_state().registry
        kernels = {f"Counting{each.__name__}.forward_oot": each for each in registry.targets()}
        asked = [case for case in conformance.cases if case.check == "values"]
        for case in [case for case in asked if case.dtype == "float32"][::every]:
            counting.RAN.clear()
            outcome = conformance.judge(case)
            assert (outcome.status, outcome.reason) == ("passed", "")
            (kernel,) = counting.RAN
            ran = kernels[kernel]
            assert issubclass(ran, registry.records()[conformance.ops[outcome.op]].cls)
        unasked = [case for case in asked if case.dtype is None]
        assert unasked
        counting.RAN.clear()
        assert {conformance.judge(case).status for case in unasked} == {"skipped"}
        assert counting.RAN == {}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_profile(family: str) -> None:
    """A profile has ranges of the kernels that ran, and of no others."""
    counting_plugin.opgraft_register_ops()
    model = build(family)
    opgraft.graft(model)
    counting_plugin.RAN.clear()
    with torch.inference_mode(), opgraft.profile(), torch.profiler.profile() as profiled:
        model(**inputs(family))
    labels = [event.key for event in profiled.key_averages()]
    told = [re.fullmatch(r"opgraft\.\w+ (\w+\.\w+) \[.*\]", label) for label in labels]
    assert {each[1] for each in told if each} == set(counting_plugin.RAN)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_graft(family: str) -> None:
    """The report, and the table of ``opgraft.explain``, count what a call without a gradient runs."""
    counting_plugin.opgraft_register_ops()
    counting_plugin.RAN.clear()
    model = build(family)
    report = opgraft.graft(model)
    with torch.inference_mode():
        model(**inputs(family))
    told: Counter[str] = Counter()
    for row in report.counts():
        told[row.implementation] += row.count
    counts = {kernel: len(found) for kernel, found in counting_plugin.RAN.items()}
    assert told == counts
    rows = opgraft.explain(model).to_dict()["ops"]
    assert Counter(row["kernel"] for row in rows if row["runs"]) == counts


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_graft_with_one_class_replaced(family: str) -> None:
    """Both tables count the layers that run the class, and none whose work another layer does."""
    made = counting_plugin.counting_op(Linear, with_forms=False)
    CustomOp.register_oot(made, name=Linear)
    model = build(family)
    report = opgraft.graft(model)
    counting_plugin.RAN.clear()
    with torch.inference_mode():
        model(**inputs(family))
    ran = {kernel: len(found) for kernel, found in counting_plugin.RAN.items()}
    told = {row.implementation: row.count for row in report.counts()}
    assert ran.items() <= told.items()
    rows = opgraft.explain(model).to_dict()["ops"]
    assert ran.items() <= Counter(row["kernel"] for row in rows if row["runs"]).items()
