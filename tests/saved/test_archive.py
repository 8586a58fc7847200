"""Check that an archive is a zip file that other tools open, and that no byte of it may differ."""

import os
import zipfile

import pytest
import safetensors.torch
import torch

from ipu_dynamo.saved.archive import FORM, MANIFEST, Archive, write_archive
from ipu_dynamo.saved.json_text import write_json
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import TensorMember, read_tensors
from ipu_dynamo.saved.weights import TensorTable, with_views

MEMBERS = {"b/text.txt": b"hello", "a.json": b"{}", "empty": b""}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def read_all(path):
    with Archive(path) as archive:
        for name in archive.names:
            archive.read(name, 1 << 20)


def refused(path):
    """Why a file is refused."""
    with pytest.raises(SavedProgramError) as caught:
        read_all(path)
    assert str(path) in str(caught.value)
    return caught.value.reason


def test_other_tools_open_it(path):
    write_archive(path, MEMBERS, {"kind": "test"})
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.namelist() == [MANIFEST, *sorted(MEMBERS)]
        assert {name: file.read(name) for name in MEMBERS} == MEMBERS
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_members_are_aligned(path):
    write_archive(path, MEMBERS, {})
    whole = path.read_bytes()
    with Archive(path) as archive:
        for name, content in MEMBERS.items():
            assert archive.begin(name) % 64 == 0
            assert whole[archive.begin(name) :].startswith(content)


def test_the_same_members_give_the_same_bytes(path):
    write_archive(path, MEMBERS, {"kind": "test"})
    first = path.read_bytes()
    write_archive(path, dict(reversed(MEMBERS.items())), {"kind": "test"})
    assert path.read_bytes() == first


def test_changed_bits_are_found(path):
    write_archive(path, {"a": b"1234"}, {})
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 13):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        refused(path)


def test_cuts_and_additions_are_found(path):
    write_archive(path, MEMBERS, {})
    whole = path.read_bytes()
    for size in range(0, len(whole), 17):
        path.write_bytes(whole[:size])
        refused(path)
    path.write_bytes(whole + b"\0")
    assert refused(path) is Reason.DAMAGED


def test_reasons(path, tmp_path):
    assert refused(path) is Reason.MISSING
    assert refused(tmp_path) is Reason.FOREIGN
    os.mkfifo(tmp_path / "fifo")
    assert refused(tmp_path / "fifo") is Reason.FOREIGN
    path.write_bytes(b"")
    assert refused(path) is Reason.FOREIGN
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", b"x")
    assert refused(path) is Reason.FOREIGN


def test_a_newer_form_is_named(path, monkeypatch):
    monkeypatch.setattr("ipu_dynamo.saved.archive.FORM", FORM + 1)
    write_archive(path, MEMBERS, {})
    monkeypatch.undo()
    assert refused(path) is Reason.FORM
    with pytest.raises(SavedProgramError, match=rf"form {FORM + 1}, and .* reads 4 to {FORM}"):
        Archive(path)


def test_sizes_and_depths_are_bounded(path):
    write_archive(path, {"long": bytes(100), "deep.json": b"[" * 100_000}, {})
    with Archive(path) as archive:
        with pytest.raises(SavedProgramError) as caught:
            archive.read("long", 99)
        assert (caught.value.reason, caught.value.part) == (Reason.LIMIT, "long")
        with pytest.raises(SavedProgramError) as caught:
            archive.read_json("deep.json", 1 << 20)
        assert caught.value.reason is Reason.LIMIT


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path, tmp_path):
    write_archive(path, MEMBERS, {})
    whole = path.read_bytes()

    class Broken:
        size = 10

        def pieces(self):
            yield memoryview(b"12345")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_archive(path, {"a": Broken()}, {})
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_writer_left_is_removed(path, tmp_path):
    (tmp_path / ".file.unfinished-0123").write_bytes(b"left")
    (tmp_path / ".other.unfinished-0123").write_bytes(b"of another file")
    write_archive(path, MEMBERS, {})
    assert sorted(os.listdir(tmp_path)) == [".other.unfinished-0123", "file"]


def test_a_link_stays_a_link(path, tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_archive(tmp_path / "link", MEMBERS, {})
    assert (tmp_path / "link").is_symlink()
    assert path.is_file()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]  # fmt: skip


def test_safetensors_reads_the_tensors(path):
    tensors = {f"t{i}": torch.ones(i, 3).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4)}
    write_archive(path, {"x.safetensors": TensorMember(tensors)}, {})
    with Archive(path) as archive:
        ours = read_tensors(archive, "x.safetensors")
        theirs = safetensors.torch.load(archive.read("x.safetensors", 1 << 20))
    for found in (ours, theirs):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_memory_is_shared_again(path):
    base = torch.arange(40.0)
    table = TensorTable()
    tensors = {
        "first": base[:10],
        "over": base[5:20].view(3, 5),
        "strided": base[20:40].view(4, 5).t(),
        "alone": torch.arange(6.0).view(2, 3).t(),
        "plain": torch.ones(3),
    }
    keys = {name: table.add(name, tensor, "weights") for name, tensor in tensors.items()}
    assert table.add("tied", tensors["plain"], "weights") == "plain"
    parts, views = table.finish()
    write_archive(path, {"w.safetensors": TensorMember(parts["weights"])}, {})
    with Archive(path) as archive:
        found = with_views(read_tensors(archive, "w.safetensors"), views)
    for name, tensor in tensors.items():
        assert torch.equal(found[keys[name]], tensor)
        assert found[keys[name]].stride() == tensor.stride()
    found["first"][7] = 99.0
    assert found["over"][0, 2] == 99.0
    assert found["plain"].untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    "view",
    [
        {"offset": 8},
        {"offset": 2},
        {"offset": -4},
        {"stride": [2]},
        {"shape": [5]},
        {"shape": [1 << 61]},
        {"of": "other"},
        {"dtype": "float33"},
        {"more": 1},
    ],
)
def test_views_stay_within_their_memory(view):
    good = {"of": "m", "dtype": "float32", "shape": [4], "stride": [1], "offset": 0}
    tensors = {"m": torch.zeros(16, dtype=torch.uint8), "other": torch.zeros(4)}
    with_views(tensors, {"v": good})
    with pytest.raises(SavedProgramError):
        with_views(tensors, {"v": good | view})


def test_truth_values_are_0_or_1(path):
    write_archive(path, {"t": TensorMember({"a": torch.tensor([True])})}, {})
    with Archive(path) as archive:
        content = bytearray(archive.read("t", 1 << 20))
    content[-1] = 2
    write_archive(path, {"t": bytes(content)}, {})
    with Archive(path) as archive, pytest.raises(SavedProgramError, match="truth values"):
        read_tensors(archive, "t")


def test_json_has_one_form():
    assert write_json({"b": 1, "a": [1.5, None]}) == (
        b'{\n "a": [\n  1.5,\n  null\n ],\n "b": 1\n}\n'
    )
    with pytest.raises(ValueError, match="JSON"):
        write_json(float("nan"))
