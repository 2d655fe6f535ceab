"""Calls of TensorRT-LLM's names, as scripts make them."""

from typing import Any

import fused_reference as reference
import torch
from test_fusion import Comm, Device, Layer

from antiphon import comm as peer
from antiphon.comm import AllReduceFusionPattern, QuantizationSFLayout

EPS, GROUP = 1e-5, 64
PATTERNS = {
    value: name.removeprefix("kAR") for name, value in vars(AllReduceFusionPattern).items() if name.startswith("kAR")
}


class Workspace:
    """What scripts make before their first call."""

    def __init__(self, comm: Comm, dtype: torch.dtype = torch.bfloat16) -> None:
        self.handles, self.tensor, self.metadata = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            comm.rank,
            comm.world_size,
            256,
            2048,
            use_fp32_lamport=dtype == torch.float32,
            group=comm,
            create_metadata=True,
        )

    def end(self) -> None:
        peer.trtllm_destroy_ipc_workspace_for_all_reduce(self.handles)


class Call:
    """A call with all the tensors that scripts pass, whatever the pattern: as long as those of FlashInfer's tests."""

    def __init__(self, comm: Comm, device: Device, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.comm, self.tokens, self.hidden = comm, tokens, hidden
        self.workspace = Workspace(comm, dtype)
        self.layer = layer = Layer(comm, device, tokens, hidden, dtype)

        def empty(size: int = tokens * hidden) -> torch.Tensor:
            return torch.full((size,), 7, dtype=dtype, device=device)

        self.sum, self.residual, self.norm, self.codes = empty(), empty(), empty(), empty()
        self.scales = empty(-(-tokens // 128) * 128 * (-(-hidden // 64) * 4))
        self.options: dict[str, Any] = dict(
            allreduce_in=layer.x.flatten(),
            world_size=comm.world_size,
            world_rank=comm.rank,
            token_num=tokens,
            hidden_dim=hidden,
            workspace_ptrs=self.workspace.tensor,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            fp32_acc=True,
            pattern_code=AllReduceFusionPattern.kAllReduce,
            use_oneshot=None,
            allreduce_out=self.sum,
            residual_in=layer.residual.flatten(),
            residual_out=self.residual,
            norm_out=self.norm,
            quant_out=self.codes,
            scale_out=self.scales,
            rms_gamma=layer.weight,
            rms_eps=EPS,
            scale_factor=torch.tensor([0.25], device=device),
            layout_code=QuantizationSFLayout.LINEAR,
            metadata=self.workspace.metadata,
            block_quant_group_size=GROUP,
        )

    def __call__(self, **changes: Any) -> None:
        for tensor in self.sum, self.residual, self.norm, self.codes, self.scales:
            tensor.view(torch.uint8).fill_(0x11)
        peer.trtllm_allreduce_fusion(**{**self.options, **changes})

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.view(torch.uint8).eq(0x11).all())

    def bytes_of(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """The first bytes; those after them must be untouched."""
        raw = tensor.view(torch.uint8).cpu()
        assert raw[size:].eq(0x11).all()
        return raw[:size]


def quantised(norm: torch.Tensor, pattern: str, layout: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bytes of the codes, and of the scales."""
    if "PerTokenGroup" in pattern:
        codes, exponents = reference.fp8_groups(norm, GROUP)
        tokens, groups = exponents.shape
        packs, step = -(-groups // 4), -(-tokens // 4) * 4
        packed = torch.zeros(packs * step * 4, dtype=torch.uint8)
        for group in range(groups):
            packed[torch.arange(tokens) * 4 + group // 4 * step * 4 + group % 4] = exponents[:, group]
        return codes, packed[: (tokens + (packs - 1) * step) * 4]
    if "DynamicFP8" in pattern:
        codes, scales = reference.fp8_tokens(norm, reciprocal=True)
        return codes, scales.flatten().view(torch.uint8)
    if "FP8" in pattern:
        return reference.e4m3(norm.float() * (1 / 0.25)), None
    codes, scales = reference.nvfp4(norm, 0.25)
    return codes, reference.placed(scales, layout)
