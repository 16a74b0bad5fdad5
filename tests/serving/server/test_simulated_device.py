"""The server on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from opgraft.compat.python_device import why_not
from opgraft.config.environment import SIMULATED_DEVICE
from support.servers import Server, serving
from support.simulated_device import FORMS


def _completion(server: Server) -> object:
    asked = {"model": server.model, "prompt": "Hello there", "max_tokens": 6, "temperature": 0}
    answer = server.post("/v1/completions", **asked)
    return answer.raise_for_status().json()["choices"]


@pytest.mark.skipif(bool(why_not()), reason="this torch takes a device's guard in C++ only")
@pytest.mark.parametrize("options", FORMS, ids=" ".join)
def test_the_server_answers_from_it(
    options: tuple[str, ...], server: Server, checkpoint: Path
) -> None:
    """The answer is that of the CPU: alone, by two workers, compiled, both, and recorded."""
    with serving(checkpoint, *options, variables={SIMULATED_DEVICE: "default"}) as on_device:
        assert _completion(on_device) == _completion(server)
        assert any("simulated" in line for line in (*on_device.shown, *on_device.log))
