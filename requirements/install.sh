#!/bin/sh
# `install.sh PYTHON cpu|gpu|dev`: installs a lock file of this directory into the environment of PYTHON. make calls it.
#
# TORCH_INDEX     the package index for torch's CPU build, if pip does not find it
set -eu

python=$1
lock=$2
locks=$(dirname "$0")

# --no-deps: the locks leave out packages that are wrong or useless here; see *overrides.in.
# --require-hashes: whatever the index, pip refuses a file whose hash differs from the lock.
# --no-compile: pip would compile 35,000 modules on one core, in more than a minute. The last step here uses all cores.
locked() {
    "$python" -m pip install --quiet --no-compile --no-deps --require-hashes "$@"
}

# PyPI does not have torch's CPU build. torch is installed first, so that a machine without access to this build fails at once.
torch() {
    wanted=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$locks/cpu.txt")
    only=$(mktemp)
    trap 'rm -f "$only"' EXIT
    # Selects the line of torch and the lines with its hashes.
    sed -n '/^torch==/,/[^\\]$/p' "$locks/cpu.txt" >"$only"
    if errors=$(locked -r "$only" 2>&1); then
        return
    fi
    if ! echo "$errors" | grep -q "No matching distribution found for torch"; then
        echo "$errors" >&2
        exit 1
    fi
    echo "pip does not find $wanted in its configured indexes; trying PyTorch's index of CPU wheels, $TORCH_INDEX" >&2
    # A short query comes first. Without it, pip would spend minutes on an index that does not answer.
    if ! PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=10 timeout 30 "$python" -m pip index versions --index-url "$TORCH_INDEX" torch 2>&1 \
        | grep -qF "${wanted#torch==}"; then
        echo "$errors" >&2
        echo "$TORCH_INDEX does not offer $wanted either: give an index that has it, with make TORCH_INDEX=..." >&2
        exit 1
    fi
    locked --index-url "$TORCH_INDEX" -r "$only"
}

# Triton and FlashInfer compile kernels at run time. Without a compiler, vLLM's engine dies.
compiler() {
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if ! command -v c++ >/dev/null || [ ! -e "$headers/Python.h" ]; then
        echo "A GPU host needs a C++ compiler, c++, and Python's headers, $headers/Python.h (Debian: g++ and python3-dev)" >&2
        exit 1
    fi
}

# If an index offers a CPU build of torch, pip prefers it, because `2.13.0+cpu` counts as newer than `2.13.0`. pip then
# refuses this build, because its hash is not in the lock.
with_cuda() {
    if errors=$(locked -r "$locks/gpu.txt" 2>&1); then
        return
    fi
    echo "$errors" >&2
    case $errors in
    *torch-*%2Bcpu-*)
        echo "pip found a torch without CUDA; remove that build from pip's find-links and indexes" >&2
        ;;
    esac
    exit 1
}

# Makes a CUDA toolkit from the CUDA packages of the lock, in the environment's directory `cuda`. FlashInfer compiles
# kernels with this toolkit (CUDA_HOME). In the packages, the names of libraries contain versions, but `-lcudart` needs
# names without versions. As in NVIDIA's own toolkit, `-lcuda` links with an empty library. When the kernels are loaded,
# the driver's library is loaded, too.
toolkit() {
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cuda=$site/nvidia/cu13
    ln -sfn lib "$cuda/lib64"
    for library in "$cuda"/lib/*.so.*; do
        ln -sf "${library##*/}" "${library%%.so.*}.so"
    done
    mkdir -p "$cuda/lib/stubs"
    c++ -shared -Wl,-soname,libcuda.so.1 -o "$cuda/lib/stubs/libcuda.so" -x c /dev/null
    ln -sfn "$cuda" "$("$python" -c 'import sys; print(sys.prefix)')/cuda"
}

case $lock in
gpu)
    compiler
    with_cuda
    toolkit
    ;;
*)
    [ "$lock" != cpu ] || torch
    locked -r "$locks/$lock.txt"
    ;;
esac

# compileall fails for some files that end in .py but are templates, so errors are ignored.
"$python" -W ignore -m compileall -qq -j 0 "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
