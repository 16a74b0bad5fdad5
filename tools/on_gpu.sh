#!/usr/bin/env bash
# Prove what runs on a GPU, within eight minutes: tools/on_gpu.sh OUT [OPTIONS]; CONTRIBUTING.md.
# It needs this checkout, build/gpu-bundle (make gpu-bundle) and a Python with torch: PYTHON, or python3.
set -euo pipefail
export ON_GPU_STARTED=${ON_GPU_STARTED:-$(date +%s.%N)}  # the limit of the whole run begins here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH=tools${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m on_gpu "$@"
