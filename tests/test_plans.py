"""Execution plans at work: proved, loaded once, executed on arrays of any library."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import ranks
from antiphon.language import *


def all_gather(size: int = 2, inplace: bool = False) -> CollectiveProgram:
    """Each rank puts its input into every rank's output."""
    with CollectiveProgram("all_gather", AllGather(size, 1, inplace), size) as program:
        pairs = [(own, peer) for own in range(size) for peer in range(size) if own != peer]
        channel = {(own, peer): MemoryChannel(peer, own) for own, peer in pairs}
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, relaxed=True, data_sync=SyncType.none)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, relaxed=True, data_sync=SyncType.after)
        for own, peer in pairs:
            mine = Rank(own).get_input_buffer()[0:1]
            channel[own, peer].put(Rank(peer).get_output_buffer()[own : own + 1], mine, tb=0)
        for own in range(size) if not inplace else ():
            rank = Rank(own)
            rank.copy(rank.get_output_buffer()[own : own + 1], rank.get_input_buffer()[0:1], tb=0)
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
    return program


def all_reduce(size: int = 2, reads: bool = True) -> CollectiveProgram:
    """Each rank reduces every rank's input into its output."""
    with CollectiveProgram("all_reduce", AllReduce(size, 1, False), size) as program:
        pairs = [(own, peer) for own in range(size) for peer in range(size) if own != peer]
        channel = {(own, peer): MemoryChannel(peer, own) for own, peer in pairs}
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
        for own, peer in pairs if reads else ():
            mine, output = Rank(own).get_input_buffer()[0:size], Rank(own).get_output_buffer()[0:size]
            channel[own, peer].reduce(mine, [Rank(peer).get_input_buffer()[0:size]], tb=0, local_dst_chunk=output)
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
    return program


def test_a_plan_is_loaded_once_and_executed_often() -> None:
    program = all_reduce()

    def body(comm: antiphon.Communicator) -> None:
        plan = comm.load_plan(program)
        assert (plan.name, plan.collective) == ("all_reduce", "allreduce")
        assert repr(plan) == "<antiphon.Plan \"all_reduce\": allreduce of 2 ranks>"
        for count in (8, 4096, 8):
            x = np.arange(count, dtype=np.float32) + comm.rank
            total = plan.execute(x)
            assert isinstance(total, np.ndarray) and total.dtype == np.float32
            assert total.tolist() == (2 * np.arange(count) + 1).tolist()
            assert x[0] == comm.rank
        plan.close()
        plan.close()
        with pytest.raises(ValueError, match="the plan is closed"):
            plan.execute(x)

    ranks.threads(2, body)


def test_the_output_is_the_callers_or_new_or_the_input() -> None:
    program = all_reduce()

    def body(comm: antiphon.Communicator) -> None:
        plan = comm.load_plan(program)
        x, out = np.ones((2, 8)), np.zeros((4, 4))
        assert plan.execute(x, out) is out and out.tolist() == [[2.0] * 4] * 4
        assert plan.execute(x).shape == (2, 8)
        assert plan.execute(x, x) is x and x.tolist() == [[2.0] * 8] * 2

    ranks.threads(2, body)


