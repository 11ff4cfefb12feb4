"""A Llama-style language model: RMSNorm, rotary embedding, SwiGLU, causal attention.

Parameters are fp32 masters. Under torch.autocast the residual stream runs in the autocast dtype, without it in fp32.
Shapes in comments: B sequences, T tokens, D width, H heads.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphrt import nn as fused
from graphrt.presets import ModelShape

__all__ = ["Llama", "is_block_linear", "make_loss_fn"]

_NORM_EPS = 1e-5
_ROTARY_BASE = 10000.0
_INIT_STD = 0.02


class RMSNorm(nn.Module):
    """The weight of a norm; the arithmetic is part of the fused layers that need it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency (Su et al. 2021): two fp32 tensors [seq_len, head_dim / 2]."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """The linears of causal self-attention, one projection for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)


class FeedForward(nn.Module):
    """The linears of a SwiGLU feed-forward, gate and up in one projection (Shazeer 2020)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(width, 2 * ffn, bias=False)
        self.w2 = nn.Linear(ffn, width, bias=False)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm.

    The residual stream travels as (stream, delta): what the last layer adds to it is added by the next norm's kernel.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attn_norm, self.ffn_norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attn, self.ffn = Attention(shape.width), FeedForward(shape.width, shape.ffn)

    def forward(self, stream: Tensor, delta: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """([B, T, D], [B, T, D]) -> the same after this block."""
        stream, query, key, value = fused.rotary_qkv(
            stream, delta, self.attn_norm.weight, self.attn.qkv, cos, sin, self.num_heads, _NORM_EPS
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [B, H, T, D / H]
        delta = self.attn.out(mixed.transpose(1, 2).reshape(stream.shape))
        return fused.swiglu_feed_forward(stream, delta, self.ffn_norm.weight, self.ffn.w13, self.ffn.w2, _NORM_EPS)


class Llama(nn.Module):
    """The language model.

    Args:
        shape: its dimensions.
        seq_len: longest sequence it will see; the rotary tables have that many rows.
        checkpoint: runs a block without keeping its activations, called as ``checkpoint(block, stream, delta, cos, sin)``
            when gradients are on (`graphrt.checkpoint`); None keeps them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, seq_len: int, checkpoint: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        cos, sin = rotary_tables(seq_len, shape.width // shape.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(shape.num_layers)

    @torch.no_grad()
    def _init_weights(self, num_layers: int) -> None:
        # What writes to the residual stream starts smaller, so that its variance does not grow with depth (GPT-2).
        residual_std = _INIT_STD / math.sqrt(2 * num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=residual_std if name.endswith(("out.weight", "w2.weight")) else _INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens [B, T] -> logits [B, T, vocab] in the autocast dtype."""
        stream = fused.embedding(tokens, self.embed, _activation_dtype(self.embed.weight))
        delta = torch.zeros_like(stream)
        for block in self.blocks:
            stream, delta = self._run_block(block, stream, delta)
        _, normed = fused.residual_rms_norm(stream, delta, self.norm.weight, _NORM_EPS)
        return fused.linear(normed, self.head)

    def _run_block(self, block: nn.Module, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(block, stream, delta, self.cos, self.sin)
        return block(stream, delta, self.cos, self.sin)


def _activation_dtype(x: Tensor) -> torch.dtype:
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def is_block_linear(module: nn.Module, fqn: str) -> bool:
    """Whether a linear is one of the blocks': the ones to convert to FP8. The head stays in high precision."""
    return isinstance(module, nn.Linear) and fqn.startswith("blocks.")


def make_loss_fn(device_type: str, autocast_dtype: torch.dtype | None) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor]:
    """The loss of a step: mean cross-entropy in nats over all tokens of the batch, a scalar in fp32.

    Args:
        device_type: "cuda" or "cpu".
        autocast_dtype: what the model runs in; None for its parameters' dtype.
    """

    def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(device_type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            logits = model(batch["tokens"])
        return fused.cross_entropy(logits, batch["labels"])

    return loss_fn
