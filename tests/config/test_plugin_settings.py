"""Settings that a distribution declares as data: option, variable, keyword, file, and what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import opgraft
import pytest
from opgraft import LLM, OpgraftConfig, SamplingParams, set_config
from opgraft.config import config_from_fields, known_fields, parse_text, plugin_fields, read_file
from opgraft.config.environment import known_variables, read_environment
from opgraft.errors import ConfigError
from opgraft.kernels.engine import Worker
from opgraft.plugins.bridges import current_config
from opgraft.plugins.discovery import discover, names_of
from opgraft.registry.state import host_state
from support.small_words import word_llama

SETTINGS = """
[streams]
type = "int"
help = "command streams of the board"
default = 2
minimum = 1
maximum = 8

[firmware]
type = "str"
help = "firmware that the board runs"
default = "stable"
choices = ["stable", "fast"]

[cores]
type = "Sequence[int]"
help = "cores of the board"
unset = "all"

[ecc]
type = "bool"
help = "check memory"
default = true
"""

PLUGIN = """
import sys

import opgraft
from opgraft.kernels.engine import KVCacheManager, Sampler, Scheduler, Worker

platforms = ("cpu",)
SEEN = {}

def seeing(base):
    class Seeing(base):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            SEEN[base.__name__] = dict(self.opgraft_config.of_plugins)
    return Seeing

@opgraft.hookimpl
def opgraft_register_ops(platform):
    from opgraft.plugins.bridges import current_config
    print("streams:", current_config().of_plugins["acme.streams"], file=sys.stderr)
    parts = {"kv_cache_manager": KVCacheManager, "sampler": Sampler, "scheduler": Scheduler, "worker": Worker}
    for name, base in parts.items():
        opgraft.PluggableClass.register_oot(seeing(base), name=name)
"""

DEFAULTS = {
    "acme.streams": 2,
    "acme.firmware": "stable",
    "acme.cores": None,
    "acme.ecc": True,
}

Acme = Callable[..., None]


@pytest.fixture
def acme(site) -> Acme:
    """Install a distribution with a plugin and settings."""

    def install(
        settings: str | None = SETTINGS,
        section: str = "acme",
        name: str = "opgraft-acme",
        value: str = "",
        further: Sequence[str] = (),
    ) -> None:
        package = name.replace("-", "_")
        files = {f"{package}/__init__.py": "raise RuntimeError('imported')\n"}
        files[f"{package}_plugin.py"] = PLUGIN
        if settings is not None:
            files[f"{package}/settings.toml"] = settings
        points = {
            "opgraft.plugins": [f"{package} = {package}_plugin"],
            "opgraft.settings": [f"{section} = {value or package}", *further],
        }
        site.install(name, files, points)

    return install


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_llama(tmp_path_factory.mktemp("llama"))


def test_settings_are_known_before_any_code_of_the_plugin_runs(acme: Acme) -> None:
    """The declared settings have names, variables and help, and neither package nor plugin is imported."""
    acme()
    fields = plugin_fields()
    assert list(fields) == list(DEFAULTS)
    assert fields["acme.streams"].variable == "OPGRAFT_ACME_STREAMS"
    assert fields["acme.streams"].words == "an integer at least 1 and at most 8"
    assert fields["acme.firmware"].metavar == "stable|fast"
    assert known_variables()["OPGRAFT_ACME_ECC"] == "check memory"
    assert current_config().of_plugins == DEFAULTS
    assert not {"opgraft_acme", "opgraft_acme_plugin"} & sys.modules.keys()


def test_settings_are_read_only(acme: Acme) -> None:
    """No part of the engine changes the settings of another: neither those handed down, nor the declarations."""
    acme()
    given = OpgraftConfig(of_plugins={"acme.streams": 3})
    handed = host_state().settings().handed_down()
    copies = [copy.deepcopy(handed), pickle.loads(pickle.dumps(handed))]  # noqa: S301  # made here
    mappings = [each.of_plugins for each in (given, handed, given.resolved(), *copies)]
    for mapping in (*mappings, plugin_fields()):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["acme.streams"] = 5  # type: ignore[index]
    assert [each["acme.streams"] for each in mappings] == [3, 2, 3, 2, 2]


def test_a_section_is_no_name_of_a_plugin(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of plugins take no section, and a section may have the name of another distribution."""
    acme(section="opgraft_bolt")
    acme(name="opgraft-bolt", section="bolt")
    assert {name.partition(".")[0] for name in plugin_fields()} == {"opgraft_bolt", "bolt"}
    with pytest.raises(ConfigError, match="no plugin or platform 'bolt' is installed"):
        names_of("bolt")
    assert names_of("opgraft_bolt")[1] == ["opgraft_bolt"]
    monkeypatch.setenv("OPGRAFT_PLUGINS", "bolt")
    opgraft.reset()
    with pytest.raises(ConfigError, match=r"plugins names 'bolt' .*, which is not installed"):
        opgraft.load_plugins()


