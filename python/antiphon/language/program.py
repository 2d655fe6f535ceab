"""Programs."""

import inspect
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from antiphon import _core
from antiphon.language.internal.globals import get_program, set_program
from antiphon.language.internal.types import BufferType
from antiphon.language.channel import *
from antiphon.language.collectives import *
from antiphon.language.rank import Buffer, Rank, Semaphore
from antiphon.language.utils import AlgoSpec, ReplicationPolicy

if TYPE_CHECKING:
    from antiphon.language.loop import LoopIterationContext


class Gpu(NamedTuple):
    """The chunks of a rank's buffers."""

    id: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int


class Place(NamedTuple):
    """An operation of a finding."""

    rank: int
    threadblock: int
    #: Its number in the thread block, from 0.
    op: int
    #: Within a pipeline, its number there.
    inner: int | None
    #: Its name in the plan.
    operation: str
    #: The line of the script that asked for it, as ``file:line``, where it is known.
    origin: str | None


class Finding(NamedTuple):
    """A reason against a plan (an ``"error"``), or a remark (a ``"warning"``)."""

    severity: Literal["error", "warning"]
    #: What sort it is of: ``"deadlock"``, ``"race"``, ``"wrong"``, ...
    kind: str
    #: What is wrong, in words.
    message: str
    #: The operations that take part, first the one that cannot be.
    places: list[Place]


class Verdict(NamedTuple):
    """The verifier's result for a plan."""

    #: Whether it is proved.
    proved: bool
    #: What was found, in words: at most ten findings.
    report: str
    #: All findings: errors, then warnings, each with root causes first.
    findings: list[Finding]

    @classmethod
    def _of(cls, report: str, data: dict[str, Any]) -> "Verdict":
        findings = [
            Finding(found["severity"], found["kind"], found["message"], [Place(**place) for place in found["places"]])
            for found in data["findings"]
        ]
        return cls(data["proved"], report, findings)


class _Header(TypedDict):
    """The parts of a plan besides its operations, and the options of its passes."""

    name: str | None
    collective: str
    protocol: str
    inplace: bool
    instances: int
    instr_fusion: bool
    auto_sync: bool
    replication_policy: ReplicationPolicy
    reuse_resources: bool
    num_threads_per_block: int
    use_double_scratch_buffer: bool
    buffer_alignment: int
    min_message_size: int
    max_message_size: int


