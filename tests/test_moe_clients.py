"""Megatron's own dispatcher on ranks without GPUs, if the variable MEGATRON_LM names a checkout; see moe_clients.py."""

import importlib
import inspect
import os

import moe_clients
import pytest
from ranks import processes

MEGATRON = os.environ.get("MEGATRON_LM", "")


@pytest.mark.skipif(not MEGATRON, reason="needs megatron: the variable MEGATRON_LM names no checkout of Megatron-LM")
def test_megatrons_dispatcher_runs_unmodified() -> None:
    assert processes(2, moe_clients.dispatchers, os.path.abspath(MEGATRON), "cpu") == [4, 4]


def test_deep_ep_has_what_its_clients_import() -> None:
    from antiphon import compat

    compat.install("deep_ep", "deep_ep_cpp")
    try:
        from deep_ep import Buffer, Config, EventOverlap, HybridEPBuffer, topk_idx_t
        from deep_ep.utils import EventHandle
        from deep_ep.utils import EventOverlap as same

        assert same is EventOverlap and Buffer.__module__.startswith("antiphon")
        assert Config(20).num_sms == 20 and topk_idx_t and EventHandle
        assert "fuse_permute_dispatch" in inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
        from deep_ep_cpp import Config as config
        from deep_ep_cpp import EventHandle as event
        from deep_ep_cpp import topk_idx_t as ids

        assert config is Config and event is EventHandle and ids is topk_idx_t
    finally:
        compat.uninstall("deep_ep", "deep_ep_cpp")


def test_megatrons_module_is_served_if_it_is_named() -> None:
    from antiphon import compat, moe

    name = "megatron.core.transformer.moe.fused_a2a"
    compat.install()
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        compat.install(name)
        assert importlib.import_module(name).FusedDispatch is moe.fused_a2a.FusedDispatch
    finally:
        compat.uninstall()
