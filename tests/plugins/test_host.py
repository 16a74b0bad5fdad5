"""Loading plugins: states, transactions, isolation, hooks."""

from __future__ import annotations

import logging
import threading
import time

import opgraft
import pytest
import torch
from opgraft import CustomOp, OpgraftConfig, load_plugins, set_config
from opgraft.errors import ConfigError, ConflictError, PluginError
from opgraft.ops import RMSNorm
from opgraft.registry import state
from opgraft.registry.state import PluginStatus, host_state

pytestmark = pytest.mark.usefixtures("warm_children")

AVAILABLE = "return Evidence(True, 'a device was found')"

GOOD = """
import opgraft
from opgraft.ops import RMSNorm

platforms = "any"

class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * 0

@opgraft.hookimpl
def opgraft_register_ops(platform):
    RMSNorm.register_oot(AcmeRMSNorm)
"""


def status(name: str) -> tuple[str, str]:
    """Status and reason of a plugin."""
    record = host_state().plugins[name]
    return record.status.value, record.reason


def test_a_plugin_is_loaded_by_the_first_op_and_only_once(site) -> None:
    """Loading is lazy and happens once; explicit loading later changes nothing."""
    site.plugin("acme", GOOD.replace("platforms =", "calls = []\ncalls.append(1)\nplatforms ="))
    assert host_state().plugins == {}
    assert RMSNorm(4)(torch.ones(4)).sum() == 0
    load_plugins()
    assert status("acme") == ("activated", "applies on any")
    assert CustomOp.op_registry_oot["RMSNorm"].__name__ == "AcmeRMSNorm"


def test_the_plugins_distribution_is_the_provider(site) -> None:
    """The decision of a replaced op names the distribution and version that replaced it."""
    site.plugin("acme", GOOD, version="3.2")
    assert "provided by acme 3.2, plugin acme" in str(RMSNorm(4).decision)


def test_an_op_tells_what_became_of_every_plugin(site) -> None:
    """Why a plugin's kernel did not run can be the plugin's own fate: it is part of each op's decision."""
    site.plugin("acme", GOOD)
    site.plugin("brix", "raise OSError('no driver')")
    text = str(RMSNorm(4).decision)
    assert "plugins: acme (1 of 2 installed plugins active)" in text
    assert "- brix [brix 1.0] at brix: failed: while it was loaded: OSError: no driver" in text


def test_import_time_decorators_count_and_survive_reset(site) -> None:
    """Declarations made when a module is imported are re-applied when its plugin is activated again."""
    body = (
        GOOD.replace(
            "@opgraft.hookimpl", "RMSNorm.register_oot(AcmeRMSNorm)\ndef unused(): ...\n'''"
        ).rstrip()
        + "\n'''\n"
    )
    site.plugin("acme", body)
    for _ in range(2):
        assert RMSNorm(4).op_class.__name__ == "AcmeRMSNorm"
        opgraft.reset()


def test_a_module_imported_before_its_plugin_is_loaded(site) -> None:
    """Whoever imports a plugin's module first, its replacements belong to the plugin and follow its state."""
    site.plugin("acme", GOOD + "\nopgraft_register_ops(None)\n")
    import acme

    assert host_state().active == []
    with set_config(OpgraftConfig(plugins_disable=["acme"])):
        assert RMSNorm(4).op_class is RMSNorm
    opgraft.reset()
    assert RMSNorm(4).op_class is acme.AcmeRMSNorm


FAILING = {
    "raises at import": ("raise RuntimeError('no driver')", "no driver"),
    "exits at import": ("raise SystemExit(1)", "SystemExit"),
    "syntax error": ("def broken(:", "SyntaxError"),
    "missing dependency": ("import acme_driver_that_is_missing", "acme_driver_that_is_missing"),
    "raises in its hook after registering two ops": (
        GOOD.replace(
            "AcmeRMSNorm)\n",
            "AcmeRMSNorm)\n    RMSNorm.register_oot(type('B', (AcmeRMSNorm,), {}))\n    1 / 0\n",
        ),
        "ZeroDivisionError",
    ),
    "returns the wrong type": (
        GOOD + "    return 3\n",
        "opgraft_register_ops returned a int, expected None",
    ),
    "implements no hook": ("platforms = 'any'", "implements no hook and registers no op"),
    "misspells a hook": (
        GOOD.replace("def opgraft_register_ops", "def opgraft_register_op"),
        "opgraft_register_op",
    ),
    "asks for an unknown argument": (GOOD.replace("(platform)", "(device)"), "device"),
    "states no platforms": (
        GOOD.replace('platforms = "any"', ""),
        "must state where its kernels apply",
    ),
    "states platforms wrongly": (GOOD.replace('"any"', "3"), "must state where its kernels apply"),
    "replaces with a stranger": (
        GOOD.replace("class AcmeRMSNorm(RMSNorm)", "class AcmeRMSNorm(opgraft.CustomOp)"),
        "not a subclass",
    ),
    "narrows the signature": (GOOD.replace("x, residual=None", "x"), "narrower"),
    "gives a wrong config": (
        GOOD + "\n@opgraft.hookimpl\ndef opgraft_config():\n    return {'strict': True}\n",
        "opgraft_config returned a dict",
    ),
    "gives a wrong adapter": (
        GOOD + "\n@opgraft.hookimpl\ndef opgraft_graft_adapters():\n    return [1]\n",
        "returned a int, expected an opgraft.Adapter or an opgraft.CallAdapter",
    ),
}


