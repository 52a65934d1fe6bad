#!/bin/sh
# Shows that Slipway works on this machine's GPU, and how fast it is.
#
# usage: sh tests/gpu/proof.sh [tests|bench]    (both without an argument)
#
# PYTHON: an interpreter that has Slipway's requirements; with vLLM both halves run all they have, without it the tests
# of the dynamic batch alone. GPU_MODEL: a model's directory; the sample model without it.
# GPU_PROOF_SECONDS: the limit of each half, 1800 without it. GPU_PROOF_RESULTS: where the results go, as they come;
# build/gpu-proof without it: tests.xml (JUnit), samples.json and benchmarks.md.
# GPU_PROOF_ON_CPU=1 runs everything on the CPU with small numbers, to see that the script works.
#
# Exit status: 0; 1 if something failed, or this machine lacks something; 3 if a limit ended a half, and nothing failed.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
half=${1:-both}
on_cpu=${GPU_PROOF_ON_CPU:-0}
seconds=${GPU_PROOF_SECONDS:-1800}
results=${GPU_PROOF_RESULTS:-build/gpu-proof}
status=0

vllm() { "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; }

# `limited NAME COMMAND...`: runs one half. SIGTERM at the limit lets it end its servers, each of which may take 20 s on a
# busy machine; SIGKILL follows.
limited() {
    name=$1
    shift
    code=0
    timeout --kill-after=55 "$seconds" "$@" || code=$?
    case $code in
    0) ;;
    124 | 137)
        echo "The limit of $seconds s ended the $name. The results up to then are in $results." >&2
        [ "$status" != 0 ] || status=3
        ;;
    *) status=1 ;;
    esac
}

prove() {
    internals=
    if vllm; then internals="tests/live/test_vllm_internals.py tests/live/test_typical_internals.py"; fi
    # shellcheck disable=SC2086
    GPU_PROOF_JUNIT=$results/tests.xml limited tests "$PYTHON" -m pytest -v -s -p tests.gpu.junit tests/gpu $internals
    if grep -qE '<(failure|error) ' "$results/tests.xml"; then status=1; fi
}

measure() {
    if ! vllm; then
        echo "There is no vLLM here to compare with; the benchmark is left out." >&2
        return
    fi
    # The last sixth of the time is for what is under way.
    set -- --workload a --peers slipway,vllm --time-limit "$((seconds * 5 / 6))" --samples-file "$results/samples.json"
    if [ "$on_cpu" = 1 ]; then
        set -- "$@" --device cpu --workload b --concurrency 1,32 --rounds 1 --seconds 1
    else
        set -- "$@" --device gpu --concurrency 1,32,256,1024 --rounds 5 --seconds 3
        set -- "$@" --kv-cache-gib "${GPU_KV_CACHE_GIB:-8}"
        if [ -n "${GPU_MODEL:-}" ]; then set -- "$@" --model "$GPU_MODEL"; fi
    fi
    limited benchmark "$PYTHON" -m benchmarks "$@" >"$results/benchmarks.md"
    cat "$results/benchmarks.md"
}

case $half in
tests | bench | both) ;;
*)
    echo "usage: sh tests/gpu/proof.sh [tests|bench]" >&2
    exit 2
    ;;
esac
"$PYTHON" tests/gpu/needs.py
mkdir -p "$results"
rm -f "$results/tests.xml" "$results/samples.json" "$results/benchmarks.md"
if [ "$half" != bench ]; then prove; fi
if [ "$half" != tests ]; then measure; fi
exit "$status"
