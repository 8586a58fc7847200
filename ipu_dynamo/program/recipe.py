"""Describe how a function becomes a callable on this machine: the input of an engine."""

from dataclasses import dataclass, replace
from typing import Literal

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import counted


@dataclass(frozen=True, slots=True)
class PrepackedWeight:
    """A further input, which is a weight in the order of a library's own.

    Args:
        source: position of the weight among the inputs.
        rows: of the operand that it is multiplied with.
    """

    source: int
    rows: int


@dataclass(frozen=True, slots=True)
class FunctionRecipe:
    """How a function becomes a callable.

    Args:
        function: the one that the program calls.
        lowered: the same with the operators of this machine's libraries.
        engine: the engine that runs it.
        threads: intra-op threads of its callers; None is torch's number.
        written: positions of the inputs that it writes in place.
        packed: inputs of `lowered` after those of `function`.
        releases: it repeats operators to save memory. Callers give away the arguments that end with
            the call, and each is freed after its last reader in the call.
        parts: the parts of `lowered`, if it loops by itself; None: it is compiled whole.
        bodies: recipes of the functions that `lowered` runs in loops and branches, by the names of
            these functions.
        settings: options for Inductor.
        replays: a caller that calls it in a loop records its calls once, and repeats them.
        overwrites: inputs whose memory its result of the same number may take where it is repeated.
        key: of its machine code, once an engine knows it; None: nothing is compiled, or no other
            function may use the code.
    """

    function: Function
    lowered: Function
    engine: Literal["inductor", "eager"]
    threads: int | None = None
    written: tuple[int, ...] = ()
    packed: tuple[PrepackedWeight, ...] = ()
    releases: bool = False
    parts: "CutFunction | None" = None
    bodies: tuple["FunctionRecipe", ...] = ()
    settings: tuple[tuple[str, bool | int], ...] = ()
    replays: bool = False
    overwrites: tuple[int, ...] = ()
    key: str | None = None

    @property
    def compiled_parts(self) -> "tuple[FunctionRecipe, ...]":
        """The recipes that Inductor compiles: of the function, its parts and its bodies."""
        if self.parts is not None:
            return tuple(leaf for part in self.parts.parts for leaf in part.recipe.compiled_parts)
        own = (self,) if self.engine == "inductor" else ()
        return (*(leaf for body in self.bodies for leaf in body.compiled_parts), *own)

    def by_operators(self) -> "FunctionRecipe":
        """The recipe of the same function operator by operator, with the same inputs."""
        return replace(
            self,
            lowered=self.function,
            engine="eager",
            packed=(),
            parts=None,
            bodies=(),
            replays=False,
            key=None,
        )

    def __str__(self) -> str:
        """`forward0: inductor, threads 1; writes 3; packs 1; key 5f3759df`."""
        threads = f", threads {self.threads}" if self.threads is not None else ""
        facts = [f"{self.function.name}: {self.engine}{threads}"]
        facts += [f"writes {', '.join(map(str, self.written))}"] if self.written else []
        facts += [f"packs {', '.join(str(p.source) for p in self.packed)}"] if self.packed else []
        facts += ["releases arguments"] if self.releases else []
        facts += ["recorded, to be repeated"] if self.replays else []
        overwrites = ", ".join(map(str, self.overwrites))
        facts += [f"may overwrite {overwrites}"] if overwrites else []
        facts += [f"in {counted(len(self.parts.parts), 'part')}"] if self.parts else []
        facts += [f"runs {', '.join(b.function.name for b in self.bodies)}"] if self.bodies else []
        facts += [f"key {self.key[:8]}"] if self.key else []
        return "; ".join(facts)


@dataclass(frozen=True, slots=True)
class FunctionPart:
    """Operators of a function that run together.

    Args:
        recipe: how they become a callable.
        arguments: numbers of values; the function's inputs are the first of these.
        results: numbers of the values that it makes.
        dead: numbers of values that end with it.
    """

    recipe: FunctionRecipe
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutFunction:
    """A function in parts, which run in order.

    Args:
        results: numbers of the values that the function returns.
    """

    parts: tuple[FunctionPart, ...]
    results: tuple[int | None, ...]
