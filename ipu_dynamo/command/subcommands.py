"""Run `ipu-dynamo`: read its arguments and start a subcommand.

Exit codes: 0; 1: the program does not fit, or `doctor` finds that programs cannot run; 2: the
arguments or the input are unusable.
"""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from ipu_dynamo.version import __version__


class _Parser(argparse.ArgumentParser):
    """Of the command and its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2. Name the other command where the subcommand is one of it."""
        if match := re.search(r"invalid choice: '(show|run|convert)'", message):
            message += f"; saved programs have a command of their own: ipu-saved-model {match[1]}"
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is its exit code. Wrong usage ends the process with 2."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from ipu_dynamo.command.doctor import doctor  # imports no front end before PyTorch is known

        return doctor()
    from ipu_dynamo.command.predict_command import show_prediction

    return show_prediction(options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ipu-dynamo",
        description="Predict the memory, cycles and timeline of a program on IPUs, or look at this "
        "installation.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    common = _Parser(add_help=False)
    common.add_argument(
        "what",
        metavar="WHAT",
        help="""a file: a program's text, a saved program or a prediction's JSON; or
        module:function, which returns a program, or a tuple of a model and the arguments of a
        micro-batch""",
    )
    common.add_argument("--machine", metavar="M", help="name of a system, such as bow-pod16")
    common.add_argument("--entry", metavar="NAME", help="entry point of a saved program")
    common.add_argument("--json", metavar="F", help="write the prediction's JSON to this file")
    common.add_argument("-o", dest="output", metavar="F", help="the file to write")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("predict", "print a page of text"),
        ("report", "write an HTML file, report.html"),
        ("trace", "write Chrome's trace JSON, trace.json"),
    ):
        commands.add_parser(name, parents=[common], help=what, description=what, allow_abbrev=False)
    what = "say whether programs can run here, and what to do about each problem"
    commands.add_parser("doctor", help=what, description=what, allow_abbrev=False)
    return parser
