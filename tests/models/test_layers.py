"""Rotary embedding and RMSNorm against formulas written another way."""

import cmath

import pytest
import torch

from ddtree_bench.models.layers import RMSNorm, apply_rotary, rotary_table


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
