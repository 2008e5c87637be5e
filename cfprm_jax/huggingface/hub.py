"""Models named as on the Hugging Face hub: downloaded into the hub's cache, and exports uploaded."""

from __future__ import annotations

import os
import pathlib
import re
from typing import cast

from cfprm_jax.errors import UserError

# What a model directory is read from; other formats of weights are not downloaded.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "README.md")
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


def local_directory(name: str, flag: str = "--model") -> str:
    """The directory of a model that is named by a path or as on the hub.

    A path that exists is returned as it is. "owner/name" and "owner/name@revision" are downloaded into the hub's cache
    (HF_HOME), or found there; HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their usual effect. Every other text is
    returned unchanged, for the caller's own error.

    Args:
      name: path or name.
      flag: of errors.

    Returns:
      The directory; that of a download ends with the commit.

    Raises:
      UserError: the hub has no such repository or revision, requires a token, or cannot be reached and the cache does
        not have the model.
    """
    match = _NAME.fullmatch(name)
    if match is None or pathlib.Path(name).exists():
        return name
    import huggingface_hub
    from huggingface_hub import errors

    repository, revision = match["repository"], match["revision"]
    where = f"{flag}={name}"
    try:
        # The endpoint is read here, as the library reads it once when it is imported.
        directory = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(_FILES), endpoint=os.environ.get("HF_ENDPOINT")
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{where}: access to this repository of the hub is restricted. Accept its terms on its page, and set "
            "HF_TOKEN or run: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where}: the repository has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{where} is neither a directory nor a model on the hub that you have access to; a private one requires "
            "HF_TOKEN or: hf auth login"
        ) from error
    except errors.HFValidationError:  # no name that the hub could have, such as runs/first--try
        return name
    except OSError as error:  # also no network and HF_HUB_OFFLINE; a full disk names its own path
        raise UserError(
            f"{where} is not a directory, and downloading it from the hub failed: {_first_line(error)}. Where there is "
            f"a network, run: hf download {repository} --local-dir models/{repository.split('/')[1]}, copy the "
            "directory, and give its path"
        ) from error
    return directory


def upload(directory: pathlib.Path, repository: str, private: bool) -> str:
    """Upload an exported directory, replacing files of the same names; the repository is created if there is none.

    Returns:
      The address of the commit.

    Raises:
      UserError: the name is not of the form owner/name, there is no token, or the hub refuses.
    """
    check_name(repository)
    import huggingface_hub
    from huggingface_hub import errors

    # The bases of the library's own error are those of the HTTP client, whose errors of a connection are no OSError.
    failures: tuple[type[Exception], ...] = (
        OSError,
        *cast(tuple[type[Exception], ...], errors.HfHubHTTPError.__bases__),
    )
    try:
        hub = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Export of cfprm_jax")
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"--push_to_hub={repository}: no token; set HF_TOKEN or run: hf auth login") from error
    except failures as error:
        raise UserError(
            f"--push_to_hub={repository}: {_first_line(error)}. The export itself is complete: {directory}"
        ) from error
    return str(commit.commit_url)


def check_name(repository: str) -> None:
    """Raise UserError for a text that cannot name a repository."""
    match = _NAME.fullmatch(repository)
    if match is None or match["revision"]:
        raise UserError(f"--push_to_hub={repository}: expected owner/name")
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(repository)
    except errors.HFValidationError as error:
        raise UserError(f"--push_to_hub={repository}: expected owner/name: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
