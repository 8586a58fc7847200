"""Run `ipu-saved-model`: exit 0, 1 with one line for an error, 2 for a wrong usage."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

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


class _Parser(argparse.ArgumentParser):
    """Of the command and its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2. An argument in place of a conversion's method has to come after it."""
        if message.startswith("argument method: invalid choice"):
            message += "; options of a conversion come after ipu: convert ... ipu --num_ipus 2"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--dir", required=True, help="the saved program")
    common.add_argument(
        "--trust", action="store_true", help="read it as PyTorch does, which may run what it says"
    )
    common.add_argument("--traceback", action="store_true", help="print where an error comes from")
    parser = _Parser(
        prog="ipu-saved-model",
        description="Show, run and convert saved programs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command")
    add_show(commands, common)
    add_run(commands, common)
    add_convert(commands, common)
    return parser
