"""Checks of a plugin as a whole, of the platform that it brings, and of the parts that it brings for the engine.

As those of ``checks``, each raises ``AssertionError`` where it fails.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import ChildError
from opgraft.machine.child import run_child
from opgraft.ops.spec import tensors
from opgraft.platform import DeviceMemory, Platform, effective_chain
from opgraft.plugins.discovery import PLUGIN_GROUP, discover, names_of
from opgraft.plugins.host import load_plugins
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.requirements import objection
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state, reset
from opgraft.testing import diagnosis
from opgraft.testing.contracts import check_attention_layout
from opgraft.testing.part_contracts import check_sampler, check_step_graph
from opgraft.testing.subjects import Subject, claimed_dtypes, subjects_of

CONTRACTS: Mapping[str, Callable[[], None]] = {
    "attention": lambda: check_attention_layout(device=current_platform().device_type),
    "sampler": lambda: check_sampler(device=current_platform().device_type),
    "step_graph": lambda: check_step_graph(device=current_platform().device_type),
}
"""By op or class, the contracts that need nothing beside it."""

_SPAWNED = """
import base64, io, torch
from opgraft.config import config_from_fields, parse_text, set_config
from opgraft.ops.spec import tensors
from opgraft.testing.plugin_checks import kernels_of
import opgraft
wrong = []
settings = config_from_fields({name: parse_text(name, text) for name, text in data["settings"].items()})
with set_config(settings), torch.no_grad():
    opgraft.load_plugins()
    sent = torch.load(io.BytesIO(base64.b64decode(data["ops"])), weights_only=False)
    for name, op, kernels, inputs, expected in sent:
        if kernels_of(op) != kernels:
            wrong.append(f"{name}, which runs {kernels_of(op)}, here {kernels}")
        for found, wanted in zip(tensors(op(*inputs)), expected, strict=True):
            if not torch.allclose(found.double(), wanted.double(), 1e-2, 1e-2, equal_nan=True):
                wrong.append(name)
with open(reply_to, "w", closefd=False) as pipe:
    pipe.write(", ".join(wrong))
