"""A file of a vLLM plugin, rewritten: what becomes of its imports, uses and platform class."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

Rewrite = Callable[[str], Any]


def named(made: Any) -> list[tuple[int, str]]:
    return [(one.line, one.name) for one in made.uncovered]


COVERED = {
    "from vllm.logger import init_logger": "from opgraft.logger import init_logger",
    "from vllm.model_executor.layers.layernorm import RMSNorm as N": "from opgraft.ops import RMSNorm as N",
    "from vllm.utils import direct_register_custom_op; x = 1": "from opgraft import direct_register_custom_op\nx = 1",
    "import torch\ntorch.ops.vllm.acme(1)": "import torch\ntorch.ops.opgraft.acme(1)",
    "f(_decorated_layer_cls=A, name='B')": "f(_decorated_op_cls=A, name='B')",
    "from vllm.platforms import current_platform as p\np.device_type": "from opgraft import current_platform as p\n"
    "p().device_type",
    "from vllm.platforms import current_platform\nf(current_platform)": "from opgraft import current_platform\n"
    "f(current_platform())",
    "from vllm.platforms import current_platform\ncurrent_platform.dist_backend": "from opgraft import "
    "current_platform\ncurrent_platform().distributed_backend",
    "if x: from vllm.logger import logger": "if x: from opgraft.logger import logger",
}


@pytest.mark.parametrize("source", COVERED)
def test_covered(rewritten: Rewrite, source: str) -> None:
    """Names with a counterpart are imported from there, and what is different of it is called in another way."""
    made = rewritten(source)
    assert (made.code, made.uncovered) == (COVERED[source], [])


@pytest.mark.parametrize(
    "source",
    [
        "from . import vllm\nfrom .vllm.config import x",
        "import vllm_acme, torch\nvllm_acme.config.x",
        "def f(vllm):\n    return vllm.config",
        '\'vllm is fast\'\n"""vllm."""\nf\'vllm.{x}\'',
        "# vllm.config.x\n",
    ],
)
def test_what_is_not_of_vllm_stays(rewritten: Rewrite, source: str) -> None:
    """Modules, arguments and texts that only look like it are as they were."""
    made = rewritten(source)
    assert (made.code, made.uncovered) == (source, [])


UNCOVERED = {
    "from vllm.config import VllmConfig": [(1, "vllm.config.VllmConfig")],
    "from vllm.config import *": [(1, "vllm.config.*")],
    "import torch, vllm.envs as envs\n\nenvs.X": [(1, "vllm.envs"), (3, "vllm.envs.X")],
    "import vllm\nvllm.LLM()": [(1, "vllm"), (2, "vllm.LLM")],
    "try:\n    from vllm.a import b\nexcept ImportError:\n    b = None": [(2, "vllm.a.b")],
    "def f():\n    from vllm.a import b": [(2, "vllm.a.b")],
    "def f(): from vllm.a import b": [(1, "vllm.a.b")],
    "x = 'vllm.v1.worker.Worker'": [(1, "vllm.v1.worker.Worker")],
    "ops = ['vllm::acme']": [(1, "vllm::acme")],
    "from vllm.platforms import current_platform as p\nif p.is_cuda():\n    pass": [
        (2, "vllm.platforms.current_platform.is_cuda")
    ],
    "if x:\n    from vllm.a import b\nelif y:\n    pass\nelse:\n    b()": [
        (2, "vllm.a.b"),
        (6, "vllm.a.b"),
    ],
}


@pytest.mark.parametrize("source", UNCOVERED)
def test_uncovered(rewritten: Rewrite, source: str) -> None:
    """What has no counterpart is listed by its line and stands below a comment; nothing imports vLLM any more."""
    made = rewritten(source)
    assert named(made) == UNCOVERED[source]
    assert made.code.count("# opgraft: no counterpart: ") == len(made.uncovered)
    imports = [
        node
        for node in ast.walk(ast.parse(made.code))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not any("vllm" in ast.unparse(node) for node in imports)


def test_annotations_that_nothing_defines(rewritten: Rewrite) -> None:
    """They are not evaluated, so that the file can be imported."""
    made = rewritten(
        "from vllm.config import VllmConfig\n\ndef f(config: VllmConfig) -> None: ...\n"
    )
    namespace: dict[str, object] = {}
    exec(compile(made.code, "file.py", "exec"), namespace)  # noqa: S102  # that it can be is what is tested
    assert "f" in namespace


def test_comments_stay_with_what_they_are_about(rewritten: Rewrite) -> None:
    """Those above an import that goes stay in its place, and code that is not of vLLM keeps every character."""
    source = "# of this file\nx=1\n\n# engine\nfrom vllm.a import b  # gone\n\n\ndef f( y ):\n\treturn   y # odd\n"
    expected = source.replace(
        "from vllm.a import b  # gone\n", "# opgraft: no counterpart: from vllm.a import b\n"
    )
    assert rewritten(source).code == expected


PLATFORM = """
from vllm.platforms import Platform, PlatformEnum


class AcmePlatform(Platform):
    _enum = PlatformEnum.OOT
    device_type = "cpu"
    dist_backend: str = "gloo"

    @classmethod
    def get_device_name(cls, device_id=0):
        return "Acme"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 2**30

    @classmethod
    def get_attn_backend_cls(cls, *arguments):
        return cls._backend()

    @classmethod
    def _backend(cls):
        return "acme.attention.Backend"
"""


def test_a_platform_gets_what_opgraft_asks_for(rewritten: Rewrite) -> None:
    """Its members are made of those that it has; methods that nobody calls are listed, helpers of its own are not."""
    made = rewritten(PLATFORM)
    assert [name for _, name in named(made)] == [
        "vllm.platforms.PlatformEnum",
        "vllm.platforms.Platform.get_attn_backend_cls",
    ]
    namespace: dict[str, object] = {}
    exec(compile(made.code, "file.py", "exec"), namespace)  # noqa: S102  # the class is what is tested
    platform = namespace["AcmePlatform"]()  # type: ignore[operator]
    assert (platform.name, platform.device_type, platform.distributed_backend) == (
        "acme",
        "cpu",
        "gloo",
    )
    assert platform.capability(0).name == "Acme"
    assert platform.memory().total == 2**30
    assert platform.device_count() == 1
    platform.synchronize()
    platform.manual_seed(3)


def test_a_platform_without_its_memory_says_so(rewritten: Rewrite) -> None:
    """Nothing is invented: making the platform names the member that is missing."""
    source = PLATFORM.replace("get_device_total_memory", "total")
    namespace: dict[str, object] = {}
    exec(compile(rewritten(source).code, "file.py", "exec"), namespace)  # noqa: S102  # as above
    with pytest.raises(TypeError, match="memory"):
        namespace["AcmePlatform"]()  # type: ignore[operator]
