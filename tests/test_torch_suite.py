"""Tests of PyTorch's ``DistributedTest`` that the backend once did not pass and gloo did: see ``torch_suite.py`` for all."""

import pytest

pytest.importorskip("expecttest")  # which PyTorch's tests need
import torch_suite

#: Except ``monitored_barrier``, which torch allows only for gloo.
ONCE_FAILED = [
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_send_recv_any_source",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_of_pytorch(name: str) -> None:
    result = torch_suite.run("antiphon", [name])
    assert torch_suite.passed(result, [name]), [text for _, text in [*result.failures, *result.errors, *result.skipped]]
