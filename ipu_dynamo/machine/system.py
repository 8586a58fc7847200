"""Describe systems of IPUs: links, host, streaming memory and collectives; name the known ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from ipu_dynamo.errors import OptionError
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import BOW, C600, MK1, MK2, Ipu

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class System:
    """IPUs with the links between them.

    IPU i of replica r has the number `r * num_ipus + i`. Consecutive numbers share a machine, and
    consecutive machines a rack.

    Args:
        ipus: how many there are; None: as many as a program needs.
        machine_ipus, rack_ipus: IPUs of a machine, and of a rack.
        link: bytes a second from one IPU to another of the machine, each way.
        machine_link: the same between machines.
        link_seconds: the fixed time of each copy.
        host: bytes a second from or to the host, for each replica.
        host_sync: seconds of a barrier with the host.
        remote: bytes a second of an IPU from or to streaming memory.
        remote_seconds: the fixed time of each chunk of at most `remote_chunk` bytes.
        collective: bytes a second of an IPU when replicas sum.
        update_seconds: the host's part of each update.
        racks_seconds: the host's additional part if replicas are in several racks.
    """

    name: str
    ipu: Ipu
    ipus: int | None = None
    machine_ipus: int = 4
    rack_ipus: int = 64
    link: float = Figure(50e9, "B/s", "M", "10 links of 32 GB/s, shared between neighbours")
    machine_link: float = Figure(25e9, "B/s", "M", "512 Gbit/s for each machine, docs.graphcore.ai")
    link_seconds: float = Figure(1e-6, "s", "M", "0.5 to 1 us on Mk1")
    host: float = Figure(12.5e9, "B/s", "M", "100 Gbit/s Ethernet")
    host_sync: float = Figure(10e-6, "s", "M", "no source")
    remote: float = Figure(16e9, "B/s", "M", "20 GB/s class, sustained")
    remote_seconds: float = Figure(2e-6, "s", "M", "no source")
    remote_chunk: float = Figure(128 * _MIB, "B", "F", "UoB HPC cookbook")
    collective: float = Figure(32e9, "B/s", "fitted", "calibration")
    update_seconds: float = Figure(1e-3, "s", "fitted", "calibration")
    racks_seconds: float = Figure(3e-3, "s", "fitted", "calibration")

    def check(self, num_ipus: int) -> None:
        """Check that a program fits by its number of IPUs, those of all replicas.

        Raises:
            OptionError: it needs more.
        """
        if self.ipus is not None and num_ipus > self.ipus:
            raise OptionError(
                f"the program needs {num_ipus} IPUs, those of all replicas; {self.name} has "
                f"{self.ipus}. Try a larger system, or fewer replicas"
            )

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """The numbers by name, those of the IPU first."""
        yield from self.ipu.figures()
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float):
                own = Figure(value, "", "M", "given by the user")
                yield each.name, value if isinstance(value, Figure) else own


def _pods(prefix: str, ipu: Ipu) -> dict[str, System]:
    names = {f"{prefix}pod{count}": count for count in (4, 16, 64, 128, 256)}
    return {name: System(name, ipu, ipus) for name, ipus in names.items()}


_SYSTEMS = {
    **{ipu.name.lower(): System(ipu.name.lower(), ipu) for ipu in (MK1, MK2, BOW)},
    "c600": System("c600", C600, machine_ipus=8, rack_ipus=8),
    "m2000": System("m2000", MK2, 4),
    "bow-2000": System("bow-2000", BOW, 4),
    **_pods("", MK2),
    **_pods("bow-", BOW),
}
machines: Mapping[str, System] = _SYSTEMS


def system_of(machine: "str | Ipu | System") -> System:
    """The system that a user names or gives; of an IPU, as many as a program needs.

    Raises:
        OptionError: the name is unknown.
    """
    if isinstance(machine, System):
        return machine
    if isinstance(machine, Ipu):
        return System(machine.name, machine)
    if machine not in machines:
        raise OptionError(f"no machine is named {machine!r}; try one of {', '.join(machines)}")
    return replace(machines[machine])
