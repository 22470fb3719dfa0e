"""Address of a remote store and its local staging folder."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any, final

from trak_lite.core.validate import installing
from trak_lite.errors import InvalidInputError, UnsupportedStoreError
from trak_lite.store.manifest import Manifest
from trak_lite.store.remote.objects import AbstractObjects
from trak_lite.store.remote.objects_fsspec import open_fsspec
from trak_lite.store.remote.objects_obstore import ObstoreObjects, is_obstore, open_obstore

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")
_OF_OBSTORE = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"}


@final
class RemotePlace:
    """An address in an object store, with a local staging folder for incomplete chunks.

    Rows are first written to the staging folder, which is a local store. A complete chunk is uploaded to the address
    and removed from the folder. A killed run that is resumed on the same machine finds its rows in the folder. Another
    machine sees only what is at the address.

    Example:
        >>> place = RemotePlace("memory://bucket/run.zarr", staging="/scratch/me")
        >>> str(place)
        'memory://bucket/run.zarr'
    """

    def __init__(
        self,
        where: object,
        *,
        staging: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a client for the address; sends no request.

        Args:
            where: A URL (``s3://bucket/run.zarr``), an obstore store with the prefix of the run, or a custom
                :class:`~trak_lite.store.AbstractObjects`.
            staging: Folder on a local disk, which stores may share; ``None`` is ``trak_lite/staging`` in the user's
                cache folder. Use the same folder when resuming, or the rows of incomplete chunks are lost.
            options: Keyword arguments of ``obstore.store.from_url`` or ``fsspec.url_to_fs``, such as credentials,
                region and endpoint.

        Raises:
            InvalidInputError: If ``where`` has another type or is not a remote URL.
            UnsupportedStoreError: If the package for the URL scheme is not installed.
        """
        self.objects = _connect(where, dict(options or {}))
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._staging = os.path.join(cache, "trak_lite", "staging") if staging is None else os.fspath(staging)

    @property
    def url(self) -> str:
        """The address, as used in messages."""
        return self.objects.url

    def __str__(self) -> str:
        return self.url

    def staging_root(self, manifest: Manifest) -> str:
        """Return the folder of the local staging store for this address and these settings."""
        key = hashlib.sha256(f"{self.url}\n{manifest.digest()}".encode()).hexdigest()[:32]
        return os.path.join(os.path.realpath(self._staging), f"{key}.zarr")


def resolve_place(where: object) -> str | RemotePlace:
    """Return a local path, with ``~`` replaced by the home folder; convert anything else to a :class:`RemotePlace`.

    Example:
        >>> resolve_place("runs/digits.zarr"), str(resolve_place("memory://digits.zarr"))
        ('runs/digits.zarr', 'memory://digits.zarr')
    """
    if isinstance(where, RemotePlace):
        return where
    if isinstance(where, os.PathLike) or (isinstance(where, str) and not _URL.fullmatch(where)):
        return os.path.expanduser(os.fspath(where))
    return RemotePlace(where)


def _connect(where: object, options: dict[str, object]) -> AbstractObjects:
    if isinstance(where, AbstractObjects):
        return where
    if is_obstore(where):
        return ObstoreObjects(where)  # type: ignore[arg-type]
    scheme = _URL.fullmatch(where) if isinstance(where, str) else None
    if scheme is None or scheme[1].lower() == "file":
        raise InvalidInputError(
            f"{where!r} is not the address of a store. Expected a local path (a folder needs no 'file://'), a URL such "
            "as 's3://bucket/run.zarr', or a store of obstore's."
        )
    return _connect_url(scheme[0], scheme[1].lower(), options)


def _connect_url(url: str, scheme: str, options: dict[str, object]) -> AbstractObjects:
    missing: list[str] = []
    for connect in (open_obstore, open_fsspec) if scheme in _OF_OBSTORE else (open_fsspec,):
        try:
            return connect(url, options)
        except ImportError as error:
            missing.append(str(error))
        except ValueError as error:
            raise InvalidInputError(
                f"{url} cannot be opened: {error}. Expected a scheme such as s3, gs, az or memory."
            ) from error
    raise UnsupportedStoreError(
        f"{url} needs a package that is not installed ({'; '.join(missing)}). {installing('remote')}"
    )
