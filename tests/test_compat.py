"""``antiphon.compat``: our modules under the names of others."""

import importlib
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import antiphon.comm
from antiphon import compat


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in "ANTIPHON_COMPAT", "PYTHONPATH":
        if variable in os.environ:
            monkeypatch.setenv(variable, os.environ[variable])  # to be put back
    before = sys.modules.keys() - {"flashinfer"}
    yield
    compat.uninstall()
    assert not {name for name in sys.modules.keys() - before if name.split(".")[0] == "flashinfer"}


def python(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process that must succeed; ``environment`` is added to this one's."""
    done = output_of(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done


def output_of(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})


def run(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return output_of("-m", "antiphon.compat", "run", *arguments, **environment)


def file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the peer itself, on this process's path."""
    file(tmp_path / "flashinfer/__init__.py", "version = 'real'")
    file(tmp_path / "flashinfer/comm/__init__.py", "real = True")
    file(tmp_path / "flashinfer/comm/mapping.py", "class Mapping: pass")
    file(tmp_path / "flashinfer/norm.py", "real = True")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# In one process.


def test_the_peers_name_is_our_module() -> None:
    compat.install("flashinfer.comm")
    import flashinfer.comm
    import flashinfer.comm.cuda_ipc as cuda_ipc
    from flashinfer.comm import Mapping
    from flashinfer.comm.dlpack_utils import pack_strided_memory

    assert flashinfer.comm is antiphon.comm and Mapping is antiphon.comm.Mapping
    assert cuda_ipc.create_shared_buffer is antiphon.comm.create_shared_buffer
    assert pack_strided_memory is antiphon.comm.pack_strided_memory


def test_our_module_keeps_its_own_name() -> None:
    compat.install()
    importlib.import_module("flashinfer.comm.mapping")
    for name in "antiphon.comm", "antiphon.comm.mapping":
        module = sys.modules[name]
        assert module.__name__ == name and module.__spec__ is not None and module.__spec__.name == name


def test_what_is_not_served_says_so_and_lists_what_is() -> None:
    compat.install()
    with pytest.raises(ImportError, match="Antiphon does not serve 'UlyssesCommunicator' .* it serves .* more$"):
        from flashinfer.comm import UlyssesCommunicator  # noqa: F401
    with pytest.raises(ImportError, match="not serve the module flashinfer.comm.nvshmem yet; it serves .*flashinfer.comm"):
        import flashinfer.comm.nvshmem
    import flashinfer.comm

    assert not hasattr(flashinfer.comm, "UlyssesCommunicator")
    with pytest.raises(ImportError, match="flashinfer.rope"):
        import flashinfer.rope  # noqa: F401


def test_every_module_that_scripts_name_is_served() -> None:
    torch = pytest.importorskip("torch")
    compat.install()
    import flashinfer.comm as comm
    from flashinfer.comm.allreduce import allreduce_fusion
    from flashinfer.comm.cuda_ipc import CudaRTLibrary
    from flashinfer.comm.mnnvl import MnnvlMemory, TorchDistBackend
    from flashinfer.comm.workspace_base import AllReduceFusionWorkspace
    from flashinfer.utils import get_compute_capability

    assert allreduce_fusion is comm.allreduce_fusion and CudaRTLibrary is comm.CudaRTLibrary
    assert issubclass(comm.TRTLLMAllReduceFusionWorkspace, AllReduceFusionWorkspace)
    assert comm.trtllm_ar.LamportTokenNumThreshold == 16 and comm.trtllm_ar.MAX_COMM_SIZE == 2145386496
    assert not MnnvlMemory.supports_mnnvl()
    with pytest.raises(RuntimeError, match="init_process_group"):
        TorchDistBackend()
    with pytest.raises(ValueError, match="cpu is no CUDA device"):
        get_compute_capability(torch.device("cpu"))


def test_norms_to_compare_with() -> None:
    torch = pytest.importorskip("torch")
    compat.install()
    from flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm

    x, residual = torch.tensor([[1.0, 2.0, 3.0, 5.0]]), torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    weight = torch.tensor([0.5, 1.0, 2.0, -1.0])
    total = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    of_x, of_total = x / (39 / 4 + 1) ** 0.5, total / (84 / 4 + 1) ** 0.5  # eps is 1
    out = torch.empty_like(x)
    assert rmsnorm(x, weight, 1.0, out=out) is out
    torch.testing.assert_close(out, of_x * weight)
    torch.testing.assert_close(gemma_rmsnorm(x, weight, eps=1.0), of_x * (1 + weight))
    for call, factor in (fused_add_rmsnorm, weight), (gemma_fused_add_rmsnorm, 1 + weight):
        a, b = x.clone(), residual.clone()
        call(a, b, weight, eps=1.0)
        torch.testing.assert_close(a, of_total * factor)
        assert torch.equal(b, total)


def test_what_is_beside_an_installed_peer_is_the_peers(real: Path) -> None:
    file(real / "flashinfer/utils.py", "real = True")
    compat.install()
    assert importlib.import_module("flashinfer.utils").real
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


def test_unknown_peers_are_refused() -> None:
    for call in compat.install, compat.uninstall:
        with pytest.raises(ValueError, match="no peer 'flashinfer' is served; served are deep_ep, deep_ep_cpp, flashinfer.comm, "):
            call("flashinfer")


def test_uninstall_leaves_nothing() -> None:
    finders = list(sys.meta_path)
    compat.install()
    compat.install()
    importlib.import_module("flashinfer.comm.mapping")
    compat.uninstall()
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError):
        import flashinfer  # noqa: F401


def test_an_installed_peer_is_hidden_and_comes_back(real: Path) -> None:
    for imported_before in True, False:
        if imported_before:
            from flashinfer.comm.mapping import Mapping as theirs
        compat.install()
        import flashinfer
        from flashinfer import comm
        from flashinfer.comm.mapping import Mapping

        assert comm is antiphon.comm and Mapping is antiphon.comm.Mapping
        assert flashinfer.version == "real" and importlib.import_module("flashinfer.norm").real
        compat.uninstall()
        from flashinfer import comm
        from flashinfer.comm.mapping import Mapping

        assert comm.real and comm is sys.modules["flashinfer.comm"]
        assert Mapping is theirs or not imported_before
        for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
            del sys.modules[name]


# In children.

SERVED = "import flashinfer.comm; assert flashinfer.comm.__name__ == 'antiphon.comm'"


def test_children_are_served_if_asked_for() -> None:
    compat.install()
    assert output_of("-c", SERVED).returncode == 1
    compat.install(children=True)
    compat.install(children=True)
    python("-c", SERVED)
    python("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SERVED!r}], check=True)")
    compat.uninstall()
    assert output_of("-c", SERVED).returncode == 1


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in None, "/somewhere", f"/somewhere{os.pathsep}/else":
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path:
            monkeypatch.setenv("PYTHONPATH", path)
        before = dict(os.environ)
        compat.install(children=True)
        assert os.environ["ANTIPHON_COMPAT"] == ",".join(sorted(compat.PEERS.keys() - compat.BY_NAME))
        compat.uninstall()
        assert dict(os.environ) == before


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    file(tmp_path / "sitecustomize.py", "import os; os.environ['OTHER'] = __file__")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    script = "import os, sitecustomize, flashinfer.comm; print(os.environ['OTHER'], sitecustomize.__file__)"
    done = run("-c", script, PYTHONPATH=path)
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2, done.stderr


# The command.


def test_run_looks_to_the_script_as_python_does(tmp_path: Path) -> None:
    file(tmp_path / "beside.py", "")
    script = file(
        tmp_path / "script.py",
        """
        import sys, __main__, beside
        print(sys.argv, sys.path, __name__, __file__, __spec__, __main__.__file__)
        """,
    )
    arguments = [script, "-x", "--peer", "a b"]
    assert run(*arguments).stdout == python(*arguments).stdout


def test_run_serves_modules_code_and_options_of_python(tmp_path: Path) -> None:
    file(tmp_path / "package/__main__.py", f"import sys\n{SERVED}\nprint(sys.argv[1:], sys.flags.optimize)")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    assert run("-O", "-m", "package", "-m", "x", PYTHONPATH=path).stdout == "['-m', 'x'] 1\n"
    assert run("--peer", "flashinfer.comm", "--peer=flashinfer.comm", "-c", SERVED).returncode == 0


def test_run_passes_on_how_the_script_ends(tmp_path: Path) -> None:
    assert run("-c", "raise SystemExit(7)").returncode == 7
    script = file(tmp_path / "script.py", "def f():\n    1 / 0\nf()\n")
    for done in run(script), output_of(script):
        assert done.returncode == 1
        assert done.stderr.startswith("Traceback") and f'File "{script}", line 2, in f' in done.stderr
    assert run(script).stderr == output_of(script).stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the only command is `run`"),
        (["go"], "the only command is `run`"),
        (["run"], "no program to run"),
        (["run", "--peer", "deep_sea", "x.py"], "no peer 'deep_sea' is served"),
        (["run", "--peer"], "no peer '' is served"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], text: str) -> None:
    done = output_of("-m", "antiphon.compat", *arguments)
    assert done.returncode == 2 and text in done.stderr and done.stderr.startswith("usage:")


