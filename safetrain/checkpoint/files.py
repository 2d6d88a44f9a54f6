"""Checkpoint folders on disk: written whole or not at all, verified when read.

A checkpoint is a folder `step_00000010/`: `model.pt` (a plain state dict, usable anywhere), `state.pt` (the rest) and
`manifest.json` (digests, sizes, versions, step). It is written under another name, synced to disk and renamed, so a
folder of that name is complete or not there. Only `torch.load(weights_only=True)` reads it back: a checkpoint from a
stranger cannot run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from safetrain.checkpoint.plain import pack, unpack
from safetrain.errors import CheckpointError

MANIFEST = "manifest.json"
_MODEL, _STATE = "model.pt", "state.pt"
_FORMAT = 1
_FOLDER = re.compile(r"^step_(\d{8,})(\.old)?$")
_TEMPORARY = ".tmp-"
_CHUNK_BYTES = 1 << 20


def write(payload: Mapping[str, Any], directory: str | Path) -> Path:
    """Write a payload of `capture` as `directory/step_NNNNNNNN` and return that path.

    Saving a step again replaces its folder. A crash or a full disk at any moment leaves earlier checkpoints as they
    were.

    Raises:
        CheckpointError: the payload holds something that could not be loaded again, or the disk refused.
    """
    directory = Path(directory)
    step = payload["counters"]["step"]
    files = {
        _MODEL: pack(payload["model"], "model"),
        _STATE: {key: pack(value, key) for key, value in payload.items() if key != "model"},
    }
    final = directory / f"step_{step:08d}"
    temporary = directory / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        temporary.mkdir()
        try:
            _fill(temporary, files, step, payload["versions"])
            _move_into_place(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"could not write checkpoint {final}: {error}; earlier checkpoints are as they were"
        ) from error
    return final


def _fill(folder: Path, files: Mapping[str, Any], step: int, versions: Mapping[str, str]) -> None:
    sizes = {}
    for name, content in files.items():
        with open(folder / name, "wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # how torch's writer reports a full disk
                raise OSError(str(error)) from error
            file.flush()
            os.fsync(file.fileno())
        sizes[name] = {"sha256": _digest(folder / name), "bytes": (folder / name).stat().st_size}
    manifest = {
        "format": _FORMAT,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": dict(versions),
        "files": sizes,
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _move_into_place(temporary: Path, final: Path) -> None:
    old = final.with_name(final.name + ".old")
    if final.exists():
        # A folder cannot be replaced in one move. Between these two the old one is found under `.old`.
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Folders of writers that died."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------- finding and reading


def checkpoints(path: str | Path) -> list[Path]:
    """Checkpoint folders in a run directory (or in its `checkpoints/`), oldest step first."""
    path = Path(path)
    found: dict[int, Path] = {}
    for directory in (path, path / "checkpoints"):
        for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
            match = _FOLDER.match(folder.name)
            if match and (folder / MANIFEST).is_file() and not (match[2] and int(match[1]) in found):
                found[int(match[1])] = folder
    return [found[step] for step in sorted(found)]


def latest(path: str | Path) -> Path:
    """The checkpoint of the highest step in a run directory; `path` itself when it is a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file() or path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(
            f"no checkpoint at {path}: there is no such folder; give a run directory or one of its step_* folders"
        )
    found = checkpoints(path)
    if not found:
        if _FOLDER.match(path.name):
            raise CheckpointError(f"{path} has no {MANIFEST}, so it is no complete checkpoint{_others(path)}")
        raise CheckpointError(
            f"no checkpoint in {path}: it holds no step_* folder; give the run directory of a run that saved one"
        )
    return found[-1]


def read(path: str | Path) -> dict[str, Any]:
    """The payload of a checkpoint (of a run directory: its latest), on the CPU, after its digests were verified.

    Raises:
        CheckpointError: it is missing, truncated, was changed after it was written, or comes from a newer safetrain.
    """
    folder = latest(path)
    manifest = _read_manifest(folder)
    for name, facts in manifest["files"].items():
        _verify(folder, name, facts)
    payload: dict[str, Any] = {"model": _load(folder / _MODEL), **_load(folder / _STATE)}
    if payload["counters"]["step"] != manifest["step"]:
        raise CheckpointError(
            f"{folder}: the manifest says step {manifest['step']}, the state "
            f"{payload['counters']['step']}{_others(folder)}"
        )
    return payload


def read_weights(path: str | Path) -> dict[str, Any]:
    """A model's state dict alone: of a checkpoint, or of any file that `torch.save(model.state_dict())` wrote.

    Prefixes that every name carries (`module.` of DataParallel) are taken off.

    Raises:
        CheckpointError: the file is missing or damaged, or holds no state dict.
    """
    path = latest(path)
    weights = read(path)["model"] if path.is_dir() else _load(path)
    if not isinstance(weights, dict) or not all(isinstance(key, str) for key in weights):
        raise CheckpointError(
            f"{path} holds a {type(weights).__name__}, not a state dict; save `model.state_dict()` instead"
        )
    if weights and all(key.startswith("module.") for key in weights):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    return weights


def _read_manifest(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, not a checkpoint folder; a run resumes from a step_* folder (weights alone: "
            "load_weights)"
        )
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = {_MODEL, _STATE} <= set(manifest["files"]) and isinstance(manifest["step"], int)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error}){_others(folder)}") from error
    if manifest.get("format", 0) > _FORMAT:
        raise CheckpointError(
            f"{folder} was written by a newer safetrain (format {manifest['format']}, this one reads up to "
            f"{_FORMAT}); upgrade safetrain"
        )
    if not expected:
        raise CheckpointError(f"{folder / MANIFEST} does not list {_MODEL} and {_STATE}{_others(folder)}")
    return manifest


def _verify(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing{_others(folder)}")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise CheckpointError(
            f"{path} has {size} bytes instead of {facts['bytes']}: it was cut off or changed{_others(folder)}"
        )
    if _digest(path) != facts["sha256"]:
        raise CheckpointError(
            f"{path} was changed after it was written: its SHA-256 is not the manifest's{_others(folder)}"
        )


def _load(path: Path) -> Any:
    try:
        return unpack(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        # Many kinds: no zip archive, cut off, or a pickle that would need code to load.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} cannot be loaded as weights only: {reason[0]}") from error


def _others(folder: Path) -> str:
    """What else to resume from."""
    others = [path for path in checkpoints(folder.parent) if path != folder] if folder.parent.is_dir() else []
    return f"; resume from {others[-1]} instead" if others else "; no other checkpoint is beside it"


def prune(directory: str | Path, *, keep_last: int, keep: Path | None = None) -> list[Path]:
    """Delete all but the `keep_last` newest checkpoints and the one in `keep` (the best, say). Returns what is gone.

    Each is renamed before it is deleted, so that none is ever half there under its own name.
    """
    directory = Path(directory)
    kept = {path.name for path in checkpoints(directory)[-keep_last:]} if keep_last > 0 else set()
    if keep is not None:
        kept.add(Path(keep).name)
    deleted = []
    for folder in checkpoints(directory):
        if folder.name not in kept:
            doomed = folder.with_name(f"{_TEMPORARY}{folder.name}-{os.getpid()}")
            try:
                os.rename(folder, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointError(
                    f"could not delete the old checkpoint {folder}: {error}; training can go on, but the disk may fill"
                ) from error
            deleted.append(folder)
    return deleted
