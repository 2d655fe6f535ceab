"""The enums of MSCCL++, with its names and numbers."""

import enum

__all__ = ["CollectiveBufferMode", "DataType", "GpuBufferGranularity", "PacketType", "ReduceOp"]


class _Numbered(enum.Enum):
    """Values that are numbers if asked for: ``int(DataType.float32)`` is 3."""

    def __int__(self) -> int:
        number: int = self.value
        return number


class DataType(_Numbered):
    """The type of elements."""

    int32 = 0
    uint32 = 1
    float16 = 2
    float32 = 3
    bfloat16 = 4
    float8_e4m3fn = 5
    float8_e4m3fnuz = 6
    float8_e5m2 = 7
    float8_e5m2fnuz = 8
    uint8 = 9
    float8_e4m3b15 = 10

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if "8" in self.name else 2 if "16" in self.name else 4


class PacketType(_Numbered):
    """The form of packets: 4 bytes of data in 8, or 8 in 16."""

    LL8 = 0
    LL16 = 1


class ReduceOp(_Numbered):
    """How elements are combined. ``NOP``: as the algorithm does it."""

    SUM = 0
    MIN = 3
    NOP = 255


class CollectiveBufferMode(_Numbered):
    """Whether an algorithm's input and output share memory."""

    ANY = 0
    IN_PLACE = 1
    OUT_OF_PLACE = 2


class GpuBufferGranularity(_Numbered):
    """What sizes of buffers are rounded up to for multicast, which is not used here: it changes nothing."""

    MultiCastMinimum = 0
    MultiCastRecommended = 1
