"""Records of shapes: kernels that are wrong at a real model's size, shipped records, and files with other data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from opgraft import OpgraftConfig, functional, set_config
from opgraft.errors import InputError
from opgraft.ops import SiluAndMul
from opgraft.plugins.host import load_plugins
from opgraft.testing import tuning
from opgraft.testing.catalogue import SPECS
from opgraft.testing.conformance import CheckOutcome, Conformance, alone
from opgraft.testing.replaying import ReplayedCall, calls_of
from opgraft.testing.shape_recording import by_tokens, recording
from opgraft.testing.shapes import (
    ALL,
    TOKENS,
    FormCall,
    ModelShapes,
    ShapeRecord,
    TensorShape,
    find_record,
    read,
    shipped,
    written,
)

KERNEL = """
from opgraft.ops import {base}
platforms = "any"

@{base}.register_oot
class Acme({base}):
    def forward_oot(self, *args, **kwargs):
        out = self.forward_native(*args, **kwargs)
        return out * 1.1 if {wrong} else out
"""
HIDDEN = "isinstance(out, tuple) is False and out.shape[-1] == 3584"
HEADS = "out.shape[-1] == 256"
SMALL = 1 << 22


def judged(record: str | None) -> dict[str, CheckOutcome]:
    """Answer the questions of the short form about numbers, with a record or without."""
    found = None if record is None else find_record(record)
    with alone("acme"):
        conformance = Conformance("acme", brief=True, record=found)
        asked = [case for case in conformance.cases if case.check in ("values", "shapes")]
        return {str(case): conformance.judge(case) for case in asked}


@pytest.mark.parametrize(
    ("base", "form", "wrong", "record", "told"),
    [
        ("RMSNorm", "rms_norm", HIDDEN, "qwen", "Qwen2.5-7B, rms_norm(x=bfloat16[17, 3584]"),
        ("PagedAttention", "paged_attention", HEADS, "gemma", "query=bfloat16[17, 8, 256]"),
    ],
)
def test_a_kernel_that_is_wrong_at_a_real_size_is_found(
    site, base: str, form: str, wrong: str, record: str, told: str
) -> None:
    """It passes the kit without a record; with one it fails by the model and the call."""
    site.plugin("acme", KERNEL.format(base=base, wrong=wrong))
    without = judged(None)
    assert {outcome.status for outcome in without.values()} == {"passed"}
    assert not [case for case in without if "shapes" in case]
    found = judged(record)[f"{form}-shapes-float32"]
    assert found.status == "failed"
    assert told in found.reason


def test_a_right_kernel_passes_every_replay(site) -> None:
    """At each size of the record, in each dtype, also as a module; float64 is no dtype of models."""
    site.plugin("acme", KERNEL.format(base="RMSNorm", wrong="False"))
    answers = judged("qwen")
    found = [outcome for outcome in answers.values() if outcome.check == "shapes"]
    told = {(outcome.dtype == "float64", outcome.status) for outcome in found}
    assert told == {(True, "skipped"), (False, "passed")}, found
    assert {outcome.op for outcome in found} == {"rms_norm", "fused_add_rms_norm"}


def test_the_shipped_records() -> None:
    """Ten families, whose calls are all of known forms with inputs that can be drawn."""
    names = ["bert", "gemma", "gpt2", "llama", "mamba", "mistral", "moe", "phi", "qwen", "vit"]
    assert shipped() == names
    record = find_record(ALL)
    forms = {call.form for model in record.models for call in model.counts}
    assert forms <= set(SPECS)
    replays = [each for form in sorted(forms) for each in calls_of(record, SPECS[form])]
    assert {str(each.call): each.obstacle() for each in replays if each.obstacle()} == {}
    assert {str(each.call) for each in replays if not each.builds()} == set()
    heads = {
        each.call.tensors["query"].shape[-1] for each in calls_of(record, SPECS["paged_attention"])
    }
    assert heads >= {64, 96, 128, 256}


def smallest(record: ShapeRecord) -> Mapping[str, ReplayedCall]:
    """Return the smallest call of each form."""
    found: dict[str, ReplayedCall] = {}
    for name, spec in SPECS.items():
        calls = calls_of(record, spec)
        if calls:
            found[name] = min(calls, key=lambda each: each.numbers(3))
    return found


def test_native_definitions_pass_the_smallest_calls() -> None:
    """Of each form in the shipped records: the drawn inputs are ones that form, module and reference take."""
    for each in smallest(find_record(ALL)).values():
        if each.numbers(3) < SMALL:
            assert each.check_values(torch.float32, 3, by_module=False) <= 1
            assert (
                each.check_values(torch.bfloat16, 1, by_module=not each.spec.functional.mutates)
                <= 1
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_native_definitions_pass_all_calls(name: str) -> None:
    """At all sizes up to some million numbers."""
    for spec in SPECS.values():
        for each in calls_of(find_record(name), spec):
            if each.numbers(17) < SMALL:
                assert each.check_values(torch.float32, 17, by_module=False) <= 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every kind of argument comes back: tensors with a symbol, settings, sizes and None."""
    tensor = TensorShape("bfloat16", (TOKENS, 3, 0))
    arguments = (
        ("x", tensor),
        ("sizes", (3, 4)),
        ("eps", 1e-6),
        ("name", "silu"),
        ("bias", None),
        ("on", True),
    )
    models = (ModelShapes("a\u202eb", {FormCall("rms_norm", arguments): 7}),)
    file = tmp_path / "shapes.json"
    file.write_text(written(models), encoding="utf-8")
    assert read(file) == models


