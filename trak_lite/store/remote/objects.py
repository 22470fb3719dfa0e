"""Interface to object stores, such as a bucket.

Writes are atomic, and an object is visible to everybody once the write has returned. Objects are never appended to,
renamed or locked. Concurrent writers are arbitrated by :meth:`AbstractObjects.create`, which succeeds for only one.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from trak_lite.errors import UnsupportedStoreError

Content: TypeAlias = bytes | memoryview
"""Content of an object. A memoryview must be contiguous, have itemsize 1, and not change during the upload."""

_REQUESTS_AT_ONCE = 16


class AbstractObjects(ABC):
    """Objects below one address. Keys are relative to the address, without leading or trailing ``/``."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address; used in messages and to derive the name of the staging folder."""

    def name(self, key: str) -> str:
        """Return the name of an object for messages."""
        return f"{self.url}/{key}"

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the content of an object, or ``None`` if it does not exist.

        Raises:
            StoreError: If the request fails.
        """

    @abstractmethod
    def put(self, key: str, content: Content) -> None:
        """Write an object, replacing an existing one.

        Raises:
            ReadOnlyStoreError: If writing is not permitted.
            StoreError: If the request fails.
        """

    @abstractmethod
    def create(self, key: str, content: Content) -> bool:
        """Write an object only if it does not exist; of several concurrent calls, one succeeds.

        Returns:
            Whether the object was written; ``False`` if it existed.

        Raises:
            UnsupportedStoreError: If the object store does not support this.
            ReadOnlyStoreError: If writing is not permitted.
            StoreError: If the request fails.
        """

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return key and size in bytes of each object below ``folder/`` (all objects, if ``folder`` is empty)."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below ``folder/`` (below the address, if ``folder`` is empty)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object if it exists."""

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """Return several small objects by key, fetched concurrently; ``None`` for those that do not exist."""
        wanted = list(keys)
        if len(wanted) < 2:
            return {key: self.get(key) for key in wanted}
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(wanted))) as pool:
            return dict(zip(wanted, pool.map(self.get, wanted), strict=True))


def require_exclusive(objects: AbstractObjects) -> None:
    """Raise unless creating an existing object fails; otherwise two writers could overwrite each other's rows."""
    key = f".probe-{uuid.uuid4().hex}"
    try:
        objects.create(key, b"1")
        twice = objects.create(key, b"2")
    finally:
        objects.delete(key)
    if twice:
        raise UnsupportedStoreError(
            f"{objects.url} let the same object be created twice, so two writers could overwrite each other's rows. "
            "Use a place with conditional writes (S3, GCS and Azure have them), or featurize into a local folder and "
            "copy it there when it is finished."
        )
