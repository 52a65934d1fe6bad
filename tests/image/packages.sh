#!/bin/sh
# Sees to what the tests of the images run: docker, or Debian's packages below, which root gets installed. Others are told.
#
# podman builds; runc starts containers where crun, podman's own choice, cannot (cgroups in hybrid mode); buildah runs
# images in a chroot where neither can; debootstrap makes a base image where no registry is reachable.
set -eu

if docker info >/dev/null 2>&1; then
    exit 0
fi
PATH=$PATH:/usr/sbin:/sbin
missing=
for package in podman runc buildah debootstrap; do
    # Each package has the command of its name.
    command -v "$package" >/dev/null || missing="$missing $package"
done
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "image-test: installing Debian's$missing"
    apt-get update --quiet --quiet
    # shellcheck disable=SC2086 # one word for each package
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends --quiet --quiet $missing
    exit 0
fi
echo "image-test: docker does not answer, and these of Debian's packages are missing:$missing" >&2
exit 1
