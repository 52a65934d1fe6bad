#!/bin/sh
# Makes a base image if no registry is reachable: `bootstrap-base.sh slipway-base:bookworm`. Needs root and debootstrap.
#
# The image is a minimal Debian 12, like debian:bookworm-slim. The packages come from this machine's own sources.
# CONTAINER_ENGINE     docker (the default) or podman
set -eu

tag=$1
release=bookworm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Prints the mirror of apt's first Debian source, from a *.sources file or a *.list file.
mirror() {
    cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null |
        sed -n -e 's/^URIs: *\([^ ]*\).*/\1/p' -e 's/^deb  *\(\[[^]]*\]  *\)\{0,1\}\([^ ]*\) .*/\2/p' | head -n 1
}

from=$(mirror)
debootstrap --variant=minbase --include=ca-certificates "$release" "$work/root" ${from:+"$from"}
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ ! -f "$file" ] || cp "$file" "$work/root$file"
done
# With both files, apt would warn about every source twice.
[ ! -f "$work/root/etc/apt/sources.list.d/debian.sources" ] || rm -f "$work/root/etc/apt/sources.list"
rm -rf "$work/root/var/cache/apt" "$work/root/var/lib/apt/lists" "$work/root/usr/share/man"
# The licences stay, as in debian:bookworm-slim.
find "$work/root/usr/share/doc" -type f ! -name copyright -delete
mkdir -p "$work/root/var/cache/apt/archives/partial" "$work/root/var/lib/apt/lists/partial"
tar --directory "$work/root" --create . | "${CONTAINER_ENGINE:-docker}" import - "$tag"
