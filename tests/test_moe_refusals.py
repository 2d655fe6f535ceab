"""antiphon.moe: what is refused, before anything is sent and with the names and numbers of what was passed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import outcomes, threads
from test_moe import H, tokens_of

import antiphon
from antiphon.moe import ExpertParallel, deep_ep, fused_a2a


def test_arguments_are_refused_with_their_numbers() -> None:
    def body(comm: antiphon.Communicator) -> None:
        parallel = ExpertParallel(comm, 4, H)
        x, ids, weights = tokens_of(0, 5, 4)
        routes = parallel.dispatch(x, ids, weights).routes
        rows = routes.rows
        buffer = deep_ep.Buffer(comm)
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "5 experts cannot be divided among 2 ranks", lambda: ExpertParallel(comm, 5, H)),
            (ValueError, r"\[T, H\] = \[T, 8\], not \[5, 9\]", lambda: parallel.dispatch(torch.ones(5, 9), ids, weights)),
            (ValueError, "whole 16 bytes, not 3", lambda: ExpertParallel(comm, 4, 3)),
            (ValueError, "multiple of 16", lambda: ExpertParallel(comm, 4, 6).dispatch(torch.ones(5, 6), ids, weights)),
            (TypeError, "floating-point dtype, not torch.int64", lambda: parallel.dispatch(x, ids, weights.long())),
            (TypeError, "not torch.float32", lambda: parallel.dispatch(x, ids.float(), weights)),
            (ValueError, r"\[T, K\]", lambda: parallel.dispatch(x, ids[0], weights)),
            (ValueError, "for 5 tokens", lambda: parallel.dispatch(x, ids[:4], weights[:4])),
            (ValueError, r"scales must be .* = \[5, 1\], not \[5, 2\]",
             lambda: parallel.dispatch(x, ids, weights, scales=torch.ones(5, 2))),
            (ValueError, rf"\[{rows}, 8\], not \[{rows + 1}, 8\]",
             lambda: parallel.combine(torch.ones(rows + 1, H), routes)),
            (TypeError, "not i64", lambda: parallel.combine(torch.ones(rows, H, dtype=torch.int64), routes)),
            (ValueError, "ids need weights",
             lambda: buffer.dispatch(x, None, *[torch.zeros(2, dtype=torch.int32)] * 2, routes.is_token_in_rank,
                                     torch.zeros(4, dtype=torch.int32), topk_idx=ids)),
            (ValueError, "pass no topk_idx", lambda: buffer.dispatch(x, routes, topk_idx=ids)),
            (ValueError, "async_finish", lambda: buffer.get_dispatch_layout(ids, 4, allocate_on_comm_stream=True)),
            (ValueError, "33 experts", lambda: parallel.layout(torch.zeros(1, 33, dtype=torch.int64))),
            (RuntimeError, "explicitly_destroy", buffer.destroy),
            (ValueError, "3 biases", lambda: parallel._calls.combine(x, routes, biases=[x, x, x])),
        ]  # fmt: skip
        for kind, text, call in wrong:
            with pytest.raises(kind, match=text):
                call()
        # None of it was heard by the others.
        comm.barrier()

    threads(2, body)


def test_expert_parallel_refuses_what_is_not_its_own() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = ExpertParallel(comm, 4, H)
        x, ids, weights = tokens_of(0, 3, 4)
        rows = experts.dispatch(x, ids, weights).x
        layout = ExpertParallel(comm, 8, H).layout(ids)
        nothing: Any = None
        wrong: Any = 4.0
        calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: ExpertParallel(comm, 4, 0), ValueError, "ExpertParallel: hidden must be at least 1, not 0"),
            (lambda: ExpertParallel(comm, wrong, H), TypeError, "num_experts must be an integer, not float"),
            (lambda: ExpertParallel(comm, 1025, H), ValueError, "num_experts must be at most 1024, not 1025"),
            (lambda: experts.dispatch(x, ids, weights, layout=wrong), TypeError, "ExpertParallel.layout gave, not float"),
            (lambda: experts.dispatch(x, ids, weights, layout=layout), ValueError, "of 8 experts; there are 4"),
            (lambda: experts.combine(rows, nothing), TypeError, "ByTokenRoutes that a dispatch gave, not NoneType"),
            (lambda: experts.combine_by_expert(rows, nothing), TypeError, "ByExpertRoutes .* not NoneType"),
            (lambda: experts.dispatch(x, ids, weights, capacity=-1), ValueError, "capacity must be at least 0, not -1"),
            (
                lambda: experts.combine_from_slots(rows, ids, weights, nothing),
                TypeError,
                "SlotRoutes .* not NoneType",
            ),
        ]
        for call, kind, text in calls:
            with pytest.raises(kind, match=text):
                call()

    threads(1, body)


def test_a_call_that_is_refused_on_one_rank_may_be_made_again() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = ExpertParallel(comm, 4, 128)
        x, ids, weights = torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        counts = torch.zeros(2, dtype=torch.int32)
        plain = {"x": x, "ids": ids, "weights": weights}
        by_expert = {"x": x, "routing_map": routing_map}
        calls: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], type[Exception], str]] = [
            (experts.dispatch, plain, {"weights": weights[:2]}, ValueError, "weights"),
            (experts.dispatch, plain | {"capacity": 9}, {"capacity": -1}, ValueError, "capacity must be at least 0, not -1"),
            (experts.dispatch, plain | {"capacity": 9}, {"ids": ids[:, :0]}, ValueError, "K"),
            (experts.dispatch_by_expert, by_expert, {"pad_multiple": 2**30}, ValueError, "pad_multiple"),
            (experts.dispatch_by_expert, by_expert | {"capacity": 9}, {"capacity": -1}, ValueError, "at least 0, not -1"),
            (
                experts.dispatch_to_slots,
                {"x": x, "ids": ids, "max_tokens": 3, "statistics": counts},
                {"statistics": counts.long()},
                TypeError,
                "the statistics must be i32, not i64",
            ),
        ]
        for call, arguments, wrong, kind, text in calls:
            if comm.rank == 1:
                with pytest.raises(kind, match=text):
                    call(**arguments | wrong)
            received = call(**arguments)
            assert received.routes is not None
        comm.barrier()

    threads(2, body)


def test_deep_eps_calls_refuse_tensors_that_require_grad() -> None:
    """Their gradients would be lost. Megatron's functions call them where grad mode is off."""

    def body(comm: antiphon.Communicator) -> None:
        buffer, hybrid = deep_ep.Buffer(comm), deep_ep.HybridEPBuffer(comm, H, 3, 4)
        x, ids, weights = tokens_of(0, 3, 4)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
        rows, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, None, is_in_rank, per_expert, ids, weights)
        assert isinstance(rows, torch.Tensor) and handle is not None
        few = torch.ones(3, 8, dtype=torch.bfloat16)
        slots, _, low, _, _ = buffer.low_latency_dispatch(few, ids, 3, 4, use_fp8=False)
        by_token = hybrid.dispatch(x, routing_map=routing_map)
        by_expert = hybrid.dispatch_with_permute(hidden=x, routing_map=routing_map)
        calls: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
            "dispatch: ": (x, lambda x: buffer.dispatch(x, None, per_rank, None, is_in_rank, per_expert, ids, weights)),
            "dispatch:": (weights, lambda w: buffer.dispatch(x, None, per_rank, None, is_in_rank, per_expert, ids, w)),
            "combine: ": (rows, lambda rows: buffer.combine(rows, handle)),
            "low_latency_combine": (weights, lambda w: buffer.low_latency_combine(slots, ids, w, low)),  # type: ignore[arg-type]
            "low_latency_dispatch": (few, lambda x: buffer.low_latency_dispatch(x, ids, 3, 4, use_fp8=False)),
            "dispatch": (x, lambda x: hybrid.dispatch(x, routing_map=routing_map)),
            "combine": (by_token[0], lambda rows: hybrid.combine(rows, handle=by_token[3])),
            "dispatch_with_permute": (x, lambda x: hybrid.dispatch_with_permute(hidden=x, routing_map=routing_map)),
            "combine_with_unpermute": (by_expert[0], lambda rows: hybrid.combine_with_unpermute(hidden=rows, handle=by_expert[4])),
        }
        for name, (tensor, call) in calls.items():
            leaf = tensor.detach().clone().requires_grad_()
            with pytest.raises(ValueError, match=f"^{name}.*a tensor requires grad.*antiphon.moe.ExpertParallel"):
                call(leaf * 1)
            with torch.no_grad():
                call(leaf * 1)

    threads(1, body)


