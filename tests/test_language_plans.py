"""Small programs, each for one operation or one fusion, whose plans MSCCL++ 0.9.0 prints too: ours are the same bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.language import *

PLANS = Path(__file__).resolve().parent / "golden" / "mscclpp" / "plans"
SCRIPTS: dict[str, Callable[[], str]] = {}
AFTER, BEFORE = SyncType.after, SyncType.before


def plan(file: str, name: str, ranks: int, inputs: int, outputs: int, protocol: str = "Simple", **options: object):
    """Registers the body of a program whose plan the file is."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        def script() -> str:
            collective = TestCollective(ranks, inputs, outputs)
            with CollectiveProgram(name, collective, ranks, protocol=protocol, **options) as program:
                if file in ONE_SIDED:
                    program.validate_signal_wait_pairing = lambda: None
                body()
                return JSON()

        SCRIPTS[file] = script
        return body

    return register


#: Programs that signal without waits or wait without signals: for their form only.
ONE_SIDED: set[str] = set()


def pairs() -> list[tuple[int, int]]:
    return [(0, 1), (1, 0)]


def input_of(rank: int) -> BaseBuffer:
    return Rank(rank).get_input_buffer()


def output_of(rank: int) -> BaseBuffer:
    return Rank(rank).get_output_buffer()


def meet_before(channel: MemoryChannel) -> None:
    channel.signal(0, relaxed=True)
    channel.wait(0, relaxed=True)


def meet_after(channel: MemoryChannel) -> None:
    channel.signal(0, BEFORE)
    channel.wait(0, AFTER)


@plan("unit_tests.barrier_test", "barrier_test", 1, 0, 0)
def barrier() -> None:
    Rank(0).barrier([0, 1])


@plan("unit_tests.copy_test", "copy_test", 1, 1, 1)
def copy() -> None:
    Rank(0).copy(output_of(0)[0:1], input_of(0)[0:1], 0)


@plan("unit_tests.tbg.tbg_copy_test", "copy_test", 1, 1, 1)
def copy_by_a_group() -> None:
    Rank(0).copy(output_of(0)[0:1], input_of(0)[0:1], tb_group=ThreadBlockGroup([0, 1, 2, 3]))


@plan("unit_tests.copy_packet_test", "copy_packets_test", 1, 1, 1, "LL")
def copy_packets() -> None:
    Rank(0).copy_packets(Buffer(0, 1)[0:1], input_of(0)[0:1], 0)


@plan("unit_tests.unpack_packet_test", "unpack_packets_test", 1, 1, 1, "LL")
def unpack_packets() -> None:
    scratch = Buffer(0, 1)
    Rank(0).copy_packets(scratch[0:1], input_of(0)[0:1], 0)
    Rank(0).unpack_packets(output_of(0)[0:1], scratch[0:1], 0)


@plan("unit_tests.pipeline_test", "barrier_test", 1, 1, 1)
def pipeline() -> None:
    with LoopIterationContext(2**20, 1):
        Rank(0).copy(output_of(0)[0:1], input_of(0)[0:1], 0)


@plan("unit_tests.semaphore", "semaphore_test", 1, 0, 0)
def semaphore() -> None:
    taken = Semaphore(0, 0)
    taken.acquire(0, AFTER)
    taken.release(1, BEFORE)


@plan("unit_tests.flush.flush_test", "flush_test", 2, 0, 0)
def flush() -> None:
    PortChannel(1, 0).flush(0, BEFORE)


@plan("unit_tests.flush.flush_fuse_test", "flush_test", 2, 0, 0)
def flushes() -> None:
    for channel in [PortChannel(1, 0), PortChannel(1, 0)]:
        channel.flush(0)


@plan("unit_tests.signal_wait.signal_wait_test", "signal_wait_test", 2, 0, 0)
def signal_wait() -> None:
    for own, peer in pairs():
        meet_after(MemoryChannel(peer, own))


@plan("unit_tests.signal_wait.signal_wait_fuse_test", "signal_wait_test", 2, 0, 0)
def signals_and_waits() -> None:
    for own, peer in pairs():
        channels = [MemoryChannel(peer, own) for _ in range(4)]
        for channel in channels[:2]:
            channel.signal(0)
        for channel in channels[2:]:
            channel.wait(0)


@plan("unit_tests.signal_wait.relaxed_signal_wait_test", "relaxed_signal_wait_test", 2, 0, 0)
def relaxed_signal_wait() -> None:
    for own, peer in pairs():
        meet_before(MemoryChannel(peer, own))


@plan("unit_tests.signal_wait.relaxed_signal_wait_fuse_test", "relaxed_signal_wait_test", 2, 0, 0)
def relaxed_signals_and_waits() -> None:
    for own, peer in pairs():
        channels = [MemoryChannel(peer, own) for _ in range(4)]
        for channel in channels[:2]:
            channel.signal(0, relaxed=True)
        for channel in channels[2:]:
            channel.wait(0, relaxed=True)


