# Slipway. `make run` serves the sample model on port 8080; `make test` runs every check that CI runs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM with CUDA where there is an NVIDIA GPU, else its CPU build.
DEVICE ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
PORT ?= 8080
# Processes that run tests side by side; 0: none but make's own.
WORKERS ?= 2
LOCK := uv pip compile --python-version 3.11 --no-emit-index-url --no-emit-find-links --quiet --override requirements/overrides.in

.PHONY: help install install-dev run test lint unit live bench gpu-proof image image-test lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed-$(DEVICE) ## Install what serving needs

install-dev: $(VENV)/.installed-dev ## Install what the checks need as well

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# --no-deps: the lock leaves out packages that are wrong or useless here; see requirements/*overrides.in.
$(VENV)/.installed-%: requirements/%.txt pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/$*.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(DEVICE)

run: install ## Serve the sample model on port 8080 (PORT=...), as a SageMaker endpoint too
	HF_MODEL_ID="$$($(BIN)/slipway sample-model)" $(BIN)/slipway serve --model-dir . --model-name model --port $(PORT) \
		--local-endpoint my-endpoint

test: lint unit live ## Everything that CI runs

lint: install-dev ## Style, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/hadolint --config .hadolint.yaml container/image/Dockerfile.cpu container/image/Dockerfile.gpu

unit: install-dev ## Tests that start no engine
	$(BIN)/python -m pytest tests -n $(WORKERS) -m "not live and not image and not gpu"

live: install-dev ## Tests with the real engine and real clients
	$(BIN)/python -m pytest tests -n $(WORKERS) -m live

bench: install-dev ## Compare with vLLM's own server and with bare AsyncLLM
	$(BIN)/python -m benchmarks

gpu-proof: install-dev ## Test on this machine's NVIDIA GPU, then compare with vLLM's own server there
	PYTHON=$(BIN)/python sh tests/gpu/proof.sh

image: ## Build the container image slipway:cpu or slipway:gpu (needs docker or podman)
	sh container/image/build.sh $(DEVICE) slipway:$(DEVICE)

image-test: install-dev ## Build the CPU image, run it and ask it (or IMAGE=..., one that is built)
	$(BIN)/python -m pytest tests/image -m image

lock: ## Renew requirements/*.txt (needs uv)
	$(LOCK) --python-platform x86_64-manylinux_2_28 --override requirements/cpu-overrides.in requirements/cpu.in -o requirements/cpu.txt
	$(LOCK) --python-platform x86_64-manylinux_2_28 requirements/gpu.in -o requirements/gpu.txt
	$(LOCK) --python-platform x86_64-manylinux_2_28 --override requirements/dev-overrides.in requirements/dev.in -o requirements/dev.txt

clean: ## Remove what the checks leave behind
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build
