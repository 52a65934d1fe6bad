#!/bin/sh
# Shows that Slipway works on this machine's GPU, and how fast it is. Each half ends within ten minutes.
#
# usage: sh tests/gpu/proof.sh [tests|bench]    (both without an argument)
#
# PYTHON: an interpreter that has Slipway's requirements; with vLLM both halves run all they have, without it the tests
# of the dynamic batch alone. GPU_MODEL: a model's directory; the sample model without it.
# GPU_PROOF_ON_CPU=1 runs everything on the CPU with small numbers, to see that the script works.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
half=${1:-both}
on_cpu=${GPU_PROOF_ON_CPU:-0}

if [ "$on_cpu" != 1 ] && ! nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader; then
    echo "There is no NVIDIA GPU here." >&2
    exit 1
fi
vllm() { "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; }

prove() {
    seams=
    if vllm; then seams="tests/live/test_vllm_seam.py tests/live/test_typical_seam.py"; fi
    # shellcheck disable=SC2086
    timeout 600 "$PYTHON" -m pytest -v -s tests/gpu $seams
}

measure() {
    if ! vllm; then
        echo "There is no vLLM here to compare with; the benchmark is left out." >&2
        return
    fi
    set -- --workload a --peers slipway,vllm --rounds 2
    if [ "$on_cpu" = 1 ]; then
        set -- "$@" --device cpu --workload b --concurrency 1,32 --rounds 1 --seconds 1
    else
        set -- "$@" --device gpu --concurrency 1,32,256,1024 --seconds 3 --kv-cache-gib "${GPU_KV_CACHE_GIB:-8}"
        if [ -n "${GPU_MODEL:-}" ]; then set -- "$@" --model "$GPU_MODEL"; fi
    fi
    timeout 600 "$PYTHON" -m benchmarks "$@"
}

case $half in
    tests) prove ;;
    bench) measure ;;
    both)
        prove
        measure
        ;;
    *)
        echo "usage: sh tests/gpu/proof.sh [tests|bench]" >&2
        exit 2
        ;;
esac
