"""``mscclpp.ext``: nothing of it is here, so that what is used of it says so."""

from antiphon.mscclpp._absent import Absent

__all__ = ["AlgorithmCollectionBuilder"]

AlgorithmCollectionBuilder = Absent(
    "mscclpp.ext.AlgorithmCollectionBuilder",
    "keep the Algorithms that mscclpp.compile makes in a list, and execute the one that you choose; the algorithms that a library chooses itself "
    "are antiphon.Communicator.all_reduce, all_gather and the others",
)
