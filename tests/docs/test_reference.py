"""The reference is complete and says nothing that does not exist."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import opgraft
import pytest
import reference_pages
from opgraft import errors, ops
from opgraft.binding.measurements import SCHEMA as TUNING
from opgraft.cli import cli as root
from opgraft.cli.env import SCHEMA as REPORT
from opgraft.cli.evidence import SCHEMA as EVIDENCE
from opgraft.cli.exec import SCHEMA as EXEC
from opgraft.config import FIELDS
from opgraft.config.environment import VARIABLES
from opgraft.plugins import hookspecs
from opgraft.plugins.locking import SCHEMA as LOCKFILE
from opgraft.testing.shapes import SCHEMA as SHAPES

REPOSITORY = Path(__file__).parents[2]
REFERENCE = REPOSITORY / "docs/reference"
SCHEMAS = REFERENCE / "schemas"


def text_of(page: str) -> str:
    return (REFERENCE / f"{page}.md").read_text(encoding="utf-8")


def rows_of(page: str, header: str) -> list[list[str]]:
    """The rows of the tables of a page whose first header cell is ``header``, as cells without code marks."""
    rows = []
    first: str | None = None
    for line in text_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            first = None
        elif first is None:
            first = cells[0]
        elif first == header and not set(cells[0]) <= {"-"}:
            rows.append(cells)
    return rows


def code(cell: str) -> str:
    """The first code span of a cell."""
    (first, *_) = re.findall(r"`([^`]+)`", cell)
    return first


def names(page: str, header: str) -> list[str]:
    return [code(row[0]) for row in rows_of(page, header)]


def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            assert sub is not None
            yield from walk(sub, f"{path} {name}")
    else:
        yield path, command


COMMANDS = dict(walk(root, "opgraft"))


def section_of(path: str) -> str:
    """What the page says below a command's heading, up to the next one."""
    heading = rf"^## `{path}( [A-Z]+)?(?: \[[A-Z]+\](?:\.\.\.)?)*`\n"
    found = re.search(heading + r"(.*?)(?=^## |\Z)", text_of("cli"), re.M | re.S)
    assert found, f"cli.md has no heading for {path}"
    return found[2]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_is_described_with_its_options_and_schema(path: str) -> None:
    """Each command has a heading, below it a row for each option of its own and the schemas of its JSON."""
    section = section_of(path)
    settings = {f"--{name}" for name in FIELDS}
    for parameter in COMMANDS[path].params:
        shared = {"--json", "--help", "--config", "--enforce-eager", "--compilation-config"}
        options = set(parameter.opts) - settings - shared
        if isinstance(parameter, click.Option) and options:
            (option,) = options
            assert f"| `{option}" in section, option
    if any("--json" in parameter.opts for parameter in COMMANDS[path].params):
        schemas = [
            re.sub(r"\.(\d+)$", r"/\1", file.stem)
            for file in SCHEMAS.glob("*.json")
            if f"{json.loads(file.read_text(encoding='utf-8'))['title']} ".startswith(f"{path} ")
        ]
        assert schemas
        assert [schema for schema in schemas if f"`{schema}`" not in section] == []


def test_no_command_or_option_is_invented() -> None:
    """Headings and option rows name only what the command line has."""
    headings = re.findall(
        r"^## `(opgraft [a-z -]+?)(?: [A-Z]+)?(?: \[[A-Z]+\](?:\.\.\.)?)*`$", text_of("cli"), re.M
    )
    assert sorted(headings) == sorted(COMMANDS)
    real = {option for command in COMMANDS.values() for p in command.params for option in p.opts}
    assert {cell.split()[0] for cell in names("cli", "option")} <= real


def test_schemas_are_those_that_commands_print() -> None:
    """The names of JSON schemas on the page are those in the source of the commands, and those of files."""
    source = "".join(
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "core/cli").glob("*.py")
    )
    printed = set(re.findall(r'print_json\(\s*"([^"]+)"', source))
    printed |= {LOCKFILE, EVIDENCE, EXEC, REPORT, SHAPES, TUNING}  # which are written to files
    published = {
        json.loads(path.read_text())["properties"]["schema"]["const"]
        for path in SCHEMAS.glob("opgraft.*.json")
    }
    assert published == printed
    assert set(re.findall(r"`(opgraft\.[a-z.]+/\d+)`", text_of("cli"))) == printed


def test_what_is_generated_is_current() -> None:
    """Tables of settings, hooks, platforms, errors and options are their registries, docstrings those of the code."""
    pages = reference_pages.all_pages()
    changed = [
        path.name
        for path, text in pages.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert changed == [], "renew them by 'make reference-pages'"
    assert set((REFERENCE / "python").glob("*.md")) <= set(pages)
    assert (REFERENCE / "python/opgraft.md").read_text("utf-8").count("\n## ") > 60


def test_an_empty_cell_keeps_its_place() -> None:
    """A renewed table has the author's cell in its column, also behind an empty cell."""
    header = "| name | chain | available if |"
    table = f"{header}\n|---|---|---|\n| `tpu` | | a TPU is there |\n"
    renewed = reference_pages.with_table(
        table, header, lambda known: [("`tpu`", "`oot`", known["tpu"][2])]
    )
    assert renewed.endswith("| `tpu` | `oot` | a TPU is there |\n")


def test_every_setting_is_an_option() -> None:
    """The rows of the table are the settings, and each is an option of commands."""
    assert names("settings", "setting and variable") == list(FIELDS)
    options = {
        option for parameter in COMMANDS["opgraft detect"].params for option in parameter.opts
    }
    assert {f"--{name}" for name in FIELDS} <= options


def test_every_variable_is_a_row() -> None:
    """The variables of both tables are those that are read."""
    rows = rows_of("settings", "setting and variable")
    of_settings = [re.findall(r"`([^`]+)`", row[0])[1] for row in rows]
    assert sorted([*of_settings, *names("settings", "variable")]) == sorted(VARIABLES)


def test_every_hook_has_an_example() -> None:
    """The plugin on the page of hooks implements each of them, and what is typed there is checked with the guides."""
    implemented = re.findall(r"^@opgraft\.hookimpl\ndef (\w+)\(", text_of("hooks"), re.M)
    assert sorted(implemented) == sorted(
        name for name in vars(hookspecs) if name.startswith("opgraft_")
    )


def parameters_of(thing: object) -> list[str] | None:
    """The names of the parameters, with ``*`` before those that only keywords reach; ``None`` where nothing tells."""
    try:
        parameters = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    found: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name)
    return [name for name in found if name != "self"]


