"""Check what `poprun` starts: each of its options, and real processes."""

import re
import shlex
import sys

import pytest

from popdist import _launch, _start
from popdist._launch import main, read
from tests.popdist import processes

SHOW = processes.PROGRAMS / "show_environment.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@pytest.fixture(autouse=True)
def _no_mesh(monkeypatch):
    monkeypatch.delenv("IPU_DYNAMO_MESH", raising=False)


def started(line: str) -> list[str]:
    """The words of torchrun for a command line of poprun."""
    return read(shlex.split(line)).torchrun([])


def refusal(line: str, capsys) -> str:
    """Why a command line is refused."""
    with pytest.raises(SystemExit) as exit:
        read(shlex.split(line))
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "processes", "counts"),
    [
        ("python a.py", 1, "1 1 1 1"),
        ("--num-instances 2 python a.py", 2, "2 2 1 1"),
        ("--num-instances=2 --num-replicas=4 --ipus-per-replica=3 python a.py", 2, "4 2 3 1"),
        ("--num-in 2 --num-r 4 --ipus 3 -- python a.py", 2, "4 2 3 1"),
    ],
)
def test_torchrun_starts_a_process_for_each_instance(line, processes, counts):
    words = started(line)
    assert words[: words.index("--no-python")] == ["--nproc-per-node", str(processes)]
    starter = words.index(str(_launch._START))
    assert words[starter + 1 :] == [*counts.split(), "python", "a.py"]


def test_each_process_learns_which_instance_it_is(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _start.variables(replicas=9, instances=3, ipus=4, columns=2) == {
        "POPDIST_NUM_TOTAL_REPLICAS": "9",
        "POPDIST_NUM_LOCAL_REPLICAS": "3",
        "POPDIST_NUM_IPUS_PER_REPLICA": "4",
        "POPDIST_REPLICA_INDEX_OFFSET": "6",
        "POPDIST_LOCAL_INSTANCE_INDEX": "1",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    }


def test_a_mesh_gives_each_instance_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("IPU_DYNAMO_MESH", "2x3")
    words = started("--num-instances 2 --only-output-from-instance 1 python a.py")
    assert words[:4] == ["--nproc-per-node", "6", "--local-ranks-filter", "3,4,5"]
    assert words[-6:] == ["2", "2", "1", "3", "python", "a.py"]
    assert "2x3 has 2 rows of processes, but --num-instances is 4" in refusal(
        "--num-instances 4 a", capsys
    )


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("--only-output-from-instance 1", "--local-ranks-filter 1"),
        ("--tag-output", "--tee 3"),
        ("--tag-output yes", "--tee 3"),
        ("--tag-output=no", ""),
        ("--mpi-global-args '--tag-output --allow-run-as-root'", "--tee 3"),
        ("--mpi-global-args=--output-filename\\ out", "--log-dir out --tee 3"),
    ],
)
def test_options_of_output_are_torchruns(options, arguments):
    words = started(f"--num-instances 2 {options} python a.py")
    assert words[2 : words.index("--no-python")] == arguments.split()


@pytest.mark.parametrize(
    ("line", "variables", "command"),
    [
        ("--executable-cache-path F a", {"POPTORCH_CACHE_DIR": "F"}, "a"),
        ("--offline-mode a", {"IPU_DYNAMO_OFFLINE": "1"}, "a"),
        ("--offline-mode=1 a", {"IPU_DYNAMO_OFFLINE": "1"}, "a"),
        ("--offline-mode no a", {}, "a"),
        ("--mpi-local-args '-x A=b -x C=d=e' a", {"A": "b", "C": "d=e"}, "a"),
        ("--mpi-local-args=-x\\ HERE a", {"HERE": "set"}, "a"),
        ("--mpi-local-args '-x MISSING' a", {}, "a"),
        ("A=b C= a D=e", {"A": "b", "C": ""}, "a D=e"),
        ("-- A=b a", {"A": "b"}, "a"),
        ("a -v --num-instances 3 -- b", {}, "a -v --num-instances 3 -- b"),
    ],
)
def test_programs_get_variables(line, variables, command, monkeypatch):
    monkeypatch.setenv("HERE", "set")
    launch = read(shlex.split(line))
    assert (launch.variables, launch.command) == (variables, tuple(command.split()))


@pytest.mark.parametrize("option", ["-v", "-vv", "--verbose", "--vv", "--print-topology=yes"])
def test_the_topology_is_a_table(option):
    line = f"{option} --num-instances 2 --num-replicas 6 --ipus-per-replica 4 a"
    launch = read(shlex.split(line))
    assert launch.topology
    _, *rows = [" ".join(row.split()) for row in launch.table().splitlines()]
    assert rows == ["0 localhost 0 0-2 4", "1 localhost 1 3-5 4"]


