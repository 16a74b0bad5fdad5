"""opgraft: a plugin host that grafts device kernels onto PyTorch models.

``import opgraft`` imports neither torch nor a plugin. A public name or module is imported at the
first use.
"""

# In the repository this folder is core/. opgraft.plugins and opgraft.platforms are plugins/ and
# platforms/ beside it.

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

# A folder of the repository in front of the path would be a second package with a second state.
if __name__ != "opgraft":
    raise ImportError(
        f"this package is opgraft, imported as {__name__!r}: run from an installed opgraft"
    )

from opgraft.base import upward
from opgraft.base.collector import without_collections
from opgraft.base.version import __version__ as __version__

# Ported plugins import opgraft.custom_op, opgraft.logger and opgraft.torch_library. Type checkers
# find them as stubs in this folder.
__path__.append(f"{__path__[0]}/binding/ported")

if TYPE_CHECKING:
    from opgraft import errors as errors
    from opgraft import functional as functional
    from opgraft import kernels as kernels
    from opgraft import ops as ops
    from opgraft import testing as testing
    from opgraft.base.log import init_logger as init_logger
    from opgraft.binding.derivation import NATIVE as NATIVE
    from opgraft.binding.derivation import FunctionalKernels as FunctionalKernels
    from opgraft.binding.derivation import calls_functional as calls_functional
    from opgraft.binding.explaining import Explanation as Explanation
    from opgraft.binding.explaining import explain as explain
    from opgraft.binding.functional import register_functional as register_functional
    from opgraft.binding.marks import inference_only as inference_only
    from opgraft.binding.marks import needs as needs
    from opgraft.binding.pluggable_class import PluggableClass as PluggableClass
    from opgraft.binding.profiling import profile as profile
    from opgraft.binding.provenance import Provenance as Provenance
    from opgraft.binding.provenance import explain_exception as explain_exception
    from opgraft.binding.provenance import install_excepthook as install_excepthook
    from opgraft.binding.rebinding import rebind as rebind
    from opgraft.binding.shadow import ShadowReport as ShadowReport
    from opgraft.binding.shadow import ShadowRow as ShadowRow
    from opgraft.binding.shadow import shadow_report as shadow_report
    from opgraft.binding.sharing import share_decisions as share_decisions
    from opgraft.binding.torch_library import direct_register_custom_op as direct_register_custom_op
    from opgraft.compilation.compiled import Compiled as Compiled
    from opgraft.compilation.compiled import compile as compile
    from opgraft.compilation.graph_pass import GraphPass as GraphPass
    from opgraft.compilation.graph_pass import PassReport as PassReport
    from opgraft.config import (
        CompilationConfig as CompilationConfig,
    )
    from opgraft.config import (
        CompilationMode as CompilationMode,
    )
    from opgraft.config import (
        OpgraftConfig as OpgraftConfig,
    )
    from opgraft.config import (
        set_config as set_config,
    )
    from opgraft.engine.lora.request import LoRARequest as LoRARequest
    from opgraft.engine.sampling_params import SamplingParams as SamplingParams
    from opgraft.errors import OpgraftError as OpgraftError
    from opgraft.grafting import GraftReport as GraftReport
    from opgraft.grafting import graft as graft
    from opgraft.grafting import ungraft as ungraft
    from opgraft.grafting.hub_layers import kernel_mapping as kernel_mapping
    from opgraft.machine.device_figures import DeviceFigures as DeviceFigures
    from opgraft.machine.evidence import Device as Device
    from opgraft.machine.evidence import Evidence as Evidence
    from opgraft.machine.evidence import Fact as Fact
    from opgraft.machine.machine import Machine as Machine
    from opgraft.machine.machine import TorchBuild as TorchBuild
    from opgraft.ops import (
        CustomOp as CustomOp,
    )
    from opgraft.ops import (
        PluggableLayer as PluggableLayer,
    )
    from opgraft.ops import (
        maybe_get_oot_by_class as maybe_get_oot_by_class,
    )
    from opgraft.ops.freezing import FreezeReport as FreezeReport
    from opgraft.ops.freezing import freeze as freeze
    from opgraft.ops.freezing import refresh as refresh
    from opgraft.ops.freezing import thaw as thaw
    from opgraft.platform import (
        DeviceCapability as DeviceCapability,
    )
    from opgraft.platform import (
        DeviceMemory as DeviceMemory,
    )
    from opgraft.platform import (
        Platform as Platform,
    )
    from opgraft.platform import (
        PlatformSpec as PlatformSpec,
    )
    from opgraft.plugins.hookspecs import hookimpl as hookimpl
    from opgraft.plugins.host import load_plugins as load_plugins
    from opgraft.plugins.selection import current_platform as current_platform
    from opgraft.registry.adapter import Adapter as Adapter
    from opgraft.registry.adapter import CallAdapter as CallAdapter
    from opgraft.registry.adapter import FunctionCall as FunctionCall
    from opgraft.registry.adapter import LeaveAlone as LeaveAlone
    from opgraft.registry.conditions import When as When
    from opgraft.registry.decision import Candidate as Candidate
    from opgraft.registry.decision import Decision as Decision
    from opgraft.registry.decision import Provider as Provider
    from opgraft.registry.state import reset as reset
    from opgraft.serving.async_llm import AsyncLLM as AsyncLLM
    from opgraft.serving.llm import LLM as LLM
    from opgraft.serving.llm import Interrupted as Interrupted
    from opgraft.serving.outputs import CompletionOutput as CompletionOutput
    from opgraft.serving.outputs import EmbeddingOutput as EmbeddingOutput
    from opgraft.serving.outputs import Logprob as Logprob
    from opgraft.serving.outputs import RequestMetrics as RequestMetrics
    from opgraft.serving.outputs import RequestOutput as RequestOutput
    from opgraft.serving.prometheus import PrometheusExporter as PrometheusExporter

