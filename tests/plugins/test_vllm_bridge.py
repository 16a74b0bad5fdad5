"""Plugins that were written for vLLM, run as they are through the bridge."""

from __future__ import annotations

import importlib
import re
import runpy
from typing import Any

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, current_platform, load_plugins, ops, set_config
from opgraft.cli.offers import plugins_of_vllm
from opgraft.errors import PluginError
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import selected_platform
from opgraft.registry.state import host_state
from opgraft.testing.conformance import Conformance, alone
from plugins.vllm_plugin import BRIDGE, imports_forgotten, install_acme, install_bridge


@pytest.fixture
def bridged(site: Any) -> Any:
    """A site with the bridge, whose modules of vLLM are forgotten afterwards."""
    install_bridge(site)
    with imports_forgotten():
        yield site


def test_a_plugin_runs_as_it_is(bridged: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its platform is chosen, its settings hold, its ops replace ours and compute the same."""
    install_acme(bridged)
    assert not list(plugins_of_vllm())
    load_plugins()
    platform = current_platform()
    assert (platform.name, platform.capability().name, platform.dispatch_chain) == (
        "acme",
        "Acme A1",
        ("native",),
    )
    assert platform.memory().free == (1 << 30) - (1 << 20)
    settings = host_state().settings()
    assert settings.config.cache.block_size == 128
    assert settings.origins["cache.block_size"] == "platform acme"
    assert (
        "sets parallel_config.worker_cls to 'acme_vllm.worker.AcmeWorker', to no effect"
        in caplog.text
    )
    assert (
        "sets parallel_config.disable_custom_all_reduce to True, to no effect: the collectives are"
        in caplog.text
    )
    x = torch.randn(7, 32)
    silu, norm = ops.SiluAndMul(), ops.RMSNorm(32)
    assert (silu.decision.chosen, norm.decision.chosen) == (
        "AcmeSiluAndMul.forward_oot",
        "AcmeRMSNorm.forward_oot",
    )
    torch.testing.assert_close(silu(x), silu.forward_native(x))
    torch.testing.assert_close(norm(x, x), norm.forward_native(x, x))
    (candidate,) = [each for each in selected_platform().decision.candidates if each.accepted]
    assert candidate.evidence is not None
    (fact,) = candidate.evidence.facts
    assert fact.value == "opgraft does not call get_attn_backend_cls"
    assert re.fullmatch(r".*/acme_vllm/platform\.py:\d+", fact.source)


BY_VARIABLES = """
import os

SEEN_AT_IMPORT = os.environ.get("ACME_DEVICES")


def register():
    found = SEEN_AT_IMPORT and os.getenv("ACME_DEVICES") and "ACME_DEVICES" in os.environ
    return "acme_vllm.platform.AcmePlatform" if found else None


def register_ops():
    pass
"""


@pytest.mark.parametrize("found", [True, False])
def test_a_platform_function_reads_the_variables_of_the_machine(
    bridged: Any, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    """A function that reads a variable finds its device. Without a device the reason tells what it was told."""
    if found:
        monkeypatch.setenv("ACME_DEVICES", "0,1")
    install_acme(bridged, __init__=BY_VARIABLES)
    candidates = {each.name: each for each in selected_platform().decision.candidates}
    assert current_platform().name == ("acme" if found else "cpu")
    assert ("acme_vllm:register finds no device; it is told" in candidates["acme"].reason) != found


def test_earlier_paths_of_attention(bridged: Any) -> None:
    """The classes are found at the paths that earlier versions of vLLM had."""
    imports = (
        "from vllm.attention import Attention\n"
        "from vllm.attention.layer import MLAAttention\n"
        "from vllm.attention.layers.mm_encoder_attention import MMEncoderAttention\n"
    )
    check = "FOUND = Attention, MLAAttention, MMEncoderAttention\n"
    install_acme(
        bridged,
        {"vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"]},
        ops=imports + check,
    )
    load_plugins()
    found = importlib.import_module("acme_vllm.ops").FOUND
    assert found == (ops.Attention, ops.MLAAttention, ops.MMEncoderAttention)


def test_conformance_judges_it(bridged: Any) -> None:
    """The kit asks of its platform and its ops what it asks of any plugin's, and it passes."""
    install_acme(bridged)
    with alone("acme"):
        judged = Conformance("acme", brief=True)
        assert judged.refused == ""
        asked = {(case.op, case.check) for case in judged.cases}
        assert {
            ("(platform)", "memory"),
            ("rms_norm", "values"),
            ("silu_and_mul", "compilation"),
        } <= asked
        chosen = [
            case
            for case in judged.cases
            if case.check in ("loading", "values", "memory", "reachability")
        ]
        assert {
            (str(case), outcome.status, outcome.reason)
            for case in chosen
            if (outcome := judged.judge(case))
        } == {(str(case), "passed", "") for case in chosen}


LACKING = """
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.worker.gpu_worker import Worker
import vllm.envs as envs
from vllm.platforms import current_platform


class AcmeNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        if current_platform.is_acme() or current_platform.is_cpu():
            return envs.VLLM_ACME
        return self.forward_native(x, residual)
"""


@pytest.mark.parametrize("platform", [{}, {"vllm.platform_plugins": ["acme = acme_vllm:register"]}])
def test_what_has_no_counterpart_is_one_error(
    bridged: Any, caplog: pytest.LogCaptureFixture, platform: dict[str, list[str]]
) -> None:
    """It lists each name with file and line before anything of it is imported, and what does without goes on."""
    install_acme(
        bridged,
        {"vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"], **platform},
        ops=LACKING,
    )
    load_plugins()
    assert current_platform().name == ("acme" if platform else "cpu")
    (told,) = [record.message for record in caplog.records if "no counterpart of" in record.message]
    places = dict(re.findall(r"(vllm[\w.]+) \(\S*/(acme_vllm/\w+\.py:\d+)", told))
    assert places == {
        "vllm.v1.worker.gpu_worker.Worker": "acme_vllm/ops.py:3",
        "vllm.envs.VLLM_ACME": "acme_vllm/ops.py:11",
        "vllm.platforms.current_platform.is_acme": "acme_vllm/ops.py:10",
    }
    assert not [record for record in caplog.records if "'acme' needs" in record.message]
    assert ops.RMSNorm(8).decision.chosen.startswith("RMSNorm.")


