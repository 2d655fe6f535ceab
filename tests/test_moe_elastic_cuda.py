"""antiphon.moe.deep_ep.ElasticBuffer on CUDA tensors against the same calls on the host, whose bits they have."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import antiphon
import harness
from antiphon.moe.deep_ep import ElasticBuffer, EPHandle
from harness import Checks
from test_moe_cuda import EXPERTS, H, K, same, tokens_of

CHECKS = check = Checks()

Comm: TypeAlias = antiphon.Communicator
Device: TypeAlias = torch.device

MOST = 320
#: Tensors of a handle.
FIELDS = [
    "topk_idx",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
]


def buffer_of(comm: Comm, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(comm, num_max_tokens_per_rank=MOST, hidden=H, num_topk=K, **options)


def there(value: Any, device: Device) -> Any:
    """Tensors, also in tuples, on a device."""
    if isinstance(value, tuple):
        return tuple(there(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def both(call: Callable[..., Any], device: Device, **arguments: Any) -> tuple[Any, Any]:
    """What a call gives on the host and on a GPU."""
    return call(**arguments), call(**{name: there(value, device) for name, value in arguments.items()})


def valid_rows(handle: EPHandle) -> Tensor:
    """Which received rows mean something."""
    if handle.do_expand:
        slots = handle.recv_src_metadata[:, 2:].flatten().cpu()
        return slots[slots >= 0].long()
    return torch.arange(int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]))


def same_rows(got: Tensor, expected: Tensor, rows: Tensor) -> None:
    assert got.shape == expected.shape
    same(got.view(torch.uint8).cpu()[rows], expected.view(torch.uint8)[rows])


@check
def rows_and_sums_have_the_hosts_bits(comm: Comm, device: Device) -> None:
    x, ids, weights = tokens_of(comm.rank)
    biases = (x * 0.5, x * 0.25)
    for rounds_on_ranks in (True, False):
        buffer = buffer_of(comm, allow_multiple_reduction=rounds_on_ranks)
        for expands in (False, True):
            for alignment, waits in ((1, True), (16, True), (16, False)):
                options = {"num_experts": EXPERTS, "expert_alignment": alignment, "do_cpu_sync": waits, "do_expand": expands}
                host, gpu = both(buffer.dispatch, device, x=x, topk_idx=ids, topk_weights=weights, **options)
                for name in FIELDS:
                    same(getattr(gpu[3], name), getattr(host[3], name))
                assert gpu[3].num_recv_tokens_per_expert_list == host[3].num_recv_tokens_per_expert_list
                assert gpu[3].num_sms == host[3].num_sms and gpu[4].event is None
                rows = valid_rows(host[3])
                same_rows(gpu[0], host[0], rows)
                same(gpu[2].cpu()[rows], host[2][rows])
                if not expands:
                    same(gpu[1], host[1])
                made = host[0].float().nan_to_num(1.0).mul(comm.rank + 2).bfloat16()
                expected = buffer.combine(made, host[3], host[2], biases)
                got = buffer.combine(made.to(device), gpu[3], host[2].to(device), there(biases, device))
                same(got[0], expected[0])
                same(got[1], expected[1])


@check
def padding_is_zero_and_codes_take_their_scales_along(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    x, ids, weights = tokens_of(comm.rank)
    codes = x.float().to(torch.float8_e4m3fn)
    for scales in (torch.randn(len(x), H // 128), torch.arange(len(x), dtype=torch.int32).reshape(-1, 1)):
        for waits in (True, False):
            options = {"num_experts": EXPERTS, "expert_alignment": 16, "do_cpu_sync": waits, "do_expand": True}
            options |= {"do_zero_padding": True, "use_tma_aligned_col_major_sf": True}
            host, gpu = both(buffer.dispatch, device, x=(codes, scales), topk_idx=ids, topk_weights=weights, **options)
            same(gpu[0][0].view(torch.uint8), host[0][0].view(torch.uint8))
            same(gpu[0][1], host[0][1])
            same(gpu[2], host[2])
            assert gpu[0][1].stride() == host[0][1].stride()


@check
def a_handle_serves_again(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    x, ids, weights = tokens_of(comm.rank)
    for expands in (False, True):
        for waits in (True, False):
            options = {"num_experts": EXPERTS, "do_cpu_sync": waits, "do_expand": expands}
            host, gpu = both(buffer.dispatch, device, x=x, topk_idx=ids, **options)
            counted = torch.zeros(EXPERTS // comm.world_size, dtype=torch.int32), torch.zeros_like(gpu[3].num_unaligned_recv_tokens_per_expert)
            found: list[Any] = []
            for handle, stats in zip((host[3], gpu[3]), counted, strict=True):
                where = stats.device
                along = buffer.dispatch(
                    (x * 2).to(where), None, (weights * 2).to(where), stats, handle=handle, do_expand=expands, num_sms=12
                )
                assert along[3] is handle
                found.append(along)
            rows = valid_rows(host[3])
            same_rows(found[1][0], found[0][0], rows)
            same(found[1][2].cpu()[rows], found[0][2][rows])
            same(counted[1], counted[0])
            same(counted[1], host[3].num_unaligned_recv_tokens_per_expert)


@check
def calls_on_the_buffers_stream(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))
    given: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    rows, _, _, handle, _ = buffer.dispatch(x, **given)
    assert isinstance(rows, Tensor) and buffer.get_comm_stream() != torch.cuda.current_stream()
    summed = buffer.combine(rows, handle)[0]
    for waits in (True, False):
        for expands in (False, True):
            for allocates in (False, True):
                for has_event in (False, True) if allocates else (False,):
                    torch.cuda._sleep(10_000_000)
                    late = x * 2  # the call comes behind it
                    event = buffer.capture() if has_event else None
                    received, _, _, made, end = buffer.dispatch(
                        late, **given, do_expand=expands, do_cpu_sync=waits, previous_event=event,
                        previous_event_before_epilogue=buffer.capture(), allocate_on_comm_stream=allocates,
                        async_with_compute_stream=True,
                    )  # fmt: skip
                    end.current_stream_wait()
                    valid = valid_rows(made)
                    assert isinstance(received, Tensor)
                    if not expands:
                        same_rows(received[: len(rows)], (rows * 2).cpu(), valid)
                    torch.cuda._sleep(10_000_000)
                    back = received / 2
                    with buffer.combine(back, made, allocate_on_comm_stream=allocates, async_with_compute_stream=True)[2]:
                        pass
                    torch.cuda._sleep(10_000_000)
                    back = received / 2
                    combined = buffer.combine(back, made, allocate_on_comm_stream=allocates)[0]
                    if not expands:
                        same(combined, summed.cpu())


@check
def a_graph_has_the_form_without_cpu_sync(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))

    def layer(x: Tensor, ids: Tensor, weights: Tensor, expands: bool) -> Tensor:
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=EXPERTS, expert_alignment=8, do_expand=expands, do_zero_padding=expands, do_cpu_sync=False
        )
        assert isinstance(rows, Tensor) and row_weights is not None
        factors = row_weights if expands else row_weights.amax(1)
        return buffer.combine(rows * factors.unsqueeze(1).to(rows.dtype), handle, bias=x)[0]

    for expands in (False, True):
        layer(x, ids, weights, expands)  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x, ids, weights, expands)
        for seed in range(1, 5):
            inputs = tokens_of(comm.rank, seed)
            for tensor, new in zip((x, ids, weights), inputs, strict=True):
                tensor.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            same(result, layer(*inputs, expands))


@check
def messages_between_neighbours(comm: Comm, device: Device) -> None:
    buffer, size, rank = buffer_of(comm), comm.world_size, comm.rank
    buffer.pp_set_config(8 << 20, 2)
    behind, before = (rank + 1) % size, (rank - 1) % size
    for count in (7, 2_000_000):
        for _ in range(3):
            for number in range(2):
                for to in dict.fromkeys((behind, before)):
                    torch.cuda._sleep(1_000_000)
                    message = torch.full((count,), rank * 10.0 + number, device=device)
                    buffer.pp_send(message, to)
                    message.fill_(-1)
            for number in range(2):
                for source in dict.fromkeys((before, behind)):
                    got = torch.zeros(count, device=device)
                    buffer.pp_recv(got, source)
                    same(got, torch.full((count,), source * 10.0 + number))
    buffer.pp_set_config(64, 1)


@check
def sessions_of_all_gathers(comm: Comm, device: Device) -> None:
    buffer, size, rank = buffer_of(comm), comm.world_size, comm.rank
    shapes = [(3, 5), (300, 2048)]
    buffer.agrs_set_config(ElasticBuffer.get_agrs_num_max_session_bytes(comm, shapes * 2, torch.bfloat16), 3)
    for number in range(4):
        with buffer.agrs_new_session():
            places = buffer.agrs_get_inplace_tensor(shapes, torch.bfloat16)
            torch.cuda._sleep(1_000_000)
            for index, place in enumerate(places):
                assert place.is_cuda
                place.fill_(rank * 8 + number + index)
            first, second, wait = buffer.all_gather(places)
            assert first[rank].data_ptr() == places[0].data_ptr()
            mine = [torch.full(shape, rank * 4.0 + number, device=device).bfloat16() for shape in shapes]
            gathered = [buffer.all_gather(tensor) for tensor in mine]
            for result, end in gathered[::-1]:
                end()
                same(result[:, 0, 0], torch.tensor([each * 4.0 + number for each in range(size)]).bfloat16())
            wait()
            for index, result in enumerate((first, second)):
                expected = torch.tensor([each * 8.0 + number + index for each in range(size)]).bfloat16()
                same(result, expected.view(-1, 1, 1).expand(size, *shapes[index]))


@check
def barriers_of_streams(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    for on_its_own in (True, False):
        for with_the_host in (True, False):
            buffer.barrier(on_its_own, with_the_host)
    torch.cuda.synchronize(device)


@check
def what_is_refused(comm: Comm, device: Device) -> None:
    buffer = buffer_of(comm)
    x, ids, weights = (tensor.to(device) for tensor in tokens_of(comm.rank))
    rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=EXPERTS)
    assert isinstance(rows, Tensor)
    most = torch.cuda.get_device_properties(device).multi_processor_count
    assert 4 <= buffer.get_theoretical_num_sms(EXPERTS, K) <= most
    buffer.pp_set_config(64, 1)

    def refused(error: type[Exception], match: str, call: Callable[[], object]) -> None:
        with pytest.raises(error, match=match):
            call()

    refused(TypeError, "one device", lambda: buffer.dispatch(x, ids.cpu(), num_experts=EXPERTS))
    refused(TypeError, "one device", lambda: buffer.dispatch(x, ids, weights.cpu(), num_experts=EXPERTS))
    refused(TypeError, "one device", lambda: buffer.combine(rows.cpu(), handle))
    refused(ValueError, f"{most * 2} multiprocessors; kernels may use {most}", lambda: buffer.combine(rows, handle, num_sms=most * 2))
    refused(ValueError, "previous_event needs", lambda: buffer.combine(rows, handle, previous_event=buffer.capture()))
    refused(ValueError, "t has 256 bytes", lambda: buffer.pp_send(torch.zeros(64, device=device), (comm.rank + 1) % comm.world_size))
    comm.barrier()
    assert buffer.combine(rows, handle)[0].shape == x.shape


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_cuda(name: str, world_size: int) -> None:
    harness.expect("test_moe_elastic_cuda", name, "cuda", world_size)
