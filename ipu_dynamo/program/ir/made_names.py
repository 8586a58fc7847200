"""Make the names of values and variables that no tensor of the user's has, and read them.

A user's name is a path in a module, or an argument: words with dots between them. A made name has
an empty word. No path has one: `fc.weight..grad` is made of `fc.weight`, `.clip.factor` of nothing.
This module makes and reads all such names.
"""

import re

# Words behind the two dots. The key of a state is any text, so these keys get a word of their own.
_WORDS = re.compile(
    r"(grad|before|new|off|sent|received|(on|returned|phase|stage|weights|part|kept)\d*|state\..*)"
)
_RETURNED = re.compile(r"\.\.returned\d+$")


def alone(name: str) -> str:
    """The name of a value that belongs to no tensor of the user's."""
    return f".{name}"


def made_of(name: str, word: str) -> str:
    """The name of a value made of the value `name`, of the user's or made itself."""
    return f"{name}..{word}"


def is_made(name: str) -> bool:
    """Whether a name has an empty word, unlike the user's."""
    return "" in name.split(".")


def users(name: str) -> str:
    """`name` with no empty word: keys of dictionaries and keyword arguments are any text."""
    return ".".join(word or "_" for word in name.split("."))


def in_files(name: str) -> str:
    """The name of a variable in users' files: `fc.weight.exp_avg`, `group0.ipu0.step`."""
    owner, made, key = name.removeprefix(".").partition("..")
    return f"{owner}.{key.removeprefix('state.')}" if made else owner


def accumulator(parameter: str) -> str:
    """The variable that sums the gradients of `parameter`."""
    return made_of(parameter, "grad")


def parameter_of(accumulator: str) -> str:
    """Inverse of `accumulator`; other names stay."""
    return accumulator.removesuffix("..grad")


def owner_of(name: str) -> str:
    """The user's name that a name was made of; other names stay."""
    return name if name.startswith(".") else name.partition("..")[0]


def state(parameter: str, key: str) -> str:
    """The variable for the state `key` of an optimiser and one parameter."""
    return made_of(parameter, f"state.{key}" if _WORDS.fullmatch(key) else key)


def on_ipu(name: str, ipu: int) -> str:
    """The copy of a value on another IPU."""
    return made_of(name, f"on{ipu}")


def returned(name: str, number: int) -> str:
    """A copy of a value for the host."""
    return made_of(name, f"returned{number}")


def value_of(returned: str) -> str:
    """Inverse of `returned`; other names stay."""
    return _RETURNED.sub("", returned)
