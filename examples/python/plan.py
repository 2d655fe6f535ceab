"""An algorithm of one's own between GPUs: `python -m antiphon run -n 2 python examples/python/plan.py`.

It is written as a program, proved when it is loaded, and replayed in a CUDA graph. Where there is no GPU for each rank the same
plan runs on the CPU, call by call.
"""

import os

import antiphon
import torch
from antiphon.language import *

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

COUNT, CALLS = 1024, 20


def all_gather(size: int) -> CollectiveProgram:
    """Each rank stores its input into every rank's output, and signals that it has."""
    with CollectiveProgram("all_gather", AllGather(size, 1, False), size) as program:
        pairs = [(own, peer) for own in range(size) for peer in range(size) if own != peer]
        channel = {(own, peer): MemoryChannel(peer, own) for own, peer in pairs}
        for own in range(size):
            mine, output = Rank(own).get_input_buffer()[0:1], Rank(own).get_output_buffer()
            Rank(own).copy(output[own : own + 1], mine, tb=0)
        for own, peer in pairs:
            mine, theirs = Rank(own).get_input_buffer()[0:1], Rank(peer).get_output_buffer()
            channel[own, peer].put(theirs[own : own + 1], mine, tb=0)
        for own, peer in pairs:
            channel[own, peer].signal(tb=0, data_sync=SyncType.before)
        for own, peer in pairs:
            channel[own, peer].wait(tb=0, data_sync=SyncType.after)
    return program


with antiphon.init() as comm:
    on_gpus = torch.cuda.device_count() >= comm.world_size
    device = torch.device("cuda", comm.rank) if on_gpus else torch.device("cpu")
    plan = comm.load_plan(all_gather(comm.world_size), device=device)
    x = torch.zeros(COUNT, device=device)
    gathered = torch.zeros(comm.world_size * COUNT, device=device)
    if on_gpus:
        torch.cuda.set_device(device)
        plan.prepare(gathered.dtype, gathered.nbytes)  # what must not happen during the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.execute(x, gathered)
    for call in range(CALLS):
        x.fill_(100 * call + comm.rank)
        graph.replay() if on_gpus else plan.execute(x, gathered)
        expected = [100.0 * call + rank for rank in range(comm.world_size)]
        assert gathered.view(-1, COUNT).tolist() == [[value] * COUNT for value in expected]
    comm.check()  # a graph's kernels have nobody to tell what went wrong
    if comm.rank == 0:
        how = "replayed as a graph" if on_gpus else "one by one"
        print(f"{comm.world_size} ranks, {CALLS} calls {how} on {device.type}: as the program says")
