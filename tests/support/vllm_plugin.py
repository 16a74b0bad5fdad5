"""A device plugin in the shape of vLLM's, and the bridge, as distributions for ``site``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomllib

BRIDGE = Path(__file__).parents[2] / "reference_plugins/opgraft-vllm-bridge"

ENTRY = """
def register():
    return "acme_vllm.platform.AcmePlatform"


def register_ops():
    from acme_vllm import ops
"""

PLATFORM = """
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)


class AcmePlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "acme"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    seeds: list[int] = []

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "Acme A1"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 1 << 30

    @classmethod
    def get_current_memory_usage(cls, device=None) -> float:
        return float(1 << 20)

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        import acme_vllm.quantization

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache_config = vllm_config.cache_config
        cache_config.block_size = 128
        vllm_config.compilation_config.custom_ops = ["all"]
        vllm_config.parallel_config.disable_custom_all_reduce = True
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "acme_vllm.worker.AcmeWorker"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, *args, **kwargs) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return "acme_vllm.attention.AcmeBackend"
"""

QUANTIZATION = "registered = True\n"

WORKER = """
from vllm.v1.worker.gpu_worker import Worker  # which opgraft does not run


class AcmeWorker(Worker):
    pass
"""

OPS = """
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

try:
    import vllm
    from vllm._ipex_ops import ipex_ops
except ImportError:
    ipex_ops = None


def acme_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.sigmoid(gate.float()).mul(gate.float()).mul(up.float()).to(x.dtype)


def acme_silu_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x[..., : x.shape[-1] // 2])


direct_register_custom_op("acme_silu", acme_silu, mutates_args=[], fake_impl=acme_silu_fake)


@CustomOp.register_oot(name="SiluAndMul")
class AcmeSiluAndMul(SiluAndMul):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert current_platform.is_out_of_tree() and current_platform.seeds == []
        assert get_current_vllm_config().cache_config.block_size == 128

    def forward_oot(self, x):
        return torch.ops.vllm.acme_silu(x)


@RMSNorm.register_oot
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        if self.variance_size_override is not None:
            return self.forward_native(x, residual)
        wide = x.double() if residual is None else x.double() + residual.double()
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.has_weight:
            out = out * self.weight
        return out.to(x.dtype) if residual is None else (out.to(x.dtype), wide.to(x.dtype))
"""

FILES = {
    "acme_vllm/__init__.py": ENTRY,
    "acme_vllm/platform.py": PLATFORM,
    "acme_vllm/quantization.py": QUANTIZATION,
    "acme_vllm/ops.py": OPS,
    "acme_vllm/worker.py": WORKER,
}
POINTS = {
    "vllm.platform_plugins": ["acme = acme_vllm:register"],
    "vllm.general_plugins": ["acme_ops = acme_vllm:register_ops"],
}


def install_bridge(site: Any) -> None:
    """Install the bridge as pip would."""
    source = BRIDGE / "src"
    parts = [*source.rglob("*.py"), *source.rglob("*.toml")]
    files = {str(path.relative_to(source)): path.read_text() for path in parts}
    project = tomllib.loads((BRIDGE / "pyproject.toml").read_text())["project"]
    points = {
        group: [f"{k} = {v}" for k, v in rows.items()]
        for group, rows in project["entry-points"].items()
    }
    site.install(
        project["name"], files, points, version=project["version"], requires=project["dependencies"]
    )


def install_acme(site: Any, points: dict[str, list[str]] | None = None, **changed: str) -> None:
    """Install the plugin, with other sources for some of its modules."""
    files = FILES | {f"acme_vllm/{name}.py": text for name, text in changed.items()}
    site.install(
        "acme-vllm", files, POINTS if points is None else points, version="2.0", requires=()
    )


@contextmanager
def imports_forgotten() -> Iterator[None]:
    """Forget the modules of vLLM that were made meanwhile, and who made them, and a package without a file."""
    finders = list(sys.meta_path)
    try:
        yield
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder in finders]
        made = [name for name in sys.modules if name.partition(".")[0] in ("vllm", "acme_space")]
        for name in made:
            del sys.modules[name]
