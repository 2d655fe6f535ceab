"""What callers import from ``deep_ep.utils``."""

from antiphon.moe.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
