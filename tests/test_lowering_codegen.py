"""The code that inductor makes of collectives. Eight defects of its own lowering, D1 to D8, and a ninth: in torch as it is, and not
with our pass. The order of overlapped collectives.

Programs are compiled for a group of two ranks that are not there, up to the Python code that inductor would run. Inductor places
comm buffers on GPUs alone, so that their allocation is replaced by a line which names the group. What the programs compute is
tested on ranks, in test_lowering.py.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import antiphon
import antiphon.lowering
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from antiphon.lowering._place import storage
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.wrapper import AllocateLine
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode
from torch.testing._internal.distributed.fake_pg import FakeStore

#: Two groups of the same ranks. The second one is not attached, so that its calls stay torch's.
FIRST, SECOND = "0", "1"
X = torch.ones(4, 8)


class Compiled(Exception):
    """Instead of C++ that takes seconds to compile."""


@pytest.fixture(scope="module", autouse=True)
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.new_group([0, 1])
    alone = antiphon.init(rank=0, world_size=1, path=str(tmp_path_factory.mktemp("alone") / "socket"))
    with pytest.MonkeyPatch.context() as patch, alone:
        patch.setattr(antiphon, "init", lambda **_: alone)
        patch.setattr(AllocateLine, "_codegen_comm_buffer", allocate)
        patch.setattr("torch.distributed._symmetric_memory._group_name_to_store", {FIRST: None, SECOND: None})
        antiphon.lowering.attach()
        yield
        antiphon.lowering.detach()
    dist.destroy_process_group()


def allocate(line: AllocateLine, code: SimpleNamespace) -> None:
    layout = line.node.get_output_spec()
    shape = line.wrapper.codegen_shape_tuple(tuple(line.node.get_size()))
    code.writeline(f"{line.node.get_name()} = comm_buffer({shape}, {layout.group_name!r})")


def code_of(program: Callable[..., object], x: Tensor, backend: str, dynamic: bool, **options: object) -> str:
    """What inductor would run."""
    found: list[str] = []

    def save(code: str) -> None:
        found.append(code[code.index("def call(") :].partition("runner =")[0])
        raise Compiled

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), config.patch(force_disable_caches=True):
        patch.setattr(GraphLowering, "save_output_code", staticmethod(save))
        with pytest.raises(Exception, match="Compiled"):
            torch.compile(program, backend=backend, dynamic=dynamic, options=options)(x)
    return found[0]


def stock(program: Callable[..., object], x: Tensor = X, dynamic: bool = False, **options: object) -> str:
    """By torch, with its own choice of one-shot all-reduces."""
    return code_of(program, x, "inductor", dynamic, **{"_collective.auto_select": True} | options)


def ours(program: Callable[..., object], x: Tensor = X, dynamic: bool = False, **options: object) -> str:
    """By our pass, with comm buffers wherever possible."""
    return code_of(program, x, "antiphon", dynamic, **{"strict": True, "realize": "always"} | options)


def summed(x: Tensor, op: str = "sum", group: str = FIRST) -> Tensor:
    return collectives.all_reduce(x, op, group)


def waits(code: str) -> int:
    return code.count("wait_tensor.default(")



def comm_buffers(code: str) -> list[str]:
    """The names of our comm buffers."""
    return [memory for _, memory in _memories(code)]


def _memories(code: str) -> list[tuple[str, str]]:
    calls = re.findall(r"(buf\d+) = torch\.ops\.antiphon\._ordered_comm_buffer", code)
    return [(call, re.search(rf"(buf\d+) = {call}\[1\]", code)[1]) for call in calls]  # type: ignore[index]


def test_d1_the_second_of_two_calls_is_waited_for() -> None:
    def sum_and_average(x: Tensor) -> Tensor:
        return summed(summed(x + 1), "avg", SECOND) * 2

    def of_one_group(x: Tensor) -> Tensor:
        return summed(summed(x + 1), "avg") * 2

    code = stock(of_one_group)
    assert "one_shot_all_reduce" in code and "all_reduce_.default(buf2, 'avg'" in code
    assert waits(code) == 0  # the second reads what is in flight
    code = ours(sum_and_average)
    assert "antiphon._ordered_all_reduce.default" in code and "'avg', '1')" in code
    assert waits(code) == 1


def test_d2_sizes_may_be_symbols() -> None:
    def program(x: Tensor) -> Tensor:
        return summed(x + 1)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot determine truth value of Relational"):
        torch.compile(program, dynamic=True, options={"_collective.auto_select": True})(X)
    assert "antiphon._ordered_all_reduce.default" in ours(program, dynamic=True)


def test_d3_what_is_returned_is_no_comm_buffer() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return summed(y), y

    code = stock(program)
    assert "buf0 = comm_buffer((4, 8), '0')" in code and re.search(r"return \(buf\d+, buf0, \)", code)
    assert comm_buffers(ours(program)) == []
    assert "it is returned" in str(antiphon.lowering.reports()[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_d4_other_dtypes_are_served(dtype: torch.dtype) -> None:
    def program(x: Tensor) -> Tensor:
        return summed(x + 1) * 2

    # A kernel that takes float32 and bfloat16 alone.
    assert "one_shot_all_reduce" in stock(program, X.to(dtype))
    code = ours(program, X.to(dtype))
    assert "antiphon._ordered_all_reduce.default" in code and "one_shot" not in code


def test_d5_a_comm_buffer_has_a_bound() -> None:
    def one_shot(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(x + 1, "sum", FIRST)  # type: ignore[no-any-return]

    def program(x: Tensor) -> Tensor:
        return summed(x + 1) * 2

    assert re.search(r"comm_buffer\(\(s\d+, s\d+\), '0'\)", stock(one_shot, dynamic=True))
    assert comm_buffers(ours(program, dynamic=True)) == []
    assert "has no bound" in str(antiphon.lowering.reports()[-1])
    bounded = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(bounded, 0, min=2, max=64)
    code = ours(program, bounded)
    assert len(comm_buffers(code)) == 1
    assert f"torch.float32, 0, {64 * 8 * 4}," in code  # for the largest


def test_d6_planned_memory_leaves_comm_buffers_alone() -> None:
    def program(x: Tensor) -> Tensor:
        return summed((x + 1).relu()) * 2

    code = stock(program, memory_planning=True)
    assert "comm_buffer" not in code and "buf0 = alloc_from_pool" in code
    code = ours(program, memory_planning=True)
    (buffer,) = comm_buffers(code)
    assert f"_ordered_all_reduce.default({ticket(code)}, reinterpret_tensor({buffer}, " in code


def ticket(code: str) -> str:
    """Of the first comm buffer."""
    return re.search(rf"(buf\d+) = {_memories(code)[0][0]}\[0\]", code)[1]  # type: ignore[index]


def test_d7_no_wait_follows_a_synchronous_call() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1
        return summed(y) * y

    code = stock(program)
    assert "one_shot_all_reduce" in code and waits(code) == 1
    assert waits(ours(program)) == 0


def three(x: Tensor, other: str = SECOND) -> Tensor:
    return summed(summed(summed(x + 1) + 1, group=other) + 1) * 2


def test_d8_buffers_are_shared_by_groups_and_shapes(tmp_path: Path) -> None:
    code = stock(three)
    assert code.count("= comm_buffer((4, 8), '0')") == 1 and code.count("= comm_buffer((4, 8), '1')") == 1

    # With our pass a heap is a communicator's. Programs of other frameworks tell the heap of a group.
    def shapes(x: Tensor) -> Tensor:
        return summed(summed(summed(x + 1).sum(0) + 1)[:4] * 3) * 2

    code = ours(shapes)
    places = re.findall(r"_ordered_comm_buffer.default\(\w+, '0', (\[.*?\]), torch.float32, (\d+),", code)
    assert [shape for shape, _ in places] == ["[1, 4, 8]", "[1, 8]", "[1, 4]"]
    assert len({offset for _, offset in places}) < 3

    calls = "".join(
        f"%a{at}: f32[65536] = binary(%{'x' if at == 0 else f's{at - 1}'}) op=add scalar=1.0\n"
        f"%s{at}: f32[65536] = sync(%a{at}) prim=all_reduce group={group} red=sum\n"
        for at, group in enumerate(["a", "b", "a"])
    )
    text = f"group a size 2 domain d\ngroup b size 2 domain d\n%x: f32[65536] = input()\n{calls}return %s2\n"
    (tmp_path / "calls.txt").write_text(text)
    command = [sys.executable, "-m", "antiphon", "lower", str(tmp_path / "calls.txt"), "--realize", "always", "--emit", "plan"]
    slots = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["slots"]
    assert [slot["domain"] for slot in slots] == ["d"] * 3 and len({slot["offset"] for slot in slots}) < 3


def test_d9_what_computes_a_comm_buffer_writes_into_it() -> None:
    """A defect found here: a kernel that may write its operand's memory is given that of the comm buffer instead, so that it reads
    what nobody has written."""
    kernel = re.search(r"buf3 = comm_buffer\(.*\n\s*(cpp_fused\w+)\((.*)\)", stock(three))
    assert kernel is not None and kernel[2] == "buf3"
    code = ours(lambda x: three(x, FIRST))
    first, second, _ = comm_buffers(code)
    kernel = re.search(rf"cpp_fused\w+\((buf\d+), {second}\)", code)
    assert kernel is not None and kernel[1] not in (first, second)


def test_a_view_lies_in_its_operands_storage() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.reshape.default, (x, [8]))
    sine = graph.call_function(torch.ops.aten.sin.default, (view,))
    assert storage(view) is x
    assert storage(sine) is sine


WEIGHT = torch.ones(512, 512)


def overlapped(x: Tensor) -> tuple[Tensor, Tensor]:
    first = summed(x * 2)
    product = x @ WEIGHT
    second = summed(x.sin())
    return first + product @ WEIGHT, second


def steps(code: str) -> str:
    """The starts (s), waits (w) and products (p) of code, in order."""
    found = re.findall(r"\.(all_reduce_|wait_tensor)\.default\(|kernels\.(mm|addmm)\(", code)
    return "".join({"all_reduce_": "s", "wait_tensor": "w"}.get(call, "p") for call, _ in found)


def waits_first(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A scheduler's order in which waits come as early as what they depend on allows."""
    here = {buffer for node in nodes for buffer in node.get_buffer_names()}
    order: list[BaseSchedulerNode] = []
    while left := [node for node in nodes if node not in order]:
        done = {buffer for node in order for buffer in node.get_buffer_names()}
        ready = [node for node in left if {each.name for each in node.unmet_dependencies} & here <= done]
        order.append(next((node for node in ready if "wait_tensor" in str(node.node)), ready[0]))
    return order


def test_inductor_keeps_the_order_of_an_overlap() -> None:
    x = torch.ones(64, 512)
    hostile = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": [waits_first]}
    assert steps(code_of(overlapped, x, "inductor", False, **hostile)) == "sswwpp"
    code = ours(overlapped, x, overlap=True, **hostile)
    assert "schedule" in antiphon.lowering.reports()[-1].rules
    assert steps(code) == "sspwpw"


def test_inductors_own_passes_run_after_ours() -> None:
    seen: list[str] = []

    def spy(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        seen.extend(str(node.node) for node in nodes)
        return nodes

    patches = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": [spy]}
    ours(lambda x: summed(x + 1) * 2, **patches)
    assert any("antiphon._ordered_all_reduce" in node for node in seen)


def test_modes_are_inductors() -> None:
    found: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda module, inputs, config_patches: found.update(config_patches) or module.forward  # noqa: E731
        patch.setattr(antiphon.lowering._inductor, "compile_fx", keep)
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="antiphon", mode="reduce-overhead")(X)
    assert found["triton.cudagraphs"] is True
    assert isinstance(found["post_grad_custom_post_pass"], antiphon.lowering.Pass)
