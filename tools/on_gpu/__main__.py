"""Run the parts and write their report: ``python -m on_gpu OUT``; ``tools/on_gpu.sh`` calls it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from on_gpu.machine import facts
from on_gpu.report import Report, is_fine, summary
from on_gpu.runner import Limits, Part, Result, Runner
from on_gpu.table import PARTS

REPOSITORY = Path(__file__).parents[2]
BUNDLE = REPOSITORY / "build" / "gpu-bundle"


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="on-gpu-", dir=options.scratch))
    try:
        results = _run(options, scratch)
    finally:
        _delete(scratch)
    print(f"\n{summary(results)}\nReport: {options.out / 'table.md'}")
    sys.exit(0 if is_fine(results) else 1)


def _delete(folder: Path) -> None:
    """Delete a folder in a process of its own, as caches of compilers may take seconds to delete."""
    command = ["rm", "-rf", str(folder)]
    subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def _run(options: argparse.Namespace, scratch: Path) -> list[Result]:
    site = unpacked(options.bundle / "wheels", scratch / "site")
    sys.path.insert(0, str(site))  # for the version of opgraft
    report = Report(options.out, facts())

    def tell(results: Sequence[Result]) -> None:
        report.write(results)

    limits = Limits(options.seconds, options.reserve, _started())
    runner = Runner(scratch, options.bundle, limits, environment(site, scratch), tell)
    patient = [replace(part, seconds=part.seconds * options.patience) for part in options.parts]
    return runner.run(patient)


def _started() -> float:
    """Return when ``tools/on_gpu.sh`` began, by ``time.monotonic``; without the script, now."""
    began = float(os.environ.get("ON_GPU_STARTED") or time.time())
    return time.monotonic() - max(0.0, time.time() - began)


def unpacked(wheels: Path, site: Path) -> Path:
    """Unpack wheels into a folder for ``PYTHONPATH``: nothing is installed into the environment of the machine."""
    site.mkdir()
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def environment(site: Path, scratch: Path) -> dict[str, str]:
    """Return the variables of the parts: packages of the bundle first, every cache below ``scratch``, no network."""
    path = [str(site), str(REPOSITORY / "tools")]
    path += [given for given in [os.environ.get("PYTHONPATH")] if given]
    caches = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "XDG_CACHE_HOME": "cache",
        "HF_HOME": "huggingface",
    }
    return {
        **os.environ,
        **{name: str(scratch / "caches" / folder) for name, folder in caches.items()},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/on_gpu.sh", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the report")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="what make gpu-bundle made")
    parser.add_argument("--parts", type=_named, default=PARTS, help="names, joined by commas")
    parser.add_argument("--seconds", type=float, default=480, help="for the whole run")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of the limit of each part"
    )
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument(
        "--reserve", type=int, default=1 << 30, help="bytes of the disk that stay free"
    )
    return parser.parse_args()


def _named(names: str) -> Sequence[Part]:
    """Return the parts of these names, in the order of the table."""
    known = {part.name: part for part in PARTS}
    unknown = set(names.split(",")) - known.keys()
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no part {sorted(unknown)[0]!r}; there are {', '.join(known)}"
        )
    return [part for part in PARTS if part.name in names.split(",")]


if __name__ == "__main__":
    main()
