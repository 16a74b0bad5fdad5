"""Sections of the config: one declaration from which names, variables, options and files come."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import opgraft
import pytest
from opgraft import OpgraftConfig, set_config
from opgraft.config import (
    FIELDS,
    CacheConfig,
    Field,
    ModelConfig,
    ParallelConfig,
    QuantizationSettings,
    SchedulerConfig,
    config_from_fields,
    environment,
    parse_text,
    read_file,
    resolve,
    setting,
)
from opgraft.config.environment import VARIABLES, read_environment
from opgraft.errors import ConfigError
from opgraft.registry.state import host_state

SAMPLES = {
    "NAME": "some",
    "FLAG": "true",
    "INTEGER": "7",
    "NUMBER": "0.5",
    "LIST": '["a"]',
    "MAPPING": '{"a": "b"}',
    "CHOICES": '{"a": ["b", "c"]}',
    "MODE": "FULL",
    "INTEGERS": "[3, 4]",
    "FLAGS": '{"a": true}',
}

NEEDED = {
    "lora.max_cpu_loras": {"lora.max_loras": 2},
    "server.lora_modules": {"lora.enabled": True},
    "speculation.method": {"model.batch_invariant": True},
    "handover.tokens": {"model.batch_invariant": True},
}
"""By setting: others without which it is a contradiction."""


def sample(field: Field) -> str:
    """A value that the field takes and that is not its default, as the command line has it."""
    if field.bounds.choices:
        return field.bounds.choices[-1]
    if field.name == "compilation_config.custom_ops":
        return '["none"]'
    if field.name == "compilation_config.compile_ranges":
        return '["2-16"]'
    if field.name == "compilation_config.level":
        return "2"
    if field.name == "scheduler.max_num_batched_tokens":  # 7 would contradict another default
        return "7000"
    return "false" if field.default is True else SAMPLES[field.kind.metavar]


def value_of(config: OpgraftConfig, name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_reached_from_text_variable_and_file(name: str, tmp_path: Path) -> None:
    """An option, a variable and both kinds of files give the same config, whose rows give the option's text back."""
    field = FIELDS[name]
    text = sample(field)
    expected = config_from_fields({name: parse_text(name, text)})
    assert value_of(expected, name) not in (None, field.default)
    ((origin, layer),) = read_environment({field.variable: text}).layers
    assert (origin, layer) == (field.variable, expected)
    section, _, attribute = name.rpartition(".")
    value = text if field.kind.metavar in ("NAME", "MODE") else json.loads(text)
    inner = {attribute: value}
    (tmp_path / "c.json").write_text(json.dumps({section: inner} if section else inner, indent=1))
    pair = f"a = {json.dumps(value['a'])}" if isinstance(value, dict) else None
    table = f"[{section}]\n" if section else ""
    toml = f"{attribute} = {{ {pair} }}" if pair else f"{attribute} = {json.dumps(value)}"
    (tmp_path / "c.toml").write_text(f"# of {attribute} = 1\n{table}{toml}\n")
    for file, line in (("c.json", 3 if section else 2), ("c.toml", 3 if section else 2)):
        ((origin, layer),) = read_file(str(tmp_path / file)).layers
        assert layer == expected, file
        assert origin == f"{tmp_path / file}, line {line}"
    needed = config_from_fields(NEEDED.get(name, {}))
    rows = resolve([("beside", needed), ("there", expected)]).rows()
    (row,) = [row for row in rows if row[0] == name]
    assert parse_text(name, row[1]) == parse_text(name, text)
    assert row[2] == "there"


def test_every_default_is_a_value_that_its_field_takes() -> None:
    """The declared default passes the check of its own field; a field without one says in words what holds then."""
    for name, field in FIELDS.items():
        if field.default is None:
            assert field.unset, name
        else:
            assert field.check(field.default) == field.default, name


