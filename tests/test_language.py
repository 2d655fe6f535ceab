"""What scripts can rely on beside what the probes show."""

import copy
import importlib
import json
import pickle
import re
import subprocess
import sys
from inspect import currentframe
from pathlib import Path

import pytest

from antiphon import compat
from antiphon.language import *


def copies(**options: object) -> CollectiveProgram:
    with CollectiveProgram("copies", TestCollective(2, 2, 2), 2, **options) as program:
        Rank(1).copy(Rank(1).get_output_buffer()[0:1], Rank(1).get_input_buffer()[1:2], tb=0)
    return program


def test_a_plan_is_the_same_however_often_it_is_made() -> None:
    program = copies(instances=4)
    assert program.to_json() == program.to_json()
    program.post_process_operations()
    assert len(json.loads(program.to_json())["gpus"][1]["threadblocks"]) == 4


def test_the_text_is_json_dumps_of_itself() -> None:
    program = copies()
    plan = json.loads(program.to_json())
    assert program.to_json() == json.dumps(plan, indent=2)
    assert program.to_json(indent=None, separators=(",", ":")) == json.dumps(plan, separators=(",", ":"))
    assert program.to_json(sort_keys=True) == json.dumps(plan, indent=2, sort_keys=True)


def test_names_are_escaped_as_json_dumps_does() -> None:
    program = copies()
    program.name = 'über "alles"\t\U0001f3b5\x07'
    assert program.to_json() == json.dumps(json.loads(program.to_json()), indent=2)
    program.name = None
    assert json.loads(program.to_json())["name"] is None


def test_the_header_is_what_the_program_says_at_last() -> None:
    program = copies(protocol="LL", reuse_resources=True, use_double_scratch_buffer=True, buffer_alignment=128)
    program.max_message_size = 2**20
    header = {key: value for key, value in json.loads(program.to_json()).items() if key != "gpus"}
    assert header == {
        "name": "copies",
        "collective": "test",
        "protocol": "LL",
        "inplace": False,
        "reuse_resources": True,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": True,
        "buffer_alignment": 128,
        "min_message_size": 0,
        "max_message_size": 2**20,
    }


def test_a_specification_says_all_but_the_body() -> None:
    spec = AlgoSpec("spec", AllReduce(2, 1, True), 2, 2, True, 3, "LL", tags={"a": 1}, min_message_size=64)
    with CollectiveProgram.from_spec(spec) as program:
        plan = json.loads(program.to_json())
    assert (plan["name"], plan["collective"], plan["inplace"], plan["protocol"]) == ("spec", "allreduce", True, "LL")
    assert (plan["min_message_size"], plan["gpus"][1]["input_chunks"]) == (64, 6)


def test_a_collective_of_ones_own() -> None:
    class OneSided(Collective):
        def __init__(self) -> None:
            super().__init__(2, 1, False)
            self.name = "one-sided"

        def init_buffers(self) -> list[dict[BufferType, BaseBuffer]]:
            sizes = (4, 0), (0, 4)
            kinds = BufferType.input, BufferType.output
            return [
                {kind: BaseBuffer(rank, kind, 0, size) for kind, size in zip(kinds, sizes[rank], strict=True)}
                for rank in range(2)
            ]

    with CollectiveProgram("own", OneSided(), 2):
        MemoryChannel(1, 0).put(Rank(1).get_output_buffer()[:], Rank(0).get_input_buffer()[:], tb=0)
        plan = json.loads(JSON())
    assert plan["collective"] == "one-sided"
    assert [(gpu["input_chunks"], gpu["output_chunks"]) for gpu in plan["gpus"]] == [(4, 0), (0, 4)]


def test_a_program_needs_buffers_of_all_its_ranks() -> None:
    with pytest.raises(TypeError, match="init_buffers of Collective"):
        CollectiveProgram("none", Collective(2, 1, False), 2)
    with pytest.raises(IndexError, match="3 ranks, and .* of 2"):
        CollectiveProgram("few", AllReduce(2, 1, False), 3)
    with pytest.raises(ValueError, match="the collective has 3 ranks, and the program 2"):
        CollectiveProgram("many", AllReduce(3, 1, False), 2)


def test_operations_know_the_line_of_the_script() -> None:
    with CollectiveProgram("lines", TestCollective(2, 2, 2), 2) as program:
        channel = MemoryChannel(1, 0)
        channel.put(Rank(1).get_output_buffer()[0:1], Rank(0).get_input_buffer()[0:1], tb=0)
        line = currentframe().f_lineno
        channel.signal(tb=0, data_sync=SyncType.before)
    assert program.lines(0, 0) == [(__file__, line - 1), (__file__, line + 1), (__file__, line + 1)]
    with pytest.raises(IndexError, match="rank 1 has no thread block 0"):
        program.lines(1, 0)