FAILING |= {
    "sets what is already decided": (
        GOOD
        + "\n@opgraft.hookimpl\ndef opgraft_config():\n    return opgraft.OpgraftConfig(platform='tpu')\n",
        "it sets platform, which was decided before",
    ),
    "names an unknown op in its defaults": (
        GOOD
        + "\n@opgraft.hookimpl\ndef opgraft_config():\n    ops = opgraft.CompilationConfig(custom_ops=['-rms_nrm'])\n"
        "    return opgraft.OpgraftConfig(compilation_config=ops)\n",
        "did you mean 'rms_norm'",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failing_plugin_is_taken_back_recorded_and_reported_once(site, caplog, kind: str) -> None:
    """Whatever a plugin does wrong, nothing of it stays active, the rest goes on, and one warning names it."""
    source, reason = FAILING[kind]
    site.plugin("acme", source)
    site.plugin("brix", GOOD.replace("AcmeRMSNorm", "BrixRMSNorm"))
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        load_plugins()
        load_plugins()
    assert RMSNorm(4).op_class.__name__ == "BrixRMSNorm"
    assert [replacement.plugin for replacement in host_state().active] == ["brix"]
    assert host_state().adjustments == []
    record = host_state().plugins["acme"]
    assert record.status is PluginStatus.FAILED
    assert reason in record.reason
    assert "Traceback" in (record.traceback or "")
    assert [r.message.count("OPGRAFT_PLUGINS_DISABLE=acme") for r in caplog.records] == [1]


@pytest.mark.parametrize("kind", ["raises at import", "exits at import"])
@pytest.mark.parametrize(
    "setting", [OpgraftConfig(strict=True), OpgraftConfig(plugins=["acme", "brix"])]
)
def test_strict_mode_and_a_plugin_asked_for_by_name_raise(
    site, kind: str, setting: OpgraftConfig
) -> None:
    """The error chains the cause; what the pass had activated is taken back, so a retry starts clean."""
    site.plugin("brix", GOOD.replace("AcmeRMSNorm", "BrixRMSNorm"))
    site.plugin("acme", FAILING[kind][0])
    for _ in range(2):
        with (
            set_config(setting),
            pytest.raises(PluginError, match=r"plugin 'acme' of acme 1\.0 failed") as caught,
        ):
            load_plugins()
        assert caught.value.__cause__ is not None
        assert caught.value.exit_code == 4
        assert host_state().active == []


def test_an_interrupt_is_not_swallowed(site) -> None:
    """Ctrl-C while a plugin loads ends the load, and leaves nothing behind."""
    site.plugin("acme", GOOD + "    import signal; signal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()
    assert host_state().active == []
    assert not host_state().loading.done


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (OpgraftConfig(plugins=[]), "not on the allow list"),
        (OpgraftConfig(plugins_disable=["acme"]), "on the deny list"),
        (OpgraftConfig(plugins_disable=["Acme"]), "on the deny list"),
    ],
)
def test_allow_and_deny_lists(site, setting: OpgraftConfig, reason: str) -> None:
    """A plugin that the settings exclude is never imported, and the record says which list did it."""
    site.plugin("acme", "raise RuntimeError")
    with set_config(setting):
        load_plugins()
    assert status("acme")[0] == "rejected"
    assert reason in status("acme")[1]


def test_an_allow_list_that_names_what_is_not_installed(site) -> None:
    """A name in the allow list must be installed; near matches are shown."""
    site.plugin("acme", GOOD)
    with (
        set_config(OpgraftConfig(plugins=["akme"])),
        pytest.raises(ConfigError, match=r"names 'akme' \(set_config\).*did you mean 'acme'"),
    ):
        load_plugins()


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("opgraft>=99", "requires 'opgraft>=99'"),
        ("opgraft (>=99)", "requires 'opgraft (>=99)'"),
        ("opgraft<0.1", "requires 'opgraft<0.1'"),
        ("opgraft ==", "malformed"),
    ],
)
def test_a_plugin_that_needs_another_opgraft_is_rejected(
    site, requirement: str, reason: str
) -> None:
    """Requires-Dist is checked by the host, because pip can be bypassed."""
    site.plugin("acme", "raise RuntimeError", requires=["torch", requirement])
    load_plugins()
    assert status("acme")[0] == "rejected"
    assert reason in status("acme")[1]