def test_variables_are_named_by_a_rule() -> None:
    """The variable of a setting is its dotted name, but for one that is older than the rule; no two are the same."""
    odd = {
        n: f.variable
        for n, f in FIELDS.items()
        if f.variable != f"OPGRAFT_{n.replace('.', '_').upper()}"
    }
    assert odd == {"compilation_config.custom_ops": "OPGRAFT_CUSTOM_OPS"}
    of_the_process = {
        environment.CONFIG,
        environment.DECISION,
        environment.LOG,
        environment.REPORT,
        environment.SIMULATED_DEVICE,
    }
    assert len(VARIABLES) == len(FIELDS) + len(of_the_process)
    assert of_the_process <= set(VARIABLES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel.tensor": 0}, "parallel.tensor is 0: use an integer at least 1"),
        ({"parallel.tensor": "2"}, "parallel.tensor is '2': use an integer"),
        ({"parallel.tensor": True}, "parallel.tensor is True: use an integer"),
        ({"cache.memory_share": 1.5}, "use a number above 0 and at most 1"),
        ({"cache.memory_share": float("nan")}, "use a number above 0 and at most 1"),
        ({"model.dtype": "float8"}, "use one of auto, float32, bfloat16, float16"),
        ({"model.dtype": "bf16"}, "use bfloat16$"),
        ({"cache.dtype": "half"}, "use float16$"),
        ({"load.progress": 1}, "load.progress is 1: use true or false"),
        ({"quantization.skip": "lm_head"}, "use a list of strings"),
        ({"quantization.by_prefix": {"a": 1}}, "use a mapping of strings"),
        ({"parallel.tensr": 2}, "did you mean 'parallel.tensor'"),
    ],
)
def test_wrong_types_and_bounds_are_named(values: dict[str, object], message: str) -> None:
    """A value of another type or out of bounds is an error that names the setting and what it takes."""
    with pytest.raises(ConfigError, match=message):
        config_from_fields(values)


@pytest.mark.parametrize("value", ["2.5", "two", "", "1e3"])
def test_text_that_is_no_number_is_named(value: str) -> None:
    """Text of an option that is no integer is an error that names the option."""
    with pytest.raises(ConfigError, match=r"--parallel\.tensor='.*' is not an integer"):
        parse_text("parallel.tensor", value)


@pytest.mark.parametrize(
    ("source", "named"),
    [("", r"--model\.dtype"), ("OPGRAFT_MODEL_DTYPE", r"OPGRAFT_MODEL_DTYPE: model\.dtype")],
)
def test_text_of_a_value_that_is_not_taken_is_named(source: str, named: str) -> None:
    """Text of a value that the setting does not take is an error that names what gave it, and an option once."""
    with pytest.raises(ConfigError, match=rf"^{named} is 'float8': use one of auto, float32"):
        parse_text("model.dtype", "float8", source)
    with pytest.raises(ConfigError, match=r"^--compilation_config.custom_ops: "):
        parse_text("compilation_config.custom_ops", "+silu_and_mul,-silu_and_mul")


def test_sections_are_frozen_and_copied() -> None:
    """Nothing computed at run time can be kept in a section, and what was handed in can change without it."""
    given = {"a": "int8"}
    config = OpgraftConfig(quantization=QuantizationSettings(by_prefix=given))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.parallel.tensor = 2  # type: ignore[misc]
    given["b"] = "fp8"
    assert config.quantization.by_prefix == {"a": "int8"}
    with pytest.raises(ConfigError, match="model is 'smollm2': use a ModelConfig"):
        OpgraftConfig(model="smollm2")  # type: ignore[arg-type]


def test_a_resolved_config_has_every_default() -> None:
    """An empty config resolves to the defaults, whatever the environment and scopes say; a complete one is kept."""
    with set_config(OpgraftConfig(parallel=ParallelConfig(tensor=4))):
        resolved = OpgraftConfig(model=ModelConfig(dtype="bfloat16")).resolved()
        assert host_state().settings().config.parallel.tensor == 4
    assert (resolved.parallel.tensor, resolved.model.dtype, resolved.strict) == (
        1,
        "bfloat16",
        False,
    )
    assert resolved.resolved() is resolved
    complete = host_state().settings().config
    assert complete.resolved() is complete


def test_resolved_configs_share_nothing() -> None:
    """Whoever writes to a mapping of one config changes neither the defaults of all others nor what it was made of."""
    given = OpgraftConfig(quantization=QuantizationSettings(by_prefix={"a": "int8"}))
    for config, expected in ((OpgraftConfig(), {}), (given, {"a": "int8"})):
        mapping = config.resolved().quantization.by_prefix
        assert isinstance(mapping, dict)
        mapping["b"] = "fp8"
        assert config.resolved().quantization.by_prefix == expected


CONTRADICTORY = {"model.max_model_len": 4096, "scheduler.chunked_prefill": False}


