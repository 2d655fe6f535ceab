#!/usr/bin/env bash
# Runs what `make gpu-bundle` has built, on a machine with GPUs:
#
#   run.sh RESULTS [STEP...]    all steps, or these, each under its own time limit
#   run.sh --list               the names of the steps
#
# A step's output goes to RESULTS/STEP.log, and a line with its outcome to RESULTS/summary.txt: PASS, FAIL, TIMEOUT, or
# SKIP where what it needs is not there. RESULTS/STEP.skipped has the tests that ran and those that did not, by what they need; at
# the end stands a table of them. Exits with 1 if a step failed or was stopped.
#
# LIMIT=SECONDS replaces every step's time limit.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# NVLink multicast is never to be used: its objects belong to the switches, which others share.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ANTIPHON_COMMIT=$(cat "$here/COMMIT") && export ANTIPHON_COMMIT

# --- the steps, by what the bundle holds: a name, a limit in seconds, a kind and a file -------------------------------

# Benchmarks of the host are here to be run by name; without a name, only those of GPUs.
steps() {
    local file name
    printf '%s\n' "doctor 60 command -"
    for file in "$here"/tests/*; do
        [[ -x $file ]] && printf '%s\n' "test-${file##*/} 420 test $file"
    done
    for name in memcheck racecheck; do
        printf '%s\n' "$name 120 sanitizer $here/tests/collectives-conformance"
    done
    printf '%s\n' "pytest 400 pytest -"
    for file in "$here"/examples/*; do
        [[ -x $file ]] && printf '%s\n' "example-${file##*/} 150 example $file"
    done
    for file in "$here"/python/benches/*.py; do
        name=${file##*/}
        [[ $name == @(record|nccl|kernels).py ]] && continue # what the others import
        [[ -f $file ]] && printf '%s\n' "bench-${name%.py} 300 bench $file"
    done
}

of_gpus() { [[ $1 == bench-cuda* || $1 == bench-fusion* ]]; }

by_default() { [[ $1 != bench-* ]] || of_gpus "$1"; }

# --- what they need -----------------------------------------------------------------------------------------------------

gpus() { compgen -G '/dev/nvidia[0-9]*' | wc -l; }

has_module() { python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null; }

# shellcheck source=scripts/bundle/install.sh
source "$here/wheels/install.sh"

# Antiphon itself looks where pip puts libraries, but only for the Python that stands in PATH as a plain file.
hint() {
    local variable=$1 name=$2 folder=$3 found
    [[ -n ${!variable:-} ]] && return
    ldconfig -p 2>/dev/null | grep -qF "$name" && return
    found=$(python3 - "$folder" "$name" <<'PYTHON' 2>/dev/null
import pathlib, sys
import nvidia
files = (pathlib.Path(path) / sys.argv[1] / sys.argv[2] for path in nvidia.__path__)
print(next(str(file) for file in files if file.exists()))
PYTHON
    ) && export "$variable=$found"
}

# How many tests the step's record names as skipped, each once.
skipped_tests() {
    [[ ! -f $ANTIPHON_SKIPPED ]] || awk -F '\t' '$1 == "skipped" && !seen[$3]++' "$ANTIPHON_SKIPPED" | wc -l
}

# --- one step -------------------------------------------------------------------------------------------------------------

# Runs in the limit of the step; what it prints goes to the log.
limited() { timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null; }

# Each sets `reason` and returns 75 for what cannot be run here.
run_command() { limited "$here/antiphon" doctor; }

# Libtest counts a test that lacks what it needs as passed; the record says which those are. Of the suite of all backends, those of
# GPUs.
run_test() {
    local filter=()
    [[ $file == *-conformance ]] && filter=(gpus::)
    limited "$file" --nocapture --test-threads 1 "${filter[@]}" || return
    local passed skipped
    passed=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$log" | tail -1)
    skipped=$(skipped_tests)
    ((skipped == 0)) || reason="$skipped of $passed tests skipped"
    ((skipped < passed)) || return 75
}