@pytest.mark.parametrize("plugins", [("acme",), ("acme-vllm",)])
def test_who_names_a_plugin_has_its_bridge(bridged: Any, plugins: tuple[str, ...]) -> None:
    """The allow list names plugins; their bridges come with them."""
    install_acme(bridged)
    with set_config(OpgraftConfig(plugins=plugins)):
        assert current_platform().name == "acme"


@pytest.mark.parametrize("denied", ["acme-vllm", "opgraft-vllm-bridge"])
def test_the_deny_list_holds(bridged: Any, denied: str) -> None:
    """Who is on it is not run, and neither is what needs it."""
    install_acme(bridged)
    with set_config(OpgraftConfig(plugins_disable=(denied,))):
        load_plugins()
        assert current_platform().name == "cpu"
        assert (
            host_state().plugins["acme_ops"].reason.startswith("on the deny list plugins_disable")
        )


def test_names_without_a_counterpart_are_not_imported(bridged: Any) -> None:
    """A module or a name that the bridge has not fails as in an import; where vLLM is installed nothing is answered."""
    finder = importlib.import_module("opgraft_vllm_bridge.finder").VllmFinder("acme")
    finder.install()
    layers = importlib.import_module("vllm.model_executor.layers.layernorm")
    assert layers.RMSNorm is ops.RMSNorm
    with pytest.raises(ModuleNotFoundError, match=re.escape("No module named 'vllm.v1.worker'")):
        importlib.import_module("vllm.v1.worker")
    with pytest.raises(AttributeError, match="LayerNorm"):
        _ = layers.LayerNorm
    (bridged.folder / "vllm").mkdir()
    (bridged.folder / "vllm/__init__.py").write_text("")
    assert finder.find_spec("vllm.logger", None) is None