def test_requirements_behind_an_extra_do_not_count(site) -> None:
    """A requirement on opgraft that only an extra has, or that is met, admits the plugin."""
    site.plugin(
        "acme",
        GOOD,
        requires=["opgraft>=0.1,<1", "opgraft>=99; extra == 'future'", "opgraft-tools>=9"],
    )
    load_plugins()
    assert status("acme")[0] == "activated"


class TestScope:
    """Where a plugin's registrations apply."""

    def test_a_plugin_with_a_platform_applies_there_and_is_not_imported_elsewhere(
        self, site
    ) -> None:
        """A vendor's kernels never run, and its code is never imported, without the vendor's device."""
        site.platform(
            "acme", probe="return Evidence(False, 'no device')", plugin="raise RuntimeError"
        )
        load_plugins()
        assert status("acme") == ("rejected", "applies on acme only, this process runs on cpu")

    def test_on_its_own_platform_it_is_activated(self, site) -> None:
        """With the device present the plugin's kernels are used, without stating platforms."""
        site.platform("acme", probe=AVAILABLE, plugin=GOOD.replace('platforms = "any"', ""))
        assert RMSNorm(4).op_class.__name__ == "AcmeRMSNorm"

    @pytest.mark.parametrize(
        ("stated", "expected"), [('("cpu",)', "AcmeRMSNorm"), ('("other",)', "RMSNorm")]
    )
    def test_a_plugin_without_a_platform_states_its_scope(
        self, site, stated: str, expected: str
    ) -> None:
        """platforms = ("cpu",) lets a plugin bring kernels for a built-in platform only."""
        site.plugin("acme", GOOD.replace('"any"', stated))
        assert RMSNorm(4).op_class.__name__ == expected


def test_a_veto_keeps_the_plugin_out_with_its_reason(site) -> None:
    """A plugin may refuse to be activated; what it had registered is taken back."""
    veto = "\n@opgraft.hookimpl\ndef opgraft_veto(platform):\n    return f'driver too old on {platform.name}'\n"
    site.plugin("acme", GOOD + "RMSNorm.register_oot(AcmeRMSNorm)\n" + veto)
    assert RMSNorm(4).op_class is RMSNorm
    assert status("acme") == ("vetoed", "driver too old on cpu")


def test_a_plugin_adjusts_defaults_below_the_users_settings(site, monkeypatch) -> None:
    """opgraft_config is a layer of its own: it changes defaults, and the environment stands above it."""
    hook = (
        "\n@opgraft.hookimpl\ndef opgraft_config():\n"
        "    return opgraft.OpgraftConfig(compilation_config=opgraft.CompilationConfig(custom_ops=['none']))\n"
    )
    site.plugin("acme", GOOD + hook)
    assert "'none' in custom_ops (plugin acme)" in str(RMSNorm(4).decision)
    monkeypatch.setenv("OPGRAFT_CUSTOM_OPS", "all")
    opgraft.reset()
    assert RMSNorm(4).decision.chosen == "AcmeRMSNorm.forward_oot"


def test_hooks_run_in_pluggys_order(site) -> None:
    """tryfirst and trylast order plugins; no names like 01.ops are needed."""
    order = (
        "import opgraft\nplatforms = 'any'\n@opgraft.hookimpl({})\n"
        "def opgraft_register_ops():\n    opgraft.order.append({!r})\n"
    )
    opgraft.order = []
    try:
        for name, options in {"aaa": "trylast=True", "bbb": "", "ccc": "tryfirst=True"}.items():
            site.plugin(name, order.format(options, name))
        load_plugins()
        assert opgraft.order == ["ccc", "bbb", "aaa"]
    finally:
        del opgraft.order


def test_two_plugins_for_one_op_at_equal_priority(site) -> None:
    """Constructing the op names both distributions and the setting; choosing a provider settles it."""
    site.plugin("acme", GOOD)
    site.plugin("brix", GOOD.replace("AcmeRMSNorm", "BrixRMSNorm"))
    with pytest.raises(ConflictError, match=r"acme 1.0, plugin acme.* and .*brix 1.0.*providers="):
        RMSNorm(4)
    with set_config(OpgraftConfig(providers={"rms_norm": "brix"})):
        assert RMSNorm(4).op_class.__name__ == "BrixRMSNorm"


