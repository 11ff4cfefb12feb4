"""What to quantize to, and how a scale follows from the amaxes of past steps."""

import enum
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from graphrt.errors import RecipeError

__all__ = ["FP8_MAX", "DelayedScaling", "Format"]

#: Largest finite value of each FP8 dtype (OCP 8-bit floating point specification, revision 1.0).
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

#: Up to this margin 1 / scale is finite whatever the amax: 448 / FLT_MAX / 2**8 is still above 1 / FLT_MAX.
_MAX_MARGIN = 8

#: Fields that say how products are computed, and not from what.
_UNSCALED = ("backward_fast_accum", "keep_weight_transpose")


class Format(enum.Enum):
    """Which FP8 dtype each direction is quantized to."""

    E4M3 = "e4m3"  # e4m3 everywhere
    HYBRID = "hybrid"  # e4m3 for inputs and weights, e5m2 for gradients

    @property
    def forward_dtype(self) -> torch.dtype:
        """dtype of quantized inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """dtype of quantized output gradients."""
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class DelayedScaling:
    """Per-tensor scaling with scales taken from the amaxes of earlier steps.

    Args:
        margin: the scale is divided by ``2**margin``, which leaves that many bits of headroom for growth.
        fp8_format: dtypes of the forward and the backward direction.
        amax_history_len: rows of the amax history, the staging row included; at least 1.
        amax_compute_algo: "max" takes the largest amax of the history, "most_recent" the last step's.
        reduce_amax: take the maximum over the ranks of the reduction group before each update, so that all ranks
            keep the same scales.
        backward_fast_accum: let the GEMMs of both gradients accumulate in the tensor cores' reduced precision, as those of
            the forward always do. Faster; what it adds in error is some 25 dB below what quantizing the operands does
            (``profiles/gemm.py``). Off until longer runs have shown that losses do not mind. Scales do not depend on it.
        keep_weight_transpose: keep the transposed FP8 copy of each weight, which the forward's launch makes as well, until its
            backward. Without, the backward quantizes the weight again, to the same bits: a byte a weight less at the peak,
            four bytes a weight more to read. Scales do not depend on it.

    Raises:
        RecipeError: a field is out of range.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    backward_fast_accum: bool = False
    keep_weight_transpose: bool = True

    def __post_init__(self) -> None:
        if not _is_int(self.margin) or abs(self.margin) > _MAX_MARGIN:
            raise RecipeError(f"margin must be an int from {-_MAX_MARGIN} to {_MAX_MARGIN}, got {self.margin!r}. 0 is the usual choice.")
        if not isinstance(self.fp8_format, Format):
            raise RecipeError(f"fp8_format must be a graphrt.Format, got {self.fp8_format!r}. Use Format.HYBRID or Format.E4M3.")
        if not _is_int(self.amax_history_len) or self.amax_history_len < 1:
            raise RecipeError(f"amax_history_len must be an int of at least 1, got {self.amax_history_len!r}. 1024 is the usual choice.")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise RecipeError(f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}. Use 'max'.")
        if not isinstance(self.reduce_amax, bool):
            raise RecipeError(f"reduce_amax must be a bool, got {self.reduce_amax!r}. Use True to keep the scales of all ranks equal.")
        if not isinstance(self.backward_fast_accum, bool):
            raise RecipeError(f"backward_fast_accum must be a bool, got {self.backward_fast_accum!r}. False is the usual choice.")
        if not isinstance(self.keep_weight_transpose, bool):
            raise RecipeError(f"keep_weight_transpose must be a bool, got {self.keep_weight_transpose!r}. True is the usual choice.")

    @property
    def scaling_fields(self) -> dict[str, Any]:
        """The fields that scales depend on, as plain values: what two states must share for one to continue the other."""
        return {name: value for name, value in self.to_dict().items() if name not in _UNSCALED}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint that loads with ``weights_only=True``."""
        return {**asdict(self), "fp8_format": self.fp8_format.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DelayedScaling":
        """The recipe that ``to_dict`` wrote."""
        return cls(**{**values, "fp8_format": Format(values["fp8_format"])})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
