"""Objects in an fsspec file system that supports exclusive creation, such as ``memory://``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from trak_lite.errors import ReadOnlyStoreError, StoreError, UnsupportedStoreError
from trak_lite.store.remote.objects import AbstractObjects, Content

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def open_fsspec(url: str, options: dict[str, object]) -> FsspecObjects:
    """Return the objects below a URL; ImportError without the package for its scheme, ValueError if it is unknown."""
    import fsspec

    filesystem, root = fsspec.url_to_fs(url, **options)
    return FsspecObjects(filesystem, root, url=url)


@final
class FsspecObjects(AbstractObjects):
    """Objects below a path of an fsspec file system."""

    def __init__(self, filesystem: AbstractFileSystem, root: str, *, url: str) -> None:
        """Wrap a path of a file system, whose ``pipe_file`` supports ``mode="create"`` if it is written to."""
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """The address, as used in messages."""
        return self._url

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or ``None`` if it does not exist."""
        with _named_errors("Getting", self.name(key)):
            try:
                return bytes(self._filesystem.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def put(self, key: str, content: Content) -> None:
        """Write an object, replacing an existing one."""
        with _named_errors("Putting", self.name(key)):
            self._filesystem.pipe_file(self._path(key), bytes(content))

    def create(self, key: str, content: Content) -> bool:
        """Write an object only if it does not exist; return whether it was written."""
        if not _creates_exclusively(self._filesystem):
            raise UnsupportedStoreError(
                f"fsspec's {type(self._filesystem).__name__} cannot create an object only where there is none, so two "
                f"writers of {self._url} could overwrite each other's rows. Install obstore (pip install "
                "trak-lite[remote]) for S3, Google Cloud and Azure, or featurize into a local folder and copy it."
            )
        with _named_errors("Creating", self.name(key)):
            try:
                self._filesystem.pipe_file(self._path(key), bytes(content), mode="create")
            except FileExistsError:
                return False
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        """Return key and size in bytes of each object below a folder."""
        with _named_errors("Listing", self.name(folder)):
            self._filesystem.invalidate_cache()  # a cached listing lacks objects that others have written since
            entries = self._filesystem.find(self._path(folder), detail=True)
        start = len(self._filesystem._strip_protocol(self._root)) + 1
        return {path[start:]: int(entry["size"]) for path, entry in entries.items()}

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        with _named_errors("Listing", self.name(folder)):
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        with _named_errors("Deleting", self.name(key)), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def _creates_exclusively(filesystem: AbstractFileSystem) -> bool:
    """Return whether a file system overrides ``mode="create"``; the inherited one is check-then-write, not atomic."""
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    kind = type(filesystem)
    method = kind._pipe_file if isinstance(filesystem, AsyncFileSystem) else kind.pipe_file
    inherited = (AsyncFileSystem._pipe_file, fsspec.AbstractFileSystem.pipe_file)
    return method not in inherited and "mode" in inspect.signature(method).parameters


@contextlib.contextmanager
def _named_errors(doing: str, what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise ReadOnlyStoreError(
            f"{doing} {what} was refused: {error}. Check the credentials and what they permit."
        ) from error
    except OSError as error:
        raise StoreError(
            f"{doing} {what} failed: {error or type(error).__name__}. Rows that were put are safe in the staging "
            "folder; run again when the place can be reached."
        ) from error
