"""antiphon.moe.deep_ep.ElasticBuffer: what it refuses, with names and numbers, its sizes, and the names of DeepEP's version 2."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from needs import need_ucx
from ranks import processes, threads
from test_moe_elastic import LOCAL, MOST, WORLDS, Definition, H, K, align, buffer_of, same_bits, sent
from torch import Tensor

import antiphon
from antiphon import compat
from antiphon.moe import deep_ep
from antiphon.moe.deep_ep import ElasticBuffer, EPHandle


def refused(calls: list[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()


def test_a_dispatch_refuses_wrong_arguments() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = buffer_of(comm)
        x, ids, weights = torch.ones(4, H).bfloat16(), torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K)
        good: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": 6}
        unsized = ElasticBuffer(comm, num_bytes=2 << 20)
        codes, needs_grad = torch.zeros(4, H, dtype=torch.uint8), torch.ones(4, H, requires_grad=True)
        stats = torch.zeros(3, dtype=torch.int32)

        def call(**changed: Any) -> Callable[[], Any]:
            return lambda: buffer.dispatch(**{**good, **changed})

        refused([
            (TypeError, "x must be a torch.Tensor, not ndarray", call(x=np.ones((4, H)))),
            (ValueError, "not 3 tensors", call(x=(x, x, x))),
            (TypeError, "scales must be a torch.Tensor", call(x=(codes, np.ones(1)))),
            (ValueError, r"\[T, H\], not \[4\]", call(x=x[:, 0])),
            (ValueError, r"scales must be .* = \[4, 1\], not \[4, 2\]", call(x=(codes, torch.ones(4, 2)))),
            (TypeError, "must be dense", call(x=torch.ones(4, H).to_sparse())),
            (NotImplementedError, "served on the CPU and on CUDA", call(x=x.to("meta"))),
            (ValueError, "pass topk_idx and num_experts", call(topk_idx=None)),
            (ValueError, "pass topk_idx and num_experts", call(num_experts=None)),
            (TypeError, "ids must be torch.int64 or torch.int32, not torch.float32", call(topk_idx=ids.float())),
            (ValueError, r"\[T, K\], not \[4\]", call(topk_idx=ids[:, 0])),
            (ValueError, "x has 4 tokens, and there are choices of 3", call(topk_idx=ids[:3])),
            (ValueError, "5 experts cannot be divided among 2 ranks", call(num_experts=5)),
            (ValueError, "num_experts must be at least 1, not 0", call(num_experts=0)),
            (TypeError, "num_experts must be an integer, not float", call(num_experts=6.0)),
            (ValueError, r"topk_weights must be of shape \[T, K\] = \[4, 3\], not \[4, 2\]", call(topk_weights=weights[:, :2])),
            (TypeError, "floating-point dtype, not torch.int64", call(topk_weights=ids)),
            (ValueError, "4 tokens are more than num_max_tokens_per_rank, 3", call(num_max_tokens_per_rank=3)),
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", call(num_max_tokens_per_rank=0)),
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", lambda: unsized.dispatch(**good)),
            (ValueError, "expert_alignment must be at least 1, not 0", call(expert_alignment=0)),
            (TypeError, "expert_alignment must be an integer, not str", call(expert_alignment="4")),
            (ValueError, "num_sms must be at least 0, not -2", call(num_sms=-2)),
            (TypeError, "num_sms must be an integer, not bool", call(num_sms=True)),
            (ValueError, "num_qps must be at most 129, not 130", call(num_qps=130)),
            (TypeError, "statistics must be torch.int32, not torch.int64", call(cumulative_local_expert_recv_stats=stats.long())),
            (ValueError, r"statistics must be of shape \[L\] = \[3\], not \[6\]", call(cumulative_local_expert_recv_stats=stats.repeat(2))),
            (ValueError, "do_zero_padding needs do_expand", call(do_zero_padding=True)),
            (ValueError, "previous_event needs allocate_on_comm_stream", call(previous_event=buffer.capture())),
            (TypeError, "previous_event must be an EventHandle or an EventOverlap, not int", call(previous_event=1)),
            (TypeError, "before_epilogue must be .* not str", call(previous_event_before_epilogue="now")),
            (ValueError, "requires grad", call(x=needs_grad)),
            (TypeError, "handle must be the EPHandle that a dispatch gave, not int", call(handle=7)),
            (ValueError, "multiple of 16", call(x=torch.ones(4, 6).bfloat16())),
            (TypeError, "i64", call(x=torch.ones(4, H, dtype=torch.int64))),
        ])  # fmt: skip
        # None of it was heard by the others.
        comm.barrier()
        assert len(buffer.dispatch(**good)[0]) in (0, 8)

    threads(2, body)


def test_a_call_along_a_handle_refuses_what_is_not_the_handles() -> None:
    definition = Definition(2)

    def body(comm: antiphon.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, weights = definition.x[rank], definition.weights[rank]
        rows, _, row_weights, handle, _ = buffer.dispatch(**sent(comm, definition, topk_weights=weights))
        spread, _, _, by_expert, _ = buffer.dispatch(**sent(comm, definition, expert_alignment=4), do_expand=True)
        assert isinstance(rows, Tensor) and isinstance(spread, Tensor)
        (n, p), t = (len(rows), len(spread)), len(x)

        def dispatch(**changed: Any) -> Callable[[], Any]:
            arguments: dict[str, Any] = {"x": x, "handle": handle, **changed}
            return lambda: buffer.dispatch(**arguments)

        def combine(*arguments: Any, **named: Any) -> Callable[[], Any]:
            return lambda: buffer.combine(*arguments, **named)

        bias = torch.zeros(t, H).bfloat16()
        nothing: Any = None
        v1: Any = deep_ep.Buffer(comm)
        refused([
            (ValueError, "pass no topk_idx", dispatch(topk_idx=definition.ids[rank])),
            (ValueError, "pass no do_cpu_sync", dispatch(do_cpu_sync=True)),
            (ValueError, "num_experts is 12, and 6 of the handle", dispatch(num_experts=12)),
            (ValueError, "expert_alignment is 4, and 1 of the handle", dispatch(expert_alignment=4)),
            (ValueError, f"num_max_tokens_per_rank is 8, and {MOST} of the handle", dispatch(num_max_tokens_per_rank=8)),
            (ValueError, "do_expand is True, and False of the handle", dispatch(do_expand=True)),
            (ValueError, "do_expand is False, and True of the handle", dispatch(handle=by_expert)),
            (ValueError, f"x has {t + 1} tokens, and there are choices of {t}", dispatch(x=torch.ones(t + 1, H).bfloat16())),
            (ValueError, rf"\[{t}, 3\], not \[{t + 1}, 3\]", dispatch(topk_weights=torch.ones(t + 1, K))),
            (TypeError, "EPHandle that a dispatch gave, not NoneType", combine(rows, nothing)),
            (TypeError, "EPHandle that a dispatch gave, not Buffer", combine(rows, v1)),
            (ValueError, rf"\[N, H\] = \[{n}, H\], not \[{n + 1}, {H}\]", combine(torch.ones(n + 1, H), handle)),
            (ValueError, rf"\[P, H\] = \[{p}, H\], not \[{p + 4}, {H}\]", combine(torch.ones(p + 4, H), by_expert)),
            (ValueError, r"\[N, H\]", combine(torch.ones(n), handle)),
            (TypeError, "whose rows have sums, not torch.int32", combine(rows.int(), handle)),
            (TypeError, "not torch.float8_e4m3fn", combine(spread.to(torch.float8_e4m3fn), by_expert)),
            (TypeError, "x must be a torch.Tensor", combine([rows], handle)),
            (ValueError, rf"\[N, K\] = \[{n}, 3\], not \[{n}, 2\]", combine(rows, handle, torch.ones(n, 2))),
            (ValueError, rf"\[P\] = \[{p}\], not \[{p}, 3\]", combine(spread, by_expert, torch.ones(p, 3))),
            (TypeError, "floating-point", combine(rows, handle, torch.ones(n, K, dtype=torch.int64))),
            (TypeError, "bias must be a tensor or a pair of tensors, not list", combine(rows, handle, bias=[bias])),
            (ValueError, "pair of tensors, not 3 of them", combine(rows, handle, bias=(bias, bias, bias))),
            (TypeError, "a bias must be torch.bfloat16 as x is, not torch.float32", combine(rows, handle, bias=bias.float())),
            (ValueError, rf"a bias must be of shape \[T, H\] = \[{t}, {H}\], not \[{t + 1}, {H}\]",
             combine(rows, handle, bias=torch.zeros(t + 1, H).bfloat16())),
            (ValueError, "requires grad", combine(rows, handle, bias=bias.clone().requires_grad_())),
            (ValueError, "num_sms must be at least 0, not -1", combine(rows, handle, num_sms=-1)),
            (ValueError, "num_qps must be at most 129", combine(rows, handle, num_qps=200)),
            (ValueError, "needs allocate_on_comm_stream", combine(rows, handle, previous_event=buffer.capture())),
        ])  # fmt: skip
        comm.barrier()
        same_bits(buffer.combine(rows, handle, row_weights)[1], weights.masked_fill(buffer_mask(definition, rank), 0))
        group = comm.split(0)
        assert group is not None
        with group, pytest.raises(ValueError, match="another instance"):
            buffer_of(group).combine(rows, handle)
        comm.barrier()

    threads(2, body)


def buffer_mask(definition: Definition, rank: int) -> Tensor:
    """Which choices are of no expert."""
    ids = definition.ids[rank]
    return (ids < 0) | (ids >= definition.experts)


def test_sizes_and_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        count = comm.world_size
        buffer = buffer_of(comm)
        assert (buffer.rank_idx, buffer.num_ranks, buffer.group) == (comm.rank, count, comm)
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, count)
        assert deep_ep.get_physical_domain_size(comm) == deep_ep.get_logical_domain_size(comm, False) == (1, count)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.scaleup_rank_idx) == (1, count, comm.rank)
        mib = 2 << 20
        # 4096 tokens of 7168 bfloat16 with 8 choices: 14,448 bytes, in 32s, of each rank, or 14,368 for each rank of a token.
        sent_row, returned_row = 14464, 14368
        most = 4096 * max(count * sent_row, min(count, 8) * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8) == align(most, mib)
        single = 4096 * max(count * sent_row, 8 * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8, allow_multiple_reduction=False) == align(single, mib)
        fp8 = 4096 * max(count * align(7168 + 4 * 224 + 8 * 12 + 16, 32), min(count, 8) * returned_row)
        assert ElasticBuffer.get_buffer_size_hint(comm, 4096, 7168, 8, use_fp8_dispatch=True) == align(fp8, mib)
        assert ElasticBuffer.get_buffer_size_hint(comm, 1, 8) == mib == buffer.num_bytes
        assert ElasticBuffer.get_pp_buffer_size_hint(1000, 3) == mib
        assert ElasticBuffer.get_pp_buffer_size_hint(1 << 20, 3) == 12 << 20
        sizes = ElasticBuffer.get_agrs_num_max_session_bytes
        assert sizes(comm, (3, 5), torch.bfloat16) == align(count * 30, 32)
        assert sizes(comm, [(3, 5), torch.Size([7])], torch.float32) == align(count * 60, 32) + align(count * 28, 32)
        assert ElasticBuffer.get_agrs_buffer_size_hint(comm, 5 << 20) == 6 << 20

        for per_rank, top_k in ((16, 2), (64, 8), (2, 2)):
            num_experts = per_rank * count
            if count > 1:
                missed = math.prod((num_experts - num_experts // count - i) / (num_experts - i) for i in range(top_k))
                ranks_of_a_token, rows = count * (1 - max(missed, 0)), 430 / (1 - 1 / count)
                number = align(max(4, math.ceil(1.25 * max(rows / ranks_of_a_token / 200, rows / 50) - 1e-9)), 2)
            else:
                number = 24
            assert buffer.get_theoretical_num_sms(num_experts, top_k) == number
        busy = buffer_of(comm, prefer_overlap_with_compute=False)
        assert busy.get_theoretical_num_sms(48, 2) == (64 if count > 1 else 24)
        slow = buffer.get_theoretical_num_sms(48, 2, nvlink_gbs=1)
        assert slow == (4 if count > 1 else 24)
        assert [buffer.get_theoretical_num_qps(n) for n in (1, 4, 100)] == [17, 65, 129]
        direct = buffer_of(comm, allow_hybrid_mode=False)
        assert [direct.get_theoretical_num_qps(n) for n in (1, 9, 100)] == [1, 9, 9] and direct.num_allocated_qps == 17
        assert buffer_of(comm, num_allocated_qps=4).get_theoretical_num_qps(64) == 4
        wrong: Any = "fast"
        refused([
            (ValueError, "num_topk must be at most 48, not 49", lambda: buffer.get_theoretical_num_sms(48, 49)),
            (ValueError, "num_topk must be at least 1, not 0", lambda: buffer.get_theoretical_num_sms(48, 0)),
            (ValueError, "num_scaleout_topk must be at most 0, not 2", lambda: buffer.get_theoretical_num_sms(48, 2, 2)),
            (ValueError, "sm_read_gbs must be a positive number, not 0", lambda: buffer.get_theoretical_num_sms(48, 2, sm_read_gbs=0)),
            (ValueError, "nvlink_gbs must be a positive number, not -1", lambda: buffer.get_theoretical_num_sms(48, 2, nvlink_gbs=-1)),
            (ValueError, "sm_write_gbs must be a positive number, not inf",
             lambda: buffer.get_theoretical_num_sms(48, 2, sm_write_gbs=math.inf)),
            (TypeError, "sm_write_gbs must be a number, not str", lambda: buffer.get_theoretical_num_sms(48, 2, sm_write_gbs=wrong)),
            (ValueError, "num_sms must be at least 1, not 0", lambda: buffer.get_theoretical_num_qps(0)),
            (ValueError, "hidden must be at least 1, not 0", lambda: ElasticBuffer.get_buffer_size_hint(comm, 4, 0)),
            (ValueError, "num_topk must be at most 32, not 33", lambda: ElasticBuffer.get_buffer_size_hint(comm, 4, 8, 33)),
            (TypeError, "shapes must be", lambda: sizes(comm, wrong, torch.float32)),
            (TypeError, "shapes must be", lambda: sizes(comm, [], torch.float32)),
            (ValueError, "a size of a shape must be at least 0, not -1", lambda: sizes(comm, (2, -1), torch.float32)),
        ])  # fmt: skip

    for world_size in WORLDS:
        threads(world_size, body)


def test_a_buffer_refuses_wrong_sizes() -> None:
    def body(comm: antiphon.Communicator) -> None:
        mib = 2 << 20
        wrong: Any = "a group"
        refused([
            (ValueError, "num_max_tokens_per_rank must be at least 1, not 0", lambda: ElasticBuffer(comm)),
            (ValueError, f"num_bytes must be a multiple of {mib}, not 100", lambda: ElasticBuffer(comm, 100)),
            (ValueError, "num_bytes must be at least 1, not 0", lambda: ElasticBuffer(comm, 0)),
            (ValueError, f"num_cpu_bytes must be a multiple of {mib}, not 7", lambda: ElasticBuffer(comm, mib, 7)),
            (ValueError, f"{2 * mib} num_cpu_bytes cannot be part of {mib}", lambda: ElasticBuffer(comm, mib, 2 * mib)),
            (TypeError, "num_bytes must be an integer, not float", lambda: ElasticBuffer(comm, 2e6)),  # type: ignore[arg-type]
            (ValueError, "num_gpu_timeout_secs must be at least 1", lambda: ElasticBuffer(comm, mib, num_gpu_timeout_secs=0)),
            (ValueError, "num_cpu_timeout_secs must be at least 1", lambda: ElasticBuffer(comm, mib, num_cpu_timeout_secs=-1)),
            (ValueError, "num_allocated_qps must be at least 0", lambda: ElasticBuffer(comm, mib, num_allocated_qps=-1)),
            (ValueError, "sl_idx must be at least 0", lambda: ElasticBuffer(comm, mib, sl_idx=-1)),
            (TypeError, "the group must be", lambda: ElasticBuffer(wrong, mib)),
        ])  # fmt: skip
        kept = ElasticBuffer(comm, mib)
        with pytest.raises(RuntimeError, match="explicitly_destroy"):
            kept.destroy()
        buffer = ElasticBuffer(comm, mib, explicitly_destroy=True)
        assert buffer.runtime is not None and "destroyed" not in repr(buffer)
        buffer.destroy()
        assert buffer.runtime is None and "destroyed" in repr(buffer)
        x, ids = torch.ones(1, H), torch.zeros(1, 1, dtype=torch.int64)
        for call in (
            lambda: buffer.dispatch(x, ids, num_experts=2),
            buffer.barrier,
            buffer.create_agrs_session,
            lambda: buffer.all_gather(x),
            lambda: buffer.pp_send(x, 0),
            lambda: buffer.pp_set_config(1, 1),
            lambda: buffer.agrs_set_config(1, 1),
        ):
            with pytest.raises(RuntimeError, match="destroyed"):
                call()
        refused([
            (NotImplementedError, "engram_write: Engram", lambda: kept.engram_write(x)),
            (NotImplementedError, "engram_fetch: Engram", lambda: kept.engram_fetch(ids.int())),
            (NotImplementedError, "hint: Engram", lambda: ElasticBuffer.get_engram_storage_size_hint(1, 1, 1)),
        ])  # fmt: skip

    threads(2, body)


def on_two_nodes() -> str:
    with antiphon.init() as comm:
        try:
            ElasticBuffer(comm, 2 << 20)
        except NotImplementedError as error:
            return str(error)
    return "made"


def test_ranks_on_several_nodes_are_refused() -> None:
    need_ucx()
    for text in processes(2, on_two_nodes, nodes=["a", "b"]):
        assert "the ranks are on 2 nodes" in text


#: The arguments of the public methods at DeepEP's dd758ca.
ARGUMENTS = {
    "__init__": "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch deterministic allow_hybrid_mode"
    " allow_multiple_reduction prefer_overlap_with_compute sl_idx num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs"
    " explicitly_destroy",
    "destroy": "",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk use_fp8_dispatch allow_hybrid_mode allow_multiple_reduction",
    "get_engram_storage_size_hint": "num_entries hidden num_max_tokens_per_rank dtype",
    "get_pp_buffer_size_hint": "num_max_tensor_bytes num_max_inflight_tensors",
    "get_agrs_num_max_session_bytes": "group shapes dtype",
    "get_agrs_buffer_size_hint": "group num_max_session_bytes",
    "barrier": "use_comm_stream with_cpu_sync sequential",
    "capture": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "engram_write": "storage sf",
    "engram_fetch": "indices num_qps use_tma_aligned_col_major_sf",
    "pp_set_config": "num_max_tensor_bytes num_max_inflight_tensors",
    "pp_send": "t dst_rank_idx num_sms",
    "pp_recv": "t src_rank_idx num_sms",
    "create_agrs_session": "",
    "destroy_agrs_session": "",
    "agrs_new_session": "enabled",
    "agrs_set_config": "num_max_session_bytes num_max_all_gathers_per_session",
    "agrs_get_inplace_tensor": "shapes dtype",
    "all_gather": "t",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk rdma_gbs nvlink_gbs sm_read_gbs sm_write_gbs",
    "get_theoretical_num_qps": "num_sms",
    "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank expert_alignment num_sms"
    " num_qps previous_event previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream handle do_handle_copy"
    " do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf",
    "combine": "x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue async_with_compute_stream"
    " allocate_on_comm_stream",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_deep_eps(name: str) -> None:
    found = [each for each in inspect.signature(getattr(ElasticBuffer, name)).parameters if each != "self"]
    expected = ARGUMENTS[name].split()
    assert found[: len(expected)] == expected


def test_compat_has_the_names() -> None:
    compat.install("deep_ep")
    try:
        from deep_ep import ElasticBuffer as buffer
        from deep_ep import EPHandle as handle
        from deep_ep import EventHandle, EventOverlap, get_logical_domain_size, get_physical_domain_size, topk_idx_t

        assert buffer is ElasticBuffer and handle is EPHandle and topk_idx_t == torch.int64
        assert EventHandle and EventOverlap and get_logical_domain_size and get_physical_domain_size
    finally:
        compat.uninstall("deep_ep")
