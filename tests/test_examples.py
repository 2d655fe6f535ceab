"""The examples, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "python"
SAYS = {
    "call_overhead.py": r"\d+\.\d µs for each call of all_reduce, in place",
    "cuda_graph.py": r"20 steps (replayed as a graph|one by one) on (cuda|cpu): as computed alone",
    "plan.py": r"20 calls (replayed as a graph|one by one) on (cuda|cpu): as the program says",
    "plan_collection.py": r"on (cuda|cpu), small and large messages by the (fastest|first .*): \S+, \S+|1 rank: the library's plans are for 2",
    "all_reduce.py": r"the sum over \d ranks of \[1. 1. 1. 1.\], ... is \[",
    "tensor_parallel_mlp.py": r"largest error \S+e-\d+, allowed",
    "mixed_tp_dp.py": r"\d+ groups of \d+, \d+ tokens: \S+ and \S+ fused, largest error \S+, allowed",
    "transformer_block.py": r"sums equal, norms within \S+, allowed \S+; \S+ ms fused, \S+ ms unfused",
    "compiled_block.py": r"\d ranks: as in eager, after (fuse|no rewrite)",
    "moe_training.py": r"loss \S+: \d+ gradients within \S+ of one process's",
    "ddp.py": r"20 steps, loss \S+: weights within \S+ of training alone",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SAYS)
def test_an_example_on_ranks(name: str, world_size: int) -> None:
    done = run("-m", "antiphon", "run", "-n", str(world_size), sys.executable, str(FOLDER / name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(SAYS[name], done.stdout)) == 1, done.stdout  # rank 0 alone speaks


@pytest.mark.parametrize("name", SAYS)
def test_an_example_without_ranks_says_how_to_run_it(name: str) -> None:
    done = run(str(FOLDER / name))
    assert done.returncode == 1 and f"antiphon run -n 2 python {FOLDER / name}" in done.stderr, done.stderr
