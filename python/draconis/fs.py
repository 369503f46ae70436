"""A file system for fsspec: ``ext://path/inside``, of an image given by ``image=`` or chained.

>>> import draconis, fsspec
>>> draconis.Volume.format("f.img", size=16 << 20)
>>> with fsspec.open("ext://table.csv", "w", image="f.img", writable=True) as file:
...     file.write("a,b\\n1,2\\n")
8
>>> with fsspec.open("ext://table.csv", "r", image="f.img") as file:
...     file.read()
'a,b\\n1,2\\n'
>>> with fsspec.open("ext://table.csv::f.img", "rb") as file:
...     file.readline()
b'a,b\\n'
"""

from __future__ import annotations

import datetime
import errno
import functools
import io
import os
import shutil
import stat as kinds
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Callable, Optional

from fsspec import AbstractFileSystem
from fsspec.utils import isfilelike, stringify_path, tokenize

from draconis.volume import Volume

_NAMES = {kinds.S_IFREG: "file", kinds.S_IFDIR: "directory"}


class _Image:
    """An image that is open only while it is in use, shared by all threads."""

    _all: dict[tuple[Any, ...], _Image]
    _all_lock: threading.Lock

    def __init__(self, open_volume: Callable[[], Volume]) -> None:
        self._open_volume = open_volume
        self._lock = threading.Lock()
        self._volume: Optional[Volume] = None
        self._users = 0

    @classmethod
    def _forget_all(cls) -> None:
        """Starts without images, as a forked child does: another thread may have had a lock."""
        cls._all, cls._all_lock = {}, threading.Lock()

    @classmethod
    def of(
        cls, path: str, writable: bool, partition: Optional[int], offset: Optional[int]
    ) -> _Image:
        """Returns the image of this process at a path."""
        key = (path, writable, partition, offset)
        mode = "w" if writable else "r"
        open_volume = functools.partial(Volume, path, mode, partition=partition, offset=offset)
        with cls._all_lock:
            return cls._all.setdefault(key, cls(open_volume))

    def acquire(self) -> Volume:
        """Opens the volume for its first user."""
        with self._lock:
            if self._volume is None:
                self._volume = self._open_volume()
            self._users += 1
            return self._volume

    def release(self, volume: Volume) -> None:
        """Closes the volume after its last user: all is durable, and the claim is released."""
        with self._lock:
            if volume is not self._volume:
                # It was closed meanwhile.
                return
            self._users -= 1
            if self._users == 0:
                self._volume = None
                volume.close()

    def close(self) -> None:
        """Closes the volume. Files that are still open raise ``EBADF`` from then on."""
        with self._lock:
            volume, self._volume, self._users = self._volume, None, 0
            if volume is not None:
                volume.close()


_Image._forget_all()
os.register_at_fork(after_in_child=_Image._forget_all)


class ExtFile(io.IOBase):
    """An open file, with what fsspec's open files have besides: ``size``, and ``commit`` and
    ``discard`` in a transaction. The image stays open as long as the file."""

    def __init__(
        self, fs: ExtFileSystem, path: str, mode: str, autocommit: bool, buffering: int
    ) -> None:
        self.fs, self.path, self.mode, self.autocommit = fs, path, mode, autocommit
        self.blocksize = buffering
        self._held: Optional[Volume] = None
        self.f: Any = None
        if not autocommit and "w" in mode:
            fs._check_writable(path)
            self.f = tempfile.TemporaryFile()
            return
        self._held = fs._image.acquire()
        try:
            self.f = self._held.open(path, mode, buffering)
            if "w" not in mode:
                self.size = self.f.seek(0, os.SEEK_END)
                self.f.seek(0)
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> Any:
        if "r" not in self.mode or "+" in self.mode:
            raise TypeError(f"{self.path}: a file that is open for writing cannot be pickled")
        return _reopen, (self.fs, self.path, self.mode, self.tell())

    def _fetch_range(self, start: int, end: int) -> Any:
        self.seek(start)
        return self.read(end - start)

    def commit(self) -> None:
        """Gives the file the contents that were written in a transaction."""
        if self.autocommit:
            raise RuntimeError("Can only commit if not already set to autocommit")
        self.f.seek(0)
        try:
            with self.fs._image_open(self.path) as volume, volume.open(self.path, "wb") as file:
                shutil.copyfileobj(self.f, file, 1 << 20)
        finally:
            self.f.close()

    def discard(self) -> None:
        """Drops what was written in a transaction."""
        if self.autocommit:
            raise RuntimeError("Cannot discard if set to autocommit")
        self.f.close()

    def close(self) -> None:
        if self.closed:
            return
        volume, self._held = self._held, None
        try:
            # A transaction reads what was written after the caller closed the file.
            if self.autocommit or "w" not in self.mode:
                if self.f is not None:
                    self.f.close()
        finally:
            super().close()
            if volume is not None:
                self.fs._image.release(volume)

    # io.IOBase has these, so that __getattr__ is not asked.

    def readable(self) -> bool:
        return bool(self.f.readable())

    def writable(self) -> bool:
        return bool(self.f.writable())

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check_open()
        return int(self.f.seek(offset, whence))

    def tell(self) -> int:
        self._check_open()
        return int(self.f.tell())

    def truncate(self, size: Optional[int] = None) -> int:
        self._check_open()
        return int(self.f.truncate(size))

    def flush(self) -> None:
        if self.f is not None and not self.f.closed:
            self.f.flush()

    def read(self, size: Optional[int] = -1) -> Any:
        """Reads bytes."""
        self._check_open()
        return self.f.read(size)

    def write(self, data: Any) -> Any:
        """Writes bytes."""
        self._check_open()
        return self.f.write(data)

    def readline(self, size: Optional[int] = -1) -> Any:
        self._check_open()
        return self.f.readline(size)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    def __iter__(self) -> Any:
        return self.f.__iter__()

    def __enter__(self) -> ExtFile:
        self._check_open()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("f", "size"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.f, name)


