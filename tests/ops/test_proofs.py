"""The proofs that are committed are about the forms as they are, and 'opgraft ops list' tells where it is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.ops import SiluAndMul
from opgraft.ops.spec import Outside
from opgraft.testing import proof_records, sources
from opgraft.testing.catalogue import FAMILIES, SPECS
from opgraft.testing.proof import PROOF_CHECKS, SETTINGS, checks_of, expect_native, prove
from opgraft.testing.proof_records import ProofRecord, State

RECORD = ProofRecord(("opgraft.ops.spec",), "0" * 16, ("values",), 1, ("float32",), ())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, ProofRecord]:
    """The records of this installation, which the test may change."""
    records = dict(proof_records.recorded())
    monkeypatch.setattr(proof_records, "recorded", lambda: records)
    return records


def test_every_form_is_proved_as_it_is() -> None:
    """No form is missing, none has changed since it was checked, and none is gone: 'make prove' renews them."""
    states = {name: proof_records.state_of(name) for name in SPECS}
    stale = sorted(
        f"{name}: {state.value}" for name, state in states.items() if state is not State.CURRENT
    )
    assert stale == [], "renew them by 'make prove'"
    assert set(proof_records.recorded()) == set(SPECS), "renew it by 'make prove'"


def test_the_records_say_what_the_specs_say() -> None:
    """Checks, variants, dtypes and outside implementations of each record are those of the form's spec."""
    family_of = {
        spec.functional.name: family.__name__ for family in FAMILIES for spec in family.SPECS
    }
    for name, record in proof_records.recorded().items():
        spec = SPECS[name]
        assert record.sources == (spec.functional.native.__module__, family_of[name])
        assert record.checks == (*checks_of(spec), *(["outside"] if spec.outside else []))
        assert (record.variants, set(record.dtypes)) == (
            len(spec.variants),
            {str(t)[6:] for t in spec.dtypes},
        )
        assert set(record.outside) == {outside.name for outside in spec.outside}


def test_the_file_is_what_its_writer_writes() -> None:
    """Byte for byte, so that renewing one form changes one line."""
    for family in FAMILIES:
        file = proof_records.file_of(family.__name__)
        text = file.read_bytes().decode()
        assert proof_records.written(proof_records.read(file)) == text
        assert str(Path.home()) not in text


def test_writing_and_reading(tmp_path: Path) -> None:
    """What was written is read back, whatever the order in which it was proved."""
    records = {
        "b_form": RECORD,
        "a_form": dataclasses.replace(RECORD, outside=("torch.nn.functional.silu",)),
    }
    file = tmp_path / proof_records.FILE
    file.write_text(proof_records.written(records), encoding="utf-8")
    assert proof_records.read(file) == records
    assert list(json.loads(file.read_text(encoding="utf-8"))["forms"]) == ["a_form", "b_form"]
    assert proof_records.read(tmp_path / "nowhere") == {}


def test_the_digest_is_of_the_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line ends, comments, layout and documentation do not change the digest, code does; no source gives none."""
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {
        "opg_unix": b"a = 1\n",
        "opg_dos": b"a = 1\r\n",
        "opg_commented": b'"""Documentation."""\n\n# why\na = (\n    1\n)\n',
        "opg_other": b"a = 2\n",
        "opg_renamed": b"b = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_bytes(text)
    unix, dos, commented, other, renamed = (sources.digest_of((name,)) for name in texts)
    assert unix == dos == commented
    assert len({unix, other, renamed}) == 3
    assert sources.digest_of(("sys",)) is None
    assert sources.digest_of(("opg_nowhere",)) is None


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("opgraft.ops.layernorm.modules", True),
        ("opgraft.ops.layernorm.functional", True),
        ("opgraft.ops.precision", True),
        ("opgraft.binding.functional", True),
        ("opgraft.ops.layernorm.spec", True),
        ("opgraft.ops.spec", True),
        ("opgraft.testing.checks", True),
        ("opgraft.testing.proof", True),
        ("opgraft.ops.conv.modules", False),
        ("opgraft.ops.rotary.functional", False),
        ("opgraft.ops.rotary.spec", False),
        ("opgraft.ops", False),
        ("opgraft.functional", False),
    ],
)
def test_the_digest_is_of_all_that_a_proof_is_made_of(
    module: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the module, of the spec, of a check or of what they import makes a proof one of something else."""
    known, before = (
        sources.source_of,
        sources.digest_of(proof_records.recorded()["rms_norm"].sources),
    )
    monkeypatch.setattr(
        sources, "source_of", lambda name: (known(name) or "") + "\nother = 1" * (name == module)
    )
    changed = sources.digest_of(proof_records.recorded()["rms_norm"].sources) != before
    assert changed is counts


def test_the_classes_that_specs_build_count() -> None:
    """The digest of each form is of the module whose class stands for it, and of its spec and definition."""
    for name, spec in SPECS.items():
        made_of = set(sources.made_of(proof_records.recorded()[name].sources))
        assert spec.functional.native.__module__ in made_of
        if spec.module:
            op, _ = spec.module(
                **spec.arguments(
                    next(iter(spec.variants)), spec.dtypes[0], spec.leads[0], spec.sizes[0]
                )
            )
            assert type(op).__module__ in made_of


def test_only_native_definitions_are_proved() -> None:
    """Whatever kernels there are, the settings of a proof leave the native definition; without them it is refused."""
    spec = SPECS["silu_and_mul"]
    with opgraft.set_config(SETTINGS):
        SiluAndMul.register_oot(type("Fast", (SiluAndMul,), {"forward_oot": lambda self, x: x}))
        expect_native(spec)
        settings = dataclasses.replace(
            SETTINGS, compilation_config=opgraft.CompilationConfig(custom_ops=("all",))
        )
        with (
            opgraft.set_config(settings),
            pytest.raises(AssertionError, match=r"runs Fast\.forward_oot here"),
        ):
            expect_native(spec)


# Torch 2.15 hides this warning of its own check, but cannot hide an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_proving_a_form_yields_its_record() -> None:
    """What is proved here and now is what the file says."""
    record = prove(SPECS["silu_and_mul"], "opgraft.ops.activation.spec")
    assert record.checks == (*PROOF_CHECKS, "outside")
    assert record == proof_records.recorded()["silu_and_mul"]


def test_a_wrong_form_is_not_proved() -> None:
    """A form that differs from its reference in one dtype only gets no record."""
    spec = SPECS["relu2"]
    wrong = dataclasses.replace(spec, reference=lambda x: torch.relu(x) ** 2 + 0.1)
    with pytest.raises(AssertionError, match="not close"):
        prove(wrong, "opgraft.ops.activation.spec")


# Torch 2.15 hides this warning of its own check, but cannot hide an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_outside_implementations_that_never_compare_are_no_proof() -> None:
    """One that steps aside in every variant fails the proof."""
    idle = dataclasses.replace(SPECS["relu2"], outside=(Outside("torch.idle", lambda x: None),))
    with pytest.raises(AssertionError, match=r"never compared with \['torch.idle'\]"):
        prove(idle, "opgraft.ops.activation.spec")
