"""Predict a program's memory and cycles on an IPU system, from the program alone.

A prediction does not depend on this computer. It runs nothing and makes no tensor. Every number of
the model has a unit, a source and a mark of how sure it is.
"""

from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.system import System, machines

__all__ = ["Figure", "Ipu", "System", "machines"]