def _reopen(fs: ExtFileSystem, path: str, mode: str, at: int) -> ExtFile:
    file = ExtFile(fs, path, mode, True, -1)
    file.seek(at)
    return file


class ExtFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a volume. ``writable=True`` to change them, alone. ``partition`` and ``offset``
    are as for :class:`draconis.Volume`. Methods answer as those of fsspec's ``file://`` do.

    The image is in use only during a call and while a file is open; then all is durable, and
    others may open it. ``with fs:`` keeps it open for several calls."""

    protocol = "ext"
    root_marker = "/"

    def __init__(
        self,
        image: Optional[str] = None,
        *,
        writable: bool = False,
        auto_mkdir: bool = True,
        fo: Optional[str] = None,
        target_protocol: Optional[str] = None,
        target_options: Optional[dict[str, Any]] = None,
        partition: Optional[int] = None,
        offset: Optional[int] = None,
        **storage_options: Any,
    ) -> None:
        if self._cached:
            return
        super().__init__(**storage_options)
        if "mode" in storage_options:
            raise ValueError(
                f"mode={storage_options['mode']!r}: fsspec has an argument of this name; "
                "writable=True changes an image"
            )
        if target_protocol not in (None, "file", "local") or target_options:
            raise ValueError(
                f"{target_protocol}: an image is a local file or device; get it first"
            )
        image = image if image is not None else fo
        if image is None:
            raise ValueError("no image is given: image=PATH, or ext://path/inside::PATH")
        path = stringify_path(image)
        path = path[len("file://") :] if path.startswith("file://") else path
        #: Whether files can be changed.
        self.writable = bool(writable)
        #: Whether directories that are missing above a file that is written are made.
        self.auto_mkdir = auto_mkdir
        # The image is opened again by each call, wherever the process is then.
        self._path = os.path.join(os.getcwd(), path)
        self._place = (partition, offset)
        # What cannot be opened is refused here.
        with self:
            pass

    @property
    def _image(self) -> _Image:
        """The image of this process, which may be a fork of that which made this object."""
        return _Image.of(self._path, self.writable, *self._place)

    @property
    def fsid(self) -> str:
        """Identifies the volume across sessions."""
        return f"ext_{tokenize(self._path, *self._place)}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        if path.startswith("ext://"):
            path = path[len("ext://") :]
        return "/" + path.strip("/")

    def __enter__(self) -> ExtFileSystem:
        self._kept().append(self._image.acquire())
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._image.release(self._kept().pop())

    def _kept(self) -> list[Volume]:
        kept: list[Volume] = self.__dict__.setdefault("_kept_open", [])
        return kept

    def close(self) -> None:
        """Make all durable, and close what is still open. The next file system of these arguments
        is a new one."""
        type(self)._cache.pop(self._fs_token, None)
        self._image.close()

    def invalidate_cache(self, path: Optional[str] = None) -> None:
        """Nothing is kept."""

    def _check_writable(self, path: str) -> None:
        if not self.writable:
            text = f"{self._path}:{path}: the image is open for reading; writable=True changes it"
            raise OSError(errno.EROFS, text)

    @contextmanager
    def _reading(self) -> Iterator[Volume]:
        volume = self._image.acquire()
        try:
            yield volume
        finally:
            self._image.release(volume)

    @contextmanager
    def _image_open(self, path: str) -> Iterator[Volume]:
        """Opens the volume for a change of `path`."""
        self._check_writable(path)
        with self._reading() as volume:
            yield volume

    def _make_parent(self, path: str) -> None:
        if self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)

    # What is there.

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describes a file; of a symbolic link, what it leads to."""
        path = self._strip_protocol(path)
        with self._reading() as volume:
            found = volume.lstat(path)
            is_link = kinds.S_ISLNK(found.st_mode)
            if is_link:
                found = volume.stat(path)
            return _info(volume, path, found, found.st_size, is_link)

    def _entry_info(self, volume: Volume, path: str) -> dict[str, Any]:
        """Describes a name in a directory: a link as itself, with the size of its target."""
        found = volume.lstat(path)
        is_link = kinds.S_ISLNK(found.st_mode)
        size = found.st_size
        if is_link:
            try:
                size = volume.stat(path).st_size
            except OSError:
                # It leads nowhere.
                size = 0
        return _info(volume, path, found, size, is_link)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Lists a directory; of a file, itself."""
        path = self._strip_protocol(path)
        with self._reading() as volume:
            info = self.info(path)
            if info["type"] != "directory":
                return [info] if detail else [path]
            paths = [entry.path for entry in volume.scandir(path)]
            return [self._entry_info(volume, one) for one in paths] if detail else paths

    def _mode(self, path: str, *, follow: bool) -> int:
        """Returns the mode of a file, or 0 if there is none."""
        try:
            with self._reading() as volume:
                return volume.stat(self._strip_protocol(path), follow_symlinks=follow).st_mode
        except (OSError, ValueError):
            return 0

    def lexists(self, path: str, **kwargs: Any) -> bool:
        """Returns whether the name is there, also of a link that leads nowhere."""
        return self._mode(path, follow=False) != 0

    def islink(self, path: str) -> bool:
        """Returns whether it is a symbolic link."""
        return kinds.S_ISLNK(self._mode(path, follow=False))

    def isdir(self, path: str) -> bool:
        """Returns whether it is a directory."""
        return kinds.S_ISDIR(self._mode(path, follow=True))

    def isfile(self, path: str) -> bool:
        """Returns whether it is a regular file."""
        return kinds.S_ISREG(self._mode(path, follow=True))

    def modified(self, path: str) -> datetime.datetime:
        """Returns when the contents of a file changed last."""
        return _date(self.info(path)["mtime"])

    def created(self, path: str) -> datetime.datetime:
        """Returns when the inode of a file changed last, as ``file://`` does on Linux."""
        return _date(self.info(path)["created"])

    # Contents.

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Optional[int] = None,
        autocommit: bool = True,
        cache_options: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> ExtFile:
        path = self._strip_protocol(path)
        if set(mode) & set("wxa+"):
            self._check_writable(path)
        with self._reading():
            if mode[0] in "wxa":
                self._make_parent(path)
            return ExtFile(self, path, mode, autocommit, -1)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Makes a file; of one that is there, sets its times and, by default, empties it."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            self._make_parent(path)
            if volume.exists(path):
                now = time.time_ns()
                volume.utime(path, ns=(now, now))
            else:
                volume.open(path, "ab").close()
            if truncate:
                volume.truncate(path, 0)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copies a file, or makes a directory where one is copied."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        with self._image_open(target) as volume:
            self._make_parent(target)
            if self.isdir(source):
                self.makedirs(target, exist_ok=True)
                return
            if not self.isfile(source):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            if volume.exists(target) and volume.stat(source).st_ino == volume.stat(target).st_ino:
                raise shutil.SameFileError(f"{source!r} and {target!r} are the same file")
            with volume.open(source, "rb") as read, volume.open(target, "wb") as write:
                shutil.copyfileobj(read, write, 1 << 20)

    def get_file(self, rpath: str, lpath: Any = None, **kwargs: Any) -> None:
        """Copies a file to the host."""
        with self._reading():
            if not self.isdir(rpath) and not self.isfile(rpath):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), rpath)
            super().get_file(rpath, lpath, **kwargs)

    def put_file(self, lpath: Any, rpath: str, **kwargs: Any) -> None:
        """Copies a file of the host."""
        # Opening a pipe would wait for its writer.
        if not isfilelike(lpath) and not os.path.isfile(lpath) and not os.path.isdir(lpath):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), lpath)
        with self._image_open(self._strip_protocol(rpath)):
            super().put_file(lpath, rpath, **kwargs)

    # Names.

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Makes a directory."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            if self.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            volume.mkdir(path, kwargs.get("mode", 0o755), parents=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory, and those above it."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            if self.isdir(path):
                if not exist_ok:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                return
            try:
                volume.mkdir(path, parents=True, exist_ok=exist_ok)
            except FileExistsError:
                if self.lexists(path):
                    raise
                # A link above it leads nowhere.
                text = os.strerror(errno.ENOENT)
                raise FileNotFoundError(errno.ENOENT, text, path) from None

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            volume.rmdir(path)

    def rm_file(self, path: str) -> None:
        """Removes a file."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            volume.remove(path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Optional[int] = None) -> None:
        """Removes files, and with ``recursive`` directories."""
        for one in path if isinstance(path, list) else [path]:
            one = self._strip_protocol(one)
            with self._image_open(one) as volume:
                if not self.isdir(one) or self.islink(one):
                    volume.remove(one)
                elif not recursive:
                    raise ValueError(f"{one}: cannot delete a directory; set recursive=True")
                elif one == "/":
                    raise ValueError("/: cannot delete the root directory")
                else:
                    volume.rmtree(one)

    def mv(self, path1: str, path2: str, recursive: bool = True, **kwargs: Any) -> None:
        """Moves a file or directory; into a directory that is there, as ``mv`` does."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        with self._image_open(source) as volume:
            self._make_parent(target)
            found = volume.lstat(source)
            if self.isdir(target) and volume.stat(target).st_ino != found.st_ino:
                target = f"{target.rstrip('/')}/{source.rsplit('/', 1)[-1]}"
                if volume.exists(target):
                    raise shutil.Error(f"Destination path {target!r} already exists")
            if kinds.S_ISDIR(found.st_mode) and f"{target}/".startswith(f"{source}/"):
                if target != source:
                    raise shutil.Error(f"Cannot move {source!r} into itself, {target!r}")
            if kinds.S_ISDIR(found.st_mode) and self.isfile(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            volume.rename(source, target)

    def mv_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Moves a file."""
        self.mv(path1, path2)

    def link(self, src: str, dst: str, **kwargs: Any) -> None:
        """Gives a file another name."""
        source, target = self._strip_protocol(src), self._strip_protocol(dst)
        with self._image_open(target) as volume:
            volume.link(source, target)

    def symlink(self, src: str, dst: str, **kwargs: Any) -> None:
        """Makes a symbolic link at ``dst`` that leads to ``src``."""
        source, target = self._strip_protocol(src), self._strip_protocol(dst)
        with self._image_open(target) as volume:
            volume.symlink(source, target)

    def chmod(self, path: str, mode: int) -> None:
        """Changes permissions."""
        path = self._strip_protocol(path)
        with self._image_open(path) as volume:
            volume.chmod(path, mode)


def _info(
    volume: Volume, path: str, found: os.stat_result, size: int, is_link: bool
) -> dict[str, Any]:
    info = {
        "name": path,
        "size": size,
        "type": _NAMES.get(kinds.S_IFMT(found.st_mode), "other"),
        "created": found.st_ctime,
        "islink": is_link,
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime": found.st_mtime,
        "ino": found.st_ino,
        "nlink": found.st_nlink,
    }
    if is_link:
        info["destination"] = volume.readlink(path)
    return info


def _date(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)


def _open_once(name: str) -> Any:
    """Makes a method of fsspec's, which calls others, open the image once."""
    method = getattr(AbstractFileSystem, name)

    @functools.wraps(method)
    def call(self: ExtFileSystem, *args: Any, **kwargs: Any) -> Any:
        with self._reading():
            return method(self, *args, **kwargs)

    return call


for _name in ("cat", "cat_ranges", "copy", "du", "expand_path", "find", "get", "glob") + (
    "pipe",
    "put",
    "sizes",
    "tree",
):
    if hasattr(AbstractFileSystem, _name):
        setattr(ExtFileSystem, _name, _open_once(_name))
