#!/bin/sh
# Installs the container tools for the image tests, if docker does not answer and the user may install packages.
#
# podman builds images. runc starts containers if podman's default, crun, fails because cgroups are in hybrid mode. buildah
# runs images in a chroot if both fail. debootstrap makes a base image if no registry is reachable. Without these packages,
# the tests are skipped, and one line of output says so.
set -eu

PATH=$PATH:/usr/sbin:/sbin
missing=
for package in podman runc buildah debootstrap; do
    # Each package has a command of the same name.
    command -v "$package" >/dev/null || missing="$missing $package"
done
if [ -z "$missing" ] || docker info >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "image-test: docker does not answer, and these of Debian's packages are missing:$missing" >&2
    exit 0
fi
echo "image-test: installing Debian's$missing"
# shellcheck disable=SC2086 # one word for each package
apt-get update --quiet --quiet \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends --quiet --quiet $missing >/dev/null \
    || echo "image-test: these of Debian's packages cannot be installed:$missing" >&2
