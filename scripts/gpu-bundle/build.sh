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
limit_mib=64

rm -rf "$bundle"
mkdir -p "$bundle"/{tests,examples,wheels,python/benches}

# Smaller binaries: tests and examples instantiate the same generic code.
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1

cargo build --release --package antiphon-cli
cp "$target/release/antiphon" "$bundle/"

# Cargo's messages tell where the binaries are, whose names end in a hash.
binaries() {
    "$python" -c '
import json, pathlib, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and set(message["target"]["kind"]) & {"test", "example"}:
        crate = pathlib.Path(message["manifest_path"]).parent.name
        print(crate, message["target"]["name"], message["executable"])'
}
cargo test --release --workspace --exclude antiphon-python --test 'cuda*' --no-run --message-format json | binaries |
    while read -r crate name file; do cp "$file" "$bundle/tests/$crate-$name"; done
cargo test --release --package antiphon-collectives --package antiphon-moe --test conformance --no-run --message-format json | binaries |
    while read -r crate name file; do cp "$file" "$bundle/tests/$crate-$name"; done
cargo build --release --workspace --exclude antiphon-python --example 'cuda_*' --message-format json | binaries |
    while read -r _ name file; do cp "$file" "$bundle/examples/$name"; done
strip "$bundle/antiphon" "$bundle"/tests/* "$bundle"/examples/*

"$python" -m maturin build --quiet --release --strip --out "$bundle/wheels"
# Kept beside the bundle, so that only the first build needs a network.
wheels=$target/gpu-bundle-wheels
if ! compgen -G "$wheels/pytest-*.whl" >/dev/null; then
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --dest "$wheels" pytest
fi
cp "$wheels"/*.whl "$bundle/wheels/"

# With what the tests read when they are collected.
mkdir "$bundle/python/tests"
cp pyproject.toml "$bundle/python/"
cp tests/*.py "$bundle/python/tests/"
cp -r docs "$bundle/python/"
cp -r examples "$bundle/python/"
cp benches/*.py "$bundle/python/benches/"
cp scripts/gpu-bundle/run.sh scripts/skipped.py "$bundle/"
cp -r tests/skipped "$bundle/"
# The records of benchmarks tell this commit.
"$python" -c 'import sys; sys.path.insert(0, "benches"); import record; print(record.commit())' >"$bundle/COMMIT"

size_mib=$(($(tar --create --gzip --directory "$target" "$(basename "$bundle")" | wc --bytes) / 1048576 + 1))
echo "$bundle: $size_mib MiB when it is packed, at most $limit_mib"
if ((size_mib > limit_mib)); then
    du --apparent-size --all --human-readable "$bundle" | sort -rh | head >&2
    exit 1
fi