def test_where_vllm_is_installed_the_plugin_is_left_to_it(bridged: Any) -> None:
    """Neither platform nor plugin is used, and both say why."""
    install_acme(bridged)
    bridged.install(
        "vllm",
        {"vllm/__init__.py": ""},
        {"vllm.general_plugins": ["lora = vllm"]},
        version="0.33.0",
    )
    load_plugins()
    assert not [offer for offer in discover().offers if offer.name == "lora"]
    (candidate,) = [each for each in selected_platform().decision.candidates if each.name == "acme"]
    assert "vLLM itself is installed" in candidate.reason
    assert current_platform().name == "cpu"


GENERAL = {"vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"]}


def test_a_plugin_without_a_platform_applies_on_any(bridged: Any) -> None:
    """It asks vLLM's questions of opgraft's platform, and a file of it that cannot be parsed is named by its line."""
    source = (
        "from vllm.platforms import current_platform as now\nfrom vllm.model_executor.layers.activation import GELU\n"
        "assert now.is_cpu() and not now.is_out_of_tree() and now.device_type == 'cpu'\n"
        "assert now.get_device_total_memory() > 0\n@GELU.register_oot\nclass Acme(GELU):\n"
        "    def forward_oot(self, input):\n        return self.forward_native(input)\n"
    )
    install_acme(bridged, GENERAL, ops=source)
    assert ops.GELU().decision.chosen == "Acme.forward_oot"


HOST = """
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class HostPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.scheduler_config.async_scheduling = True
        vllm_config.model_config.dtype = torch.bfloat16

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: AttentionBackendEnum, *args):
        return ""
"""


def test_a_platform_that_is_the_host(bridged: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In a namespace package too: it is told by its instruction sets, and what it sets to no effect is said."""
    entry = 'def register():\n    return "acme_space.host.platform.HostPlatform"\n'
    files = {"acme_space/host/entry.py": entry, "acme_space/host/platform.py": HOST}
    bridged.install(
        "acme-host",
        files,
        {"vllm.platform_plugins": ["host = acme_space.host.entry:register"]},
        requires=(),
    )
    platform = current_platform()
    assert (platform.name, platform.dispatch_chain) == ("host", ("cpu", "native"))
    own = importlib.import_module("opgraft.platforms.cpu.platform").CpuPlatform()
    assert platform.capability().features == own.capability().features
    assert platform.memory().total == own.memory().total
    assert host_state().settings().config.model.dtype == "bfloat16"
    assert "async_scheduling to True, to no effect: opgraft has no such setting" in caplog.text
    platform.synchronize()
    platform.manual_seed(3)
    assert platform.device_count() == 1


def test_a_file_that_is_no_python(bridged: Any) -> None:
    """It is named by its line."""
    install_acme(bridged, GENERAL, ops="import vllm\n\ndef broken(:\n")
    with (
        set_config(OpgraftConfig(plugins=("acme_ops",))),
        pytest.raises(PluginError, match=r"acme_vllm/ops\.py:3"),
    ):
        opgraft.load_plugins()


def test_the_table_of_names_is_that_of_the_code(bridged: Any) -> None:
    """The README lists what the bridge answers; 'make vllm-bridge-table' writes it."""
    table = runpy.run_path(str(BRIDGE.parents[1] / "tools/vllm_bridge_table.py"))
    text = (BRIDGE / "README.md").read_text(encoding="utf-8")
    assert table["page"](text) == text
    assert text.count("| `vllm.") > 40
