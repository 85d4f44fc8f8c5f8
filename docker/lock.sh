#!/usr/bin/env bash
# Write the lock files of the images anew, from pyproject.toml and constraints.txt. It needs uv: `pip install uv`.
set -euo pipefail
cd "$(dirname "$0")/.."

# A package of the CUDA build alone: the wheels of the CPU build are on PyTorch's own index, and need none of them.
CUDA='^(torch|triton|cuda-.*|nvidia-.*)$'

resolve() {
    uv pip compile "$@" --constraint constraints.txt --universal --python-version 3.11 --quiet \
        --no-annotate --custom-compile-command docker/lock.sh
}
compile() { resolve pyproject.toml --extra otel "$@"; }
names() { sed -nE 's/^([a-z0-9-]+)==.*/\1/p'; }
without() { sed 's/^/--no-emit-package=/'; }

served=$(compile | names)
cuda=$(grep -E "$CUDA" <<< "$served")
others=$(grep -vE "$CUDA" <<< "$served")

mapfile -t no_cuda < <(without <<< "$cuda")
mapfile -t only_cuda < <(without <<< "$others")
mapfile -t only_loadgen < <(without <<< "$served")
compile --generate-hashes "${no_cuda[@]}" --output-file docker/requirements.txt
compile --generate-hashes "${only_cuda[@]}" --output-file docker/requirements-cuda.txt
compile --generate-hashes "${only_loadgen[@]}" --extra loadgen --output-file docker/requirements-loadgen.txt

# What the image's wheel is built with.
python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
    resolve - --generate-hashes --output-file docker/requirements-build.txt
