"""Every collective against what NumPy computes from all ranks' inputs, on every kind of array that Python has."""

import array
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import antiphon
import ranks

WORLDS = [1, 2, 3]
NUMPY = ["float64", "float32", "float16", "int64", "int32", "int8", "uint8"]
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

Reference = Callable[[list[NDArray[Any]], int], Any]


def inputs(rank: int, rows: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Small integers, different on every rank, which every dtype and every order of summation holds exactly."""
    values = np.arange(rows * 2) * (rank + 1) % 7 - (0 if np.dtype(dtype).kind == "u" else 3)
    return values.reshape(rows, 2).astype(dtype)


def everybody(world: int, rows: int, dtype: Any = np.float32) -> list[NDArray[Any]]:
    return [inputs(rank, rows, dtype) for rank in range(world)]


def block(x: NDArray[Any], rank: int, world: int) -> NDArray[Any]:
    return np.split(x, world)[rank]


def reduced(op: str, all_inputs: list[NDArray[Any]]) -> NDArray[Any]:
    return functools.reduce(OPS[op], all_inputs).astype(all_inputs[0].dtype)


class Numpy:
    """NumPy arrays as they are."""

    new = staticmethod(lambda x: x.copy())
    value = staticmethod(lambda x: x)


class Torch:
    """torch tensors over the same memory."""

    new = staticmethod(lambda x: torch.from_numpy(x.copy()))
    value = staticmethod(lambda x: x.numpy())


def cases(world: int) -> dict[str, tuple[int, tuple[Any, ...], Reference]]:
    """Name, rows per rank, arguments, and what rank ``r`` gets of every rank's input ``xs``."""
    root = world - 1
    return {
        "all_reduce": (3, ("sum",), lambda xs, r: reduced("sum", xs)),
        "all_gather": (3, (), lambda xs, r: np.concatenate(xs)),
        "reduce_scatter": (2 * world, ("max",), lambda xs, r: block(reduced("max", xs), r, world)),
        "all_to_all": (2 * world, (), lambda xs, r: np.concatenate([block(x, r, world) for x in xs])),
        "broadcast": (3, (root,), lambda xs, r: xs[root]),
        "reduce": (3, ("min", root), lambda xs, r: reduced("min", xs) if r == root else None),
        "gather": (3, (root,), lambda xs, r: np.concatenate(xs) if r == root else None),
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("library", [Numpy, Torch])
@pytest.mark.parametrize("started", [False, True], ids=["blocking", "started"])
@pytest.mark.parametrize("name", cases(1))
def test_every_collective_gives_what_numpy_computes(name: str, started: bool, library: Any, world: int) -> None:
    rows, arguments, reference = cases(world)[name]

    def body(comm: antiphon.Communicator) -> None:
        def call(x: Any, **options: Any) -> Any:
            if started:
                return getattr(comm, f"start_{name}")(x, *arguments, **options).wait()
            return getattr(comm, name)(x, *arguments, **options)

        expected = reference(everybody(world, rows), comm.rank)
        original = inputs(comm.rank, rows)
        x = library.new(original)
        result = call(x)
        if expected is None:
            assert result is None
        else:
            assert type(result) is type(x)
            np.testing.assert_array_equal(library.value(result), expected, strict=True)
        if name != "broadcast":
            np.testing.assert_array_equal(library.value(x), original)
        out = library.new(np.zeros_like(expected if expected is not None else original))
        result = call(library.new(original), out=out)
        if expected is not None:
            assert result is out
            np.testing.assert_array_equal(library.value(out), expected)

    ranks.threads(world, body)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [*NUMPY, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_reductions_of_every_dtype(op: str, dtype: Any, world: int) -> None:
    expected = reduced(op, everybody(world, 5, dtype))
    for result in ranks.threads(world, lambda comm: comm.all_reduce(inputs(comm.rank, 5, dtype), op)):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))


def test_the_operator_is_a_name_or_an_enum() -> None:
    def body(comm: antiphon.Communicator) -> list[float]:
        x = np.float32([comm.rank, 5])
        return [comm.all_reduce(x, op)[0] for op in ("avg", "AVG", "mean", antiphon.ReduceOp.AVG, None)]

    assert ranks.threads(2, body)[1] == [0.5, 0.5, 0.5, 0.5, 1.0]


def test_a_given_algorithm_gives_the_same_bits() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = np.random.default_rng(comm.rank).standard_normal(10_001).astype(np.float32)
        chosen = comm.all_reduce(x)
        for algorithm in ("one-shot", "two-shot"):
            np.testing.assert_array_equal(comm.all_reduce(x, algorithm=algorithm), chosen)
        with pytest.raises(ValueError, match="known are one-shot, two-shot"):
            comm.all_reduce(x, algorithm="ring")

    ranks.threads(3, body)


@pytest.mark.parametrize("library", [Numpy, Torch])
def test_in_place(library: Any) -> None:
    world = 3

    def body(comm: antiphon.Communicator) -> None:
        rank = comm.rank
        x = library.new(inputs(rank, 3))
        assert comm.all_reduce(x, out=x) is x
        np.testing.assert_array_equal(library.value(x), reduced("sum", everybody(world, 3)))

        whole = library.new(np.zeros((3 * world, 2), np.float32))
        own = whole[3 * rank : 3 * rank + 3]
        own[:] = library.new(inputs(rank, 3))
        assert comm.all_gather(own, out=whole) is whole
        np.testing.assert_array_equal(library.value(whole), np.concatenate(everybody(world, 3)))

        rows = library.new(inputs(rank, 2 * world))
        own = rows[2 * rank : 2 * rank + 2]
        comm.reduce_scatter(rows, out=own)
        expected = inputs(rank, 2 * world)
        expected[2 * rank : 2 * rank + 2] = block(reduced("sum", everybody(world, 2 * world)), rank, world)
        np.testing.assert_array_equal(library.value(rows), expected)

        rows = library.new(inputs(rank, 2 * world))
        comm.all_to_all(rows, out=rows)
        xs = everybody(world, 2 * world)
        np.testing.assert_array_equal(library.value(rows), np.concatenate([block(x, rank, world) for x in xs]))

        x = library.new(inputs(rank, 3))
        comm.reduce(x, "sum", 1, out=x)
        kept = reduced("sum", everybody(world, 3)) if rank == 1 else inputs(rank, 3)
        np.testing.assert_array_equal(library.value(x), kept)

    ranks.threads(world, body)


@pytest.mark.parametrize("started", [False, True], ids=["blocking", "started"])
def test_scatter(started: bool) -> None:
    def body(comm: antiphon.Communicator) -> None:
        xs, root = inputs(9, 6), 2
        expected = block(xs, comm.rank, 3)
        out = np.empty_like(expected)
        if started:
            comm.start_scatter(xs if comm.rank == root else None, root, out=out).wait()
        else:
            comm.scatter(xs if comm.rank == root else None, root, out=out)
        np.testing.assert_array_equal(out, expected)
        result = comm.scatter(xs, 0) if comm.rank == 0 else comm.scatter(None, 0, out=out)
        np.testing.assert_array_equal(result, expected)

    ranks.threads(3, body)


def test_broadcast_into_another_array() -> None:
    def body(comm: antiphon.Communicator) -> None:
        out = np.zeros(2, np.float32)
        x = np.float32([1, 2]) if comm.rank == 1 else None
        assert comm.broadcast(x, 1, out=out) is out
        assert out.tolist() == [1, 2]

    ranks.threads(2, body)


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.complex64])
def test_uneven_all_to_all_counts_rows(dtype: Any) -> None:
    counts = np.array([[1, 0, 2], [3, 1, 0], [0, 0, 4]])  # counts[i][j] rows go from i to j

    def body(comm: antiphon.Communicator) -> None:
        rank = comm.rank
        xs = [inputs(r, int(counts[r].sum()), dtype) for r in range(3)]
        ends = counts.cumsum(axis=1)
        expected = np.concatenate([xs[r][ends[r][rank] - counts[r][rank] : ends[r][rank]] for r in range(3)])
        sends, receives = counts[rank].tolist(), counts[:, rank].tolist()
        np.testing.assert_array_equal(comm.all_to_all_v(xs[rank], sends, receives), expected, strict=True)
        out = torch.empty(expected.shape, dtype=torch.from_numpy(expected).dtype)
        comm.start_all_to_all_v(torch.from_numpy(xs[rank]), sends, receives, out=out).wait()
        np.testing.assert_array_equal(out.numpy(), expected)

    ranks.threads(3, body)


