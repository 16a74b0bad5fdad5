"""Settings: their values, layers and scopes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import opgraft
import pytest
from opgraft import CompilationConfig, CompilationMode, CustomOp, OpgraftConfig, set_config
from opgraft.config import CustomOpsSetting, config_from_fields, parse_text, read_file, resolve
from opgraft.config.environment import read_environment
from opgraft.errors import ConfigError
from opgraft.ops import RMSNorm
from opgraft.registry.state import host_state
from opgraft.serving.engine_settings import engine_config


def custom_ops(*tokens: str) -> OpgraftConfig:
    return OpgraftConfig(compilation_config=CompilationConfig(custom_ops=tokens))


def test_joined_and_separate_tokens_mean_the_same() -> None:
    """["none,+a,+b"] and ["none", "+a", "+b"] are one setting."""
    assert CustomOpsSetting.parse(["none,+a,+b"]) == CustomOpsSetting.parse(["none", "+a", "+b"])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["all", "none"], "both 'all' and 'none'"),
        (["+a,-a"], r"both '\+a' and '-a'"),
        (["rms_norm"], "each entry is"),
        (["+"], "each entry is"),
        ("all", "use a list of strings"),
        ([1], "use a list of strings"),
    ],
)
def test_contradictory_or_malformed_custom_ops_are_rejected(tokens: object, message: str) -> None:
    """A contradiction or an unknown form is an error when the config is made, not when an op is constructed."""
    with pytest.raises(ConfigError, match=message):
        CompilationConfig(custom_ops=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "mode", "expected"),
    [
        ("inductor", CompilationMode.NONE, True),
        ("inductor", CompilationMode.STOCK_TORCH_COMPILE, False),
        ("inductor", CompilationMode.DYNAMO_TRACE_ONCE, False),
        ("inductor", CompilationMode.VLLM_COMPILE, False),
        ("eager", CompilationMode.TORCH_COMPILE, True),
        ("eager", CompilationMode.NONE, True),
    ],
)
def test_the_default_of_custom_ops_depends_on_backend_and_mode(
    backend: str, mode: CompilationMode, expected: bool
) -> None:
    """Ops are disabled by default only where inductor compiles the native forms."""
    layer = OpgraftConfig(compilation_config=CompilationConfig(backend=backend, mode=mode))
    assert resolve([("test", layer)]).enabled("rms_norm")[0] is expected


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        (0, CompilationMode.NONE),
        ("1", CompilationMode.STOCK_TORCH_COMPILE),
        ("torch_compile", CompilationMode.STOCK_TORCH_COMPILE),
        (2, CompilationMode.DYNAMO_TRACE_ONCE),
        ("3", CompilationMode.FULL),
        ("VLLM_COMPILE", CompilationMode.FULL),
    ],
)
def test_modes_have_the_numbers_of_vllm(given: object, mode: CompilationMode) -> None:
    """A mode is given by name, by an older or vLLM's name, or by its number from 0 to 3."""
    assert CompilationConfig(mode=given).mode is mode  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a number from 0 to 3"):
        CompilationConfig(mode=4)  # type: ignore[arg-type]


def test_an_inner_layer_wins_field_by_field() -> None:
    """Unset fields of a higher layer let the lower layer through, and the origin names the layer that counts."""
    settings = resolve(
        [("low", OpgraftConfig(strict=True, platform="cpu")), ("high", OpgraftConfig(strict=False))]
    )
    assert settings.config.strict is False
    assert settings.config.platform == "cpu"
    assert settings.origins["strict"] == "high"
    assert settings.origins["platform"] == "low"


def test_scopes_nest_and_end() -> None:
    """set_config holds within its block only; an inner scope stands above the outer one."""
    with set_config(custom_ops("none")):
        with set_config(custom_ops("all")):
            assert host_state().settings().enabled("x")[0] is True
        assert host_state().settings().enabled("x")[0] is False
    assert host_state().settings().enabled("x")[0] is True


def test_the_environment_stands_below_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPGRAFT_CUSTOM_OPS is read once and can be overridden by a scope; reset reads it again."""
    monkeypatch.setenv("OPGRAFT_CUSTOM_OPS", "none")
    opgraft.reset()
    enabled, reason = host_state().settings().enabled("x")
    assert not enabled
    assert "OPGRAFT_CUSTOM_OPS" in reason
    with set_config(custom_ops("all")):
        assert host_state().settings().enabled("x")[0]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OPGRAFT_STRICT": "maybe"}, "OPGRAFT_STRICT='maybe' is not a flag"),
        ({"OPGRAFT_PLATFROM": "cpu"}, "did you mean 'OPGRAFT_PLATFORM'"),
    ],
)
def test_bad_variables_are_named(variables: dict[str, str], message: str) -> None:
    """A misspelt variable or a value outside the list is an error that names it."""
    with pytest.raises(ConfigError, match=message):
        read_environment(variables)


def test_an_empty_allow_list_means_none() -> None:
    """OPGRAFT_PLUGINS set to nothing allows no plugin; unset it allows all."""
    ((_, layer),) = read_environment({"OPGRAFT_PLUGINS": ""}).layers
    assert layer.plugins == ()
    assert read_environment({"OPGRAFT_PLATFORM": ""}).layers == ()


def test_a_contradiction_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error about a value tells which variable holds it."""
    monkeypatch.setenv("OPGRAFT_CUSTOM_OPS", "all,none")
    opgraft.reset()
    with pytest.raises(ConfigError, match="OPGRAFT_CUSTOM_OPS"):
        host_state().settings()