def test_keyword_variable_and_file_reach_every_part_of_the_engine(
    acme: Acme, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker, scheduler, cache manager and sampler of a plugin see what keyword, variable and file have set."""
    acme()
    (tmp_path / "c.toml").write_text("[acme]\ncores = [1, 3]\n")
    monkeypatch.setenv("OPGRAFT_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("OPGRAFT_ACME_FIRMWARE", "fast")
    options = {"cache.num_blocks": 40, "max_model_len": 64, "load.progress": False}
    llm = LLM(str(folder), **options, **{"acme.streams": 5})
    llm.generate("the cat", SamplingParams(temperature=0, max_tokens=2))
    expected = DEFAULTS | {"acme.streams": 5, "acme.firmware": "fast", "acme.cores": (1, 3)}
    seen = sys.modules["opgraft_acme_plugin"].SEEN
    assert seen == dict.fromkeys(("KVCacheManager", "Sampler", "Scheduler", "Worker"), expected)
    # A whole configuration in Python has the same settings.
    given = config_from_fields({"model.name": str(folder), "acme.streams": 7, **_dotted(options)})
    LLM(opgraft_config=given)
    assert seen["Worker"]["acme.streams"] == 7


def _dotted(options: dict[str, object]) -> dict[str, object]:
    return {name.replace("max_model", "model.max_model"): value for name, value in options.items()}


def test_option_and_help(acme: Acme, cli) -> None:
    """An option reaches the plugin in a command, the help has it, and a child process of a command gets it."""
    acme()
    found = cli("ops", "explain", "rms_norm", "--acme.streams", "6")
    assert (found.returncode, "streams: 6" in found.stderr) == (0, True), found.stderr
    found = cli("plugins", "check", "opgraft_acme", "--acme.streams", "9")
    named = "error: --acme.streams of opgraft-acme 1.0 is 9: use an integer at least 1 and at most"
    assert (found.returncode, named in found.stderr) == (2, True), found.stderr
    words = " ".join(cli("run", "--help").stdout.split())
    assert "Settings of opgraft-acme 1.0: --acme.streams INTEGER command streams" in words
    assert "at least 1 and at most 8 [default: 2]" in words
    assert "--acme.firmware stable|fast firmware that the board runs [default: stable]" in words


def test_an_option_reaches_the_worker_processes(acme: Acme, folder: Path, cli) -> None:
    """The plugin sees an option of 'run' in the command's own process, and in each worker."""
    acme()
    shared = ("--parallel.tensor", "2", "--acme.streams", "6", "--model.max_model_len", "64")
    found = cli("run", str(folder), "the cat", "--max-tokens", "2", *shared)
    assert found.returncode == 0, found.stderr
    assert set(re.findall(r"streams: \d", found.stderr)) == {"streams: 6"}
    assert found.stderr.count("streams: 6") == 3


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("--acme.steams", "3"), {}, "unknown setting 'acme.steams' of opgraft-acme 1.0: did you"),
        (("--acme.firmware=old",), {}, "opgraft-acme 1.0 is 'old': use one of stable, fast"),
        (
            ("--acme.streams", "many"),
            {},
            "is not an integer: acme.streams of opgraft-acme 1.0 takes an integer at least 1",
        ),
        (
            (),
            {"OPGRAFT_ACME_STREAMS": "0"},
            "OPGRAFT_ACME_STREAMS: acme.streams of opgraft-acme 1.0 is 0: use an integer at least",
        ),
        (
            (),
            {"OPGRAFT_ACME_STEAMS": "3"},
            "unknown environment variable OPGRAFT_ACME_STEAMS of opgraft-acme 1.0: did you mean "
            "'OPGRAFT_ACME_STREAMS'",
        ),
    ],
)
def test_wrong_options_and_variables_name_plugin_and_values(
    arguments: tuple[str, ...], variables: dict[str, str], message: str, acme: Acme, cli
) -> None:
    """A command with a wrong name or value ends with 2, and says whose setting it is and what is allowed."""
    acme()
    found = cli("env" if not variables else "detect", *arguments, **variables)
    assert found.returncode == 2, found
    assert message in found.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"acme.streams": 9},
            r"acme\.streams of opgraft-acme 1\.0 is 9: use an integer at least 1",
        ),
        ({"acme.streams": True}, "is True: use an integer"),
        ({"acme.firmware": "old"}, "use one of stable, fast"),
        ({"acme.cores": ["a"]}, "use a list of integers"),
        ({"acme.steams": 3}, r"of opgraft-acme 1\.0: did you mean 'acme\.streams'"),
        (
            {"acme.something_else_entirely": 3},
            r"known: acme\.cores, acme\.ecc, acme\.firmware, acme\.streams",
        ),
    ],
)
def test_wrong_keywords_and_files_name_plugin_and_values(
    values: dict[str, object], message: str, acme: Acme, tmp_path: Path
) -> None:
    """A keyword of an LLM, a config and a file refuse a wrong name or value in the same words."""
    acme()
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2", **values)
    with pytest.raises(ConfigError, match=message):
        OpgraftConfig(of_plugins=values)
    ((name, value),) = values.items()
    text = str(value).lower().replace("'", '"') if not isinstance(value, str) else f'"{value}"'
    (tmp_path / "c.toml").write_text(f"[acme]\n{name.removeprefix('acme.')} = {text}\n")
    with pytest.raises(ConfigError, match=rf"c\.toml, line 2: .*{message}"):
        read_file(str(tmp_path / "c.toml"))


