"""What docs/guide/python.md and docs/guide/compat.md show, as a reader would try it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import harness
import ranks
from antiphon.language import library
from ports import free_port

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guide"
PAGE = (GUIDE / "python.md").read_text()


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


HELLO, PENDING, LOSS, SHARED, PLAN, CUDA, COMPILED, GRADIENT, FUSED, BACKEND, PROFILED, GOING_ON = programs(PAGE)
PEER, MIXED, MSCCLPP = programs((GUIDE / "compat.md").read_text())


def test_the_first_program_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    command = [sys.executable, "-m", "antiphon", "run", "-n", "4", sys.executable, str(tmp_path / "hello.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed in PAGE


def test_the_snippets_run() -> None:
    def body(comm: antiphon.Communicator) -> None:
        names = {"comm": comm, "np": np, "torch": torch, "gradient": np.ones(4)}
        exec(PENDING, names)
        assert names["gradient"].tolist() == [2, 2, 2, 2]
        exec(SHARED, names)
        assert names["mine"].shape == (512, 512) and names["theirs"].dtype == torch.bfloat16

    ranks.threads(2, body)


def test_surviving_ranks_continue() -> None:
    def body(comm: antiphon.Communicator) -> list[Any]:
        trained: list[Any] = []

        def train(comm: antiphon.Communicator, step: int) -> None:
            if step == 2 and comm.world_size == 3 and comm.rank == 1:
                comm.close()
            comm.barrier()
            trained.append((step, comm.rank, comm.world_size))

        names = {"comm": comm, "antiphon": antiphon, "train": train, "step": 0, "last": 4}
        if comm.rank == 1:
            with pytest.raises(RuntimeError, match="closed"):
                exec(LOSS, names)
        else:
            exec(LOSS, names)
        return trained

    first, _, last = ranks.threads(3, body)
    assert first == [(0, 0, 3), (1, 0, 3), (2, 0, 2), (3, 0, 2)]
    assert last == [(0, 2, 3), (1, 2, 3), (2, 1, 2), (3, 1, 2)]


def test_a_plan_runs(tmp_path: Path) -> None:
    ring = Path(__file__).resolve().parent.parent / "examples" / "python" / "plans" / "all_gather_ring.py"
    file = tmp_path / "ring.json"
    build = [sys.executable, "-m", "antiphon", "plan", "build", str(ring), "-o", str(file), "--", "2"]
    subprocess.run(build, check=True, env={**os.environ, "ANTIPHON_PYTHON": sys.executable})

    def body(comm: antiphon.Communicator) -> None:
        names = {"comm": comm, "np": np}
        exec(PLAN.replace("ring.json", str(file)), names)
        assert names["gathered"].tolist() == np.ones((8, 8)).tolist()  # type: ignore[attr-defined]

    ranks.threads(2, body)


def test_the_fused_calls_run() -> None:
    def body(comm: antiphon.Communicator) -> None:
        tensors = {name: torch.ones(3, 16, dtype=torch.bfloat16) for name in ("partial", "residual")}
        names = {"comm": comm, "torch": torch, "weight": tensors["partial"][0], **tensors}
        exec(FUSED, names)
        assert names["hidden"].eq(1).all() and names["residual"].eq(5).all() and names["fp8"].norm is None
        exec(PEER, names)
        assert names["norm"].eq(1).all()

    ranks.threads(2, body)


def compiled() -> bool:
    with antiphon.init() as comm:
        names: dict[str, Any] = {"comm": comm, "torch": torch}
        exec(COMPILED, names)
        assert names["layer"](torch.ones(2, 3), torch.ones(3, 2)).eq(6).all()
        exec(GRADIENT, names)
        # That of the sum of both ranks' losses, each of which is the sum of both exponentials.
        return bool(torch.allclose(names["weight"].grad, 2 * torch.ones(4).exp()))


def test_the_compiled_program_and_the_gradient_run() -> None:
    assert ranks.processes(2, compiled) == [True, True]


def on_a_gpu() -> bool:
    with antiphon.init() as comm:
        names = {"comm": comm, "torch": torch}
        exec(CUDA, names)
        return bool(names["total"].eq(2).all())


@pytest.mark.cuda
def test_the_program_for_gpus_runs() -> None:
    harness.need("cuda", 2)
    assert ranks.processes(2, on_a_gpu) == [True, True]


def backend() -> str:
    import torch.distributed as dist

    exec(BACKEND)
    name = dist.get_backend()
    dist.destroy_process_group()
    return name


def test_the_backend_is_registered() -> None:
    assert ranks.processes(1, backend) == ["antiphon"]


def mixed() -> bool:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(3, 8, dtype=torch.bfloat16)
    names = {"torch": torch, "rank": dist.get_rank(), "attention": ones, "mlp": lambda x: x * 2}
    exec(MIXED.replace('torch.device("cuda", rank)', '"cpu"'), names)
    dist.destroy_process_group()
    # 1 of 2 ranks, doubled, of 4 ranks.
    return bool(names["everybody"].eq(2).all() and names["own"].eq(16).all() and names["own"].shape == (3, 8))


def test_the_mixed_calls_run() -> None:
    assert ranks.processes(4, mixed) == [True] * 4


def test_the_executor_on_addresses_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_shot.json").write_text(library.build("two-shot-all-reduce", 2))
    monkeypatch.chdir(tmp_path)
    program = MSCCLPP.replace("50000", str(free_port()))

    def body(comm: antiphon.Communicator) -> None:
        names = {"rank": comm.rank, "x": torch.arange(8.0) + comm.rank, "out": torch.zeros(8)}
        exec(program, names)
        assert names["out"].tolist() == [2 * n + 1 for n in range(8)]
        comm.barrier()

    ranks.threads(2, body)


def profiled_and_shrunk(folder: str) -> tuple[list[str], int]:
    os.chdir(folder)
    names: dict[str, Any] = {"torch": torch, "gradient": torch.ones(4), "antiphon": antiphon}
    exec(BACKEND, names)
    rank = names["dist"].get_rank()
    if rank == 0:
        exec(PROFILED, names)
        found = [event.name for event in names["profiler"].events() if "antiphon" in event.name]
    else:
        names["dist"].all_reduce(names["gradient"])
        found = []
    names["dist"].barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    exec(GOING_ON, names)
    return found, names["left"].world_size


def test_profiler_and_shrink_of_the_backend_run(tmp_path: Path) -> None:
    first, second, _ = ranks.processes(3, profiled_and_shrunk, str(tmp_path), dying={2})
    assert (first, second) == ((["antiphon:all_reduce"], 2), ([], 2))
    assert '"bytes": 16' in (tmp_path / "trace.json").read_text()


def test_every_call_is_in_the_table() -> None:
    shown = set(re.findall(r"`(\w+)\(", PAGE))
    blocking = {name for name in dir(antiphon.Communicator) if f"start_{name}" in dir(antiphon.Communicator)}
    assert blocking - shown == set()
