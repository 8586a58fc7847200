"""Say which tensors each IPU holds at each program step.

It knows no machine, only a program and its operators that stand for those of an IPU.
"""

from ipu_dynamo.program.liveness.follow_program import liveness
from ipu_dynamo.program.liveness.live_tensors import IpuLiveness, LiveStep, LiveTensor, Role

__all__ = ["IpuLiveness", "LiveStep", "LiveTensor", "Role", "liveness"]
