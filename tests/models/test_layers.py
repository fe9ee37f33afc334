"""Rotary embedding, RMSNorm, and queries and keys of attention, against formulas written another way."""

import cmath

import pytest
import torch

from ddtree_bench.models.layers import Attention, RMSNorm, apply_rotary, rotary_table
from ddtree_bench.models.parallel import Parallel


@pytest.mark.parametrize("position", [0, 1, 7, 2_047])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotary_is_complex_multiplication(position: int, theta: float) -> None:
    head_dim = 6
    x_E = torch.randn(head_dim, generator=torch.Generator().manual_seed(3))
    rotated = apply_rotary(x_E.view(1, 1, -1), rotary_table(torch.tensor([position]), head_dim, theta)).view(-1)
    for frequency in range(head_dim // 2):
        pair = complex(float(x_E[frequency]), float(x_E[frequency + head_dim // 2]))
        turned = pair * cmath.exp(1j * position * theta ** (-2 * frequency / head_dim))
        assert rotated[frequency].item() == pytest.approx(turned.real, abs=1e-3)
        assert rotated[frequency + head_dim // 2].item() == pytest.approx(turned.imag, abs=1e-3)


def test_rms_norm_divides_by_root_mean_square() -> None:
    norm = RMSNorm(4, eps=0.0)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(norm(x), torch.tensor([[1.0, -1.0, 1.0, -1.0], [2.0, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_have_norms_of_their_own(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    attention = Attention(12, num_heads=6, num_kv_heads=2, head_dim=4, eps=1e-6, parallel=Parallel.single())
    for parameter in attention.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    x_TD = torch.randn(3, 12, generator=generator).to(dtype)
    rotary = rotary_table(torch.arange(3), 4, 1e4)
    q_THE, k_TGE, v_TGE = attention.qkv_proj(x_TD).unflatten(-1, (-1, 4)).split([6, 2, 2], dim=1)
    given: list[torch.Tensor] = []

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        given.extend(tensors)
        return tensors[0]

    attention(x_TD, rotary, attend)
    assert torch.equal(given[0], apply_rotary(attention.q_norm(q_THE), rotary))
    assert torch.equal(given[1], apply_rotary(attention.k_norm(k_TGE), rotary))
    assert torch.equal(given[2], v_TGE)
