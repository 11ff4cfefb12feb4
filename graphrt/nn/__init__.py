"""Fused building blocks: the memory-bound work between a transformer's GEMMs, each stage in one kernel.

Functions on a residual stream, with a torch reference each (`graphrt.kernels`), that take the user's own nn.Linear
modules, converted or not, and nn.Embedding:

* `swiglu_feed_forward`: residual add, RMSNorm, w1 and w3, SwiGLU, w2;
* `rotary_qkv`: residual add, RMSNorm, q k v projection, rotary embedding in place, ready for attention;
* `residual_rms_norm`: residual add and RMSNorm;
* `linear`: an unconverted linear whose weight gradient is written in the parameter's dtype, straight into ``.grad``;
* `embedding`: a lookup whose weight gradient is summed in a fixed order, straight into ``.grad``;
* `cross_entropy`: over 16-bit logits in one read, the gradient in place.
"""

from graphrt.nn.attention import rotary_qkv
from graphrt.nn.cross_entropy import cross_entropy
from graphrt.nn.embedding import embedding
from graphrt.nn.feed_forward import swiglu_feed_forward
from graphrt.nn.linear import linear
from graphrt.nn.norm import residual_rms_norm

__all__ = ["cross_entropy", "embedding", "linear", "residual_rms_norm", "rotary_qkv", "swiglu_feed_forward"]
