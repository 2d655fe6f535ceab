"""A rank that gets SIGUSR1 reports what it waits for, and what its peers do."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_rank_that_waits_says_for_whom_and_what_those_do(tmp_path: Path) -> None:
    """Rank 0 waits for all: for rank 1, which waits for a message, for rank 2, which is stopped, and for rank 3, which sleeps."""
    command = [sys.executable, "-c", RANK]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(rank), str(tmp_path / "world")], **options) for rank in range(4)]  # type: ignore[call-overload]
    try:
        for process in started:
            assert process.stdout.readline() == "ready\n"
        started[2].send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # all wait
        for process in started[:2]:
            process.send_signal(signal.SIGUSR1)
        first, of_1, of_2, of_3 = (started[0].stderr.readline() for _ in range(4))
        pids = [process.pid for process in started]
        seconds = r"since [\d.]+m?s"
        own = rf"antiphon: rank 0 \(process {pids[0]}\) all_reduce\(3 × f64, sum\) waits {seconds} for ranks \[1, 2, 3\] of 4\n"
        assert re.fullmatch(own, first), first
        message = rf"antiphon:   rank 1 \(process {pids[1]}\) waits in send/recv\(5 × f64, tag 7\) {seconds}\n"
        assert re.fullmatch(message, of_1), of_1
        assert of_2 == f"antiphon:   rank 2 (process {pids[2]}) is stopped\n"
        assert of_3 == f"antiphon:   rank 3 (process {pids[3]}) does not wait in this communicator: its process sleeps\n"
        assert "waits" in started[1].stderr.readline() and "rank 3 " in started[1].stderr.readline()
    finally:
        for process in started:
            process.kill()
            process.communicate()


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
