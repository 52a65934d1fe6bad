#!/bin/sh
# Makes a base image where no registry is reachable: `bootstrap-base.sh slipway-base:bookworm`. Needs root and debootstrap.
#
# It is a minimal Debian 12, like debian:bookworm-slim, made with this machine's own sources of packages.
# CONTAINER_ENGINE     docker (the default) or podman
set -eu

tag=$1
release=bookworm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The mirror that apt uses here for its first Debian source: that of a *.sources file, or of a *.list file.
mirror() {
    cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null |
        sed -n -e 's/^URIs: *\([^ ]*\).*/\1/p' -e 's/^deb  *\(\[[^]]*\]  *\)\{0,1\}\([^ ]*\) .*/\2/p' | head -n 1
}

from=$(mirror)
debootstrap --variant=minbase --include=ca-certificates "$release" "$work/root" ${from:+"$from"}
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ ! -f "$file" ] || cp "$file" "$work/root$file"
done
# With both, apt would warn of every source twice.
[ ! -f "$work/root/etc/apt/sources.list.d/debian.sources" ] || rm -f "$work/root/etc/apt/sources.list"
rm -rf "$work/root/var/cache/apt" "$work/root/var/lib/apt/lists" "$work/root/usr/share/doc" "$work/root/usr/share/man"
mkdir -p "$work/root/var/cache/apt/archives/partial" "$work/root/var/lib/apt/lists/partial"
tar --directory "$work/root" --create . | "${CONTAINER_ENGINE:-docker}" import - "$tag"
