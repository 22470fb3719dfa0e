"""Objects in an obstore store: S3, Google Cloud, Azure, a local folder, or memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from trak_lite.errors import ReadOnlyStoreError, StoreError, UnsupportedStoreError
from trak_lite.store.remote.objects import AbstractObjects, Content

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def is_obstore(where: object) -> bool:
    """Return whether an object is an obstore store."""
    return type(where).__module__.partition(".")[0] == "obstore"


def open_obstore(url: str, options: dict[str, object]) -> ObstoreObjects:
    """Return the objects below a URL; ImportError without obstore, StoreError if it rejects the URL."""
    from obstore.store import from_url

    with _named_errors("Opening", url):
        return ObstoreObjects(from_url(url, **options), url=url)  # type: ignore[call-overload]


@final
class ObstoreObjects(AbstractObjects):
    """Objects in an obstore store."""

    def __init__(self, store: ObjectStore, *, url: str | None = None) -> None:
        """Wrap a store whose prefix is the folder of the objects; messages name ``url``, or else its ``repr``."""
        described = repr(store)
        if " at 0x" in described:  # a memory address is unique only within this process
            described = f"{type(store).__name__} {id(store):#x} of process {os.getpid()}"
        self._url = url or described
        self._store = store

    @property
    def _obstore(self) -> Any:
        """The package, which is optional; an attribute of the object could not be pickled."""
        import obstore.exceptions

        return obstore

    @property
    def url(self) -> str:
        """The address, as used in messages."""
        return self._url

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or ``None`` if it does not exist."""
        with _named_errors("Getting", self.name(key)):
            try:
                return bytes(self._obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def put(self, key: str, content: Content) -> None:
        """Write an object, replacing an existing one."""
        with _named_errors("Putting", self.name(key)):
            self._obstore.put(self._store, key, content)

    def create(self, key: str, content: Content) -> bool:
        """Write an object only if it does not exist; return whether it was written."""
        with _named_errors("Creating", self.name(key)):
            try:
                # only single-request uploads can be conditional
                self._obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        """Return key and size in bytes of each object below a folder."""
        with _named_errors("Listing", self.name(folder)):
            pages = list(self._obstore.list(self._store, folder or None))
        return {entry["path"]: entry["size"] for page in pages for entry in page}

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        with _named_errors("Listing", self.name(folder)):
            prefixes = self._obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in prefixes]

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        with _named_errors("Deleting", self.name(key)), contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, key)


@contextlib.contextmanager
def _named_errors(doing: str, what: str) -> Iterator[None]:
    from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (NotSupportedError, NotImplementedError) as error:
        raise UnsupportedStoreError(
            f"{doing} {what} is not supported there: {_first_line(error)}. Use another place."
        ) from error
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise ReadOnlyStoreError(
            f"{doing} {what} was refused: {_first_line(error)}. Check the credentials and what they permit."
        ) from error
    except (BaseError, OSError) as error:
        raise StoreError(
            f"{doing} {what} failed: {_first_line(error)}. Rows that were put are safe in the staging folder; "
            "run again when the place can be reached."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
