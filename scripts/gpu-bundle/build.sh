#!/usr/bin/env bash
# Builds all that a GPU machine without Rust, compilers or network needs into one folder: `make gpu-bundle`.
#
#   gpu-bundle/run.sh      runs it there: see run.sh beside this file
#   gpu-bundle/antiphon    the command
#   gpu-bundle/tests/      every test target named cuda* of every crate, and the suites of all backends, as CRATE-TARGET
#   gpu-bundle/examples/   every example named cuda_*
#   gpu-bundle/wheels/     the Python package, and pytest with what it needs
#   gpu-bundle/python/     the Python tests, their settings, and the benchmarks
#   gpu-bundle/COMMIT      what it was built from
#
# Build on a distribution whose glibc is not newer than the other machine's.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
bundle=$target/gpu-bundle
# shellcheck source=scripts/bundle/build.sh
source scripts/bundle/build.sh

rm -rf "$bundle"
mkdir -p "$bundle"/{tests,examples,wheels,python/benches}

cargo build --release --package antiphon-cli
cp "$target/release/antiphon" "$bundle/"

"$python" scripts/programs.py "$bundle/tests" cuda cuda_warm conformance
# Cargo's messages tell where the examples are.
cargo build --release --workspace --exclude antiphon-python --example 'cuda_*' --message-format json | "$python" -c '
import json, shutil, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and "example" in message["target"]["kind"]:
        shutil.copy(message["executable"], sys.argv[1])' "$bundle/examples"
strip "$bundle/antiphon" "$bundle"/tests/* "$bundle"/examples/*

add_wheels

# With what the tests read when they are collected.
mkdir "$bundle/python/tests"
cp pyproject.toml "$bundle/python/"
cp tests/*.py "$bundle/python/tests/"
cp -r docs "$bundle/python/"
cp -r examples "$bundle/python/"
cp benches/*.py "$bundle/python/benches/"
cp scripts/gpu-bundle/run.sh scripts/skipped.py "$bundle/"
cp -r tests/skipped "$bundle/"
finish --gzip 64