def test_the_command_explains_itself() -> None:
    for arguments in ["--help"], ["run", "-h"]:
        assert python("-m", "antiphon.compat", *arguments).stdout.startswith("usage: python -m antiphon.compat run")


# A script as FlashInfer's users write it, unchanged.

SCRIPT = """
    import ctypes, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import flashinfer.comm as comm
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import TorchDistBackend

    def worker(rank, world_size, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        group = dist.group.WORLD
        assert Mapping(world_size=world_size, rank=rank, tp_size=world_size).tp_group == [0, 1]
        pointers = comm.create_shared_buffer(4 * world_size, group=group)
        value = ctypes.c_float(rank + 1)
        for pointer in pointers:
            ctypes.memmove(pointer + 4 * rank, ctypes.byref(value), 4)
        dist.barrier(group)
        seen = comm.pack_strided_memory(pointers[rank], 4, 4, world_size, torch.float32, -1)
        assert seen.flatten().tolist() == [1.0, 2.0]
        comm.free_shared_buffer(pointers, group=group)

        sizes = dict(world_size=world_size, rank=rank, max_token_num=8, hidden_dim=64, dtype=torch.float32)
        workspace = comm.create_allreduce_fusion_workspace(backend="trtllm", comm_backend=TorchDistBackend(), **sizes)
        pattern = comm.AllReduceFusionPattern.kAllReduce
        total = comm.allreduce_fusion(input=torch.ones(2, 64), workspace=workspace, launch_with_pdl=True, pattern=pattern)
        assert total.eq(2).all()
        workspace.destroy()
        handles, tensor = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, world_size, 8, 64, group=group)
        comm.trtllm_destroy_ipc_workspace_for_all_reduce(handles, group=group)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(worker, args=(2, sys.argv[1]), nprocs=2)
        print("all ranks agree")
"""