def test_counts_that_disagree_leave_the_communicator_usable() -> None:
    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(ValueError, match="sends 1 elements to rank .*, which expects 2"):
            comm.all_to_all_v(np.zeros(2), [1, 1], [2, 2])
        comm.barrier()

    ranks.threads(2, body)


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex128"])
def test_parts_of_uneven_lengths(dtype: str) -> None:
    counts = [2, 0, 5]

    def body(comm: antiphon.Communicator) -> None:
        rank, start = comm.rank, sum(counts[: comm.rank])
        parts = [np.full((count, 3), r + 1, dtype) for r, count in enumerate(counts)]
        whole = np.concatenate(parts)
        np.testing.assert_array_equal(comm.all_gather_v(parts[rank], counts), whole, strict=True)
        row = np.zeros_like(whole)
        own = row[start : start + counts[rank]]
        own[:] = parts[rank]
        assert comm.start_all_gather_v(own, counts, out=row).wait() is row  # in place
        np.testing.assert_array_equal(row, whole)
        if dtype != "complex128":
            xs = [whole + r for r in range(3)]
            expected = np.maximum.reduce(xs)[start : start + counts[rank]]
            np.testing.assert_array_equal(comm.reduce_scatter_v(xs[rank], counts, "max"), expected, strict=True)
            comm.start_reduce_scatter_v(xs[rank], counts, "max", out=xs[rank][start : start + counts[rank]]).wait()
            np.testing.assert_array_equal(xs[rank][start : start + counts[rank]], expected)

    ranks.threads(3, body)


