"""What calls with several results return."""

from typing import Any, NamedTuple

__all__ = ["RmsNormResult"]


class RmsNormResult(NamedTuple):
    """What :meth:`antiphon.Communicator.all_reduce_rms_norm` gives; ``None`` for what was not asked for."""

    norm: Any
    """The norm, of the shape and dtype of ``x``."""
    residual: Any
    """The sum with the residual, before the norm: the next residual. Like ``norm``."""
    codes: Any
    """The quantised norm."""
    scales: Any
    """The scales of ``codes``."""
