#!/usr/bin/env python3
"""Whether the emulated tests notice a kernel that lacks a release, an acquire, a fence, a wait, a barrier or a scope.

    scripts/mutants.py --list                      the mutants: FILE:LINE:FROM=>TO, one a line
    scripts/mutants.py [--only TEXT] [--jobs N]    runs the tests of each mutant's family up to the first failure, and prints a table
    scripts/mutants.py --record FILE               writes the results as JSON too; survivors have the reason of REASONS
    scripts/mutants.py --baseline                  runs the tests of all families without a mutant, and no more
    scripts/mutants.py --again FILE                of such a file, those that were not caught, with the tests of today; --record has all of them
    scripts/mutants.py --explain FILE              puts reasons that were found since into such a file
    scripts/mutants.py --passed                    begins with the mutants, as all tests have passed without one before

The emulator's NVRTC changes the text (crates/emulator/src/mutant.rs), so nothing is rebuilt: the test programs are those of
`make emulated` or of a bundle, in the environment that `make emulated` sets. Without a mutant all of the tests must pass first; mutants of a family whose tests do not
are not begun.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from programs import ROOT, Program, find

sys.path.append(str(ROOT / "benches"))

import record  # noqa: E402

CHANGES = [
    ("acquire", r"ld_acquire_sys\(", "ld_acquire_sys(", "ld_relaxed_sys("),
    ("acquire", r"ld_acquire_gpu\(", "ld_acquire_gpu(", "ld_relaxed_sys("),
    ("acquire", r"(?<!u32 )ld_acquire_block\(", "ld_acquire_block(", "ld_relaxed_sys("),
    ("acquire", r"ld\.acquire\.cta", "ld.acquire.cta", "ld.relaxed.cta"),
    ("release", r"st_release_sys\(", "st_release_sys(", "st_relaxed_sys("),
    ("release", r"red_add_release_sys\(", "red_add_release_sys(", "red_add_relaxed_sys("),
    ("release", r"atom_add_acq_rel_gpu\(", "atom_add_acq_rel_gpu(", "atomicAdd("),
    ("release", r"(?<!void )st_release_block\(", "st_release_block(", "st_relaxed_sys("),
    ("release", r"st\.release\.cta", "st.release.cta", "st.relaxed.cta"),
    ("scope", r"ld_acquire_sys\(", "ld_acquire_sys(", "ld_acquire_gpu("),
    ("scope", r"\bfence_sys\(\);", "fence_sys()", "fence_gpu()"),
    ("scope", r"load16_volatile\(", "load16_volatile(", "load16("),
    ("scope", r"store16_volatile\(", "store16_volatile(", "store16("),
    ("fence", r"\bfence_(sys|gpu)\(\);", None, ";"),
    ("fence", r"\b__threadfence(_system)?\(\);", None, ";"),
    ("proxy fence", r"\bbulk_fence(_shared)?\(\);", None, ";"),
    ("wait", r"\bbulk_stores_(read|done)<\w+>\(\);", None, ";"),
    ("wait", r"\bcopies_wait(_all|<\w+>)\(\);", None, ";"),
    ("barrier", r"__syncthreads\(\);", None, ";"),
    ("barrier", r"__syncwarp\(\w*\);", None, ";"),
    ("barrier", r"barrier\.cluster\.arrive\.release", "arrive.release", "arrive.relaxed"),
    ("pdl_wait", r"\bpdl_wait\(\);", None, ";"),
]
"""What is changed: its kind, the pattern of a place, and what stands there instead of which text (None: all of it). The scope of a volatile
access is the system; without it the access is weak."""

ORDERS = "orders::rows_keep_their_order_around_captures_on_2_gpus"
OPERATIONS = "captured::every_operation_is_captured"
FUSED = ["fusion::rows_of_one_vector", "orders::fused_calls_keep_their_order_around_captures_on_2_gpus"]
MIXED = [
    "mixed::gathered_and_scattered_blocks_may_be_uneven_and_empty_on_2_gpus",
    "mixed::mixed_sums_in_two_hops_have_the_hosts_bits_on_4_gpus",
    "orders::mixed_calls_keep_their_order_around_captures_on_4_gpus",
]
BY_EXPERT = ["rings::by_expert_wrapped_rings_end_on_2_gpus"]
MANY = ["by_expert::by_expert_warps_may_have_many_tokens_on_2_gpus", "rings::by_expert_records_of_many_choices_make_room_on_2_gpus"]
ROWS = [ORDERS, "rings::wrapped_rings_end_on_2_gpus"]
GRAPH = "a_graph_replays_the_capacity_form_with_other_choices_on_2_gpus"
BY_EXPERT_GRAPH = "by_expert::a_graph_replays_the_capacity_form_by_expert_with_other_maps_on_2_gpus"
REGISTERED = [
    "registered::symmetric_memory_is_reduced_in_place_and_out_of_it",
    "repeated::registered_sums_of_the_same_memory_follow_each_other_on_2_gpus",
]
PLANS = ["graphs::graphs_replay_between_eager_calls_on_2", "back_to_back::rows_of_calls_have_the_hosts_bits_on_2"]
FAMILIES = [
    ("fabric/src/gpu/pipeline", "moe", MANY + ROWS + BY_EXPERT),
    ("fabric/src/gpu/*", "collectives", ["fusion::rows_of_one_vector", OPERATIONS, "faults::a_rank_that_leaves_is_named_long_before_the_deadline"]),
    ("collectives/src/fusion/gpu/*", "collectives", ["fusion::what_blocks_keep_serves_several_rows_on_2_gpus", *FUSED]),
    (
        "collectives/src/mixed/rails/*",
        "collectives",
        [
            "nodes::calls_have_the_hosts_bits_on_nodes_of_1_and_1",
            "nodes::calls_have_the_hosts_bits_on_nodes_of_2_and_2",
            "nodes::calls_that_no_host_waits_for_have_the_hosts_bits",
        ],
    ),
    ("collectives/src/mixed/*", "collectives", MIXED),
    (
        "collectives/src/gather_scatter/blocks/*",
        "collectives",
        ["repeated::broadcasts_in_two_hops_follow_each_other_on_3_gpus", OPERATIONS],
    ),
    ("collectives/src/gather_scatter/lists/*", "collectives", ["repeated::lists_of_the_same_memory_follow_each_other_on_2_gpus"]),
    (
        "collectives/src/gather_scatter/messages/*",
        "collectives",
        ["repeated::messages_that_wrap_their_rings_follow_each_other_on_4_gpus", OPERATIONS, "orders::a_receive_delays_no_send_on_2_gpus"],
    ),
    ("collectives/src/gather_scatter/**/*", "collectives", [OPERATIONS, "orders::a_receive_delays_no_send_on_2_gpus"]),
    ("collectives/src/all_reduce/*", "collectives", REGISTERED),
    ("moe/src/by_token/kernels/r*", "moe", MANY + ROWS + BY_EXPERT),
    ("moe/src/by_token/kernels/*", "moe", [GRAPH, *ROWS]),
    ("moe/src/by_expert/kernels/list", "moe", [BY_EXPERT_GRAPH, "by_expert::by_expert_choices_are_listed_in_turns_on_2_gpus"]),
    ("moe/src/by_expert/**/*", "moe", MANY + BY_EXPERT),
    ("moe/src/slots/*", "moe", ["orders::slot_calls_keep_their_order_around_captures_on_2_gpus"]),
    ("moe/src/layout/*", "moe", [GRAPH, ORDERS]),
    *(
        (f"executor/src/cuda/{file}", "executor", ["compiled::plans_of_each_kind_are_right_on_2", *PLANS])
        for file in ("compiled", "data", "side_by_side", "begin")
    ),
    ("executor/src/cuda/*", "executor", ["every_operation_has_the_hosts_bits_on_3", *PLANS, "inputs_are_those_of_their_streams_on_2"]),
]
"""Of kernels, by the first of these patterns that has their file: the package and the tests that run them. The form by expert has the rings of
the form by token."""

PACKAGES = sorted({package for _, package, _ in FAMILIES} | {"fabric"})
"""Those whose kernels all have a family."""

BULK, NO_BULK = "9.0", "8.0"
"""Compute capabilities with bulk copies and without."""

REASONS = ROOT / "benches" / "mutants.json"
"""Why each survivor is equivalent, or what would catch it: {MUTANT: TEXT}."""

VARIABLES = ["ANTIPHON_EMULATOR_GPUS", "ANTIPHON_EMULATOR_MULTIPROCESSORS", "ANTIPHON_EMULATOR_SEED"]


@dataclass
class Mutant:
    kind: str
    change: str
    package: str
    tests: list[str]
    capability: str = BULK
    outcome: str = ""
    seconds: float = 0.0
    report: str = ""


def mutants() -> list[Mutant]:
    found = []
    seen: set[Path] = set()
    for pattern, package, tests in FAMILIES:
        for file in sorted(set((ROOT / "crates").glob(pattern + ".cuh")) - seen):
            seen.add(file)
            capability = BULK
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if line.startswith(("#if", "#else", "#endif")):
                    # Without bulk copies stands another pipeline.
                    capability = NO_BULK if line.startswith("#else") else BULK
                code = line.split("//")[0]
                for kind, place, old, new in CHANGES:
                    for text in dict.fromkeys(match.group(0) for match in re.finditer(place, code)):
                        found.append(Mutant(kind, f"{marker(file)}:{number}:{old or text}=>{new}", package, tests, capability))
    kernels = {file for package in PACKAGES for file in (ROOT / "crates" / package / "src").rglob("*.cuh")}
    if left := kernels - seen:
        raise SystemExit(f"no pattern of FAMILIES has {sorted(str(file.relative_to(ROOT)) for file in left)}")
    return found


CAUGHT = ("race", "fails")


def results_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a record says of a mutant."""
    return {name: row[name] for name in ("outcome", "seconds", "report") if name in row}


