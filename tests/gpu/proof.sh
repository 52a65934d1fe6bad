#!/bin/sh
# Shows that Slipway works on this machine's GPU, and how fast it is.
#
# usage: sh tests/gpu/proof.sh [PART...]    (all parts without an argument; tests/gpu/__main__.py lists them)
#
# PYTHON: an interpreter that has Slipway's requirements. GPU_MODEL: a model's directory; the sample model without it.
# GPU_PROOF_SECONDS: a limit for all parts together; the parts that it leaves out are named as not run.
# GPU_PROOF_PART_SECONDS: the limit of one part, 420 without it.
# GPU_PROOF_RESULTS: where the results go, as they come; build/gpu-proof without it: PART.xml (JUnit), samples.json and
# benchmarks.md, and summary.md, whose rows are those of docs/status.md.
# GPU_PROOF_KERNELS: where compiled kernels are kept between parts and runs; build/gpu-kernels without it.
# GPU_PROOF_ON_CPU=1 runs everything on the CPU with small numbers, to see that the script works.
#
# Exit status: 0; 1 if something failed, or this machine lacks something; 3 if a limit left something out, and nothing
# failed.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
"$PYTHON" tests/gpu/needs.py
exec "$PYTHON" -m tests.gpu "$@"
