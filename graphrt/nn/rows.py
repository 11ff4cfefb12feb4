"""Leading dimensions flattened, the way the kernels take activations."""

from torch import Tensor

__all__ = ["flatten"]


def flatten(x: Tensor) -> Tensor:
    """[..., D] -> contiguous [rows, D]; expanded gradients become real."""
    return x.reshape(-1, x.shape[-1]).contiguous()
