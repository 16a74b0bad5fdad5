"""Checks of a plugin as a whole, of its platform, and of its parts for the engine.

Each check raises ``AssertionError`` as its failure, like those of ``checks``. A check that returns
a text does not apply, for that reason.
"""

from __future__ import annotations

import base64
import functools
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import ChildError
from opgraft.machine.child import run_child
from opgraft.ops.spec import tensors
from opgraft.platform import DeviceMemory, Platform, effective_chain
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import PLUGIN_GROUP, discover, names_of
from opgraft.plugins.host import load_plugins
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state, reset
from opgraft.testing import diagnosis
from opgraft.testing.contracts import check_attention_layout
from opgraft.testing.part_contracts import check_sampler, check_step_graph
from opgraft.testing.subjects import Trial, claimed_dtypes, subjects_of

Result = TypeVar("Result")

CONTRACTS: Mapping[str, Callable[[], None]] = {
    "attention": lambda: check_attention_layout(device=current_platform().device_type),
    "sampler": lambda: check_sampler(device=current_platform().device_type),
    "step_graph": lambda: check_step_graph(device=current_platform().device_type),
}
"""By op or class, the contracts that need neither a model nor other parts."""

_SPAWNED = """
import base64, io, torch
from opgraft.config import config_from_fields, parse_text, set_config
from opgraft.ops.spec import tensors
from opgraft.testing.plugin_checks import kernels_of
import opgraft
wrong = []
given = {name: parse_text(name, text) for name, text in data["settings"].items()}
settings = config_from_fields(given)
with set_config(settings), torch.no_grad():
    opgraft.load_plugins()
    sent = torch.load(io.BytesIO(base64.b64decode(data["ops"])), weights_only=False)
    for name, op, kernels, inputs, expected in sent:
        if kernels_of(op) != kernels:
            wrong.append(f"{name}, which runs {kernels_of(op)}, here {kernels}")
        for found, wanted in zip(tensors(op(*inputs)), expected, strict=True):
            found, wanted = found.cpu().double(), wanted.cpu().double()
            if not torch.allclose(found, wanted, 1e-2, 1e-2, equal_nan=True):
                wrong.append(name)
with open(reply_to, "w", closefd=False) as pipe:
    pipe.write(", ".join(wrong))
"""
_NO_PLUGIN = "it is a platform without a plugin, which activates nothing"
_DOUBLINGS, _LARGEST = 8, 1 << 23
"""Pairs of kernels in a queue, and the most numbers that a kernel writes."""

# In a new process torch is imported first, and a plugin may have a runtime of its own.
_PATIENCE = 120.0  # seconds


def check_findings(plugin: str) -> None:
    """``opgraft plugins doctor`` finds nothing wrong with the plugin."""
    provider, names, _ = names_of(plugin)
    found = [finding for name in names for finding in findings_of(host_state().plugins[name])]
    for finding in diagnosis.diagnose():
        if finding.provider and finding.provider.name == provider:
            found.append(finding)
    if found:
        raise AssertionError("; ".join(map(str, found)))


def check_isolation(plugin: str) -> str | None:
    """A reset takes back everything that the plugin activated; loading again repeats all."""
    if not names_of(plugin)[1]:
        return _NO_PLUGIN
    look = functools.partial(_activated, plugin)
    before = look()
    admitted = _admitted()
    # Without any plugin first: leftovers would look like a second activation.
    left = _loaded_anew((), look)
    after = _loaded_anew(admitted, look)
    if left:
        raise AssertionError(f"without the plugin there is still {', '.join(left)}")
    if before != after:
        raise AssertionError(
            f"loaded again it replaces {', '.join(after)}, at first {', '.join(before)}"
        )
    return None


def check_together(plugin: str) -> str | None:
    """Beside all other plugins for this platform the plugin replaces the same, without conflict."""
    own = names_of(plugin)[1]
    if not own:
        return _NO_PLUGIN
    others = _others_here(own)
    if not others:
        return "no other plugin is installed that may run here"
    before = _activated(plugin)
    admitted = _admitted()
    look = functools.partial(_activated, plugin)
    try:
        after, conflicts = _loaded_anew(
            (*own, *others), lambda: (look(), list(diagnosis.conflicts()))
        )
    finally:
        # Another plugin may keep the host from loading.
        _loaded_anew(admitted, look)
    rivals = list(map(str, conflicts))
    company = f"together with {', '.join(others)}"
    if rivals:
        raise AssertionError(f"{company}: {'; '.join(rivals)}")
    if before != after:
        raise AssertionError(f"{company} it replaces {', '.join(after)}, alone {', '.join(before)}")
    return None


def _others_here(own: Sequence[str]) -> list[str]:
    """List the other installed plugins for this platform that may be loaded."""
    name = current_platform().name
    here = []
    for offer in discover().of_group(PLUGIN_GROUP):
        platforms = names_of(offer.name)[2]
        if offer.name not in own and (not platforms or name in platforms):
            here.append(offer)
    with set_config(OpgraftConfig(plugins=tuple(offer.name for offer in here))):
        settings = host_state().settings()
        return sorted(offer.name for offer in here if objection(offer, settings) is None)


def _admitted() -> Sequence[str]:
    """Return the plugins that the settings admitted when plugins were loaded."""
    loaded_with = host_state().loading.config
    return (loaded_with.plugins if loaded_with else None) or ()