def test_an_output_has_the_plans_size() -> None:
    program = all_gather(3)

    def body(comm: antiphon.Communicator) -> None:
        plan = comm.load_plan(program)
        gathered = plan.execute(torch.full((2, 4), comm.rank, dtype=torch.bfloat16))
        assert isinstance(gathered, torch.Tensor) and gathered.dtype == torch.bfloat16
        assert gathered.tolist() == [[float(row // 2)] * 4 for row in range(6)]

    ranks.threads(3, body)


def test_a_plan_that_works_in_place_does_so() -> None:
    program = all_gather(2, inplace=True)

    def body(comm: antiphon.Communicator) -> None:
        plan = comm.load_plan(program)
        x = np.zeros((2, 4), np.int32)
        x[comm.rank] = comm.rank + 5
        assert plan.execute(x) is x
        assert x.tolist() == [[5] * 4, [6] * 4]

    ranks.threads(2, body)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.complex64, np.bool_])
def test_elements_without_arithmetic_are_moved_and_not_reduced(dtype: Any) -> None:
    gather, reduction = all_gather(), all_reduce()

    def body(comm: antiphon.Communicator) -> None:
        x = np.full(16, comm.rank, dtype)
        assert comm.load_plan(gather).execute(x).tolist() == [*[dtype(0)] * 16, *[dtype(1)] * 16]
        with pytest.raises(TypeError, match=f"elements of type {x.dtype} cannot be reduced, only "):
            comm.load_plan(reduction).execute(x)

    ranks.threads(2, body)


def test_elements_of_torch_without_arithmetic_are_moved() -> None:
    program = all_gather()

    def body(comm: antiphon.Communicator) -> None:
        x = torch.full((16,), 1.0 + comm.rank).to(torch.float8_e4m3fn)
        gathered = comm.load_plan(program).execute(x)
        assert gathered.dtype == torch.float8_e4m3fn and gathered.float().tolist() == [1.0] * 16 + [2.0] * 16

    ranks.threads(2, body)


def test_a_plan_is_a_program_or_its_text_or_a_file(tmp_path: Path) -> None:
    text, file = all_reduce().to_json(), tmp_path / "plan.json"
    file.write_text(text)

    def body(comm: antiphon.Communicator) -> None:
        for plan in (text, file, str(file)):
            assert comm.load_plan(plan).execute(np.ones(8)).tolist() == [2.0] * 8
        with pytest.raises(FileNotFoundError, match="nowhere.json"):
            comm.load_plan(tmp_path / "nowhere.json")
        with pytest.raises(TypeError, match="its text, the path of its file, or a program, not 7"):
            comm.load_plan(7)  # type: ignore[arg-type]

    ranks.threads(2, body)


def test_a_program_is_loaded_as_it_is() -> None:
    program = all_reduce()

    def body(comm: antiphon.Communicator) -> None:
        # It is the plan that its text says: ranks that load either agree.
        plan = comm.load_plan([program.finish(), program.to_json()][comm.rank])
        assert plan.execute(np.ones(8)).tolist() == [2.0] * 8

    ranks.threads(2, body)


def test_what_is_not_proved_is_not_loaded() -> None:
    wrong = all_reduce(reads=False).to_json()
    broken = json.dumps({**json.loads(wrong), "gpus": 5})

    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(ValueError, match="(?s)plan \"all_reduce\" is not proved.*rejected: .* error"):
            comm.load_plan(wrong)
        with pytest.raises(ValueError, match="the plan's text: invalid type: integer `5`"):
            comm.load_plan(broken)
        with pytest.raises(ValueError, match="the plan's text is longer than 67108864 bytes, the most that is read"):
            comm.load_plan("/dev/zero")
        with pytest.raises(ValueError, match="plan \"all_gather\" is for 3 ranks, and there are 2"):
            comm.load_plan(all_gather_of_three)
        # A mistake of one rank is an error on every rank, and the communicator stays usable.
        named = "rank 1 has no plan that can run: " if comm.rank == 0 else ""
        with pytest.raises(ValueError, match=f"^{named}plan \"all_reduce\" is not proved"):
            comm.load_plan(right if comm.rank == 0 else wrong)
        with pytest.raises(RuntimeError, match="ranks load different plans"):
            comm.load_plan(right if comm.rank == 0 else other)
        assert comm.all_reduce(np.ones(1)).tolist() == [2.0]

    all_gather_of_three = all_gather(3).to_json()
    right, other = all_reduce().to_json(), all_gather().to_json()
    ranks.threads(2, body)


def test_arrays_that_do_not_fit_are_refused() -> None:
    program = all_reduce()

    def body(comm: antiphon.Communicator) -> None:
        plan = comm.load_plan(program)
        both = np.ones(24)
        refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
            (ValueError, "40 bytes is not 2 chunks of whole multiples of 16 bytes", (np.ones(5),)),
            (ValueError, "the output's 64", (np.ones(8), np.ones(16))),
            (ValueError, "strides .* is not contiguous", (np.ones((8, 2))[:, 0],)),
            (ValueError, "overlap: they must be apart, or the same", (both[:16], both[8:])),
            (TypeError, "the input is float64, the output is float32", (np.ones(8), np.ones(8, np.float32))),
            (TypeError, "elements of type complex64 cannot be reduced", (np.ones(8, np.complex64),)),
            (TypeError, "the input is a list", ([1.0, 2.0],)),
        ]
        for error, text, arguments in refused:
            with pytest.raises(error, match=text):
                plan.execute(*arguments)
        assert plan.execute(np.ones(8)).tolist() == [2.0] * 8

    ranks.threads(2, body)


def test_a_plan_ends_with_its_communicator() -> None:
    program = all_reduce()

    def body(comm: antiphon.Communicator) -> antiphon.Plan:
        return comm.load_plan(program)

    for plan in ranks.threads(2, body):
        plan.close()
        with pytest.raises(RuntimeError, match="the communicator of plan \"all_reduce\" is closed"):
            plan.execute(np.ones(8))


def sum_in_processes(text: str) -> list[float]:
    with antiphon.init() as comm:
        plan = comm.load_plan(text)
        x = torch.arange(1 << 16, dtype=torch.float32) + comm.rank
        total = [plan.execute(x) for _ in range(3)][-1]
        assert torch.equal(total, comm.all_reduce(x))
        plan.close()
        return total[:4].tolist()


def test_ranks_are_processes_too() -> None:
    assert ranks.processes(2, sum_in_processes, all_reduce().to_json()) == [[1.0, 3.0, 5.0, 7.0]] * 2


def test_the_options_of_a_plan_on_the_host() -> None:
    text = all_reduce().to_json()

    def body(comm: antiphon.Communicator) -> None:
        for device in (None, "cpu", torch.device("cpu")):
            plan = comm.load_plan(text, device=device, packets="ll8")
            assert plan.device is None and plan.execute(np.ones(8)).tolist() == [2.0] * 8
        refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, "unknown packets \"ll\": known are ll8, ll16", {"packets": "ll"}),
            (ValueError, "most_scratch is for plans on GPUs", {"most_scratch": 1 << 20}),
            (ValueError, "unknown form \"fast\": known are auto, compiled, interpreted", {"form": "fast"}),
            (ValueError, "form is for plans on GPUs", {"form": "compiled"}),
            (ValueError, "unknown ports \"dma\": known are blocks, engines", {"ports": "dma"}),
            (ValueError, "ports is for plans on GPUs", {"ports": "engines"}),
            (ValueError, "-1 is negative", {"most_scratch": -1}),
            *((ValueError, "unknown device .*: pass \"cpu\"", {"device": name}) for name in ("gpu", "cuda:", "cuda:x", "cpu:1", -1, 1.5)),
        ]
        for error, said, options in refused:
            with pytest.raises(error, match=said):
                comm.load_plan(text, **options)
        with pytest.raises(NotImplementedError, match="prepare: plan \"all_reduce\" is on the host"):
            plan.prepare("float32", 32)
        with pytest.raises(ValueError, match="execute: host memory has no stream 7"):
            plan.execute(np.ones(8), stream=7)
        with pytest.raises(RuntimeError, match="libcuda|device 99"):
            comm.load_plan(text, device=99)
        assert plan.execute(np.ones(8)).tolist() == [2.0] * 8

    ranks.threads(2, body)
