"""Compiled models whose collectives are fused with what follows, on host ranks: against eager, and what is refused."""

import json
import logging
import tempfile
import warnings
from pathlib import Path

import antiphon.lowering
import antiphon.torch
import harness
import pytest
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from antiphon import _core
from antiphon.lowering import Options
from antiphon.torch import comm_buffers, ops
from harness import Checks
from lowered import HIDDEN, Comm, Device, Group, close, compiled, interpreted, last_rules, lowered, rms_norm, summed, tensors, with_any_rows
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
def ranks_whose_models_differ_in_a_constant_are_told_which(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        mine, eps = tensors(comm.rank, torch.float32), 1e-6 * (1 + comm.rank)

        def model(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> Tensor:
            return summed(F.rms_norm(summed(x @ w0) + residual, (HIDDEN,), w, eps)) * 2

        wanted = [rf"fused_all_reduce = fused\(.* eps={eps}.* on rank {rank}" for rank, eps in enumerate(["9.99.*e-7", "1.99.*e-6"])]
        with pytest.raises(RuntimeError, match=f"run different programs: .*; call 0 is {', '.join(wanted)}"):
            lowered(model)(*mine)


@check
def ranks_with_other_tables_are_told(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / "tables.json"
        tables.write_text(json.dumps({"format": 1, "entries": []}) + " " * comm.rank)
        with pytest.raises(RuntimeError, match="their calls are equal, but not their options, tables"):
            lowered(rms_norm, tables=str(tables))(*tensors(comm.rank, torch.float32))


@check
def ranks_of_which_one_knows_its_program_are_told(comm: Comm, device: Device) -> None:
    """The rank whose program is new compares it, where the other one already sums: an error, and not a wait for ever."""
    with Group(comm), torch.no_grad():
        x = torch.ones(4, 8)
        programs = lowered(lambda x: summed(x * 2) + 1), lowered(sum_then_average)
        for _ in range(2):
            programs[0](x)
        with pytest.raises(RuntimeError, match="ranks disagree: .* called exchange_objects"):
            programs[1 - comm.rank](x)


@check
def what_inductor_keeps_depends_on_the_groups_sizes(comm: Comm, device: Device) -> None:
    """A program for a group of one rank has no collectives."""
    with Group(comm) as group:
        assert json.loads(antiphon.lowering.Pass().uuid())[-1] == [[group, comm.world_size]]


@check
def every_operator_tells_ranks_apart_by_its_site(comm: Comm, device: Device) -> None:
    with Group(comm) as group:
        x, counts = torch.ones(4, 2, 16), [2, 2]
        given: dict[str, tuple[object, ...]] = {
            "all_gather_v": (counts, group),
            "all_to_all_v": (counts, counts, group),
            "shard_dim_all_to_all": (0, 1, group),
            "all_reduce_fused": (group, ["sum"]),
        }
        schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("antiphon::")]
        names = [schema.name.removeprefix("antiphon::") for schema in schemas if str(schema.arguments[-1].name) == "site"]
        sited = sorted(name for name in names if not name.startswith("_"))
        assert {*given, "all_reduce", "all_reduce_", "all_reduce_rms_norm", "broadcast_"} <= set(sited)
        for name in sited:
            with pytest.raises(RuntimeError, match=f"rank 0 is at call {name} of 0:1, rank 1 at {name} of 1:1"):
                getattr(torch.ops.antiphon, name)(x, *given.get(name, (group,)), site=f"{name} of {comm.rank}:1")


@check
def operands_lie_in_comm_buffers_where_that_is_asked_for(comm: Comm, device: Device) -> None:
    with Group(comm) as group, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        found: list[bool] = []
        known = comm_buffers.is_comm_buffer
        patch.setattr(ops, "is_comm_buffer", lambda comm, x: found.append(known(comm, x)) or found[-1])

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            y = (x + 1).relu()
            return summed(summed(y).sin() * 3) * 2, y

        def one(x: Tensor) -> Tensor:
            return summed((x + 1).relu()) * 2

        x = torch.randn(64, 512)
        for program, options, where in [
            (one, {"realize": "always"}, True),
            (one, {}, False),  # nowhere it was measured to be faster
            (one, {"realize": "never"}, False),
            (both, {"realize": "always"}, True),
        ]:
            found.clear()
            torch._dynamo.reset()
            compiled = lowered(program, **options)  # type: ignore[arg-type]
            first, second = compiled(x), compiled(x * 2)
            close(first, program(x), torch.float32)
            close(second, program(x * 2), torch.float32)
            assert found and found[-1] == where, (program, options, found)
        assert comm_buffers.arena_bytes(ops._group(group)) == 1 << 20


@check
def a_comm_buffer_has_room_for_the_largest_of_bounded_sizes(comm: Comm, device: Device) -> None:
    """D5."""
    with Group(comm) as group, torch.no_grad():
        program = lowered(lambda x: summed(x + 1) * 2, realize="always")
        for rows in 6, 512, 3:
            x = torch.randn(rows, 1024)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
            close(program(x), summed(x + 1) * 2, torch.float32)
        assert comm_buffers.arena_bytes(ops._group(group)) == 512 * 1024 * 4


@check
def a_proof_that_fails_changes_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(antiphon.lowering._pass, "_unproved", lambda *_: ["it is somebody else's"])
        mine = tensors(comm.rank, torch.float32)
        with pytest.warns(UserWarning, match="left as it was: it is somebody else's .it is in /"):
            found = lowered(rms_norm, strict=False)(*mine)
        close(found, rms_norm(*mine), torch.float32)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="left as it was"):
            lowered(rms_norm)(*mine)


@check
def an_exporter_that_fails_changes_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(antiphon.lowering._pass, "export", lambda *_: 1 / 0)
        mine = tensors(comm.rank, torch.float32)
        with pytest.warns(UserWarning, match="a graph is left as it was: division by zero$"):
            close(lowered(rms_norm, strict=False)(*mine), rms_norm(*mine), torch.float32)


@check
def sizes_that_do_not_follow_leave_the_rest(comm: Comm, device: Device) -> None:
    """Torch knows more of sizes than their polynomials say: of rows that are grouped and taken apart, or shared out."""

    def grouped(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        pairs = x.reshape(-1, 2, x.shape[-1])
        return *rms_norm(x, w0, residual, w), (pairs * 2).reshape(x.shape)

    def halved(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        part = collectives.reduce_scatter_tensor(x @ w0, "sum", 1, torch.distributed.group.WORLD)
        whole = collectives.all_gather_tensor(part, 1, torch.distributed.group.WORLD)
        return *rms_norm(x, w0, residual, w), whole

    with Group(comm), torch.no_grad():
        for model in grouped, halved:
            torch._dynamo.reset()
            program = lowered(model, dynamic=True)
            for rows in 6, 4, 18:
                mine = with_any_rows(tensors(comm.rank, torch.float32, rows), True)
                close(program(*mine), model(*mine), torch.float32)
            assert "fuse" in last_rules(), str(antiphon.lowering.reports()[-1])


@check
def a_group_of_one_rank_has_no_calls(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        groups = [torch.distributed.new_group([rank]) for rank in range(comm.world_size)]
        own = groups[comm.rank]
        antiphon.lowering.attach(own)

        def model(x: Tensor) -> Tensor:
            return collectives.all_reduce(x * 2, "sum", own) + 1

        x = torch.ones(4)
        close(lowered(model)(x), x * 2 + 1, torch.float32)
        assert antiphon.lowering.reports()[-1].calls == (1, 0) and last_rules() == ("world_of_one",)
        antiphon.lowering.detach(own)


@check
def a_second_wait_waits_for_nothing(comm: Comm, device: Device) -> None:
    def twice(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found = rms_norm(x, w0, residual, w)
        started = torch.ops._c10d_functional.all_reduce(x, "sum", torch.distributed.group.WORLD.group_name)
        wait = torch.ops._c10d_functional.wait_tensor
        return *found, wait(started) + 1, wait(started) * 2

    with Group(comm), torch.no_grad():
        mine = tensors(comm.rank, torch.float32)
        close(lowered(twice)(*mine), twice(*mine), torch.float32)
        assert "fuse" in last_rules()


@check
def operators_of_others_are_spelled(comm: Comm, device: Device) -> None:
    library = torch.library.Library("lowering_test", "DEF")
    library.define("all_reduce(Tensor x, str group) -> Tensor")
    for key in "CPU", "Meta":
        library.impl("all_reduce", lambda x, group: summed(x) if x.device.type == "cpu" else x.clone(), key)

    def model(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        total = torch.ops.lowering_test.all_reduce(x @ w0, torch.distributed.group.WORLD.group_name)
        return F.rms_norm(total + residual, (HIDDEN,), w, 1e-6)

    known = list(antiphon.lowering._pass._spellings)
    with Group(comm), torch.no_grad():
        mine, count = tensors(comm.rank, torch.float32), len(antiphon.lowering.reports())
        close(lowered(model)(*mine), model(*mine), torch.float32)
        assert len(antiphon.lowering.reports()) == count
        torch._dynamo.reset()
        antiphon.lowering.spell("lowering_test::all_reduce", "all_reduce", x=0, group=1)
        close(lowered(model)(*mine), model(*mine), torch.float32)
        assert "fuse" in last_rules()
    antiphon.lowering._pass._spellings[:] = known


@check
def the_options_of_a_program_come_first(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        found: list[Options] = []
        patch.setattr(antiphon.lowering.Pass, "__call__", lambda self, graph: found.append(self.options))
        patch.setattr(antiphon.lowering.Pass, "uuid", lambda self: None)
        own = antiphon.lowering.Pass(Options(merge=False))
        antiphon.lowering.enable(fuse=False)
        try:
            for options, wanted in (
                ({}, Options(fuse=False)),
                ({"realize": "never"}, Options(realize="never")),
                ({"post_grad_custom_post_pass": own}, Options(merge=False)),
                ({"post_grad_custom_post_pass": own, "strict": True}, Options(strict=True)),
            ):
                torch._dynamo.reset()
                found.clear()
                program = torch.compile(lambda x: summed(x) + 1, backend="antiphon", options=options)
                close(program(torch.ones(4)), torch.full((4,), comm.world_size + 1.0), torch.float32)
                assert found == [wanted], (options, found)
        finally:
            antiphon.lowering.disable()


@check
def a_pass_that_is_there_runs_first(comm: Comm, device: Device) -> None:
    seen: list[list[str]] = []

    def theirs(graph: torch.fx.Graph) -> None:
        seen.append([str(node.target) for node in graph.nodes])

    with Group(comm), torch.no_grad(), torch._inductor.config.patch(post_grad_custom_post_pass=theirs):
        antiphon.lowering.enable(strict=True)
        try:
            mine = tensors(comm.rank, torch.float32)
            here = torch._inductor.config.post_grad_custom_post_pass
            close(interpreted(rms_norm, here)(*mine), rms_norm(*mine), torch.float32)
        finally:
            antiphon.lowering.disable()
        assert torch._inductor.config.post_grad_custom_post_pass is theirs
        assert len(seen) == 1 and any("all_reduce" in name for name in seen[0]) and not any("fused" in name for name in seen[0])


@check
def the_environment_logs_reports_and_insists_on_proofs(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        mine, records = tensors(comm.rank, torch.float32), list[logging.LogRecord]()
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("antiphon.lowering").addHandler(handler)
        for word, levels in (("", []), ("log", [logging.WARNING])):
            torch._dynamo.reset()
            records.clear()
            patch.setenv("ANTIPHON_LOWERING", word)
            close(lowered(rms_norm)(*mine), rms_norm(*mine), torch.float32)
            assert [record.levelno for record in records] == levels
        logging.getLogger("antiphon.lowering").removeHandler(handler)
        patch.setattr(antiphon.lowering._pass, "_unproved", lambda *_: ["it is somebody else's"])
        patch.setenv("ANTIPHON_LOWERING", "strict")
        torch._dynamo.reset()
        with pytest.raises(Exception, match="left as it was"):
            lowered(rms_norm, strict=False)(*mine)


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
    with pytest.raises(ValueError, match="realize=True: known are measured, always, never"):
        Options(realize=True)  # type: ignore[arg-type]
    for tables in ("none.json", 5):
        with pytest.raises(ValueError, match=f"tables={tables!r}: the path of a file of antiphon tune"):
            Options(tables=tables)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups=5: a tuple of the names of groups"):
        Options(groups=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="antiphon.lowering has no options foo: known are numerics, fuse"):
        antiphon.lowering.enable(foo=1)
    with pytest.raises(ValueError, match="options are an antiphon.lowering.Options, not {'fuse': False}"):
        antiphon.lowering.Pass({"fuse": False})  # type: ignore[arg-type]
    for options, text in (({"foo": 1}, "options foo are neither inductor's nor antiphon's"), ({"realize": 1}, "realize=1: known are")):
        with pytest.raises(Exception, match=text) as raised:
            torch.compile(lambda x: x + 1, backend="antiphon", options=options)(torch.ones(1))
        assert isinstance(raised.value, ValueError) or "ValueError" in str(raised.value)
    with pytest.raises(ValueError, match="overlap=1: True or False"):
        Options(overlap=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a tuple of the names of groups"):
        Options(groups="tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known are off, log, strict"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_LOWERING", "on")
        antiphon.lowering._options.mode()
    for arguments, roles, text in (
        (("mine.add.default", ""), {}, "words as in spellings.txt"),
        (("mine", "binary add"), {}, "namespace::name"),
        (("mine::add", "all_reduce"), {"x": 0}, "no group"),
        (("mine::add", "all_reduce"), {"x": 0, "group": -1}, "group=-1: the place of an argument"),
        (("mine::add", "sum"), {"x": 0}, "all_reduce, all_gather"),
    ):
        with pytest.raises(ValueError, match=text):
            antiphon.lowering.spell(*arguments, **roles)


def test_what_is_no_program_is_told() -> None:
    request = json.dumps({"world": {}, "options": {}})
    with pytest.raises(ValueError, match="line 1 column 1"):
        _core.Lowering(b"[", request)
    with pytest.raises(ValueError, match="unknown field"):
        _core.Lowering(b"{}", json.dumps({"world": {}, "options": {}, "more": 1}))
    program = b'{"nodes": [{"name": "output", "op": "output", "args": []}]}'
    lowering = _core.Lowering(program, request)
    assert json.loads(lowering.answer())["edits"]["new"] == []
    assert lowering.check(program) == []
    assert lowering.second_opinion(program) == (True, "the programs were run, and agree")
    with pytest.raises(ValueError, match="line 1 column 1"):
        lowering.check(b"[")


def test_a_second_opinion_runs_both_programs() -> None:
    def program(operator: str) -> bytes:
        tensor = {"dtype": "float32", "shape": ["s0", 4]}
        given = [{"name": name, "op": "placeholder", "outs": [{"name": name, **tensor}]} for name in "xy"]
        args = [{"value": "x"}, {"value": "y"}]
        call = {"name": "z", "op": "call_function", "target": operator, "args": args, "outs": [{"name": "z", **tensor}]}
        output = {"name": "output", "op": "output", "args": [{"value": "z"}]}
        syms = [{"name": "s0", "min": 2, "max": 1 << 20, "hint": 1 << 19}]
        return json.dumps({"syms": syms, "nodes": [*given, call, output]}).encode()

    lowering = _core.Lowering(program("aten.add.Tensor"), json.dumps({"world": {}, "options": {}}))
    assert lowering.second_opinion(program("aten.add.Tensor")) == (True, "the programs were run, and agree")
    agrees, text = lowering.second_opinion(program("aten.sub.Tensor"))
    assert not agrees and text.startswith("output 0 (z), rank 0, element "), text
    assert "another meaning" in lowering.check(program("aten.sub.Tensor"))[0]


def test_what_inductor_keeps_depends_on_the_options() -> None:
    assert antiphon.lowering.Pass(Options()).uuid() != antiphon.lowering.Pass(Options(merge=False)).uuid()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert antiphon.lowering.Pass(Options()).uuid() == antiphon.lowering.Pass().uuid()
