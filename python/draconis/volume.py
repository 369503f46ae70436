"""Volumes and the files in them."""

from __future__ import annotations

import io
import os
import stat as kinds
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, BinaryIO, Callable, Optional, Union, cast

from draconis import _draconis

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Host = Union[str, "os.PathLike[str]"]
#: Bytes that are read at once where nothing else is said.
BUFFER = 1 << 18


@dataclass(frozen=True)
class VolumeInfo:
    """What there is to know of a volume."""

    kind: str
    label: str
    uuid: uuid.UUID
    features: tuple[str, ...]
    clean: bool
    size: int
    block_size: int
    blocks: int
    free_blocks: int
    inodes: int
    free_inodes: int


@dataclass(frozen=True)
class Report:
    """What a check found. ``complaints`` has the first of them in words."""

    clean: bool
    complete: bool
    complaints: tuple[str, ...]
    more: int
    used_inodes: int
    inodes: int
    used_blocks: int
    blocks: int


@dataclass(frozen=True)
class DirEntry:
    """A name in a directory, as :func:`os.scandir` has them."""

    name: str
    path: str
    inode: int
    kind: int

    def is_dir(self) -> bool:
        """Whether it is a directory; a symbolic link is none."""
        return kinds.S_ISDIR(self.kind)

    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return kinds.S_ISREG(self.kind)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return kinds.S_ISLNK(self.kind)


