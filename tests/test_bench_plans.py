"""benches/plans_vs_mscclpp.py: its tables and its record, from printed times instead of GPUs."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

OURS = """\
       bytes    time µs     alg GB/s     bus GB/s  all-reduce µs   ratio  results
        1024        2.5         0.41         0.41            2.0    1.25  right
       65536        6.0        10.92        10.92            5.0    1.20  right
     1048576       40.0        26.21        26.21           30.0    1.33  3 elements are wrong
"""
WITHOUT_BUS = """\
       bytes    time µs     alg GB/s     bus GB/s  results
        1024        2.5         0.41            -  not checked: nothing is known of "mine"
"""
THEIRS = """\
small                                          1024      5.00 us   wrong 0
large                                          1024      4.00 us   wrong 0
small                                         65536      8.00 us   wrong 7
native_packet_12x512                          65536      1.00 us   wrong 0

best of each kind, µs
     bytes                      small
      1024                       5.00
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benches")
    return importlib.import_module("plans_vs_mscclpp")


def plan(**more: Any) -> dict[str, Any]:
    gpu = {"input_chunks": 4, "output_chunks": 4, "threadblocks": [{"ops": [{"name": "put"}]}]}
    return {"name": "a", "collective": "allreduce", "num_threads_per_block": 512, "gpus": [gpu, gpu], **more}


def test_times_of_both_are_compared_per_plan_and_for_the_best(bench: Any) -> None:
    rows = bench.Rows({"small": "allreduce", "large": "allreduce"})
    assert rows.add_theirs(THEIRS) == 3  # and not those of kernels that are no plans
    assert rows.add_ours("small", "", OURS) == 3
    first, second, third, fourth = rows.sorted()
    assert (first.plan, first.mscclpp, first.ours) == ("large", 4.0, {})
    assert (second.plan, second.ratios(), second.by_hand) == ("small", {"": 0.5}, 2.0)
    assert (third.mscclpp, third.ratios(), third.wrong) == (None, {}, ["MSCCL++: 7 elements are wrong"])
    assert (fourth.ours, fourth.wrong) == ({}, [": 3 elements are wrong"])
    best = bench.best(rows.sorted())
    assert [one["bytes"] for one in best] == [1024, 65536, 1048576]
    assert (best[0]["ours"], best[0]["mscclpp"], best[0]["their plan"]) == (2.5, 4.0, "large")
    assert (best[0]["of mscclpp"], best[0]["of by hand"]) == (0.625, 1.25)
    assert best[1]["of mscclpp"] is None
    lines = bench.table(rows.sorted(), [""]).splitlines()
    assert lines[2].split() == ["1024", "small", "5.00", "2.50", "0.50", "2.00"]
    assert bench.best_table(best).splitlines()[1].split()[:7] == ["1024", "allreduce", "2.50", "4.00", "0.62", "2.00", "1.25"]


def test_forms_have_columns_of_their_own(bench: Any) -> None:
    rows = bench.Rows({"small": "mine"})
    for form in ("compiled", "interpreted"):
        assert rows.add_ours("small", form, WITHOUT_BUS) == 1
    (row,) = rows.sorted()
    assert row.ours == {"compiled": 2.5, "interpreted": 2.5} and row.by_hand is None
    assert "ours interpreted" in bench.table([row], ["compiled", "interpreted"])


def test_a_plan_runs_at_sizes_that_both_take(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.json"

    def read(**more: Any) -> Any:
        file.write_text(json.dumps(plan(**more)))
        return bench.Plan.read(file)

    sizes = [1000, 1024, 1 << 20]
    assert read().sizes(sizes, 4096) == [1024, 1 << 20]
    assert read(min_message_size=2048).sizes(sizes, 4096) == [1 << 20]
    assert read(buffer_alignment=512).sizes(sizes, 4096) == [1 << 20]
    assert read(name="b", num_threads_per_block=1024).digest == read().digest != read(buffer_alignment=512).digest
    packets = plan()["gpus"][0] | {"threadblocks": [{"ops": [{"name": "ppkt"}]}]}
    assert read(gpus=[packets, packets]).sizes(sizes, 4096) == [1024]


def test_a_run_records_both(tmp_path: Path) -> None:
    kit, program, record = tmp_path / "kit", tmp_path / "antiphon", tmp_path / "record.json"
    (kit / "plans/2").mkdir(parents=True)
    (kit / "plans/2/small.json").write_text(json.dumps(plan()))
    (kit / "libms_bench.so").write_bytes(b"library")
    (kit / "bench_mscclpp.py").write_text(f"import sys\ndef main():\n    print({THEIRS!r})\n    sys.exit('no such GPU')\n")
    first = "".join(line + "\n" for line in OURS.splitlines()[:2])
    program.write_text(f"#!{sys.executable}\nimport sys\nprint('antiphon 1' if '--version' in sys.argv else {first!r})\n")
    program.chmod(0o755)
    command = [sys.executable, str(ROOT / "benches/plans_vs_mscclpp.py"), "--kit", str(kit), "--antiphon", str(program)]
    command += ["--library", "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ANTIPHON_COMMIT": "0123abc"})
    written = json.loads(record.read_text())
    assert done.returncode == 1, done.stderr  # MSCCL++'s results are wrong at one size
    assert written["commit"] == "0123abc" and written["command"].startswith("MSCCLPP_FORCE_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0 ")
    assert written["libraries"]["antiphon"] == "antiphon 1" and written["notes"] == ["MSCCL++: no such GPU"]
    assert [(row["bytes"], row["ratios"]) for row in written["rows"]] == [(1024, {"": 0.5}), (65536, {})]