def test_sections_that_contradict_each_other_are_named_with_their_origins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has both settings, their values and where each was set, a default included."""
    monkeypatch.setenv("OPGRAFT_MODEL_MAX_MODEL_LEN", "4096")
    opgraft.reset()
    expected = (
        r"scheduler.max_num_batched_tokens = 2048 \(default\), model.max_model_len = 4096 "
        r"\(OPGRAFT_MODEL_MAX_MODEL_LEN\), scheduler.chunked_prefill = false \(set_config\)"
    )
    chunks = OpgraftConfig(scheduler=SchedulerConfig(chunked_prefill=False))
    with set_config(chunks), pytest.raises(ConfigError, match=expected):
        host_state().settings()
    with pytest.raises(ConfigError, match="contradict each other"):
        config_from_fields(CONTRADICTORY).resolved()
    roomy = CONTRADICTORY | {"scheduler.max_num_batched_tokens": 4096}
    assert config_from_fields(roomy).resolved().model.max_model_len == 4096


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"scheduler.max_num_seqs": 64, "scheduler.max_num_batched_tokens": 32},
            "takes a token of a step",
        ),
        (
            {"quantization.skip": ["a"], "quantization.by_prefix": {"a": "int8"}},
            "either skipped or quantized",
        ),
    ],
)
def test_fields_of_one_section_can_contradict_each_other(
    values: dict[str, object], message: str
) -> None:
    """A pair that cannot hold together is an error with the way out."""
    with pytest.raises(ConfigError, match=message):
        config_from_fields(values).resolved()


@dataclass(frozen=True, kw_only=True)
class ExtendedParallel(ParallelConfig):
    overlap: bool = setting("hide communication behind computation", default=False)


class Layer:
    """Reads an option that nothing between it and the entry point knows of."""

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        parallel = opgraft_config.resolved().parallel
        self.prefix = prefix
        self.overlap = isinstance(parallel, ExtendedParallel) and parallel.overlap


class Model:
    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        self.layer = Layer(opgraft_config=opgraft_config, prefix=f"{prefix}layer")


def test_a_new_option_reaches_the_layer_that_reads_it() -> None:
    """A setting that a subclass of a section adds is checked, merged with other layers, and read by the layer."""
    given = OpgraftConfig(parallel=ExtendedParallel(overlap=True))
    with set_config(given), set_config(OpgraftConfig(parallel=ParallelConfig(tensor=2))):
        settings = host_state().settings()
    assert Model(opgraft_config=settings.config).layer.overlap is True
    assert settings.config.parallel.tensor == 2
    assert settings.origins["parallel.overlap"] == "set_config"
    assert Model(opgraft_config=OpgraftConfig(parallel=ExtendedParallel())).layer.overlap is False
    assert Model(opgraft_config=OpgraftConfig()).layer.overlap is False
    with pytest.raises(ConfigError, match=r"parallel\.overlap is 3: use true or false"):
        ExtendedParallel(overlap=3)  # type: ignore[arg-type]


def test_a_setting_of_an_unknown_type_is_named() -> None:
    """A declaration whose annotation has no parser is an error, not a field that never parses."""

    @dataclass(frozen=True)
    class Odd(CacheConfig):
        section: ClassVar[str] = "cache"
        size: complex = setting("no such type", default=None, unset="none")  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"the setting cache\.size is declared as complex"):
        Odd()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c.json",
            '{\n "model": {\n  "dtyp": "auto"}}',
            r"c\.json, line 3: unknown setting 'model\.dtyp': did you mean",
        ),
        (
            "c.toml",
            "[parallel]\n# tensor = 2\ntensor = 0",
            r"c\.toml, line 3: parallel\.tensor is 0",
        ),
        ("c.toml", "modle.dtype = 'auto'", r"line 1: unknown section 'modle'"),
        ("c.toml", "model = 'smollm2'", "model is 'smollm2', but it is a section"),
        ("c.toml", "a = = 1", r"c\.toml is malformed: .*line 1"),
        ("c.json", '{\n"strict": }', r"c\.json is malformed: .*line 2"),
        ("c.json", '{"strict": true, "strict": false}', "'strict' stands in one object twice"),
        (
            "c.json",
            '{"model": {"seed": 1},\n"model.seed": 2}',
            r"model\.seed stands in the file twice",
        ),
        ("c.json", '{"strict": null}', "line 1: strict is null"),
        ("c.json", "[]", "holds no object"),
        ("c.json", "[" * 100_000, r"c\.json is malformed"),
        ("c.yaml", "strict: true", r"neither \.json nor \.toml"),
    ],
)
def test_bad_files_are_named_with_their_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    """A malformed file, an unknown field and a wrong value are errors that name the file, and the line where known."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_file(str(tmp_path / name))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """A missing file, a folder and a file that is no text are errors that name it."""
    (tmp_path / "c.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "d.json").mkdir()
    for name, message in (
        ("a.json", "No such file"),
        ("d.json", "Is a directory"),
        ("c.json", "is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=f"{name} .*{message}"):
            read_file(str(tmp_path / name))


def test_a_file_stands_between_environment_and_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPGRAFT_CONFIG gives defaults that a variable and a scope override; another file can take its place."""
    (tmp_path / "c.toml").write_text(
        "strict = true\n[parallel]\ntensor = 2\ndata = 2\npipeline = 2\n"
    )
    (tmp_path / "other.json").write_text('{"parallel": {"pipeline": 8}}')
    monkeypatch.setenv("OPGRAFT_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("OPGRAFT_PARALLEL_DATA", "4")
    opgraft.reset()
    host_state().adjustments.append(
        ("plugin acme", OpgraftConfig(parallel=ParallelConfig(pipeline=16, expert=2)))
    )
    with set_config(OpgraftConfig(parallel=ParallelConfig(tensor=3))):
        settings = host_state().settings()
    parallel = settings.config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data, parallel.expert) == (3, 2, 4, 2)
    assert settings.origins["parallel.pipeline"] == f"{tmp_path / 'c.toml'}, line 5"
    with (
        set_config(OpgraftConfig(), file=read_file(str(tmp_path / "other.json"))),
        set_config(OpgraftConfig()),
    ):
        settings = host_state().settings()
    parallel = settings.config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data, parallel.expert) == (1, 8, 4, 2)
    assert settings.config.strict is False


