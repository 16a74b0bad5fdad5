"""The JSON of every command is what its published schema says, no less and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opgraft.config import resolve
from opgraft.plugins import quarantine
from opgraft.plugins.making_locks import lock_installed, write_rows
from opgraft.registry.decision import Provider
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parents[2] / "docs/reference/schemas"

PLUGIN = """
import opgraft
from opgraft.ops import RotaryEmbedding
platforms = "any"
class AcmeRotary(RotaryEmbedding):
    def forward_oot(self, positions, query, key=None):
        return query, key
@opgraft.hookimpl
def opgraft_register_ops():
    RotaryEmbedding.register_oot(AcmeRotary)
"""

OF_MEASUREMENTS = """
import time
from opgraft.ops import ReLUSquaredActivation, SiLU
platforms = "any"
@ReLUSquaredActivation.register_oot
class AcmeReLU(ReLUSquaredActivation):
    def forward_oot(self, x):
        time.sleep(0.01)
        return self.forward_native(x)
@SiLU.register_oot
class AcmeSiLU(SiLU):
    def forward_oot(self, input):
        raise OSError("bus error")
"""


def strict(schema: Any) -> Any:
    """The schema with no room for a key that it does not name, as a version that is published may only gain keys."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    return {**closed, "additionalProperties": False} if "properties" in schema else closed


def load() -> dict[str, Any]:
    return {
        path.name: strict(json.loads(path.read_text(encoding="utf-8")))
        for path in SCHEMAS.glob("*.json")
    }


def validator(name: str) -> Draft202012Validator:
    """What checks an answer of the schema ``name``."""
    files = load()
    registry = Registry().with_resources(
        [(key, Resource.from_contents(value)) for key, value in files.items()]
    )
    return Draft202012Validator(files[f"{name.replace('/', '.')}.json"], registry=registry)


def test_the_schemas_are_schemas() -> None:
    """Each file is a valid schema under its own name."""
    for name, schema in load().items():
        Draft202012Validator.check_schema(schema)
        assert schema["$id"] == name


@pytest.mark.parametrize(
    ("command", "code", "schema"),
    [
        ("detect", 0, "opgraft.detect/2"),
        ("env", 0, "opgraft.env/2"),
        ("plugins list", 0, "opgraft.plugins.list/2"),
        ("plugins show acme", 0, "opgraft.plugins.show/3"),
        ("plugins show brix-dist", 0, "opgraft.plugins.show/3"),
        ("plugins show acme --load", 0, "opgraft.plugins.show/3"),
        ("plugins show broken --load", 4, "opgraft.plugins.show/3"),
        ("plugins doctor", 4, "opgraft.plugins.doctor/2"),
        ("plugins lock", 0, "opgraft.plugins.lock/2"),
        ("ops list", 0, "opgraft.ops.list/2"),
        ("ops explain rotary_embedding", 0, "opgraft.ops.explain/2"),
        ("ops explain nonsense", 2, "opgraft.error/1"),
    ],
)
def test_answers_fit_their_schema(cli, site, command: str, code: int, schema: str) -> None:
    """Stdout is one object with the keys and types of the schema that it names, and no others."""
    site.plugin("acme", PLUGIN)
    site.plugin("broken", "raise OSError('no driver')")
    site.platform("brix", probe="raise OSError('bus error')")
    site.plugin("quarantined", PLUGIN)
    quarantine.confine(Provider("quarantined", "1.0"), "it crashed")
    result = cli(*command.split(), "--json")
    answer = json.loads(result.stdout)
    assert answer["schema"] == schema
    errors = [
        f"{error.json_path}: {error.message}" for error in validator(schema).iter_errors(answer)
    ]
    assert errors == []
    assert result.returncode == code


def test_differences_fit_their_schema(cli, site, tmp_path: Path) -> None:
    """So do the differences from a lockfile, and from a former report."""
    site.plugin("acme", PLUGIN)
    (tmp_path / "env.json").write_text(cli("env", "--json").stdout)
    assert cli("plugins", "lock").returncode == 0
    site.plugin("brix", PLUGIN)
    for command in ("plugins lock --check", "plugins diff", "env --diff env.json"):
        result = cli(*command.split(), "--json")
        answer = json.loads(result.stdout)
        errors = [error.message for error in validator(answer["schema"]).iter_errors(answer)]
        assert (result.returncode, errors) == (1, []), command
        assert "brix" in json.dumps(answer["changes"])


def test_a_lockfile_fits_its_schema(site, tmp_path) -> None:
    """The file that 'opgraft plugins lock' writes is of a published schema too."""
    site.plugin("acme", PLUGIN)
    rows, left_out = lock_installed(resolve([]), allow_editable=False)
    write_rows(tmp_path / "opgraft.lock", rows)
    answer = json.loads((tmp_path / "opgraft.lock").read_text())
    assert (len(rows), left_out) == (1, [])
    assert [error.message for error in validator("opgraft.lock/2").iter_errors(answer)] == []


def test_measurements_are_written_followed_and_of_their_schema(cli, site, tmp_path: Path) -> None:
    """Ops are measured, a kernel that raises is a finding, and 'auto' takes the fastest in processes to come."""
    site.plugin("acme", OF_MEASUREMENTS)
    ours = {"XDG_STATE_HOME": str(tmp_path)}
    options = ("--seconds", "1e-4", "--dtype", "float32", "--json")
    answer = cli("tune", "relu2", "silu", "gelu", *options, **ours)
    told = json.loads(answer.stdout)
    assert answer.returncode == 1
    assert [error.message for error in validator("opgraft.tune/1").iter_errors(told)] == []
    assert {op: row["chosen"] for op, row in told["ops"].items()} == {
        "relu2": "native",
        "silu": "native",
    }
    assert told["failed"] == {"silu": {"acme": "at silu float32 it raised OSError: bus error"}}
    assert told["left_out"] == {"gelu": "native is the only candidate here"}
    file = tmp_path / "opgraft" / "tuning.json"
    assert (told["file"], file.stat().st_mode & 0o777) == (str(file), 0o600)
    assert [
        e.message for e in validator("opgraft.tuning/1").iter_errors(json.loads(file.read_text()))
    ] == []
    shown = json.loads(
        cli("ops", "explain", "relu2", "--json", OPGRAFT_CUSTOM_OPS="auto", **ours).stdout
    )
    assert shown["decision"]["chosen"] == "ReLUSquaredActivation.forward_native"
    assert shown["decision"]["parts"][1]["chosen"] == "native"


def test_run_fits_its_schema(in_one_round, tokenizer, tmp_path: Path) -> None:
    """The answer of 'opgraft run', which needs a model, fits too."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    asked = ("run", str(tmp_path / "encoder"), "the cat", "a dog", "--compare", "--json")
    answer = json.loads(in_one_round(*asked).stdout)
    assert [error.message for error in validator("opgraft.embeddings/1").iter_errors(answer)] == []


def test_a_key_that_nobody_published_is_found() -> None:
    """The check itself can fail: on a key too many, a key too few and a wrong type."""
    check = validator("opgraft.error/1")
    good = {"schema": "opgraft.error/1", "error": {"type": "X", "message": "y", "exit_code": 2}}
    assert check.is_valid(good)
    for bad in (
        {**good, "more": 1},
        {"schema": "opgraft.error/1"},
        {**good, "error": {**good["error"], "exit_code": "2"}},
    ):
        assert not check.is_valid(bad)
