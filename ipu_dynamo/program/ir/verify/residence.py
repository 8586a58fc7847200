"""Follow the places of values while the instructions of a micro-batch and a step run."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.base_instruction import Moved, Use
from ipu_dynamo.program.ir.instructions import Instruction
from ipu_dynamo.program.ir.made_names import is_made
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.values import Variable

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program

Known = tuple[str, int]  # a name, and the IPU that knows it


class Residence:
    """The places of values and variables. `at` looks a name up, and raises if it is not there.

    Invariant: `values` has every value that an instruction so far has made on an IPU, and that no
    instruction has moved away. A variable is on its own IPU. It is elsewhere, or gathered from its
    shards, only if an instruction has brought it there.

    Attributes:
        num_ipus, variables, inputs, outputs: of the program, the last three by name.
        sent: the outputs so far.
        stored: values in streaming memory.
        fetched: variables from streaming memory, with the IPUs that have loaded them.
        whole: variables in shards, with the IPUs on which they are gathered.
        stale: variables that replicas hold whole, and have changed in one shard each.
    """

    def __init__(self, program: "Program") -> None:
        self.variables = {variable.name: variable for variable in program.variables}
        self.inputs = {stream.name: stream.type for stream in program.inputs}
        self.outputs = {stream.name: stream.type for stream in program.outputs}
        self.num_ipus = program.num_ipus
        self.sent: set[str] = set()
        self.values: dict[Known, TensorType] = {}
        self.stored: dict[str, TensorType] = {}
        self.fetched: set[Known] = set()
        self.whole: set[Known] = set()
        self.stale: set[str] = set()
        self._makers: dict[str, Instruction] = {}

    def define(self, name: str, ipu: int, type_: TensorType, maker: Instruction) -> None:
        """Take a new value; the same instruction may make it again.

        Raises:
            ValueError: something else has this name.
        """
        if "." in name and not is_made(name) and not any(m.src == "host" for m in maker.moves):
            raise ValueError(f"%{name} is called like a tensor of the user's, and is none")
        if name in self.variables:
            raise ValueError(f"%{name} is a variable, no value of a micro-batch")
        self.check_ipu(ipu)
        if self._makers.setdefault(name, maker) != maker:
            raise ValueError(f"%{name} is made by another instruction already")
        self.values[name, ipu] = type_

    def forget(self, names: Collection[Known]) -> None:
        """Forget values that end with a micro-batch, and all values in streaming memory."""
        for known in names:
            self.values.pop(known, None)
        self.stored.clear()

    def check(self, use: Use) -> None:
        """Check that an IPU has a value or variable of the right kind and type.

        Raises:
            ValueError: it has not.
        """
        if use.kinds and (variable := self.variable(use.name)).kind not in use.kinds:
            raise ValueError(f"%{use.name}, of kind {variable.kind}, is no {use.kinds[0]}")
        type_ = self.at(use.name, use.ipu, shard=use.shard)
        if use.number and type_.shape:
            raise ValueError(f"gradients are divided by %{use.name}, which is no number")
        if use.type is not None:
            same(use.name, type_, use.type)

    def check_ipu(self, ipu: int) -> None:
        """Refuse an IPU that the program does not have.

        Raises:
            ValueError: it has too few.
        """
        if not 0 <= ipu < self.num_ipus:
            raise ValueError(f"there is no ipu{ipu}, of {self.num_ipus}")

    def check_owner(self, use: Use) -> None:
        """Check that a variable is changed by the IPU that owns it.

        Raises:
            ValueError: another one changes it.
        """
        variable = self.variables.get(use.name)
        if variable is not None and variable.ipu != use.ipu:
            raise ValueError(f"%{use.name} is changed away from its owner, ipu{variable.ipu}")

    def move(self, move: Moved, mover: Instruction) -> None:
        """Move a value or a variable.

        Raises:
            ValueError: it is not where it comes from, of another type, or there already.
        """
        if move.src == move.dst:
            raise ValueError(f"it is on ipu{move.src} already")
        if move.of_variable:
            self._move_variable(move)
            return
        type_ = self._leaving(move)
        if move.type is not None:
            same(move.value, type_, move.type)
        if isinstance(move.dst, int):
            self.define(move.result, move.dst, type_, mover)
        elif move.dst == "host":
            self._send(move, type_)
        else:
            self._store(move, type_)

    def _leaving(self, move: Moved) -> TensorType:
        """The type of a value at the origin of a move."""
        if isinstance(move.src, int):
            return self.at(move.value, move.src)
        if move.src == "host":
            if move.value not in self.inputs:
                raise ValueError(f"no input is called {move.value}")
            return self.inputs[move.value]
        if move.value not in self.stored:
            raise ValueError(f"%{move.value} is not in streaming memory here")
        return self.stored[move.value]

    def _send(self, move: Moved, type_: TensorType) -> None:
        if move.result not in self.outputs:
            raise ValueError(f"no output is called {move.result}")
        if move.result in self.sent:
            raise ValueError(f"the output {move.result} is sent twice")
        self.sent.add(move.result)
        same(move.value, type_, self.outputs[move.result])

    def _store(self, move: Moved, type_: TensorType) -> None:
        assert isinstance(move.src, int)
        if (move.value, move.src) not in self.values:
            raise ValueError(f"%{move.value} is a variable, which keeps its name")
        if move.result in self.stored or move.result in self.variables:
            raise ValueError(f"%{move.result} is in streaming memory already")
        del self.values[move.value, move.src]
        self.stored[move.result] = type_

    def _move_variable(self, move: Moved) -> None:
        """Load or store a variable, which has to be one of those that are off the chip."""
        variable = self.variable(move.value)
        if not variable.off_chip:
            raise ValueError(f"%{move.value} stays on ipu{variable.ipu}")
        if move.shard != (variable.shards > 1):
            raise ValueError(f"%{move.value} is in {variable.shards} shards")
        if move.type is not None:
            same(move.value, variable.held, move.type)
        if isinstance(move.dst, int):
            self.check_ipu(move.dst)
            self.fetched.add((move.value, move.dst))
        elif isinstance(move.src, int):
            self.at(move.value, move.src, shard=True)
            if move.src != variable.ipu:
                raise ValueError(f"%{move.value} lives on ipu{variable.ipu}")
            self.fetched.discard((move.value, move.src))

    def at(self, name: str, ipu: int, *, shard: bool = False) -> TensorType:
        """The type of the value with this name on `ipu`.

        Args:
            shard: a shard of a variable is enough, too.

        Raises:
            ValueError: `ipu` has nothing of that name now.
        """
        if (name, ipu) in self.values:
            return self.values[name, ipu]
        variable = self.variables.get(name)
        if variable is None:
            others = sorted(other for known, other in self.values if known == name)
            where = f", but on ipu{others[0]}" if others else ""
            raise ValueError(f"%{name} is not on ipu{ipu} here{where}")
        if variable.off_chip and (name, ipu) not in self.fetched:
            raise ValueError(f"%{name} is in streaming memory, not loaded to ipu{ipu}")
        if not variable.off_chip and variable.ipu != ipu:
            raise ValueError(f"%{name} lives on ipu{variable.ipu}, not on ipu{ipu}")
        if not shard and variable.shards > 1 and (name, ipu) not in self.whole:
            raise ValueError(f"of %{name} each replica has a shard, which is not gathered")
        if not shard and name in self.stale:
            raise ValueError(f"%{name} was updated in shards, and is not gathered")
        return variable.type

    def variable(self, name: str) -> Variable:
        """The variable of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self.variables:
            raise ValueError(f"no variable is called %{name}")
        return self.variables[name]


def same(name: str, actual: TensorType, expected: TensorType) -> None:
    """Compare the type of `name` with the expected one.

    Raises:
        ValueError: it has another one.
    """
    if actual != expected:
        raise ValueError(f"%{name} is {actual}, and {expected} is expected")
