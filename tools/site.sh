#!/usr/bin/env bash
# Install opgraft of this checkout, and reference plugins, into a folder for another Python's PYTHONPATH, whose own
# packages stay as they are: tools/site.sh FOLDER PLUGIN...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(realpath -m "$1")
shift
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$folder" --upgrade)

# What opgraft needs and few environments with torch have.
"${pip[@]}" --constraint constraints.txt pluggy importlib-metadata
# From copies: pip would leave build folders in the source tree.
cp -R core platforms plugins pyproject.toml setup.py README.md LICENSE "$copy"
"${pip[@]}" --no-deps --no-build-isolation "$copy"
for plugin in "$@"; do
    cp -R "reference_plugins/$plugin" "$copy/$plugin"
    "${pip[@]}" --no-deps --no-build-isolation "$copy/$plugin"
done
