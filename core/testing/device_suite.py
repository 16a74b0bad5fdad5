"""The device suite: the tests of TorchCTS, asked about the torch device of a platform.

TorchCTS compares the operators of torch on a device with the CPU. A manifest has the claims of the
device. Tests beyond the claims are left out.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.base.text import printable
from opgraft.binding.provenance import own_words
from opgraft.errors import PluginError
from opgraft.platform import HOST, Platform

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of masks and indices. A platform claims floating-point dtypes only."""

_OF_ANY_DEVICE = frozenset({"inference", "training", "serialization", "rng"})
"""Capabilities of every platform: the kit asks for ``gradients``, ``copies`` and ``seeding``."""

_OPTIONS = (
    "--quiet",
    "--tb=no",
    "--continue-on-collection-errors",
    "--non-interactive",
    # A test may end the process. Another process then goes on behind the test.
    "--adaptive-isolation=off",
    "--known-segfault-policy=off",
    "-p",
    "no:cacheprovider",
)

_LONGEST_REASON = 500
"""Characters."""

_UNTESTED = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)


def manifest_of(platform: Platform) -> dict[str, Any]:
    """Return the manifest of TorchCTS for a platform: the claims of the platform, and no more."""
    schema = importlib.import_module("torchcts.core.manifest_schema")
    claimed = _capabilities_of(platform)
    memory = platform.memory().total
    return {
        "manifest_version": 1,
        "device_name": platform.device_type,
        # Without a name, TorchCTS reads all installed files in search of a backend.
        "backend_import": "opgraft",
        "supported_dtypes": dict.fromkeys(_dtypes_of(platform), True),
        "device_count": platform.device_count(),
        "hardware": {"device_memory_gb": [memory / 2**30], "system_memory_gb": "auto"},
        "resource_limits": {"max_device_memory_mb": memory / 2**20},
        "capabilities": {name: name in claimed for name in schema.CAPABILITY_ORDER},
    }


def _dtypes_of(platform: Platform) -> list[torch.dtype]:
    capability = platform.capability()
    claimed = [*capability.dtypes, capability.fp8_dtype]
    if capability.computes_float64:
        claimed.append(torch.float64)
    floating = [dtype for dtype in dict.fromkeys(claimed) if dtype is not None]
    return [*floating, *_INTEGERS]


def _capabilities_of(platform: Platform) -> set[str]:
    """Return the capabilities claimed by a platform, by their names in TorchCTS."""
    found = set(_OF_ANY_DEVICE)
    device = platform.device_type
    if device != HOST:
        found.add("device_api")
        # A platform may have streams that torch does not know.
        if platform.streams is torch.get_device_module(device):
            found |= {"streams", "events"}
    if platform.compile_backend == "inductor":
        found.add("compile")
    if platform.capability().fp8_dtype is not None:
        found.add("fp8")
    if platform.device_count() > 1:
        found.add("multi_device")
    return found


def ask_suite(
    platform: Platform,
    part: str,
    level: int,
    done: Collection[str],
    tell: Callable[[Mapping[str, Any]], None],
) -> None:
    """Run the tests of a part of the suite in this process, and tell each answer.

    Args:
        platform: the active platform.
        part: a folder, a file or a test of the suite, such as ``rng``.
        level: the deepest tests to run, from 1 to 8, as TorchCTS counts.
        done: the names of answered tests.
        tell: called with ``claims`` of the platform; with ``cases``, the number of tests; with
            ``asked`` before and ``outcome`` after each test; and at the end with ``left_out``, the
            number of tests left out, by reason.

    Raises:
        PluginError: pytest cannot run the suite.
    """
    root = Path(importlib.import_module("torchcts").__path__[0])
    manifest = manifest_of(platform)
    tell({"claims": _claims(manifest)})
    asker = _Asker(root, done, tell)
    with tempfile.TemporaryDirectory() as folder:
        # TorchCTS reads the manifest in the working folder.
        Path(folder, "manifest.py").write_text(f"import torch\nmanifest = {manifest!r}\n")
        os.chdir(folder)
        # The project around a virtual environment may have settings and a conftest.py of its own.
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        own = [f"--config-file={settings}", f"--rootdir={folder}", f"--confcutdir={root}"]
        options = [*_OPTIONS, *own, f"--device={platform.device_type}", f"--level={level}"]
        ended = pytest.main([*options, str(root / part)], plugins=[asker])
        if ended in _UNTESTED:
            raise PluginError(f"pytest cannot run TorchCTS: it ended with {ended!r}")
        tell({"left_out": _left_out(Path(folder, "results"))})
        # The working folder is about to go.
        os.chdir(root)


