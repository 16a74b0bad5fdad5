"""Choosing by hand, and by conditions that a replacement states."""

from __future__ import annotations

import opgraft
from opgraft import OpgraftConfig, set_config


def test_native_is_a_choice_that_no_other_setting_overrules(scale, fast_scale, monkeypatch) -> None:
    """Chosen as native, an op has its own class and its native definition, though it is replaced and has a kernel."""
    scale.register_oot(fast_scale)
    with set_config(OpgraftConfig(providers="scale=native"), origin="a block"):
        op = scale()
    assert op.op_class is scale
    assert str(op.binding.kernel.winner) == "Scale.forward_native"
    assert op.decision.reason.count("providers asks for 'native'") == 2
    assert op.decision.setting == "providers is set by a block, which outranks OPGRAFT_PROVIDERS: change it there"
    monkeypatch.setattr(scale, "enabled", classmethod(lambda cls: True))
    with set_config(OpgraftConfig(providers="scale=native")):
        opgraft.reset()
        assert str(scale().binding.kernel.winner) == "Scale.forward_native"
    assert str(scale().binding.kernel.winner) == "Scale.forward_cpu"