@plan("unit_tests.put.put_test", "put_test", 2, 2, 0)
def put() -> None:
    for own, peer in pairs():
        channel = MemoryChannel(peer, own)
        meet_before(channel)
        channel.put(input_of(peer)[1:2], input_of(own)[0:1], 0)
        meet_after(channel)


@plan("unit_tests.put.put_fuse_test", "put_test", 2, 2, 0)
def puts() -> None:
    for own, peer in pairs():
        first, second = MemoryChannel(peer, own), MemoryChannel(peer, own)
        meet_before(first)
        first.put(input_of(peer)[1:2], input_of(own)[0:1], 0)
        second.put(input_of(peer)[0:1], input_of(own)[1:2], 0)
        meet_after(second)


def port_put(method: str) -> None:
    for own, peer in pairs():
        channel = PortChannel(peer, own)
        channel.signal(0)
        channel.wait(0)
        getattr(channel, method)(input_of(peer)[1:2], input_of(own)[0:1], 0)
        channel.wait(0, AFTER)


@plan("unit_tests.put.put_with_signal_test", "put_with_signal_test", 2, 2, 0)
def put_with_signal() -> None:
    port_put("put_with_signal")


@plan("unit_tests.put.put_with_signal_and_flush_test", "put_with_signal_and_flush_test", 2, 2, 0)
def put_with_signal_and_flush() -> None:
    port_put("put_with_signal_and_flush")


@plan("unit_tests.get.get_test", "get_test", 2, 2, 0)
def get() -> None:
    for own, peer in pairs():
        channel = MemoryChannel(peer, own)
        meet_before(channel)
        channel.get(input_of(own)[0:1], input_of(peer)[1:2], 0)
        meet_after(channel)


@plan("unit_tests.get.get_fuse_test", "get_test", 2, 2, 0)
def gets() -> None:
    for own, peer in pairs():
        channel = MemoryChannel(peer, own)
        meet_before(channel)
        for _ in range(2):
            channel.get(input_of(own)[0:1], input_of(peer)[1:2], 0)
        meet_after(channel)


@plan("unit_tests.put_packet_test", "put_packets_test", 2, 1, 0, "LL")
def put_packets() -> None:
    scratch = [Buffer(rank, 1) for rank in range(2)]
    for own, peer in pairs():
        MemoryChannel(peer, own).put_packets(scratch[peer][0:1], input_of(own)[0:1], 0)


@plan("unit_tests.read_put_packet_test", "read_put_packets_test", 2, 0, 0, "LL")
def read_put_packets() -> None:
    scratch = [Buffer(rank, 2) for rank in range(2)]
    for own, peer in pairs():
        MemoryChannel(peer, own).read_put_packets(scratch[peer][1:2], scratch[own][0:1], 0)


@plan("unit_tests.reduce.reduce_test", "reduce_test", 1, 2, 1)
def reduce() -> None:
    chunks = input_of(0)
    Rank(0).reduce(chunks[0:1], [chunks[1:2]], 0, dst_chunk=output_of(0)[0:1])


@plan("unit_tests.reduce.reduce_fuse_test", "reduce_test", 1, 3, 2)
def reduces() -> None:
    chunks = input_of(0)
    for other in 1, 2:
        Rank(0).reduce(chunks[0:1], [chunks[other : other + 1]], 0, dst_chunk=output_of(0)[0:1])


@plan("unit_tests.tbg.tbg_reduce_test", "reduce_test", 1, 2, 1)
def reduce_by_a_group() -> None:
    chunks, group = input_of(0), ThreadBlockGroup([0, 1, 2, 3])
    Rank(0).reduce(chunks[0:1], [chunks[1:2]], tb_group=group, dst_chunk=output_of(0)[0:1])


@plan("unit_tests.tbg.tbg_reduce_fuse_test", "reduce_test", 1, 3, 2)
def reduces_by_a_group() -> None:
    chunks, group = input_of(0), ThreadBlockGroup([0, 1, 2, 3])
    for other in 1, 2:
        Rank(0).reduce(chunks[0:1], [chunks[other : other + 1]], tb_group=group, dst_chunk=output_of(0)[0:1])


def reduce_and_send(**who: object) -> None:
    for own, peer in pairs():
        channel, chunks, result = MemoryChannel(peer, own), input_of(own), output_of(own)[0:1]
        meet_before(channel)
        Rank(own).reduce(chunks[0:1], [chunks[1:2]], dst_chunk=result, **who)
        channel.put(output_of(peer)[1:2], result, **who)
        meet_after(channel)


@plan("unit_tests.reduce_send_test", "reduce_send_test", 2, 2, 2)
def reduce_send() -> None:
    reduce_and_send(tb=0)


