"""Every spelling of a norm behind a sum, with every form of codes, static and dynamic, inferring and training: against eager."""

from collections.abc import Callable

import antiphon.lowering
import harness
import pytest
import torch
from harness import Checks
from lowered import SPELLINGS, Block, Comm, Device, Group, close, lowered, rms_norm, tensors, with_any_rows
from torch import Tensor

CHECKS = check = Checks()


def fp8(wide: Tensor) -> Tensor:
    return wide.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def by_tensor(norm: Tensor) -> tuple[Tensor, Tensor]:
    return fp8(norm.float() * 4.0), torch.tensor(0.25)


def by_token(norm: Tensor) -> tuple[Tensor, Tensor]:
    wide = norm.float()
    scales = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1 / (512 * 448))
    return fp8(wide * scales.reciprocal()), scales


def by_group(norm: Tensor) -> tuple[Tensor, Tensor]:
    """Powers of two for 16 neighbours."""
    split = norm.float().unflatten(-1, (-1, 16))
    scales = torch.exp2(torch.ceil(torch.log2((split.abs().amax(-1) / 448.0).clamp(min=1e-10))))
    return fp8(split / scales.unsqueeze(-1)).flatten(-2), scales


FORMS = [by_tensor, by_token, by_group]


def quantized(block: Block, form: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def both(*given: Tensor) -> tuple[Tensor, ...]:
        norm, *others = block(*given)
        return *form(norm), *others

    return both


def is_fused(block: object) -> str:
    """What the last report says that one call gives."""
    report = str(antiphon.lowering.reports()[-1])
    assert "one call gives" in report, f"{block}: {report}"
    return report


@check
def every_spelling_is_fused(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        for dynamic in False, True:
            for block in SPELLINGS:
                for dtype in (torch.bfloat16, torch.float32) if block is rms_norm else (torch.bfloat16,):
                    torch._dynamo.reset()
                    mine = with_any_rows(tensors(comm.rank, dtype), dynamic)
                    found = lowered(block)(*mine)
                    is_fused(block)
                    close(found, block(*mine), dtype)


@check
def every_spelling_is_fused_with_its_codes(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        # All forms of one spelling, and one form of each: a program takes a second to compile.
        cases = [(rms_norm, form, dynamic) for form in FORMS for dynamic in (False, True)]
        cases += [(block, FORMS[number % len(FORMS)], False) for number, block in enumerate(SPELLINGS) if block is not rms_norm]
        for block, form, dynamic in cases:
            torch._dynamo.reset()
            mine, program = with_any_rows(tensors(comm.rank, torch.bfloat16), dynamic), quantized(block, form)
            codes, scales, *others = lowered(program)(*mine)
            report = is_fused((block, form, dynamic))
            assert ("codes" if form is by_tensor else "codes, scales") in report, f"{block.__name__}, {form.__name__}: {report}"
            wanted, of_wanted, *more = program(*mine)
            close(others, more, torch.bfloat16)
            torch.testing.assert_close(_numbers(codes, scales), _numbers(wanted, of_wanted), rtol=0.15, atol=0.02)


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes stand for."""
    split = codes.float().unflatten(-1, (scales.shape[-1] if scales.dim() else 1, -1))
    return split * (scales.unsqueeze(-1) if scales.dim() else scales)


def gradients(block: Callable[..., object], rank: int, dynamic: bool = False) -> list[Tensor | None]:
    mine = [tensor.requires_grad_() for tensor in with_any_rows(tensors(rank, torch.float32), dynamic)]
    results = block(*mine)
    sum(result.float().square().sum() for result in results).backward()  # type: ignore[attr-defined, union-attr]
    return [tensor.grad for tensor in mine]


@check
def gradients_are_those_of_eager(comm: Comm, device: Device) -> None:
    """What a backward pass needs of the norm comes out of the call."""
    with Group(comm):
        for dynamic in False, True:
            for block in SPELLINGS:
                torch._dynamo.reset()
                before = len(antiphon.lowering.reports())
                found = gradients(lowered(block), comm.rank, dynamic)
                # Sums of float32 in another order than gloo's, of terms that cancel.
                torch.testing.assert_close(found, gradients(block, comm.rank), rtol=1e-4, atol=1e-4)
                new = [str(report) for report in antiphon.lowering.reports()[before:]]
                assert any("one call gives" in report and "inverse_rms" in report for report in new), f"{block.__name__}: {new}"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, world_size: int) -> None:
    harness.expect("test_lowering_spellings", name, "host", world_size)
