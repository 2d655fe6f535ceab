"""The types of the results, which are generic: Python 3.10 has no generic named tuples."""

from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["RmsNormResult"]

_A = TypeVar("_A")

class RmsNormResult(NamedTuple, Generic[_A]):
    norm: _A
    residual: _A
    codes: Any
    scales: Any
