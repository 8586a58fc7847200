"""Follow what each IPU has while the instructions of a micro-batch and a step run."""

from collections.abc import Collection, Mapping

from ipu_dynamo.program.ir.instructions import Instruction, Receive
from ipu_dynamo.program.ir.made_names import is_made
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.values import Variable

Place = tuple[str, int]  # a name, and the IPU that knows it


class Residence:
    """What is where. Names are checked when they are looked up, with `at`.

    Invariant: `values` has every value on an IPU that an instruction so far has made there and none
    has moved away; a variable is at home, and elsewhere or in shards only as far as instructions
    have brought it.

    Args:
        variables: by name.

    Attributes:
        stored: values in streaming memory.
        fetched: variables from streaming memory, with the IPUs that have loaded them.
        whole: variables in shards, with the IPUs on which they are gathered.
        stale: variables that replicas hold whole, and have changed in one shard each.
    """

    def __init__(self, variables: Mapping[str, Variable]) -> None:
        self.variables = variables
        self.values: dict[Place, TensorType] = {}
        self.stored: dict[str, TensorType] = {}
        self.fetched: set[Place] = set()
        self.whole: set[Place] = set()
        self.stale: set[str] = set()
        self._makers: dict[str, Instruction] = {}

    def define(self, name: str, ipu: int, type_: TensorType, maker: Instruction) -> None:
        """Take a new value; the same instruction may make it again.

        Raises:
            ValueError: something else has this name.
        """
        if "." in name and not (is_made(name) or isinstance(maker, Receive)):
            raise ValueError(f"%{name} is called like a tensor of the user's, and is none")
        if name in self.variables:
            raise ValueError(f"%{name} is a variable, no value of a micro-batch")
        if self._makers.setdefault(name, maker) != maker:
            raise ValueError(f"%{name} is made by another instruction already")
        self.values[name, ipu] = type_

    def forget(self, names: Collection[Place]) -> None:
        """Forget values that end with a micro-batch; what is in streaming memory ends, too."""
        for place in names:
            self.values.pop(place, None)
        self.stored.clear()

    def at(self, name: str, ipu: int, *, shard: bool = False) -> TensorType:
        """The type of what `ipu` calls `name`.

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