# Small cases only: it takes a hundred times as long. How many parameters a kernel has is found by asking for one too many,
# which is no error.
run_sanitizer() {
    (($(gpus) > 1)) || { reason="2 GPUs needed"; return 75; }
    command -v compute-sanitizer >/dev/null || { reason="no compute-sanitizer"; return 75; }
    limited compute-sanitizer --tool "$step" --report-api-errors no --error-exitcode 9 "$file" --test-threads 1 \
        all_reduce::gpus::tensors_may_begin_anywhere::world_2 gather_scatter::gpus::words_that
}

run_pytest() {
    install "$results/install.log" || return 75
    has_module pytest || { reason="no pytest"; return 75; }
    cd "$here/python" || return
    # Only their files: the others may need what is not here.
    local files
    files=$(grep --files-with-matches 'mark\.cuda\|harness\.DEVICES\|harness\.WORLDS' tests/*.py) || { reason="no test is marked cuda"; return 75; }
    # shellcheck disable=SC2086 # a list
    limited python3 -m pytest $files -m cuda -p no:cacheprovider --color no -ra
    local status=$?
    case $status in
        0) reason=$(tail -1 "$log" | tr -d =) ;;
        5) reason="no test is marked cuda"; return 75 ;;
    esac
    return $status
}

run_example() {
    (($(gpus) > 0)) || { reason="no GPU"; return 75; }
    limited "$file" || return
    ! reason=$(grep -m 1 '^skipped: ' "$log") || return 75
}

run_bench() {
    install "$results/install.log" || return 75
    ! of_gpus "$step" || (($(gpus) > 0)) || { reason="no GPU"; return 75; }
    cd "$here/python" || return
    PATH=$here:$PATH limited python3 "$file"
}

# In a shell of its own, so that folders and variables stay with the step.
run_step() {
    local step=$1 limit=${LIMIT:-$2} kind=$3 file=$4 reason="" outcome status start=$SECONDS
    local log=$results/$step.log
    export ANTIPHON_SKIPPED=$results/$step.skipped
    : >"$log"
    : >"$ANTIPHON_SKIPPED"
    "run_$kind"
    status=$?
    case $status in
        0) outcome=PASS ;;
        75) outcome=SKIP ;;
        124 | 137) outcome=TIMEOUT reason="stopped after $limit s" ;;
        *) outcome=FAIL reason="status $status: $(grep -v '^[[:space:]]*$' "$log" | tail -1 | cut -c 1-120)" ;;
    esac
    printf '%-8s %-34s %4d s  %s\n' "$outcome" "$step" $((SECONDS - start)) "$reason" | tee -a "$results/summary.txt"
    [[ $outcome == PASS || $outcome == SKIP ]]
}

# --- all of them ----------------------------------------------------------------------------------------------------------

if [[ ${1:-} == --list ]]; then
    steps | while read -r step _; do
        by_default "$step" && printf '%s\n' "$step" || printf '%s (by name only)\n' "$step"
    done
    exit
fi
[[ $# -ge 1 && $1 != -* ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }

mkdir -p "$1" && results=$(cd "$1" && pwd) || exit 2
shift
for wanted in "$@"; do
    steps | grep -q "^$wanted " || { echo "there is no step $wanted: see --list" >&2; exit 2; }
done

hint ANTIPHON_NVRTC libnvrtc.so.13 cu13/lib
hint ANTIPHON_NCCL libnccl.so.2 nccl/lib
hint ANTIPHON_NVJITLINK libnvJitLink.so.13 cu13/lib
hint ANTIPHON_NVSHMEM libnvshmem_host.so.3 nvshmem/lib
: >"$results/summary.txt"
echo "$(gpus) GPUs, NVRTC: ${ANTIPHON_NVRTC:-where it is found}, NCCL: ${ANTIPHON_NCCL:-where it is found}"
failed=0
while read -r step limit kind file; do
    if (($# > 0)); then
        [[ " $* " == *" $step "* ]] || continue
    else
        by_default "$step" || continue
    fi
    (run_step "$step" "$limit" "$kind" "$file") || failed=1
done < <(steps)

# All steps on two GPUs skip the tests that are known to need more.
if command -v python3 >/dev/null; then
    expected=()
    (($# > 0 || $(gpus) != 2)) || expected=(--expect "$here/skipped/gpu2.txt")
    python3 "$here/skipped.py" "$results"/*.skipped "${expected[@]}" | tee -a "$results/summary.txt"
    ((PIPESTATUS[0] == 0)) || failed=1
fi
exit $failed
