#!/usr/bin/env bash
# Print the Python of an engine that is compared with: benchmarks/peers/environment.sh NAME, of a file NAME.txt beside it
#
# Its environment lies in the user's cache, keyed by its pins, because it takes gigabytes or ten minutes to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

name=$1
python=${PYTHON:-python3.11}
key=$({ "$python" -VV; cat "$name.txt"; } | sha256sum | cut -c1-12)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/opgraft/envs/$name-$key
mkdir -p "$environment"
exec 9>"$environment.lock"
flock 9

if [ ! -f "$environment/complete" ]; then
    echo "==> Building the environment of $name in $environment" >&2
    "$python" -m venv --clear "$environment"
    # --no-deps: the pins are all there is, and vLLM requires three packages that do not fit torch for CPUs.
    CMAKE_ARGS=-DGGML_NATIVE=ON "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-deps --requirement "$name.txt" >&2
    touch "$environment/complete"
fi
echo "$environment/bin/python"