class Volume:
    """An ext2, ext3 or ext4 volume in a file, a block device, a partition of either, a disk image
    (qcow2, VHDX; VHD, VMDK, Android sparse and compressed images are only read), or ``STORE#NAME``.
    ``backing`` is what a qcow2 image differs from, and what that does, the nearest first.

    ``mode`` is ``"r"`` or ``"w"``: to read beside others, or to change it alone. What was changed
    is in memory until :meth:`sync` or :meth:`close`; a crash before then leaves the volume
    consistent, as it was a while ago.

    >>> Volume.format("v.img", size=16 << 20)
    >>> with Volume("v.img", "w") as volume:
    ...     volume.write_text("/a", "contents")
    ...     volume.listdir("/")
    ['a', 'lost+found']
    >>> Volume("v.img").read_text("/none")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] v.img:/none: no such file or directory
    """

    def __init__(
        self,
        image: Union[str, "os.PathLike[str]"],
        mode: str = "r",
        *,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        backing: Sequence[Union[str, "os.PathLike[str]"]] = (),
    ) -> None:
        if mode not in ("r", "w"):
            raise ValueError(f"mode {mode!r}: 'r' reads, 'w' changes, too")
        self._image = os.fspath(image)
        self._inner = _draconis.Volume(image, mode == "w", offset, partition, list(backing))

    @staticmethod
    def format(
        image: Union[str, "os.PathLike[str]"],
        size: Optional[int] = None,
        *,
        kind: str = "ext4",
        label: str = "",
        features: str = "",
        block_size: Optional[int] = None,
        inodes: Optional[int] = None,
        reserved: Optional[float] = None,
        owner: Optional[tuple[int, int]] = None,
        image_format: Optional[str] = None,
        source: Union[Host, Sequence[Host]] = (),
        exclude: Sequence[str] = (),
        platform: Optional[str] = None,
        limit: Optional[int] = None,
        free: Union[int, str, None] = None,
        min: bool = False,
        give_to: Optional[tuple[int, int]] = None,
        squash: bool = False,
        reproducible: bool = False,
        force: Union[bool, str] = False,
    ) -> None:
        """Make a volume in an image, empty or filled; a file that is not there is made.

        ``features`` is as ``mke2fs -O`` spells them, ``owner`` that of the root directory,
        ``reserved`` the percentage kept for the superuser (5). ``image_format`` is ``"qcow2"`` or
        ``"vhdx"`` for a disk image. An ext volume is only overwritten with ``force``, anything else
        that is recognised only if ``force`` is its kind, such as ``"gpt"``; the error names it.

        ``source`` is a directory, or one or several tar archives and container images
        (``oci:DIR:TAG``, ``oci-archive:FILE:TAG``, ``docker-archive:FILE:TAG``), each over those
        before. Without ``size`` a file becomes as long as the source and its free space need.
        ``free`` is that space in bytes, or a percentage such as ``"20%"``; without it, 10 % of the
        volume and at least 16 MiB. ``min`` makes the smallest volume that holds the source, also on
        a longer device. ``exclude`` has patterns as ``tar --exclude`` has them, ``platform`` which image is
        taken of several, ``limit`` what an archive may unpack to. Everything becomes ``give_to``,
        or with ``squash`` root's and nothing for others. ``reproducible`` makes the same bytes of
        the same source. What is left out is told as a :class:`UserWarning`.

        >>> Volume.format("new.img", size=8 << 20, kind="ext2")
        >>> Volume("new.img").info.kind
        'ext2'
        >>> os.makedirs("tree/etc", exist_ok=True)
        >>> Volume.format("filled.qcow2", source="tree", image_format="qcow2")
        >>> Volume("filled.qcow2").listdir("/")
        ['etc', 'lost+found']
        """
        if min and (size is not None or free is not None):
            raise ValueError("min excludes size and free")
        several = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        filling: dict[str, object] = {
            "from": several,
            "exclude": [os.fsencode(pattern) for pattern in exclude],
            "platform": platform,
            "limit": limit,
            "free": free,
            "min": min,
            "give_to": give_to,
            "squash": squash,
            "reproducible": reproducible,
        }
        notes = _draconis.Volume.format(
            image,
            size,
            kind,
            os.fsencode(label),
            features,
            block_size,
            inodes,
            reserved,
            owner,
            image_format,
            filling,
            _force(force),
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)

    @staticmethod
    def grow(
        image: Host,
        size: Optional[int] = None,
        *,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        backing: Sequence[Host] = (),
    ) -> int:
        """Make a volume larger: ``size`` bytes, or as long as the file or device. A file is
        lengthened, with a hole. The length that the volume has then.

        >>> Volume.format("small.img", size=8 << 20)
        >>> Volume.grow("small.img", 16 << 20)
        16777216
        """
        return _draconis.Volume.grow(image, size, offset, partition, list(backing))

    @staticmethod
    def shrink(
        image: Host,
        size: Optional[int] = None,
        *,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        backing: Sequence[Host] = (),
    ) -> int:
        """Make a volume smaller: ``size`` bytes, or as short as what it holds. Files beyond the new
        end are moved, inodes there get other numbers, and a file is cut behind the volume. The
        length that the volume has then."""
        return _draconis.Volume.shrink(image, size, offset, partition, list(backing))

    @staticmethod
    def tune(
        image: Host,
        *,
        label: Optional[str] = None,
        uuid: Optional[Union[str, uuid.UUID]] = None,
        features: str = "",
        reserved: Optional[Union[int, str]] = None,
        errors: Optional[str] = None,
        max_mounts: Optional[int] = None,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        backing: Sequence[Host] = (),
    ) -> None:
        """Change what a volume says of itself; what is left out stays as it is.

        ``uuid`` is one, ``"random"`` or ``"clear"``; ``features`` as ``tune2fs -O`` spells them;
        ``reserved`` blocks, or a part such as ``"5%"``; ``errors`` what the kernel does about
        damage: ``"continue"``, ``"remount-ro"`` or ``"panic"``; ``max_mounts`` mounts after which
        the volume is to be checked, -1 for never.

        >>> Volume.format("named.img", size=8 << 20)
        >>> Volume.tune("named.img", label="new", reserved="0%")
        >>> Volume("named.img").info.label
        'new'
        """
        behaviours = (None, "continue", "remount-ro", "panic")
        if errors not in behaviours:
            raise ValueError(f"errors {errors!r}: continue, remount-ro or panic")
        _draconis.Volume.tune(
            image,
            None if label is None else os.fsencode(label),
            None if uuid is None else str(uuid),
            features,
            None if reserved is None else str(reserved),
            behaviours.index(errors) or None,
            max_mounts,
            offset,
            partition,
            list(backing),
        )

    @staticmethod
    def check(
        image: Union[str, "os.PathLike[str]"],
        *,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        backing: Sequence[Union[str, "os.PathLike[str]"]] = (),
    ) -> Report:
        """Check a volume without changing it. Damage is no exception, but in the report."""
        clean, complete, complaints, more, counts = _draconis.Volume.check(
            image, offset, partition, list(backing)
        )
        return Report(clean, complete, tuple(complaints), more, *counts)

    def close(self) -> None:
        """Make all durable, mark the volume as unmounted, and give the image back. Files that are
        still open raise ``EBADF`` from then on."""
        self._inner.close()

    def sync(self) -> None:
        """Make all durable."""
        self._inner.sync()

    def __enter__(self) -> Volume:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Volume({self._image!r})"

    @property
    def image(self) -> str:
        """The path of the image."""
        return self._image

    @property
    def writable(self) -> bool:
        """Whether it can be changed."""
        return self._inner.is_writable()

    @property
    def info(self) -> VolumeInfo:
        """What there is to know of it."""
        facts = cast("dict[str, Any]", self._inner.info())
        facts["label"] = os.fsdecode(facts["label"])
        facts["uuid"] = uuid.UUID(bytes=facts["uuid"])
        facts["features"] = tuple(facts["features"])
        return VolumeInfo(**facts)

    # What is there.

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        """What :func:`os.stat` would say."""
        return _stat_result(self._inner.stat(_bytes(path), follow_symlinks))

    def lstat(self, path: Path) -> os.stat_result:
        """What :func:`os.lstat` would say."""
        return self.stat(path, follow_symlinks=False)

    def exists(self, path: Path) -> bool:
        """Whether there is something at the path, through symbolic links."""
        return self._mode(path) is not None

    def isdir(self, path: Path) -> bool:
        """Whether it is a directory."""
        mode = self._mode(path)
        return mode is not None and kinds.S_ISDIR(mode)

    def isfile(self, path: Path) -> bool:
        """Whether it is a regular file."""
        mode = self._mode(path)
        return mode is not None and kinds.S_ISREG(mode)

    def _mode(self, path: Path) -> Optional[int]:
        try:
            return self.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def scandir(self, path: Path = "/") -> Iterator[DirEntry]:
        """What a directory holds, sorted. Of one that is damaged, what can be read comes first;
        then it raises."""
        entries, damage = self._inner.list(_bytes(path))
        above = os.fsdecode(path).rstrip("/")
        for name, inode, kind in entries:
            shown = os.fsdecode(name)
            yield DirEntry(shown, f"{above}/{shown}", inode, kind)
        if damage is not None:
            raise damage

    def listdir(self, path: Path = "/") -> list[str]:
        """The names in a directory, sorted."""
        return [entry.name for entry in self.scandir(path)]

    def walk(
        self,
        top: Path = "/",
        topdown: bool = True,
        onerror: Optional[Callable[[OSError], object]] = None,
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """As :func:`os.walk`: each directory with the names of directories and others in it.

        >>> Volume.format("w.img", size=16 << 20)
        >>> with Volume("w.img", "w") as volume:
        ...     volume.mkdir("/a/b", parents=True)
        ...     [top for top, dirs, files in volume.walk("/a")]
        ['/a', '/a/b']
        """
        dirs: list[str] = []
        files: list[str] = []
        try:
            for entry in self.scandir(top):
                (dirs if entry.is_dir() else files).append(entry.name)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        shown = os.fsdecode(top)
        if topdown:
            yield shown, dirs, files
        for name in dirs:
            yield from self.walk(f"{shown.rstrip('/')}/{name}", topdown, onerror)
        if not topdown:
            yield shown, dirs, files

    def readlink(self, path: Path) -> str:
        """Where a symbolic link leads."""
        return os.fsdecode(self._inner.readlink(_bytes(path)))

    def listxattr(self, path: Path, *, follow_symlinks: bool = True) -> list[str]:
        """The names of extended attributes."""
        names = self._inner.listxattr(_bytes(path), follow_symlinks)
        return [os.fsdecode(name) for name in names]

    def getxattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> bytes:
        """An extended attribute, by its whole name such as ``user.x``."""
        return self._inner.getxattr(_bytes(path), os.fsencode(name), follow_symlinks)

    def setxattr(
        self,
        path: Path,
        name: str,
        value: bytes,
        flags: int = 0,
        *,
        follow_symlinks: bool = True,
    ) -> None:
        """Sets an extended attribute. ``flags`` as with :func:`os.setxattr`: ``os.XATTR_CREATE``
        raises where it is there, ``os.XATTR_REPLACE`` where it is not."""
        if flags not in (0, 1, 2):
            raise ValueError(f"flags {flags}: XATTR_CREATE or XATTR_REPLACE")
        name_bytes = os.fsencode(name)
        self._inner.setxattr(_bytes(path), name_bytes, bytes(value), flags, follow_symlinks)

    def removexattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> None:
        """Removes an extended attribute."""
        self._inner.removexattr(_bytes(path), os.fsencode(name), follow_symlinks)

    # Contents.

    def open(
        self,
        path: Path,
        mode: str = "r",
        buffering: int = -1,
        encoding: Optional[str] = None,
        errors: Optional[str] = None,
        newline: Optional[str] = None,
        *,
        permissions: int = 0o644,
    ) -> IO[Any]:
        """As :func:`open`: a text file, or with ``b`` a buffered binary one, with ``buffering=0``
        an :class:`io.RawIOBase`. A file that is made gets ``permissions``.

        >>> Volume.format("o.img", size=16 << 20)
        >>> with Volume("o.img", "w") as volume:
        ...     with volume.open("/a", "wb") as file:
        ...         _ = file.write(b"one two")
        ...     with volume.open("/a", "r+b") as file:
        ...         _ = file.seek(4), file.write(b"2")
        ...     volume.read_bytes("/a")
        b'one 2wo'
        """
        letters = set(mode)
        bare = letters - set("bt+")
        if letters - set("rwxabt+") or len(mode) != len(letters) or len(bare) != 1:
            raise ValueError(f"invalid mode: {mode!r}")
        binary = "b" in letters
        if binary and "t" in letters:
            raise ValueError("can't have text and binary mode at once")
        if binary and not (encoding is None and errors is None and newline is None):
            raise ValueError("binary mode takes no encoding, errors or newline")
        if buffering == 0 and not binary:
            raise ValueError("can't have unbuffered text I/O")
        raw = _RawFile(self, path, bare.pop(), "+" in letters, permissions)
        if buffering == 0:
            return cast("IO[Any]", raw)
        try:
            size = BUFFER if buffering in (-1, 1) else buffering
            buffered: Any
            if raw.readable() and raw.writable():
                buffered = io.BufferedRandom(raw, size)
            elif raw.writable():
                buffered = io.BufferedWriter(raw, size)
            else:
                buffered = io.BufferedReader(raw, size)
            if binary:
                return cast("IO[Any]", buffered)
            text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
        except BaseException:
            raw.close()
            raise
        return text

    def read_bytes(self, path: Path) -> bytes:
        """All of a file."""
        file = self._inner.open(_bytes(path), False, False, False, False, 0)
        return file.read_at(0, _stat_result(file.stat()).st_size)

    def read_text(
        self, path: Path, encoding: Optional[str] = None, errors: Optional[str] = None
    ) -> str:
        """All of a text file."""
        with self.open(path, "r", encoding=encoding, errors=errors) as file:
            return cast(str, file.read())

    def write_bytes(self, path: Path, data: bytes, *, permissions: int = 0o644) -> None:
        """Make a file, or replace what it holds."""
        with self.open(path, "wb", permissions=permissions) as file:
            file.write(data)

    def write_text(
        self,
        path: Path,
        text: str,
        encoding: Optional[str] = None,
        errors: Optional[str] = None,
        newline: Optional[str] = None,
    ) -> None:
        """Make a text file, or replace what it holds."""
        with self.open(path, "w", -1, encoding, errors, newline) as file:
            file.write(text)

    def truncate(self, path: Path, size: int) -> None:
        """Give a file a length; what is new reads as zeros."""
        self._inner.set_attributes(_bytes(path), True, None, None, None, size, None)

    # Names.

    def mkdir(
        self, path: Path, mode: int = 0o755, *, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Make a directory, with ``parents`` also those above it."""
        try:
            self._inner.mkdir(_bytes(path), mode)
        except FileNotFoundError:
            above = os.path.dirname(os.fsdecode(path).rstrip("/"))
            if not parents or not above.strip("/"):
                raise
            self.mkdir(above, parents=True, exist_ok=True)
            # Another thread may have made it meanwhile.
            self.mkdir(path, mode, exist_ok=exist_ok)
        except OSError:
            # The root, which nothing is made in the place of, is there, too.
            if not exist_ok or not self.isdir(path):
                raise

    def remove(self, path: Path) -> None:
        """Remove a file, or whatever is no directory."""
        self._inner.unlink(_bytes(path))

    unlink = remove

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        self._inner.rmdir(_bytes(path))

    def rmtree(self, path: Path) -> None:
        """Remove a directory and all that it holds."""
        for top, dirs, files in self.walk(path, topdown=False, onerror=_raise):
            for name in files:
                self.remove(f"{top.rstrip('/')}/{name}")
            for name in dirs:
                self.rmdir(f"{top.rstrip('/')}/{name}")
        self.rmdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Move a name; a file, or an empty directory, that is there is replaced."""
        self._inner.rename(_bytes(source), _bytes(target), True)

    def symlink(self, target: Path, path: Path) -> None:
        """Make a symbolic link at ``path`` that leads to ``target``."""
        self._inner.symlink(_bytes(target), _bytes(path))

    def link(self, source: Path, path: Path) -> None:
        """Give a file another name."""
        self._inner.link(_bytes(source), _bytes(path))

    # Attributes.

    def chmod(self, path: Path, mode: int, *, follow_symlinks: bool = True) -> None:
        """Change permissions."""
        self._inner.set_attributes(_bytes(path), follow_symlinks, mode, None, None, None, None)

    def chown(self, path: Path, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """Change owner and group; -1 leaves one as it is."""
        owner, group = (None if one == -1 else one for one in (uid, gid))
        self._inner.set_attributes(
            _bytes(path), follow_symlinks, None, owner, group, None, None
        )

    def utime(self, path: Path, ns: tuple[int, int], *, follow_symlinks: bool = True) -> None:
        """Set when it was accessed and modified, in nanoseconds since 1970."""
        self._inner.set_attributes(_bytes(path), follow_symlinks, None, None, None, None, ns)

    def tar(self, file: Union[BinaryIO, IO[bytes]], path: Path = "/") -> list[str]:
        """Write what is at and below ``path`` as a tar archive (pax, with owners, times, extended
        attributes and holes). What could not be read is left out, and said in the list.

        >>> import io, tarfile
        >>> Volume.format("t.img", size=16 << 20)
        >>> with Volume("t.img", "w") as volume:
        ...     volume.mkdir("/d")
        ...     volume.write_bytes("/d/a", b"1")
        ...     archive = io.BytesIO()
        ...     volume.tar(archive, "/d")
        []
        >>> tarfile.open(fileobj=io.BytesIO(archive.getvalue())).getnames()
        ['d', 'd/a']
        """
        return self._inner.tar(_bytes(path), file.write)


class _RawFile(io.RawIOBase):
    """A file without a buffer."""

    def __init__(
        self, volume: Volume, path: Path, letter: str, both: bool, permissions: int
    ) -> None:
        self._write = letter != "r" or both
        self._read = letter == "r" or both
        self._append = letter == "a"
        self._at = 0
        self.name = os.fsdecode(path)
        self.mode = {"r": "rb", "w": "wb", "x": "xb", "a": "ab"}[letter] + ("+" if both else "")
        self._file = volume._inner.open(
            _bytes(path), self._write, letter != "r", letter == "x", letter == "w", permissions
        )
        if self._append:
            self._at = self._size()

    def _size(self) -> int:
        return _stat_result(self._file.stat()).st_size

    def _usable(self, for_what: bool, word: str) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not for_what:
            raise io.UnsupportedOperation(f"not {word}")

    def readable(self) -> bool:
        return self._read

    def writable(self) -> bool:
        return self._write

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._usable(self._read, "readable")
        view = memoryview(buffer).cast("B")
        data = self._file.read_at(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        self._usable(self._read, "readable")
        data = self._file.read_at(self._at, max(0, self._size() - self._at))
        self._at += len(data)
        return data

    def write(self, data: Any) -> int:
        self._usable(self._write, "writable")
        if self._append:
            self._at = self._size()
        done = self._file.write_at(self._at, bytes(data))
        self._at += done
        return done

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._usable(True, "seekable")
        if whence == os.SEEK_CUR:
            offset += self._at
        elif whence == os.SEEK_END:
            offset += self._size()
        elif whence != os.SEEK_SET:
            raise ValueError(f"invalid whence ({whence})")
        if offset < 0:
            raise ValueError(f"negative seek position {offset}")
        self._at = offset
        return offset

    def tell(self) -> int:
        self._usable(True, "seekable")
        return self._at

    def truncate(self, size: Optional[int] = None) -> int:
        self._usable(self._write, "writable")
        size = self._at if size is None else size
        self._file.truncate(size)
        return size

    def sync(self) -> None:
        """Make it durable; flush what is in buffers first."""
        self._usable(True, "open")
        self._file.sync()

    def close(self) -> None:
        if not self.closed:
            super().close()
            # Gives up what keeps a file without names alive.
            self.__dict__.pop("_file", None)


def _raise(error: OSError) -> None:
    raise error


def _force(force: Union[bool, str]) -> Optional[str]:
    """What may be overwritten: nothing, what is usual, or one kind."""
    if isinstance(force, str):
        return force
    return "" if force else None


def _bytes(path: Path) -> bytes:
    return os.fsencode(path)


def _stat_result(of: Any) -> os.stat_result:
    inode, mode, links, uid, gid, (major, minor), size, blocks, accessed, modified, changed = of
    times = (accessed, modified, changed)
    whole = tuple(time // 10**9 for time in times)
    fields = (mode, inode, 0, links, uid, gid, size) + whole
    more = {
        "st_atime": accessed / 1e9,
        "st_mtime": modified / 1e9,
        "st_ctime": changed / 1e9,
        "st_atime_ns": accessed,
        "st_mtime_ns": modified,
        "st_ctime_ns": changed,
        "st_blksize": 4096,
        "st_blocks": blocks,
        "st_rdev": os.makedev(major, minor),
    }
    return os.stat_result(fields, more)
