"""Plugins that were written for vLLM, run as they are through the bridge."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from click.testing import CliRunner
from opgraft import OpgraftConfig, current_platform, load_plugins, ops, set_config
from opgraft.cli.offers import plugins_of_vllm
from opgraft.errors import ConfigError, PluginError
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import selected_platform
from opgraft.registry.state import host_state
from opgraft.testing.conformance import Conformance, alone
from safetensors.torch import save_file
from support.vllm_plugin import BRIDGE, ENTRY, imports_forgotten, install_acme, install_bridge

pytestmark = pytest.mark.usefixtures("warm_children")

GENERAL = {"vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"]}


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
    assert "meta_path" not in caplog.text


OWN = """
from dataclasses import dataclass

from vllm.config import SchedulerConfig
from vllm.platforms.cpu import CpuPlatform


@dataclass
class Own(SchedulerConfig):
    rows: int = 3


class AcmePlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config):
        before = vllm_config.scheduler_config
        vllm_config.scheduler_config = Own(
            before.enable_chunked_prefill, 512, before.max_num_seqs, before.policy
        )
"""


def test_a_platform_replaces_a_section(bridged: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of a class of its own hold as others do, and a field that opgraft lacks is told."""
    install_acme(bridged, platform=OWN)
    assert current_platform().name == "acme"
    assert host_state().settings().config.scheduler.max_num_batched_tokens == 512
    assert "scheduler_config.rows to 3, to no effect: opgraft has no such setting" in caplog.text


LOGGING = """
import logging


def register():
    logging.getLogger("acme").warning("no device %d", "x")


def register_ops():
    pass
"""


def test_a_wrong_call_of_a_logger_fails_no_probe(bridged: Any) -> None:
    """Arguments that do not fit a message are reported by logging alone."""
    install_acme(bridged, __init__=LOGGING)
    candidates = {each.name: each for each in selected_platform().decision.candidates}
    assert "acme_vllm:register finds no device; it is told" in candidates["acme"].reason


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
    assert isinstance(ops.Attention(1, 8, 1.0), found[0])
    assert found[1:] == (ops.MLAAttention, ops.MMEncoderAttention)


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
from typing import TYPE_CHECKING

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.worker.gpu_worker import Worker, start
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.multimodal.inputs import PlaceholderRange
if TYPE_CHECKING:
    from vllm.nowhere import Nothing


class AcmeWorker(Worker):
    def load(self, model: Worker | None) -> "Nothing":
        return start(model)


@RMSNorm.register_oot
class AcmeNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        if USED:
            start(x)
        return self.forward_native(x, residual)


USED = False
"""


def test_a_missing_name_costs_nothing_until_it_is_used(bridged: Any) -> None:
    """It may be imported, named in annotations and derived from; a call names plugin, file and line."""
    install_acme(bridged, GENERAL, ops=LACKING)
    norm = ops.RMSNorm(8)
    assert norm.decision.chosen == "AcmeNorm.forward_oot"
    acme = importlib.import_module("acme_vllm.ops")
    with pytest.raises(
        PluginError,
        match=r"makes an instance of AcmeWorker, a class that derives from .*Worker at ",
    ) as told:
        acme.AcmeWorker()
    assert "test_vllm_bridge.py:" in (told.value.location or "")
    norm(torch.randn(2, 8))
    acme.USED = True
    words = (
        r"the vLLM plugin 'acme-vllm' calls vllm\.v1\.worker\.gpu_worker\.start at .*/acme_vllm/ops\.py:22 "
        r"\(imported at .*/acme_vllm/ops\.py:5\), which opgraft has no counterpart of: a worker is a replacement"
    )
    with pytest.raises(PluginError, match=words):
        norm(torch.randn(2, 8))


def test_a_missing_name_cannot_be_changed(bridged: Any) -> None:
    """No attribute of it can be set or deleted, in a derived class only those of its own, and in a module none."""
    install_acme(bridged, GENERAL, ops=LACKING)
    load_plugins()
    acme = importlib.import_module("acme_vllm.ops")
    worker = r"vllm\.v1\.worker\.gpu_worker\.Worker at "
    with pytest.raises(PluginError, match=f"sets 'load' of {worker}"):
        acme.Worker.load = print
    with pytest.raises(PluginError, match=f"deletes 'load' of {worker}"):
        del acme.Worker.load
    derived = f"sets 'start' of AcmeWorker, a class that derives from {worker}"
    with pytest.raises(PluginError, match=derived):
        acme.AcmeWorker.start = print
    acme.AcmeWorker.load = print
    assert vars(acme.AcmeWorker)["load"] is print
    with pytest.raises(AttributeError, match=r"sets vllm\.envs\.VLLM_NOWHERE at "):
        acme.envs.VLLM_NOWHERE = 1


GUARDED = """
try:
    if True:
        from a import (
            b,
            c,
        )
        def later():
            import d
