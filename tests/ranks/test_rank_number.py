"""Check what ranks write: under their number, or rank 0 alone."""

import logging
import warnings

import pytest
import torch
from torch import nn

from ipu_dynamo import Options, compile_inference
from ipu_dynamo.progress import PROGRESS, job
from ipu_dynamo.rank_number import ranks, this_rank
from ipu_dynamo.torch_compile import notices
from ipu_dynamo.tune import artifact_store
from ipu_dynamo.whole_step.agreement import attempt
from ipu_dynamo.whole_step.ranks import transport_of
from tests.ranks.mesh import mesh, world


def test_the_rank_is_that_of_the_group_or_that_of_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (this_rank(), ranks()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (this_rank(), ranks()) == (3, 4)
    with world(8, rank=5):
        assert (this_rank(), ranks()) == (5, 8)


@pytest.fixture
def own_records():
    """No mesh was made so far, and none was afterwards."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.parametrize("rank", [0, 3])
def test_log_records_of_other_ranks_than_0_begin_with_their_number(rank, caplog, own_records):
    with world(4, rank=rank):
        options = Options(replicas=4, mesh=mesh(4))
        for _ in range(2):  # a second mesh adds nothing
            transport_of(options)
        logging.getLogger("ipu_dynamo.program").warning("%d functions", 2)
        logging.getLogger("others").warning("theirs")
    prefix = f"rank {rank}: " if rank else ""
    assert [r.getMessage() for r in caplog.records] == [f"{prefix}2 functions", "theirs"]


def test_rank_0_alone_shows_bars_and_notices(monkeypatch, caplog, capsys):
    monkeypatch.delenv(PROGRESS, raising=False)

    def shown(rank):
        monkeypatch.setenv("RANK", rank)
        artifact_store._warn_once.cache_clear()
        notices.forget()
        monkeypatch.setattr(notices, "errors_are_swallowed", lambda: True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            notices.tell_of_swallowed_errors()
            attempt(warnings.warn, "the model warns")
        artifact_store._warn_once("no folder")
        with job("compiling Net", at_once=True):
            pass
        records = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return len(caught), records, "compiling Net" in capsys.readouterr().err

    assert shown("0") == (2, ["no folder"], True)
    assert shown("1") == (0, [], False)
    artifact_store._warn_once.cache_clear()
    notices.forget()


def test_each_of_several_ranks_dumps_into_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_DUMP", str(tmp_path))

    def dump():
        compile_inference(nn.ReLU(), {"engine": "eager"})(torch.ones(2))

    with world(4, rank=3):
        dump()
    dump()
    own = [folder.name for folder in (tmp_path / "rank3").iterdir()]
    alone = [folder.name for folder in tmp_path.iterdir() if folder.name != "rank3"]
    assert [name.partition("_")[2] for name in own] == ["inference"]
    assert [name.partition("_")[2] for name in alone] == ["inference"]
