#!/bin/sh
# Runs the command in its arguments. If the branch of the host's driver is older than that of CUDA's compatibility
# libraries, the command uses these libraries.
#
# On most hosts, NVIDIA's container toolkit does this. On SageMaker, the image has to do it. If the driver's branch is the
# same or newer, the libraries are not needed. They work only on data centre GPUs.
#
# Empty entries of LD_LIBRARY_PATH are removed, because the loader would search the working directory for libraries. In
# vLLM's image, the variable ends in a colon, and the entry after it is empty.
set -eu

libraries=${CUDA_COMPAT:-/usr/local/cuda/compat}
driver_file=${NVIDIA_DRIVER_FILE:-/proc/driver/nvidia/version}

# Prints the branch of the libraries, such as 570 for version 570.86.15. Only one library has the full version in its name.
branch_of_libraries() {
    for library in "$libraries"/libcuda.so.*.*; do
        [ -e "$library" ] || return 0
        version=${library##*/libcuda.so.}
        echo "${version%%.*}"
        return 0
    done
}

# Prints the branch of the driver. The driver's file has a line such as
# `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build ...`.
branch_of_driver() {
    [ -r "$driver_file" ] || return 0
    sed -n 's/^NVRM version:.*[[:space:]]\([0-9][0-9]*\)\.[0-9][0-9.]*[[:space:]].*$/\1/p' "$driver_file" | head -n 1
}

LD_LIBRARY_PATH=$(printf '%s' "${LD_LIBRARY_PATH:-}" | tr -s : | sed -e 's/^://' -e 's/:$//')
offered=$(branch_of_libraries)
present=$(branch_of_driver)
if [ -n "$offered" ] && [ -n "$present" ] && [ "$present" -lt "$offered" ]; then
    echo "cuda-compat: driver $present is older than CUDA's $offered; using $libraries" >&2
    LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# If the variable were set but empty, it would have one empty entry.
if [ -n "$LD_LIBRARY_PATH" ]; then
    export LD_LIBRARY_PATH
else
    unset LD_LIBRARY_PATH
fi
exec "$@"
