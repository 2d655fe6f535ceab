"""Compiled models whose collectives are fused with what follows, on host ranks: against eager, and what is refused."""

import json
import warnings

import antiphon.lowering
import antiphon.torch
import harness
import pytest
import torch
from antiphon import _core
from antiphon.lowering import Options
from harness import Checks
from lowered import Comm, Device, Group, close, compiled, interpreted, last_rules, lowered, rms_norm, summed, tensors
from torch import Tensor

CHECKS = check = Checks()


@check
def sizes_may_change(comm: Comm, device: Device) -> None:
    """D2."""
    with Group(comm), torch.no_grad():
        program = lowered(rms_norm, dynamic=True)
        for rows in 6, 3, 17:
            mine = tensors(comm.rank, torch.float32, rows)
            close(program(*mine), rms_norm(*mine), torch.float32)
        assert "fuse" in last_rules()


def sum_then_average(x: Tensor) -> Tensor:
    return summed(summed(x + 1), "avg") * 2


@check
def the_second_of_two_is_waited_for(comm: Comm, device: Device) -> None:
    """D1, D7."""
    with Group(comm), torch.no_grad():
        x = tensors(comm.rank, torch.float32)[0]
        close(lowered(sum_then_average)(x), sum_then_average(x), torch.float32)
        assert last_rules().count("sync") == 2


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return summed(y), y


@check
def what_is_returned_stays_the_callers(comm: Comm, device: Device) -> None:
    """D3."""
    with Group(comm), torch.no_grad():
        x = tensors(comm.rank, torch.float32)[0]
        program = lowered(kept)
        first = program(x)
        second = program(x * 2)
        close(first, kept(x), torch.float32)
        close(second, kept(x * 2), torch.float32)


@check
def other_dtypes_are_served_or_left(comm: Comm, device: Device) -> None:
    """D4."""
    with Group(comm), torch.no_grad():
        for dtype in torch.float16, torch.int32, torch.int64, torch.float64:
            torch._dynamo.reset()
            x = torch.arange(24).reshape(3, 8).to(dtype) + comm.rank
            assert torch.equal(lowered(lambda x: summed(x + 1) + 1)(x), summed(x + 1) + 1)


@check
def memory_planning_changes_nothing(comm: Comm, device: Device) -> None:
    """D6."""
    with Group(comm), torch.no_grad():
        mine = tensors(comm.rank, torch.float32)
        close(compiled(rms_norm, memory_planning=True)(*mine), rms_norm(*mine), torch.float32)


def three_sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return summed(a) + summed(b) + summed(c)


@check
def sums_of_sums_are_one(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        a, b, c = (torch.randn(4, 8) for _ in range(3))
        close(lowered(three_sums)(a, b, c), three_sums(a, b, c), torch.float32)
        assert antiphon.lowering.reports()[-1].calls == (3, 1)


def several(*xs: Tensor) -> list[Tensor]:
    return [summed(x * 2).cos() for x in xs]


@check
def neighbouring_calls_are_one_where_overlap_is_asked_for(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        xs = [torch.arange(8.0 * (1 + number)) + comm.rank for number in range(4)]
        close(lowered(several, overlap=True)(*xs), several(*xs), torch.float32)
        report = antiphon.lowering.reports()[-1]
        assert "bucket" in report.rules and report.calls == (4, 1), report


@check
def under_same_the_bits_are_those_of_the_collective(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        a, b, c = (torch.randn(4, 8) for _ in range(3))
        assert torch.equal(lowered(three_sums, numerics="same")(a, b, c), three_sums(a, b, c))
        assert antiphon.lowering.reports()[-1].calls == (3, 3)


@check
def groups_that_are_not_attached_are_left_alone(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        antiphon.lowering.detach()
        count = len(antiphon.lowering.reports())
        mine = tensors(comm.rank, torch.float32)
        close(lowered(rms_norm)(*mine), rms_norm(*mine), torch.float32)
        assert len(antiphon.lowering.reports()) == count


@check
def ranks_that_compile_other_programs_are_told(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        mine = tensors(comm.rank, torch.float32)
        with pytest.raises(RuntimeError, match="run different programs"):
            lowered(rms_norm, merge=comm.rank == 0)(*mine)


@check
def a_proof_that_fails_changes_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(antiphon.lowering._pass._core, "check_lowering", lambda *_: ["it is somebody else's"])
        mine = tensors(comm.rank, torch.float32)
        with pytest.warns(UserWarning, match="left as it was: it is somebody else's .it is in /"):
            found = lowered(rms_norm, strict=False)(*mine)
        close(found, rms_norm(*mine), torch.float32)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="left as it was"):
            lowered(rms_norm)(*mine)


@check
def enabled_for_all_and_for_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        mine, count = tensors(comm.rank, torch.float32), len(antiphon.lowering.reports())
        antiphon.lowering.enable(strict=True)
        try:
            here = torch._inductor.config.post_grad_custom_post_pass
            close(interpreted(rms_norm, here)(*mine), rms_norm(*mine), torch.float32)
            assert len(antiphon.lowering.reports()) == count + 1
            patch.setenv("ANTIPHON_LOWERING", "off")
            torch._dynamo.reset()
            close(interpreted(rms_norm, here)(*mine), rms_norm(*mine), torch.float32)
            assert len(antiphon.lowering.reports()) == count + 1
        finally:
            antiphon.lowering.disable()
        assert torch._inductor.config.post_grad_custom_post_pass is None


@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str) -> None:
    harness.expect("test_lowering", name, "host", 2)


def test_wrong_options_are_told() -> None:
    with pytest.raises(ValueError, match="numerics='exact': known are close, same"):
        Options(numerics="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap=1: True or False"):
        Options(overlap=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names of groups"):
        Options(groups="tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known are off, log, strict"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_LOWERING", "on")
        antiphon.lowering._options.mode()
    with pytest.raises(ValueError, match="what it is"):
        antiphon.lowering.spell("mine.add.default", "")


def test_what_is_no_program_is_told() -> None:
    request = json.dumps({"world": {}, "options": {}})
    with pytest.raises(ValueError, match="line 1 column 1"):
        _core.lower(b"[", request)
    with pytest.raises(ValueError, match="unknown field"):
        _core.lower(b"{}", json.dumps({"world": {}, "options": {}, "more": 1}))
    program = b'{"nodes": [{"name": "output", "op": "output", "args": []}]}'
    answer = json.loads(_core.lower(program, request))
    assert answer["edits"]["new"] == []
    assert _core.check_lowering(program, json.dumps(answer["plan"]).encode(), program) == []


def test_what_inductor_keeps_depends_on_the_options() -> None:
    assert antiphon.lowering.Pass(Options()).uuid() != antiphon.lowering.Pass(Options(merge=False)).uuid()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert antiphon.lowering.Pass(Options()).uuid() == antiphon.lowering.Pass().uuid()
