"""What a job waits for: a rank that gets SIGUSR1 reports it, and `antiphon doctor --job` shows it of all ranks."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK = """
import sys, numpy as np, antiphon
rank, path = int(sys.argv[1]), sys.argv[2]
with antiphon.init(rank=rank, world_size=4, path=path, timeout=60) as comm:
    comm.barrier()
    print("ready", flush=True)
    if rank == 0:
        comm.all_reduce(np.ones(3))
    elif rank == 1:
        comm.recv(np.zeros(5), 3, tag=7)
    else:
        sys.stdin.read()
"""


# A job's own launcher, as torchrun is one: the process of the tests may have other communicators.
LAUNCHER = """
import sys
from pathlib import Path
from test_waiting import hanging_job
with hanging_job(Path(sys.argv[1])) as ranks:
    print(*(rank.pid for rank in ranks), flush=True)
    sys.stdin.read()
"""


def until_settled(pid: int) -> None:
    """Waits until ranks 0 and 1 of a process's job wait, rank 2 is stopped, and rank 3 sleeps."""
    end = time.monotonic() + 30
    while True:
        shown = doctor("--job", str(pid)).stdout
        if shown.count("waits in") == 2 and "is stopped" in shown and "its process sleeps" in shown:
            return
        assert time.monotonic() < end, shown
        time.sleep(0.05)


@contextlib.contextmanager
def hanging_job(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank 0 waits for all: for rank 1, which waits for a message, for rank 2, which is stopped, and for rank 3, which sleeps."""
    command = [sys.executable, "-c", RANK]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(rank), str(folder / "world")], **options) for rank in range(4)]  # type: ignore[call-overload]
    try:
        for process in started:
            assert process.stdout.readline() == "ready\n"
        started[2].send_signal(signal.SIGSTOP)
        until_settled(started[3].pid)
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_rank_that_waits_says_for_whom_and_what_those_do(tmp_path: Path) -> None:
    with hanging_job(tmp_path) as started:
        for process in started[:2]:
            process.send_signal(signal.SIGUSR1)
        first, of_1, of_2, of_3 = (started[0].stderr.readline() for _ in range(4))  # type: ignore[union-attr]
        pids = [process.pid for process in started]
        seconds = r"since [\d.]+m?s"
        own = rf"antiphon: rank 0 \(process {pids[0]}\) all_reduce\(3 × f64, sum\) waits {seconds} for ranks \[1, 2, 3\] of 4\n"
        assert re.fullmatch(own, first), first
        message = rf"antiphon:   rank 1 \(process {pids[1]}\) waits in send/recv\(5 × f64, tag 7\) {seconds}\n"
        assert re.fullmatch(message, of_1), of_1
        assert of_2 == f"antiphon:   rank 2 (process {pids[2]}) is stopped\n"
        assert of_3 == f"antiphon:   rank 3 (process {pids[3]}) does not wait in this communicator: its process sleeps\n"
        assert "waits" in (line := started[1].stderr.readline()) and "rank 3 " in started[1].stderr.readline(), line  # type: ignore[union-attr]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "antiphon", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)


@contextlib.contextmanager
def launched_job(folder: Path) -> Iterator[tuple[int, list[int]]]:
    """The process ids of the launcher of a hanging job and of its ranks."""
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here
    ) as launcher:
        assert launcher.stdout is not None and launcher.stdin is not None
        yield launcher.pid, [int(pid) for pid in launcher.stdout.readline().split()]
        launcher.stdin.close()


@pytest.mark.parametrize("asked", ["a rank", "a stopped rank", "the program that started the ranks"])
def test_the_doctor_shows_what_each_rank_of_a_running_job_waits_for(tmp_path: Path, asked: str) -> None:
    with launched_job(tmp_path) as (launcher, pids):
        asked_for = {"a rank": pids[3], "a stopped rank": pids[2]}.get(asked, launcher)
        run = doctor("--job", str(asked_for))
        assert run.returncode == 0, run.stderr
        seconds = r"since [\d.]+ s"
        expected = (
            r"4 processes, 1 communicator\n\n"
            r"world of 4 ranks\n"
            rf"  rank 0 \(process {pids[0]}\) waits in all_reduce\(3 × f64, sum\) for ranks \[1, 2, 3\], {seconds}\n"
            rf"  rank 1 \(process {pids[1]}\) waits in send/recv\(5 × f64, tag 7\) for ranks \[3\], {seconds}\n"
            rf"  rank 2 \(process {pids[2]}\) is stopped\n"
            rf"  rank 3 \(process {pids[3]}\) does not wait here: its process sleeps\n"
            r"  waited for, and not waiting themselves: ranks \[2, 3\]\n"
        )
        assert re.fullmatch(expected, run.stdout), run.stdout
        (world,) = json.loads(doctor("--job", str(asked_for), "--json").stdout)["communicators"]
        assert [rank["rank"] for rank in world["ranks"]] == [0, 1, 2, 3], "the job goes on"
        assert world["ranks"][1]["wait"]["missing"] == [3]


def test_the_doctor_says_what_is_no_job() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        run = doctor("--job", str(other.pid))
        other.kill()
    assert run.returncode == 1 and "have a communicator" in run.stderr, run
    run = doctor("--job", str(2**31))
    assert (run.returncode, run.stderr) == (1, f"antiphon: there is no process {2**31}\n")


def test_a_handler_of_the_program_stays() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))\n"
        "import antiphon\n"
        "with antiphon.init(rank=0, world_size=1, exchange=lambda mine: [mine]):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert (run.returncode, run.stdout) == (0, "mine\n"), run.stderr