def _claims(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the claims of a manifest as plain data."""
    capabilities = [name for name, claimed in manifest["capabilities"].items() if claimed]
    dtypes = [_dtype_name(dtype) for dtype in manifest["supported_dtypes"]]
    return {"device_type": manifest["device_name"], "dtypes": dtypes, "capabilities": capabilities}


def _left_out(results: Path) -> dict[str, int]:
    """Return the number of tests left out, by TorchCTS's word for the reason."""
    artifacts = importlib.import_module("torchcts.core.result_artifacts")
    found: Counter[str] = Counter()
    for file in results.glob("*_latest.json"):
        records = artifacts.load_result_artifact(file)["skips"].values()
        found.update(record["skip_reason"] for record in records)
    return dict(found.most_common())


class _Asker:
    """A plugin of pytest: leaves out answered tests, and tells the answers.

    Args:
        root: the folder of the suite.
        done: the names of answered tests.
        tell: as of ``ask_suite``.
    """

    def __init__(
        self, root: Path, done: Collection[str], tell: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.root = root
        self.done = done
        self.tell = tell
        self.answer: dict[str, Any] = {}

    # The hook of the suite comes before, and leaves out tests beyond the claims.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.tell({"cases": len(items)})
        items[:] = [item for item in items if self._name_of(item) not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Take a file that cannot be imported for a failed test."""
        report = yield
        if report.failed:
            file = collector.path.relative_to(self.root).as_posix()
            *_, reason = str(report.longrepr).splitlines()
            answer = _answer("failed", printable(reason))
            self.tell({"outcome": {"check": file, "dtype": None, **answer}})
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        asked = {"check": self._name_of(item), "dtype": _dtype_of(item)}
        self.tell({"asked": asked})
        self.answer = {**asked, **_answer("passed")}

    # One report counts. That of the suite would write the answers of all tests after each test.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport:
        report = pytest.TestReport.from_item_and_call(item, call)
        self.answer["seconds"] = round(self.answer["seconds"] + call.duration, 3)
        # The first failure says more than the failures after it.
        if call.excinfo is not None and self.answer["status"] == "passed":
            self.answer["status"] = report.outcome
            self.answer["reason"] = _reason_of(call.excinfo.value)
        if report.when == "teardown":
            self.tell({"outcome": self.answer})
        return report

    def _name_of(self, item: pytest.Item) -> str:
        """Return the name of a test, in the form of ``part`` of ``ask_suite``."""
        file = item.path.relative_to(self.root).as_posix()
        test = item.nodeid.partition("::")[2]
        return f"{file}::{test}"


def _answer(status: str, reason: str = "") -> dict[str, Any]:
    figures = {"error": None, "speed": None, "seconds": 0.0, "lines": None}
    return {"status": status, "reason": reason, **figures}


def _dtype_of(item: pytest.Item) -> str | None:
    # An item without parameters has no such attribute.
    callspec = vars(item).get("callspec")
    dtype = callspec.params.get("dtype") if callspec else None
    return _dtype_name(dtype) if isinstance(dtype, torch.dtype) else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason_of(error: BaseException) -> str:
    said = str(error) if isinstance(error, AssertionError) else own_words(error)
    return printable(" ".join(said.split()))[:_LONGEST_REASON]