# Type checkers read the imports above, and Python this table.
_HOME = {
    "opgraft.registry.adapter": ("Adapter", "CallAdapter", "FunctionCall", "LeaveAlone"),
    "opgraft.binding.derivation": ("NATIVE", "FunctionalKernels", "calls_functional"),
    "opgraft.binding.functional": ("register_functional",),
    "opgraft.binding.marks": ("inference_only", "needs"),
    "opgraft.binding.pluggable_class": ("PluggableClass",),
    "opgraft.compilation.compiled": ("Compiled", "compile"),
    "opgraft.compilation.graph_pass": ("GraphPass", "PassReport"),
    "opgraft.config": ("CompilationConfig", "CompilationMode", "OpgraftConfig", "set_config"),
    "opgraft.registry.decision": ("Candidate", "Decision", "Provider"),
    "opgraft.engine.lora.request": ("LoRARequest",),
    "opgraft.engine.sampling_params": ("SamplingParams",),
    "opgraft.errors": ("OpgraftError",),
    "opgraft.binding.explaining": ("Explanation", "explain"),
    "opgraft.grafting": ("GraftReport", "graft", "ungraft"),
    "opgraft.grafting.hub_layers": ("kernel_mapping",),
    "opgraft.base.log": ("init_logger",),
    "opgraft.ops.freezing": ("FreezeReport", "freeze", "refresh", "thaw"),
    "opgraft.serving.async_llm": ("AsyncLLM",),
    "opgraft.serving.llm": ("LLM", "Interrupted"),
    "opgraft.serving.outputs": (
        "CompletionOutput",
        "EmbeddingOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
    "opgraft.serving.prometheus": ("PrometheusExporter",),
    "opgraft.registry.conditions": ("When",),
    "opgraft.registry.state": ("reset",),
    "opgraft.machine.device_figures": ("DeviceFigures",),
    "opgraft.machine.evidence": ("Device", "Evidence", "Fact"),
    "opgraft.machine.machine": ("Machine", "TorchBuild"),
    "opgraft.ops": ("CustomOp", "PluggableLayer", "maybe_get_oot_by_class"),
    "opgraft.platform": ("DeviceCapability", "DeviceMemory", "Platform", "PlatformSpec"),
    "opgraft.plugins.hookspecs": ("hookimpl",),
    "opgraft.plugins.host": ("load_plugins",),
    "opgraft.plugins.selection": ("current_platform",),
    "opgraft.binding.profiling": ("profile",),
    "opgraft.binding.provenance": ("Provenance", "explain_exception", "install_excepthook"),
    "opgraft.binding.rebinding": ("rebind",),
    "opgraft.binding.shadow": ("ShadowReport", "ShadowRow", "shadow_report"),
    "opgraft.binding.sharing": ("share_decisions",),
    "opgraft.binding.torch_library": ("direct_register_custom_op",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_MODULES = ("errors", "functional", "kernels", "ops", "testing")
"""Public modules, imported at the first use."""

# At run time the names stand once, in _HOME.
__all__ = ["__version__", *_MODULE_OF]


def _declared_settings() -> Mapping[str, Any]:
    discovery: Any = importlib.import_module("opgraft.plugins.discovery")
    found = discovery.discover()
    settings: Mapping[str, Any] = found.settings
    return settings


upward.declared_settings = _declared_settings


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _imported(f"opgraft.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'opgraft' has no attribute {name!r}")
    return getattr(_imported(_MODULE_OF[name]), name)


def _imported(name: str) -> ModuleType:
    # Another thread may be importing it at present, so this waits.
    if name in sys.modules:
        return importlib.import_module(name)
    # Torch and opgraft make half a million objects at their first import.
    with without_collections():
        return importlib.import_module(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
