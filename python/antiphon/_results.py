"""The results of calls that return several."""

from typing import Any, NamedTuple

__all__ = ["RmsNormResult"]


class RmsNormResult(NamedTuple):
    """The result of :meth:`antiphon.Communicator.all_reduce_rms_norm`; a field that was not asked for is ``None``."""

    norm: Any
    """The norm, of the shape and dtype of ``x``."""
    residual: Any
    """The sum with the residual, before the norm: the next residual. Like ``norm``."""
    codes: Any
    """The quantised norm."""
    scales: Any
    """The scales of ``codes``."""