def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "opgraft", *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_line_has_every_setting_with_its_help(warm_python: str) -> None:
    """The help of the command that needs most shows each option with what it takes, its meaning and its default."""
    result = run(warm_python, "serve", "--help")
    words = " ".join(result.stdout.split())
    for name, field in FIELDS.items():
        assert f"--{name} {field.metavar} {field.help}" in words, name
    assert "--parallel.tensor INTEGER ranks that share each layer; at least 1 [default: 1]" in words
    assert "--config FILE" in words


def test_the_command_line_takes_files_and_says_what_is_wrong(
    tmp_path: Path, warm_python: str
) -> None:
    """A file given as an option holds for the command, its child process included, and its errors end with 2."""
    (tmp_path / "c.toml").write_text("platform = 'nope'\n")
    result = run(warm_python, "detect", "--config", str(tmp_path / "c.toml"))
    assert result.returncode == 3
    assert f"{tmp_path / 'c.toml'}, line 1 asks for platform 'nope'" in result.stderr
    result = run(warm_python, "detect", "--config", str(tmp_path / "c.toml"), "--platform", "cpu")
    assert result.returncode == 0
    assert (
        run(warm_python, "plugins", "doctor", "--config", str(tmp_path / "c.toml")).returncode == 3
    )
    (tmp_path / "c.toml").write_text("plattform = 'cpu'\n")
    result = run(warm_python, "detect", "--config", str(tmp_path / "c.toml"))
    assert (result.returncode, "did you mean 'platform'" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "c.toml",
            "[modle]\nname = 'a'\n",
            "c.toml, line 1: unknown section 'modle': did you mean 'model'",
        ),
        (
            "c.toml",
            "strict = true\ntensor = 2\n",
            "c.toml, line 2: .*did you mean 'parallel.tensor'",
        ),
        (
            "c.toml",
            "strict = true\nparallel = 3\n",
            "c.toml, line 2: parallel is 3, but it is a section",
        ),
        (
            "c.json",
            '{"strict": true,\n"model": null}',
            "c.json, line 2: model is null, but it is a section",
        ),
        ("c.JSON", '{"strict": "yes"}', "c.JSON, line 1: strict is 'yes': use true or false"),
    ],
)
def test_faults_of_files_have_line_and_meaning(
    file: str, text: str, message: str, tmp_path: Path
) -> None:
    """A misspelt section, a field outside of its section and a section without fields are told with their line."""
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_file(str(tmp_path / file))


def test_an_ending_in_capitals(tmp_path: Path) -> None:
    """The kind of a file does not depend on the case of its name."""
    (tmp_path / "Good.TOML").write_text("strict = true\n")
    assert len(read_file(str(tmp_path / "Good.TOML")).layers) == 1


@pytest.mark.parametrize("text", ["a=b,a=c", '{"a": "b", "a": "c"}'])
def test_a_key_that_stands_there_twice(text: str) -> None:
    """The last one does not win in silence."""
    with pytest.raises(ConfigError, match="'a' stands in one object twice"):
        parse_text("providers", text)


@pytest.mark.parametrize(("name", "value"), [("data_rank", 1), ("meeting", "localhost:29500")])
def test_what_a_front_end_tells_its_engines_is_no_setting(name: str, value: object) -> None:
    """Nobody can set it, by which an engine would wait for others that nobody starts, and a merge drops it."""
    with pytest.raises(ConfigError, match=f"unknown setting 'parallel.{name}'"):
        config_from_fields({f"parallel.{name}": value})
    told = OpgraftConfig(parallel=ParallelConfig(**{name: value}))
    assert getattr(resolve([("a caller", told)]).config.parallel, name) is None
