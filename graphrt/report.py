"""What `Trainer.report` returns: how steps ran, what did not run as asked, and why."""

from dataclasses import dataclass, fields

from graphrt.capture.runner import CaptureStats

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
    fp8_gemms: str | None = None
    capture: CaptureStats | None = None

    @property
    def is_optimizer_in_step(self) -> bool:
        """Whether the optimizer is issued inside the step, without a host read."""
        return self.optimizer_outside_reason is None

    def __str__(self) -> str:
        rows = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "capture"}
        if self.capture is not None:
            rows.update({field.name: getattr(self.capture, field.name) for field in fields(self.capture)})
        width = max(map(len, rows))
        return "\n".join(f"{name.replace('_', ' '):<{width}}  {_show(value)}" for name, value in rows.items())


def _show(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {kind}" for kind, count in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