@pytest.mark.parametrize(
    "wrong",
    [None, [1.0], np.ones((3, H), dtype=np.float32), torch.eye(3, H).to_sparse(), torch.ones(3, H, device="meta")],
    ids=["None", "list", "ndarray", "sparse", "meta"],
)
def test_what_is_no_tensor_of_the_ranks_device_is_named(wrong: Any) -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts, buffer = ExpertParallel(comm, 4, H), deep_ep.Buffer(comm)
        hybrid = deep_ep.HybridEPBuffer(comm, H, 3, 4)
        x, ids, weights = tokens_of(0, 3, 4)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        routes = experts.dispatch(x, ids, weights).routes
        by_map = experts.dispatch_by_expert(x, routing_map).routes
        few = experts.dispatch_to_slots(x.bfloat16(), ids, max_tokens=3)
        layout = buffer.get_dispatch_layout(ids, 4)
        num_tokens, _, num_of_experts, is_in_rank, _ = layout
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("ids", lambda: experts.layout(wrong)),
            ("x", lambda: experts.dispatch(wrong, ids, weights)),
            ("ids", lambda: experts.dispatch(x, wrong, weights)),
            ("weights", lambda: experts.dispatch(x, ids, wrong)),
            ("x", lambda: experts.combine(wrong, routes)),
            ("x", lambda: experts.dispatch_by_expert(wrong, routing_map)),
            ("routing_map", lambda: experts.dispatch_by_expert(x, wrong)),
            ("x", lambda: experts.combine_by_expert(wrong, by_map)),
            ("x", lambda: experts.dispatch_to_slots(wrong, ids, max_tokens=3)),
            ("ids", lambda: experts.dispatch_to_slots(x.bfloat16(), wrong, max_tokens=3)),
            ("x", lambda: experts.combine_from_slots(wrong, ids, weights, few.routes)),
            ("weights", lambda: experts.combine_from_slots(few.x, ids, wrong, few.routes)),
            ("topk_idx", lambda: buffer.get_dispatch_layout(wrong, 4)),
            ("x", lambda: buffer.dispatch(wrong, routes)),
            ("x", lambda: buffer.combine(wrong, routes)),
            ("bias 1", lambda: buffer.combine(torch.ones(routes.rows, H), routes, bias=(x, wrong))),
            ("hidden", lambda: hybrid.dispatch(wrong, routing_map=routing_map)),
            ("hidden", lambda: hybrid.dispatch_with_permute(hidden=wrong, routing_map=routing_map)),
            ("hidden", lambda: hybrid.combine_with_unpermute(hidden=wrong, handle=by_map)),
            ("x", lambda: fused_a2a.fused_dispatch(wrong, ids, weights, 4, comm)),
            ("token_indices", lambda: fused_a2a.fused_dispatch(x, wrong, weights, 4, comm)),
            ("token_probs", lambda: fused_a2a.fused_dispatch(x, ids, wrong, 4, comm)),
            ("x", lambda: fused_a2a.fused_combine(wrong, comm, routes)),
            ("x", lambda: fused_a2a.hybrid_ep_dispatch(wrong, routing_map, None, comm, 4)),
            ("routing_map", lambda: fused_a2a.hybrid_ep_dispatch(x, wrong, None, comm, 4)),
            ("x", lambda: fused_a2a.hybrid_ep_combine(wrong, by_map, None, None)),
        ]
        if wrong is not None:
            calls += [
                ("scales", lambda: experts.dispatch(x, ids, weights, scales=wrong)),
                ("bias 0", lambda: experts.combine(torch.ones(routes.rows, H), routes, bias=wrong)),
                ("probs", lambda: experts.dispatch_by_expert(x, routing_map, wrong)),
                ("statistics", lambda: experts.dispatch_to_slots(x.bfloat16(), ids, max_tokens=3, statistics=wrong)),
                ("out", lambda: experts.combine_from_slots(few.x, ids, weights, few.routes, out=wrong)),
                (
                    "is_token_in_rank",
                    lambda: buffer.dispatch(x, None, num_tokens, None, wrong, num_of_experts, ids, weights),
                ),
                ("tokens_per_expert", lambda: buffer.dispatch(x, None, num_tokens, None, is_in_rank, wrong, ids, weights)),
                ("topk_idx", lambda: hybrid.dispatch(x, topk_idx=wrong, num_of_experts=4)),
                ("scaling_factor", lambda: hybrid.dispatch(x, wrong, routing_map=routing_map)),
                ("probs", lambda: fused_a2a.hybrid_ep_dispatch(x, routing_map, wrong, comm, 4)),
            ]
        for name, call in calls:
            with pytest.raises((TypeError, NotImplementedError)) as refused:
                call()
            known = f"{name} must be" in str(refused.value) or "meta" in str(refused.value)
            assert known, f"{name}: {refused.value}"

    threads(1, body)