def test_dotted_names_reach_every_field() -> None:
    """The command line's dotted names make the same config as the constructors."""
    made = config_from_fields({"strict": True, "compilation_config.custom_ops": ["none,+a"]})
    assert made == OpgraftConfig(
        strict=True, compilation_config=CompilationConfig(custom_ops=["none", "+a"])
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("compilation_config.custom_ops", '["none,+rms_norm"]', ["none,+rms_norm"]),
        ("compilation_config.custom_ops", "none,+rms_norm", ["none", "+rms_norm"]),
        ("strict", "true", True),
        ("providers", '{"rms_norm": "acme"}', {"rms_norm": "acme"}),
    ],
)
def test_command_line_values_are_parsed(name: str, text: str, expected: object) -> None:
    """Lists come as JSON or separated by commas, mappings as JSON."""
    assert parse_text(name, text) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_text("providers", "{"), "not valid JSON"),
        (lambda: parse_text("strict", "perhaps"), "not a flag"),
        (
            lambda: parse_text("compilation_config.custom_op", "all"),
            "did you mean 'compilation_config.custom_ops'",
        ),
        (lambda: config_from_fields({"strcit": True}), "did you mean 'strict'"),
        (lambda: CompilationConfig(mode="FAST"), "mode is 'FAST'"),
        (lambda: OpgraftConfig(plugins="toy"), "use a list of strings"),
        (lambda: OpgraftConfig(platform=3), "platform is 3"),
    ],
)
def test_bad_values_are_config_errors(call, message: str) -> None:
    """Every setting checks its value where it is given."""
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("word", "value"), [("no", False), ("off", False), ("0", False), ("yes", True), ("on", True)]
)
def test_a_flag_has_the_words_that_are_documented(
    word: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spelling in the reference is taken."""
    monkeypatch.setenv("OPGRAFT_STRICT", word)
    layers = dict(read_environment().layers)
    assert layers["OPGRAFT_STRICT"].strict is value


def test_text_is_a_mapping_everywhere(tmp_path: Path) -> None:
    """A choice of providers is written alike in Python, a file, the environment and on the command line."""
    text, mapping = (
        "rms_norm=acme, silu_and_mul=native",
        {"rms_norm": "acme", "silu_and_mul": "native"},
    )
    (tmp_path / "c.toml").write_text(f'providers = "{text}"')
    ((_, in_file),) = read_file(str(tmp_path / "c.toml")).layers
    ((_, in_environment),) = read_environment({"OPGRAFT_PROVIDERS": text}).layers
    made = OpgraftConfig(providers=text)
    assert (
        made.providers
        == in_file.providers
        == in_environment.providers
        == parse_text("providers", text)
        == mapping
    )
    with pytest.raises(ConfigError, match="use key=value pairs"):
        OpgraftConfig(providers="rms_norm")


def test_several_providers_of_an_op(tmp_path: Path) -> None:
    """A list is written alike in Python, a file, the environment and as JSON; one name in a list is that name."""
    text, listed = "rms_norm=acme/brix/native,gelu=acme", ("acme", "brix", "native")
    (tmp_path / "c.toml").write_text(
        '[providers]\nrms_norm = ["acme", "brix", "native"]\ngelu = ["acme"]'
    )
    ((_, in_file),) = read_file(str(tmp_path / "c.toml")).layers
    ((_, in_environment),) = read_environment({"OPGRAFT_PROVIDERS": text}).layers
    in_json = parse_text("providers", '{"rms_norm": ["acme", "brix", "native"], "gelu": "acme"}')
    for made in (in_file, in_environment, OpgraftConfig(providers=in_json)):
        assert made.providers == {"rms_norm": listed, "gelu": "acme"}
    settings = resolve([("x", in_file)])
    assert settings.wanted_providers("rms_norm") == listed
    assert settings.chosen_provider("rms_norm") is None
    assert settings.chosen_provider("gelu") == "acme"


@pytest.mark.parametrize("names", ["acme/", "acme/acme", [], ["acme", 1], [["acme"]]])
def test_lists_of_providers_that_are_refused(names: Any) -> None:
    """An empty name, the same name twice, an empty list, and what is no name."""
    with pytest.raises(ConfigError, match="several different ones as a list"):
        OpgraftConfig(providers={"a": names} if isinstance(names, list) else f"a={names}")


@pytest.mark.parametrize(
    ("choice", "switch"),
    [({"a": "native"}, "+a"), ({"a": "acme"}, "-a"), ({"b": "x", "a": "native"}, "none,+a")],
)
def test_a_choice_and_a_switch_that_contradict_each_other(
    choice: dict[str, str], switch: str
) -> None:
    """What is chosen by hand and switched the other way is an error that names both, each with its origin."""
    with pytest.raises(
        ConfigError, match=r'providers = .*"a".*\(a file\), .*custom_ops = .*a"\] \(a variable\)'
    ):
        resolve(
            [
                ("a file", OpgraftConfig(providers=choice)),
                (
                    "a variable",
                    OpgraftConfig(compilation_config=CompilationConfig(custom_ops=[switch])),
                ),
            ]
        )


def test_choices_that_agree_with_switches() -> None:
    """``native`` goes with ``-op``, a plugin with ``+op``, opgraft's own class with either; a level gives way."""
    providers = {"a": "native", "b": "acme", "linear": "native"}
    switches = CompilationConfig(custom_ops=["-a,+b"])
    assert resolve(
        [("x", OpgraftConfig(providers=providers, compilation_config=switches))]
    ).config.providers
    level = CompilationConfig(level=2)
    settings = resolve([("x", OpgraftConfig(providers=providers, compilation_config=level))])
    assert settings.enabled("linear") == (False, "providers asks for 'native' (x)")
    assert resolve([("x", OpgraftConfig(compilation_config=level))]).enabled("linear")[0]


@pytest.mark.parametrize(("choice", "switch"), [("native", "+RMSNorm"), ("acme", "none,-RMSNorm")])
def test_a_choice_and_a_switch_of_a_class(choice: str, switch: str) -> None:
    """The name of a class contradicts a choice as the name of the op does, in the spelling of the user."""
    config = OpgraftConfig(
        providers={"rms_norm": choice},
        compilation_config=CompilationConfig(custom_ops=[switch]),
    )
    with (
        set_config(config, origin="a test"),
        pytest.raises(ConfigError, match=r'custom_ops = .*"[+-]RMSNorm"\] \(a test\)'),
    ):
        host_state().settings()
    with pytest.raises(ConfigError, match=r'custom_ops = .*"[+-]RMSNorm"\] \(the opgraft_config'):
        engine_config(None, config, {})


@pytest.mark.parametrize("text", ["+rms_norm,-RMSNorm", "-RMSNorm,+rms_norm"])
def test_two_spellings_of_an_op_that_contradict_each_other(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has both spellings, and the variable."""
    monkeypatch.setenv("OPGRAFT_CUSTOM_OPS", text)
    opgraft.reset()
    first, second = map(re.escape, text.split(","))
    words = (
        rf"both '{first}' and '{second}' \(OPGRAFT_CUSTOM_OPS\), and both name the op 'rms_norm'"
    )
    with pytest.raises(ConfigError, match=words):
        host_state().settings()


@pytest.mark.parametrize(("word", "name"), [("all", "ll"), ("none", "one"), ("auto", "uto")])
def test_words_for_all_ops_are_no_names(word: str, name: str) -> None:
    """Only ``+op`` and ``-op`` name a class: a class ``uto`` does not change ``auto``."""
    forward = {"forward_native": lambda self, x: x}
    CustomOp.register("acme_word")(type(name, (CustomOp,), forward))
    with set_config(custom_ops(word, f"+{name}")):
        found = host_state().settings().config.compilation_config.custom_ops
    assert found == (word, "+acme_word")


def test_a_class_name_of_several_ops_names_none() -> None:
    """``-RMSNorm`` is an error with the names of both ops, once a plugin has an op class of that name."""
    with set_config(custom_ops("-RMSNorm")):
        assert not RMSNorm.enabled()
    forward = {"forward_native": lambda self, x: x}
    CustomOp.register("acme_norm")(type("RMSNorm", (CustomOp,), forward))
    with (
        set_config(custom_ops("-RMSNorm")),
        pytest.raises(ConfigError, match=r"'RMSNorm' .*: name one of 'acme_norm', 'rms_norm'"),
    ):
        RMSNorm(4)


def test_settings_are_shared_until_something_changes() -> None:
    """Who only reads them has one object in each scope; whoever asks for settings of its own has its own."""
    opgraft.load_plugins()
    state = host_state()
    shared = state.shared_settings()
    assert state.shared_settings() is shared
    assert state.settings() is not shared
    assert state.settings() == shared
    with set_config(OpgraftConfig(check_values=True)):
        assert state.shared_settings().config.check_values
        assert state.shared_settings() is state.shared_settings()
    assert state.shared_settings() is shared
    state.invalidate()
    assert state.shared_settings() is not shared
    assert state.shared_settings() == shared