def test_parts_that_ranks_list_otherwise_are_an_error() -> None:
    def body(comm: antiphon.Communicator) -> None:
        counts = [[1, 3], [2, 2]][comm.rank]
        with pytest.raises(RuntimeError, match="all_gather_v.*counts|aborted"):
            comm.all_gather_v(np.zeros(counts[comm.rank]), counts)

    ranks.threads(2, body)


def test_lists_of_arrays() -> None:
    def body(comm: antiphon.Communicator) -> None:
        size, rank = comm.world_size, comm.rank
        xs = [[np.full((count, 2), r + 1.0) for count in (3, 0, 5)] for r in range(size)]
        for index, found in enumerate(comm.all_gather_list(xs[rank])):
            np.testing.assert_array_equal(found, np.concatenate([x[index] for x in xs]))
        rows = [np.arange(size * count, dtype=np.int64) + rank for count in (1, 4)]
        outs = [np.zeros(count, np.int64) for count in (1, 4)]
        for out, found, row in zip(outs, comm.reduce_scatter_list(rows, "max", out=outs), rows, strict=True):
            assert found is out
            np.testing.assert_array_equal(out, (row - rank + size - 1).reshape(size, -1)[rank])
        with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
            comm.all_gather_list(rows, out=outs[:1])

    ranks.threads(2, body)


def test_messages() -> None:
    def body(comm: antiphon.Communicator) -> None:
        rank, world = comm.rank, comm.world_size
        after, before = (rank + 1) % world, (rank - 1) % world
        out = np.empty(3, np.int64)
        assert comm.send_recv(np.full(3, rank), after, out, before) is out
        assert out.tolist() == [before] * 3
        sent = comm.start_send(torch.full((100_000,), float(rank)), after)
        received = comm.start_recv(torch.empty(100_000), before)
        assert received.wait()[99_999] == before
        assert sent.wait() is None
        if rank == 0:
            comm.send(b"bytes", 1)
        if rank == 1:
            assert bytes(comm.recv(bytearray(5), 0)) == b"bytes"

    ranks.threads(3, body)


class OnlyDLPack:
    """An array of an unknown library."""

    def __init__(self, values: Any, versioned: bool) -> None:
        self.values = values
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError("what is a max_version?")
        return self.values.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_anything_with_dlpack(versioned: bool) -> None:
    def body(comm: antiphon.Communicator) -> None:
        values = np.float32([1, comm.rank])
        x = OnlyDLPack(values, versioned)
        assert comm.all_reduce(x).tolist() == [2, 1]
        assert comm.all_reduce(x, out=x) is x
        assert values.tolist() == [2, 1]
        out = OnlyDLPack(torch.empty(4, dtype=torch.bfloat16), versioned)
        comm.start_all_gather(OnlyDLPack(torch.ones(2, dtype=torch.bfloat16), versioned), out=out).wait()
        assert out.values.tolist() == [1, 1, 1, 1]

    ranks.threads(2, body)


