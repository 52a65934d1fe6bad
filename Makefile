# Slipway. `make run` serves the sample model on port 8080. CI runs the stages of .ci/run.

# The first of these programs that is Python 3.11, 3.12 or 3.13 creates the environment.
PYTHON ?= python3.11 python3.12 python3.13 python3
VENV ?= .venv
BIN := $(VENV)/bin
# The build of vLLM: with CUDA if the machine has an NVIDIA GPU, else for CPUs.
DEVICE ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
# The address for `make run`. Shells and conda set a variable HOST, which is ignored.
HOST = 127.0.0.1
PORT ?= 8080
# The number of processes that run tests in parallel. With 0, pytest's own process runs all tests.
WORKERS ?= 2
# The numbers of processes for unit tests and for slow tests. Both kinds of tests often wait.
UNIT_WORKERS ?= 3
SLOW_WORKERS ?= 2
# `make pythons` runs tests with these versions of Python. uv downloads a version if it does not find it.
OTHER_PYTHONS ?= 3.12 3.13
ROOMS := djl_python engines handlers container deploy replay slipway benchmarks tests
UNIT_ONLY := -m "not live and not image and not gpu and not slow"
UNIT := tests --ignore tests/live $(UNIT_ONLY)
UNIT_AND_SLOW := tests --ignore tests/live -m "not live and not image and not gpu and not long"
# Tests of `make unit` that `make pythons` leaves out. Together they take minutes. Most of them start programs, load models or
# imitate AWS, so they show little about another Python.
LEFT_OUT := container/image container/models container/sources container/test_model_management.py \
	container/test_server.py deploy/sagemaker engines/memory handlers/parsing/test_json_limits.py replay slipway test_next_vllm.py
# The duration and the random seed of `chaos`, `fuzz`, `soak`, `overload` and `deaths`.
MINUTES ?= 2
SEED ?= 1
# The number of times that `soak` kills the engine, and loads another model and another adapter.
CHANGES ?= 0
# PyTorch's public index of CPU wheels, for machines on which pip does not find torch's CPU build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := $(BIN)/uv pip compile --quiet --no-emit-index-url --no-emit-find-links --python-platform x86_64-manylinux_2_28 \
	--custom-compile-command "make lock, for Python 3.11, 3.12 and 3.13" --override requirements/overrides.in

.PHONY: help install install-dev run test lint unit coverage pythons other-pythons live slow live-and-slow long chaos fuzz soak \
	overload deaths engine-arguments next-vllm \
	bench bench-front-end gpu-proof gpu-needs next-vllm-needs image image-test lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

install: $(VENV)/.installed-$(DEVICE) ## Install the packages for serving

install-dev: $(VENV)/.installed-dev ## Install the packages for serving and for the checks

$(VENV)/bin/python:
	@for python in $(PYTHON); do \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
		echo $$python -m venv $(VENV); $$python -m venv $(VENV) && exit; rm -f $(VENV)/bin/python; exit 1; \
	done; echo "Slipway needs Python 3.11, 3.12 or 3.13; none of these is one: $(PYTHON) (give one with make PYTHON=...)" >&2; exit 1

$(VENV)/.installed-%: requirements/%.txt requirements/install.sh pyproject.toml | $(VENV)/bin/python
	@TORCH_INDEX=$(TORCH_INDEX) sh requirements/install.sh $(BIN)/python $*
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(DEVICE)

# vLLM uses FlashInfer's sampler. It is compiled at the first start, with ninja and the toolkit in CUDA_HOME.
ifeq ($(DEVICE),gpu)
run live slow live-and-slow bench bench-front-end gpu-proof: export CUDA_HOME ?= $(abspath $(VENV))/cuda
run live slow live-and-slow bench bench-front-end gpu-proof: export PATH := $(abspath $(BIN)):$(PATH)
endif

