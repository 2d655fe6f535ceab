"""The names of ``mscclpp`` by which scripts execute plans, on host memory and on GPUs.

    import antiphon.mscclpp as mscclpp  # or, unchanged under antiphon.compat, import mscclpp

    group = mscclpp.CommGroup(torch_group=dist.group.WORLD)
    executor = mscclpp.Executor(group.communicator)
    plan = mscclpp.ExecutionPlan("two_shot.json", group.my_rank)
    address, size = x.data_ptr(), x.nbytes
    executor.execute(group.my_rank, address, address, size, size, mscclpp.DataType.float32, plan, stream=0)

Signatures, numbers and results are those of MSCCL++ 0.9.0. Plans are proved before they run, and have the promises of
:meth:`antiphon.Communicator.load_plan`. ``mscclpp.language`` is :mod:`antiphon.language`. What else MSCCL++ has, such as channels between ranks that
kernels of one's own use, can be imported; to use it raises ``NotImplementedError``, which says what there is instead.

New programs have :meth:`antiphon.Communicator.load_plan`, whose plans take arrays.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from antiphon._names import listed
from antiphon.mscclpp._absent import Absent
from antiphon.mscclpp._algorithm import Algorithm, DslCompiler, compile
from antiphon.mscclpp._buffers import GpuBuffer, RawGpuBuffer
from antiphon.mscclpp._enums import CollectiveBufferMode, DataType, GpuBufferGranularity, PacketType, ReduceOp
from antiphon.mscclpp._executor import ExecutionPlan, Executor
from antiphon.mscclpp._group import Bootstrap, CommGroup

__all__ = [
    "Algorithm",
    "Bootstrap",
    "CollectiveBufferMode",
    "CommGroup",
    "DataType",
    "DslCompiler",
    "ExecutionPlan",
    "Executor",
    "GpuBuffer",
    "GpuBufferGranularity",
    "PacketType",
    "RawGpuBuffer",
    "ReduceOp",
    "__version__",
    "compile",
    "is_bulk_supported",
    "is_nvls_supported",
    "version",
]

#: The version of MSCCL++ whose names these are.
__version__ = "0.9.0"
version = {"version": __version__, "git_commit": ""}


def is_nvls_supported() -> bool:
    """No: NVLink multicast is not used. Switch channels of plans work by loads and stores."""
    return False


def is_bulk_supported() -> bool:
    """No: kernels have no bulk copies."""
    return False


_CHANNELS = "kernels of one's own do not communicate: write the algorithm in mscclpp.language, and compile it"
_NATIVE = "write the algorithm in mscclpp.language, and compile it"
_NO_FILES = "there is no C++ library; the crate antiphon is for Rust"
#: What MSCCL++ has beside these, with what to use instead.
_ABSENT = {
    "AlgorithmBuilder": _NATIVE,
    "AlgorithmCollection": "keep the Algorithms that mscclpp.compile makes in a list",
    "Communicator": "CommGroup(...).communicator is an antiphon.Communicator",
    "Connection": _CHANNELS,
    "Device": "an executor finds the device by the address",
    "DeviceType": "an executor finds the device by the address",
    "EndpointConfig": _CHANNELS,
    "EndpointConfigIb": _CHANNELS,
    "ErrorCode": "errors are Python's: ValueError, TypeError, RuntimeError, TimeoutError and antiphon.PeerLostError",
    "Fifo": _CHANNELS,
    "Host2DeviceSemaphore": _CHANNELS,
    "Host2HostSemaphore": _CHANNELS,
    "IbMode": _CHANNELS,
    "MemoryChannel": f"{_CHANNELS}; mscclpp.language.channel.MemoryChannel is there",
    "MemoryDevice2DeviceSemaphore": _CHANNELS,
    "NativeCodeCompiler": _NATIVE,
    "PortChannel": f"{_CHANNELS}; mscclpp.language.channel.PortChannel is there",
    "ProxyService": _CHANNELS,
    "RegisteredMemory": "an executor takes any memory",
    "Semaphore": f"{_CHANNELS}; mscclpp.language.rank.Semaphore is there",
    "TcpBootstrap": "CommGroup(interfaceIpPortTrio=..., rank=..., size=...) meets at an address",
    "Transport": _CHANNELS,
    "TransportFlags": _CHANNELS,
    "alloc_shared_physical_cuda": "RawGpuBuffer, or antiphon.Communicator.symmetric",
    "compile_native": _NATIVE,
    "connect_nvls_collective": "there is no NVLink multicast; SwitchChannel of mscclpp.language works without it",
    "env": "read os.environ; Antiphon's variables begin with ANTIPHON_",
    "get_flag_buffer": _NATIVE,
    "get_include": _NO_FILES,
    "get_lib": _NO_FILES,
    "npkit": "`antiphon plan run` times a plan, and `antiphon plan show` draws it",
    "numa": "start ranks by numactl",
}


def __getattr__(name: str) -> Any:
    if name == "language":
        return importlib.import_module("antiphon.language")
    if name in _ABSENT:
        return globals().setdefault(name, Absent(f"mscclpp.{name}", _ABSENT[name]))
    text = f"Antiphon does not serve {name!r} of mscclpp; it serves {listed(__all__, name)}"
    # As in antiphon.comm: a name that is a module is imported afterwards, and for another one Python would put a poorer text in place of this.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist" and find_spec(f"{__name__}.{name}") is None:
        raise ImportError(text, name=__name__)
    raise AttributeError(text, name=name)
