"""antiphon.moe.deep_ep.ElasticBuffer on the host: messages between neighbours, sessions of all-gathers, barriers."""

import random
import threading
from typing import Any

import pytest
import torch
from ranks import threads
from test_moe_elastic import WORLDS, buffer_of, same_bits
from test_moe_elastic_refusals import refused
from torch import Tensor

import antiphon
from antiphon.moe.deep_ep import ElasticBuffer


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_go_around_both_ways(world_size: int) -> None:
    """All send before anybody receives, as many as may be under way, and what was sent may be overwritten."""
    inflight = 3

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        buffer.pp_set_config(4 << 20, inflight)
        behind, before = (rank + 1) % world_size, (rank - 1) % world_size
        # Below and above what is sent without a receiver.
        for count in (0, 5, 300_000):
            for _ in range(2):
                for number in range(inflight):
                    for to in sorted({behind, before}):
                        message = torch.full((count,), rank * 100.0 + number)
                        buffer.pp_send(message, to)
                        message.fill_(-1)
                for number in range(inflight):
                    for source in sorted({behind, before}, reverse=True):
                        got = torch.empty(count)
                        buffer.pp_recv(got, source)
                        assert (got == source * 100.0 + number).all()
        codes = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)
        buffer.pp_send(codes, behind, num_sms=4)
        buffer.pp_recv(got := torch.empty_like(codes), before, num_sms=4)
        assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))
        buffer.pp_set_config(64, 1)  # waits for what was sent

    threads(world_size, body)


def test_a_message_beyond_those_under_way_waits_for_its_receiver() -> None:
    sent_all, may_receive = threading.Event(), threading.Event()

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.pp_set_config(4 << 20, 2)
        message = torch.ones(1 << 20)
        if comm.rank == 0:
            buffer.pp_send(message, 1)
            buffer.pp_send(message, 1)
            may_receive.set()
            buffer.pp_send(message, 1)
            sent_all.set()
        else:
            assert may_receive.wait(20)
            assert not sent_all.wait(0.2)
            for _ in range(3):
                buffer.pp_recv(message, 0)
            assert sent_all.wait(20)

    threads(2, body)


def test_wrong_messages_are_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x = torch.ones(4)
        wrong: Any = [1.0]
        refused([
            (RuntimeError, "call pp_set_config first", lambda: buffer.pp_send(x, 1)),
            (RuntimeError, "call pp_set_config first", lambda: buffer.pp_recv(x, 1)),
            (ValueError, "num_max_tensor_bytes must be at least 1, not 0", lambda: buffer.pp_set_config(0, 1)),
            (ValueError, "num_max_inflight_tensors must be at least 1, not 0", lambda: buffer.pp_set_config(1, 0)),
        ])  # fmt: skip
        with pytest.raises(ValueError, match=r"rank 0 passes \(16, 1\), and rank 1 \(16, 2\)"):
            buffer.pp_set_config(16, 1 + (rank > 0))
        with pytest.raises(RuntimeError, match="call pp_set_config first"):
            buffer.pp_send(x, 1)
        buffer.pp_set_config(16, 1)
        behind, across = (rank + 1) % 4, (rank + 2) % 4
        ends = sorted({(rank - 1) % 4, behind})
        refused([
            (ValueError, "t has 20 bytes; pp_set_config allows 16", lambda: buffer.pp_send(torch.ones(5), behind)),
            (ValueError, "t must be contiguous; its strides are", lambda: buffer.pp_send(torch.ones(2, 2).t(), behind)),
            (ValueError, "t must be contiguous; its strides are", lambda: buffer.pp_recv(torch.ones(2, 2).t(), behind)),
            (TypeError, "t must be a torch.Tensor, not list", lambda: buffer.pp_send(wrong, behind)),
            (ValueError, f"dst_rank_idx is {across}; the neighbours of rank {rank} of 4 are {ends[0]} and {ends[1]}",
             lambda: buffer.pp_send(x, across)),
            (ValueError, f"src_rank_idx is {rank}; the neighbours", lambda: buffer.pp_recv(x, rank)),
            (ValueError, "dst_rank_idx must be at least 0, not -1", lambda: buffer.pp_send(x, -1)),
            (ValueError, "requires grad", lambda: buffer.pp_send(torch.ones(1, requires_grad=True), behind)),
            (ValueError, "num_sms must be at least 0", lambda: buffer.pp_send(x, behind, -1)),
        ])  # fmt: skip
        comm.barrier()
        buffer.pp_send(x, behind)
        buffer.pp_recv(x, (rank - 1) % 4)

    threads(4, body)

    def alone(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.pp_set_config(16, 1)
        with pytest.raises(ValueError, match="rank 0 is alone and has no neighbour"):
            buffer.pp_send(torch.ones(1), 0)

    threads(1, alone)


@pytest.mark.parametrize("world_size", WORLDS)
def test_sessions_of_all_gathers(world_size: int) -> None:
    """Random sessions: batches and single tensors, in place and not, awaited in any order."""
    most = 4

    def value(rank: int, number: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number * 10 + rank)).bfloat16()

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        shapes = [(3, 5), (64, 70), (), (0, 4)]
        size = ElasticBuffer.get_agrs_num_max_session_bytes(comm, [shapes[1]] * most, torch.bfloat16)
        buffer.agrs_set_config(size, most)
        choose = random.Random(7)  # alike on all ranks
        number, kept = 0, []
        for _ in range(12):
            with buffer.agrs_new_session():
                waits: list[Any] = []
                for _ in range(choose.randint(1, most)):
                    chosen = [choose.choice(shapes) for _ in range(choose.randint(1, 2) if len(waits) < most - 2 else 1)]
                    numbers = list(range(number, number + len(chosen)))
                    number += len(chosen)
                    mine = [value(rank, n, shape) for n, shape in zip(numbers, chosen, strict=True)]
                    if choose.random() < 0.5:
                        places = buffer.agrs_get_inplace_tensor(chosen, torch.bfloat16, "cpu")
                        for place, source in zip(places, mine, strict=True):
                            place.copy_(source)
                        mine = list(places)
                    if len(mine) == 1 and choose.random() < 0.7:
                        *results, wait = buffer.all_gather(mine[0])
                    else:
                        *results, wait = buffer.all_gather(tuple(mine))
                    waits.append((numbers, chosen, results, wait))
                choose.shuffle(waits)
                for numbers, chosen, results, wait in waits[1:]:
                    wait()
                    for n, shape, result in zip(numbers, chosen, results, strict=True):
                        same_bits(result, torch.stack([value(r, n, shape) for r in range(world_size)]))
                kept.append(waits[0])  # the end of the session waits for it
        for numbers, chosen, results, wait in kept:
            for n, shape, result in zip(numbers, chosen, results, strict=True):
                same_bits(result, torch.stack([value(r, n, shape) for r in range(world_size)]))
            with pytest.raises(RuntimeError, match="the session is over"):
                wait()

    threads(world_size, body)


