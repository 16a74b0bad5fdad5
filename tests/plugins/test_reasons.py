"""Reasons for the class that an op is constructed with, and the settings that would change it, in forms to paste."""

from __future__ import annotations

import re
import shlex

import opgraft
import pytest
from opgraft import OpgraftConfig, set_config
from opgraft.config import OpgraftConfig as Config
from opgraft.config import parse_text
from opgraft.errors import ConflictError, PlatformConflictError, RegistrationError
from opgraft.ops import Llama3RotaryEmbedding, RMSNorm, RotaryEmbedding
from opgraft.registry.decision import Decision
from opgraft.testing import inventory

PLUGIN = """
import opgraft
from opgraft.ops import {base}
platforms = "any"
class {name}({base}):
    def forward_oot(self, *arguments, **named):
        return {base}.forward_native(self, *arguments, **named)
@opgraft.hookimpl
def opgraft_register_ops():
    {base}.register_oot({name})
"""


def plugin(site, name: str, base: str = "RMSNorm") -> None:
    site.plugin(name, PLUGIN.format(base=base, name=name.title()))


def part(decision: Decision, subject: str) -> Decision:
    """The part of a decision about ``subject``."""
    return next(part for part in decision.parts if part.subject.startswith(subject))


def test_a_class_that_the_user_keeps(site) -> None:
    """Where 'providers' asks for opgraft the reason is that setting and where it stands, not a want of plugins."""
    plugin(site, "acme")
    with set_config(OpgraftConfig(providers={"rms_norm": "opgraft"}), origin="the command line"):
        decision = RMSNorm(4).decision
    kept = "kept, as providers asks for 'opgraft' for 'rms_norm' (the command line)"
    assert decision.reason.endswith(f"class {kept}")
    choice = part(decision, "class of")
    assert choice.candidates[-1].reason == choice.reason == kept
    assert "no active replacement applies" not in str(decision)
    assert (
        choice.setting
        == "providers is set by the command line, which outranks OPGRAFT_PROVIDERS: change it there"
    )


def test_a_class_that_the_provider_does_not_serve(site) -> None:
    """A provider that was asked for and serves another class of the op is why this one has none."""
    plugin(site, "acme", "RotaryEmbedding")
    plugin(site, "brix", "Llama3RotaryEmbedding")
    with set_config(OpgraftConfig(providers={"rotary_embedding": "acme"})):
        decision = opgraft.binding.specialisation.bind(Llama3RotaryEmbedding).decision
    assert (
        "for 'rotary_embedding' (set_config), which serves other classes of that op"
        in decision.reason
    )


def test_a_conflict_names_settings_to_paste(site) -> None:
    """What the error says for the environment, the command line and Python settles it when it is pasted."""
    plugin(site, "acme")
    plugin(site, "brix")
    with pytest.raises(ConflictError) as caught:
        RMSNorm(4)
    text = str(caught.value)
    variable = re.search(r"OPGRAFT_PROVIDERS=(\S+),", text)
    option = re.search(r"(--providers \S+) ", text)
    python = re.search(r"OpgraftConfig\(.*?\)", text)
    assert variable
    assert option
    assert python
    _, value = shlex.split(option[1])
    mapping = parse_text("providers", variable[1])
    assert (
        mapping
        == parse_text("providers", value)
        == Config(providers={"rms_norm": "acme"}).providers
    )
    assert python[0] == "OpgraftConfig(providers={'rms_norm': 'acme'})"
    assert "likewise brix" in text
    assert "OPGRAFT_PLUGINS_DISABLE=acme" in text
    with set_config(OpgraftConfig(providers=mapping)):
        assert RMSNorm(4).op_class.__name__ == "Acme"


def test_a_conflict_of_platforms_names_settings_to_paste(site) -> None:
    """The variable, the option and the field, with a name that is there."""
    for name in ("acme", "brix"):
        site.platform(name, probe="return Evidence(True, '1 device')")
    with pytest.raises(PlatformConflictError) as caught:
        opgraft.current_platform()
    words = (
        "OPGRAFT_PLATFORM=acme, --platform acme or OpgraftConfig(platform='acme'), likewise brix"
    )
    assert words in str(caught.value)


def test_no_setting_is_named_where_none_would_change_anything(site) -> None:
    """Without a plugin and with one kernel only there is nothing to change; with a plugin there is."""
    decision = RMSNorm(4).decision
    assert [
        decision.setting,
        part(decision, "class").setting,
        part(decision, "plugins").setting,
    ] == ["", "", ""]
    opgraft.reset()
    plugin(site, "acme")
    decision = RMSNorm(4).decision
    assert "custom_ops" in decision.setting
    assert "OPGRAFT_PLUGINS" in part(decision, "plugins").setting
    setting = part(decision, "class").setting
    assert setting.startswith("OPGRAFT_PROVIDERS=rms_norm=opgraft,")
    assert setting.endswith("or OPGRAFT_PLUGINS_DISABLE=acme")


@pytest.mark.parametrize(
    ("cls", "subject"), [(RotaryEmbedding, "RotaryEmbedding, a variant of op rotary_embedding")]
)
def test_a_variant_is_decided_about_under_its_own_name(cls: type, subject: str) -> None:
    """The first words are the class that is constructed, then the op whose name switches it."""
    assert str(opgraft.binding.specialisation.bind(cls).decision).startswith(f"{subject}: ")


BROKEN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
def check():
    raise OSError('no driver')
class Acme(RMSNorm):
    @opgraft.needs(check)
    def forward_oot(self, x, residual=None):
        return x
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Acme)
"""


@pytest.mark.parametrize(
    ("body", "line", "said"),
    [
        ("raise OSError('no driver')", "raise OSError", "OSError: no driver"),
        (
            "import no_such_driver",
            "import no_such_driver",
            "ModuleNotFoundError: No module named 'no_such_driver'",
        ),
        (
            "return 3",
            "def check",
            "TypeError: a value of type int, expected a reason as str, or None",
        ),
    ],
)
def test_a_check_of_needs_that_raises_is_logged_once(
    site, caplog, body: str, line: str, said: str
) -> None:
    """One warning names the kernel, its place, what was raised and where; the decision has the same."""
    site.plugin("acme", BROKEN.replace("raise OSError('no driver')", body))
    with caplog.at_level("WARNING", logger="opgraft"):
        first, _ = RMSNorm(4), RMSNorm(4)
        with set_config(OpgraftConfig()):
            RMSNorm(4)
    file = site.folder / "acme.py"
    number = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        message
        == f"Acme.forward_oot at {file}:9 is not used: its needs() check raised {said} at {file}:{number}"
    )
    assert f"{said} at {file}:{number}" in str(first.decision)


def test_a_check_of_needs_that_is_no_function() -> None:
    """It is refused where it is written: a call would fail far away."""
    with pytest.raises(RegistrationError, match="has the check 'acme_sdk': use a function"):
        opgraft.needs("acme_sdk")  # type: ignore[arg-type]


def test_the_inventory_tells_which_kernel_was_passed_over(site) -> None:
    """The row of an op has the reason why the kernel that should come first does not; other rows have none."""
    site.plugin("acme", BROKEN)
    reason = inventory.kernel_here(RMSNorm).reason
    assert reason is not None
    assert reason.startswith(
        "Acme.forward_oot is not used: its needs() check raised OSError: no driver at "
    )
    assert inventory.kernel_here(RotaryEmbedding).reason is None
    with set_config(
        OpgraftConfig(compilation_config=opgraft.CompilationConfig(custom_ops=["none"]))
    ):
        assert inventory.kernel_here(RMSNorm).reason is None
