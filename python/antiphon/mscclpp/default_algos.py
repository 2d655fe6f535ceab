"""``mscclpp.default_algos``: algorithms for several machines, on which plans do not run here."""

from antiphon.mscclpp._absent import Absent

__all__ = ["allgather_multi_nodes", "allreduce_multi_nodes", "reducescatter_multi_nodes"]

_INSTEAD = "antiphon.language.library has hierarchical algorithms, and plans execute on one machine"
allgather_multi_nodes = Absent("mscclpp.default_algos.allgather_multi_nodes", _INSTEAD)
allreduce_multi_nodes = Absent("mscclpp.default_algos.allreduce_multi_nodes", _INSTEAD)
reducescatter_multi_nodes = Absent("mscclpp.default_algos.reducescatter_multi_nodes", _INSTEAD)