# exec replaces the recipe's shell by the server, because make passes signals to the process of the recipe.
run: install ## Serve the sample model on port 8080 (HOST, PORT), also as a SageMaker endpoint
	HF_MODEL_ID=$$($(BIN)/slipway sample-model) && export HF_MODEL_ID && \
		exec $(BIN)/slipway serve --model-dir . --model-name model --host $(HOST) --port $(PORT) \
		--local-endpoint my-endpoint

test: ## Run the checks for daily work (CI also runs slow and image-test: .ci/run)
	@# lint runs in parallel, because unit tests often wait.
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line lint unit
	$(MAKE) --no-print-directory live

lint: install-dev ## Check style, types and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/hadolint --config .hadolint.yaml container/image/Dockerfile.cpu container/image/Dockerfile.gpu

unit: install-dev ## Run tests that start no engine
	$(BIN)/python -m pytest $(UNIT) -n $(UNIT_WORKERS)

coverage: install-dev ## Run all tests that start no engine, and show the share of the branches that they run in each room
	$(BIN)/python -m pytest $(UNIT_AND_SLOW) -n $(UNIT_WORKERS) --cov --cov-report=
	@for room in $(ROOMS); do \
		printf '%-12s %s %%\n' $$room $$($(BIN)/coverage report --include="$$room/*" --format=total --precision=1); done

pythons: $(OTHER_PYTHONS:%=python-%) ## Compile all code with Python 3.12 and 3.13, and run most unit tests

# Python 3.12 warns of invalid escapes in strings, and these warnings are errors here. dev.txt does not contain torch, so tests
# that need torch are skipped. Tests that look for reference cycles (`no_cycle`) are left out.
python-%: build/python%/.installed
	build/python$*/bin/python -W error::SyntaxWarning -m compileall -q -f $(ROOMS) examples slipway_torchvision.py
	build/python$*/bin/python -m pytest tests/contracts tests/unit $(LEFT_OUT:%=--ignore tests/unit/%) -k "not no_cycle" $(UNIT_ONLY) \
		-n $(WORKERS) --hypothesis-profile=few

# Creates environments of the other Pythons. CI does this first: a machine may lack a Python and be unable to download it.
other-pythons: $(OTHER_PYTHONS:%=build/python%/bin/python)

.PRECIOUS: build/python%/bin/python build/python%/.installed
# With PYENV_VERSION, pyenv makes this version of Python available to uv.
build/python%/bin/python: export PYENV_VERSION = $*
build/python%/bin/python: | install-dev
	$(BIN)/uv venv --quiet --clear --seed --python $* build/python$*

build/python%/.installed: requirements/dev.txt pyproject.toml | build/python%/bin/python
	$(BIN)/uv pip install --quiet --python build/python$* --no-deps --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python build/python$* --no-deps --editable .
	touch $@

live: install-dev ## Run tests with the real engine and real clients
	$(BIN)/python -m pytest tests/chaos tests/live -n $(WORKERS) -m "live and not slow and not long"

slow: install-dev ## Run the tests that `make test` leaves to CI: deaths of engines, Ray, the console, rare modes
	$(BIN)/python -m pytest tests/unit -n $(SLOW_WORKERS) -m slow
	$(BIN)/python -m pytest tests/chaos tests/live -n $(SLOW_WORKERS) -m "slow and not long"

live-and-slow: install-dev ## Run all tests with an engine in one run, as CI does: a server that several need starts once
	$(BIN)/python -m pytest tests/chaos tests/live -n $(SLOW_WORKERS) -m "live and not long"

long: install-dev ## Run the tests that CI leaves out: replicas on Ray, and the programs below
	$(BIN)/python -m pytest tests/live -m long

chaos: install-dev ## Send random faults to the real server (MINUTES, SEED; ANSWERS=N: until N answers)
	$(BIN)/python -m tests.chaos $(if $(ANSWERS),--answers $(ANSWERS) --pause 5,--minutes $(MINUTES)) --seed $(SEED)

fuzz: install-dev ## Send wrong bodies, and requests to every route of the API description (MINUTES, SEED)
	$(BIN)/python -m tests.chaos.fuzz --minutes $(MINUTES) --seed $(SEED)

