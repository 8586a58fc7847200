"""Run `ipu-saved-model`: exit 0, 1 with one line for an error, 2 for a wrong usage."""

import argparse
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ipu_dynamo.saved_model.command.convert_command import add_convert
from ipu_dynamo.saved_model.command.run_command import add_run
from ipu_dynamo.saved_model.command.show_command import add_show

_TOO_FEW = "too few arguments"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Returns:
        The exit status; wrong usage ends the process with 2, as argparse does.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error(_TOO_FEW)
    if problem := options.check(options):
        parser.error(problem)
    try:
        options.do(options)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed it
        return 1
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


_COMMAND = "ipu-saved-model"
_known: dict[str, set[str]] = {}  # options of all subcommands, and these


class _Parser(argparse.ArgumentParser):
    """Of the command and its subcommands."""

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument, and know its name."""
        for name in names:
            if name.startswith("--"):
                _known.setdefault(name, set()).add(self.prog.removeprefix(f"{_COMMAND} "))
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with 2. Name similar options, and the place of those of a conversion."""
        if match := re.match(r"unrecognized arguments: (--\w+)", message):
            if places := _known.get(match[1]):
                message += f"; {match[1]} belongs directly after {' or '.join(sorted(places))}"
            elif near := get_close_matches(match[1], sorted(_known), n=3):
                message += f"; did you mean {', '.join(near)}?"
        if message.startswith("argument method: invalid choice"):
            message += "; options of a conversion come after ipu: convert ... ipu --num_ipus 2"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    common = _Parser(prog="show, run or convert", add_help=False)
    common.add_argument("--dir", required=True, help="the saved program")
    common.add_argument(
        "--trust", action="store_true", help="read it as PyTorch does, which may run what it says"
    )
    common.add_argument("--traceback", action="store_true", help="print where an error comes from")
    parser = _Parser(
        prog=_COMMAND,
        description="Show, run and convert saved programs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command")
    add_show(commands, common)
    add_run(commands, common)
    add_convert(commands, common)
    return parser