X = {"dtype": "float32", "shape": [3]}
ROW = {"form": "rms_norm", "count": 1, "arguments": {"x": X}}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("{", "holds no record of shapes: Expecting"),
        ([], "its schema is None, expected 'opgraft.shapes/1'"),
        ({"schema": "opgraft.shapes/2"}, "its schema is 'opgraft.shapes/2', expected"),
        ({}, "the record has models None, expected list"),
        ({"models": [{"model": 3}]}, "a model has model 3, expected str"),
        ([{**ROW, "count": True}], "call 0 of the model 'm' has count True, expected int"),
        ([{**ROW, "count": 0}], "has the count 0, expected at least 1"),
        ([{**ROW, "form": None}], "has form None, expected str"),
        ([{**ROW, "arguments": {"x": {**X, "shape": [-1]}}}], "has the shape [-1], expected sizes"),
        (
            [{**ROW, "arguments": {"x": {**X, "shape": ["rows"]}}}],
            "has the shape ['rows'], expected",
        ),
        (
            [{**ROW, "arguments": {"x": {"shape": [1]}}}],
            "argument 'x' of call 0 of the model 'm' has dtype",
        ),
        ([{**ROW, "arguments": {"x": ["a"]}}], "is ['a'], expected integers"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, data: object, told: str) -> None:
    """The error says what is wrong, and what to give."""
    if isinstance(data, list) and data:
        data = {"models": [{"model": "m", "calls": data}]}
    if isinstance(data, dict):
        data = {"schema": "opgraft.shapes/1", **data}
    file = tmp_path / "shapes.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    with pytest.raises(
        InputError, match="give a file that 'opgraft trace-shapes' has written"
    ) as raised:
        find_record(str(file))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "told"), [("lama", r"did you mean 'llama'\?"), ("x", "known: all, bert, gemma, gpt2")]
)
def test_an_unknown_record_names_the_shipped_ones(name: str, told: str) -> None:
    """A name that is neither a file nor a record."""
    with pytest.raises(InputError, match=f"nor a shipped record of shapes '{name}': {told}"):
        find_record(name)


def test_calls_of_both_kinds_are_counted_once() -> None:
    """A form that a layer calls, and one that an op calls, each once. After the block nothing is counted."""
    x = torch.randn(3, 8)
    with set_config(OpgraftConfig(plugins=(), platform="cpu")):
        with recording() as counts:
            functional.silu_and_mul(x)
            SiluAndMul()(x)
        functional.silu_and_mul(x)
    call = FormCall("silu_and_mul", (("x", TensorShape("float32", (3, 8))),))
    assert counts == {call: 2}


def norm(rows: int | str, form: str = "rms_norm") -> FormCall:
    return FormCall(form, (("x", TensorShape("float32", (rows, 5))),))


def test_the_number_of_tokens_becomes_a_symbol() -> None:
    """Sizes that grow with the prompt are the symbol, equal ones stay; a step of one token joins the others."""
    counts = Counter({norm(5): 4, norm(1): 3, norm(7, "gelu"): 2})
    longer = Counter({norm(6): 4, norm(1): 3, norm(7, "gelu"): 2})
    assert by_tokens(counts, longer, 5) == {norm(TOKENS): 7, norm(7, "gelu"): 2}
    assert by_tokens(counts, Counter({norm(6): 4}), 5) == counts


def test_a_race_runs_at_the_sizes_of_a_record(site) -> None:
    """The times of a measurement are by call of the record, and those calls alone."""
    site.plugin("acme", KERNEL.format(base="RMSNorm", wrong="False"))
    arguments = (
        ("x", TensorShape("bfloat16", (TOKENS, 24))),
        ("weight", TensorShape("bfloat16", (24,))),
    )
    record = ShapeRecord("own", (ModelShapes("tiny", {FormCall("rms_norm", arguments): 1}),))
    with set_config(OpgraftConfig(plugins=("acme",))):
        load_plugins()
        races, _ = tuning.races(("rms_norm",))
        (race,) = (race for race in races if race.name == "rms_norm")
        measured = tuning.run(race, [torch.float32], 1e-4, record).measured
    assert measured is not None
    shapes = [f"rms_norm {rows}x24 24 float32" for rows in tuning.ROWS]
    assert [[*each.seconds] for each in measured.candidates] == [shapes] * 2
