#!/bin/sh
# Builds an image: `build.sh cpu slipway:cpu [flags of "docker build"...]`. It runs in any directory. See docs/image.md.
#
# CONTAINER_ENGINE     docker or podman; default: docker if it answers, else podman
# BASE_IMAGE, TINI_IMAGE, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, SAMPLE_MODEL, RUN_AS,
# VERSION, SOURCE
#                      build arguments; variables that are not set are not passed
# PIP_CONFIG_FILE      a pip.conf for the build; it is not stored in the image
# CA_CERTIFICATES      certificate authorities for the build, such as a proxy's; the file is not stored in the image
set -eu

device=$1
tag=$2
shift 2
cd "$(dirname "$0")/../.."

if [ -z "${CONTAINER_ENGINE:-}" ]; then
    for candidate in docker podman; do
        if command -v "$candidate" >/dev/null && "$candidate" info >/dev/null 2>&1; then
            CONTAINER_ENGINE=$candidate
            break
        fi
    done
fi
if [ -z "${CONTAINER_ENGINE:-}" ]; then
    echo "build.sh: neither docker nor podman answers on this machine; one of them is needed" >&2
    exit 1
fi

: "${VERSION:=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}"
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# The label has the time of the commit, so that the same sources get the same labels.
CREATED=$(git log -1 --format=%cI 2>/dev/null || date --utc --iso-8601=seconds)

# The build uses the digest of the base image, because a registry may move a tag. Labels store the tag and the digest.
: "${BASE_IMAGE:=$(sed -n 's/^ARG BASE_IMAGE=//p' "container/image/Dockerfile.$device")}"
base=${BASE_IMAGE%%@*}
if [ "$base" = "$BASE_IMAGE" ]; then
    repository=${base##*/}
    repository=${repository%%:*}
    case $base in
    localhost/*) digest= ;;
    *)
        digest=$("$CONTAINER_ENGINE" pull --quiet "$base" >/dev/null && "$CONTAINER_ENGINE" image inspect \
            --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base" \
            | sed -n "s|^\(.*/\)\{0,1\}$repository@||p" | head -n 1) || digest=
        ;;
    esac
    if [ -n "$digest" ]; then
        BASE_IMAGE=$base@$digest
    else
        echo "build.sh: no registry has $base; the build uses this machine's image of that name, without a digest" >&2
    fi
else
    digest=${BASE_IMAGE#*@}
fi
set -- --label "org.opencontainers.image.base.name=$base" --label "org.opencontainers.image.base.digest=$digest" "$@"

for name in BASE_IMAGE TINI_IMAGE PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX SAMPLE_MODEL RUN_AS \
    VERSION REVISION CREATED SOURCE; do
    eval "value=\${$name:-}"
    [ -z "$value" ] || set -- --build-arg "$name=$value" "$@"
done
[ -z "${PIP_CONFIG_FILE:-}" ] || set -- --secret "id=pip.conf,src=$PIP_CONFIG_FILE" "$@"
[ -z "${CA_CERTIFICATES:-}" ] || set -- --secret "id=ca.pem,src=$CA_CERTIFICATES" "$@"
# podman's default image format cannot store health checks. A chroot is enough isolation for a build.
[ "$CONTAINER_ENGINE" != podman ] || set -- --format docker --isolation chroot "$@"

exec "$CONTAINER_ENGINE" build -f "container/image/Dockerfile.$device" -t "$tag" "$@" .
