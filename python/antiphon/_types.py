"""The names that calls take, as types: a type checker refuses others, and calls raise ``ValueError``."""

import enum
from typing import Any, Literal, Protocol, TypeAlias

__all__ = ["Algorithm", "DTypeName", "Op", "OpName", "Quantize", "ReduceOp", "ScaleLayout"]


class ReduceOp(str, enum.Enum):
    """How contributions are combined; the names themselves (``"sum"``) do as well.

    Sums, products and averages accumulate in float32 (float64 for float64, wrapping int64 for integers) in ascending
    rank order and round once. ``MIN`` and ``MAX`` give NaN if any contribution is NaN. ``AVG`` of integers
    truncates towards zero. ``BAND``, ``BOR`` and ``BXOR`` combine the bits of integers.
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


    @classmethod
    def _missing_(cls, value: object) -> "ReduceOp | None":
        """As calls read names: in lower, upper or mixed case, and ``"mean"`` too."""
        name = value.lower() if isinstance(value, str) else value
        return cls.AVG if name == "mean" else next((op for op in cls if op.value == name), None)


class _TorchReduceOp(Protocol):
    """An operator of ``torch.distributed``, whether or not torch is installed."""

    @property
    def PREMUL_SUM(self) -> Any: ...


class _DType(Protocol):
    """A dtype of torch or NumPy, likewise."""

    @property
    def itemsize(self) -> int: ...


OpName: TypeAlias = Literal["sum", "prod", "min", "max", "avg", "mean", "band", "bor", "bxor"]
#: What every call takes as an operator: names in lower or upper case. ``ReduceOp(name)`` makes one of any string.
Op: TypeAlias = (
    OpName
    | Literal["SUM", "PROD", "MIN", "MAX", "AVG", "MEAN", "BAND", "BOR", "BXOR"]
    | ReduceOp
    | _TorchReduceOp
    # Torch's. Its own types do not tell it from other enums, and torch may not be installed: others raise ``TypeError`` in calls.
    | enum.Enum
)
Algorithm: TypeAlias = Literal["one-shot", "two-shot"]
#: The quantisations of a norm.
Quantize: TypeAlias = Literal["fp8", "fp8-tokens", "fp8-tokens-reciprocal", "fp8-groups", "nvfp4"]
#: The layouts of the scales of FP4.
ScaleLayout: TypeAlias = Literal["128x4", "8x4", "linear"]
#: A dtype: its name in torch or NumPy, or a dtype of one of the two, or a scalar type of NumPy.
DTypeName: TypeAlias = str | _DType | type[Any]