except ImportError:
    import e
"""


def test_lines_whose_imports_may_fail(bridged: Any) -> None:
    """All lines of an import at any depth of a guarded block, but for those in functions."""
    guards = importlib.import_module("opgraft_vllm_bridge.guards")
    assert guards.guarded_lines(GUARDED) == {4, 5, 6, 7}


def test_a_module_is_judged_alone(bridged: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One that uses a missing name when it is imported is left out with its place; others register their ops."""
    broken = "from vllm.nowhere import register\nfrom vllm.model_executor.layers.activation import GELU\n\n"
    broken += "@register('x')\n@GELU.register_oot\nclass Other(GELU):\n    pass\n"
    install_acme(bridged, {"vllm.platform_plugins": ["acme = acme_vllm:register"]}, broken=broken)
    load_plugins()
    assert current_platform().name == "acme"
    assert ops.RMSNorm(8).decision.chosen == "AcmeRMSNorm.forward_oot"
    assert ops.GELU().decision.chosen.startswith("GELU.")
    (told,) = [record.message for record in caplog.records if "goes without" in record.message]
    assert re.search(
        r"plugin acme-vllm 2.0 goes without its module acme_vllm\.broken: .*"
        r"calls vllm\.nowhere\.register at .*/acme_vllm/broken\.py:4 ",
        told,
    )


