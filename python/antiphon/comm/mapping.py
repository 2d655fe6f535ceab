"""Which ranks form which groups. After FlashInfer 0.6.18 comm/mapping.py."""

from antiphon._core import Mapping

__all__ = ["Mapping"]
