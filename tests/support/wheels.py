"""Wheels that tests write, and the installers of this machine that install them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.locks import PLUGIN

INSTALLED = Path("lib") / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def row_of(path: str, content: bytes) -> str:
    """The row of a file in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    *,
    points: str = "",
    requires: Sequence[str] = (),
    version: str = "1.0",
) -> Path:
    """Write a wheel: its files, and metadata as build tools write it."""
    stem = f"{name.replace('-', '_')}-{version}"
    needed = "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
    info = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": points,
        "licenses/LICENSE": "Do with it what you like.\n",
    }
    content = {path.replace("DATA", f"{stem}.data"): text for path, text in files.items()}
    content |= {f"{stem}.dist-info/{path}": text for path, text in info.items()}
    record = "".join(row_of(path, text.encode()) for path, text in content.items())
    content[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_in_wheel, text in content.items():
            archive.writestr(name_in_wheel, text)
    return path


def plugin_and_dependency(folder: Path) -> list[Path]:
    """Write the wheels of a plugin with every kind of file, and of a distribution that it needs."""
    files = {
        "acme_probe/__init__.py": PLUGIN,
        "acme_probe/helper.py": "HELP = 1\n",
        "acme_probe/other.py": "HELP = 2\n",
        "acme_probe/table.json": "{}",
        "acme_probe/_native.so": "machine code",
        "acme_top.py": "",
        "Scripts/acme_part.py": "",
        "DATA/purelib/acme_extra.py": "",
        "DATA/scripts/acme-script": "#!python\nprint('acme')\n",
        "DATA/data/share/acme/readme.txt": "Read me.\n",
        "DATA/data/share/acme/example.py": "import acme_probe\n",
        "DATA/data/etc/acme.conf": "switch = on\n",
        "DATA/data/lib/libacme.so.2": "machine code",
        "DATA/data/man/man1/acme.1": "Read me.\n",
        "DATA/headers/acme.h": "int acme(void);\n",
    }
    points = (
        "[console_scripts]\nacme-tool = acme_top:main\n\n[opgraft.plugins]\nacme = acme_probe\n"
    )
    runtime = {"acme_runtime/__init__.py": "", "acme_runtime/core.py": "VALUE = 1\n"}
    return [
        wheel(
            folder, "acme-probe", files, points=points, requires=["opgraft", "acme-runtime[fast]"]
        ),
        wheel(folder, "acme-runtime", runtime, requires=["acme-fast; extra == 'fast'"]),
    ]


def pip(*options: str) -> Callable[[Path, Sequence[Path]], Path]:
    """The pip of the tests, with options; ``FOLDER`` stands for the folder."""

    def install(folder: Path, wheels: Sequence[Path]) -> Path:
        given = [option.replace("FOLDER", str(folder)) for option in options]
        run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *given],
            wheels,
        )
        return folder / INSTALLED if (folder / INSTALLED).is_dir() else folder

    return install


def pip_into_environment(folder: Path, wheels: Sequence[Path]) -> Path:
    """The pip of the tests, into a virtual environment."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ())
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    run([*command, "-q", "--no-deps", "--no-index"], wheels)
    return folder / INSTALLED


def uv(*options: str) -> Callable[[Path, Sequence[Path]], Path]:
    """uv, with options as for pip."""

    def install(folder: Path, wheels: Sequence[Path]) -> Path:
        given = [option.replace("FOLDER", str(folder)) for option in options]
        command = [
            str(uv_program()),
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--offline",
        ]
        run([*command, "--python", sys.executable, *given], wheels)
        return folder / INSTALLED if (folder / INSTALLED).is_dir() else folder

    return install


def uv_program() -> Path | None:
    """The program of uv, from its wheel or the system."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return Path(found) if found else None


def run(command: Sequence[str], wheels: Sequence[Path]) -> None:
    subprocess.run([*command, *map(str, wheels)], check=True, capture_output=True)


INSTALLERS: dict[str, Callable[[Path, Sequence[Path]], Path]] = {
    "pip, a virtual environment": pip_into_environment,
    "pip, a target": pip("--target", "FOLDER"),
    "pip, a prefix, without bytecode": pip("--prefix", "FOLDER", "--no-compile"),
    "uv, a target": uv("--target", "FOLDER"),
    "uv, a prefix, with bytecode": uv("--prefix", "FOLDER", "--compile-bytecode"),
}
