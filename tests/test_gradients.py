"""Gradients of collectives: those of operators are right, and none is lost or wrong in silence."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import antiphon
import antiphon.torch
import ranks
from gradients import check_gradients
from test_plans import all_gather

Comm = antiphon.Communicator
ops = torch.ops.antiphon

#: A call of each operator, of a rank's input of ``4 * size`` rows.
OPERATORS: dict[str, Callable[[Comm, str, Tensor], Tensor]] = {
    "all_reduce": lambda comm, group, x: ops.all_reduce(x, group),
    "all_reduce avg": lambda comm, group, x: ops.all_reduce(x, group, "avg"),
    "all_gather": lambda comm, group, x: ops.all_gather(x, group),
    "reduce_scatter": lambda comm, group, x: ops.reduce_scatter(x, group),
    "reduce_scatter avg": lambda comm, group, x: ops.reduce_scatter(x, group, "avg"),
    "all_to_all": lambda comm, group, x: ops.all_to_all(x, group),
    "broadcast": lambda comm, group, x: ops.broadcast(x, group, 1),
    "scatter": lambda comm, group, x: ops.scatter(x, group, 1),
    "all_gather_v": lambda comm, group, x: ops.all_gather_v(x[: comm.rank + 1], [r + 1 for r in range(comm.world_size)], group),
    "all_to_all_v": lambda comm, group, x: ops.all_to_all_v(x, *uneven(comm), group),
    "shard_dim_all_to_all": lambda comm, group, x: ops.shard_dim_all_to_all(x, 0, 1, group),
}


def uneven(comm: Comm) -> tuple[list[int], list[int]]:
    """Rank ``r`` sends all but ``size - 1`` of its rows to the next rank, and one to each other."""
    size, rows = comm.world_size, 4 * comm.world_size
    sends = [1] * size
    sends[(comm.rank + 1) % size] = rows - size + 1
    receives = [1] * size
    receives[(comm.rank - 1) % size] = rows - size + 1
    return sends, receives


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_the_gradient_of_its_differences(name: str, size: int) -> None:
    def body(comm: Comm) -> Callable[[Tensor], tuple[Tensor]]:
        group, weights = antiphon.torch.ops.register(comm), torch.arange(3.0 * size * size * 16, dtype=torch.float64).cos()

        def run(x: Tensor) -> tuple[Tensor]:
            y = OPERATORS[name](comm, group, x)
            return (y * weights[: y.numel()].reshape(y.shape) * (comm.rank + 1),)

        return run

    columns = size if name == "shard_dim_all_to_all" else 1
    inputs = [torch.rand(4 * size, columns, dtype=torch.float64, requires_grad=True) for _ in range(size)]
    check_gradients(body, inputs, size=size)


def test_gradients_flow_through_a_compiled_program() -> None:
    with antiphon.init(rank=0, world_size=1, exchange=lambda mine: [mine]) as comm:
        group, w = antiphon.torch.ops.register(comm), torch.arange(4.0).requires_grad_()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def loss(w: Tensor) -> Tensor:
            total: Tensor = ops.all_reduce(w * 2, group) * ops.broadcast(w, group)
            return total.sum()

        loss(w).backward()
        assert w.grad is not None and torch.equal(w.grad, 4 * torch.arange(4.0))


def test_a_reduction_without_a_gradient_says_so() -> None:
    with antiphon.init(rank=0, world_size=1, exchange=lambda mine: [mine]) as comm:
        group, w = antiphon.torch.ops.register(comm), torch.ones(4, requires_grad=True)
        with pytest.raises(NotImplementedError, match="all_reduce: 'max' has no gradient, only 'sum' and 'avg'"):
            ops.all_reduce(w, group, "max").sum().backward()


def alone() -> Comm:
    return antiphon.init(rank=0, world_size=1, exchange=lambda mine: [mine])


#: Methods that track no gradient, of a tensor that requires grad; and the operator that the error names.
REFUSED: dict[str, Callable[[Comm, Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_to_all_v": lambda comm, x: comm.all_to_all_v(x, [4], [4]),
    "all_gather_v": lambda comm, x: comm.all_gather_v(x, [4]),
    "scatter": lambda comm, x: comm.scatter(x),
}
#: Those without such an operator.
ALONE: dict[str, Callable[[Comm, Tensor], object]] = {
    "reduce": lambda comm, x: comm.reduce(x),
    "gather": lambda comm, x: comm.gather(x),
    "all_reduce_rms_norm": lambda comm, x: comm.all_reduce_rms_norm(x),
    "all_reduce_fused": lambda comm, x: comm.all_reduce_fused(x=x, sum_out=torch.empty_like(x)),
    "send_recv": lambda comm, x: comm.send_recv(x, 0, torch.empty_like(x), 0),
    "start_send": lambda comm, x: comm.start_send(x, 0),
    "execute": lambda comm, x: comm.load_plan(all_gather(1)).execute(x),
}


@pytest.mark.parametrize("name", [*REFUSED, *ALONE])
def test_a_tensor_that_requires_grad_is_refused_unless_grad_mode_is_off(name: str) -> None:
    call = {**REFUSED, **ALONE}[name]
    with alone() as comm:
        w = torch.ones(4, 8, requires_grad=True)
        with pytest.raises(ValueError, match=f"{name}: a tensor requires grad") as caught:
            call(comm, w.exp())
        assert (f"torch.ops.antiphon.{name} does" in str(caught.value)) == (name in REFUSED)
        with torch.no_grad():
            call(comm, w.exp())
            call(comm, w.detach())


def test_in_place_operators_refuse_gradients_when_they_run_and_when_they_are_compiled() -> None:
    def program(w: Tensor, group: str) -> Tensor:
        h = w * 2
        ops.all_reduce_(h, group)
        return h.sum()

    with alone() as comm:
        group, w = antiphon.torch.ops.register(comm), torch.ones(4, requires_grad=True)
        for run in program, torch.compile(program, backend="aot_eager"):
            with pytest.raises(Exception, match="all_reduce_?: a tensor requires grad"):
                run(w, group)


def test_forward_mode_derivatives_are_refused_and_not_0() -> None:
    from torch.autograd import forward_ad

    with alone() as comm:
        group, x = antiphon.torch.ops.register(comm), torch.ones(4, 8)
        for name in ("all_reduce", "all_gather", "all_reduce_rms_norm"):
            operator: Any = getattr(ops, name)
            with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
                torch.func.jvp(lambda x: operator(x * 3, group), (x,), (x,))
            with forward_ad.dual_level():
                with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
                    operator(forward_ad.make_dual(x, x), group)
            operator(x, group)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            for name, call in {**REFUSED, **ALONE}.items():
                with pytest.raises(NotImplementedError, match=f"{name}: a tensor has a tangent of forward mode"):
                    call(comm, dual)
            assert torch.equal(comm.all_reduce(forward_ad.unpack_dual(dual).primal), x)


#: What each call writes in place.
WRITES: dict[str, Callable[[Comm, Tensor], object]] = {
    "all_reduce": lambda comm, out: comm.all_reduce(out, out=out),
    "all_gather": lambda comm, out: comm.all_gather(torch.ones_like(out), out=out),
    "reduce_scatter": lambda comm, out: comm.reduce_scatter(torch.ones_like(out), out=out),
    "broadcast": lambda comm, out: comm.broadcast(out),
    "scatter": lambda comm, out: comm.scatter(torch.ones_like(out), out=out),
    "send_recv": lambda comm, out: comm.send_recv(torch.ones_like(out), 0, out, 0),
    "started": lambda comm, out: comm.start_all_reduce(out, out=out).wait(),
    "norm": lambda comm, out: comm.all_reduce_rms_norm(torch.ones_like(out), out=out),
    "residual": lambda comm, out: comm.all_reduce_rms_norm(torch.ones_like(out), torch.ones_like(out), residual_out=out),
    "plan": lambda comm, out: comm.load_plan(all_gather(1)).execute(torch.ones_like(out), out=out),
    "in-place operator": lambda comm, out: ops.all_reduce_(out, antiphon.torch.ops.register(comm)),
    "broadcast operator": lambda comm, out: ops.broadcast_(out, antiphon.torch.ops.register(comm)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_backward_pass_finds_what_was_written_in_place(name: str) -> None:
    with alone() as comm:
        w = torch.ones(4, 8, requires_grad=True)
        h = w.exp()  # which its backward pass reads
        with torch.no_grad():
            WRITES[name](comm, h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()


def test_what_a_receive_writes_is_found() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            return comm.send(torch.ones(4), 1)
        out = torch.zeros(4)
        before = out._version
        comm.recv(out, 0)
        assert out._version > before
        return None

    ranks.threads(2, body)


#: Calls of the backend, of a tensor ``x`` that requires grad.
BACKEND: dict[str, Callable[[Any, Tensor], object]] = {
    "all_reduce": lambda group, x: group.allreduce([x], options()),
    "reduce": lambda group, x: group.reduce([x]),
    "broadcast": lambda group, x: group.broadcast([x]),
    "all_gather": lambda group, x: group.allgather([[torch.empty(4)]], [x]),
    "all_gather_into_tensor": lambda group, x: group._allgather_base(torch.empty(4), x),
    "gather": lambda group, x: group.gather([[torch.empty(4)]], [x]),
    "scatter": lambda group, x: group.scatter([torch.empty(4)], [[x]]),
    "reduce_scatter_tensor": lambda group, x: group._reduce_scatter_base(torch.empty(4), x),
    "reduce_scatter": lambda group, x: group.reduce_scatter([torch.empty(4)], [[x]]),
    "all_to_all_single": lambda group, x: group.alltoall_base(torch.empty(4), x, [], []),
    "all_to_all": lambda group, x: group.alltoall([torch.empty(4)], [x]),
    "send": lambda group, x: group.send([x], 0),
}


def options() -> Any:
    blocking = torch.distributed.AllreduceOptions()
    blocking.asyncOp = False
    return blocking


@pytest.mark.parametrize("name", BACKEND)
def test_the_backend_warns_where_a_gradient_is_lost(name: str) -> None:
    from antiphon.torch.group import Group

    with alone() as comm:
        group = Group(torch.distributed.HashStore(), 0, 1, comm)
        w = torch.ones(4, requires_grad=True)
        with pytest.warns(UserWarning, match=f"^{name} of a tensor that requires grad tracks no gradient") as caught:
            work: Any = BACKEND[name](group, w * 2)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            works = [work]
            with torch.no_grad():
                works.append(BACKEND[name](group, w * 2))
            works.append(group.broadcast([w]))  # a leaf in place, as a model's parameters are at first
            for _ in range(2 if name == "send" else 0):
                group.recv([torch.empty(4)], 0).wait()
            for work in works:
                work.wait()


def test_a_program_of_its_own_gradients_is_what_torch_computes() -> None:
    """The example of the issue: ``exp`` in front of a sum of all ranks, which had its gradient wrong."""

    def body(comm: Comm) -> tuple[Any, Any]:
        group, w = antiphon.torch.ops.register(comm), torch.ones(2, requires_grad=True)
        ops.all_reduce(w.exp(), group).sum().backward()
        return w.grad, comm.rank

    for grad, _ in ranks.threads(2, body):
        torch.testing.assert_close(grad, 2 * torch.ones(2).exp())
