"""Start a program as several instances: the command `poprun`, on top of torchrun.

`poprun --num-instances 2 --num-replicas 4 python train.py` becomes
`torchrun --standalone --nproc-per-node 2 --no-python ... python train.py`, where a small starter
(`_start.py`) says to each process which instance it is.
"""

import argparse
import difflib
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_START = Path(__file__).with_name("_start.py")
_SWITCH = {"yes": True, "1": True, "true": True, "on": True} | {
    "no": False, "0": False, "false": False, "off": False
}  # fmt: skip
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PORT = 29500  # of the first host, where processes of several hosts meet
_NOT_STARTED, _NOT_FOUND = 2, 127  # status: usage, or hosts to go to; as of a shell
_VALUES = {
    "--num-instances": "how many instances to start, each a process; 1 without it",
    "--num-replicas": "how many replicas they have together; without it one each",
    "--ipus-per-replica": "how many IPUs a replica has; 1 without it",
    "--executable-cache-path": "the folder of compiled programs: sets POPTORCH_CACHE_DIR",
    "--host": "hosts such as a,b or a[0-2]: print the command for each instead of starting it",
    "--only-output-from-instance": "show what this instance writes, and nothing of the others",
    "--mpi-local-args": "'-x NAME=value' sets a variable; other words have no effect",
    "--mpi-global-args": "'--output-filename F' keeps output in files, '--tag-output' is as the "
    "option; other words have no effect",
}
_LEAST = {
    "--num-instances": 1,
    "--num-replicas": 1,
    "--ipus-per-replica": 1,
    "--only-output-from-instance": 0,
}
_SWITCHES = {
    "--tag-output": "begin each line of output with its process",
    "--print-topology": "show which instance has which replicas",
    "--offline-mode": "compile, and run nothing",
}
_WITHOUT_EFFECT = (
    "--num-ilds",
    "--numa-aware",
    "--remove-partition",
    "--reset-partition",
    "--sync-type",
    "--update-partition",
    "--vipu-allocation",
    "--vipu-cluster",
    "--vipu-partition",
    "--vipu-partition-attempts",
    "--vipu-server-host",
    "--vipu-server-port",
    "--vipu-server-timeout",
)
_TAKE_A_VALUE = (*_VALUES, *_WITHOUT_EFFECT)
_VERBOSE = ("--verbose", "--vv")


