"""Code in files: how it is compiled, and called by several threads at once."""

from __future__ import annotations

import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.compat.ahead_of_time import trusting_processor
from opgraft.ops.linear import packed as packed_linear
from support.packing import needs_onednn, use_tables
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*script_method.*"),
]


@needs_onednn
def test_threads_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model calls kernels in Python, a thread that waits for another lets it go on. No file is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = {name: {torch.float32: (packed_linear.RowRange(1, 1),)} for name in packed_linear.PACKED}
    use_tables(monkeypatch, rows, rows)
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(),
        torch.randn(4, 64),
    )
    opgraft.graft(model)
    compiled, expected = opgraft.compile(model, CompilationConfig(level=2), args=(x,)), model(x)
    assert not list(tmp_path.glob("opgraft-*"))
    failed = []

    def work() -> None:
        for _ in range(200):
            with torch.no_grad():
                if not torch.allclose(compiled(x), expected, atol=1e-4):
                    failed.append(1)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed


def test_instruction_sets_are_tried_where_code_for_them_fails() -> None:
    """First they are taken as the processor names them; what is known already, or was set, is left as it is."""
    import torch._inductor.config as config
    import torch._inductor.cpu_vec_isa as instruction_sets

    instruction_sets.valid_vec_isa_list.cache_clear()
    seen: list[object] = []

    def compile() -> int:
        seen.append(config.cpp.vec_isa_ok)
        instruction_sets.valid_vec_isa_list.__wrapped__()
        if len(seen) == 1:
            raise ValueError("planted")
        return len(seen)

    assert trusting_processor(compile) == 2
    with config.patch({"cpp.vec_isa_ok": False}):
        assert trusting_processor(compile) == 3
    assert trusting_processor(compile) == 4
    instruction_sets.valid_vec_isa_list()
    assert trusting_processor(compile) == 5
    assert seen == [True, None, False, True, None]


def test_packages_have_nothing_for_debuggers(tmp_path: Path) -> None:
    """Which would be two thirds of what each start reads."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    opgraft.compile(
        model, CompilationConfig(level=2, cache=True, cache_folder=str(tmp_path)), args=(x,)
    )
    (package,) = tmp_path.glob("*/code.pt2")
    with zipfile.ZipFile(package) as archive:
        (code,) = (archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    assert b".text\0" in code
    assert b".debug_info\0" not in code
