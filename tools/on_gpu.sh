#!/usr/bin/env bash
# Prove what runs on a GPU, within eight minutes: tools/on_gpu.sh OUT [OPTIONS]; docs/how-to/run-on-a-gpu.md.
# It needs this checkout, build/gpu-bundle (make gpu-bundle) and a Python with torch: PYTHON, or python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH=tools${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m on_gpu "$@"