"""
_NO_PLUGIN = "it is a platform without a plugin, which activates nothing"
_DOUBLINGS, _LARGEST = 8, 1 << 23
"""Pairs of kernels that are queued one behind the other, and numbers that each of them writes, at most."""
_PATIENCE = (
    120.0  # seconds: a process imports torch first, and a plugin perhaps a runtime of its own
)


def check_findings(plugin: str) -> None:
    """Nothing is found wrong with how the plugin registers, as ``opgraft plugins doctor`` finds it."""
    provider, names, _ = names_of(plugin)
    found = [finding for name in names for finding in findings_of(host_state().plugins[name])]
    found += [
        each for each in diagnosis.diagnose() if each.provider and each.provider.name == provider
    ]
    if found:
        raise AssertionError("; ".join(map(str, found)))


def check_isolation(plugin: str) -> str | None:
    """A reset takes back what the plugin activated; loaded again it is what it was. Returns why that is not asked."""
    if not names_of(plugin)[1]:
        return _NO_PLUGIN
    before = _activated(plugin)
    loaded_with = host_state().loading.config
    allowed = (loaded_with.plugins if loaded_with else None) or ()
    reset()
    with set_config(OpgraftConfig(plugins=())):
        load_plugins()
        left = _activated(plugin)
    reset()
    with set_config(OpgraftConfig(plugins=allowed)):
        load_plugins()
    after = _activated(plugin)
    if left:
        raise AssertionError(f"without the plugin there is still {', '.join(left)}")
    if before != after:
        raise AssertionError(
            f"loaded again it replaces {', '.join(after)}, at first {', '.join(before)}"
        )
    return None


def check_together(plugin: str) -> str | None:
    """Beside all others that may run here it activates the same, without a conflict; returns why none was tried."""
    own = names_of(plugin)[1]
    if not own:
        return _NO_PLUGIN
    others = _others_here(own)
    if not others:
        return "no other plugin is installed that may run here"
    before = _activated(plugin)
    loaded_with = host_state().loading.config
    allowed = (loaded_with.plugins if loaded_with else None) or ()
    try:
        reset()
        with set_config(OpgraftConfig(plugins=(*own, *others))):
            load_plugins()
            after, rivals = _activated(plugin), [str(finding) for finding in diagnosis.conflicts()]
    finally:  # another plugin may keep the host from loading
        reset()
        with set_config(OpgraftConfig(plugins=allowed)):
            load_plugins()
    if rivals:
        raise AssertionError(f"together with {', '.join(others)}: {'; '.join(rivals)}")
    if before != after:
        raise AssertionError(
            f"together with {', '.join(others)} it replaces {', '.join(after)}, alone {', '.join(before)}"
        )
    return None


def _others_here(own: Sequence[str]) -> list[str]:
    """List the other installed plugins that are for this platform, and that nothing speaks against."""
    name = current_platform().name
    offers = [offer for offer in discover().of_group(PLUGIN_GROUP) if offer.name not in own]
    here = [offer for offer in offers if name in (names_of(offer.name)[2] or [name])]
    with set_config(OpgraftConfig(plugins=tuple(offer.name for offer in here))):
        settings = host_state().settings()
        return sorted(offer.name for offer in here if objection(offer, settings) is None)


def _activated(plugin: str) -> list[str]:
    names = names_of(plugin)[1]
    return sorted(
        f"{r.asked_for} by {r.cls.__qualname__}" for r in host_state().active if r.plugin in names
    )


def check_spawn(plugin: str) -> str | None:
    """Ops that are sent to a new process compute there what they compute here; returns why none was sent."""
    sent = [_computed(subject) for subject in subjects_of(plugin) if subject.built]
    if not sent:
        return "no module of it stands for a form, so there is no op to send"
    packed = io.BytesIO()
    torch.save(sent, packed)  # which plain pickle cannot do for every dtype
    data = {
        "settings": {name: text for name, text, _ in host_state().settings().rows() if text},
        "ops": base64.b64encode(packed.getvalue()).decode(),
    }
    try:
        ended = run_child(_SPAWNED, data=data, time_limit=_PATIENCE, environ=os.environ)
    except ChildError as error:
        raise AssertionError(str(error)) from error
    if ended.status != 0:
        raise AssertionError(f"ops cannot be sent to another process: {ended.complaint()}")
    if ended.reply:
        raise AssertionError(f"in another process these compute something else: {ended.reply}")
    return None


def kernels_of(op: Any) -> str:
    """Name the kernels that a module and the ops in it run."""
    return ", ".join(
        str(part.decision.chosen) for part in op.modules() if isinstance(part, CustomOp)
    )


def _computed(subject: Subject) -> tuple[str, Any, str, Sequence[Any], list[torch.Tensor]]:
    spec, variant = subject.proof, subject.built[0]
    arguments = spec.arguments(variant, torch.float32, spec.leads[1], max(spec.sizes[:2]))
    op, inputs = subject.build(variant, arguments)
    with torch.no_grad():
        return subject.name, op, kernels_of(op), inputs, tensors(op(*inputs))


def check_devices(platform: Platform) -> None:
    """It counts its devices, tells the capability of each, and torch knows their type."""
    count = platform.device_count()
    if type(count) is not int or count < 1:
        raise AssertionError(
            f"device_count() returned {count!r}: where the platform is available it is at least 1"
        )
    torch.empty(1, device=platform.device_type)
    effective_chain(platform)
    for index in range(count):
        dtypes = platform.capability(index).dtypes
        wrong = [
            dtype
            for dtype in dtypes
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point
        ]
        if wrong or not dtypes:
            raise AssertionError(
                f"capability({index}).dtypes is {dtypes!r}: it is to list floating-point dtypes"
            )


def check_memory(platform: Platform) -> None:
    """It tells the memory of each device in bytes, of which no more is free than there is."""
    for index in range(platform.device_count()):
        memory = platform.memory(index)
        if not isinstance(memory, DeviceMemory):
            raise AssertionError(
                f"memory({index}) returned a {type(memory).__name__}: it is to return DeviceMemory"
            )
        if not 0 <= memory.free <= memory.total or memory.total == 0:
            raise AssertionError(
                f"memory({index}) tells {memory.free} bytes free of {memory.total}"
            )


def check_seeding(platform: Platform) -> None:
    """The same seed gives the same random numbers again, another one others."""
    drawn = []
    for seed in (7, 7, 8):
        platform.manual_seed(seed)
        drawn.append(torch.rand(64, device=platform.device_type).cpu())
    if not torch.equal(drawn[0], drawn[1]):
        raise AssertionError(
            "manual_seed(7) twice was followed by other random numbers the second time"
        )
    if torch.equal(drawn[0], drawn[2]):
        raise AssertionError(
            "manual_seed(7) and manual_seed(8) were followed by the same random numbers"
        )


def check_synchronisation(platform: Platform) -> None:
    """Work that was queued is done when it returns, on each device; with nothing queued it returns at once."""
    for index in range(platform.device_count()):
        platform.synchronize(index)
        platform.synchronize(index)
    x = torch.ones(64, 64, device=platform.device_type)
    for _ in range(8):
        x = (x @ x) / 64
    platform.synchronize()
    if not torch.equal(x.cpu(), torch.ones(64, 64)):
        raise AssertionError(
            "after synchronize() a chain of products has other numbers than those it computes"
        )


def check_dtypes(platform: Platform) -> None:
    """Each dtype that it claims can be computed with."""
    for dtype in claimed_dtypes(platform):
        found = (torch.full((8,), 1.5, dtype=dtype, device=platform.device_type) * 2).cpu()
        if found.dtype != dtype or not torch.equal(
            found.double(), torch.full((8,), 3.0, dtype=torch.float64)
        ):
            raise AssertionError(
                f"it claims {dtype}, and 1.5 * 2 is {found[0].item()} of {found.dtype} there"
            )


def check_streams(platform: Platform) -> str | None:
    """Each stream does its work in order, and whoever waits for it finds it done; returns why there is none."""
    streams = platform.streams
    if streams is None:
        return "it claims no streams"
    _check_current(streams)
    for told in _WAITS:
        for reader in (streams.Stream(), streams.current_stream()):
            try:
                _check_wait(platform, streams, told, reader)
            finally:
                platform.synchronize()
    return None


def _check_current(streams: Any) -> None:
    before, stream = streams.current_stream(), streams.Stream()
    with suppress(LookupError), streams.stream(stream):
        inside = streams.current_stream()
        raise LookupError
    if inside != stream:
        raise AssertionError("current_stream() within stream(s) is not s")
    if streams.current_stream() != before:
        raise AssertionError("stream(s) leaves another current stream behind than it found")


def _check_wait(platform: Platform, streams: Any, told: str, reader: Any) -> None:
    """Queue work that takes a while on a stream, and read what it writes on another one that waits."""
    stream, device = streams.Stream(), platform.device_type
    size = min(_LARGEST, platform.memory().free // 32)
    x, y = torch.zeros(size, device=device), torch.zeros(size, device=device)
    platform.synchronize()
    with streams.stream(stream):
        for _ in range(_DOUBLINGS):
            x.mul_(2).add_(1)
    _WAITS[told](platform, stream, streams.Event(), reader)
    with streams.stream(reader):
        y.copy_(x)
    reader.synchronize()
    wrong = int((y != 2**_DOUBLINGS - 1).sum())
    if wrong:
        raise AssertionError(
            f"after {told} {wrong} of {size} numbers are not yet what the stream was to write"
        )
    if not stream.query():
        raise AssertionError(f"after {told} query() of the stream says that its work is not done")


def _by_event(platform: Platform, stream: Any, event: Any, reader: Any) -> None:
    stream.record_event(event)
    event.synchronize()
    if not event.query():
        raise AssertionError(
            "after synchronize() of an event its query() says that it has not happened"
        )


def _for_event(platform: Platform, stream: Any, event: Any, reader: Any) -> None:
    event.record(stream)
    reader.wait_event(event)


_WAITS: Mapping[str, Callable[[Platform, Any, Any, Any], None]] = {
    "synchronize() of the stream": lambda platform, stream, event, reader: stream.synchronize(),
    "synchronize() of the platform": lambda platform, stream, event, reader: platform.synchronize(),
    "synchronize() of an event": _by_event,
    "wait_stream() of the reader": lambda platform, stream, event, reader: reader.wait_stream(
        stream
    ),
    "wait_event() of the reader": _for_event,
}
"""Ways to wait for a stream: for the host, or for the work of a stream that is to read."""
