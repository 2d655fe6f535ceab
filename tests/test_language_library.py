"""The library of algorithms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.language import ReduceOperationType, library


def test_the_names_are_those_of_the_command() -> None:
    command = [sys.executable, "-m", "antiphon", "plan", "build", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert library.names() == [line.split()[0] for line in listed.splitlines()]


@pytest.mark.parametrize("name", library.names())
def test_the_plan_is_that_of_the_command(name: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command = [sys.executable, "-m", "antiphon", "plan", "build", "--library", name, "--ranks", "4", "-o", str(file)]
    subprocess.run(command, check=True)
    assert library.build(name, 4) == file.read_text().removesuffix("\n")


def test_options_reach_the_plan() -> None:
    plan = library.build(
        "hierarchical-all-reduce",
        6,
        nodes=3,
        inplace=True,
        reduce_op=ReduceOperationType.max,
        instances=2,
        reuse_resources=True,
        num_threads_per_block=512,
        buffer_alignment=32,
        min_message_size=64,
        max_message_size=2**20,
    )
    header = {key: value for key, value in json.loads(plan).items() if key != "gpus"}
    assert header == {
        "name": "hierarchical-all-reduce",
        "collective": "allreduce",
        "protocol": "Simple",
        "inplace": True,
        "reuse_resources": True,
        "num_threads_per_block": 512,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 32,
        "min_message_size": 64,
        "max_message_size": 2**20,
    }
    assert '"reduce_op": "max"' in plan and '"reduce_op": "sum"' not in plan
    assert len(json.loads(plan)["gpus"]) == 6
    assert plan != library.build("hierarchical-all-reduce", 6, nodes=2, inplace=True)
    assert '"unit_size": 4096' in library.build("pipelined-all-to-all", 4, unit_size=4096)


@pytest.mark.parametrize(
    ("name", "ranks", "options", "said"),
    [
        ("ring", 4, {}, "ring-all-reduce"),
        ("ring-all-reduce", 1, {}, "2 ranks"),
        ("send-recv", 4, {"inplace": True}, "in place"),
        ("hierarchical-all-reduce", 4, {"nodes": 3}, "3 nodes"),
        ("pipelined-all-to-all", 4, {"unit_size": 0}, "0 bytes"),
        ("ring-all-reduce", 2**20, {}, "at most"),
        ("ring-all-reduce", -1, {}, "ranks must be from 0 to 2\\*\\*32 - 1, but it is -1"),
        ("ring-all-reduce", 4, {"max_message_size": 2**64}, "max_message_size must be .* it is 18446744073709551616"),
        ("ring-all-reduce", 4, {"instances": 2**30}, "at most"),
    ],
)
def test_what_an_algorithm_is_not_for_is_an_error(name: str, ranks: int, options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        library.build(name, ranks, **options)
