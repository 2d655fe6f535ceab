"""The usual algorithms, as ready plans.

    from antiphon.language import library

    plan = library.build("ring-all-reduce", 4, inplace=True)
    print(library.names())

They are those of ``antiphon plan build --library``. The pages of the crate ``antiphon_language::library`` describe the steps of
each algorithm, and when it is the right choice.
"""

from antiphon import _core
from antiphon.language.internal.types import ReduceOperationType

__all__ = ["build", "names"]


def names() -> list[str]:
    """The algorithms, by collective."""
    return _core.library_names()


def build(
    name: str,
    ranks: int,
    *,
    nodes: int = 2,
    inplace: bool = False,
    reduce_op: ReduceOperationType = ReduceOperationType.sum,
    unit_size: int = 2**18,
    instances: int = 1,
    reuse_resources: bool = False,
    num_threads_per_block: int = 1024,
    buffer_alignment: int = 16,
    min_message_size: int = 0,
    max_message_size: int = 2**64 - 1,
) -> str:
    """The plan of an algorithm for a number of ranks, as text (JSON).

    Hierarchical algorithms divide the ranks evenly into ``nodes`` nodes, numbered node by node. In place,
    input and output share memory. Reductions reduce by ``reduce_op``. A pipeline's turn has ``unit_size`` bytes. The rest
    is as for :class:`~antiphon.language.CollectiveProgram`.

    ``ValueError`` for a name that is not among :func:`names`, and for what the algorithm is not for: fewer than two ranks,
    in place where it cannot, ranks that the nodes do not divide, turns of no bytes, or too many ranks or instances; and for numbers below 0.
    """
    counts = {"ranks": ranks, "nodes": nodes, "instances": instances}
    sizes = {
        "unit_size": unit_size,
        "num_threads_per_block": num_threads_per_block,
        "buffer_alignment": buffer_alignment,
        "min_message_size": min_message_size,
        "max_message_size": max_message_size,
    }
    for numbers, bits in (counts, 32), (sizes, 64):
        for argument, number in numbers.items():
            if not 0 <= number < 2**bits:
                raise ValueError(f"{argument} must be from 0 to 2**{bits} - 1, but it is {number}")
    return _core.library_plan(name, inplace=inplace, reduce_op=reduce_op, reuse_resources=reuse_resources, **counts, **sizes)