def test_ranks_and_thread_blocks_count_from_the_end() -> None:
    with CollectiveProgram("end", TestCollective(3, 1, 1), 3) as program:
        last = Rank(-1)
        last.barrier([4])
        last.copy(last.get_output_buffer()[:], last.get_input_buffer()[:], tb=-1)
        assert (last.rank, Buffer(-1, 2).rank, MemoryChannel(-1, 0).dst_rank) == (2, 2, 2)
        with pytest.raises(IndexError):
            Rank(-4)
        plan = json.loads(program.to_json())
    assert [op["name"] for op in plan["gpus"][2]["threadblocks"][4]["ops"]] == ["nop", "copy"]


def test_a_program_knows_its_chunks_so_far() -> None:
    with CollectiveProgram("chunks", AllGather(2, 3, False), 2) as program:
        Buffer(1, 5)
        Buffer(1, -1)  # as scripts may; it sets none aside
    assert [tuple(gpu) for gpu in program.gpus] == [(0, 3, 6, 0), (1, 3, 6, 5)]


def test_channels_of_another_program_are_refused() -> None:
    with CollectiveProgram("large", TestCollective(3, 1, 1), 3):
        channel, switch, semaphore = MemoryChannel(2, 1), SwitchChannel([0, 2], BufferType.input), Semaphore(2, 0)
    with CollectiveProgram("small", TestCollective(1, 1, 1), 1):
        with pytest.raises(IndexError):
            channel.signal(0)
        with pytest.raises(IndexError):
            switch.broadcast(0, Rank(0).get_input_buffer()[:], 0, 1, 0)
        with pytest.raises(IndexError):
            semaphore.acquire(0)


