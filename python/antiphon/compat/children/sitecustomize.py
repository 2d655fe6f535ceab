"""What a process does at its start when :mod:`antiphon.compat` has put this folder into its ``PYTHONPATH``."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _serve() -> None:
    try:
        from antiphon import compat
    except ModuleNotFoundError as error:
        if error.name != "antiphon":
            raise
        return  # another Python than the one that `run` started
    if peers := compat.told_children():
        compat.install(*peers)


def _go_on() -> None:
    """To the sitecustomize that this one hides."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _serve()
finally:
    _go_on()
