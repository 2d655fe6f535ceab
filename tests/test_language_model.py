"""Random programs, against a second implementation of the format (`language_model.py`): the same bytes."""

import random
from types import ModuleType
from typing import Any

import language_model
import pytest

import antiphon.language
from antiphon.language import BufferType, ReduceOperationType, SyncType, TestCollective

CHUNKS = 4
SYNCS = list(SyncType)


class Writer:
    """Writes the program of a seed in one of the two languages: the same choices in both."""

    def __init__(self, language: ModuleType, seed: int) -> None:
        self.language, self.random = language, random.Random(seed)
        choice = self.random.choice
        self.ranks, self.blocks = choice([2, 2, 2, 3]), choice([[0], [0], [0, 0, 1, 4]])
        #: Whether there is but one place to be in each buffer, so that neighbours meet.
        self.narrow = choice([True, False])
        #: Those that can be neighbours of what they fuse with, or all.
        self.kinds = choice(
            [
                ["copy_packets", "reduce_packets", "put_packets", "read_put_packets"],
                ["reduce", "remote_reduce", "put"],
                ["switch"],
                ["notify", "semaphore", "barrier"],
                ["copy", "copy_packets", "unpack_packets", "reduce", "reduce_packets", "remote_reduce", "put", "put_packets"]
                + ["read_put_packets", "get", "port", "notify", "semaphore", "barrier", "switch", "new"],
            ]
        )

    def write(self) -> str:
        choice, language = self.random.choice, self.language
        options = {"instances": choice([1, 1, 2, 3]), "auto_sync": choice([True, False])}
        options["instr_fusion"] = choice([True, True, False])
        with language.CollectiveProgram("any", TestCollective(self.ranks, CHUNKS, CHUNKS), self.ranks, **options) as program:
            program.validate_signal_wait_pairing = lambda: None
            self.scratch = {rank: [language.Buffer(rank, CHUNKS)] for rank in range(self.ranks)}
            self.memories = [(*ends, language.MemoryChannel(*ends)) for ends in self.pairs(4)]
            self.ports = [(*ends, language.PortChannel(*ends)) for ends in self.pairs(2)]
            self.semaphores = [language.Semaphore(self.rank(), value) for value in range(2)]
            self.switches = [self.switch_channel() for _ in range(2)]
            for _ in range(self.random.randrange(24)):
                if self.random.random() < 0.15:
                    with language.LoopIterationContext(64, 2):
                        self.operations(self.random.randrange(5))
                else:
                    self.operations(1)
            return program.to_json()

    def operations(self, count: int) -> None:
        for _ in range(count):
            among = self.kinds if self.narrow else [*self.kinds, "notify", "barrier"]
            getattr(self, self.random.choice(among))()

    def rank(self) -> int:
        # Mostly the first, so that it has much to do.
        return self.random.choice([0, 0, self.random.randrange(self.ranks)])

    def pairs(self, count: int) -> list[tuple[int, int]]:
        """The two ends of channels, which are different ranks."""
        sources = [self.rank() for _ in range(count)]
        return [((src + self.random.randrange(1, self.ranks)) % self.ranks, src) for src in sources]

    def chunk(self, rank: int, kinds: str = "ios", size: int = 1) -> Any:
        buffers = {"i": self.language.Rank(rank).get_input_buffer(), "o": self.language.Rank(rank).get_output_buffer()}
        kind, at = self.random.choice(kinds), 0 if self.narrow else self.random.randrange(CHUNKS - 1)
        buffer = self.random.choice(self.scratch[rank]) if kind == "s" else buffers[kind]
        return buffer[at : at + size]

    def size(self) -> int:
        return 1 if self.narrow else self.random.choice([1, 1, 2])

    def tb(self) -> int:
        return self.random.choice(self.blocks)

    def doer(self) -> dict[str, Any]:
        group = self.random.choice([[0, 1], [1, 0], [2]])
        member = self.random.choice([None, group[0]])
        shared = {"tb_group": self.language.ThreadBlockGroup(group)} | ({} if member is None else {"tb": member})
        return self.random.choice([{"tb": self.tb()}] * 5 + ([] if self.narrow else [shared]))

    def sync(self) -> SyncType:
        return self.random.choice(SYNCS)

    def switch_channel(self) -> tuple[list[int], BufferType, Any]:
        ranks = self.random.sample(range(self.ranks), self.random.randint(1, self.ranks))
        buffer = self.random.choice(list(BufferType))
        return ranks, buffer, self.language.SwitchChannel(ranks, buffer)

    # Operations.

    def copy(self, name: str = "copy", dst: str = "ios", src: str = "ios") -> None:
        rank, size = self.rank(), self.size()
        chunks = self.chunk(rank, dst, size), self.chunk(rank, src, size)
        getattr(self.language.Rank(rank), name)(*chunks, **self.doer())

    def copy_packets(self) -> None:
        self.copy("copy_packets", dst="s", src="io")

    def unpack_packets(self) -> None:
        self.copy("unpack_packets", src="s")

    def reduce(self, packet: bool = False) -> None:
        rank, size, op = self.rank(), self.size(), self.random.choice(list(ReduceOperationType)[:2])
        others = [self.chunk(rank, "s" if packet else "ios", size) for _ in range(self.random.choice([1, 1, 2]))]
        dst = self.random.choice([None, self.chunk(rank, "io", size)])
        source = self.chunk(rank, "io", size)
        self.language.Rank(rank).reduce(source, others, dst_chunk=dst, reduce_op=op, packet=packet, **self.doer())

    def reduce_packets(self) -> None:
        self.reduce(packet=True)

    def remote_reduce(self) -> None:
        dst, src, channel = self.random.choice(self.memories)
        size = self.size()
        remote = [self.chunk(dst, "io", size) for _ in range(self.random.choice([0, 1, 1, 2]))]
        result = self.random.choice([None, self.chunk(src, "io", size)])
        channel.reduce(self.chunk(src, "io", size), remote, local_dst_chunk=result, **self.doer())

    def put(self, name: str = "put", to: str = "ios", of: str = "io") -> None:
        dst, src, channel = self.random.choice(self.memories)
        size = self.size()
        getattr(channel, name)(self.chunk(dst, to, size), self.chunk(src, of, size), **self.doer())

    def put_packets(self) -> None:
        self.put("put_packets", to="s")

    def read_put_packets(self) -> None:
        self.put("read_put_packets", to="s", of="s")

    def get(self) -> None:
        dst, src, channel = self.random.choice(self.memories)
        channel.get(self.chunk(src, size=self.size()), self.chunk(dst, size=self.size()), **self.doer())

    def port(self) -> None:
        dst, src, channel = self.random.choice(self.ports)
        name = self.random.choice(["put", "put_with_signal", "put_with_signal_and_flush", "put_packets", "read_put_packets"])
        size = self.size()
        source = self.chunk(src, "s" if name == "read_put_packets" else "ios", size)
        getattr(channel, name)(self.chunk(dst, "s", size), source, tb=self.tb())

    def notify(self) -> None:
        _, _, channel = self.random.choice(self.memories)
        name = self.random.choice(["signal", "wait"])
        getattr(channel, name)(self.tb(), self.sync(), relaxed=self.random.choice([False, False, True]))
        _, _, channel = self.random.choice(self.ports)
        if self.random.random() < 0.5:
            getattr(channel, self.random.choice(["signal", "wait", "flush"]))(self.tb(), self.sync())

    def semaphore(self) -> None:
        semaphore = self.random.choice(self.semaphores)
        getattr(semaphore, self.random.choice(["acquire", "release"]))(self.tb(), self.sync())

    def barrier(self) -> None:
        self.language.Rank(self.rank()).barrier(self.random.choice([[0], [0], [0, 1], [1, 0], [2, 2]]))

    def switch(self) -> None:
        ranks, buffer, channel = self.random.choice(self.switches)
        rank, chunk, tb, places = self.random.choice(ranks), self.chunk(ranks[0]), self.tb(), range(3)
        for name in self.random.choice([["reduce"], ["broadcast"], ["reduce", "broadcast"], ["broadcast_packets"]]):
            at = self.random.choice(places)
            if name == "reduce":
                channel.reduce(rank, at, 1, chunk, tb)
            elif name == "broadcast":
                channel.broadcast(rank, chunk, at, 1, tb)
            elif buffer is BufferType.scratch:
                channel.broadcast_packets(rank, self.chunk(rank, "s"), at, 1, tb)

    def new(self) -> None:
        """Something with a number of its own, in the middle of it all."""
        [ends] = self.pairs(1)
        self.memories.append((*ends, self.language.MemoryChannel(*ends)))
        self.ports.append((*ends, self.language.PortChannel(*ends)))
        self.semaphores.append(self.language.Semaphore(self.rank(), 1))
        rank = self.rank()
        self.scratch[rank].append(self.language.Buffer(rank, CHUNKS))
        self.switches.append(self.switch_channel())


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_plans_are_the_models(first: int) -> None:
    for seed in range(first, first + 100):
        ours, theirs = Writer(antiphon.language, seed).write(), Writer(language_model, seed).write()
        assert ours == theirs, f"seed {seed}"


def test_the_seeds_reach_every_operation() -> None:
    text = "".join(Writer(antiphon.language, seed).write() for seed in range(600))
    names = "nop barrier signal rlxsignal wait rlxwait flush sem_acquire sem_release pipeline copy cpkt upkt put pws pwsf ppkt rppkt get"
    names += " re res rre rres repkt respkt recpkt recspkt glre gstore gstorepkt glres"
    assert [name for name in names.split() if f'"name": "{name}"' not in text] == []
