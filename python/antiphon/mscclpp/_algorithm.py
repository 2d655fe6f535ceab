"""``Algorithm``, and ``compile``, which makes one of a program."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon import Communicator
from antiphon.language import AlgoSpec, CollectiveProgram
from antiphon.mscclpp._absent import Absent
from antiphon.mscclpp._enums import CollectiveBufferMode, DataType, ReduceOp
from antiphon.mscclpp._executor import ExecutionPlan, Executor
from antiphon.mscclpp._memory import whole

__all__ = ["Algorithm", "DslCompiler", "compile"]

_NATIVE = "an algorithm is a plan: write it in mscclpp.language, and compile it"


class Algorithm:
    """A plan with an id and tags, by which a program may choose among several.

    Raises ``TypeError`` unless there is an ``execution_plan``, and ``NotImplementedError`` for a ``native_handle``.
    """

    @dataclass(frozen=True)
    class Constraint:
        """Where an algorithm may be used: the number of ranks, and of those of a node; 0 for any."""

        world_size: int = 0
        n_ranks_per_node: int = 0

    def __init__(
        self,
        id: str | None = None,
        execution_plan: ExecutionPlan | None = None,
        native_handle: Any = None,
        tags: Mapping[str, int] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        if native_handle is not None:
            raise NotImplementedError(f"Algorithm: Antiphon has no algorithms of native code: {_NATIVE}")
        if not isinstance(execution_plan, ExecutionPlan):
            kind = type(execution_plan).__name__
            raise TypeError(f"Algorithm: execution_plan must be of mscclpp.ExecutionPlan, not {kind}")
        self.id = id
        self._plan = execution_plan
        #: What the one who made it says of it.
        self.tags = dict(tags or {})
        self.constraint = constraint or self.Constraint()

    create_from_native_handle = Absent("Algorithm.create_from_native_handle", _NATIVE)
    create_from_native_capsule = Absent("Algorithm.create_from_native_capsule", _NATIVE)

    def __repr__(self) -> str:
        return f"<Algorithm {self.name!r}: {self.collective}>"

    @property
    def name(self) -> str:
        """The plan's name."""
        return self._plan.name

    @property
    def collective(self) -> str:
        """What it does: ``"allreduce"``, ``"allgather"``, ..."""
        return self._plan.collective

    @property
    def message_size_range(self) -> tuple[int, int]:
        """The bytes of the smallest message and of the largest one."""
        return self._plan.min_message_size, self._plan.max_message_size

    @property
    def buffer_mode(self) -> CollectiveBufferMode:
        """Whether the plan says that input and output share memory."""
        return CollectiveBufferMode.IN_PLACE if self._plan.inplace else CollectiveBufferMode.OUT_OF_PLACE

    def set_message_size_range(self, min_message_size: int, max_message_size: int) -> None:
        """Raises ``TypeError``: the sizes are the plan's."""
        low, high = self.message_size_range
        raise TypeError(
            f"set_message_size_range({min_message_size}, {max_message_size}): plan {self.name!r} has {low} and {high}; CollectiveProgram "
            "and AlgoSpec take others"
        )

    def is_dsl_algorithm(self) -> bool:
        """Yes."""
        return True

    def is_native_algorithm(self) -> bool:
        """No."""
        return False

    def execute(
        self,
        comm: Communicator,
        input_buffer: int,
        output_buffer: int,
        input_size: int,
        output_size: int,
        dtype: DataType,
        op: ReduceOp = ReduceOp.NOP,
        stream: int = 0,
        executor: Executor | None = None,
        nblocks: int = 0,
        nthreads_per_block: int = 0,
        symmetric_memory: bool = False,
        extras: Mapping[str, int] | None = None,
        accum_dtype: DataType | None = None,
    ) -> int:
        """:meth:`Executor.execute` of the plan, with packets of 16 bytes; gives 0. ``comm`` is the communicator of the ``executor``.

        ``nblocks``, ``nthreads_per_block``, ``symmetric_memory`` and ``extras`` have no effect: the plan has its own blocks. Nor
        has ``accum_dtype``: a reduction accumulates in float32, or in integers.

        Raises what that raises; ``ValueError`` also for another communicator, and for an ``op`` that is not the plan's;
        ``TypeError`` without an executor.
        """
        if not isinstance(executor, Executor):
            raise TypeError(f"execute: algorithm {self.name!r} needs executor=mscclpp.Executor(comm), not {type(executor).__name__}")
        if not isinstance(comm, Communicator):
            raise TypeError(f"execute: comm must be an antiphon.Communicator, not {type(comm).__name__}")
        if comm is not executor.communicator:
            raise ValueError(f"execute: the executor is of another communicator: {executor.communicator!r}, and comm is {comm!r}")
        if not isinstance(op, ReduceOp):
            raise TypeError(f"execute: op must be of mscclpp.ReduceOp, not {type(op).__name__}")
        if accum_dtype is not None and not isinstance(accum_dtype, DataType):
            raise TypeError(f"execute: accum_dtype must be of mscclpp.DataType, not {type(accum_dtype).__name__}")
        operators = self._plan.operators
        if op is not ReduceOp.NOP and operators and operators != {op.name.lower()}:
            raise ValueError(f"execute: op is {op.name}, and plan {self.name!r} has {', '.join(sorted(operators))}")
        whole("execute", "nblocks", nblocks)
        whole("execute", "nthreads_per_block", nthreads_per_block)
        executor.execute(
            comm.rank, input_buffer, output_buffer, input_size, output_size, dtype, self._plan, stream
        )
        return 0

    def reset(self) -> None:
        """Nothing: an algorithm has no state. :meth:`Executor.reset` gives memory back."""


class DslCompiler:
    """Makes algorithms of programs; :data:`compile` is one. Nothing is stored on disk: a program becomes a plan in milliseconds."""

    def __call__(
        self, algo: Callable[..., CollectiveProgram], algo_spec: AlgoSpec, rank: int, **kwargs: Any
    ) -> Algorithm:
        """:meth:`compile`."""
        return self.compile(algo, algo_spec, rank, **kwargs)

    def compile(
        self, algo: Callable[..., CollectiveProgram], algo_spec: AlgoSpec, rank: int, **kwargs: Any
    ) -> Algorithm:
        """The algorithm of the program that ``algo(algo_spec, **kwargs)`` returns, for this rank: with the spec's tags, and as id the
        SHA-256 of the plan.

        Raises ``ValueError`` for an ``algo`` that cannot be called, and a rank that is not below ``world_size``; ``TypeError`` for one that
        returns no program, and another spec; what the program itself raises.
        """
        if not callable(algo):
            raise ValueError(f"compile: algo must be a function that returns a program, not {type(algo).__name__}")
        if not isinstance(algo_spec, AlgoSpec):
            raise TypeError(f"compile: algo_spec must be of mscclpp.language.AlgoSpec, not {type(algo_spec).__name__}")
        if whole("compile", "rank", rank) >= algo_spec.world_size:
            raise ValueError(f"compile: rank is {rank}, and {algo_spec.name!r} is for {algo_spec.world_size} ranks")
        program = algo(algo_spec, **kwargs)
        if not isinstance(program, CollectiveProgram):
            raise TypeError(f"compile: algo must return a CollectiveProgram, not {type(program).__name__}")
        text = program.to_json()
        where = Algorithm.Constraint(algo_spec.world_size, algo_spec.nranks_per_node)
        plan = ExecutionPlan.of_text(text, rank)
        return Algorithm(hashlib.sha256(text.encode()).hexdigest(), plan, tags=algo_spec.tags, constraint=where)


compile = DslCompiler()
