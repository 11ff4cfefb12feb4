"""graphrt: a training runtime that captures the whole FP8 step as one CUDA graph, and proves that it equals eager."""

from graphrt import nn
from graphrt.check import CheckReport, check_capture
from graphrt.checkpoint import checkpoint
from graphrt.convert import (
    ConversionReport,
    conversion_report,
    convert_from_float8_training,
    convert_to_float8_training,
    quantization_state,
)
from graphrt.eager import fp8_autocast
from graphrt.errors import CaptureError, FlushError, GraphrtError, ParityError, RecipeError, StaticInputError
from graphrt.linear import Float8Linear
from graphrt.module_ranges import module_ranges
from graphrt.nsys import nsys_window
from graphrt.parity import ParityDifference, ParityReport, check_parity
from graphrt.profiling import StepProfile
from graphrt.recipe import DelayedScaling, Format
from graphrt.region import ForwardMark, mark_forward, recompute_phase
from graphrt.report import TrainerReport
from graphrt.state import QuantizationState
from graphrt.step import StepResult
from graphrt.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckReport",
    "ConversionReport",
    "DelayedScaling",
    "Float8Linear",
    "FlushError",
    "Format",
    "ForwardMark",
    "GraphrtError",
    "ParityDifference",
    "ParityError",
    "ParityReport",
    "QuantizationState",
    "RecipeError",
    "StaticInputError",
    "StepProfile",
    "StepResult",
    "Trainer",
    "TrainerReport",
    "check_capture",
    "check_parity",
    "checkpoint",
    "conversion_report",
    "convert_from_float8_training",
    "convert_to_float8_training",
    "fp8_autocast",
    "mark_forward",
    "module_ranges",
    "nn",
    "nsys_window",
    "quantization_state",
    "recompute_phase",
]
