"""Write a configuration as JSON, into a folder or to the Hub, and read it back."""

import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

from ipu_dynamo.optimum.files import hub
from ipu_dynamo.optimum.files.config_files import (
    BASE_KEYS,
    GONE,
    IPU_CONFIG_NAME,
    read_file,
    repaired,
)
from ipu_dynamo.optimum.values.fields import fields_of
from ipu_dynamo.version import __version__

log = logging.getLogger(__name__)


class Stored:
    """Methods of a configuration to read and write files. Only its fields are kept."""

    model_type: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Every field, the versions of this package and of transformers, and `model_type`."""
        values = {name: _copied(getattr(self, name)) for name in fields_of(type(self))}
        return {
            **values,
            "model_type": self.model_type,
            "optimum_version": __version__,
            "transformers_version": _transformers_version(),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict`, without the defaults of every configuration of transformers."""
        return {name: value for name, value in self.to_dict().items() if name != "model_type"}

    def to_json_string(self, use_diff: bool = True) -> str:
        """The fields as JSON, sorted by name.

        Args:
            use_diff: leave out the defaults of every configuration of transformers.

        Raises:
            ValueError, TypeError: a field has a value that JSON cannot express.
        """
        values = self.to_diff_dict() if use_diff else self.to_dict()
        try:
            return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"
        except (ValueError, TypeError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            wrong = ", ".join(f"{n}={v!r}" for n, v in values.items() if not _is_json(v))
            raise kind(f"JSON cannot hold {wrong}: {error}") from error

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write `to_json_string` into a file.

        Args:
            json_file_path: path of the file.
            use_diff: as for `to_json_string`.
        """
        Path(json_file_path).write_text(self.to_json_string(use_diff), encoding="utf-8")

    def __repr__(self) -> str:
        values = json.dumps(self.to_diff_dict(), indent=2, sort_keys=True, default=repr)
        return f"{type(self).__name__} {values}\n"

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """A configuration from the result of `to_dict`, also of an older release.

        Args:
            config_dict: fields by name. Old forms are repaired, and unknown keys ignored, each
                with a warning.
            return_unused_kwargs: return the keywords that are no fields, too.
            kwargs: fields with other values than those of the dictionary.

        Raises:
            IncompatibleIPUConfigError: also `TypeError` and `ValueError`, as the constructor does.
        """
        values = repaired(config_dict, fields_of(cls))
        unused = {}
        if return_unused_kwargs:
            known = {*fields_of(cls), *GONE, *BASE_KEYS}
            unused = {name: value for name, value in kwargs.items() if name not in known}
        own = {name: value for name, value in kwargs.items() if name not in unused}
        config = cls(**{**values, **own})
        return (config, unused) if return_unused_kwargs else config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Self:
        """A configuration from a file; see `from_dict` and `config_files.read_file`.

        Args:
            json_file: path of the file.
        """
        config: Self = cls.from_dict(read_file(Path(json_file)))
        return config

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """A configuration from a folder, a file, or a repository of the Hub.

        Args:
            name: a folder with the file `ipu_config.json`, a path to a JSON file, or the id of a
                repository.
            return_unused_kwargs: return the keywords that are no fields, too.
            kwargs: arguments of the download (cache_dir, force_download, token, revision,
                subfolder, local_files_only, ...); all others are fields with other values.

        Raises:
            OSError: there is no such file or repository, or it is no configuration.
            ImportError: a repository is named, and huggingface_hub is not installed.
        """
        download = {key: kwargs.pop(key) for key in hub.DOWNLOAD & kwargs.keys()}
        path = _local(name, download.get("subfolder") or "")
        if path is None:
            path = hub.download(str(name), IPU_CONFIG_NAME, **download)
        return cls.from_dict(read_file(path), return_unused_kwargs=return_unused_kwargs, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write the file `ipu_config.json` into a folder, which is made if need be.

        Args:
            save_directory: path of the folder.
            push_to_hub: upload it, too, to the repository `repo_id`, or the folder's last part.
            kwargs: as for `push_to_hub`.

        Raises:
            AssertionError: the path is a file.
            OSError: it cannot be uploaded.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise AssertionError(f"{folder} is a file; a configuration is saved into a folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.to_json_file(folder / IPU_CONFIG_NAME)
        log.info("the configuration is saved in %s", folder / IPU_CONFIG_NAME)
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", None) or folder.resolve().name
            hub.upload(folder / IPU_CONFIG_NAME, repo_id, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload the configuration to a repository of the Hub, which is made if need be.

        Args:
            repo_id: of the repository.
            kwargs: commit_message, token (or use_auth_token), private, revision, create_pr.

        Returns:
            where it is.

        Raises:
            OSError: it cannot be uploaded.
            ImportError: huggingface_hub is not installed.
        """
        with TemporaryDirectory() as folder:
            self.to_json_file(Path(folder) / IPU_CONFIG_NAME)
            return hub.upload(Path(folder) / IPU_CONFIG_NAME, repo_id, **kwargs)


def _local(name: str | os.PathLike[str], subfolder: str) -> Path | None:
    """The file that a name means on this machine; None: it is one of the Hub.

    Raises:
        OSError: it is a folder without the file, or a path to nothing.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        file = path / subfolder / IPU_CONFIG_NAME
        if not file.is_file():
            raise OSError(f"the folder {path / subfolder} has no file {IPU_CONFIG_NAME}")
        return file
    text = os.fspath(name)
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.endswith(".json"):
        raise OSError(f"there is no configuration {text}: neither a file nor a folder")
    return None


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _transformers_version() -> str:
    """Of the installed transformers, which this package does not import; "" where there is none."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""
