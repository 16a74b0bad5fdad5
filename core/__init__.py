"""opgraft: a plugin host that grafts device kernels onto PyTorch models.

``import opgraft`` imports neither torch nor a plugin; a public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "opgraft":
    raise ImportError(f"this package is opgraft, imported as {__name__!r}: run from an installed opgraft")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from opgraft.adapter import Adapter as Adapter
    from opgraft.adapter import LeaveAlone as LeaveAlone
    from opgraft.binding import inference_only as inference_only
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
    from opgraft.decision import Candidate as Candidate
    from opgraft.decision import Decision as Decision
    from opgraft.decision import Provider as Provider
    from opgraft.dispatch import needs as needs
    from opgraft.errors import OpgraftError as OpgraftError
    from opgraft.evidence import Device as Device
    from opgraft.evidence import Evidence as Evidence
    from opgraft.evidence import Fact as Fact
    from opgraft.explaining import Explanation as Explanation
    from opgraft.explaining import explain as explain
    from opgraft.grafting import GraftReport as GraftReport
    from opgraft.grafting import graft as graft
    from opgraft.grafting import ungraft as ungraft
    from opgraft.kernels.weight_cache import refresh as refresh
    from opgraft.lifecycle import reset as reset
    from opgraft.machine import Machine as Machine
    from opgraft.machine import TorchBuild as TorchBuild
    from opgraft.ops import (
        CustomOp as CustomOp,
    )
    from opgraft.ops import (
        PluggableLayer as PluggableLayer,
    )
    from opgraft.ops import (
        maybe_get_oot_by_class as maybe_get_oot_by_class,
    )
    from opgraft.packing import PackReport as PackReport
    from opgraft.packing import pack as pack
    from opgraft.packing import unpack as unpack
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
    from opgraft.rebinding import rebind as rebind

_HOME = {
    "opgraft.adapter": ("Adapter", "LeaveAlone"),
    "opgraft.binding": ("inference_only",),
    "opgraft.config": ("CompilationConfig", "CompilationMode", "OpgraftConfig", "set_config"),
    "opgraft.decision": ("Candidate", "Decision", "Provider"),
    "opgraft.dispatch": ("needs",),
    "opgraft.errors": ("OpgraftError",),
    "opgraft.explaining": ("Explanation", "explain"),
    "opgraft.grafting": ("GraftReport", "graft", "ungraft"),
    "opgraft.kernels.weight_cache": ("refresh",),
    "opgraft.lifecycle": ("reset",),
    "opgraft.evidence": ("Device", "Evidence", "Fact"),
    "opgraft.machine": ("Machine", "TorchBuild"),
    "opgraft.ops": ("CustomOp", "PluggableLayer", "maybe_get_oot_by_class"),
    "opgraft.packing": ("PackReport", "pack", "unpack"),
    "opgraft.platform": ("DeviceCapability", "DeviceMemory", "Platform", "PlatformSpec"),
    "opgraft.plugins.hookspecs": ("hookimpl",),
    "opgraft.plugins.host": ("load_plugins",),
    "opgraft.plugins.selection": ("current_platform",),
    "opgraft.rebinding": ("rebind",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # strings, spelled once, in _HOME


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'opgraft' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
