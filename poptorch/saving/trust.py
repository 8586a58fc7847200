"""Pickle a module into a file, and read it only from files that are the user's own or trusted.

A user who can write a pickle can run code. So a file has a signature of all its contents, made with
a key in the user's cache folder. A file of another user does not have a valid one. Without it,
torch's restricted unpickler reads only classes that are harmless, or that the user has allowed.
"""

import hmac
import io
import os
import pickle
import secrets
from pathlib import Path
from typing import Any

import torch

from ipu_dynamo.saved.archive import Archive
from ipu_dynamo.tune.artifact_store import keep_first, open_store
from poptorch.errors import createPoptorchError

TRUST = "IPU_DYNAMO_TRUST"  # environment variable: 1 reads modules of any file
KEY, _LENGTH = "signing_key", 32  # its file in the folder of compiled stages


def key_problem(path: Path) -> str:
    """Why the key in a file signs nothing; empty: it does.

    Raises:
        OSError: it is missing, or cannot be looked at.
    """
    found = path.stat()
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
        return f"the key {path} signs nothing: others than you may have read it"
    if found.st_size != _LENGTH:
        return f"the key {path} signs nothing: it has {found.st_size} bytes, and not {_LENGTH}"
    return ""


def sign(content: bytes) -> str:
    """The signature of the list of a file; zeros where there is no folder for a key."""
    key = _key(make=True)
    return "0" * 64 if key is None else hmac.digest(key, content, "sha256").hex()


def is_own(archive: Archive) -> bool:
    """Whether this user wrote a file, and it was not changed since."""
    key = _key(make=False)
    if key is None:
        return False
    expected = hmac.digest(key, archive.signed(), "sha256").hex()
    return hmac.compare_digest(expected, str(archive.head.get("signature")))


def pickled(thing: object) -> bytes:
    """`thing` as `torch.save` writes it.

    Raises:
        poptorch.Error: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(thing, buffer)
    except Exception as error:
        raise createPoptorchError(
            f"the model cannot be pickled ({error}): save it with export_model=False, and load it "
            "with loadExecutable",
            id="saved-program",
        ) from error
    return buffer.getvalue()


def unpickled(content: bytes, archive: Archive) -> Any:
    """Inverse of `pickled`, for a member of `archive`.

    Raises:
        poptorch.Error: the file is another user's and not trusted. Nothing of it was run.
    """
    trusted = is_own(archive) or os.environ.get(TRUST) == "1"
    try:
        return torch.load(io.BytesIO(content), weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise
        raise createPoptorchError(
            f"{archive.path} has a pickled module in it, which may run code, and was not written "
            f"by you on this computer, or was changed since. If you trust it, set {TRUST}=1, or "
            "allow the classes that it needs by torch.serialization.add_safe_globals([...]).\n"
            f"{error}",
            id="saved-program",
        ) from error


def _key(*, make: bool) -> bytes | None:
    """The user's key; None where there is none, or it may be another user's."""
    store = open_store()
    if store is None:
        return None
    path: Path = store.folder / KEY
    if make and not path.exists():
        keep_first(path, secrets.token_bytes(_LENGTH))
    try:
        return None if key_problem(path) else path.read_bytes()
    except OSError:
        return None
