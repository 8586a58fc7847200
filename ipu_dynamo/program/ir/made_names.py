"""Name what a compiler makes in a program, so that nothing of the user's can be called so.

The user's names are paths in a module, and arguments: words with dots between them. A made name has
an empty word, as no path can: `fc.weight..grad` is made of `fc.weight`, `.clip.factor` of no tensor
alone. All made names are put together here, and read here.
"""

import re

# What is made of a value. A state is called by its optimiser, and may not be called so.
_WORDS = re.compile(r"(grad|before|new|off|(on|returned|phase|stage|weights|part)\d*|state\..*)")
_RETURNED = re.compile(r"\.\.returned\d+$")


def alone(name: str) -> str:
    """What belongs to no tensor of the user's."""
    return f".{name}"


def made_of(name: str, word: str) -> str:
    """What is made of the value `name`, which may be made itself."""
    return f"{name}..{word}"


def is_made(name: str) -> bool:
    """Whether a name is none of the user's."""
    return "" in name.split(".")


def users(name: str) -> str:
    """`name`, as a name of the user's: what Python finds by any text is called by words, too."""
    return ".".join(word or "_" for word in name.split("."))


def in_files(name: str) -> str:
    """What users' files call a variable: `fc.weight.exp_avg`, `group0.ipu0.step`."""
    owner, made, key = name.removeprefix(".").partition("..")
    return f"{owner}.{key.removeprefix('state.')}" if made else owner


def accumulator(parameter: str) -> str:
    """The variable that sums the gradients of `parameter`."""
    return made_of(parameter, "grad")


def parameter_of(accumulator: str) -> str:
    """Inverse of `accumulator`; other names stay."""
    return accumulator.removesuffix("..grad")


def state(parameter: str, key: str) -> str:
    """The variable that an optimiser keeps for `parameter`, and calls `key`."""
    return made_of(parameter, f"state.{key}" if _WORDS.fullmatch(key) else key)


def on_ipu(name: str, ipu: int) -> str:
    """What `ipu` calls a value that it has as a copy."""
    return made_of(name, f"on{ipu}")


def returned(name: str, number: int) -> str:
    """A copy of a value for the host, beside the value itself."""
    return made_of(name, f"returned{number}")


def value_of(returned: str) -> str:
    """Inverse of `returned`; other names stay."""
    return _RETURNED.sub("", returned)
