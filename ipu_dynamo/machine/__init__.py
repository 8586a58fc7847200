"""Model an IPU's memory and cycles: predict from a program alone what an IPU system would need.

A prediction reads the program and nothing of this computer; it runs nothing and makes no tensor.
Every number of the model has a unit, a source and a mark of how sure it is.
"""

from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.system import System, machines

__all__ = ["Figure", "Ipu", "System", "machines"]