def test_options_of_hardware_are_listed_once_as_without_effect():
    line = "--vipu-partition=p --vipu-server-timeout 9 --numa-aware yes --reset-partition=no a"
    assert read(shlex.split(line)).notes == (
        "without effect here: --numa-aware, --reset-partition, --vipu-partition, "
        "--vipu-server-timeout",
    )
    assert not read(["a"]).notes


def test_other_words_for_mpirun_are_listed_once():
    line = "--mpi-global-args '--mca if eno1 -q' --mpi-local-args '-x A=b --bind-to none' a"
    assert read(shlex.split(line)).notes == (
        "without effect here, of --mpi-local-args: --bind-to none",
        "without effect here, of --mpi-global-args: --mca if eno1 -q",
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--num-instances 2 --num-replicas 3 a", "3 replicas cannot be divided among 2 instances"),
        ("--num-instances 0 a", "'0' is no whole number from 1 on"),
        ("--num-instances two a", "'two' is no whole number"),
        ("--num-instance=2 --num-replica=2 --num 3 a", "ambiguous option: --num"),
        ("--num-instants 2 a", "unknown option '--num-instants': did you mean --num-instances"),
        ("--zzz a", "unknown option '--zzz'; `poprun --help` lists all"),
        ("--offline-mode=maybe a", "'maybe' is neither yes nor no"),
        ("--only-output-from-instance 2 --num-instances 2 a", "numbers 0 to 1"),
        ('--mpi-local-args "-x A=\'b" a', "No closing quotation"),
        ("--host a,a b", "a list of different hosts"),
        ("--host a,b --num-instances 3 c", "3 instances cannot be divided among 2 hosts"),
        ("--num-instances 2", "name the program to start"),
        ("A=b", "name the program to start"),
    ],
)
def test_a_wrong_command_line_is_refused(line, reason, capsys):
    assert reason in refusal(line, capsys)


@pytest.mark.parametrize("option", ["-H", "--host"])
def test_other_hosts_are_told_what_to_start(option, capsys):
    line = f"{option} n[08-09],b --num-instances 6 --mpi-local-args '-x A=b' python 'a b.py'"
    with pytest.raises(SystemExit) as exit:
        main(shlex.split(line))
    assert exit.value.code == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# on n08:", "# on n09:", "# on b:"]
    for host, words in zip(("n08", "n09", "b"), map(shlex.split, lines[1::2]), strict=True):
        assert words[:4] == ["A=b", "torchrun", "--nnodes", "3"]
        assert words[words.index("--rdzv-backend") + 1] == "c10d"
        assert words[words.index("--rdzv-endpoint") + 1] == "n08:29500"
        assert words[words.index("--rdzv-conf") + 1] == f"is_host={int(host == 'n08')}"
        assert words[words.index("--nproc-per-node") + 1] == "2"
        assert words[-6:] == ["6", "6", "1", "1", "python", "a b.py"]


def test_this_computer_alone_needs_no_other_host():
    assert not read(["--host", "localhost", "a"]).hosts


def test_a_program_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["no-such-program"])
    assert exit.value.code == 127
    assert "cannot start 'no-such-program'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_output_of_one_instance_is_shown():
    words = "--num-instances 2 --only-output-from-instance 1 --tag-output B=c"
    result = processes.poprun(*shlex.split(words), sys.executable, str(SHOW))
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\[default1\]:1 of 2, replicas 1, 1 thread, B=c\n", result.stdout)


@pytest.mark.slow
def test_processes_of_a_mesh_meet():
    words = "--num-instances 2 --num-replicas 4"
    result = processes.poprun(*shlex.split(words), sys.executable, str(SHOW), IPU_DYNAMO_MESH="2x2")
    assert result.returncode == 0, result.stderr
    rows = [f"{instance} of 2, replicas 2, 1 thread, B=None" for instance in (0, 0, 1, 1)]
    assert sorted(result.stdout.splitlines()) == rows


@pytest.mark.slow
def test_a_failure_of_one_instance_ends_all():
    program = "import os, time; time.sleep(100 * (os.environ['RANK'] == '0')); raise SystemExit(3)"
    result = processes.poprun("--num-instances", "2", sys.executable, "-c", program)
    assert result.returncode != 0
    assert "exitcode  : 3" in result.stderr


@pytest.mark.slow
def test_processes_of_mpirun_meet():
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": processes.free_port()}
    variables = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "POPDIST_NUM_TOTAL_REPLICAS": "2",
            "POPDIST_NUM_LOCAL_REPLICAS": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(2)
    ]
    command = sys.executable, str(SHOW)
    results = processes.run_together([command] * 2, [own | meeting for own in variables])
    assert [result.stdout.partition(",")[0] for result in results] == ["0 of 2", "1 of 2"]
