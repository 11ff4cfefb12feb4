"""The errors graphrt raises: one sentence of fact, one of remedy.

Bad arguments raise ValueError or TypeError; these types are for state: what the process, the model or the step is in
that an operation cannot go on from.
"""

__all__ = [
    "CaptureError",
    "FlushError",
    "GraphrtError",
    "ParityError",
    "RecipeError",
    "StaticInputError",
]


class GraphrtError(RuntimeError):
    """Base of every error of graphrt's own."""


class CaptureError(GraphrtError):
    """A step holds something a CUDA graph cannot, or a graph no longer fits the objects it was captured with."""


class StaticInputError(GraphrtError, ValueError):
    """A batch does not have the structure, shape, dtype or constants that the step was captured with."""


class FlushError(GraphrtError):
    """A delayed update was asked for where it must not run, or a forward to repeat cannot be identified."""


class ParityError(GraphrtError):
    """The captured and the eager step cannot be compared, or differ."""


class RecipeError(GraphrtError, ValueError):
    """A quantization recipe, or a layer it is applied to, is one that FP8 GEMMs or delayed scaling cannot honour."""