class CollectiveProgram:
    """A collective algorithm, as the calls inside ``with CollectiveProgram(...):`` write it down.

    ``instances`` of each thread block share the work as ``replication_policy`` says. ``protocol`` is ``"Simple"`` or
    ``"LL"`` (packets). ``instr_fusion`` makes one operation of neighbours where one can do the work of both, ``auto_sync``
    has threads meet between operations of a thread block that touch the same chunks. The rest stands in the plan: whether
    scratch is shared with other plans, the threads of a block, whether calls take turns between two halves of scratch,
    and messages' alignment and limits in bytes.

    ``AssertionError`` for another protocol, ``IndexError`` for more ranks than the collective has, ``ValueError`` for fewer,
    ``TypeError`` for a collective without buffers.
    """

    def __init__(
        self,
        name: str | None,
        collective: Collective,
        num_ranks: int,
        instances: int = 1,
        protocol: str = "Simple",
        instr_fusion: bool = True,
        auto_sync: bool = True,
        replication_policy: ReplicationPolicy = ReplicationPolicy.interleaved,
        reuse_resources: bool = False,
        num_threads_per_block: int = 1024,
        use_double_scratch_buffer: bool = False,
        buffer_alignment: int = 16,
        min_message_size: int = 0,
        max_message_size: int = 2**64 - 1,
    ) -> None:
        if protocol not in ("Simple", "LL"):
            raise AssertionError(f'protocol {protocol!r} is neither "Simple" nor "LL"')
        self.name = name
        self.collective = collective
        self.num_ranks = num_ranks
        self.instances = instances
        self.protocol = protocol
        self.instr_fusion = instr_fusion
        self.auto_sync = auto_sync
        self.replication_policy = replication_policy
        self.reuse_resources = reuse_resources
        self.num_threads_per_block = num_threads_per_block
        self.use_double_scratch_buffer = use_double_scratch_buffer
        self.buffer_alignment = buffer_alignment
        self.min_message_size = min_message_size
        self.max_message_size = max_message_size
        #: The loop that is open, if one is.
        self.loop_context: "LoopIterationContext | None" = None
        #: For each rank, its input and its output.
        self.buffers: list[dict[BufferType, BaseBuffer]] = collective.init_buffers()
        if self.buffers is None:
            raise TypeError(f"init_buffers of {type(collective).__name__} gives no buffers: a subclass says which there are")
        if len(self.buffers) < num_ranks:
            raise IndexError(f"{num_ranks} ranks, and the collective has buffers of {len(self.buffers)}")
        if len(self.buffers) > num_ranks:
            raise ValueError(f"the collective has {len(self.buffers)} ranks, and the program {num_ranks}")
        sizes = [self.buffers[rank] for rank in range(num_ranks)]
        self._core = _core.Program(
            [(buffers[BufferType.input].size, buffers[BufferType.output].size) for buffers in sizes]
        )

    @classmethod
    def from_spec(cls, spec: AlgoSpec) -> "CollectiveProgram":
        """A program of ``world_size`` ranks with the options of the same names; ``nranks_per_node``, ``in_place`` and ``tags`` say nothing about
        it."""
        options = {name: getattr(spec, name) for name in inspect.signature(cls).parameters if hasattr(spec, name)}
        return cls(num_ranks=spec.world_size, **options)

    def __enter__(self) -> "CollectiveProgram":
        set_program(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not the program around it: as in MSCCL++ 0.9.0, programs do not nest.
        set_program(None)

    @property
    def gpus(self) -> "list[Gpu]":
        """The chunks of each rank's buffers; of scratch, so far."""
        return [Gpu(rank, *self._core.num_chunks(rank)) for rank in range(self._core.num_ranks)]

    def validate_signal_wait_pairing(self) -> None:
        """``RuntimeError`` unless each rank waits as often for another as that one signals it."""
        self._core.check_pairing()

    def finish(self) -> _core.FinishedPlan:
        """The finished plan: checked for pairing, fused, ordered and replicated. The program stays as it is."""
        self.validate_signal_wait_pairing()
        return self._finished()

    def to_json(self, indent: int | str | None = 2, **json_kwargs: Any) -> str:
        """The text of :meth:`finish`.

        ``indent`` and ``json_kwargs`` are those of :func:`json.dumps`.
        """
        text = self.finish().to_json()
        if indent == 2 and not json_kwargs:
            return text
        return json.dumps(json.loads(text), indent=indent, **json_kwargs)

    def verify(self) -> Verdict:
        """Proves the finished plan, or says what is wrong: with rank, thread block and operation, and the line of the script
        that asked for it. Unlike :meth:`to_json` it takes any plan, also one whose signals and waits do not pair."""
        report, data = self._finished().verify()
        return Verdict._of(report, json.loads(data))

    def lines(self, rank: int, threadblock: int) -> list[tuple[str, int] | None]:
        """Of each operation of a thread block of the finished plan, the file and the line that asked for it: of fused
        ones the first one's, of what was put in the one's that needs it."""
        return self._finished().lines(rank, threadblock)

    def _finished(self) -> _core.FinishedPlan:
        header: _Header = {
            "name": self.name,
            "collective": self.collective.name,
            "protocol": self.protocol,
            "inplace": self.collective.inplace,
            "instances": self.instances,
            "instr_fusion": self.instr_fusion,
            "auto_sync": self.auto_sync,
            "replication_policy": self.replication_policy,
            "reuse_resources": self.reuse_resources,
            "num_threads_per_block": self.num_threads_per_block,
            "use_double_scratch_buffer": self.use_double_scratch_buffer,
            "buffer_alignment": self.buffer_alignment,
            "min_message_size": self.min_message_size,
            "max_message_size": self.max_message_size,
        }
        return self._core.finish(**header)

    def post_process_operations(self) -> None:
        """Checks that the plan can be made. In MSCCL++ 0.9.0 this changes the program; here nothing needs to."""
        self.finish()