def split_call(call: str) -> tuple[str, list[str] | None]:
    """``f(a, b)`` as its name and parameters; ``None`` for parameters where only the name is given."""
    name, bracket, rest = call.partition("(")
    return name, [
        part.strip() for part in rest.rstrip(")").split(",") if part.strip()
    ] if bracket else None


def test_every_public_name_is_a_row_with_its_parameters() -> None:
    """The names of the API page are those of opgraft.__all__; where a call is shown, its parameters are right."""
    documented = dict(split_call(name) for name in names("api", "name"))
    assert sorted(documented) == sorted(opgraft.__all__)
    for name, parameters in documented.items():
        if parameters is not None:
            assert parameters == parameters_of(getattr(opgraft, name)), name


@pytest.mark.parametrize("module", ["kernels", "engine", "bridges"])
def test_every_name_for_kernels_and_bridges_is_a_row(module: str) -> None:
    """The page of opgraft.kernels and opgraft.plugins.bridges has a row for each name, and shows calls as they are."""
    homes = {"engine": "opgraft.kernels.engine", "bridges": "opgraft.plugins.bridges"}
    path = homes.get(module, f"opgraft.{module}")
    public = importlib.import_module(path)
    documented = dict(split_call(name) for name in names("kernels", f"{module} name"))
    assert sorted(documented) == sorted(public.__all__)
    for name, parameters in documented.items():
        if parameters is not None:
            assert parameters == parameters_of(getattr(public, name)), name


@pytest.mark.parametrize("cls", [opgraft.CustomOp, opgraft.Platform, opgraft.Machine])
def test_every_member_of_the_contracts_is_described(cls: type) -> None:
    """What authors of ops, platforms and probes may use or must define is in the tables, with its parameters."""
    listed = [
        split_call(span)
        for row in rows_of("api", "member")
        for span in re.findall(r"`([^`]+)`", row[0])
    ]
    own = [
        name
        for name in vars(cls)
        if not name.startswith("_") and name not in ("forward", "root", "environ")
    ]
    fields = set(getattr(cls, "__dataclass_fields__", ()))
    for name in set(own) - fields:
        assert name in dict(listed), name
        for _, parameters in [row for row in listed if row[0] == name and row[1] is not None]:
            assert parameters == parameters_of(getattr(cls, name)), name


def test_exit_codes_are_those_of_errors() -> None:
    """Every exit code that an error has is in the table of the command line."""
    listed = {int(row[0]) for row in rows_of("cli", "code")}
    used = {
        c.exit_code
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.OpgraftError)
    }
    assert used | {0} == listed


def test_every_op_is_a_row_with_its_class() -> None:
    """The table of ops is the registry: the name, the class in ``opgraft.ops``, and the maths."""
    registered = {
        name: cls
        for name, cls in ops.CustomOp.op_registry.items()
        if cls.__module__.startswith("opgraft.")
    }
    rows = {code(row[0]): row for row in rows_of("ops", "name")}
    assert sorted(rows) == sorted(registered)
    for name, cls in registered.items():
        _, documented = re.findall(r"`([^`]+)`", rows[name][0])
        assert getattr(ops, documented) is cls, name
        assert rows[name][1], f"{name} has no maths"


def test_the_ops_of_vllm_are_rows() -> None:
    """The page tells how many ops it has of vLLM's, and which: each is a row."""
    told = re.search(
        r"The (\d+) ops of vLLM's documentation are all here, [^:]+: ([^.]+)\.", text_of("ops")
    )
    assert told
    named = re.findall(r"`(\w+)`", told[2])
    assert len(set(named)) == len(named) == int(told[1]) == 38
    assert set(named) <= {code(row[0]) for row in rows_of("ops", "name")}


def test_every_exported_class_of_ops_is_mentioned() -> None:
    """The page names each class of opgraft.ops."""
    bases = ("CustomOp", "PluggableLayer", "maybe_get_oot_by_class")
    assert [
        name for name in ops.__all__ if name not in bases and f"`{name}" not in text_of("ops")
    ] == []


@pytest.mark.parametrize("part", ["models", "distributed"])
def test_every_name_for_model_authors_is_described(part: str) -> None:
    """What the packages for models and for ranks export is in their tables, and their parameters are as listed."""
    module = importlib.import_module(f"opgraft.{part}")
    rows = rows_of("api", "model name" if part == "models" else "distributed name")
    listed = dict(split_call(span) for row in rows for span in re.findall(r"`([^`]+)`", row[0]))
    assert sorted(listed) == sorted(module.__all__)
    for name, parameters in listed.items():
        assert parameters is None or parameters == parameters_of(getattr(module, name)), name
