"""Functions as operators of torch, in the namespace ``antiphon``."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.fx.node import has_side_effect

__all__ = ["Operators"]


class Operators:
    """A part of the namespace, which lasts as long as this does."""

    def __init__(self, kind: Literal["DEF", "FRAGMENT"]) -> None:
        self._library = torch.library.Library("antiphon", kind)  # type: ignore[no-untyped-call]

    def define(self, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """An operator for tensors on the host and on GPUs, which a compiler keeps even if nobody uses its results."""
        name = schema.partition("(")[0]
        self._library.define(schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
        # Plain kernels: those of `torch.library.custom_op` take several times as long for each call.
        for key in ("CPU", "CUDA"):
            self._library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"antiphon::{name}", fake, lib=self._library)
        has_side_effect(getattr(torch.ops.antiphon, name).default)
