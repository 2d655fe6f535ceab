"""Plans from which each call takes one: `python -m antiphon run -n 2 python examples/python/plan_collection.py`.

Between GPUs, one for each rank, the plans and this library's own all-reduce are measured, and the fastest at a call's size does it. Where
there is no GPU for each rank the first plan that serves the size does.
"""

import os
import sys

import antiphon
import torch
from antiphon.language import library

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

with antiphon.init() as comm:
    if comm.world_size == 1:
        print("1 rank: the library's plans are for 2 or more")
        sys.exit()
    small, large = comm.world_size << 10, comm.world_size << 18  # bytes, a block for each rank
    on_gpus = torch.cuda.device_count() >= comm.world_size
    device = torch.device("cuda", comm.rank) if on_gpus else torch.device("cpu")
    plans = antiphon.PlanCollection(comm, device=device)
    if on_gpus:
        torch.cuda.set_device(device)
        plans.add_built_in()
    plans.add(library.build("packet-all-reduce", comm.world_size, max_message_size=small))
    plans.add(library.build("push-two-shot-all-reduce", comm.world_size))
    if on_gpus:
        plans.tune((small, large), torch.float32)
    chosen = []
    for num_bytes in (small, large):
        x = torch.full((num_bytes // 4,), 1.0 + comm.rank, device=device)
        total = plans.execute("allreduce", x)
        assert total.eq(comm.world_size * (comm.world_size + 1) / 2).all()
        explained = plans.explain("allreduce", num_bytes, torch.float32)
        chosen += [name for name, _, why_not in explained if why_not is None]
    plans.close()
    if comm.rank == 0:
        how = "the fastest" if on_gpus else "the first that serves them"
        print(f"{comm.world_size} ranks on {device.type}, small and large messages by {how}: {', '.join(chosen)}")
