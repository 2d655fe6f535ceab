"""A tensor-parallel layer in a CUDA graph: `python -m antiphon run -n 2 python examples/python/cuda_graph.py`.

The all-reduce is captured with the rest of the layer, as serving engines do for each token. Where there is no GPU for each
rank the same program runs on the CPU, step by step.
"""

import os

import antiphon
import torch

if "RANK" not in os.environ:
    raise SystemExit(f"this runs on several ranks: python -m antiphon run -n 2 python {__file__}")

HIDDEN, STEPS = 256, 20

with antiphon.init() as comm, torch.no_grad():
    on_gpus = torch.cuda.device_count() >= comm.world_size
    device = torch.device("cuda", comm.rank) if on_gpus else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on all ranks
    weight = (torch.randn(HIDDEN, HIDDEN, dtype=torch.float64) / HIDDEN**0.5).to(torch.float32)
    begin = torch.randn(1, HIDDEN)
    part = weight.tensor_split(comm.world_size)[comm.rank].to(device)
    columns = torch.arange(HIDDEN).tensor_split(comm.world_size)[comm.rank].to(device)
    x = begin.clone().to(device)

    def step() -> None:
        """The next x: each rank multiplies its columns of x by its rows of the weight, and the sum goes round."""
        partial = x[:, columns] @ part
        comm.all_reduce(partial, out=partial)
        x.copy_(partial.tanh())

    if on_gpus:
        torch.cuda.set_device(device)
        comm.prepare_cuda(dtypes=["float32"])  # what must not happen during the capture
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()  # lets the matrix product set itself up too
        torch.cuda.current_stream().wait_stream(beside)
        x.copy_(begin)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(STEPS):
        graph.replay() if on_gpus else step()
    found = x.cpu()
    comm.check()  # a graph's kernels have nobody to tell what went wrong

    expected = begin
    for _ in range(STEPS):
        expected = (expected @ weight).tanh()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    if comm.rank == 0:
        how = "replayed as a graph" if on_gpus else "one by one"
        print(f"{comm.world_size} ranks, {STEPS} steps {how} on {device.type}: as computed alone")
