"""Stores of objects and keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Optional, Union

from draconis import _draconis
from draconis.volume import _force


@dataclass(frozen=True)
class StoreReport:
    """What a check found. ``damage`` has the first of it in words."""

    clean: bool
    complete: bool
    damage: tuple[str, ...]
    more: int
    objects: int
    keys: int


class Store:
    """A store of objects and keys in a file or block device.

    ``mode`` is ``"r"`` or ``"w"``: to read beside others, or to change it alone. Each change is
    whole or absent after any crash, and follows all before it; it is durable after :meth:`sync`
    or :meth:`close`.

    >>> Store.create("s.store", size=8 << 20, sparse=True)
    >>> with Store("s.store", "w") as store:
    ...     number = store.objects.new(b"Dear reader,", name="letter")
    ...     store.sync()
    >>> with Store("s.store") as store:
    ...     store.objects[store.objects.named("letter")]
    b'Dear reader,'
    >>> Store.check("s.store").clean
    True
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], mode: str = "r") -> None:
        if mode not in ("r", "w"):
            raise ValueError(f"mode {mode!r}: 'r' reads, 'w' changes, too")
        self._path = os.fspath(path)
        self._inner = _draconis.Store(path, mode == "w")
        self.objects = Objects(self._inner)
        self.keys = Keys(self._inner)

    @staticmethod
    def create(
        path: Union[str, "os.PathLike[str]"],
        size: Optional[int] = None,
        *,
        layout: Optional[str] = None,
        sparse: bool = False,
        force: Union[bool, str] = False,
    ) -> None:
        """Make an empty store; a file that is not there is made.

        ``layout`` is ``"log"`` for disks on which distance costs time, ``"cow"`` for flash; else
        it is measured for about ten seconds, where the store is large enough to tell. ``sparse``
        leaves a file one hole instead of writing it out. A store or an ext volume is only
        overwritten with ``force``, anything else that is recognised only if ``force`` is its kind,
        such as ``"gpt"``.
        """
        _draconis.Store.create(path, size, layout, sparse, _force(force))

    @staticmethod
    def check(path: Union[str, "os.PathLike[str]"]) -> StoreReport:
        """Check every sum, map and count, without changing anything."""
        clean, complete, damage, more, objects, keys = _draconis.Store.check(path)
        return StoreReport(clean, complete, tuple(damage), more, objects, keys)

    def close(self) -> None:
        """Make all durable, and give the file back."""
        self._inner.close()

    def sync(self) -> None:
        """Make all durable."""
        self._inner.sync()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self._path!r})"

    @property
    def info(self) -> dict[str, object]:
        """Layout and sizes, in bytes."""
        return self._inner.info()


class Objects(MutableMapping[int, bytes]):
    """The objects of a store, by number. New ones are made by :meth:`new`; one that is there is
    replaced, whole or not at all, by ``objects[number] = data``.

    >>> Store.create("o.store", size=8 << 20, sparse=True)
    >>> with Store("o.store", "w") as store:
    ...     number = store.objects.new(b"one")
    ...     store.objects[number] = b"another"
    ...     store.objects.append(number, b" one")
    ...     store.objects[number], store.objects.read(number, 8, 3)
    (b'another one', b'one')
    """

    def __init__(self, inner: _draconis.Store) -> None:
        self._inner = inner

    def new(self, data: bytes = b"", *, name: Optional[str] = None) -> int:
        """Make an object, with a name if one is given; its number."""
        return self._inner.put_new(data, None if name is None else os.fsencode(name))[0]

    def __getitem__(self, number: int) -> bytes:
        return self._inner.read(number, 0, self.size(number))

    def __setitem__(self, number: int, data: bytes) -> None:
        self.size(number)
        self._inner.replace(number, data)

    def __delitem__(self, number: int) -> None:
        self.size(number)
        self._inner.delete(number)

    def __iter__(self) -> Iterator[int]:
        return (number for number, _ in self._inner.list())

    def __len__(self) -> int:
        return len(self._inner.list())

    def size(self, number: int) -> int:
        """The length of an object, in bytes."""
        try:
            return self._inner.len(number)
        except FileNotFoundError:
            raise KeyError(number) from None

    def read(self, number: int, at: int, length: int) -> bytes:
        """A part of an object."""
        return self._inner.read(number, at, length)

    def write(self, number: int, at: int, data: bytes) -> None:
        """Overwrite a part of an object, which grows if that is behind its end."""
        self._inner.write(number, at, data)

    def append(self, number: int, data: bytes) -> None:
        """Write behind the end of an object."""
        self._inner.append(number, data)

    def truncate(self, number: int, size: int) -> None:
        """Give an object a length; what is new reads as zeros."""
        self._inner.truncate(number, size)

    def named(self, name: str) -> int:
        """The number of the object that has a name."""
        found = self._inner.named(os.fsencode(name))
        if found is None:
            raise KeyError(name)
        return found

    def names(self) -> dict[str, int]:
        """All names, with the numbers of their objects."""
        return {os.fsdecode(name): number for name, number in self._inner.names()}


class Keys(MutableMapping[bytes, bytes]):
    """The keys of a store and their values, in the order of their bytes.

    >>> Store.create("k.store", size=8 << 20, sparse=True)
    >>> with Store("k.store", "w") as store:
    ...     store.keys.update({b"a": b"1", b"b": b"2", b"c": b"3"})
    ...     del store.keys[b"b"]
    ...     list(store.keys.items()), list(store.keys.scan(b"b", reverse=True))
    ([(b'a', b'1'), (b'c', b'3')], [(b'c', b'3')])
    """

    def __init__(self, inner: _draconis.Store) -> None:
        self._inner = inner

    def __getitem__(self, key: bytes) -> bytes:
        value = self._inner.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._inner.get(key) is not None

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._inner.write_keys([(key, value)])

    def __delitem__(self, key: bytes) -> None:
        if key not in self:
            raise KeyError(key)
        self._inner.write_keys([(key, None)])

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self._inner.scan(None, None, False))

    def __len__(self) -> int:
        return self._inner.count_keys()

    def update(self, changes: Any = (), /, **more: bytes) -> None:
        """Give keys values, all at once or none."""
        if more:
            raise TypeError("keys are bytes")
        pairs = changes.items() if isinstance(changes, Mapping) else changes
        self._inner.write_keys([(key, value) for key, value in pairs])

    def write(self, put: Mapping[bytes, bytes], delete: Iterable[bytes] = ()) -> None:
        """Give keys values and take keys away, all at once or none."""
        gone: list[tuple[bytes, Optional[bytes]]] = [(key, None) for key in delete]
        self._inner.write_keys([*gone, *put.items()])

    def scan(
        self, start: Optional[bytes] = None, end: Optional[bytes] = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from ``start`` (with it) to ``end`` (without it), as they are now,
        whatever changes meanwhile."""
        return iter(self._inner.scan(start, end, reverse))