def test_a_script_of_spawned_ranks_runs_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(file(tmp_path / "script.py", SCRIPT), tmp_path, OMP_NUM_THREADS="1")
    assert done.stdout == "all ranks agree\n", done.stderr


class World:
    """Rank 1 of a communicator of mpi4py, of three ranks that all pass the same."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        self.ranks, self.barriers = ranks, 0

    def Get_rank(self) -> int:
        return self.ranks.index(1)

    def Get_size(self) -> int:
        return len(self.ranks)

    def allgather(self, data: object) -> list[object]:
        return [data] * len(self.ranks)

    def bcast(self, data: object, root: int) -> object:
        return data, root

    def Barrier(self) -> None:
        self.barriers += 1

    def Split(self, color: int, key: int) -> "World":
        return World((1, 2)) if (color, key) == (1, 5) else World((1,))


def test_a_group_of_mpi_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from antiphon.comm.comm_backend import MPIBackend

    backend = MPIBackend()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ImportError):
        backend.Get_rank()
    world = World()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(COMM_WORLD=world))
    assert (backend.Get_rank(), backend.Get_size()) == (1, 3)
    assert backend.allgather("x") == ("x", "x", "x") and backend.bcast("x", 2) == ("x", 2)
    backend.barrier()
    assert world.barriers == 1
    part = backend.Split(1, 5)
    assert (part.Get_rank(), part.Get_size()) == (0, 2)


def test_backends_of_groups_are_found_where_flashinfer_has_them(tmp_path: Path) -> None:
    script = file(
        tmp_path / "script.py",
        """
        from flashinfer.comm import comm_backend, mnnvl
        from flashinfer.comm.abstractions import CommBackend
        assert comm_backend.TorchDistBackend is mnnvl.TorchDistBackend
        assert comm_backend._split_partition([(1, 0, 0), (0, 5, 1), (0, 2, 2)]) == [[2, 1], [0]]
        assert isinstance(comm_backend.MPIBackend(), CommBackend) and not isinstance(object(), CommBackend)
        """,
    )
    assert run(script).returncode == 0


def test_modules_that_no_other_imports_are_served_in_every_form() -> None:
    for form in "from flashinfer.comm import fd_exchange", "import flashinfer.comm.fd_exchange as fd_exchange":
        python("-c", f"from antiphon import compat; compat.install(); {form}; assert callable(fd_exchange.exchange_fds)")
