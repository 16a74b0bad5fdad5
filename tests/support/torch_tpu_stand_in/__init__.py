"""A stand-in for torch_tpu 0.2.0 with a simulated slice: each process is a chip, and gloo is what links the chips.

The platform for TPUs runs unchanged on it: ``installed`` puts ``runtime.py`` in a folder as the module ``torch_tpu``,
with its metadata, and ``spec.py`` as a platform whose probe finds chips.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
_FILES = {"runtime.py": "torch_tpu/__init__.py", "spec.py": "simulated_slice.py"}


def installed(folder: Path) -> Path:
    """Install the stand-in, for processes with this folder on ``PYTHONPATH``."""
    for source, name in _FILES.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((_HERE / source).read_text("utf-8"))
    info = folder / "torch_tpu-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\nRequires-Dist: opgraft\n"
    )
    (info / "entry_points.txt").write_text("[opgraft.platforms]\nslice = simulated_slice:SPEC\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in _FILES.values()))
    return folder
