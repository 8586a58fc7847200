"""Fetch a file from the Hub, and send one there. Only these two need huggingface_hub."""

import inspect
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

DOWNLOAD = frozenset(
    {
        "cache_dir",
        "force_download",
        "resume_download",
        "proxies",
        "use_auth_token",
        "token",
        "local_files_only",
        "revision",
        "subfolder",
    }
)
log = logging.getLogger(__name__)


def download(repo_id: str, name: str, **arguments: Any) -> Path:
    """A file of a repository, from this machine's cache or the network.

    Args:
        arguments: those of `DOWNLOAD`.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: no network, or the repository or its file does not exist.
    """
    library = _library(repo_id)
    token = arguments.pop("use_auth_token", None)
    arguments.setdefault("token", token)
    known = inspect.signature(library.hf_hub_download).parameters
    for key in [key for key in arguments if key not in known]:
        if arguments.pop(key):
            log.warning("this huggingface_hub has no argument %s, ignored", key)
    arguments = {key: value for key, value in arguments.items() if value is not None}
    try:
        return Path(library.hf_hub_download(repo_id, name, **arguments))
    except Exception as error:  # of requests, httpx or the library, by version
        raise OSError(
            f"cannot load {name} from the repository {repo_id!r} of the Hub, and there is no "
            f"folder of that name: {error}"
        ) from error


def upload(
    path: Path,
    repo_id: str,
    *,
    commit_message: str | None = None,
    token: str | bool | None = None,
    use_auth_token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool | None = None,
) -> str:
    """Send a file to a repository, which is made if need be; return where it is.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: it cannot be sent.
    """
    library = _library(repo_id)
    token = use_auth_token if token is None else token
    try:
        made = library.create_repo(repo_id, token=token, private=private, exist_ok=True)
        sent = library.upload_file(
            path_or_fileobj=path,
            path_in_repo=path.name,
            repo_id=getattr(made, "repo_id", repo_id),
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Upload {path.name}",
        )
    except Exception as error:  # of requests, httpx or the library, by version
        raise OSError(
            f"cannot send {path.name} to the repository {repo_id!r} of the Hub: {error}"
        ) from error
    return str(sent)


def _library(repo_id: str) -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            f"the repository {repo_id!r} is on the Hub, and huggingface_hub is not installed: "
            "run pip install '.[optimum]' in the checkout"
        ) from error