def _loaded_anew(admitted: Sequence[str], look: Callable[[], Result]) -> Result:
    """Load plugins anew, and return the result of ``look`` in the scope that admits them."""
    reset()
    with set_config(OpgraftConfig(plugins=tuple(admitted))):
        load_plugins()
        return look()


def _activated(plugin: str) -> list[str]:
    """List the active replacements of a plugin, as sentences."""
    names = names_of(plugin)[1]
    own = [each for each in host_state().active if each.plugin in names]
    return sorted(f"{each.asked_for} by {each.cls.__qualname__}" for each in own)


def check_spawn(plugin: str) -> str | None:
    """Ops that are sent to a new process compute there the same as here."""
    # One variant is enough: the question is whether an op arrives.
    sent = [
        _computed(Trial(subject, subject.built[0]))
        for subject in subjects_of(plugin)
        if subject.built
    ]
    if not sent:
        return "no module of it stands for a form, so there is no op to send"
    # Plain pickle has no tensors of some dtypes.
    packed = io.BytesIO()
    torch.save(sent, packed)
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
    """Name the kernels of a module and of the ops within."""
    ops = [part for part in op.modules() if isinstance(part, CustomOp)]
    return ", ".join(str(part.decision.chosen) for part in ops)


def _computed(trial: Trial) -> tuple[str, Any, str, Sequence[Any], list[torch.Tensor]]:
    op, inputs = trial.build_small()
    with torch.no_grad():
        results = tensors(op(*inputs))
    return trial.subject.name, op, kernels_of(op), inputs, results


def check_devices(platform: Platform) -> None:
    """The platform counts its devices and tells their capability, and torch knows the type."""
    count = platform.device_count()
    if type(count) is not int or count < 1:
        raise AssertionError(
            f"device_count() returned {count!r}: where the platform is available it is at least 1"
        )
    torch.empty(1, device=platform.device_type)
    effective_chain(platform)
    for index in range(count):
        dtypes = platform.capability(index).dtypes
        if not dtypes or not all(map(_is_floating, dtypes)):
            raise AssertionError(
                f"capability({index}).dtypes is {dtypes!r}: it is to list floating-point dtypes"
            )


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def check_memory(platform: Platform) -> None:
    """The platform tells the memory of each device in bytes; no more is free than there is."""
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
    """The same seed gives the same random numbers again; another seed gives other numbers."""
    drawn = []
    # A generator that ignores seeds fails with one of the two pairs.
    for seed in (7, 7, 8):
        platform.manual_seed(seed)
        drawn.append(torch.rand(64, device=platform.device_type).cpu())
    first, again, other = drawn
    if not torch.equal(first, again):
        raise AssertionError(
            "manual_seed(7) twice was followed by other random numbers the second time"
        )
    if torch.equal(first, other):
        raise AssertionError(
            "manual_seed(7) and manual_seed(8) were followed by the same random numbers"
        )


def check_synchronisation(platform: Platform) -> None:
    """Queued work is done after ``synchronize``; without queued work the call returns at once."""
    # Twice, as nothing is queued the second time.
    for index in range(platform.device_count()):
        platform.synchronize(index)
        platform.synchronize(index)
    # Each product needs the one before, so that a missing wait shows.
    x = torch.ones(64, 64, device=platform.device_type)
    for _ in range(8):
        x = (x @ x) / 64
    platform.synchronize()
    if not torch.equal(x.cpu(), torch.ones(64, 64)):
        raise AssertionError(
            "after synchronize() a chain of products has other numbers than those it computes"
        )


def check_dtypes(platform: Platform) -> None:
    """The device can compute with each dtype that the platform claims."""
    expected = torch.full((8,), 3.0, dtype=torch.float64)
    for dtype in claimed_dtypes(platform):
        x = torch.full((8,), 1.5, dtype=dtype, device=platform.device_type)
        found = (x * 2).cpu()
        if found.dtype != dtype or not torch.equal(found.double(), expected):
            raise AssertionError(
                f"it claims {dtype}, and 1.5 * 2 is {found[0].item()} of {found.dtype} there"
            )


def check_streams(platform: Platform) -> str | None:
    """Each stream does its work in order, and all ways to wait for a stream find the work done."""
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
    """A scope selects the current stream, and restores the former one even after an exception."""
    before = streams.current_stream()
    stream = streams.Stream()
    # A scope must restore the stream after an exception, too.
    with suppress(LookupError), streams.stream(stream):
        inside = streams.current_stream()
        raise LookupError
    if inside != stream:
        raise AssertionError("current_stream() within stream(s) is not s")
    if streams.current_stream() != before:
        raise AssertionError("stream(s) leaves another current stream behind than it found")


def _check_wait(platform: Platform, streams: Any, told: str, reader: Any) -> None:
    """Queue slow work on a stream, and read the numbers on another stream that waits."""
    stream = streams.Stream()
    device = platform.device_type
    # Large tensors take long enough for a missing wait to show.
    size = min(_LARGEST, platform.memory().free // 32)
    x = torch.zeros(size, device=device)
    y = torch.zeros(size, device=device)
    platform.synchronize()
    with streams.stream(stream):
        for _ in range(_DOUBLINGS):
            x.mul_(2).add_(1)
    wait = _WAITS[told]
    wait(platform, stream, streams.Event(), reader)
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
"""Ways to wait for a stream: in the host, or in another stream, the reader."""
