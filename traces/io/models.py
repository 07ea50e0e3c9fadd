"""Trained models on disk: arrays in safetensors, everything a person would ask in TOML beside them.

Nothing in the two files can run code. The TOML names the version of the files, the checksum of the
arrays and where they came from. Files of another version, altered or cut short, are rejected in one
sentence.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import tomli_w

from fedstale.errors import FedstaleError
from fedstale.traces.io.files import replacing

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """How the two files of one kind of model are called and told from others."""

    what: str
    """Of the model; the files are WHAT.toml and WHAT.safetensors."""
    made_by: str
    """Command that writes them, for sentences."""
    version: tuple[str, int]
    """Key and number in the TOML; it grows when an old reader would misread new files."""
    most_bytes: int
    """Size of the arrays at most."""
    error: type[FedstaleError]
    """What is raised."""

    @property
    def toml(self) -> str:
        """Name of the description."""
        return f"{self.what}.toml"

    @property
    def safetensors(self) -> str:
        """Name of the file of arrays."""
        return f"{self.what}.safetensors"

    def write(
        self, folder: str | Path, arrays: Mapping[str, npt.NDArray[Any]], about: Mapping[str, Any]
    ) -> None:
        """Write both files, the description last.

        Args:
            folder: made if it is missing.
            arrays: of the model.
            about: what the description says besides version and checksum; plain values.
        """
        folder = Path(folder)
        data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()})
        key, number = self.version
        head = {key: number, "sha256": hashlib.sha256(data).hexdigest()}
        folder.mkdir(parents=True, exist_ok=True)
        text = tomli_w.dumps(head | dict(about)).encode()
        for name, content in ((self.safetensors, data), (self.toml, text)):
            with replacing(folder / name) as file:
                file.write(content)

    def describe(self, folder: str | Path) -> dict[str, Any]:
        """Return the description.

        Raises:
            FedstaleError: of the kind of `error`; it is missing, or is none of this version.
        """
        path, (key, number) = Path(folder) / self.toml, self.version
        try:
            about = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self.error(
                f"{folder}: no {self.toml} there: expected a folder that `{self.made_by}` wrote"
            ) from None
        except (OSError, ValueError, RecursionError) as problem:
            raise self.error(f"{path}: cannot be read ({problem})") from None
        if about.get(key) != number:
            raise self.error(
                f"{path}: {key} = {about.get(key)!r}, expected {number}; train the {self.what} "
                "again with this version of fedstale"
            )
        return about

    def arrays(self, folder: str | Path, about: Mapping[str, Any]) -> Arrays:
        """Return the arrays that a description goes with.

        Raises:
            FedstaleError: of the kind of `error`; they are missing, altered, cut short, too large,
                or hold a number that is not finite.
        """
        path = Path(folder) / self.safetensors
        try:
            if path.stat().st_size > self.most_bytes:
                raise self.error(f"{path}: larger than {self.most_bytes} bytes, no {self.what} is")
            data = path.read_bytes()
        except OSError as problem:
            raise self.error(f"{path}: cannot be read ({problem.strerror})") from None
        if hashlib.sha256(data).hexdigest() != about.get("sha256"):
            raise self.error(
                f"{path}: altered or cut short, its SHA-256 is not the one in {self.toml}; copy "
                "both files again"
            )
        try:
            found: Arrays = safetensors.numpy.load(data)
        except safetensors.SafetensorError as problem:
            raise self.error(f"{path}: not a safetensors file ({problem})") from None
        for name, array in found.items():
            if np.issubdtype(array.dtype, np.floating) and not np.all(np.isfinite(array)):
                raise self.error(f"{path}: {name} holds a number that is not finite")
        return found