def test_an_all_gather_in_place_copies_nothing() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        buffer.agrs_set_config(1 << 20, 2)
        buffer.create_agrs_session()
        place = buffer.agrs_get_inplace_tensor((4, 2), torch.float32)
        assert isinstance(place, Tensor) and place.shape == (4, 2) and place.device.type == "cpu"
        place.fill_(rank)
        result, wait = buffer.all_gather(place)
        wait()
        assert result[rank].data_ptr() == place.data_ptr()
        assert result[:, 0, 0].tolist() == list(range(comm.world_size))
        # A part of it, or the same memory as another dtype, is a tensor like any other.
        part, wait = buffer.all_gather(place.view(torch.int32))
        wait()
        assert part.dtype == torch.int32 and torch.equal(part.view(torch.float32), result)
        buffer.destroy_agrs_session()
        with buffer.agrs_new_session(enabled=False):
            with pytest.raises(RuntimeError, match="there is no session"):
                buffer.all_gather(place)

    threads(3, body)


def test_sessions_refuse_what_does_not_fit() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        x = torch.ones(8)  # 64 bytes of both ranks
        wrong: Any = "x"
        refused([
            (RuntimeError, "call agrs_set_config first", buffer.create_agrs_session),
            (RuntimeError, "there is no session", buffer.destroy_agrs_session),
            (RuntimeError, "there is no session", lambda: buffer.all_gather(x)),
            (RuntimeError, "there is no session", lambda: buffer.agrs_get_inplace_tensor((1,), torch.float32)),
            (ValueError, "num_max_session_bytes must be at least 1, not 0", lambda: buffer.agrs_set_config(0, 1)),
            (ValueError, "num_max_all_gathers_per_session must be at least 1", lambda: buffer.agrs_set_config(1, 0)),
        ])  # fmt: skip
        with pytest.raises(ValueError, match=r"agrs_set_config: rank 0 passes \(64, 1\), and rank 1 \(65, 1\)"):
            buffer.agrs_set_config(64 + comm.rank, 1)
        buffer.agrs_set_config(160, 2)
        with buffer.agrs_new_session():
            refused([
                (RuntimeError, "there is a session already", buffer.create_agrs_session),
                (RuntimeError, "destroy the session first", lambda: buffer.agrs_set_config(64, 1)),
                (ValueError, "no tensors", lambda: buffer.all_gather([])),
                (TypeError, r"t\[1\] must be a torch.Tensor, not str", lambda: buffer.all_gather([x, wrong])),
                (ValueError, "t must be contiguous", lambda: buffer.all_gather(torch.ones(2, 2).t())),
                (ValueError, "requires grad", lambda: buffer.all_gather(torch.ones(2, requires_grad=True))),
                (ValueError, "192 bytes, behind 0 of this session; agrs_set_config allows 160", lambda: buffer.all_gather([x, x, x])),
                (ValueError, "192 bytes, behind 0", lambda: buffer.agrs_get_inplace_tensor((24,), torch.float32)),
                (TypeError, "shapes must be", lambda: buffer.agrs_get_inplace_tensor(wrong, torch.float32)),
            ])  # fmt: skip
            buffer.all_gather([x, x])[-1]()
            with pytest.raises(ValueError, match="64 bytes, behind 128 of this session"):
                buffer.all_gather(x)
            buffer.all_gather(x[:4])[-1]()
            with pytest.raises(ValueError, match="has had 2 all-gathers; agrs_set_config allows 2"):
                buffer.all_gather(x[:0])
        with buffer.agrs_new_session():  # which begins anew
            buffer.all_gather([x, x])[-1]()

    threads(2, body)


def test_a_session_ends_with_its_block() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        buffer.agrs_set_config(64, 1)
        with pytest.raises(KeyError):
            with buffer.agrs_new_session():
                raise KeyError
        buffer.create_agrs_session()
        buffer.destroy_agrs_session()

    threads(2, body)


@pytest.mark.parametrize("arguments", [(), (False, True), (True, True, False)])
def test_a_barrier_waits_for_all(arguments: tuple[bool, ...]) -> None:
    entered = [threading.Event() for _ in range(3)]

    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        entered[comm.rank].set()
        buffer.barrier(*arguments)
        assert all(event.is_set() for event in entered)

    threads(3, body)
