"""antiphon.moe between processes: a rank that is killed, does not come, or calls something else, in each form."""

import os
import signal
import time
from collections.abc import Callable

import harness
import pytest
import torch
from ranks import processes

import antiphon
from antiphon.moe import ExpertParallel, deep_ep

H, TIMEOUT = 256, 3.0


class Layer:
    """One rank's calls. ``top_k``, and by expert the dtype of rows, is what the ranks agree on, or do not."""

    def __init__(self, comm: antiphon.Communicator, device: torch.device, top_k: int = 1) -> None:
        self.comm, self.experts = comm, ExpertParallel(comm, 4, H)
        self.x = torch.ones(8, H, dtype=torch.bfloat16, device=device)
        self.ids = (torch.arange(8 * top_k, device=device) % 4).view(8, top_k)
        self.weights = torch.ones(8, top_k, device=device)

    def by_token(self) -> None:
        received = self.experts.dispatch(self.x, self.ids, self.weights)
        self.experts.combine(received.x, received.routes)

    def capacity(self) -> None:
        received = self.experts.dispatch(self.x, self.ids, self.weights, capacity=64)
        self.experts.combine(received.x, received.routes)

    def slots(self) -> None:
        received = self.experts.dispatch_to_slots(self.x, self.ids, max_tokens=8)
        self.experts.combine_from_slots(received.x, self.ids, self.weights, received.routes)

    def by_expert(self) -> None:
        rows = self.x if self.ids.shape[1] == 1 else self.x.float()
        routing_map = torch.zeros(8, 4, dtype=torch.bool, device=rows.device).scatter(1, self.ids, True)
        received = self.experts.dispatch_by_expert(rows, routing_map, routing_map.float())
        self.experts.combine_by_expert(received.x, received.routes)

    def hook(self) -> None:
        buffer = deep_ep.Buffer(self.comm, low_latency_mode=True)
        rows, _, handle, _, receive = buffer.low_latency_dispatch(self.x, self.ids, 8, 4, use_fp8=False, return_recv_hook=True)
        assert receive is not None and isinstance(rows, torch.Tensor)
        receive()
        _, _, receive = buffer.low_latency_combine(rows, self.ids, self.weights, handle, return_recv_hook=True)
        assert receive is not None
        receive()


def error_of(call: Callable[[], None], device: torch.device, comm: antiphon.Communicator) -> BaseException:
    """What ends a call that is made again and again."""
    start = time.monotonic()
    while time.monotonic() - start < 3 * TIMEOUT:
        try:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, TimeoutError) as error:
            return error
    raise AssertionError("nothing went wrong")


def rank_main(form: str, fault: str, kind: str) -> str:
    comm = antiphon.init()
    device = harness.place(kind, comm.rank)
    call, other = (getattr(Layer(comm, device, top_k), form) for top_k in (1, 2))
    call()  # makes what calls of these sizes need
    other()
    comm.barrier()
    if comm.rank == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "late":
            time.sleep(3 * TIMEOUT)
            return ""
        call = other
    error = error_of(call, device, comm)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("fault", ["killed", "late", "mismatch"])
@pytest.mark.parametrize(
    "form, device",
    [("hook", "host"), ("by_expert", "host")]
    + [pytest.param(form, "cuda", marks=pytest.mark.cuda) for form in ("by_token", "capacity", "by_expert", "slots", "hook")],
)
def test_the_other_rank_hears_of_it(form: str, device: str, fault: str) -> None:
    harness.need(device, 2)
    dying = {1} if fault == "killed" else ()
    said, theirs = processes(2, rank_main, form, fault, device, timeout=TIMEOUT, dying=dying)
    if fault == "killed":
        assert said.startswith("PeerLostError") and "rank 1" in said
    elif fault == "late":
        assert said.startswith("TimeoutError") and "ranks [1]" in said
    else:
        one, other = ("bf16", "f32") if form == "by_expert" else ("top-1", "top-2")
        assert one in said + theirs and other in said + theirs
