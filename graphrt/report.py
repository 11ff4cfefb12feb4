"""What `Trainer.report` returns: how steps ran, what did not run as asked, and why."""

from dataclasses import dataclass, fields

__all__ = ["TrainerReport"]


@dataclass(frozen=True)
class TrainerReport:
    """Facts about a trainer's steps so far; prints as a table."""

    mode: str
    device: str
    steps_taken: int
    num_skipped_steps: int
    optimizer: str
    optimizer_outside_reason: str | None
    num_fp8_linears: int
    num_parameters: int

    @property
    def is_optimizer_in_step(self) -> bool:
        """Whether the optimizer is issued inside the step, without a host read."""
        return self.optimizer_outside_reason is None

    def __str__(self) -> str:
        width = max(len(field.name) for field in fields(self))
        return "\n".join(f"{field.name.replace('_', ' '):<{width}}  {_show(getattr(self, field.name))}" for field in fields(self))


def _show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
