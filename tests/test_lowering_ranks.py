"""Compiled models between four ranks: one group of them all, and groups of two ranks each."""

import antiphon.lowering
import harness
import pytest
import test_lowering_models as models
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from harness import Checks
from lowered import HIDDEN, Comm, Device, Group, close, lowered, tensors
from torch import Tensor

CHECKS = check = Checks()


@check
def tensor_parallel_blocks_of_dtensor(comm: Comm, device: Device) -> None:
    with Group(comm, device):
        block, x = models.among_ranks(comm, device, sequence=False)
        before = len(antiphon.lowering.reports())
        close(models.trained(lowered(block), block, x), models.trained(block, block, x), torch.float32)
        reports = antiphon.lowering.reports()[before:]
        assert any("fuse" in report.rules for report in reports), reports


@check
def ranks_of_two_groups_agree_in_each_of_them(comm: Comm, device: Device) -> None:
    """The names of the other group differ between the ranks of a group."""
    with Group(comm, device), torch.no_grad():
        pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        rows, columns = (dist.new_subgroups_by_enumeration(lists)[0] for lists in pairs)
        for group in rows, columns:
            antiphon.lowering.attach(group)

        def model(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> Tensor:
            total = collectives.all_reduce(x @ w0, "sum", rows) + residual
            return collectives.all_reduce(F.rms_norm(total, (HIDDEN,), w, 1e-6), "sum", columns) * 2

        mine = tensors(comm.rank, torch.float32)
        close(lowered(model)(*mine), model(*mine), torch.float32)
        assert antiphon.lowering.reports()[-1].rules == ("fuse", "sync")
        for group in rows, columns:
            antiphon.lowering.detach(group)


@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str) -> None:
    harness.expect("test_lowering_ranks", name, "host", 4)
