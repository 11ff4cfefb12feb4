"""A Llama-style language model: RMSNorm, rotary embedding, SwiGLU, causal attention.

Parameters are fp32 masters. Under torch.autocast the residual stream runs in the autocast dtype, without it in fp32.
Shapes in comments: B sequences, T tokens, D width, H heads.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphrt.presets import ModelShape

__all__ = ["Llama", "is_block_linear", "make_loss_fn"]

_NORM_EPS = 1e-5
_ROTARY_BASE = 10000.0
_INIT_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), _NORM_EPS)


def rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency (Su et al. 2021): two fp32 tensors [seq_len, head_dim / 2]."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) of [..., T, head_dim] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, seq_len, width = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq_len, width))


class SwiGLU(nn.Module):
    """w2(silu(gate) * up), with gate and up from one projection (Shazeer 2020)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(width, 2 * ffn, bias=False)
        self.w2 = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.width)
        self.attn = Attention(shape.width, shape.num_heads)
        self.ffn_norm = RMSNorm(shape.width)
        self.ffn = SwiGLU(shape.width, shape.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The language model.

    Args:
        shape: its dimensions.
        seq_len: longest sequence it will see; the rotary tables have that many rows.
        checkpoint: runs a block without keeping its activations, called as ``checkpoint(block, x, cos, sin)``
            when gradients are on (`graphrt.checkpoint`); None keeps them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, seq_len: int, checkpoint: Callable[..., Tensor] | None = None) -> None:
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
        x = self.embed(tokens)
        x = x.to(_activation_dtype(x))
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = self._run_block(block, x, cos, sin)
        return self.head(self.norm(x))

    def _run_block(self, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(block, x, cos, sin)
        return block(x, cos, sin)


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
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    return loss_fn