@pytest.mark.parametrize("wrong", [2.0, "2", None, True, -1, 2**40, 2**70])
def test_what_is_no_integer_of_the_range_is_named(wrong: Any) -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts, buffer = ExpertParallel(comm, 4, H), deep_ep.Buffer(comm)
        hybrid = deep_ep.HybridEPBuffer(comm, H, 3, 4)
        x, ids, weights = tokens_of(0, 3, 4)
        routing_map = torch.ones(3, 4, dtype=torch.bool)
        num_tokens, _, num_of_experts, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("num_experts", lambda: ExpertParallel(comm, wrong, H)),
            ("hidden", lambda: ExpertParallel(comm, 4, wrong)),
            ("max_tokens", lambda: experts.dispatch_to_slots(x.bfloat16(), ids, max_tokens=wrong)),
            ("pad_multiple", lambda: experts.dispatch_by_expert(x, routing_map, pad_multiple=-1 if wrong is None else wrong)),
            ("num_experts", lambda: buffer.get_dispatch_layout(ids, wrong)),
            ("num_max_dispatch_tokens_per_rank", lambda: buffer.low_latency_dispatch(x.bfloat16(), ids, wrong, 4)),
            ("num_experts", lambda: buffer.low_latency_dispatch(x.bfloat16(), ids, 4, wrong)),
            ("num_sms", lambda: deep_ep.Buffer.set_num_sms(wrong)),
            ("num_sms", lambda: deep_ep.Config(wrong)),
            ("hidden_bytes", lambda: deep_ep.Config().get_nvl_buffer_size_hint(wrong, 2)),
            ("num_ranks", lambda: deep_ep.Buffer.get_low_latency_rdma_size_hint(4, H, wrong, 4)),
            ("hidden_dim", lambda: deep_ep.HybridEPBuffer(comm, wrong, 3, 4)),
            ("max_num_of_tokens_per_rank", lambda: deep_ep.HybridEPBuffer(comm, H, wrong, 4)),
            ("num_local_experts", lambda: deep_ep.HybridEPBuffer(comm, H, 3, wrong)),
            ("num_of_experts", lambda: hybrid.dispatch(x, topk_idx=ids, num_of_experts=4.5 if wrong is None else wrong)),
            ("hidden_bytes", lambda: fused_a2a.get_buffer(comm, wrong)),
        ]
        for size in ("num_nvl_bytes", "num_rdma_bytes"):
            if wrong != 2**40:  # of bytes that is one
                calls.append((size, lambda size=size: deep_ep.Buffer(comm, **{size: wrong})))  # type: ignore[misc]
        if wrong is not None:
            calls += [
                ("capacity", lambda: experts.dispatch(x, ids, weights, capacity=wrong)),
                ("capacity", lambda: experts.dispatch_by_expert(x, routing_map, capacity=wrong)),
                ("max_tokens", lambda: experts.dispatch_by_expert(x, routing_map, capacity=4, max_tokens=wrong)),
                (
                    "num_worst_tokens",
                    lambda: buffer.dispatch(
                        x, None, num_tokens, None, is_in_rank, num_of_experts, ids, weights, num_worst_tokens=wrong
                    ),
                ),
                (
                    "num_permuted_tokens",
                    lambda: hybrid.dispatch_with_permute(hidden=x, routing_map=routing_map, num_permuted_tokens=wrong),
                ),
            ]
        for name, call in calls:
            with pytest.raises((TypeError, ValueError), match=f"{name} must be (an integer, not|at (least|most) [0-9]+, not)"):
                call()

    threads(1, body)


