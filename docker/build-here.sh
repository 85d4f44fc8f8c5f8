#!/usr/bin/env bash
# Build the image for CPUs where no registry can be reached, and prove that it works: docs/container.md.
#
# It needs root, Debian's mmdebstrap and buildah, and python3. The base is a small Debian instead of python:3.12-slim.
# `build` or `prove` as its argument does one of the two. From the environment:
#   FOLDER       where base, image and volumes are kept (default: /var/tmp/djinn-image)
#   TORCH_INDEX  where PyTorch's CPU build is (default: the Dockerfile's)
#   WHEELS       a folder of wheels that pip looks into too, such as one with PyTorch's
#   DJINN_PORT   the port of the proof (default: 8000)
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=${FOLDER:-/var/tmp/djinn-image}
# What an image may take: more is a file that crept in.
MOST_MB=1500
export DJINN_PORT=${DJINN_PORT:-8000}
export BUILDAH_ISOLATION=chroot
storage=(--root "$FOLDER/storage" --runroot "$FOLDER/run")
mkdir -p "$FOLDER"

make_base() {
    [ -e "$FOLDER/base.tar" ] || mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$FOLDER/base.tar"
    local made
    made=$(buildah "${storage[@]}" from scratch)
    buildah "${storage[@]}" add --quiet "$made" "$FOLDER/base.tar" /
    buildah "${storage[@]}" commit --quiet --rm "$made" djinn-base
}

build() {
    buildah "${storage[@]}" images --quiet djinn-base > /dev/null 2>&1 || make_base
    # The certificates are those of this machine: of a proxy too, if there is one.
    local options=(--build-arg BASE=localhost/djinn-base --volume /etc/ssl/certs:/etc/ssl/certs:ro)
    if [ -n "${TORCH_INDEX:-}" ]; then options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX"); fi
    if [ -n "${WHEELS:-}" ]; then options+=(--build-arg PIP_FIND_LINKS=/wheels --volume "$WHEELS:/wheels:ro"); fi
    buildah "${storage[@]}" bud --format docker "${options[@]}" --file docker/Dockerfile --tag djinn .
}

prove() {
    local root command size
    made=$(buildah "${storage[@]}" from djinn)
    trap 'buildah "${storage[@]}" rm "$made" > /dev/null' EXIT
    # buildah would mount the image's own volumes over those that it is given below.
    buildah "${storage[@]}" config --volume /var/lib/djinn- --volume /var/cache/djinn- "$made"
    root=$(buildah "${storage[@]}" mount "$made")
    size=$(du --summarize --apparent-size --block-size=1MB "$root" | cut -f1)
    echo "the image takes $size MB"
    [ "$size" -le "$MOST_MB" ] || { echo "that is more than $MOST_MB MB" >&2; exit 1; }
    install --directory --owner 10001 --group 10001 "$FOLDER/state" "$FOLDER/cache"
    command=(buildah "${storage[@]}" run --env "DJINN_PORT=$DJINN_PORT" --env DJINN_API_KEY=proof
        --volume "$FOLDER/state:/var/lib/djinn" --volume "$FOLDER/cache:/var/cache/djinn" "$made" --)
    buildah "${storage[@]}" inspect --type image djinn > "$FOLDER/image.json"
    python3 docker/prove.py --image "$FOLDER/image.json" --root "$root" -- "${command[@]}"
}

case "${1:-all}" in
    all) build; prove ;;
    build | prove) "$1" ;;
    *) echo "usage: docker/build-here.sh [build | prove]" >&2 && exit 2 ;;
esac
