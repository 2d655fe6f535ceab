"""What a new user meets in the first ten minutes: a notebook, a typo, an error, a handle that is printed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import antiphon
import antiphon.comm
import antiphon.lowering
import antiphon.moe
import antiphon.torch
import ranks
from test_plans import all_gather

LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ANTIPHON_RENDEZVOUS"}

#: How the variables of MPI's and Slurm's launchers begin.
FOREIGN = ("OMPI_", "PMI_", "PMIX_", "SLURM_")


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that no launcher has started, but for what ``environment`` says."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS and not name.startswith(FOREIGN)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=inherited | environment)


# A world of one.


@pytest.mark.parametrize("call", ["antiphon.init()", "antiphon.init(rank=0, world_size=1)"])
def test_without_a_launcher_the_world_is_this_rank_and_says_so(call: str) -> None:
    run = python(f"import antiphon; c = {call}; print(c.rank, c.world_size, c.timeout)", ANTIPHON_TIMEOUT="7")
    assert (run.returncode, run.stdout) == (0, "0 1 7.0\n"), run.stderr
    assert run.stderr == "antiphon: a world of this rank alone; `antiphon run -n RANKS program.py` starts several\n"


@pytest.mark.parametrize("name", sorted(LAUNCHERS - {"RANK"}))
def test_a_part_of_a_launchers_environment_is_an_error(name: str) -> None:
    run = python("import antiphon; antiphon.init()", **{name: "1"})
    assert run.returncode == 1 and "environment variable" in run.stderr and "antiphon run" in run.stderr, run.stderr
    run = python("import antiphon; antiphon.init(rank=0, world_size=1)", **{name: "1"})
    assert run.returncode == 1 and "rank and world_size need path or exchange" in run.stderr, run.stderr


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"])
def test_a_rank_of_mpi_or_slurm_is_not_alone(name: str) -> None:
    for call in "antiphon.init()", "antiphon.init(rank=0, world_size=1)":
        run = python(f"import antiphon; {call}", **{name: "3"})
        assert run.returncode == 1 and f"{name}=3" in run.stderr and "exchange=MPI.COMM_WORLD.allgather" in run.stderr, run.stderr
        assert "a world of this rank alone" not in run.stderr


def test_other_worlds_need_a_way_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="rank and world_size need path or exchange"):
        antiphon.init(rank=0, world_size=2)


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    with antiphon.init() as comm:
        yield comm


def test_every_operation_works_alone(comm: antiphon.Communicator) -> None:
    x = np.arange(4.0)
    for result in (
        comm.all_reduce(x),
        comm.all_reduce(x, "avg", algorithm="two-shot"),
        comm.all_gather(x),
        comm.reduce_scatter(x),
        comm.all_to_all(x),
        comm.all_to_all_v(x, [4], [4]),
        comm.all_gather_v(x, [4]),
        comm.reduce_scatter_v(x, [4]),
        comm.broadcast(x.copy()),
        comm.reduce(x),
        comm.gather(x),
        comm.scatter(x, out=np.empty(4)),
        comm.send_recv(x, 0, np.empty(4), 0),
        comm.start_all_reduce(x).wait(),
        comm.load_plan(all_gather(1)).execute(x),
        comm.split(0).all_reduce(x),  # type: ignore[union-attr]
        comm.shrink().all_reduce(x),
    ):
        assert result is not None and result.tolist() == x.tolist()
    comm.start_send(x, 0)
    assert comm.recv(np.empty(4), 0).tolist() == x.tolist()
    comm.barrier()
    assert comm.exchange_objects("one") == ["one"] and comm.broadcast_object("one") == "one"
    row = np.ones((2, 16), np.float32)
    assert comm.all_reduce_rms_norm(row, row).residual.tolist() == (2 * row).tolist()
    assert len(comm.symmetric(64)) == 64


def test_experts_work_alone(comm: antiphon.Communicator) -> None:
    experts, x = antiphon.moe.ExpertParallel(comm, 4, 16), torch.rand(5, 16, requires_grad=True)
    ids, weights = torch.arange(10).reshape(5, 2) % 4, torch.ones(5, 2)
    received = experts.dispatch(x, ids, weights)
    experts.combine(received.x * 2, received.routes).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2))
    by_expert = experts.dispatch_by_expert(x.detach(), torch.ones(5, 4, dtype=torch.bool))
    assert torch.equal(experts.combine_by_expert(by_expert.x, by_expert.routes), x.detach() * 4)
    few = experts.dispatch_to_slots(x.detach().bfloat16(), ids, max_tokens=5)
    assert experts.combine_from_slots(few.x, ids, weights, few.routes).shape == (5, 16)


def test_the_torch_backend_works_alone() -> None:
    program = (
        "import torch, torch.distributed as dist, antiphon.torch\n"
        "dist.init_process_group('antiphon', rank=0, world_size=1, store=dist.HashStore())\n"
        "x = torch.ones(3); dist.all_reduce(x); dist.barrier(); out = [torch.zeros(3)]\n"
        "dist.all_gather(out, x); print(out[0].tolist()); dist.destroy_process_group()\n"
    )
    run = python(program)
    assert (run.returncode, run.stdout) == (0, "[1.0, 1.0, 1.0]\n"), run.stderr


# The package and its command.


def test_modules_come_when_they_are_named() -> None:
    program = (
        "import sys, antiphon\n"
        "print('torch' in sys.modules, {'comm', 'compat', 'language', 'lowering', 'moe', 'torch'} <= set(dir(antiphon)))\n"
        "print(antiphon.moe.ExpertParallel.__name__, antiphon.language.__name__, hasattr(antiphon, 'nothing'))\n"
    )
    run = python(program)
    assert run.stdout == "False True\nExpertParallel antiphon.language False\n", run.stderr


def test_a_script_is_run_by_the_python_that_has_the_package(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import antiphon, sys\nprint(antiphon.init().world_size, sys.argv[1:])\n")
    command = [sys.executable, "-m", "antiphon", "run", "-n", "2", "hello.py", "--lr", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert sorted(run.stdout.splitlines()) == ["[0] 2 ['--lr', '1']", "[1] 2 ['--lr', '1']"], run.stderr


# Errors name what the caller called.


def test_errors_of_fusion_name_the_callers_function_and_argument() -> None:
    def body(comm: antiphon.Communicator) -> None:
        make = antiphon.comm.create_allreduce_fusion_workspace
        workspace = make("trtllm", 1, 0, 8, 16, dtype="bfloat16", group=comm)
        with pytest.raises(ValueError, match=r"^allreduce_fusion: the workspace was made with dtype=torch.bfloat16, .* torch.float32"):
            antiphon.comm.allreduce_fusion(torch.ones(2, 16), workspace, 0)
        with pytest.raises(ValueError, match="^allreduce_fusion: residual_in, rms_gamma must be given"):
            antiphon.comm.allreduce_fusion(torch.ones(2, 16).bfloat16(), workspace, 1)
        assert repr(workspace) == "<antiphon.comm workspace 'trtllm': rank 0 of 1, at most 8 tokens of 16, torch.bfloat16>"
        with pytest.raises(TypeError, match="create_allreduce_fusion_workspace: dtype must be a torch.dtype or its name, not 'bf99'"):
            make("trtllm", 1, 0, 8, 16, dtype="bf99", group=comm)

    ranks.threads(1, body)
    with pytest.raises(ValueError, match="^create_allreduce_fusion_workspace: no group"):
        antiphon.comm.create_allreduce_fusion_workspace("trtllm", 1, 0, 8, 16)


def test_errors_of_experts_name_the_callers_function() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts, x = antiphon.moe.ExpertParallel(comm, 4, 16), torch.ones(2, 16)
        with pytest.raises(TypeError, match="^dispatch: the ids must be torch.int64 or torch.int32, not torch.float32"):
            experts.dispatch(x, torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(TypeError, match="^dispatch_by_expert: the routing map must be torch.bool"):
            experts.dispatch_by_expert(x, torch.ones(2, 4))
        with pytest.raises(ValueError, match="^dispatch_to_slots: 2 tokens; max_tokens is 1"):
            experts.dispatch_to_slots(x.bfloat16(), torch.zeros(2, 2, dtype=torch.int64), max_tokens=1)
        with pytest.raises(ValueError, match="^ExpertParallel: hidden must be even, as rows are whole 16 bytes, not 3"):
            antiphon.moe.ExpertParallel(comm, 4, 3)

    ranks.threads(1, body)


def test_an_attachment_without_a_group_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="attach: no group: pass one, or call torch.distributed.init_process_group first"):
        antiphon.lowering.attach()


def test_a_name_that_is_not_served_comes_with_the_likeliest_of_those_that_are() -> None:
    with pytest.raises(ImportError) as caught:
        from antiphon.comm import create_allreduce_fusion_workspaces  # noqa: F401
    text = str(caught.value)
    assert "it serves create_allreduce_fusion_workspace, " in text and text.endswith(" more")
    assert len(text.partition("it serves ")[2]) < 200


def test_what_cannot_be_pickled_is_named_on_all_ranks() -> None:
    def body(comm: antiphon.Communicator) -> None:
        for call, name in ((comm.exchange_objects, "exchange_objects"), (lambda x: comm.broadcast_object(x, 1), "broadcast_object")):
            kind, text = (RuntimeError, f"^{name}: rank 1 could not pickle its object: .*<lambda>") if comm.rank == 0 else (
                TypeError,
                f"^{name}: <function .*, a function, cannot be pickled: .*<lambda>",
            )
            with pytest.raises(kind, match=text):
                call((lambda: 1) if comm.rank == 1 else 1)  # type: ignore[operator]
        assert comm.exchange_objects(comm.rank) == [0, 1]

    ranks.threads(2, body)


# Types and names.


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [4.0]),
        ("SUM", [4.0]),
        ("mean", [2.0]),
        ("Avg", [2.0]),
        (antiphon.ReduceOp.MAX, [3.0]),
        (antiphon.ReduceOp("mean"), [2.0]),
        (torch.distributed.ReduceOp.PRODUCT, [3.0]),
        (torch.distributed.ReduceOp.AVG, [2.0]),
        (torch.distributed.ReduceOp(torch.distributed.ReduceOp.MIN), [1.0]),
    ],
)
def test_operators_are_names_in_any_case_and_the_enums_of_both_libraries(op: Any, expected: list[float]) -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = np.array([1.0 + 2 * comm.rank])
        assert comm.all_reduce(x, op).tolist() == expected
        assert comm.start_all_reduce(x, op).wait().tolist() == expected
        assert comm.reduce_scatter(np.repeat(x, 2), op).tolist() == expected
        if isinstance(op, str):
            group = antiphon.torch.ops.register(comm)
            assert torch.ops.antiphon.all_reduce(torch.from_numpy(x), group, op).tolist() == expected

    ranks.threads(2, body)


def test_what_is_no_operator_is_refused(comm: antiphon.Communicator) -> None:
    for op, kind, text in (
        ("median", ValueError, "unknown reduction \"median\""),
        (torch.distributed.ReduceOp.PREMUL_SUM, ValueError, "PREMUL_SUM"),
        (7, TypeError, "torch.distributed.ReduceOp"),
    ):
        with pytest.raises(kind, match=text):
            comm.all_reduce(np.ones(2), op)  # type: ignore[arg-type]


def test_dtypes_are_names_or_those_of_torch_and_numpy(comm: antiphon.Communicator) -> None:
    buffer = comm.symmetric(64)
    for dtype in ("float32", torch.float32, np.float32, np.dtype("float32")):
        assert buffer.memory(dtype, (4,)).dtype == "float32"  # type: ignore[arg-type]
    assert buffer.memory(torch.bfloat16).dtype == buffer.memory("bfloat16").dtype == "bfloat16"


def test_weights_of_routers_are_cast(comm: antiphon.Communicator) -> None:
    experts, x = antiphon.moe.ExpertParallel(comm, 4, 16), torch.rand(5, 16)
    ids = torch.arange(10).reshape(5, 2) % 4
    weights = torch.rand(5, 2).bfloat16().requires_grad_()
    received = experts.dispatch(x, ids, weights)
    assert received.weights.dtype == torch.float32 and torch.equal(received.weights, weights.float())
    received.weights.sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.bfloat16
    few = experts.dispatch_to_slots(x.bfloat16(), ids, max_tokens=5)
    sums = [experts.combine_from_slots(few.x, ids, given, few.routes) for given in (weights.detach(), weights.detach().float())]
    assert torch.equal(*sums)
    with pytest.raises(TypeError, match="dispatch: the weights must be of a floating-point dtype, not torch.int64"):
        experts.dispatch(x, ids, ids)


def test_a_group_that_is_none_is_named() -> None:
    group: Any = "world"
    with pytest.raises(TypeError, match="ExpertParallel: the group must be an antiphon.Communicator or a torch process group, not 'world'"):
        antiphon.moe.ExpertParallel(group, 4, 16)


def test_a_dtype_may_be_written_in_each_of_its_ways(comm: antiphon.Communicator) -> None:
    buffer = comm.symmetric(16)
    for memory in (
        buffer.memory(np.float32),
        buffer.memory(np.dtype("float32")),
        buffer.memory(torch.float32),
        buffer.memory("float32"),
        buffer.memory("torch.float32"),
    ):
        assert torch.from_dlpack(memory).dtype == torch.float32
    with pytest.raises(ValueError, match="has not this machine's byte order"):
        buffer.memory(np.dtype(np.float32).newbyteorder())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_ends_pickling_and_is_no_fault_of_the_object_stays_as_it_is(error: type[BaseException]) -> None:
    class Stops:
        def __reduce__(self) -> Any:
            raise error

    def body(comm: antiphon.Communicator) -> None:
        stops: object = Stops() if comm.rank == 0 else 1
        with pytest.raises(error if comm.rank == 0 else RuntimeError):
            comm.exchange_objects(stops)
        assert comm.exchange_objects(comm.rank) == [0, 1]

    ranks.threads(2, body)


def test_what_is_printed_says_what_it_is(comm: antiphon.Communicator) -> None:
    experts, x = antiphon.moe.ExpertParallel(comm, 4, 16), torch.ones(5, 16)
    ids = torch.arange(10).reshape(5, 2) % 4
    every = (
        experts.dispatch(x, ids, torch.ones(5, 2)).routes,
        experts.dispatch(x, ids, torch.ones(5, 2), capacity=7).routes,
        experts.dispatch_by_expert(x, torch.ones(5, 4, dtype=torch.bool)).routes,
        experts.dispatch_to_slots(x.bfloat16(), ids, max_tokens=6).routes,
    )
    assert [repr(each) for each in (experts, *every)] == [
        "<antiphon.moe.ExpertParallel: 4 experts, hidden 16, rank 0 of 1>",
        "<antiphon.moe.ByTokenRoutes: 5 tokens, 5 rows, 4 experts>",
        "<antiphon.moe.ByTokenRoutes: 5 tokens, 7 rows, 4 experts>",
        "<antiphon.moe.ByExpertRoutes: 5 tokens, 20 rows by expert, 4 experts>",
        "<antiphon.moe.SlotRoutes: at most 6 tokens of each rank, rows of 16, 4 experts>",
    ]
    for routes in every:
        with pytest.raises(ValueError, match="cannot be replaced"):
            routes._replace(**{routes._fields[0]: None})
        with pytest.raises(ValueError, match="cannot be made from fields"):
            type(routes)._make(list(routes))
    buffer = antiphon.moe.deep_ep.Buffer(comm)
    assert repr(buffer) == "<antiphon.moe.deep_ep.Buffer: normal calls, rank 0 of 1>"
    hybrid = antiphon.moe.deep_ep.HybridEPBuffer(comm, 16, 8, 4)
    assert repr(hybrid) == "<antiphon.moe.deep_ep.HybridEPBuffer: 4 experts of each rank, hidden 16, rank 0 of 1>"
    started = comm.start_all_reduce(x)
    started.wait()
    assert repr(started) == "<antiphon.Pending: all_reduce finished>"
    receive = comm.start_recv(torch.empty(5, 16), 0)
    assert repr(receive) == "<antiphon.Pending: recv under way>"
    comm.send(x, 0)
    receive.wait()