@functools.cache
def marker(file: Path) -> str:
    """The name under which a program includes the file, which its source says: beside the text, or as that of a family whose source it is."""
    for source in (ROOT / "crates" / file.relative_to(ROOT / "crates").parts[0]).rglob("src/**/*.rs"):
        text = source.read_text()
        for name, path in re.findall(r'"([^"]+\.cuh)",\s*(?:text:\s*)?include_str!\(\s*"([^"]+)"', text):
            if (source.parent / path).resolve() == file:
                return str(name)
        if source.parent == file.parent and f'unwrap_or(include_str!("{file.name}"))' in text and (name := re.search(r'NAME: &\'static str = "([^"]+)"', text)):
            return name[1]
    raise SystemExit(f"no program includes {file.relative_to(ROOT)}")


def run(program: Program, tests: list[str], capability: str, mutant: str, limit: float) -> tuple[str, float, str]:
    """The outcome, the seconds and the report, of one test after the other up to the first that fails."""
    seconds = 0.0
    for test in tests:
        outcome, more, report = run_one(program, test, capability, mutant, limit)
        seconds += more
        if outcome != "survives":
            return outcome, seconds, report
    return "survives", seconds, ""


def run_one(program: Program, test: str, capability: str, mutant: str, limit: float) -> tuple[str, float, str]:
    """The same of one test. What hangs is not counted as caught: a machine that is busy is slow, too."""
    # With a seed stores come late, so that a value shows what no race does.
    variables = {"RACES": "first", "MUTANT": mutant, "CAPABILITY": capability}
    environment = {"ANTIPHON_EMULATOR_SEED": "1"} | os.environ | {f"ANTIPHON_EMULATOR_{name}": value for name, value in variables.items()}
    ended = program.run(test, environment, limit)
    if ended.status in (None, 0):
        return "hangs" if ended.status is None else "survives", ended.seconds, ""
    outcome = "race" if ended.race() else "hangs" if "was not done after" in ended.output else "fails"
    return outcome, ended.seconds, ended.race() or ended.output[-400:]


