"""Sampling noise that depends on (request seed, absolute position, token id) alone.

Plain decoding, a chain and a tree ask for the token at a position with the same noise, so they choose the same token.
The bits come from integer hashes that wrap around, equal on every device: splitmix64 mixes seed and position into a
key of 64 bits (small tensors), and a 32-bit finaliser of the "lowbias32" family mixes key and token id (the whole vocabulary).

Letters: B sequences, N nodes, V vocabulary ids of this shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def signed(value: int, bits: int) -> int:
    """Return the two's complement reading of the low bits of an integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_64 = signed(0x9E3779B97F4A7C15, 64)
_MIX_64 = (signed(0xBF58476D1CE4E5B9, 64), signed(0x94D049BB133111EB, 64))
_GOLDEN_32 = signed(0x9E3779B9, 32)
_MIX_32 = (signed(0x7FEB352D, 32), signed(0x846CA68B, 32))
# The largest float32 below 1: a uniform that rounds to 1 would make noise of minus infinity.
_BELOW_ONE = 1 - 2**-24


def gumbel_noise(seeds: Sequence[int], positions_BN: torch.Tensor, vocab_offset: int, num_tokens: int) -> torch.Tensor:
    """Return Gumbel noise: argmax(log p + noise) is a sample of p.

    Args:
        seeds: one integer a sequence, any size; the low 64 bits count.
        positions_BN: int64, absolute position of the token to be chosen.
        vocab_offset: global id of the shard's first token.
        num_tokens: V.

    Returns:
        noise_BNV: float32, finite, between −2.9 and 22.2.
    """
    seeds_B = torch.tensor([signed(seed, 64) for seed in seeds], dtype=torch.int64, device=positions_BN.device)
    keys_BN = _mix_64(_mix_64(seeds_B + _GOLDEN_64)[:, None] + positions_BN * _GOLDEN_64)
    low_BN1 = keys_BN.to(torch.int32)[..., None]
    high_BN1 = (keys_BN >> 32).to(torch.int32)[..., None]
    tokens_V = torch.arange(vocab_offset, vocab_offset + num_tokens, dtype=torch.int32, device=positions_BN.device)
    bits_BNV = _mix_32((tokens_V * _GOLDEN_32) ^ low_BN1, high_BN1)
    # 31 bits as a float: fine-grained near 0, which is where the largest noise comes from.
    uniform_BNV = bits_BNV.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform_BNV.neg_().log1p_().neg_().log_().neg_()


def _mix_64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30, 64)) * _MIX_64[0]
    x = (x ^ _shift(x, 27, 64)) * _MIX_64[1]
    return x ^ _shift(x, 31, 64)


def _mix_32(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16, 32)).mul_(_MIX_32[0]).add_(key)
    x = x.bitwise_xor_(_shift(x, 15, 32)).mul_(_MIX_32[1])
    return x.bitwise_xor_(_shift(x, 16, 32))


def _shift(x: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