def test_anything_with_a_buffer() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = array.array("d", [1, comm.rank])
        assert comm.all_reduce(x).tolist() == [2, 1]
        comm.all_reduce(memoryview(x), out=x)
        assert x.tolist() == [2, 1]
        assert bytes(comm.all_gather(bytes([comm.rank, 7]), out=bytearray(4))) == b"\0\7\1\7"

    ranks.threads(2, body)


MOVED = ["bool", "int16", "uint16", "uint64", "complex128", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("dtype", MOVED)
def test_elements_of_any_type_can_be_moved(dtype: Any) -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = np.array([0, 1, comm.rank]).astype(dtype)
        gathered = comm.all_gather(x)
        assert gathered.dtype == x.dtype
        assert gathered.tobytes() == b"".join(np.array([0, 1, r]).astype(dtype).tobytes() for r in range(2))

    ranks.threads(2, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64, torch.uint32])
def test_elements_of_any_torch_type_can_be_moved(dtype: torch.dtype) -> None:
    def body(comm: antiphon.Communicator) -> None:
        gathered = comm.all_gather(torch.tensor([0, 1, comm.rank]).to(dtype))
        assert gathered.dtype == dtype
        assert torch.equal(gathered, torch.tensor([0, 1, 0, 0, 1, 1]).to(dtype))

    ranks.threads(2, body)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (1, 2, 1, 2, 1, 2, 1, 2, 1, 2)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = np.full(shape, comm.rank + 1.0)
        for new in (Numpy.new, Torch.new):
            assert np.array_equal(comm.all_reduce(new(x)), np.full(shape, 3.0))
            first = shape[0] if shape else 1
            assert tuple(comm.all_gather(new(x)).shape) == (2 * first, *shape[1:])

    ranks.threads(2, body)


def test_special_values_survive() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = np.float32([-0.0, np.nan, np.inf, 1e-45, -np.inf])
        gathered = comm.all_gather(x)
        assert gathered.tobytes() == x.tobytes() * 2
        total = comm.all_reduce(np.float32([-0.0, np.inf, 1e-45]))
        assert total.tobytes() == np.float32([-0.0, np.inf, 3e-45]).tobytes()

    ranks.threads(2, body)


def test_a_parameter_is_read_and_written_without_gradients_alone() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match="requires grad"):
            comm.all_reduce(x)
        with torch.no_grad():
            total = comm.all_reduce(x)
            assert total.tolist() == [2, 2, 2] and not total.requires_grad
            comm.all_reduce(x, out=x)
        assert x.tolist() == [2, 2, 2] and x.requires_grad

    ranks.threads(2, body)


def test_symmetric_memory_is_the_same_on_every_rank() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = comm.symmetric(4096)
        assert (len(buffer), buffer.device) == (4096, None)
        own = np.from_dlpack(buffer.memory("float32", (3, 2)))
        assert own.shape == (3, 2) and own.flags.writeable and not own.any()
        theirs = torch.from_dlpack(buffer.memory("bfloat16", (8,), rank=1 - comm.rank))
        comm.barrier()
        theirs.fill_(comm.rank + 1)
        comm.barrier()
        seen = torch.from_dlpack(buffer.memory("bfloat16", (8,)))
        assert seen.tolist() == [2 - comm.rank] * 8
        assert own.ctypes.data == buffer.pointer(comm.rank) != buffer.pointer(1 - comm.rank)
        own[:] = comm.rank
        comm.all_reduce(own, out=own)
        assert own.tolist() == [[1, 1]] * 3
        comm.free(buffer)
        assert own.shape == (3, 2)  # still mapped, if no longer ours
        with pytest.raises(ValueError, match="freed"):
            buffer.pointer(0)
        with pytest.raises(ValueError, match="freed"):
            comm.free(buffer)

    ranks.threads(2, body)


def test_views_of_symmetric_memory_stay_inside() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = comm.symmetric(64)
        for shape in [(17,), (2**62, 4), (4, 5)]:
            with pytest.raises(ValueError, match="does not fit 64 bytes"):
                buffer.memory("float32", shape)
        with pytest.raises(ValueError, match="unknown dtype .f33."):
            buffer.memory("f33")
        with pytest.raises(ValueError, match="rank 1 is not below the world size 1"):
            buffer.memory("float32", rank=1)
        with pytest.raises(BufferError, match="host memory"):
            buffer.memory("float32").__dlpack__(dl_device=(2, 0))

    ranks.threads(1, body)
