"""The compiled part of the package. Users find everything under `antiphon`."""

import os
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, final, overload

from typing_extensions import Buffer, CapsuleType, Self, disjoint_base

from antiphon._results import RmsNormResult
from antiphon._types import Algorithm, DTypeName, Op, Quantize, ScaleLayout
from antiphon.language.internal.types import BufferType, ReduceOperationType, SyncType
from antiphon.language.utils import ReplicationPolicy

class _Program(Protocol):
    def finish(self) -> FinishedPlan: ...

# A torch.device, whose str is its name.
class _Device(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...

class _SupportsDLPack(Protocol):
    def __dlpack__(self) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# NumPy arrays and torch tensors; CuPy's and JAX's arrays, bytearrays, memoryviews, array.array, ...
_Array: TypeAlias = Buffer | _SupportsDLPack
_A = TypeVar("_A", bound=_Array)
_O = TypeVar("_O", bound=_Array)
_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)

__all__ = [
    "AbortedError",
    "BaseBuffer",
    "Channel",
    "Chunk",
    "Communicator",
    "FinishedPlan",
    "Lowering",
    "Mapping",
    "MixedHandler",
    "ParallelInfo",
    "Memory",
    "Moe",
    "MoeByExpert",
    "MoeByExpertRoutes",
    "MoeByTokenRoutes",
    "MoeSlotRoutes",
    "MoeSlots",
    "PeerLostError",
    "Pending",
    "Plan",
    "PlanCollection",
    "Program",
    "Switch",
    "SymmetricBuffer",
    "ThreadBlockGroup",
    "__version__",
    "after_fork",
    "compute_fp4_swizzled_layout_sf_size",
    "library_names",
    "library_plan",
    "launcher_variables",
    "spelled",
    "main",
    "operations",
    "strided_memory",
    "_locks_taken",
]
__version__: str

def main(arguments: Sequence[str]) -> int:
    """Runs the command ``antiphon`` and returns its exit status."""

def operations() -> list[tuple[str, str, str, bool, str | None]]:
    """The rows of the table of operations; each operation is a method of :class:`Communicator`. A row has: the name; the extents of
    the input and of the output (``"block"``; ``"row"``: a block for each rank; ``"part"``: this rank's of uneven
    parts; ``"parts"``: all of them); whether it reduces; whether the root alone ``"gives"`` or ``"gets"``."""

def launcher_variables() -> list[str]:
    """The environment variables by which launchers describe a world."""

def after_fork() -> None:
    """Tells the library that this process is the child of a fork."""

def _locks_taken() -> int | None:
    """For tests: how many locks this thread has taken, in a build with debug assertions."""

class AbortedError(RuntimeError):
    """A rank, perhaps this one, called :meth:`Communicator.abort`."""

    rank: int
    """The rank that called, as the communicator numbers it."""
    world_rank: int
    """The rank that called, as the world numbers it."""

class PeerLostError(RuntimeError):
    """A peer is gone: its process ended, or it closed its communicator."""

    rank: int
    """The lost rank, as the communicator numbers it."""
    world_rank: int
    """The rank that was lost first, as the world numbers it: the same rank, or a rank outside of the group whose loss
    made it leave."""

@final
class Pending(Generic[_R]):
    """A started operation. It keeps its arrays alive, even if the handle and all other references are dropped. Do not
    write the input, or use the output, before the operation has finished."""

    def __class_getitem__(cls, _result: Any) -> type[Self]: ...
    def wait(self, timeout: float | None = None) -> _R:
        """Waits until the operation has finished and returns the result of the blocking form. May be called again.

        Raises the errors of the blocking form, and ``TimeoutError`` if the operation has not finished after ``timeout`` seconds.
        Neither the time-out nor Ctrl-C ends the operation.

        On CUDA the current stream waits for the operation, and the caller does not."""

    def is_finished(self) -> bool:
        """Whether the operation has finished: :meth:`wait` would return at once; on CUDA, the GPU has finished it."""

    @property
    def source(self) -> int | None:
        """The rank that sent the message, after a wait for its receive has returned; else ``None``."""

