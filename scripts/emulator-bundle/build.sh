#!/usr/bin/env bash
# Builds all that runs the tests of GPUs on the emulator, on a machine with g++ and Python and without Rust or network, into one folder:
# `make emulator-bundle`, which has built the emulator.
#
#   emulator-bundle/run.sh        runs it there: see run.sh beside this file
#   emulator-bundle/programs/     the test programs, as CRATE-TARGET, and the command
#   emulator-bundle/emulator/     the emulator, under the names of CUDA's libraries; UCX in ucx/
#   emulator-bundle/wheels/       the Python package, and pytest with what it needs
#   emulator-bundle/environment   the variables of `make emulated`, and which tests `make soak` runs
#   emulator-bundle/COMMIT        what it was built from
#
# The scripts, the Python tests and the kernels' sources, of which mutants are made, stand where a checkout has them.
# Build on a distribution whose glibc is not newer than the other machine's.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
bundle=$target/emulator-bundle
# shellcheck source=scripts/bundle/build.sh
source scripts/bundle/build.sh

rm -rf "$bundle"
mkdir -p "$bundle"/{programs,wheels,release,emulator}
"$python" scripts/programs.py "$bundle/programs"
cp "$target/release/libantiphon_emulator.so" "$bundle/release/"
cp --no-dereference "$EMULATOR"/lib* "$bundle/emulator/"
# UCX loads its transports from the folder beside its libraries; those of CUDA and of InfiniBand are of no use here.
if [[ -n ${UCX:-} ]]; then
    mkdir -p "$bundle/emulator/ucx/ucx"
    cp "$UCX"/lib*.so.[0-9] "$bundle/emulator/ucx/"
    find "$UCX/ucx" -name 'lib*.so.0' ! -name '*cuda*' ! -name '*ib*_*' -exec cp {} "$bundle/emulator/ucx/ucx/" \;
fi
find "$bundle" -type f \( -path '*/programs/*' -o -name 'lib*.so*' \) -exec strip {} +
add_wheels

git ls-files -z scripts benches/record.py benches/mutants.json tests docs examples pyproject.toml 'crates/*/src/*.cuh' 'crates/*/src/*.rs' |
    xargs -0 cp --parents --target-directory "$bundle"
cp scripts/emulator-bundle/run.sh "$bundle/"
{
    # The folders are the bundle's.
    printf 'export %s\n' "${EMULATED//"$EMULATOR"/\"\$here\"/emulator}" | sed "s|ANTIPHON_UCX=[^ ]*|ANTIPHON_UCX=\"\$here\"/emulator/ucx|"
    printf 'soaked=(%s)\n' "$SOAKED"
} >"$bundle/environment"
finish --xz 50
