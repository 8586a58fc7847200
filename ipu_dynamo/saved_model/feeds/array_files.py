"""Read arrays from `.npy` and `.npz` files, without pickle, and within their stated sizes."""

import io
import math
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

_MAGIC, _ZIP = b"\x93NUMPY", b"PK"
_WITH_MEMBER = re.compile(r"(.+)\[([^\[\]]*)\]")
_LARGEST_HEADER = 10_000
_PICKLED = "pickled inputs are refused"


def read_array(where: str) -> np.ndarray[Any, Any]:
    """The array of a file `x.npy`, `x.npz` or `x.npz[name]`; that of `.npy` is mapped, not read.

    Raises:
        ValueError: the file cannot be read, is damaged or pickled, or does not have the member.
    """
    member = None
    if not Path(where).is_file() and (match := _WITH_MEMBER.fullmatch(where)):
        where, member = match[1], match[2]
    try:
        with open(where, "rb") as file:
            begin = file.read(len(_MAGIC))
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    try:
        if begin == _MAGIC and member is None:
            return _mapped(where)
        if begin.startswith(_ZIP):
            return _of_zip(where, member)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(f"{where}: damaged: {error}") from error
    if begin == _MAGIC:
        raise ValueError(f"{where} is a .npy file, which has no member {member!r}")
    raise ValueError(f"{where} is no .npy or .npz file; {_PICKLED}")


def _mapped(path: str) -> np.ndarray[Any, Any]:
    with open(path, "rb") as file:
        shape, order, dtype = _header(file, path)
        begin = file.tell()
        size = file.seek(0, io.SEEK_END)
    nbytes = math.prod(shape) * dtype.itemsize
    if size != begin + nbytes:
        raise ValueError(f"{path}: damaged: {size - begin} bytes of data, not {nbytes}")
    if not nbytes:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=shape, order=order)


def _of_zip(path: str, member: str | None) -> np.ndarray[Any, Any]:
    with zipfile.ZipFile(path) as file:
        names = [info.filename.removesuffix(".npy") for info in file.infolist()]
        listed = ", ".join(map(repr, names[:20]))
        if member is None and len(names) == 1:
            member = names[0]
        if member is None:
            raise ValueError(f"{path} has several members, choose one as {path}[name]: {listed}")
        if names.count(member) != 1:
            raise ValueError(f"{path} has no member {member!r} of its own; there are {listed}")
        info = file.infolist()[names.index(member)]
        if info.flag_bits & 1:
            raise ValueError(f"{path}: member {member!r} is encrypted")
        with file.open(info) as content:
            where = f"{path}[{member}]"
            if content.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{where} is no array; {_PICKLED}")
            content.seek(0)
            shape, order, dtype = _header(content, where)
            nbytes = math.prod(shape) * dtype.itemsize
            rest = info.file_size - content.tell()
            if rest != nbytes:
                raise ValueError(f"{where}: damaged: {rest} bytes of data, not {nbytes}")
            data = bytearray(content.read(nbytes))
            if len(data) != nbytes or content.read(1):
                raise ValueError(f"{where}: damaged: it does not unpack to {nbytes} bytes")
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _header(file: Any, where: str) -> tuple[tuple[int, ...], Any, np.dtype[Any]]:
    """Shape, order and type of the array after the header."""
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"form {version} of .npy files is not read")
        shape, fortran, dtype = read(file, max_header_size=_LARGEST_HEADER)
    except (
        Exception
    ) as error:  # a header is parsed as Python, whose tokenizer has errors of its own
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{where}: damaged: {first[:120]}") from error
    if dtype.hasobject:
        raise ValueError(f"{where} is an array of objects; {_PICKLED}")
    if dtype.kind not in "biufc" or min(shape, default=0) < 0:
        raise ValueError(f"{where} is an array of {dtype}, not of numbers")
    return shape, "F" if fortran else "C", dtype