@dataclass(frozen=True)
class Launch:
    """What to start: instances, each with its replicas, of one program.

    Args:
        columns: processes of each instance.
        arguments: of torchrun, without where processes meet.
        variables: further variables of the program.
        command: the program and its arguments.
        notes: lines for the user.
    """

    instances: int
    replicas: int
    ipus: int
    columns: int
    hosts: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: dict[str, str]
    command: tuple[str, ...]
    notes: tuple[str, ...]
    topology: bool

    @property
    def processes(self) -> int:
        """How many processes each host starts."""
        return self.instances * self.columns // max(len(self.hosts), 1)

    def torchrun(self, meeting: Sequence[str]) -> list[str]:
        """The words of torchrun's command for one host."""
        counts = (self.replicas, self.instances, self.ipus, self.columns)
        return [
            *meeting,
            *("--nproc-per-node", str(self.processes), *self.arguments, "--no-python"),
            *(sys.executable, "-I", "-S", str(_START), *map(str, counts), *self.command),
        ]

    def table(self) -> str:
        """Which instance has which replicas, as lines."""
        local = self.replicas // self.instances
        rows = [("instance", "host", "processes", "replicas", "IPUs per replica")]
        for instance in range(self.instances):
            host = instance * max(len(self.hosts), 1) // self.instances
            rows.append(
                (
                    str(instance),
                    self.hosts[host] if self.hosts else "localhost",
                    _range(instance * self.columns, self.columns),
                    _range(instance * local, local),
                    str(self.ipus),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Read the command line, and become torchrun.

    Raises:
        SystemExit: 2 for a wrong command line, and where hosts have to be gone to; 127 for a
            program that does not exist.
    """
    launch = read(sys.argv[1:] if words is None else words)
    for note in launch.notes:
        print(f"poprun: {note}", file=sys.stderr)
    if launch.topology:
        print(launch.table(), flush=True)
    if launch.hosts:
        print("\n".join(_lines_of_hosts(launch)))
        raise SystemExit(_NOT_STARTED)
    os.environ.update(launch.variables)
    program = launch.command[0]
    if shutil.which(program) is None:
        hint = f"; did you mean python {program}?" if program.endswith(".py") else ""
        print(f"poprun: cannot start {program!r}: no such program{hint}", file=sys.stderr)
        raise SystemExit(_NOT_FOUND)
    if launch.processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning
    torchrun = launch.torchrun(["--standalone"])
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *torchrun])


def read(words: Sequence[str]) -> Launch:
    """Read a command line.

    Raises:
        SystemExit: 2 where it is wrong, with the reason on standard error.
    """
    parser = _parser()
    options, command = _divided(words)
    given, unknown = parser.parse_known_args(options)
    for word in unknown:
        parser.error(f"unknown option {word!r}{_near(word)}")
    variables: dict[str, str] = {}
    while command and (match := _ASSIGNMENT.fullmatch(command[0])):
        variables[match[1]] = match[2]
        command = command[1:]
    if not command:
        parser.error(
            "name the program to start, such as `poprun --num-instances 2 python train.py`"
        )
    instances = given.num_instances
    replicas = instances if given.num_replicas is None else given.num_replicas
    if replicas % instances:
        parser.error(
            f"{replicas} replicas cannot be divided among {instances} instances: --num-replicas "
            "must be a multiple of --num-instances"
        )
    hosts = _hosts(parser, given.host)
    if hosts and instances % len(hosts):
        parser.error(
            f"{instances} instances cannot be divided among {len(hosts)} hosts: --num-instances "
            "must be a multiple of them"
        )
    columns = _columns(parser, instances)
    exported, other_local = _exported(_split(parser, "--mpi-local-args", given.mpi_local_args))
    folder, tagged, other_global = _mpi_output(
        _split(parser, "--mpi-global-args", given.mpi_global_args)
    )
    variables = exported | variables
    if given.executable_cache_path is not None:
        variables["POPTORCH_CACHE_DIR"] = given.executable_cache_path
    if given.offline_mode:
        variables["IPU_DYNAMO_OFFLINE"] = "1"
    arguments: list[str] = []
    if folder:
        arguments += ["--log-dir", folder]
    if given.tag_output or tagged or folder:  # torchrun writes files only with --tee
        arguments += ["--tee", "3"]
    notes = []
    if unused := [name for name in _WITHOUT_EFFECT if _value(given, name) is not None]:
        notes.append(f"without effect here: {', '.join(unused)}")
    for name, others in (("--mpi-local-args", other_local), ("--mpi-global-args", other_global)):
        if others:
            notes.append(f"without effect here, of {name}: {shlex.join(others)}")
    if (only := given.only_output_from_instance) is not None:
        if only >= instances:
            parser.error(
                f"--only-output-from-instance {only}: instances have numbers 0 to {instances - 1}"
            )
        if hosts:
            notes.append("with --host each host shows what its instances write")
        else:
            shown = range(only * columns, (only + 1) * columns)
            arguments += ["--local-ranks-filter", ",".join(map(str, shown))]
    return Launch(
        instances, replicas, given.ipus_per_replica, columns, hosts, tuple(arguments), variables,
        tuple(command), tuple(notes), bool(given.print_topology or given.verbose or given.vv),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """The options, which may be abbreviated."""
    parser = argparse.ArgumentParser(
        prog="poprun",
        usage="poprun [option ...] [--] [NAME=value ...] program [argument ...]",
        description="Start a program as several instances, which torch.distributed connects.",
        epilog=f"Accepted without effect: {', '.join(_WITHOUT_EFFECT)}.",
    )
    for name, text in _VALUES.items():
        names = ("-H", name) if name == "--host" else (name,)
        kind = _at_least(_LEAST[name]) if name in _LEAST else str
        parser.add_argument(*names, type=kind, help=text)
    parser.set_defaults(num_instances=1, ipus_per_replica=1)
    for name, text in _SWITCHES.items():
        parser.add_argument(name, nargs="?", const=True, type=_switch, metavar="yes|no", help=text)
    for name in _WITHOUT_EFFECT:
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="count", help="as --print-topology; also -vv")
    parser.add_argument("--vv", action="store_true", help=argparse.SUPPRESS)
    return parser


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into poprun's options, each one word, and the program's command.

    An option may be abbreviated. Its value may begin with a hyphen, as those for mpirun do.
    """
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if rest and _takes(word, rest[0]):
            word = f"{word}={rest.pop(0)}"
        options.append(word)
    return options, rest


def _takes(word: str, following: str) -> bool:
    """Whether an option that was given as this word takes the following one as its value."""
    if word == "-H":
        return True
    if not word.startswith("--") or "=" in word:
        return False
    names = [*_TAKE_A_VALUE, *_SWITCHES, *_VERBOSE, "--help"]
    meant = [word] if word in names else [name for name in names if name.startswith(word)]
    if len(meant) != 1:
        return False  # unknown, or several: the parser says so
    return meant[0] in _TAKE_A_VALUE or (meant[0] in _SWITCHES and following.lower() in _SWITCH)


def _switch(text: str) -> bool:
    """Read the value of a switch, as PopRun writes it."""
    try:
        return _SWITCH[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no") from None


def _at_least(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers that are not smaller."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def _near(word: str) -> str:
    """Near names of an unknown option, as the end of a sentence."""
    names = [*_TAKE_A_VALUE, *_SWITCHES, *_VERBOSE, "--help"]
    near = difflib.get_close_matches(word.partition("=")[0], names)
    return f": did you mean {' or '.join(near)}?" if near else "; `poprun --help` lists all"


def _value(given: argparse.Namespace, option: str) -> object:
    """The value of an option, or None."""
    return getattr(given, option.removeprefix("--").replace("-", "_"))


def _columns(parser: argparse.ArgumentParser, instances: int) -> int:
    """How many processes each instance has, as IPU_DYNAMO_MESH says."""
    if not os.environ.get("IPU_DYNAMO_MESH"):
        return 1
    # imports PyTorch, which takes a second
    from ipu_dynamo.errors import OptionError
    from ipu_dynamo.runtime.ranks.process_group import mesh_of_environment

    try:
        rows, columns = mesh_of_environment() or (instances, 1)
    except OptionError as error:
        parser.error(str(error))
    if rows != instances:
        parser.error(
            f"IPU_DYNAMO_MESH={rows}x{columns} has {rows} rows of processes, but --num-instances "
            f"is {instances}: give the mesh one row for each instance"
        )
    return columns


def _hosts(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, ...]:
    """The hosts of a list such as `a,b` or `a[0-2,4]`; none for this computer alone."""
    if text is None:
        return ()
    hosts = [
        f"{prefix}{number}{suffix}"
        for prefix, ranges, suffix in re.findall(
            r"([^,\[\]]*)(?:\[([\d,-]+)\])?([^,\[\]]*),?", text
        )
        if prefix or ranges
        for number in (_numbers(ranges) if ranges else [""])
    ]
    if not hosts or len(set(hosts)) < len(hosts):
        parser.error(
            f"--host must be a list of different hosts such as a,b or a[0-2], got {text!r}"
        )
    here = {"localhost", "127.0.0.1", socket.gethostname()}
    return () if len(hosts) == 1 and hosts[0] in here else tuple(hosts)


def _numbers(ranges: str) -> Iterable[str]:
    """The numbers of `0-2,4`."""
    for match in _RANGE.finditer(ranges):
        first, last = int(match[1]), int(match[2] or match[1])
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))


def _split(parser: argparse.ArgumentParser, name: str, text: str | None) -> list[str]:
    """The words of an option for mpirun, as a shell reads them."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        parser.error(f"{name}: {error}: {text!r}")


def _exported(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that `-x` sets, and the other words. `-x NAME` takes the value from here."""
    variables, others = {}, []
    rest = iter(words)
    for word in rest:
        if word != "-x":
            others.append(word)
            continue
        name, separator, value = next(rest, "").partition("=")
        if separator:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables, others


def _mpi_output(words: list[str]) -> tuple[str | None, bool, list[str]]:
    """The folder for output, whether it is tagged, and the other words."""
    folder, tagged, others = None, False, []
    rest = iter(words)
    for word in rest:
        match word:
            case "--output-filename" | "-output-filename":
                folder = next(rest, None)
            case "--tag-output" | "-tag-output":
                tagged = True
            case _:
                others.append(word)
    return folder, tagged, others


def _lines_of_hosts(launch: Launch) -> Iterable[str]:
    """What to type on each host; the processes meet at the first."""
    mesh = {name: os.environ[name] for name in ("IPU_DYNAMO_MESH",) if os.environ.get(name)}
    variables = [
        f"{name}={shlex.quote(value)}" for name, value in (mesh | launch.variables).items()
    ]
    first = launch.hosts[0]
    for host in launch.hosts:
        meeting = [
            *("--nnodes", str(len(launch.hosts)), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{first}:{_PORT}", "--rdzv-id", "poprun"),
            *("--rdzv-conf", f"is_host={int(host == first)}", "--local-addr", host),
        ]
        yield f"# on {host}:"
        yield " ".join([*variables, "torchrun", shlex.join(launch.torchrun(meeting))])


def _range(first: int, count: int) -> str:
    """`3`, or `2-3`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


if __name__ == "__main__":
    main()
