#!/usr/bin/env bash
# Runs what `make emulator-bundle` has built, on an x86-64 Linux with g++ and python3:
#
#   run.sh tests RESULTS       every test of `make emulated-all`, once
#   run.sh soak RESULTS        tests of each family, up to the first race, in another order for each seed
#   run.sh record FOLDER TEST  one test with a schedule, to be repeated on another machine
#   run.sh replay FOLDER       repeats it
#   run.sh mutants RESULTS     `make mutants`: RESULTS/mutants.json
#
# Options follow, such as `--jobs N` and `--seconds S`: those of scripts/emulated.py and scripts/mutants.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
(($# >= 2)) || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }

# shellcheck disable=SC1091 # made with the bundle
source "$here/environment"
# shellcheck source=scripts/bundle/install.sh
source "$here/wheels/install.sh"
ANTIPHON_COMMIT=$(cat "$here/COMMIT") && export ANTIPHON_COMMIT
# Of GPUs and their libraries only the emulated ones are to be found.
export ANTIPHON_NCCL=none CUDA_VISIBLE_DEVICES="" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$2"
mkdir -p -m 700 "$ANTIPHON_CACHE_DIR"

case $1 in
    mutants)
        results=$2
        export ANTIPHON_EMULATOR_MULTIPROCESSORS=24
        exec python3 "$here/scripts/mutants.py" --record "$results/mutants.json" "${@:3}"
        ;;
    soak) exec python3 "$here/scripts/emulated.py" "$@" -- "${soaked[@]}" ;;
    tests)
        install "$2/install.log" || echo "the Python tests do not run: $reason"
        exec python3 "$here/scripts/emulated.py" "$@"
        ;;
    *) exec python3 "$here/scripts/emulated.py" "$@" ;;
esac