def test_objects_of_another_kind_are_named() -> None:
    def body(comm: antiphon.Communicator) -> None:
        buffer = deep_ep.Buffer(comm)
        x, ids, weights = tokens_of(0, 3, 4)
        routes = ExpertParallel(comm, 4, H).dispatch(x, ids, weights).routes
        wrong: Any = object()
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("previous_event must be an EventOverlap, not object", lambda: buffer.get_dispatch_layout(ids, 4, wrong)),
            ("config must be a Config, not object", lambda: buffer.combine(x, routes, config=wrong)),
            ("must be the ByTokenRoutes that a dispatch gave, not object", lambda: buffer.dispatch(x, wrong)),
            ("must be the ByTokenRoutes that a dispatch gave, not object", lambda: buffer.combine(x, wrong)),
            ("the SlotRoutes", lambda: buffer.low_latency_combine(x.bfloat16(), ids, weights, wrong)),
            ("the SlotRoutes", lambda: buffer.get_next_low_latency_combine_buffer(wrong)),
            ("the ByExpertRoutes", lambda: fused_a2a.hybrid_ep_combine(x, wrong, None, None)),
            ("the ByTokenRoutes", lambda: fused_a2a.fused_combine(x, comm, wrong)),
        ]
        for text, call in calls:
            with pytest.raises(TypeError, match=text):
                call()
        with pytest.raises(NotImplementedError, match="share the region"):
            buffer.get_local_buffer_tensor(torch.uint8)
        with pytest.raises(ValueError, match="codes and their scales, not 3 tensors"):
            buffer.dispatch((x, x, x), routes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="format must be one of bf16, .*, not 'int4'"):
            ExpertParallel(comm, 4, H).dispatch_to_slots(x.bfloat16(), ids, max_tokens=3, format="int4")

    threads(1, body)


def test_routes_of_another_communicator_are_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x, ids, weights = tokens_of(0, 5, 4)
        routes = ExpertParallel(comm, 4, H).dispatch(x, ids, weights).routes
        group = comm.split(0)
        assert group is not None
        parallel = ExpertParallel(group, 4, H)
        with pytest.raises(ValueError, match="the routes are of another instance"):
            parallel.combine(torch.ones(routes.rows, H), routes)
        group.close()
        with pytest.raises(RuntimeError, match="closed"):
            parallel.dispatch(x, ids, weights)

    threads(2, body)


def test_ranks_that_differ_hear_of_it() -> None:
    def body(comm: antiphon.Communicator) -> None:
        experts = 4 if comm.rank else 8
        x, ids, weights = tokens_of(0, 5, 4)
        ExpertParallel(comm, experts, H).dispatch(x, ids, weights)

    for error in outcomes(2, body):
        assert isinstance(error, RuntimeError)
        assert "4 experts, top-3" in str(error) and "8 experts, top-3" in str(error)