def test_nothing_is_added_when_no_program_is_current() -> None:
    with CollectiveProgram("over", TestCollective(2, 2, 2), 2) as program:
        rank, channel, semaphore = Rank(0), MemoryChannel(1, 0), Semaphore(0, 0)
        switch = SwitchChannel([0, 1], BufferType.input)
        own, other = (Rank(each).get_input_buffer()[0:1] for each in (0, 1))
    calls = [
        rank.get_input_buffer,
        rank.get_output_buffer,
        lambda: rank.copy(own, own, tb=0),
        lambda: rank.reduce(own, [own], tb=0),
        lambda: rank.barrier([0]),
        lambda: channel.signal(0),
        lambda: channel.put(other, own, tb=0),
        lambda: semaphore.acquire(0),
        lambda: semaphore.release(0),
        lambda: switch.at_rank(0),
        lambda: switch.broadcast(0, own, 0, 1, 0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="no program"):
            call()
    assert json.loads(program.to_json())["gpus"][0]["threadblocks"] == []


def test_a_rank_is_one_of_whichever_program_is_current() -> None:
    with CollectiveProgram("first", TestCollective(2, 1, 1), 2) as first:
        rank = Rank(1)
        assert rank == Rank(1) != Rank(0) and len({rank, Rank(1)}) == 1
    with CollectiveProgram("second", TestCollective(2, 3, 3), 2) as second:
        rank.copy(rank.get_output_buffer()[2:3], rank.get_input_buffer()[2:3], tb=0)
    assert [len(json.loads(program.to_json())["gpus"][1]["threadblocks"]) for program in (first, second)] == [0, 1]


def test_what_is_no_rank_or_thread_block_is_an_error() -> None:
    with CollectiveProgram("nobody", TestCollective(3, 1, 1), 3):
        switch, port = SwitchChannel([0, 1], BufferType.input), PortChannel(1, 0)
        here, there = (Rank(rank).get_input_buffer()[:] for rank in (0, 1))
        for rank in 2, 3:  # beside the channel, beyond the program
            with pytest.raises(KeyError):
                switch.reduce(rank, 0, 1, here, 0)
            with pytest.raises(KeyError):
                switch.broadcast(rank, here, 0, 1, 0)
        with pytest.raises(TypeError, match="tb"):
            port.put(there, here, tb=None)
    group = ThreadBlockGroup(range(3))
    for tb in -1, 3:
        with pytest.raises(ValueError, match=str(tb)):
            group.get_internal_id(tb)
    with pytest.raises(ValueError, match="-1"):
        ThreadBlockGroup([0, -1])


def test_chunks_can_be_copied_and_pickled() -> None:
    chunk = Chunk(rank=1, buffer=BufferType.scratch, index=2, size=3)
    assert copy.copy(chunk) == copy.deepcopy(chunk) == pickle.loads(pickle.dumps(chunk)) == chunk


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"instances": -1}, OverflowError),
        ({"instances": 2**20}, RuntimeError),
        ({"max_message_size": 2**64}, OverflowError),
        ({"replication_policy": "interleaved"}, TypeError),
    ],
)
def test_impossible_options_are_errors(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        copies(**options).to_json()


NAMES = {
    "channel": "MemoryChannel PortChannel SwitchChannel SyncType ReduceOperationType BufferType ChannelType Chunk RankGroup "
    "ThreadBlockGroup List Dict dataclass defaultdict get_program",
    "rank": "Rank BaseBuffer Buffer Semaphore SyncType ReduceOperationType BufferType ChannelType Chunk",
    "collectives": "Collective TestCollective AllGather AllReduce ReduceScatter AllToAll SendRecv BufferType BaseBuffer",
    "program": "CollectiveProgram MemoryChannel PortChannel SwitchChannel AllGather Semaphore ReplicationPolicy AlgoSpec",
    "loop": "LoopIterationContext",
    "thread_block_group": "ThreadBlockGroup",
    "general": "JSON",
    "utils": "AlgoSpec ReplicationPolicy",
    "internal.types": "SyncType ReduceOperationType BufferType ChannelType ReplicationPolicy Chunk RankGroup",
    "internal.globals": "get_program",
}


@pytest.mark.parametrize("module", NAMES)
def test_star_imports_give_the_peers_names(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from antiphon.language.{module} import *", names)
    assert set(NAMES[module].split()) <= names.keys()
    package = vars(importlib.import_module("antiphon.language"))
    assert all(package[name] is names[name] for name in NAMES[module].split())


def test_scripts_import_the_peer_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import mscclpp\n"
        "from mscclpp.language.collectives import AllGather\n"
        "from mscclpp.language import CollectiveProgram\n"
        "from mscclpp.language.general import JSON\n"
        "with CollectiveProgram(sys.argv[1], AllGather(2, 1, True), 2):\n"
        "    print(JSON())\n"
    )
    command = [sys.executable, "-m", "antiphon.compat", "run", "--peer", "mscclpp.language", str(script), "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["name"] == "mine"


def test_install_serves_the_peer_in_this_process() -> None:
    compat.install("mscclpp.language")
    try:
        served = importlib.import_module("mscclpp.language.rank")
        assert served is importlib.import_module("antiphon.language.rank")
    finally:
        compat.uninstall("mscclpp.language")
    assert "mscclpp" not in sys.modules


def test_the_verifier_names_lines_of_the_script() -> None:
    with CollectiveProgram("lost", SendRecv(2, 1, False), 2) as program:
        there, here = MemoryChannel(1, 0), MemoryChannel(0, 1)
        there.put(Rank(1).get_output_buffer()[0:1], Rank(0).get_input_buffer()[0:1], tb=0)
        there.signal(tb=0)
        line = sys._getframe().f_lineno + 1
        here.wait(tb=0), here.wait(tb=0)
        proved, report, findings = program.verify()
    assert not proved
    assert "deadlock" in report and "rank 1, thread block 0, op" in report and f"{__file__}:{line}" in report
    # The same as data, for tools: causes come first.
    assert [(finding.severity, finding.kind) for finding in findings] == [("error", "unbalanced"), ("error", "deadlock")]
    assert findings[1].message in report
    (place,) = findings[1].places
    assert (place.rank, place.threadblock, place.operation, place.origin) == (1, 0, "wait", f"{__file__}:{line}")


def test_a_mispaired_plan_names_the_line_of_the_script() -> None:
    with CollectiveProgram("unpaired", SendRecv(2, 1, False), 2) as program:
        line = sys._getframe().f_lineno + 1
        MemoryChannel(1, 0).signal(tb=0)
    said = f"rank 0 signals rank 1 1 times .* waits for it 0 times; the signals are made at {re.escape(__file__)}:{line}$"
    for finish in program.validate_signal_wait_pairing, program.to_json:
        with pytest.raises(RuntimeError, match=said):
            finish()


def test_what_cannot_be_is_refused_when_it_is_built() -> None:
    with CollectiveProgram("alone", AllGather(2, 1, True), 2):
        for channel in (MemoryChannel, PortChannel):
            with pytest.raises(ValueError, match=f"{channel.__name__}: from rank 1 to itself, where no channel leads"):
                channel(1, 1)
