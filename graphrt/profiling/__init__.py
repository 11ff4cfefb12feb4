"""What the kernels of a step cost, by module, direction and phase: the captured step beside the eager one."""

from graphrt.profiling.events import Event, Gap, PathProfile
from graphrt.profiling.report import StepProfile
from graphrt.profiling.run import profile_step

__all__ = ["Event", "Gap", "PathProfile", "StepProfile", "profile_step"]
