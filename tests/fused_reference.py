"""What fused all-reduces compute, written with torch's own operations, on the host."""

import torch

FP8_MAX = 448.0
#: The magnitudes of E2M1, by code.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def total(xs: list[torch.Tensor], rounded: bool = False) -> torch.Tensor:
    """The sum in the order of the ranks: in float32 and rounded once, or rounded after each addition."""
    dtype, found = xs[0].dtype, xs[0].float()
    for x in xs[1:]:
        found = found + x.float()
        found = found.to(dtype).float() if rounded else found
    return found.to(dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_bias: float = 0.0, early: bool = False
) -> torch.Tensor:
    """In float64, rounded once; ``early``: before the weight, too."""
    wide = x.double()
    factor = 1.0 if weight is None else weight.double() + weight_bias
    root = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if early:
        return ((wide / root).to(x.dtype).double() * factor).to(x.dtype)
    return (wide * factor / root).to(x.dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To a unit in the last place, or two."""
    steps = {torch.float32: 2**-21, torch.float16: 2**-9, torch.bfloat16: 2**-6}[wanted.dtype]
    torch.testing.assert_close(found.cpu().double(), wanted.double(), rtol=steps, atol=1e-5)


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Bytes of the nearest codes, saturating."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def fp8_tokens(x: torch.Tensor, reciprocal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; ``reciprocal`` multiplies by the float32 next to 1/448, as torch does on GPUs to divide by 448."""
    amax = x.float().abs().amax(-1, keepdim=True)
    scale = amax * torch.tensor(1 / FP8_MAX) if reciprocal else amax / FP8_MAX
    scale = scale.clamp(min=(1 / 512) / FP8_MAX)
    return e4m3(x.float() / scale), scale


def fp8_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the exponents of ``[tokens, groups]``."""
    grouped = x.float().unflatten(-1, (-1, group))
    wanted = (grouped.abs().amax(-1) / FP8_MAX).clamp(min=1e-10)
    mantissa, exponent = torch.frexp(wanted)  # of 0.5 and more, so that powers of two are 0.5
    exponent = exponent - (mantissa == 0.5).int()
    scale = torch.ldexp(torch.ones_like(wanted), exponent)
    return e4m3(grouped / scale.unsqueeze(-1)).flatten(-2), (exponent + 127).to(torch.uint8)


def unpacked(scales: torch.Tensor, tokens: int, groups: int) -> torch.Tensor:
    """The exponents of ``[tokens, groups]`` in int32s of shape ``[tokens, packs]``; what is beside them must be 0."""
    parts = torch.empty(scales.shape, dtype=torch.int32).copy_(scales).view(torch.uint8)
    assert parts[:, groups:].eq(0).all()
    return parts[:, :groups]


def nvfp4(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of two codes, and the E4M3 scales of ``[tokens, blocks]``."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = e4m3(scale * (blocks.abs().amax(-1) / 6.0))
    wide = scales.view(torch.float8_e4m3fn).float()
    factor = torch.where(wide == 0, 0.0, scale / wide)
    values = (blocks * factor.unsqueeze(-1)).flatten(-2)
    distance = (values.abs().unsqueeze(-1) - FP4).abs()
    nearest = distance.amin(-1, keepdim=True)
    ties = distance == nearest  # two at most: the one with an even code counts
    even = torch.arange(8) % 2 == 0
    code = torch.where((ties & even).any(-1), (ties & even).int().argmax(-1), ties.int().argmax(-1))
    code = code.to(torch.uint8) + torch.signbit(values).to(torch.uint8) * 8
    return code[..., 0::2] + code[..., 1::2] * 16, scales


def placed(scales: torch.Tensor, layout: int) -> torch.Tensor:
    """The bytes of a layout, as FlashInfer's kernels address them."""
    rows, columns = scales.shape
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tiles = -(-columns // 4)
    if layout == 2:
        at, size = row * columns + column, rows * columns
    elif layout == 1:
        at, size = (row // 8 * tiles + column // 4) * 32 + row % 8 * 4 + column % 4, -(-rows // 8) * tiles * 32
    else:
        inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        at, size = (row // 128 * tiles + column // 4) * 512 + inside, -(-rows // 128) * tiles * 512
    found = torch.zeros(size, dtype=torch.uint8)
    found[at.flatten()] = scales.flatten()
    return found


def of_experts(experts: torch.Tensor, scales: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """What a rank contributes: its experts' outputs weighted, and the shared one's."""
    return ((experts.double() * scales.double().unsqueeze(-1)).sum(0) + shared.double()).to(shared.dtype)


def of_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    scales: torch.Tensor | None,
    shared: torch.Tensor | None,
    routed_scaling: float,
) -> torch.Tensor:
    """As :func:`of_experts`, of the rows that are a token's."""
    taken = rows.double()[index.clamp(min=0).long()] * (index >= 0).unsqueeze(-1)
    weighted = taken if scales is None else taken * scales.double().unsqueeze(-1)
    found = weighted.sum(1) * routed_scaling
    return (found if shared is None else found + shared.double()).to(rows.dtype)