def test_a_plugin_may_construct_ops_while_it_loads(site) -> None:
    """Loading is re-entrant: an op made inside a hook does not deadlock or load again."""
    site.plugin("acme", GOOD + "    assert RMSNorm(4) is not None\n")
    load_plugins()
    assert status("acme")[0] == "activated"


def test_a_platform_change_after_reset_changes_the_plugins(site, tmp_path, monkeypatch) -> None:
    """reset starts over: with the device gone, the plugin's replacements are gone too."""
    present = tmp_path / "device"
    present.touch()
    found = f"import os; return Evidence(os.path.exists({str(present)!r}), 'looked')"
    site.platform("acme", probe=found, plugin=GOOD.replace('platforms = "any"', ""))
    assert RMSNorm(4).op_class.__name__ == "AcmeRMSNorm"
    present.unlink()
    opgraft.reset()
    assert RMSNorm(4).op_class is RMSNorm


def test_a_plugin_imported_by_one_thread_and_loaded_by_another(site) -> None:
    """One thread imports a plugin's module, which registers, while another loads it: neither waits for ever."""
    site.plugin(
        "acme", "import time\ntime.sleep(0.5)\n" + GOOD + "RMSNorm.register_oot(AcmeRMSNorm)\n"
    )
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (load_plugins, lambda: __import__("acme"))
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert RMSNorm(4).op_class.__name__ == "AcmeRMSNorm"


def test_a_hook_that_waits_for_a_thread_gets_an_error_instead_of_a_deadlock(
    site, monkeypatch
) -> None:
    """A thread that constructs ops while the hook which joins it runs gives up, and says what to do."""
    monkeypatch.setattr(state, "LOADING_PATIENCE", 0.5)
    body = (
        "    import threading\n    errors = []\n"
        "    def work():\n        try:\n            RMSNorm(4)\n        except Exception as error:\n"
        "            errors.append(error)\n"
        "    thread = threading.Thread(target=work)\n    thread.start()\n    thread.join()\n    raise errors[0]\n"
    )
    site.plugin("acme", GOOD + body)
    load_plugins()
    assert "plugins have been loading in another thread for 0.5 s" in status("acme")[1]


def test_two_plugins_of_one_distribution(site) -> None:
    """What a module declares belongs to the plugin whose entry point it lies under, whoever imports it first."""
    files = {
        "first.py": GOOD.replace("AcmeRMSNorm", "First"),
        "second.py": GOOD.replace("AcmeRMSNorm", "Second"),
    }
    site.install("pair", files, {"opgraft.plugins": ["aaa = first", "bbb = second"]})
    import second

    RMSNorm.register_oot(second.Second)
    with set_config(OpgraftConfig(plugins_disable=["aaa"])):
        assert RMSNorm(4).op_class is second.Second
    opgraft.reset()
    with set_config(OpgraftConfig(plugins_disable=["bbb"])):
        assert RMSNorm(4).op_class.__name__ == "First"


def test_ops_that_a_failing_plugin_registered_are_forgotten(site) -> None:
    """No setting names them, no table shows them, and another plugin may take the name."""
    op = (
        "\n@opgraft.CustomOp.register('acme_op')\nclass AcmeOp(opgraft.CustomOp):\n"
        "    def forward_native(self, x): return x\n"
    )
    site.plugin("acme", GOOD + "    1 / 0\n" + op)
    load_plugins()
    assert status("acme")[0] == "failed"
    assert "acme_op" not in CustomOp.op_registry


@pytest.mark.parametrize("setting", [OpgraftConfig(plugins=[]), OpgraftConfig(strict=True)])
def test_plugin_settings_after_loading_are_an_error(site, setting: OpgraftConfig) -> None:
    """A scope that asks for other plugins than those loaded is not ignored."""
    load_plugins()
    with set_config(setting), pytest.raises(PluginError, match="plugins were loaded with"):
        RMSNorm(4)


@pytest.mark.parametrize("requirement", ["opgraft>=99", "opgraft"])
def test_a_plugin_asked_for_that_cannot_be_used_is_an_error(site, requirement: str) -> None:
    """A plugin named in the allow list must be active: a version or a platform that does not fit is not skipped."""
    body = GOOD if requirement != "opgraft" else ""
    site.platform("dev", probe="return Evidence(False, 'no device')", plugin=GOOD)
    site.plugin("acme", body, requires=[requirement])
    name = "acme" if body else "dev"
    with (
        set_config(OpgraftConfig(plugins=[name])),
        pytest.raises(PluginError, match=f"asks for plugin '{name}'"),
    ):
        load_plugins()