def explain(path: Path) -> int:
    """Puts the reasons of survivors into a record."""
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    content = json.loads(path.read_text())
    for row in content["mutants"]:
        if row["outcome"] == "survives":
            row["reason"] = reasons.get(row["change"], "not explained")
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--passed", action="store_true", help="the tests have passed without a mutant")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose change contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="of one mutant")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other mutant begins")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="FILE", help="mutants that were not caught in a record")
    parser.add_argument("--explain", type=Path, metavar="FILE", help="puts the reasons of survivors into a record")
    arguments = parser.parse_args()
    if arguments.explain:
        return explain(arguments.explain)
    chosen = [mutant for mutant in mutants() if arguments.only in mutant.change]
    known: list[Mutant] = []
    if arguments.again:
        before = {row["change"]: row for row in json.loads(arguments.again.read_text())["mutants"]}
        # One that does not begin again keeps its outcome.
        all_of_them = [replace(mutant, **results_of(before.get(mutant.change, {}))) for mutant in mutants()]
        known = [mutant for mutant in all_of_them if mutant.outcome in CAUGHT or arguments.only not in mutant.change]
        changes = {mutant.change for mutant in known}
        chosen = [mutant for mutant in all_of_them if mutant.change not in changes]
    # Those of which nothing is known first, and mixed, so that a run that is cut short has some of all files.
    chosen.sort(key=lambda mutant: (mutant.outcome != "", hashlib.sha1(mutant.change.encode()).digest()))
    if arguments.list:
        print(*(mutant.change for mutant in chosen), sep="\n")
        return 0
    built = {program.crate: program for program in find(["cuda"])}
    wanted = {(mutant.package, test) for mutant in chosen for test in mutant.tests}
    # Libtest takes a name that no test has for a success.
    if unknown := wanted - {(crate, test) for crate, program in built.items() for test in program.tests()}:
        parser.error(f"there are no tests {unknown}")
    start = time.monotonic()
    limits: dict[tuple[str, ...], float] = {}
    is_right = True

    def without(family: tuple[str, ...]) -> tuple[tuple[str, ...], str, float, str]:
        package, capability, *tests = family
        return (family, *run(built[package], tests, capability, "", 4 * arguments.limit))

    families = sorted({(mutant.package, mutant.capability, *mutant.tests) for mutant in chosen})
    if arguments.passed:
        limits, families = dict.fromkeys(families, arguments.limit), []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for family, outcome, seconds, report in pool.map(without, families):
            print(f"{' '.join(family)}: {outcome} in {seconds:.0f} s without a mutant\n{report}".rstrip(), flush=True)
            if outcome == "survives":
                limits[family] = max(arguments.limit, 4 * seconds)
            else:
                is_right = False
    if arguments.baseline:
        return 0 if is_right else 1

    def judge(mutant: Mutant) -> Mutant:
        family = (mutant.package, mutant.capability, *mutant.tests)
        if family not in limits or time.monotonic() - start > arguments.seconds:
            return mutant
        limit = limits[family]
        mutant.outcome, mutant.seconds, mutant.report = run(built[mutant.package], mutant.tests, mutant.capability, mutant.change, limit)
        mutant.seconds = round(mutant.seconds, 1)
        print(f"{mutant.outcome:9} {mutant.seconds:5.0f} s  {mutant.kind:12} {mutant.change}", flush=True)
        return mutant

    facts = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        judged = known + [mutant for mutant in pool.map(judge, chosen) if mutant.outcome]
    caught = [mutant for mutant in judged if mutant.outcome in CAUGHT]
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    seconds = round(time.monotonic() - start)
    print(f"{len(caught)} of {len(judged)} are caught, in {seconds} s")
    for mutant in judged:
        if mutant.outcome == "survives":
            print(f"survives: {mutant.change}: {reasons.get(mutant.change, 'not explained')}")
    if arguments.record:
        counts = {"caught": len(caught), "of": len(judged), "not begun": len(chosen) + len(known) - len(judged), "seconds": seconds}
        record.write(arguments.record, facts | counts | {"mutants": [asdict(mutant) for mutant in judged]})
        explain(arguments.record)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