@final
class Communicator:
    """The connection of a rank to its world; :func:`antiphon.init` makes it.

    All ranks make the same calls with the same dtype, counts, operator and root, in the same order. One rank may
    start a call where another waits for it. Messages (``send``, ``recv``) are ordered separately, for each pair of ranks.
    Threads may share a communicator.

    Arrays are NumPy arrays, torch tensors, or other objects with the buffer protocol or DLPack, and must be contiguous.
    Without ``out=`` the result is a new array of the input's library (a NumPy array for plain buffers).
    ``out=`` may be any writable array of the right dtype and number of elements. ``out=x`` works in place. ``all_gather`` also
    works in place if ``x`` is this rank's block of ``out``, and ``reduce_scatter`` if ``out`` is this
    rank's block of ``x``. Gradients are not tracked: a tensor that requires grad raises ``ValueError`` unless grad mode is off, and names the
    operator of ``torch.ops.antiphon`` that tracks it. What a call writes counts as written for autograd.

    An operator is its name in lower or upper case, an :class:`antiphon.ReduceOp`, or one of ``torch.distributed``.

    Reductions take float64, float32, float16, bfloat16, int64, int32, int8 and uint8, and give the same bits on
    every rank; ``"band"``, ``"bor"`` and ``"bxor"`` take only the integers. All other operations take elements of any whole
    number of bytes. Ranks compare their dtypes; for types without a name in torch, they compare only the number of bytes.

    Invalid arguments raise ``ValueError`` and ``TypeError`` before the call has any effect. Failures between ranks raise
    :class:`PeerLostError`, ``TimeoutError`` or ``RuntimeError``; after such a failure every call raises the same error
    (``RuntimeError`` after Ctrl-C). A rank that ends a call after another one gave up in it raises too. A closed communicator, or one in the child of a fork, raises ``RuntimeError``. Other threads
    run while a call waits, and Ctrl-C ends the wait.

    **On CUDA.** All operations except plans, :meth:`recv_any` and messages with tags also take tensors on
    a GPU (reductions only float32, float16 and bfloat16). They enqueue their work in the current stream of torch or CuPy,
    or in ``stream``, a stream's handle as an integer. They do not wait for the work, and may be captured in graphs. On each
    rank the calls of a communicator belong to one stream, or to several that wait for each other. With ``stream`` the
    caller orders the call against other uses of the tensors, and keeps them until the stream has passed the call; it needs
    ``out`` (else ``ValueError``) unless it is the library's current stream. A communicator must outlive the replays of its
    graphs: a later replay accesses unmapped memory, a fatal CUDA error. All ranks make the calls of all
    communicators in one order. Calls on two streams run at once; a call on a third stream comes behind an earlier one, of whatever
    communicator, since a GPU has room for two grids that wait. The first CUDA call connects the ranks'
    GPUs and compiles kernels: :meth:`prepare_cuda` does this in advance. A later call, or :meth:`check`, raises failures between
    ranks. Operations without a CUDA form raise ``NotImplementedError``.
    """

    @staticmethod
    def from_env(timeout: float | None = None, arena_bytes: int | None = None) -> Communicator:
        """See :func:`antiphon.init`, which calls this method and the three below."""

    @staticmethod
    def alone(timeout: float | None = None, arena_bytes: int | None = None) -> Communicator:
        """A world of this rank alone."""

    @staticmethod
    def at_path(
        rank: int,
        world_size: int,
        path: str | os.PathLike[str],
        secret: bytes,
        timeout: float | None = None,
        arena_bytes: int | None = None,
        parent: Communicator | None = None,
    ) -> Communicator: ...
    @staticmethod
    def by_exchange(
        rank: int,
        world_size: int,
        exchange: Callable[[bytes], Sequence[bytes]],
        timeout: float | None = None,
        arena_bytes: int | None = None,
        parent: Communicator | None = None,
    ) -> Communicator: ...
    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node. The ranks of a node share a memory: those of one machine, usually."""

    @property
    def node(self) -> int:
        """Which of the :attr:`nodes` this rank is on."""

    @property
    def node_rank(self) -> int:
        """The place of this rank among the ranks of its node, from 0."""

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on this rank's node."""

    @property
    def cuda_engine(self) -> Literal["nvlink", "nccl"]:
        """What carries calls on CUDA tensors. ``"nvlink"``, our kernels, serves ranks of one node. ``"nccl"`` serves ranks of several: with
        NCCL's bits and without a deadline, the collectives, lists of them and :meth:`send_recv`, in the order of the stream, also captured
        after one call that was not. Fused and mixed calls, plans, mixtures of experts, registered memory, and messages that only send or
        receive raise there."""

    @property
    def timeout(self) -> float:
        """The number of seconds that a call of this rank waits for a peer before it fails. Any thread may set it, also for waits
        under way; graphs that were captured before keep their timeout."""

    @timeout.setter
    def timeout(self, timeout: float) -> None: ...

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""

    def close(self) -> None:
        """Waits for all started operations except receives, then leaves the world: ranks that still need this rank get
        :class:`PeerLostError`. Graphs with calls of this communicator must not be replayed any more."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that pass the same ``color``, ordered by ``key`` and then by rank; ``None``
        on a rank that passes the color ``None``."""

    def node_group(self) -> Communicator:
        """A communicator of the ranks of this rank's node, in the same order; all ranks call it."""

    def rail_group(self) -> Communicator:
        """A communicator of the ranks that have this rank's :attr:`node_rank` on their nodes; all ranks call it."""

    def shrink(self) -> Communicator:
        """A communicator of the surviving ranks after a loss or :meth:`abort`, without a new rendezvous. It is a world of its own,
        with the ranks in the same order, numbered from 0.

        All living ranks that have not closed this communicator call it together. All get the same members, even if more ranks
        are lost meanwhile. It takes milliseconds once all have called. This communicator does not change: close it.
        The new one sets up GPUs at its first use there. Raises ``TimeoutError`` that names the living ranks that
        do not call it; then this communicator cannot be shrunk any more."""

    def abort(self) -> None:
        """Ends all waits of this communicator, on this rank and the others, with :class:`AbortedError`, within milliseconds.

        Any thread may call it, and it does not wait for other ranks. All later calls except :meth:`shrink` raise the same error.
        It has no effect if the communicator has failed before. Groups that were split off continue."""

    def barrier(self, *, device: int | None = None, stream: int | None = None) -> None:
        """Waits until every rank has called it. With a CUDA device the stream waits, and the call returns at once."""

    def prepare_cuda(
        self,
        device: int | None = None,
        *,
        dtypes: Sequence[DTypeName] | None = None,
        ops: Sequence[Op] | None = None,
        staging_bytes: int | None = None,
    ) -> None:
        """Connects the ranks' GPUs and loads kernels in advance. It is necessary before a graph is captured.

        All ranks call it together. ``device`` is torch's or CuPy's current device by default. It loads the reductions of
        ``dtypes`` (``"float32"``, ``"float16"`` and ``"bfloat16"``) by ``ops`` (``"sum"``); each that is not in the cache on
        disk takes about a second. Each communicator takes about 370 MB on each GPU, of which 356,515,840 bytes are for data under way;
        ``staging_bytes``, equal on all ranks and at least 16 MiB, sets another number, unless the GPU is connected already. Raises
        ``RuntimeError`` that names missing requirements, and ``ValueError`` for fewer bytes."""

    def on_cuda_failure(self, action: Literal["error", "abort"] | Callable[[Exception], object]) -> None:
        """Sets the action when a kernel gives up while this rank makes no call, for example while it replays a graph.

        In any case one line on standard error names the rank, the operation and the cause, and the next call raises the error.
        ``"error"``: no further action. ``"abort"``: the process is aborted, so that the launcher ends the job. A callable is called
        once, from another thread, with the exception that the next call raises. The environment variable
        ``ANTIPHON_ON_FAILURE`` (``error`` or ``abort``) sets the initial action of communicators."""

    def check(self) -> None:
        """Raises the failure of kernels that have finished: :class:`PeerLostError`, ``TimeoutError`` or ``RuntimeError``.
        It does not wait: synchronise with the stream first."""

    def register_cuda(self, memory: SymmetricBuffer | _Array) -> None:
        """Lets ``all_reduce(..., registered=True)`` and ``Plan.execute(..., registered=True)`` use the memory of an array on CUDA, or of
        a :class:`SymmetricBuffer`.

        All ranks call it together, with equal sizes. These calls do not stage data. An all-reduce is from 16 MiB on as fast as others,
        and below 3 µs slower. Call :meth:`unregister_cuda` before the memory is freed. Raises ``ValueError`` for
        memory on the host and for different sizes, and ``RuntimeError`` with the reason for memory that CUDA IPC cannot share, such
        as that of PyTorch's expandable segments."""

    def unregister_cuda(self, memory: SymmetricBuffer | _Array) -> None:
        """Ends the registration of memory, after all work on the GPUs has finished. All ranks call it together."""

    def exchange_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order. Lengths may differ."""

    def exchange_objects(self, object: _T) -> list[_T]:
        """The objects of all ranks, in rank order; they are pickled, so trust your peers. ``TypeError`` that names an object that
        cannot be pickled, and ``RuntimeError`` with the reason on the other ranks; the communicator stays usable."""

    def broadcast_object(self, object: _T, root: int = 0) -> _T:
        """The root's object, which is pickled, so trust your peers. Other ranks may pass anything. ``TypeError`` on the root if it
        cannot be pickled; ``RuntimeError`` elsewhere, with the reason, and for a root that calls it with another root. The
        communicator stays usable."""

    def all_reduce(
        self,
        x: _A,
        op: Op | None = None,
        *,
        out: _O | None = None,
        algorithm: Algorithm | None = None,
        registered: bool = False,
        stream: int | None = None,
    ) -> _A | _O:
        """The reduction of all ranks' ``x`` by ``op`` (``"sum"``), of the shape of ``x``.

        The algorithm is chosen from measured tables unless given; on the host that needs another ``out`` than ``x``.

        ``registered`` is for CUDA: ``x`` lies in memory given to :meth:`register_cuda`, at the same place of it on all ranks,
        and peers load it in place. With ``"one-shot"``, ``out`` is any memory except ``x``. With ``"two-shot"``, ``out`` is registered
        too, or is ``x`` itself, where two-shot is the default."""

    def all_reduce_rms_norm(
        self,
        x: _A,
        residual: _Array | None = None,
        weight: _Array | None = None,
        *,
        eps: float = 1e-6,
        weight_bias: float = 0.0,
        bias: _Array | None = None,
        pre_norm: bool = False,
        pre_weight: _Array | None = None,
        quantize: Quantize | None = None,
        scale: float | _Array | None = None,
        group_size: int = 128,
        scale_layout: ScaleLayout | int | None = None,
        keep_norm: bool = False,
        out: _Array | None = None,
        residual_out: _Array | None = None,
        codes: _Array | None = None,
        scales: _Array | None = None,
        rounded: bool = False,
        algorithm: Algorithm | None = None,
        stream: int | None = None,
    ) -> RmsNormResult[_A]:
        """The sum of all ranks' ``x`` and the residual, and its RMS norm, in one pass: the operations behind each matrix
        product of a tensor-parallel transformer layer.

            norm, residual, _, _ = comm.all_reduce_rms_norm(x, residual, weight)

        ``x`` is ``(..., hidden)`` of float32, float16 or bfloat16, ``hidden`` a multiple of 16 bytes; ``residual`` like
        it; ``weight``, ``bias`` and ``pre_weight`` are ``(hidden,)`` of the same dtype; by default weights are 1,
        and there is no residual and no bias. The result is computed in this order, in f32 with one rounding in each line::

            total    = sum over the ranks of x, with the bits of all_reduce
            total    = rms_norm(total + bias) * pre_weight         with pre_norm, which is Gemma 2's; else total + bias
            residual = total + residual
            norm     = residual * (weight_bias + weight) / sqrt(mean(residual ** 2) + eps)
            codes, scales = quantised norm

        ``quantize`` makes ``codes``, like ``x``, and ``scales``; the norm itself only with ``keep_norm``, or ``out``:

        * ``"fp8"``: E4M3 of the norm divided by ``scale``; no ``scales``.
        * ``"fp8-tokens"``: E4M3, with a float32 scale for each token, ``(..., 1)``: its largest magnitude divided by 448.
        * ``"fp8-tokens-reciprocal"``: with scales that are multiplied by 1/448 in float32 instead, as torch computes
          that quotient on GPUs.
        * ``"fp8-groups"``: E4M3, with a power of two for each ``group_size`` elements, four exponents in an int32:
          ``(tokens, packs)``, columns first, each padded to a multiple of 4 tokens.
        * ``"nvfp4"``: E2M1, two in a byte, ``(..., hidden / 2)``, with an E4M3 scale for each 16, which includes the
          factor ``scale``, in the order ``scale_layout`` (``"128x4"``). Not of float32.

        E4M3 codes are torch's ``float8_e4m3fn``, and bytes in other libraries. ``scale`` is a number (1 unless given)
        or an array of one float32. The result's ``residual`` is ``None`` if there was none and no ``residual_out``,
        which may be ``residual`` itself; ``out`` or ``residual_out`` may be ``x``. ``rounded`` rounds after each
        addition of ranks. All ranks pass the same shape, dtype, ``rounded`` and ``algorithm``. On CUDA tensors begin at multiples of 16 bytes, and the first call
        of a dtype must not be captured."""

    def all_reduce_fused(
        self,
        x: _Array | None = None,
        *,
        tokens: int | None = None,
        hidden: int | None = None,
        experts: _Array | None = None,
        expert_scales: _Array | None = None,
        shared: _Array | None = None,
        rows: _Array | None = None,
        index: _Array | None = None,
        routed_scaling: float = 1.0,
        rounded: bool = False,
        bias: _Array | None = None,
        pre_norm: bool = False,
        pre_weight: _Array | None = None,
        residual: _Array | None = None,
        weight: _Array | None = None,
        weight_bias: float = 0.0,
        eps: float = 1e-6,
        round_before_weight: bool = False,
        quantize: Quantize | None = None,
        scale: float | _Array | None = None,
        group_size: int = 128,
        scale_layout: ScaleLayout | int | None = None,
        sum_out: _Array | None = None,
        residual_out: _Array | None = None,
        norm_out: _Array | None = None,
        inverse_rms_out: _Array | None = None,
        codes: _Array | None = None,
        scales: _Array | None = None,
        algorithm: Algorithm | None = None,
        stream: int | None = None,
    ) -> None:
        """:meth:`all_reduce_rms_norm` of any source, into outputs that the caller has; those that are not given are not
        computed. ``sum_out`` is the sum before everything else. ``inverse_rms_out``, float32 ``(tokens,)``, is one
        over the root mean square that each token's norm divides by, which its gradient needs. ``round_before_weight``: the norm
        is rounded before its weight and behind it, as in Hugging Face's models. ``codes`` and ``scales`` may be of any dtype
        and longer.

        The source is one of

        * ``x``: ``(tokens, hidden)``, of whatever shape; ``hidden`` is its last dimension unless given. With ``tokens``
          too, it and the other ``(tokens, hidden)`` may be longer: what comes first counts;
        * ``experts`` ``(experts, tokens, hidden)``, weighted by ``expert_scales``, float32 ``(experts, tokens)``, and
          ``shared`` ``(tokens, hidden)``: what the experts here computed for every token, and the shared expert;
        * ``rows`` ``(rows, hidden)`` and ``index``, int32 ``(tokens, top_k)``: what the experts here computed for the
          tokens that were sent to them, and which rows are a token's (-1: none). With ``expert_scales`` ``(tokens,
          top_k)``, ``routed_scaling`` for their sum, and ``shared``.

        Outputs must not overlap each other or what is read. But ``residual_out`` may be ``residual``, and one of
        ``sum_out``, ``residual_out`` and ``norm_out`` may be ``x``. Raises ``ValueError`` and ``TypeError`` that name
        what does not fit, before anything happens."""

    def all_gather(self, x: _A, *, out: _O | None = None, stream: int | None = None) -> _A | _O:
        """All ranks' ``x``, one after the other along the first dimension: ``(n, ...)`` in, ``(world_size * n,
        ...)`` out."""

    def reduce_scatter(
        self, x: _A, op: Op | None = None, *, out: _O | None = None, stream: int | None = None
    ) -> _A | _O:
        """The reduction of every rank's block of ``x`` for this rank: ``(world_size * n, ...)`` in, ``(n, ...)`` out."""

    def all_gather_list(
        self, xs: Sequence[_A], *, out: Sequence[_O] | None = None, stream: int | None = None
    ) -> list[_A | _O]:
        """:meth:`all_gather` of each of ``xs``. On CUDA one launch does all, if there are at most 64 tensors of one dtype that fit the
        staging memory together."""

    def reduce_scatter_list(
        self, xs: Sequence[_A], op: Op | None = None, *, out: Sequence[_O] | None = None, stream: int | None = None
    ) -> list[_A | _O]:
        """:meth:`reduce_scatter` of each of ``xs``, as :meth:`all_gather_list`."""

    def all_to_all(self, x: _A, *, out: _O | None = None, stream: int | None = None) -> _A | _O:
        """Block ``r`` of ``x`` goes to rank ``r``, and block ``r`` of the result comes from rank ``r``: ``(world_size * n, ...)`` in
        and out."""

    def all_to_all_v(
        self,
        x: _A,
        sends: Sequence[int],
        receives: Sequence[int],
        *,
        out: _O | None = None,
        stream: int | None = None,
    ) -> _A | _O:
        """:meth:`all_to_all` with blocks of ``sends[r]`` rows to rank ``r`` and ``receives[r]`` rows from it, packed in
        rank order. Counts that disagree raise ``ValueError`` on every rank and leave the communicator usable."""

    def all_gather_v(
        self, x: _A, counts: Sequence[int], *, out: _O | None = None, stream: int | None = None
    ) -> _A | _O:
        """:meth:`all_gather` with ``counts[r]`` rows of rank ``r``. All ranks pass the same counts; different counts raise
        ``RuntimeError``. ``x`` may be this rank's rows of ``out``."""

    def reduce_scatter_v(
        self,
        x: _A,
        counts: Sequence[int],
        op: Op | None = None,
        *,
        out: _O | None = None,
        stream: int | None = None,
    ) -> _A | _O:
        """:meth:`reduce_scatter` with ``counts[r]`` rows for rank ``r``. All ranks pass the same counts; different counts raise
        ``RuntimeError``. ``out`` may be this rank's rows of ``x``."""

    def broadcast(self, x: _A | None, root: int = 0, *, out: _O | None = None, stream: int | None = None) -> _A | _O:
        """Copies the root's ``x`` into the ``x`` of all ranks, in place. With ``out``, copies into ``out`` instead, and reads only the
        root's ``x``; the other ranks may pass ``None`` as ``x``."""

    def reduce(
        self, x: _A, op: Op | None = None, root: int = 0, *, out: _O | None = None, stream: int | None = None
    ) -> _A | _O | None:
        """:meth:`all_reduce` whose result only the root gets; the other ranks get ``None``."""

    def gather(
        self, x: _A, root: int = 0, *, out: _O | None = None, stream: int | None = None
    ) -> _A | _O | None:
        """:meth:`all_gather` whose result only the root gets; the other ranks get ``None``."""

    def scatter(
        self, x: _A | None, root: int = 0, *, out: _O | None = None, stream: int | None = None
    ) -> _A | _O:
        """Rank ``r`` gets the ``r``-th block of the root's ``x``: ``(world_size * n, ...)`` there, ``(n, ...)`` out.
        The other ranks pass ``None``, and ``out``."""

    def send(self, x: _Array, to: int, *, tag: int = 0, stream: int | None = None) -> None:
        """Sends an array to a rank, which must receive one of the same dtype and number of elements, with the same tag. The first
        8 messages of up to 32 KiB each do not wait for the receiver.

        Messages with one tag (0 to 2³² − 1) arrive in the order in which they were sent. While a rank waits for a message with
        another tag, it stores earlier messages in its own memory. On CUDA the tag must be 0; messages are sent in the order of
        the stream, and a short message does not wait for its receiver."""

    def recv(self, out: _O, source: int, *, tag: int = 0, stream: int | None = None) -> _O:
        """Receives an array that a rank has sent with this tag."""

    def recv_any(self, out: _Array, *, tag: int = 0) -> int:
        """Receives an array from the first rank that sends one with this tag, and returns this rank.

        Raises :class:`PeerLostError` when the process of any rank ends, or all other ranks have closed their communicators."""

    def send_recv(self, x: _Array, to: int, out: _O, source: int, *, stream: int | None = None) -> _O:
        """Sends one array and receives another at the same time, as rings do. On CUDA both have one dtype."""

    def start_barrier(self) -> Pending[None]:
        """Starts :meth:`barrier`."""

    def start_all_reduce(
        self, x: _A, op: Op | None = None, *, out: _O | None = None, algorithm: Algorithm | None = None
    ) -> Pending[_A | _O]:
        """Starts :meth:`all_reduce`."""

    def start_all_gather(self, x: _A, *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`all_gather`."""

    def start_reduce_scatter(self, x: _A, op: Op | None = None, *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`reduce_scatter`."""

    def start_all_to_all(self, x: _A, *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`all_to_all`."""

    def start_all_to_all_v(
        self, x: _A, sends: Sequence[int], receives: Sequence[int], *, out: _O | None = None
    ) -> Pending[_A | _O]:
        """Starts :meth:`all_to_all_v`."""

    def start_all_gather_v(self, x: _A, counts: Sequence[int], *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`all_gather_v`."""

    def start_reduce_scatter_v(
        self, x: _A, counts: Sequence[int], op: Op | None = None, *, out: _O | None = None
    ) -> Pending[_A | _O]:
        """Starts :meth:`reduce_scatter_v`."""

    def start_broadcast(self, x: _A | None, root: int = 0, *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`broadcast`."""

    def start_reduce(self, x: _A, op: Op | None = None, root: int = 0, *, out: _O | None = None) -> Pending[_A | _O | None]:
        """Starts :meth:`reduce`."""

    def start_gather(self, x: _A, root: int = 0, *, out: _O | None = None) -> Pending[_A | _O | None]:
        """Starts :meth:`gather`."""

    def start_scatter(self, x: _A | None, root: int = 0, *, out: _O | None = None) -> Pending[_A | _O]:
        """Starts :meth:`scatter`."""

    def start_send(self, x: _Array, to: int, *, tag: int = 0) -> Pending[None]:
        """Starts :meth:`send`."""

    def start_recv(self, out: _O, source: int | None, *, tag: int = 0) -> Pending[_O]:
        """Starts :meth:`recv`; with the source ``None``, starts :meth:`recv_any`, and ``source`` of the handle is the sender's rank
        (host memory only)."""

    def symmetric(self, num_bytes: int, device: str | int | _Device | None = None) -> SymmetricBuffer:
        """Makes a buffer of which every rank has a zeroed copy that all ranks can read and write. All ranks call it together, with the
        same size.

        By default, and with ``"cpu"``, the copies are on the host; collectives on parts of them skip a copy. With ``device`` a GPU (its
        number, ``"cuda:0"``, a ``torch.device``, or ``"cuda"`` for the current one of torch or CuPy) each is on the GPU of its rank;
        :meth:`register_cuda` lets collectives skip a copy there. Raises ``RuntimeError`` with the numbers when the memory is exhausted."""

    def free(self, buffer: SymmetricBuffer) -> None:
        """Frees the buffer on all ranks; afterwards no rank may use any copy. All ranks call it together: on GPUs after all work on them
        has finished, and after :meth:`unregister_cuda` of a registered buffer."""

    def load_plan(
        self,
        plan: str | os.PathLike[str] | FinishedPlan | _Program,
        *,
        device: str | int | _Device | None = None,
        packets: Literal["ll8", "ll16"] = "ll16",
        form: Literal["auto", "compiled", "interpreted"] = "auto",
        ports: Literal["blocks", "engines"] = "blocks",
        most_scratch: int | None = None,
    ) -> Plan:
        """Makes an execution plan ready: a ``CollectiveProgram`` of :mod:`antiphon.language`, the text of a plan (JSON), or
        the path of its file. All ranks call it together, with the same plan and the same arguments but ``device``.

        By default, and with ``"cpu"``, the plan works on host memory. With ``device`` a GPU (its number, ``"cuda:0"``, a
        ``torch.device``, or ``"cuda"`` for the current one of torch or CuPy) it works between the GPUs of up to 8 ranks of one
        machine; a rank loads all of its plans on one GPU. ``packets`` are of 4 bytes of data in 8 or 8 in 16. ``most_scratch`` is for
        GPUs: the most bytes of scratch that the plan may take there (512 MiB). A message that needs more is done in parts. ``form`` is for GPUs too: ``"compiled"`` makes a kernel for the
        steps of the plan, which takes about a second the first time on a machine, and ``"interpreted"`` has one that serves all plans;
        by default plans of up to 512 distinct operations are compiled. The results have the same bits. ``ports`` says, on GPUs, what does the
        work of the plan's port channels: the thread blocks, or with ``"engines"`` the copy engines, to which a thread of the host hands requests.

        The plan is proved first, for the memory of the host or of GPUs. Raises ``ValueError`` with the findings if the plan is
        wrong, is for another number of ranks, or has a text of more than 64 MiB; ``RuntimeError`` if ranks load different plans, and
        for more thread blocks than fit the GPU; ``OSError`` for a file that cannot be read. The communicator stays usable."""

@final
class Plan:
    """An execution plan that :meth:`Communicator.load_plan` has loaded on the ranks of a communicator."""

    @property
    def name(self) -> str | None: ...
    @property
    def collective(self) -> str:
        """The collective's name in the plan: ``"allreduce"``, ``"allgather"``, ``"reducescatter"``, ``"alltoall"``, ..."""

    @property
    def device(self) -> int | None:
        """The number of the GPU, or ``None`` on the host."""

    def prepare(self, dtype: DTypeName, num_bytes: int) -> None:
        """Makes a plan on a GPU ready for messages of ``num_bytes`` bytes of a dtype: compiles the kernel and allocates memory. It is
        necessary before a graph is captured, and otherwise saves the first call of a size the time. A message is the output of an
        all-gather, else the input. All ranks call it together. Sizes share memory if the largest one is prepared first.

        Raises ``ValueError`` for a size that the plan does not serve or for which ``most_scratch`` is too little, ``TypeError``
        for a dtype that cannot be reduced, ``RuntimeError`` that names missing requirements; ``NotImplementedError`` on the host,
        where the first call of a size prepares it."""

    @overload
    def execute(self, x: _A, out: None = None, *, registered: bool = False, stream: int | None = None) -> _A: ...
    @overload
    def execute(self, x: _Array, out: _O, *, registered: bool = False, stream: int | None = None) -> _O:
        """Executes the plan on ``x``, and returns the output: ``out`` if given, else ``x`` if the plan works in place,
        else a new array like ``x``, whose number of rows is that of ``x`` times the ratio of the plan's output and input chunks. All
        ranks call it together, with arrays of the same size and dtype, of the host or of the GPU that the plan was loaded on.

        With ``x`` as ``out``, or with a plan that works in place and no ``out``, ``x`` is input and output. If these differ in
        size, ``x`` is the larger one, and the other is this rank's own part of it.

        ``registered`` is for GPUs: what peers touch of ``x`` and ``out`` lies in memory given to
        :meth:`Communicator.register_cuda`, at the same place of it on all ranks, and peers read and write it there. So nothing is
        staged, except an input of a plan that works in place where ``out`` is another array. Without it, what peers touch is copied to
        staging before, and back behind.

        The first call of a size takes longer than later ones: see :meth:`prepare`.

        On a GPU the work is put into ``stream``, by default the current one of the array's library, behind the plans that
        were executed on this communicator before, on whatever stream; the call returns at once, and a graph may capture it. With
        another stream than the current one the caller orders the arrays' memory, and passes ``out``. The stream must live until the
        next execution of a plan of this communicator, as torch's do and CuPy's current one. A failure of a kernel is raised by a
        later call and by :meth:`Communicator.check`.

        Raises ``ValueError`` for arrays that are not a whole number of the plan's aligned chunks, overlap in part, are outside the
        plan's limits, on another device, or not registered with ``registered``, ``TypeError`` for dtypes that differ or cannot be reduced, ``RuntimeError`` for a size
        that was not prepared, while the stream is being captured. After ``TimeoutError`` or :class:`PeerLostError`,
        which name the rank, the thread block and the operation that waited, the communicator is unusable."""

    def close(self) -> None:
        """Frees the plan's memory. All ranks call it together, when no graph with calls of the plan is launched any more; a plan
        that is dropped keeps its memory until the communicator is closed."""

@final
class PlanCollection:
    """Plans of a communicator, and on GPUs this library's own calls beside them, from which every call takes one: the fastest at its size,
    once they were measured (:meth:`tune`), else the first that was added and serves the collective, the dtype and the size. All ranks make
    the same collection, add the same in the same order, and so take the same without asking each other.

        plans = antiphon.PlanCollection(comm, device="cuda")
        plans.add_built_in()
        plans.add("two_shot.json")
        plans.tune((1 << 10, 4 << 20), "bfloat16")
        total = plans.execute("allreduce", x)

    Collectives are ``"allreduce"``, ``"allgather"``, ``"reducescatter"`` and ``"alltoall"``. ``device`` is that of
    :meth:`Communicator.load_plan`; on the host nothing is measured. A measurement chooses among plans that reduce once and in the order of
    the ranks, as the built-in calls do, if the first one that was added does, so that the results' bits do not depend on it; with
    ``allow_other_bits`` it chooses among all."""

    def __new__(
        cls, comm: Communicator, *, device: str | int | _Device | None = None, allow_other_bits: bool = False
    ) -> Self: ...
    @property
    def device(self) -> int | None:
        """The number of the GPU, or ``None`` on the host."""

    def __len__(self) -> int:
        """How many plans there are, with the built-in calls."""

    def add(
        self,
        plan: str | os.PathLike[str] | FinishedPlan | _Program,
        *,
        dtypes: Sequence[DTypeName] | None = None,
        packets: Literal["ll8", "ll16"] = "ll16",
        form: Literal["auto", "compiled", "interpreted"] = "auto",
        ports: Literal["blocks", "engines"] = "blocks",
        most_scratch: int | None = None,
    ) -> None:
        """Loads a plan, as :meth:`Communicator.load_plan`, for arrays of these dtypes, or of all. All ranks call it together. It raises
        what that raises."""

    def add_built_in(self, op: Op | None = None) -> None:
        """Adds this library's own all-reduce, all-gather, reduce-scatter and all-to-all. They reduce by ``op``, sum, min or max, the dtypes
        float32, float16 and bfloat16. All ranks call it together. Raises ``ValueError`` for another ``op``, ``NotImplementedError`` on the
        host."""

    def tune(self, sizes: tuple[int, int], dtype: DTypeName, *, collective: str | None = None) -> None:
        """Measures what does a collective, by default each one that plans were added for, with messages of ``sizes[0]`` bytes to
        ``sizes[1]``, each twice the one before, in graphs; a time is that of the slowest rank. From then on a call takes the fastest one. The
        times are kept in the cache file of ``antiphon tune``, where a collection of the same plans between such GPUs finds them. It takes
        seconds, and two arrays of the largest size. All ranks call it together, with nothing under way.

        Raises ``ValueError`` if nothing does the collective, ``RuntimeError`` for a size that nothing serves and for a file that cannot be
        written, ``NotImplementedError`` on the host."""

    def prepare(self, collective: str, dtype: DTypeName, num_bytes: int) -> None:
        """Makes what does a call ready, as :meth:`Plan.prepare`; the first time for a collective and a dtype it looks for times in the
        cache file, too. It is necessary before a graph is captured. All ranks call it together.

        Raises ``ValueError`` with what each plan says if none serves the call; what :meth:`Plan.prepare` raises."""

    @overload
    def execute(self, collective: str, x: _A, out: None = None, *, stream: int | None = None) -> _A: ...
    @overload
    def execute(self, collective: str, x: _Array, out: _O, *, stream: int | None = None) -> _O:
        """Does a collective on ``x``, by what is the fastest or the first, and returns the output: ``out`` if given, which may be ``x``,
        else a new array. A call of a dtype and size that was not prepared prepares it, unless the stream is being captured. All ranks call it
        together, with arrays of the same size and dtype. Streams and failures are those of :meth:`Plan.execute`.

        Raises ``ValueError`` with what each plan says if none serves the call, for arrays on another device than the collection, and for
        an unknown collective; what :meth:`Plan.execute` raises."""

    def explain(self, collective: str, num_bytes: int, dtype: DTypeName) -> list[tuple[str, float | None, str | None]]:
        """For each plan, and for the built-in calls, in their order: the name, the time in microseconds, where it was measured at about this
        size, and why it does not do the call; ``None`` for the one that does. ``num_bytes`` are those of the output of an all-gather, else
        of the input."""

    def close(self) -> None:
        """Frees the plans' memory. All ranks call it together, when no graph with calls of the plans is launched any more."""

@final
class SymmetricBuffer:
    """Symmetric memory, which :meth:`Communicator.symmetric` makes: a copy of one size on every rank, on the host or on the ranks'
    GPUs. Ranks order their accesses themselves, by barriers or collectives."""

    def __len__(self) -> int:
        """The size of each copy in bytes."""

    @property
    def device(self) -> int | None:
        """The number of this rank's GPU; ``None`` for a buffer on the host."""

    def pointer(self, rank: int) -> int:
        """The address, in this process or for this rank's GPU, of a rank's copy."""

    def memory(self, dtype: DTypeName, shape: Sequence[int] | None = None, rank: int | None = None) -> Memory:
        """The start of a rank's copy (by default this rank's) as a tensor of this dtype (``"float32"``,
        ``"bfloat16"``, ...) and shape (one dimension that takes all, unless given). ``ValueError`` for a buffer on GPUs."""

@final
class Memory:
    """A part of a :class:`SymmetricBuffer` on the host, for ``numpy.from_dlpack``, ``torch.from_dlpack`` and the like, without a copy.
    It stays mapped as long as any object uses it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Moe:
    """Dispatch and combine of a communicator: what :mod:`antiphon.moe` is made of, which makes the arrays that these methods
    fill.

    All ranks make it together. ``region_bytes`` (8 MiB) is the symmetric host memory of each rank through which rows travel, at
    least two rows with what travels beside them; the first call on CUDA arrays takes 272 MiB of each rank's GPU. Methods but
    :meth:`layout` are collective, and wait; what they wait for is as for the collectives of :class:`Communicator`. Calls on CUDA
    arrays go into the current stream of their library, and only :meth:`notify` without a capacity waits, for the counts of all
    ranks. With ``side``, the number of another stream and a bool, they go into that stream, behind the work of the current one, which
    waits for their end if the bool is true. Arrays that are written overlap no others.
    """

    MAX_LOCAL_EXPERTS: int
    """How many experts a rank has at most."""
    NUM_SMS: int
    """What :attr:`num_sms` begins as."""

    def __new__(cls, comm: Communicator, region_bytes: int | None = None) -> Self: ...
    @property
    def region_bytes(self) -> int: ...
    @property
    def num_sms(self) -> int:
        """How many multiprocessors a call on CUDA arrays uses, at most (24). 0 leaves it to the call, which takes the fewest that cost little
        time for its size, as :meth:`tune` has found, or else as suits H200s."""

    @num_sms.setter
    def num_sms(self, num_sms: int) -> None: ...
    def tune(self, device: int, hidden: int, smallest: int, largest: int) -> None:
        """Measures how many multiprocessors dispatches and combines by token need, for tokens of ``hidden`` bf16 of which each rank has a
        number from ``smallest`` to ``largest``, and keeps that in the cache for all later communicators of as many ranks on such GPUs. It
        takes some seconds. All ranks call it together, with nothing under way on the device."""
    @property
    def closed(self) -> bool: ...
    def check(self) -> None:
        """Raises what has gone wrong in calls on CUDA arrays that are over by now."""

    def give_up(self, reason: str) -> None:
        """Ends the communicator: for a rank that cannot go on between two steps of a call. All later calls of this rank raise
        ``RuntimeError`` with the reason, and calls of the other ranks raise an error that names this rank, within milliseconds."""

    @staticmethod
    def route_words(world_size: int, num_experts: int, num_tokens: int) -> list[tuple[str, int, int]]:
        """The parts of what :meth:`notify` writes to ``words``, 32-bit integers: name, begin and end of each, and of all."""

    @staticmethod
    def host_words(world_size: int, num_experts: int, num_tokens: int, rows: int) -> int:
        """How many 32-bit integers :attr:`MoeByTokenRoutes.words` are."""

    def routes_of(
        self, words: _Array, num_experts: int, *, num_tokens: int = 0, top_k: int = 0, sources: _Array | None = None
    ) -> MoeByTokenRoutes:
        """The routes of which these are the words: :attr:`MoeByTokenRoutes.words` on the host; on a GPU what :meth:`notify` and a
        dispatch have left in ``words`` and ``sources``, which nobody may have written since. Raises ``ValueError`` for words on the
        host that are of no routes."""

    def close(self) -> None:
        """Gives the regions back; all ranks call it. Dropping it communicates nothing: the memory then goes with the
        communicator."""

    def layout(
        self,
        ids: _Array,
        layout: tuple[_Array, _Array, _Array],
        *,
        side: tuple[int, bool] | None = None,
        num_sms: int | None = None,
    ) -> None:
        """Writes what the choices ``ids`` (int64 or int32 ``[T, K]``) come to: how many tokens go to each rank (int32 ``[R]``), how
        often each of the ``E`` experts was chosen (int32 ``[E]``), which tokens go to which ranks (8 bits, ``[T, R]``).

        Raises ``ValueError`` with the numbers for experts that cannot be divided among the ranks and for shapes, ``TypeError``
        for dtypes.
        """

    def notify(
        self,
        tokens: tuple[_Array, _Array | None, _Array | None, _Array | None],
        layout: tuple[_Array, _Array, _Array],
        *,
        counts: bool = False,
        capacity: int | None = None,
        words: _Array | None = None,
        sources: _Array | None = None,
        received: tuple[_Array, _Array | None, _Array | None, _Array | None] | None = None,
        side: tuple[int, bool] | None = None,
        num_sms: int | None = None,
    ) -> tuple[MoeByTokenRoutes, bool, int, int | None, list[int] | None]:
        """Tells all ranks how many rows each rank sends to each other rank: those of a layout, which is written first, as by
        :meth:`layout`, if ``counts``. ``tokens``, rows with their scales, ids and weights, say what rows will be, and ``capacity`` how
        many rows there is room for.

        The routes write their :meth:`route_words` to an int32 array. ``received`` are arrays for a :meth:`dispatch` of the tokens that
        follows at once, and ``sources`` is that of their sources. With a capacity they have as many rows. Without one, on a GPU, they have
        as many as may come: the first ones are written if the rows that come fill three quarters of them. Else nothing is moved, and the
        caller dispatches. On a GPU words and sources live as long as the routes, and as graphs that have calls along them.

        Returns the routes, whether the rows were moved, how many rows received arrays have, how many rows arrive, and how often all
        ranks' tokens chose each of this rank's experts; the last two are ``None`` on a GPU with a capacity, where only the GPU knows."""

    def dispatch(
        self,
        routes: MoeByTokenRoutes,
        tokens: tuple[_Array, _Array | None, _Array | None, _Array | None],
        received: tuple[_Array, _Array | None, _Array | None, _Array | None],
        *,
        sources: _Array | None = None,
        side: tuple[int, bool] | None = None,
        num_sms: int | None = None,
    ) -> None:
        """Moves rows along routes, ``[T, H]`` to ``[N, H]``, and so their scales, ids and weights. The token of each row (−1 for one that
        did not arrive) is written to ``sources``, int32 ``[N]``, which on a GPU live as long as the routes."""

    def combine(
        self,
        routes: MoeByTokenRoutes,
        rows: _Array,
        output: _Array,
        *,
        weights: _Array | None = None,
        output_weights: _Array | None = None,
        bias: _Array | None = None,
        second_bias: _Array | None = None,
        side: tuple[int, bool] | None = None,
        num_sms: int | None = None,
    ) -> None:
        """Moves rows back along routes and sums those of each token: ``rows`` ``[routes.rows, H]`` to ``output`` ``[T, H]``;
        sums begin with the biases, ``[T, H]``."""

@final
class MoeByTokenRoutes:
    """The routes of a dispatch by token: which rank gets which rows from which; see :meth:`Moe.notify`."""

    @property
    def rows(self) -> int:
        """How many rows received arrays have: those that arrive, or the capacity."""

    @property
    def num_received(self) -> int | None:
        """How many rows arrive. ``None`` on a GPU with a capacity, where only the GPU knows."""

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank dispatches."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def words(self) -> bytes:
        """All that there is to routes on the host along which rows have been dispatched; see :meth:`Moe.routes_of`."""

@final
class MoeByExpert:
    """Dispatch by a routing map to rows by expert, and the combine of these: what :mod:`antiphon.moe` is made of, which makes the arrays that these methods fill.

    It shares the memory of a :class:`Moe`, and its rules: all ranks make the same calls in the same order.
    """

    def __new__(cls, moe: Moe) -> Self: ...
    @staticmethod
    def route_words(world_size: int, num_experts: int, num_tokens: int) -> list[tuple[str, int, int]]:
        """Of what routes keep on a GPU, in 32-bit integers, where each part begins and ends; at last ``all``."""

    def notify(
        self,
        x: _Array,
        routing_map: _Array,
        *,
        pad_multiple: int | None = None,
        scales: _Array | None = None,
        capacity: int | None = None,
        max_tokens: int | None = None,
        words: _Array | None = None,
    ) -> MoeByExpertRoutes:
        """Tells all ranks how many rows each rank sends to each other rank, as ``routing_map``, bool or uint8 ``[T, E]``, says. ``x``, ``[T, H]``,
        and ``scales`` say what rows of the first dispatch will be.

        With ``pad_multiple`` rows are ordered by expert, and those of each expert padded to a multiple of it; without one, by
        token. ``capacity`` sets the number of rows; ``max_tokens``, equal on all ranks, is then the most tokens of any rank.

        On a GPU the routes keep what :meth:`route_words` says in ``words``, int32, if they are given, which then live as long as
        the routes, and as graphs that have calls along them. Without a capacity the call waits for the counts, and cannot be captured."""

    def dispatch(
        self,
        routes: MoeByExpertRoutes,
        x: _Array,
        received_x: _Array,
        *,
        scales: _Array | None = None,
        received_scales: _Array | None = None,
        probs: _Array | None = None,
        received_probs: _Array | None = None,
    ) -> None:
        """Moves tokens along routes: ``received_x`` ``[P, H]`` by expert, ``[N, H]`` by token. ``scales`` go along as they are;
        of ``probs`` (float32 ``[T, E]``) come those of chosen experts: ``[P]``, or ``[N, L]`` with 0 elsewhere."""

    def combine(
        self,
        routes: MoeByExpertRoutes,
        rows: _Array,
        output: _Array,
        *,
        probs: _Array | None = None,
        output_probs: _Array | None = None,
    ) -> None:
        """Moves ``rows`` (``[P, H]`` or ``[N, H]``) back along routes, and sums those of each token: ``output``, ``[T, H]``.
        ``probs`` (``[P]`` or ``[N, L]``) come back in ``output_probs``, ``[T, E]``, with 0 where there are none."""

@final
class MoeByExpertRoutes:
    """The routes of a dispatch by expert: which rank gets which rows from which; see :meth:`MoeByExpert.notify`."""

    @property
    def rows(self) -> int:
        """How many rows received arrays have: ``P`` by expert, ``N`` by token."""

    @property
    def num_received(self) -> int | None:
        """``N``: how many tokens arrive. ``None`` on a GPU with a capacity, where only the GPU knows."""

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank dispatches."""

    @property
    def num_experts(self) -> int: ...
    @property
    def overflow(self) -> bool:
        """Whether rows were dropped because the capacity has no room for them. This, :attr:`received_as` and :attr:`places` are those
        of routes on the host; routes on a GPU have them there, and ``TypeError`` is raised."""

    @property
    def rows_needed(self) -> int:
        """How many rows by expert there would be without a capacity, with the padding. Routes on a GPU have the number there,
        and ``TypeError`` is raised."""

    @property
    def tokens_per_expert(self) -> list[int] | None:
        """How many tokens each of this rank's experts gets, those that are dropped not included. ``None`` on a GPU with a
        capacity."""

    @property
    def rows_per_expert(self) -> list[int] | None:
        """How many rows each of this rank's experts has, with the padding. ``None`` on a GPU with a capacity."""

    @property
    def received_as(self) -> bytes:
        """int32 ``[T, R]``: the number of a token among those that a rank receives, or -1."""

    @property
    def places(self) -> bytes | None:
        """int32 ``[N, L]``: the row of each received token for each expert, or -1. ``None`` before the first dispatch."""

    @property
    def num_places(self) -> int:
        """How many received tokens there is room for in the places: ``N``, or on a GPU with a capacity ``R`` times
        ``max_tokens``."""

    def keep_places_in(self, places: _Array) -> None:
        """From now on the places stand in this array on the GPU, int32 ``[num_places, L]``, which lives as long as the routes, and
        as graphs that have calls along them."""

@final
class MoeSlots:
    """Dispatch of few tokens to slots of experts, and the combine from these, on host memory or between GPUs: what
    :mod:`antiphon.moe` is made of, which makes the arrays that these methods fill.

    All ranks make it together, with equal numbers: the largest that calls may have. ``device`` is the number of this rank's
    GPU; without one, arrays are in host memory. Methods but :meth:`check` and :meth:`bytes` are collective. On host memory they
    wait; on a GPU they go into its current stream and wait for nothing, and :meth:`check` raises what has gone wrong.
    """

    def __new__(
        cls,
        comm: Communicator,
        *,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        device: int | None = None,
    ) -> Self: ...
    @staticmethod
    def bytes(world_size: int, *, max_tokens: int, hidden: int, num_experts: int, top_k: int) -> int:
        """The memory of each GPU that such calls take."""

    def check(self) -> None:
        """Raises what has gone wrong in calls on the GPU that are over by now."""

    def close(self) -> None:
        """Gives the memory back; all ranks call it. Dropping it communicates nothing."""

    def dispatch(
        self,
        x: _Array,
        ids: _Array,
        received_x: _Array,
        *,
        format: str,
        max_tokens: int,
        num_experts: int,
        counts: _Array,
        source_tokens: _Array,
        layout_range: _Array,
        received_scales: _Array | None = None,
        statistics: _Array | None = None,
        waits: _Array | None = None,
        start: bool = False,
    ) -> tuple[MoeSlotRoutes, Pending[None] | None]:
        """Moves the tokens ``x`` (bfloat16 ``[T, H]``) to the slots of the experts ``ids`` (``[T, K]``) that they choose:
        ``received_x`` ``[L, R * M, H]``, bfloat16 or 8 bits as ``format`` (``bf16``, ``fp8``, ``fp8_powers_of_two``,
        ``fp8_packed``) says, with ``received_scales``, float32 ``[L, H / 128, R * M]`` or int32 ``[L, H / 512, R * M]``.
        ``counts`` (int32 ``[L]``), ``source_tokens`` (int32 ``[L, R * M]``) and ``layout_range`` (int64 ``[L, R]``) say which
        slots are filled; ``counts`` is added to ``statistics``. To ``waits`` (int64 ``[R]``) the nanoseconds are added that
        this rank waited for each other rank.

        With ``start`` the call returns before it has received, with a :class:`Pending`: on host memory the operation goes on meanwhile, and
        waiting for that is waiting for its end. On a GPU the call only sends, and waiting for the :class:`Pending` puts the
        receiving kernel, whose deadline starts then, into the current stream; no other call may come before."""

    def combine(
        self,
        routes: MoeSlotRoutes,
        rows: _Array,
        ids: _Array,
        weights: _Array,
        output: _Array,
        *,
        format: str = "bf16",
        waits: _Array | None = None,
        start: bool = False,
    ) -> Pending[None] | None:
        """Moves ``rows`` (bfloat16 ``[L, R * M, H]``) back along routes, and sums those of each token with its ``weights``
        (float32 ``[T, K]``): ``output``, bfloat16 ``[T, H]``. Choices of ``ids`` that name no expert are left out. ``format``, equal on
        all ranks, is that in which rows are sent: ``"bf16"``, or ``"logfmt"``, which loses digits. ``waits`` and ``start`` are as for
        :meth:`dispatch`."""

@final
class MoeSlotRoutes:
    """The routes of a dispatch to slots: which rank has which rows from which; see :meth:`MoeSlots.dispatch`."""

    @property
    def num_tokens(self) -> int | None:
        """How many tokens this rank dispatched; ``None`` before a started dispatch on host memory is over."""

@disjoint_base
class Mapping:
    """Which groups a rank belongs to, from the sizes of tensor, context, pipeline and expert parallelism.

    Tensor ranks are neighbours, then come context ranks, then pipeline stages:
    ``rank = tp_rank + tp_size * (cp_rank + cp_size * pp_rank)``. Experts cut the tensor ranks once more:
    ``tp_rank = moe_ep_rank + moe_ep_size * (moe_cluster_rank + moe_cluster_size * moe_tp_rank)``.

        mapping = Mapping(world_size=8, rank=5, tp_size=4, pp_size=2)
        mapping.tp_group                 # [4, 5, 6, 7]
        mapping.pp_layers(61)            # the second half, 31 to 60

    A size of -1 follows from the others: ``moe_cluster_size`` is 1; ``moe_tp_size`` takes the tensor ranks that
    clusters and ``moe_ep_size`` (1) leave; ``attn_tp_size`` is ``tp_size * cp_size`` and ``attn_cp_size`` 1.

    Raises ``ValueError`` with the numbers if the sizes do not multiply to ``world_size`` (those of experts to
    ``tp_size``), if ``rank`` is not in the world, if ``attn_cp_size`` is not 1, and if ``auto_parallel`` comes with
    sizes; ``NotImplementedError`` for experts under context parallelism, ``AssertionError`` for experts with clusters.

    Mappings are equal if the twelve values of :meth:`to_dict` are. Source: FlashInfer 0.6.18 comm/mapping.py. Other
    than there a rank outside the world is always refused; expert groups cover the ranks of every context rank; experts
    must divide evenly; and under ``auto_parallel`` each rank is alone in its groups, as no layout is chosen yet.
    """

    cp_config: Any
    """As it was given."""

    def __new__(
        cls,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: Any = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> Self: ...
    @property
    def rank(self) -> int:
        """This rank. Setting it gives the view of another; ``ValueError`` if the world has no such rank."""

    @rank.setter
    def rank(self, rank: int) -> None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def moe_tp_size(self) -> int: ...
    @property
    def moe_cluster_size(self) -> int: ...
    @property
    def moe_ep_size(self) -> int: ...
    @property
    def attn_tp_size(self) -> int: ...
    @property
    def attn_cp_size(self) -> int: ...
    @property
    def auto_parallel(self) -> bool: ...
    @property
    def enable_attention_dp(self) -> bool:
        """For layers to read: nothing here depends on it."""

    @property
    def tp_rank(self) -> int: ...
    @property
    def cp_rank(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def moe_tp_rank(self) -> int: ...
    @property
    def moe_cluster_rank(self) -> int: ...
    @property
    def moe_ep_rank(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def tp_group(self) -> list[int]: ...
    @property
    def cp_group(self) -> list[int]: ...
    @property
    def pp_group(self) -> list[int]: ...
    @property
    def moe_tp_group(self) -> list[int]: ...
    @property
    def moe_cluster_group(self) -> list[int]: ...
    @property
    def moe_ep_group(self) -> list[int]: ...
    @property
    def tp_groups(self) -> list[list[int]]: ...
    @property
    def cp_groups(self) -> list[list[int]]: ...
    @property
    def pp_groups(self) -> list[list[int]]: ...
    @property
    def moe_tp_groups(self) -> list[list[int]]: ...
    @property
    def moe_cluster_groups(self) -> list[list[int]]: ...
    @property
    def moe_ep_groups(self) -> list[list[int]]: ...
    def has_tp(self) -> bool: ...
    def has_cp(self) -> bool: ...
    def has_pp(self) -> bool: ...
    def has_moe_tp(self) -> bool: ...
    def has_moe_cluster(self) -> bool: ...
    def has_moe_ep(self) -> bool: ...
    def is_multi_node(self) -> bool:
        """Whether the world has more ranks than a node."""

    def get_node_rank(self, rank: int) -> int: ...
    def get_local_rank(self, rank: int) -> int: ...
    def is_first_pp_rank(self) -> bool: ...
    def is_last_pp_rank(self) -> bool: ...
    def is_second_last_pp_rank(self) -> bool: ...
    def prev_pp_rank(self) -> int:
        """The rank with this one's place in the previous stage; before the first comes the last."""

    def next_pp_rank(self) -> int:
        """The rank with this one's place in the next stage; after the last comes the first."""

    def pp_layers(self, num_layers: int) -> list[int]:
        """The layers of this rank's stage. The first stages take one more each if they do not divide evenly."""

    def ep_experts(self, num_experts: int) -> list[int]:
        """The experts that this rank holds, as many as any other. ``ValueError`` if they do not divide evenly,
        ``AssertionError`` under context parallelism."""

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Self:
        """A mapping of these keywords of the constructor."""

    def to_dict(self) -> dict[str, Any]:
        """All but ``cp_config`` and ``enable_attention_dp``, as keywords of the constructor."""

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@disjoint_base
class ParallelInfo:
    """Which ranks share tensors and which share the work, inside nodes and between them: what
    :class:`antiphon.comm.ParallelInfo` is made from. ``ValueError`` with names and numbers if sizes or ranks do not fit."""

    def __new__(
        cls,
        world_rank: int,
        world_size: int,
        local_rank: int,
        local_size: int,
        inter_rank: int,
        inter_size: int,
        local_tp_size: int | None,
        local_dp_size: int | None,
        inter_tp_size: int | None,
        inter_dp_size: int | None,
    ) -> Self: ...
    @property
    def world_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def inter_rank(self) -> int: ...
    @property
    def inter_size(self) -> int: ...
    @property
    def local_tp_rank(self) -> int: ...
    @property
    def local_tp_size(self) -> int: ...
    @property
    def local_dp_rank(self) -> int: ...
    @property
    def local_dp_size(self) -> int: ...
    @property
    def inter_tp_rank(self) -> int: ...
    @property
    def inter_tp_size(self) -> int: ...
    @property
    def inter_dp_rank(self) -> int: ...
    @property
    def inter_dp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def use_local_tp(self) -> bool: ...
    @property
    def use_inter_tp(self) -> bool: ...
    @property
    def use_tp(self) -> bool: ...
    @property
    def use_dp(self) -> bool: ...
    @property
    def use_inter(self) -> bool: ...
    @property
    def use_mixed(self) -> bool: ...
    def valid_ops(self) -> list[int]:
        """The operations that make sense, as numbers of :class:`antiphon.comm.MixedCommOp`."""

    def tp_ranks(self) -> list[list[int]]:
        """The world ranks of every tensor parallel group."""

    def dp_ranks(self) -> list[list[int]]:
        """The world ranks of every data parallel group."""

    def local_ranks(self) -> list[list[int]]:
        """The world ranks of every node."""

@final
class MixedHandler:
    """The mixed collectives of a layout, on a communicator of all its ranks, which make one together.

    It serves tensors on the host, and on the GPU of number ``device``, whose kernels for ``dtype`` are loaded. A fused operation
    has ``most_blocks`` there at most. With a ``device`` and several nodes, ranks reach each other by NVSHMEM, which is initialised unless
    this process has done so; with ``join_nvshmem`` the program must have. Each rank is a process then.

    ``ValueError`` for a layout of another rank, world or nodes than the communicator's, for one of more than 32 nodes or 64 groups on
    several nodes with a ``device``, and on all ranks where their layouts differ. ``RuntimeError`` that begins with "Failed to initialize
    nvshmem" on all ranks, if one cannot use it."""

    def __new__(
        cls,
        comm: Communicator,
        layout: ParallelInfo,
        device: int | None = None,
        dtype: str = "bfloat16",
        most_blocks: int | None = None,
        *,
        join_nvshmem: bool = False,
    ) -> Self: ...

    def valid_modes(self) -> list[str]:
        """Of ``waits``, ``bytes1``, ``bytes2`` and ``composed``, those that make sense."""

    def select(self, op: int, num_bytes: int) -> str:
        """The mode of a call that names no mode, for blocks of ``num_bytes`` bytes. All ranks call it together."""

    def tune(self, smallest: int, largest: int) -> None:
        """Measures the modes of equal bits for blocks of these bytes, and keeps the tables. All ranks call it together.
        ``NotImplementedError`` for GPUs on several nodes, as for the two below."""

    def release_memory(self) -> None:
        """Gives the communicator's memory for staging back to the GPUs of all ranks, and keeps its addresses: until
        :meth:`restore_memory`, its CUDA calls are refused, and graphs that hold calls may not be launched. All ranks call it together,
        with nothing under way; a second time it changes nothing. On the host the ranks only meet.

        ``RuntimeError`` or ``ValueError`` on all ranks, if one fails."""

    def restore_memory(self, problem: str | None = None) -> None:
        """Undoes :meth:`release_memory`: calls go on, and so do graphs that were captured before. All ranks call it together.

        ``RuntimeError`` or ``ValueError`` on all ranks, if one fails, as for a GPU with too little memory left; it can be called again
        then. A rank that gives a ``problem`` fails with that text, and restores nothing."""

    def close(self) -> None:
        """Gives back what the handler has for itself: memory of NVSHMEM for GPUs on several nodes, otherwise nothing. All ranks call it
        together, with nothing under way; calls of such GPUs are refused after it."""

    def run(
        self,
        op: int,
        x: Any,
        out: Any = None,
        *,
        mode: str | None = None,
        rows: Sequence[int] | None = None,
        stream: int | None = None,
        strict: bool = False,
    ) -> Any:
        """Runs the operation of this number on an array, and returns ``out``, which is made unless given. ``rows`` are those of
        each data parallel rank, where they differ. ``ValueError`` for what the layout has no use for; if ``strict`` also for
        arrays of another dtype or device than the handler's, of one dimension, and of shapes that do not go together."""

def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """The bytes of an FP4 matrix's scales in layout ``SWIZZLED_128x4``: rows rounded up to a multiple of 128 times
    columns of *scales* (a row's elements / 16) rounded up to one of 4. ``ValueError`` for a number below 0, or more
    than can be addressed. Source: FlashInfer 0.6.18 comm/trtllm_ar.py."""

def strided_memory(
    ptr: int,
    segment_size: int,
    segment_stride: int,
    num_segments: int,
    dtype: str,
    device: int | None = None,
) -> CapsuleType:
    """A DLPack capsule of what :func:`antiphon.comm.pack_strided_memory` returns, on a CUDA device or else the host.
    It neither checks that there is memory at ``ptr``, nor keeps it alive."""

@final
class Chunk:
    """Chunks ``index`` to ``index + size`` of a buffer of a rank. Equal by its fields, and hashable."""

    def __new__(cls, rank: int, buffer: BufferType, index: int, size: int) -> Self: ...
    @property
    def rank(self) -> int:
        """The rank that owns the buffer."""

    @property
    def buffer(self) -> BufferType:
        """Which buffer."""

    @property
    def index(self) -> int:
        """The first chunk."""

    @property
    def size(self) -> int:
        """The number of chunks."""

    def to_dict(self) -> dict[str, int | str]:
        """``rank``, ``type``, ``index`` and ``size``, as in the plan."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@disjoint_base
class BaseBuffer:
    """A buffer of a rank: ``size`` chunks from ``offset`` on."""

    def __new__(cls, rank: int, buffer_type: BufferType, offset: int, size: int) -> Self: ...
    @property
    def rank(self) -> int:
        """The rank that owns it."""

    @property
    def buffer_type(self) -> BufferType:
        """Which."""

    @property
    def offset(self) -> int:
        """The first chunk."""

    @property
    def size(self) -> int:
        """Where it ends: ``offset`` and the number of chunks together, as in MSCCL++ 0.9.0."""

    def __getitem__(self, key: slice, /) -> Chunk:
        """Some chunks, counted from the buffer's start: ``buffer[first:behind_last]``.

        ``TypeError`` for what is no slice, ``ValueError`` for steps, negative numbers and an end before the start,
        ``RuntimeError`` for chunks beyond the end."""

@disjoint_base
class ThreadBlockGroup:
    """Thread blocks that do operations together, each its share of the bytes. ``ValueError`` if one is in it twice."""

    def __new__(cls, tb_list: Sequence[int]) -> Self: ...
    @property
    def tb_list(self) -> list[int]:
        """The thread blocks."""

    def get_internal_id(self, tb: int) -> int:
        """The place of a thread block in the group; ``ValueError`` if it is not in it."""

    def numtb(self) -> int:
        """How many there are."""

@final
class Channel:
    """A memory or port channel of a program. Each operation is recorded with the line of the program that makes it."""

    @property
    def dst(self) -> int:
        """The rank at the other end."""

    @property
    def src(self) -> int:
        """The rank that makes the operations."""

    @property
    def id(self) -> int:
        """Its number among the rank's channels of its type."""

    def notify(
        self,
        program: Program,
        kind: Literal["signal", "wait", "flush"],
        tb: int,
        data_sync: SyncType,
        relaxed: bool,
        frame: FrameType,
    ) -> None:
        """An operation without data."""

    def put(
        self,
        program: Program,
        kind: str,
        dst: Chunk,
        src: Chunk,
        tb: int | None,
        tb_group: ThreadBlockGroup | None,
        frame: FrameType,
    ) -> None:
        """An operation of a chunk at each end; ``kind`` is its name in ``antiphon.language``."""

    def reduce(
        self,
        program: Program,
        local_src: Chunk,
        remote_src: Sequence[Chunk],
        tb: int | None,
        tb_group: ThreadBlockGroup | None,
        local_dst: Chunk | None,
        reduce_op: ReduceOperationType,
        frame: FrameType,
    ) -> None:
        """A reduction of chunks of both ends."""

@final
class Switch:
    """A switch channel of a program."""

    @property
    def ranks(self) -> list[int]:
        """Its members."""

    @property
    def ids(self) -> dict[int, int]:
        """Its number among the switch channels of each member."""

    def member(self, program: Program, rank: int) -> int:
        """The rank, counted from the start; ``RuntimeError`` if it is no member."""

    def reduce(
        self,
        program: Program,
        rank: int,
        buffer_offset: int,
        size: int,
        dst: Chunk,
        tb: int,
        reduce_op: ReduceOperationType,
        frame: FrameType,
    ) -> None:
        """A reduction by the switch."""

    def broadcast(
        self,
        program: Program,
        packets: bool,
        rank: int,
        src: Chunk,
        buffer_offset: int,
        size: int,
        tb: int,
        frame: FrameType,
    ) -> None:
        """A broadcast by the switch."""

@final
class Program:
    """A program of ``antiphon.language`` as its operations come in. ``buffers`` has the chunks of each rank's input and
    output. Ranks may count from the end."""

    def __new__(cls, buffers: Sequence[tuple[int, int]]) -> Self: ...
    @property
    def num_ranks(self) -> int:
        """How many ranks it is for."""

    def num_chunks(self, rank: int) -> tuple[int, int, int]:
        """A rank's chunks of input, output and, so far, scratch."""

    def rank(self, rank: int) -> int:
        """The rank, counted from the start; ``AttributeError`` if there is none."""

    def scratch(self, rank: int, size: int) -> int:
        """Sets scratch aside, and returns its first chunk. A negative size sets none aside."""

    def memory_channel(self, dst: int, src: int) -> Channel:
        """A new channel."""

    def port_channel(self, dst: int, src: int) -> Channel:
        """A new channel."""

    def switch_channel(self, ranks: Sequence[int], buffer: BufferType) -> Switch:
        """A new channel."""

    def semaphore(self, rank: int, initial_value: int) -> tuple[int, int]:
        """A new semaphore: its rank and its number."""

    def semaphore_op(
        self, acquire: bool, semaphore: tuple[int, int], tb: int, data_sync: SyncType, frame: FrameType
    ) -> None:
        """Acquires or releases it."""

    def copy(
        self,
        kind: str,
        rank: int,
        dst: Chunk,
        src: Chunk,
        tb: int | None,
        tb_group: ThreadBlockGroup | None,
        frame: FrameType,
    ) -> None:
        """An operation of two chunks of one rank; ``kind`` is its name in ``antiphon.language``."""

    def reduce(
        self,
        rank: int,
        src: Chunk,
        others: Sequence[Chunk],
        tb: int | None,
        tb_group: ThreadBlockGroup | None,
        dst: Chunk | None,
        reduce_op: ReduceOperationType,
        packet: bool,
        frame: FrameType,
    ) -> None:
        """A reduction of chunks of one rank."""

    def barrier(self, rank: int, tb_list: Sequence[int], frame: FrameType) -> None:
        """A barrier of thread blocks of one rank."""

    def begin_pipeline(self, unit: int, num_chunks: int, frame: FrameType) -> None:
        """What follows is a loop's."""

    def end_pipeline(self) -> None:
        """The loop ends."""

    def check_pairing(self) -> None:
        """``RuntimeError`` if signals and waits do not match."""

    def finish(
        self,
        *,
        name: str | None,
        collective: str,
        protocol: str,
        inplace: bool,
        instances: int,
        instr_fusion: bool,
        auto_sync: bool,
        replication_policy: ReplicationPolicy,
        reuse_resources: bool,
        num_threads_per_block: int,
        use_double_scratch_buffer: bool,
        buffer_alignment: int,
        min_message_size: int,
        max_message_size: int,
    ) -> FinishedPlan:
        """The finished plan. That signals have their waits is not checked."""

@final
class FinishedPlan:
    """A plan that a program became, with the lines that asked for its operations."""

    def to_json(self) -> str:
        """Its text."""

    def verify(self) -> tuple[str, str]:
        """What the verifier says of it: for people, and as JSON."""

    def lines(self, rank: int, threadblock: int) -> list[tuple[str, int] | None]:
        """Of each operation of a thread block, the file and line that asked for it."""

def library_names() -> list[str]:
    """The algorithms of ``antiphon.language.library``."""

def library_plan(
    name: str,
    ranks: int,
    *,
    nodes: int,
    inplace: bool,
    reduce_op: ReduceOperationType,
    unit_size: int,
    instances: int,
    reuse_resources: bool,
    num_threads_per_block: int,
    buffer_alignment: int,
    min_message_size: int,
    max_message_size: int,
) -> str:
    """The plan's text; see ``antiphon.language.library.build``."""

@final
class Lowering:
    """A graph of torch, which ``antiphon.lowering`` exported, and what becomes of it. The request is JSON with a ``world`` and
    ``options``. Raises ``ValueError`` for what is neither a graph nor a request."""

    def __new__(cls, program: bytes, request: str) -> Self: ...
    def answer(self) -> bytes:
        """What became of the graph, as JSON: ``edits``, ``plan``, ``report``, its ``text``, and ``digests``: for each group what
        its ranks compare."""

    def check(self, after: bytes) -> list[str]:
        """Why another graph of torch is not shown to compute what this one does, under its plan; empty if it is. Raises
        ``ValueError`` for what is no graph."""

    def second_opinion(self, after: bytes) -> tuple[bool, str]:
        """Whether another graph of torch gives what this one does, on small integers and on fractions, as far as the numerics go,
        and a text that says so, or names the output that differs. Symbolic sizes are small; graphs that compute more than 2²⁰ elements
        are not run, which the text says. Raises ``ValueError`` for what is no graph."""

def spelled(operator: str, meaning: str, roles: dict[str, int]) -> str:
    """A spelling for :class:`Lowering`'s programs: an operator, and its meaning with the places of its arguments. ``ValueError`` names what
    is unknown, and what is known."""

