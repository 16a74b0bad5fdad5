"""Write o200k_base.tiktoken, the vocabulary of gpt-oss, from the npm package js-tiktoken.

openai-harmony takes this file alone: it compares the SHA-256 with one in its code.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "js-tiktoken@1.0.21"
MEMBER = "package/dist/ranks/o200k_base.js"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def vocabulary(source: str) -> str:
    """Return the lines of a vocabulary: each token in base 64, and the rank.

    Args:
        source: the module of the package. Each line of its ranks has a mark, the rank of the first
            token, and tokens.
    """
    found = re.search(r'"?bpe_ranks"?\s*:\s*"((?:[^"\\]|\\.)*)"', source)
    if found is None:
        raise SystemExit(f"{MEMBER} of {PACKAGE} has no ranks: its form has changed")
    written = []
    for line in found[1].replace("\\n", "\n").splitlines():
        _, first, *tokens = line.split(" ")
        written += [f"{token} {rank}\n" for rank, token in enumerate(tokens, int(first))]
    return "".join(written)


def main(file: Path) -> None:
    """Write the vocabulary to a file, unless the SHA-256 is another one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as package:
            member = package.extractfile(MEMBER)
            if member is None:
                raise SystemExit(f"{PACKAGE} has no {MEMBER}")
            content = vocabulary(member.read().decode()).encode()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise SystemExit(f"the vocabulary has the SHA-256 {found}, expected {SHA256}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
