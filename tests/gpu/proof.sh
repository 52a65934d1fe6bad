#!/bin/sh
# Shows that Slipway works on this machine's GPU, and how fast it is.
#
# usage: sh tests/gpu/proof.sh [PART...]    (without an argument: all parts; tests/gpu/__main__.py lists them)
#
# PYTHON: an interpreter that has Slipway's requirements.
# GPU_MODEL: a model's directory. Default: the sample model.
# GPU_PROOF_SECONDS: the limit for all parts together, in seconds. Parts that it leaves out are reported as not run.
# GPU_PROOF_PART_SECONDS: the limit for each part, in seconds. Default: 420.
# GPU_PROOF_RESULTS: the directory to which results are written as they arrive: PART.xml (JUnit), samples.json,
# benchmarks.md, and summary.md with rows for docs/status.md. Default: build/gpu-proof.
# GPU_PROOF_KERNELS: the directory that keeps compiled kernels between parts and runs. Default: build/gpu-kernels.
# GPU_PROOF_ON_CPU=1 runs everything on the CPU, with fewer and shorter requests, to check that the script works.
#
# Exit status: 1 if something failed or this machine lacks something; otherwise 3 if a limit left something out, or 0.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
"$PYTHON" tests/gpu/needs.py
exec "$PYTHON" -m tests.gpu "$@"