def test_settings_of_opgraft_are_no_settings_of_plugins(acme: Acme) -> None:
    """What has a field of its own is refused in of_plugins, so that each value has one place."""
    acme()
    with pytest.raises(ConfigError, match=r"model\.seed is no setting of a plugin"):
        OpgraftConfig(of_plugins={"model.seed": 3})


def test_layers_are_merged_as_for_any_setting(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope stands above the variable, the variable above defaults of plugins, and origins name them."""
    acme()
    monkeypatch.setenv("OPGRAFT_ACME_STREAMS", "3")
    opgraft.reset()
    adjusted = config_from_fields({"acme.streams": 8, "acme.firmware": "fast"})
    host_state().adjustments.append(("plugin acme", adjusted))
    with set_config(config_from_fields({"acme.ecc": False})):
        settings = host_state().settings()
    changed = {"acme.streams": 3, "acme.firmware": "fast", "acme.ecc": False}
    assert settings.config.of_plugins == DEFAULTS | changed
    assert settings.origins["acme.streams"] == "OPGRAFT_ACME_STREAMS"
    assert settings.origins["acme.firmware"] == "plugin acme"
    assert settings.origins["acme.ecc"] == "set_config"
    assert settings.origins["acme.cores"] == "default"
    assert ("acme.ecc", "false", "set_config") in list(settings.rows())
    handed = settings.handed_down()
    assert handed.resolved() is handed
    # A worker process gets the config as bytes.
    assert pickle.loads(pickle.dumps(handed)) == copy.copy(handed) == handed  # noqa: S301  # made here
    assert OpgraftConfig().resolved().of_plugins == DEFAULTS


def test_a_part_that_is_tried_alone_has_the_defaults(acme: Acme) -> None:
    """A worker of an empty config prepares its device, and hands every default to the runner and the sampler."""
    acme()
    worker = Worker(OpgraftConfig())
    worker.init_device()
    assert worker.device.type == "cpu"
    for part in (worker, worker.runner, worker.runner.sampler):
        assert part.opgraft_config.of_plugins == DEFAULTS


def test_settings_of_a_plugin_that_is_left_out_stay_known(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable for a plugin on the deny list is no error: the machine may set it for other programs."""
    acme()
    monkeypatch.setenv("OPGRAFT_PLUGINS_DISABLE", "opgraft-acme")
    monkeypatch.setenv("OPGRAFT_ACME_STREAMS", "3")
    opgraft.reset()
    opgraft.load_plugins()
    assert current_config().of_plugins["acme.streams"] == 3


def test_without_the_distribution_its_settings_are_unknown() -> None:
    """There is no such setting, variable or keyword where nothing declares it."""
    assert plugin_fields() == {}
    assert not [name for name in known_fields() if name.startswith("acme")]
    with pytest.raises(ConfigError, match="unknown environment variable OPGRAFT_ACME_STREAMS"):
        read_environment({"OPGRAFT_ACME_STREAMS": "3"})
    with pytest.raises(ConfigError, match=r"unknown setting 'acme\.streams'"):
        parse_text("acme.streams", "3")


def declared(body: str) -> str:
    return f"[streams]\n{body}\n"


WHOLE = 'type = "int"\nhelp = "streams"\ndefault = 2'
SHARE = 'type = "float"\nhelp = "share"\ndefault = 2.0'
WORD = 'type = "str"\nhelp = "word"\ndefault = "a"'


@pytest.mark.parametrize(
    ("settings", "section", "message"),
    [
        (None, "acme", "has no settings.toml: list the file among the package data"),
        ("a = = 1", "acme", "settings.toml cannot be read"),
        ("streams = 3", "acme", "acme.streams is 3: write a table"),
        (declared('type = "complex"\nhelp = "x"'), "acme", "acme.streams.type is 'complex': use"),
        (declared('type = "int"\ndefault = 2'), "acme", "acme.streams has no help"),
        (declared('type = "int"\nhelp = "x"'), "acme", "acme.streams has no default: give one"),
        (declared(f"{WHOLE}\nminimun = 1"), "acme", "the key 'minimun': did you mean 'minimum'"),
        (declared(f"{WHOLE}\nminimum = 3"), "acme", "is 2: use an integer at least 3"),
        (declared(f'{WHOLE}\nminimum = "3"'), "acme", "acme.streams.minimum is '3': write an in"),
        (declared(f"{WHOLE}\nminimum = 1.5"), "acme", "minimum is 1.5: write an integer for the"),
        (declared(f"{WHOLE}\nminimum = nan"), "acme", "acme.streams.minimum is nan: write an int"),
        (declared(f"{SHARE}\nmaximum = inf"), "acme", "maximum is inf: write an integer for the"),
        (declared(f"{SHARE}\nabove = nan"), "acme", "acme.streams.above is nan: write an integer"),
        (declared(f"{WHOLE}\nminimum = 3\nmaximum = 1"), "acme", "is 3, above the maximum of 1"),
        (declared(f"{SHARE}\nabove = 3\nmaximum = 3"), "acme", "above is 3, and the maximum is 3"),
        (declared(SHARE.replace("2.0", "nan")), "acme", "opgraft-acme 1.0 is nan: use a number"),
        (
            declared(WORD.replace('"a"', '"\\u001b[31m"')),
            "acme",
            r"acme.streams.default has the text '\x1b[31m': take out the control characters",
        ),
        (
            declared(WORD + '\nchoices = ["a", "\\u202eb"]'),
            "acme",
            r"acme.streams.choices has the text '\u202eb': take out",
        ),
        (
            declared('type = "Mapping[str, str]"\nhelp = "x"\ndefault = {a = "\\u0007"}'),
            "acme",
            r"acme.streams.default has the text '\x07': take out",
        ),
        (
            declared('type = "Sequence[str]"\nhelp = "x"\ndefault = ["a", "\\n"]'),
            "acme",
            r"acme.streams.default has the text '\n': take out",
        ),
        (
            "".join(f"[s{number}]\n{WHOLE}\n" for number in range(201)),
            "acme",
            "it declares 201 settings: declare 200 at most",
        ),
        (declared(WHOLE) + "#" * (1 << 18), "acme", "settings.toml cannot be read"),
        (declared(f'{WHOLE}\nchoices = ["2"]'), "acme", "write strings, for the type str"),
        (declared(WHOLE).replace("streams]", '"a b"]'), "acme", "'acme.a b' is no name"),
        (declared(WHOLE), "model", "opgraft has the name 'model' already"),
        (declared(WHOLE), "platform", "opgraft has the name 'platform' already"),
        (declared(WHOLE), "Acme", "the section 'Acme' is no name"),
        (
            declared(WHOLE).replace("streams", "device"),
            "simulated",
            "simulated.device and opgraft would share the variable OPGRAFT_SIMULATED_DEVICE",
        ),
    ],
)
def test_faulty_declarations_are_told_and_left_out(
    settings: str | None,
    section: str,
    message: str,
    acme: Acme,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong file declares nothing; the warning and the report name distribution and fault, and the plugin loads."""
    acme(settings, section)
    with caplog.at_level(logging.WARNING, "opgraft"):
        assert plugin_fields() == {}
    assert "plugin metadata of opgraft-acme 1.0 is ignored: its settings" in caplog.text
    (problem,) = discover().problems
    assert message in problem.reason
    opgraft.load_plugins()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("opgraft_acme_plugin", "opgraft_acme_plugin is a module: name the package whose folder"),
        ("opgraft_nowhere", "there is no package opgraft_nowhere: name the one with settings.toml"),
        ("opgraft_acme.nowhere", "there is no package opgraft_acme.nowhere: name the one with"),
    ],
)
def test_the_value_is_a_package(value: str, message: str, acme: Acme) -> None:
    """A value that is a module, or names nothing, declares nothing, and the problem says so."""
    acme(value=value)
    assert plugin_fields() == {}
    (problem,) = discover().problems
    assert message in problem.reason


def test_a_distribution_has_one_section_of_200_settings(acme: Acme) -> None:
    """200 settings are taken. Further sections of a distribution are one problem, and their files are not read."""
    tables = "".join(f"[s{number}]\n{WHOLE}\n" for number in range(200))
    acme(tables, further=["bolt = opgraft_acme", "cord = opgraft_acme"])
    assert list(plugin_fields()) == [f"acme.s{number}" for number in range(200)]
    (problem,) = discover().problems
    assert "it has several sections in opgraft.settings, and 'acme' counts" in problem.reason


def test_two_distributions_do_not_share_a_section(acme: Acme) -> None:
    """The second distribution with a section, or with a variable of the first, declares nothing."""
    acme(declared(WHOLE))
    acme(declared(WHOLE), name="opgraft-bolt")
    acme(declared(WHOLE).replace("streams", "b_c"), section="aa", name="opgraft-c")
    acme(declared(WHOLE).replace("streams", "c"), section="aa_b", name="opgraft-d")
    assert list(plugin_fields()) == ["acme.streams", "aa.b_c"]
    taken, shared = sorted(problem.reason for problem in discover().problems)
    assert "aa_b.c and aa.b_c would share the variable OPGRAFT_AA_B_C: rename one" in shared
    assert "its entry point 'acme' in opgraft.settings is already provided by opgraft-acme" in taken
