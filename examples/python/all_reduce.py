"""A sum over ranks: `python -m antiphon run -n 2 python examples/python/all_reduce.py`."""

import os

import antiphon
import numpy as np

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

with antiphon.init() as comm:
    mine = np.full(4, comm.rank + 1.0, dtype=np.float32)
    total = comm.all_reduce(mine)
    if comm.rank == 0:
        print(f"the sum over {comm.world_size} ranks of {mine}, ... is {total}")
    assert (total == sum(range(1, comm.world_size + 1))).all()
