"""The names that calls take, as types: a type checker refuses others, and calls raise ``ValueError``."""

import enum
from typing import Literal, TypeAlias

__all__ = ["Algorithm", "Op", "Quantize", "ReduceOp", "ScaleLayout"]


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


#: ``ReduceOp(name)`` makes one of any string.
Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"] | ReduceOp
Algorithm: TypeAlias = Literal["one-shot", "two-shot"]
#: The quantisations of a norm.
Quantize: TypeAlias = Literal["fp8", "fp8-tokens", "fp8-tokens-reciprocal", "fp8-groups", "nvfp4"]
#: The layouts of the scales of FP4.
ScaleLayout: TypeAlias = Literal["128x4", "8x4", "linear"]
