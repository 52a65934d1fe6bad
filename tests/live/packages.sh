#!/bin/sh
# Installs Debian's Chromium, in which the tests of the console and of other sites' pages run, if this user may install.
#
# Without it these tests are skipped, and say so.
set -eu

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Chromium is missing; its tests are skipped" >&2
    exit 0
fi
echo "installing Debian's chromium"
apt-get update --quiet --quiet \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends --quiet --quiet chromium >/dev/null \
    || echo "Debian's chromium cannot be installed; its tests are skipped" >&2
