#!/bin/sh
# Runs its arguments, with CUDA's compatibility libraries if the host's driver is of an older branch than they are.
#
# On most hosts NVIDIA's container toolkit does this. On SageMaker the image has to do it. A driver of the same branch
# or a newer one does not need the libraries. They work on data centre GPUs only.
#
# Empty entries of LD_LIBRARY_PATH are removed, such as the one after the last colon in vLLM's image: the loader would
# search the working directory for libraries.
set -eu

libraries=${CUDA_COMPAT:-/usr/local/cuda/compat}
driver_file=${NVIDIA_DRIVER_FILE:-/proc/driver/nvidia/version}

# Prints the branch (570 of 570.86.15), from the name of the only library whose name has the whole version.
branch_of_libraries() {
    for library in "$libraries"/libcuda.so.*.*; do
        [ -e "$library" ] || return 0
        version=${library##*/libcuda.so.}
        echo "${version%%.*}"
        return 0
    done
}

# Prints the branch, from a line such as `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build ...`.
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
# An empty variable would be one empty entry.
if [ -n "$LD_LIBRARY_PATH" ]; then
    export LD_LIBRARY_PATH
else
    unset LD_LIBRARY_PATH
fi
exec "$@"
