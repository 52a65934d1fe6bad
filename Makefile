# Slipway. `make run` serves the sample model on port 8080; `make test` and `make image-test` are what CI runs.

# The first of these that is Python 3.11, 3.12 or 3.13 makes the environment.
PYTHON ?= python3.11 python3.12 python3.13 python3
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM with CUDA where there is an NVIDIA GPU, else its CPU build.
DEVICE ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
# Of `run`. Shells and conda have a variable of this name, which does not count.
HOST = 127.0.0.1
PORT ?= 8080
# Processes that run tests side by side; 0: none but make's own.
WORKERS ?= 2
# Of `chaos`, `fuzz`, `soak` and `overload`.
MINUTES ?= 2
SEED ?= 1
# PyTorch's public index of CPU wheels, asked where pip does not find torch's CPU build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := $(BIN)/uv pip compile --quiet --no-emit-index-url --no-emit-find-links --python-platform x86_64-manylinux_2_28 \
	--custom-compile-command "make lock, for Python 3.11, 3.12 and 3.13" --override requirements/overrides.in

.PHONY: help install install-dev run test lint unit live long chaos fuzz soak overload engine-arguments bench \
	bench-front-end gpu-proof gpu-needs image image-test lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

install: $(VENV)/.installed-$(DEVICE) ## Install what serving needs

install-dev: $(VENV)/.installed-dev ## Install what the checks need as well

$(VENV)/bin/python:
	@for python in $(PYTHON); do \
		$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
		echo $$python -m venv $(VENV); $$python -m venv $(VENV) && exit; rm -f $(VENV)/bin/python; exit 1; \
	done; echo "Slipway needs Python 3.11, 3.12 or 3.13, and found none as: $(PYTHON) (name one with make PYTHON=...)" >&2; exit 1

$(VENV)/.installed-%: requirements/%.txt requirements/install.sh pyproject.toml | $(VENV)/bin/python
	@TORCH_INDEX=$(TORCH_INDEX) sh requirements/install.sh $(BIN)/python $*
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(DEVICE)

# vLLM's sampler is FlashInfer's, which compiles itself at the first start, with ninja and the toolkit that CUDA_HOME names.
ifeq ($(DEVICE),gpu)
run live bench bench-front-end gpu-proof: export CUDA_HOME ?= $(abspath $(VENV))/cuda
run live bench bench-front-end gpu-proof: export PATH := $(abspath $(BIN)):$(PATH)
endif

# exec: make hands a signal to its recipe's process, which has to be the server.
run: install ## Serve the sample model on port 8080 (HOST, PORT), as a SageMaker endpoint too
	HF_MODEL_ID=$$($(BIN)/slipway sample-model) && export HF_MODEL_ID && \
		exec $(BIN)/slipway serve --model-dir . --model-name model --host $(HOST) --port $(PORT) \
		--local-endpoint my-endpoint

test: ## All checks but the images' (CI runs both: .ci/run)
	@# The checks of lint fill the time in which unit tests wait.
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line lint unit
	$(MAKE) --no-print-directory live

lint: install-dev ## Style, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/hadolint --config .hadolint.yaml container/image/Dockerfile.cpu container/image/Dockerfile.gpu

unit: install-dev ## Tests that start no engine
	$(BIN)/python -m pytest tests --ignore tests/live -n $(WORKERS) -m "not live and not image and not gpu"

live: install-dev ## Tests with the real engine and real clients
	$(BIN)/python -m pytest tests/chaos tests/live -n $(WORKERS) -m "live and not long"

long: install-dev ## The tests that `make test` leaves out: replicas on Ray that end, come and change; the programs below
	$(BIN)/python -m pytest tests/live -m long

chaos: install-dev ## Random faults and clients against the real server (MINUTES, SEED; ANSWERS: it goes on until so many)
	$(BIN)/python -m tests.chaos $(if $(ANSWERS),--answers $(ANSWERS) --pause 5,--minutes $(MINUTES)) --seed $(SEED)

fuzz: install-dev ## Wrong bodies, and every route of the API description (MINUTES, SEED)
	$(BIN)/python -m tests.chaos.fuzz --minutes $(MINUTES) --seed $(SEED)

soak: install-dev ## A steady load, and plots of what the processes hold: build/soak.png (MINUTES, SEED)
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED)

overload: install-dev ## Ten times as many clients as can be served (MINUTES)
	$(BIN)/python -m tests.chaos.overload --minutes $(MINUTES)

engine-arguments: install-dev ## Try all arguments of vLLM, for docs/engine_arguments.md (ARGS="max_logprobs block_size")
	$(BIN)/python -m tests.engine_arguments $(ARGS)

bench: install-dev ## Compare with vLLM's own server and with bare AsyncLLM (ARGS=...)
	$(BIN)/python -m benchmarks $(ARGS)

bench-front-end: install-dev ## Compare front ends on a scripted engine; figures and plots go to build/bench (RUST=FILE, TRITON=DIR, ARGS=...)
	mkdir -p build/bench
	$(BIN)/python -m benchmarks --workload front-end --samples-file build/bench/samples.json --plot-dir build/bench \
		$(if $(RUST),--rust $(RUST)) $(if $(TRITON),--triton $(TRITON)) $(ARGS)

gpu-proof: gpu-needs install-dev ## Test on this machine's NVIDIA GPU, then compare with vLLM's own server there
	PYTHON=$(BIN)/python sh tests/gpu/proof.sh

# Before minutes go by that install what cannot be used.
gpu-needs:
	@for python in $(BIN)/python $(PYTHON); do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then break; fi; \
	done; $$python tests/gpu/needs.py

image: ## Build the container image slipway:cpu or slipway:gpu (needs docker or podman)
	sh container/image/build.sh $(DEVICE) slipway:$(DEVICE)

image-test: install-dev ## Build both images, run them and ask them (or IMAGE=..., one that is built)
	sh tests/image/packages.sh
	if $(BIN)/python -m tests.image.container_engine; then $(BIN)/python -m pytest tests/image -m image; fi

lock: install-dev ## Renew requirements/*.txt
	$(MAKE) --no-print-directory lock-cpu EXTRA="--extra cpu --override requirements/cpu-overrides.in --find-links $(TORCH_INDEX)/torch/"
	$(MAKE) --no-print-directory lock-gpu EXTRA="--extra gpu"
	$(MAKE) --no-print-directory lock-dev EXTRA="--override requirements/dev-overrides.in"

# The packages for Python 3.11, which have to be those for the others as well: else this fails, and shows which are not.
# The hashes are those of every file of a version, whatever Python it is for.
lock-%:
	$(LOCK) $(EXTRA) --generate-hashes --python-version 3.11 pyproject.toml requirements/$*.in -o requirements/$*.txt
	@for python in 3.12 3.13; do \
		$(LOCK) $(EXTRA) --python-version $$python --constraint requirements/$*.txt --no-annotate --no-header \
			pyproject.toml requirements/$*.in >build.lock && sed -n 's/^\([^ #]*\).*/\1/p' requirements/$*.txt | grep . | \
			diff - build.lock || exit 1; \
	done; rm build.lock

clean: ## Remove what the checks leave behind
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build