soak: install-dev ## Run a steady load, and record the memory and files of the processes: build/soak.json (MINUTES, SEED, CHANGES)
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED) --changes $(CHANGES)

overload: install-dev ## Run ten times as many clients as can be served (MINUTES)
	$(BIN)/python -m tests.chaos.overload --minutes $(MINUTES)

deaths: install-dev ## Kill engines under calls, and compare the answers (SEED; ANSWERS=N: until N have outlived an engine)
	$(BIN)/python -m tests.chaos.deaths $(if $(ANSWERS),--answers $(ANSWERS)) --seed $(SEED)

engine-arguments: install-dev ## Try all arguments of vLLM, for docs/engine_arguments.md (ARGS="max_logprobs block_size")
	$(BIN)/python -m tests.engine_arguments $(ARGS)

next-vllm: $(if $(VERSION),,next-vllm-needs) install-dev ## List what has moved in another release of vLLM, without installing it (VERSION=0.33.0)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest build/next-vllm vllm==$(VERSION)
	$(BIN)/python -m tests.next_vllm build/next-vllm/vllm-$(VERSION)-*.whl

next-vllm-needs:
	$(error VERSION is not set, for example VERSION=0.33.0)

bench: install-dev ## Compare with vLLM's own server and with bare AsyncLLM (ARGS=...)
	$(BIN)/python -m benchmarks $(ARGS)

bench-front-end: install-dev ## Compare front ends and numbers of copies on scripted engines, with plots in build/bench (RUST=FILE, TRITON=DIR, ARGS=...)
	mkdir -p build/bench
	$(BIN)/python -m benchmarks --workload front-end --samples-file build/bench/samples.json --plot-dir build/bench \
		$(if $(RUST),--rust $(RUST)) $(if $(TRITON),--triton $(TRITON)) $(ARGS)
	$(BIN)/python -m benchmarks --workload copies --rounds 2 --seconds 2

gpu-proof: gpu-needs install-dev ## Test on this machine's NVIDIA GPU, then compare with vLLM's own server there
	PYTHON=$(BIN)/python sh tests/gpu/proof.sh

# Checks the machine before the installation, which takes minutes.
gpu-needs:
	@for python in $(BIN)/python $(PYTHON); do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then break; fi; \
	done; $$python tests/gpu/needs.py

image: ## Build the container image slipway:cpu or slipway:gpu (needs docker or podman)
	sh container/image/build.sh $(DEVICE) slipway:$(DEVICE)

image-test: install-dev ## Build both images, run them and send requests (IMAGE=...: test this image)
	sh tests/image/packages.sh
	if $(BIN)/python -m tests.image.container_engine; then $(BIN)/python -m pytest tests/image -m image; fi

lock: install-dev ## Renew requirements/*.txt
	$(MAKE) --no-print-directory lock-cpu EXTRA="--extra cpu --override requirements/cpu-overrides.in --find-links $(TORCH_INDEX)/torch/"
	$(MAKE) --no-print-directory lock-gpu EXTRA="--extra gpu"
	$(MAKE) --no-print-directory lock-dev EXTRA="--override requirements/dev-overrides.in"

# Locks the packages for Python 3.11. If Python 3.12 or 3.13 needs other packages, the rule fails and shows the difference.
# The lock has the hashes of all files of a version, for all Pythons.
lock-%:
	$(LOCK) $(EXTRA) --generate-hashes --python-version 3.11 pyproject.toml requirements/$*.in -o requirements/$*.txt
	@for python in 3.12 3.13; do \
		$(LOCK) $(EXTRA) --python-version $$python --constraint requirements/$*.txt --no-annotate --no-header \
			pyproject.toml requirements/$*.in >build.lock && sed -n 's/^\([^ #]*\).*/\1/p' requirements/$*.txt | grep . | \
			diff - build.lock || exit 1; \
	done; rm build.lock

clean: ## Remove the files that the checks leave behind
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage build
