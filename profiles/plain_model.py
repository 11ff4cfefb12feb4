"""A Llama of torch's own operations, for measuring what a user's model gets from conversion, compilation and capture alone.

Nothing of `graphrt.nn` is in it: the blocks are compiled by torch.compile, their linears converted by
`graphrt.convert_to_float8_training`. Shapes in comments: B sequences, T tokens, D width, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphrt.llama import rotary_tables
from graphrt.presets import ModelShape


class Norm(nn.Module):
    """RMSNorm with an fp32 weight, in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm: [B, T, D] -> [B, T, D]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.attn_norm, self.ffn_norm = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.w13, self.w2 = nn.Linear(width, 2 * shape.ffn, bias=False), nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, width = x.shape
        packed = self.qkv(self.attn_norm(x)).view(batch, seq_len, 3, self.num_heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # [B, H, T, D / H]
        mixed = F.scaled_dot_product_attention(turn(query, cos, sin), turn(key, cos, sin), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq_len, width))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D / 2H]) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainLlama(nn.Module):
    """The same architecture and sizes as `graphrt.llama.Llama`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for name, table in zip(("cos", "sin"), rotary_tables(seq_len, shape.width // shape.num_heads), strict=True):
            self.register_buffer(name, table.bfloat16(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens [B, T] -> logits [B, T, vocab]."""
        x = self.embed(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