def test_a_function_that_fails_loses_no_other_ops(
    bridged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If it uses a missing name half-way, the plugin's modules with ops are imported one by one."""
    entry = (
        "def register_ops():\n    from vllm.nowhere import patch\n    patch()\n"
        "    from acme_vllm import ops\n"
    )
    install_acme(bridged, GENERAL, __init__=entry)
    assert ops.RMSNorm(8).decision.chosen == "AcmeRMSNorm.forward_oot"
    assert re.search(
        r"acme-vllm 2\.0 goes without the rest of acme_vllm:register_ops: .*"
        r"calls vllm\.nowhere\.patch at .*/acme_vllm/__init__\.py:3 ",
        caplog.text,
    )


def test_a_platform_without_ops_says_so(bridged: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A device whose plugin registers no op runs opgraft's own kernels, and a warning says that."""
    points = {"vllm.platform_plugins": ["acme = acme_vllm:register"]}
    install_acme(bridged, points, ops="")
    load_plugins()
    assert "platform 'acme' of acme-vllm 2.0 registers no op" in caplog.text


NEEDS = """
import torch
from vllm.platforms.cpu import CpuPlatform


class AcmePlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config):
        dtype = vllm_config.model_config.dtype
        if dtype != torch.bfloat16:
            raise ValueError(f"computes in bfloat16 only, got {dtype}")
        vllm_config.compilation_config.custom_ops += ["none", "+RMSNorm"]
"""


@pytest.mark.parametrize(("dtype", "platform"), [("bfloat16", "acme"), ("float32", "cpu")])
def test_a_platform_is_told_the_settings(
    bridged: Any, caplog: pytest.LogCaptureFixture, dtype: str, platform: str
) -> None:
    """It sees the user's dtype, may refuse it, and may enable ops by the names of their classes."""
    install_acme(bridged, platform=NEEDS)
    config = OpgraftConfig(model=opgraft.config.ModelConfig(dtype=dtype))
    with set_config(config):
        assert current_platform().name == platform
        assert (ops.RMSNorm(8).decision.chosen == "AcmeRMSNorm.forward_oot") == (platform == "acme")
        assert (not ops.SiluAndMul.enabled()) == (platform == "acme")
    refused = "computes in bfloat16 only, got torch.float32" in caplog.text
    assert refused == (platform == "cpu")


def test_a_platform_is_told_the_model(bridged: Any, tmp_path: Path) -> None:
    """It sees the config of the checkpoint, whose dtype holds where the user names none."""
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    settings |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    check = (
        "        model = vllm_config.model_config\n"
        "        assert (model.get_head_size(), model.get_total_num_kv_heads()) == (16, 2)\n"
        "        assert model.hf_config.model_type == 'llama' and not model.use_mla\n"
    )
    install_acme(bridged, platform=NEEDS + check)
    with set_config(OpgraftConfig(model=opgraft.config.ModelConfig(name=str(tmp_path)))):
        assert current_platform().name == "acme"


SHARED = (
    "import vllm\nfrom vllm.version import __version__\nassert vllm.__version__ == __version__\n"
)


@pytest.mark.parametrize(
    ("requires", "constant", "told"),
    [
        ((), "", "0.33.0"),
        (("vllm>=0.11,<0.13",), "", "0.12.0"),
        (("vllm==0.18.1",), "", "0.18.1"),
        (("vllm==0.8.5",), "", "0.33.0"),
        (("vllm==0.18.1+cpu",), "", "0.18.1"),
        (("vllm==0.18.1; python_version<'3'",), "", "0.33.0"),
        ((), "_SUPPORTED_VLLM = '>=0.25.0,<=0.28.0'\n", "0.28.0"),
    ],
)
def test_the_version_fits_the_plugin(
    bridged: Any, requires: tuple[str, ...], constant: str, told: str, warm_python: str
) -> None:
    """A plugin is told the newest version that it requires, of those that the bridge covers."""
    files = {"acme_vllm/__init__.py": ENTRY + constant, "acme_vllm/ops.py": SHARED}
    bridged.install("acme-vllm", files, GENERAL, requires=requires)
    program = (
        "import opgraft; opgraft.load_plugins(); from acme_vllm import ops; print(ops.__version__)"
    )
    result = subprocess.run(
        [warm_python, "-c", program],
        env={**os.environ, "PYTHONPATH": str(bridged.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == f"{told}+opgraft{opgraft.__version__}\n", result.stderr


def test_a_setting_names_the_version(bridged: Any) -> None:
    """It stands above what the plugin requires."""
    files = {"acme_vllm/__init__.py": ENTRY, "acme_vllm/ops.py": SHARED}
    bridged.install("acme-vllm", files, GENERAL, requires=("vllm<0.20",))
    with set_config(OpgraftConfig(of_plugins={"vllm_bridge.vllm_version": "0.30.1"})):
        load_plugins()
    assert importlib.import_module("acme_vllm.ops").__version__.startswith("0.30.1+opgraft")


def test_a_setting_is_a_version(bridged: Any) -> None:
    """Its local part gives way to that of opgraft, and another word is refused."""
    versions = importlib.import_module("opgraft_vllm_bridge.versions")
    with set_config(OpgraftConfig(of_plugins={versions.SETTING: "0.11.0+cpu"})):
        assert versions.announced_to("acme") == f"0.11.0+opgraft{opgraft.__version__}"
    with (
        set_config(OpgraftConfig(of_plugins={versions.SETTING: "abc"})),
        pytest.raises(ConfigError, match=r"vllm_version is 'abc', expected a version of vLLM"),
    ):
        versions.announced_to("acme")


def test_names_are_listed(bridged: Any) -> None:
    """One command tells which names of vLLM a plugin uses, and which of these are missing, with places."""
    install_acme(bridged, GENERAL, ops=LACKING)
    command = importlib.import_module("opgraft_vllm_bridge.command").main
    run = CliRunner().invoke
    listed = json.loads(run(command, ["names", "acme_ops", "--json"]).stdout)
    assert listed["distribution"] == {"name": "acme-vllm", "version": "2.0"}
    assert "vllm.model_executor.layers.layernorm.RMSNorm" in listed["answered"]
    places = {name: place.rpartition("/")[2] for name, place in listed["missing"].items()}
    assert places == {
        "vllm.multimodal.inputs.PlaceholderRange": "ops.py:8",
        "vllm.v1.worker.gpu_worker.Worker": "ops.py:5",
        "vllm.v1.worker.gpu_worker.start": "ops.py:5",
    }
    text = run(command, ["names", "acme-vllm"]).stdout
    assert re.search(
        r"^acme-vllm 2\.0 uses \d+ names of vLLM: \d+ are answered, 3 are missing", text
    )
    refused = run(command, ["names", "nobody"])
    assert (refused.exit_code, refused.stderr) == (
        1,
        "Error: 'nobody' is no installed plugin of vLLM: acme-vllm\n",
    )


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


def test_only_statements_import_missing_names(bridged: Any) -> None:
    """Another way of importing fails as in an import; where vLLM is installed nothing is answered."""
    finder = importlib.import_module("opgraft_vllm_bridge.finder").VllmFinder("acme")
    finder.install()
    layers = importlib.import_module("vllm.model_executor.layers.layernorm")
    assert layers.RMSNorm is ops.RMSNorm
    with pytest.raises(ModuleNotFoundError, match=re.escape("No module named 'vllm.v1.worker'")):
        importlib.import_module("vllm.v1.worker")
    with pytest.raises(
        AttributeError, match=r"asks for vllm\.model_executor\.layers\.layernorm\.LayerNorm"
    ):
        _ = layers.LayerNorm
    assert not hasattr(layers, "LayerNorm")
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
        pytest.raises(PluginError, match=r"ops\.py, line 3"),
    ):
        opgraft.load_plugins()


def test_the_table_of_names_is_that_of_the_code(bridged: Any) -> None:
    """The README lists what the bridge answers; 'make vllm-bridge-table' writes it, into a page with such a table."""
    table = runpy.run_path(str(BRIDGE.parents[1] / "tools/vllm_bridge_table.py"))
    text = (BRIDGE / "README.md").read_text(encoding="utf-8")
    assert table["page"](text) == text
    assert text.count("| `vllm.") > 40
    with pytest.raises(SystemExit, match=r"README.md has 0 tables with this head"):
        table["page"]("# A page\n")
