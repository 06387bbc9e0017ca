#!/usr/bin/env bash
# Build mammoth-ar, mammoth-dit and mammoth-operator with docker or buildah: `make images`.
# TAG (default: the version), BUILDER (docker or buildah, default: the first that works), BUILD_FLAGS (passed on, split at spaces).
set -euo pipefail
cd "$(dirname "$0")/.."
TAG=${TAG:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}

if [ -z "${BUILDER:-}" ]; then
    if docker info >/dev/null 2>&1; then BUILDER=docker
    elif command -v buildah >/dev/null; then BUILDER=buildah
    else echo "images need a running docker, or buildah" >&2; exit 1; fi
fi
case $BUILDER in
    docker) build=(docker build) ;;
    buildah) build=(buildah build --layers) ;;
    *) echo "BUILDER is docker or buildah, not $BUILDER" >&2; exit 2 ;;
esac

# shellcheck disable=SC2206  # flags are split at spaces on purpose
flags=(${BUILD_FLAGS:-})
for image in ar:services/ar_stage dit:services/dit_stage operator:operator; do
    start=$SECONDS
    "${build[@]}" "${flags[@]}" --file "${image#*:}/Dockerfile" --tag "mammoth-${image%%:*}:$TAG" .
    echo "built mammoth-${image%%:*}:$TAG with $BUILDER in $((SECONDS - start)) s"
done