@plan("unit_tests.tbg.tbg_reduce_send_test", "reduce_send_test", 2, 2, 2)
def reduce_send_by_a_group() -> None:
    reduce_and_send(tb_group=ThreadBlockGroup([0, 1, 2, 3]))


@plan("unit_tests.read_reduce.read_reduce_test", "read_reduce_test", 2, 2, 2)
def read_reduce() -> None:
    for own, peer in pairs():
        channel = MemoryChannel(peer, own)
        meet_before(channel)
        channel.reduce(input_of(own)[0:1], [input_of(peer)[1:2]], 0, local_dst_chunk=output_of(own)[0:1])
        meet_after(channel)


@plan("unit_tests.read_reduce.read_reduce_fuse_test", "read_reduce_test", 2, 2, 2)
def read_reduces() -> None:
    for own, peer in pairs():
        channel, result = MemoryChannel(peer, own), output_of(own)[0:1]
        meet_before(channel)
        for other in input_of(peer)[0:1], input_of(peer)[1:2]:
            channel.reduce(input_of(own)[0:1], [other], 0, local_dst_chunk=result)
        meet_after(channel)


@plan("unit_tests.read_reduce_send_test", "read_reduce_send_test", 2, 2, 2)
def read_reduce_send() -> None:
    for own, peer in pairs():
        channel, result = MemoryChannel(peer, own), output_of(own)[0:1]
        meet_before(channel)
        channel.reduce(input_of(own)[0:1], [input_of(peer)[1:2]], 0, local_dst_chunk=result)
        channel.put(output_of(peer)[1:2], result, 0)
        meet_after(channel)


@plan("unit_tests.reduce_packet.reduce_packets_test", "reduce_packets_test", 1, 0, 0, "LL")
def reduce_packets() -> None:
    scratch = Buffer(0, 3)
    Rank(0).reduce(scratch[0:1], [scratch[1:2]], 0, dst_chunk=scratch[2:3], packet=True)


@plan("unit_tests.reduce_packet.reduce_packets_fuse_test", "reduce_packets_test", 1, 0, 0, "LL")
def reduces_of_packets() -> None:
    scratch = Buffer(0, 4)
    for other in 1, 2:
        packets = [scratch[other : other + 1]]
        Rank(0).reduce(scratch[0:1], packets, 0, dst_chunk=scratch[3:4], packet=True)


@plan("unit_tests.reduce_send_packet_test", "reduce_send_packets_test", 2, 0, 0, "LL")
def reduce_send_packets() -> None:
    scratch = [Buffer(rank, 4) for rank in range(2)]
    for own, peer in pairs():
        chunks = scratch[own]
        Rank(own).reduce(chunks[0:1], [chunks[1:2]], 0, dst_chunk=chunks[2:3], packet=True)
        MemoryChannel(peer, own).put_packets(scratch[peer][3:4], chunks[2:3], 0)


@plan("unit_tests.reduce_copy_packet_test", "reduce_copy_packets_test", 1, 1, 0, "LL")
def reduce_copy_packets() -> None:
    scratch, chunk = Buffer(0, 2), input_of(0)[0:1]
    Rank(0).reduce(chunk, [scratch[0:1]], 0, packet=True)
    Rank(0).copy_packets(scratch[1:2], chunk, 0)


@plan("unit_tests.reduce_copy_send_packet_test", "reduce_copy_send_packets_test", 2, 1, 0, "LL")
def reduce_copy_send_packets() -> None:
    scratch, there, chunk = Buffer(0, 2), Buffer(1, 1), input_of(0)[0:1]
    Rank(0).reduce(chunk, [scratch[0:1]], 0, packet=True)
    Rank(0).copy_packets(scratch[1:2], chunk, 0)
    MemoryChannel(1, 0).read_put_packets(there[0:1], scratch[1:2], 0)


@plan("unit_tests.switch_reduce_test", "switch_reduce_test", 3, 1, 1)
def switch_reduce() -> None:
    channel = SwitchChannel([0, 1], BufferType.input)
    channel.at_rank(0).reduce(0, 1, Buffer(0, 1)[0:1], 0)


@plan("unit_tests.switch_broadcast_test", "group_store_test", 3, 1, 1)
def switch_broadcast() -> None:
    channel = SwitchChannel([0, 1], BufferType.input)
    channel.broadcast(0, Buffer(0, 1)[0:1], 0, 1, 0)


@pytest.mark.parametrize("file", sorted(SCRIPTS))
def test_the_plan_is_the_same_bytes(file: str) -> None:
    theirs = (PLANS / f"{file}.noargs.json").read_text().rstrip("\n")
    assert SCRIPTS[file]() == theirs


def test_no_plan_is_left_out() -> None:
    assert {path.name.removesuffix(".noargs.json") for path in PLANS.iterdir()} == set(SCRIPTS)
