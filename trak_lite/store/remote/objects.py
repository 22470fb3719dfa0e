"""Places that keep whole objects under keys, such as a bucket: the five things that a remote store asks of them.

An object is put as a whole or not at all, and is seen by everybody once putting it has returned. Nothing is appended,
renamed or locked: what decides between writers is :meth:`AbstractObjects.create`, which only one of them wins.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from trak_lite.errors import UnsupportedStoreError

__all__ = ["AbstractObjects", "Content", "require_exclusive"]

Content: TypeAlias = bytes | memoryview
"""Of an object; a memory view is of single bytes, contiguous, and not changed while it is put."""

_REQUESTS_AT_ONCE = 16


class AbstractObjects(ABC):
    """Objects below one address. Keys are ``/``-separated, relative to it, with no leading or trailing ``/``."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The address, for messages and for the name of the staging folder."""

    def name(self, key: str) -> str:
        """Return how messages name an object."""
        return f"{self.url}/{key}"

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return an object, ``None`` if there is none.

        Raises:
            StoreError: If the place cannot be reached, or refuses.
        """

    @abstractmethod
    def put(self, key: str, content: Content) -> None:
        """Put an object; one that is there already is replaced.

        Raises:
            ReadOnlyStoreError: If that is not permitted.
            StoreError: If the place cannot be reached, or refuses.
        """

    @abstractmethod
    def create(self, key: str, content: Content) -> bool:
        """Put an object unless there is one; of several callers at once, one wins.

        Returns:
            Whether it is ours now; ``False`` if there was one.

        Raises:
            UnsupportedStoreError: If the place cannot do this.
            ReadOnlyStoreError: If that is not permitted.
            StoreError: If the place cannot be reached, or refuses.
        """

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return key and bytes of every object below ``folder/``, none where there is no such folder."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names directly below ``folder/`` (or below the address, if empty) that have objects below them."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object if there is one."""

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """Return several small objects, asked for at the same time."""
        wanted = list(keys)
        if len(wanted) < 2:
            return {key: self.get(key) for key in wanted}
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(wanted))) as pool:
            return dict(zip(wanted, pool.map(self.get, wanted), strict=True))


def require_exclusive(objects: AbstractObjects) -> None:
    """Raise unless the place refuses to create an object twice: two writers would overwrite each other's rows.

    Raises:
        UnsupportedStoreError: If it does not.
        ReadOnlyStoreError: If nothing can be put there.
    """
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
