"""Check what `popdist` answers, alone and with a launcher's variables, and how it connects."""

import sys

import pytest
import torch
import torch.distributed as dist

import popdist
import popdist.poptorch
import poptorch
from tests.popdist import processes

ALONE = {
    "getNumTotalReplicas": 1,
    "getNumLocalReplicas": 1,
    "getNumIpusPerReplica": 1,
    "getReplicaIndexOffset": 0,
    "getNumInstances": 1,
    "getInstanceIndex": 0,
    "getLocalInstanceIndex": 0,
    "getDeviceId": 0,
}
VARIABLES = {
    "POPDIST_NUM_TOTAL_REPLICAS": 8,
    "POPDIST_NUM_LOCAL_REPLICAS": 2,
    "POPDIST_NUM_IPUS_PER_REPLICA": 4,
    "POPDIST_REPLICA_INDEX_OFFSET": 6,
    "POPDIST_LOCAL_INSTANCE_INDEX": 1,
}
LAUNCHED = {
    "getNumTotalReplicas": 8,
    "getNumLocalReplicas": 2,
    "getNumIpusPerReplica": 4,
    "getReplicaIndexOffset": 6,
    "getNumInstances": 4,
    "getInstanceIndex": 3,
    "getLocalInstanceIndex": 1,
    "getDeviceId": 0,
}


@pytest.fixture
def launched(monkeypatch):
    """The environment of one of several instances; returns what changes it."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, str(value))
    return monkeypatch.setenv


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    meeting = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    meeting += ("MASTER_ADDR", "MASTER_PORT", "IPU_DYNAMO_MESH")
    for name in (*VARIABLES, *meeting, "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"):
        monkeypatch.delenv(name, raising=False)
    yield
    popdist.finalizeBackend()


def test_a_process_without_a_launcher_is_alone():
    assert not popdist.isPopdistEnvSet()
    assert {name: getattr(popdist, name)() for name in ALONE} == ALONE
    popdist.checkNumIpusPerReplica(3)


def test_a_launcher_is_believed(launched):
    assert popdist.isPopdistEnvSet()
    assert {name: getattr(popdist, name)() for name in LAUNCHED} == LAUNCHED
    popdist.checkNumIpusPerReplica(4)
    with pytest.raises(RuntimeError, match="2 IPUs per replica, but the launcher was told 4"):
        popdist.checkNumIpusPerReplica(2)


@pytest.mark.parametrize("value", ["", "two"])
def test_a_variable_that_is_no_number_is_named(launched, value):
    launched("POPDIST_NUM_LOCAL_REPLICAS", value)
    with pytest.raises(RuntimeError, match="POPDIST_NUM_LOCAL_REPLICAS must be an integer"):
        popdist.getNumLocalReplicas()


@pytest.mark.parametrize("local", ["0", "3"])
def test_instances_must_be_equally_large(launched, local):
    launched("POPDIST_NUM_LOCAL_REPLICAS", local)
    with pytest.raises(RuntimeError, match="no whole number of instances"):
        popdist.getNumInstances()


def test_instances_of_different_sizes_have_no_numbers(launched):
    launched("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "0")
    for ask in (popdist.getNumInstances, popdist.getInstanceIndex):
        with pytest.raises(RuntimeError, match="different numbers of replicas"):
            ask()
    assert popdist.getNumTotalReplicas() == 8


def test_one_instance_is_initialised_as_often_as_one_likes():
    assert not popdist.isBackendInitialized()
    for start in (popdist.init, popdist.initializeBackend, popdist.init):
        start()
        assert popdist.isBackendInitialized()
    popdist.registerCommunicator("any")
    popdist.finalizeBackend()
    assert not popdist.isBackendInitialized()


def test_a_single_instance_waits_for_nobody():
    popdist.registerCommunicator({0})
    popdist.synchronize()
    assert popdist.execute_on_instances({0, 1}, popdist.synchronize) is None


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "needs 4 processes, but RANK and WORLD_SIZE .* say 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "needs 4 processes, .* say 2"),
        ({"RANK": "0"}, "WORLD_SIZE must be an integer, got None"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            "MASTER_ADDR is not set: set it to the host where the first one waits",
        ),
        ({"IPU_DYNAMO_MESH": "2x2"}, "has 2 rows, but the launcher started 4 instances"),
        ({"IPU_DYNAMO_MESH": "4x0"}, "must be the number of processes .*, got '4x0'"),
        ({"IPU_DYNAMO_MESH": "4x2"}, "needs 8 processes"),
    ],
)
def test_instances_that_cannot_meet_are_refused(launched, variables, reason):
    for name, value in variables.items():
        launched(name, value)
    with pytest.raises(RuntimeError, match=reason):
        popdist.init()
    assert not popdist.isBackendInitialized()
    with pytest.raises(RuntimeError, match=r"call popdist.init\(\) before"):
        popdist.synchronize()


def test_a_process_group_of_another_size_is_refused(launched):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="of 4 processes, but the one that is there has 1"):
            popdist.init()
    finally:
        dist.destroy_process_group()


def test_importing_it_imports_no_torch():
    program = "import popdist, popdist._launch, sys; assert 'torch' not in sys.modules"
    assert processes.run(sys.executable, "-c", program).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_some_of_three_instances_act_together():
    program = processes.PROGRAMS / "act_together.py"
    result = processes.poprun("--num-instances", "3", sys.executable, str(program))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "instance 0: 3 over 3, 2 over 2, 1 over 2, 3 over 3, 2 over 2, 1 over 2",
        "instance 1: 3 over 3, 1 over 2, 3 over 2, 3 over 3, 1 over 2, 3 over 2",
        "instance 2: 3 over 3, 2 over 2, 3 over 2, 3 over 3, 2 over 2, 3 over 2",
    ]


def test_a_function_runs_on_the_instances_that_are_named(launched):
    assert popdist.execute_on_instances({0, 3}, max, 1, 2) == 2
    assert popdist.execute_on_instances({0, 1}, max, 1, 2) is None


def test_options_take_over_what_the_launcher_says(launched):
    options = popdist.poptorch.Options(ipus_per_replica=4).outputMode(poptorch.OutputMode.All)
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    options._freeze()
    assert options.toDict()["replication_factor"] == 2
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)
    twin = options.clone().deviceIterations(2)
    assert (twin.Distributed.numProcesses, type(twin)) == (4, popdist.poptorch.Options)
    with pytest.raises(RuntimeError, match="launcher was told 4"):
        popdist.poptorch.Options(2)


def test_options_of_one_process_run_a_model(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    options = popdist.poptorch.Options(2)
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
    executor = poptorch.inferenceModel(lambda x: x + 1, options)
    assert torch.equal(executor(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize(
    "name",
    [
        "useIpuId",
        "replicationFactor",
        "Distributed.disable",
        "Distributed.setEnvVarNames",
        "Distributed.configureProcessId",
    ],
)
def test_the_launcher_decides(name):
    setter = popdist.poptorch.Options()
    for part in name.split("."):
        setter = getattr(setter, part)
    for arguments in ((), (1,), (1, 2, 3)):
        with pytest.raises(RuntimeError, match=f"Cannot call `{name}` with popdist.poptorch.Opt"):
            setter(*arguments)


def test_old_programs_ask_the_module_below():
    assert {name: getattr(popdist.popdist_core, name)() for name in ALONE} == ALONE
