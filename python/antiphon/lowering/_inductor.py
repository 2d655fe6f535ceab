"""Torch's private names that this package uses. They are all imported here, as a new version of torch may move them."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "Backend",
    "CustomGraphPass",
    "compile_fx",
    "control_deps",
    "current_pass",
    "is_inductors",
    "preserve_node_ordering",
    "register",
    "set_pass",
]

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if VERSION < (2, 11):
    raise RuntimeError(f"antiphon.lowering needs torch 2.11 or newer, not {torch.__version__}")

try:
    import torch._inductor.config as config
    from torch._dynamo.backends.registry import list_backends, register_backend
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering

    config.post_grad_custom_post_pass  # noqa: B018  (whether it is there)
except (ImportError, AttributeError) as error:
    raise RuntimeError(f"torch {torch.__version__} has no such pass as antiphon.lowering needs: {error}") from error

#: The function that ``torch.compile`` calls to compile a graph.
Backend = Callable[..., Any]


def current_pass() -> Any:
    """The pass that inductor is configured with."""
    return config.post_grad_custom_post_pass


def set_pass(new: Any) -> None:
    """Configures inductor with a pass, for this process."""
    config.post_grad_custom_post_pass = new


def is_inductors(name: str) -> bool:
    """Whether inductor has an option of this name."""
    return name.replace("-", "_") in config.get_config_copy()


def register(backend: Backend, name: str) -> None:
    """Registers a backend of ``torch.compile``, unless the package's entry point has done so."""
    if name not in list_backends(exclude_tags=None):
        register_backend(compiler_fn=backend, name=name)
