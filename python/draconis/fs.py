"""A file system for fsspec: ``ext://path/inside``, of an image given by ``image=`` or chained.

>>> import draconis, fsspec
>>> draconis.Volume.format("f.img", size=16 << 20)
>>> with draconis.Volume("f.img", "w") as volume:
...     volume.write_text("/table.csv", "a,b\\n1,2\\n")
>>> with fsspec.open("ext://table.csv", "r", image="f.img") as file:
...     file.read()
'a,b\\n1,2\\n'
>>> with fsspec.open("ext://table.csv::f.img", "rb") as file:
...     file.readline()
b'a,b\\n'
"""

from __future__ import annotations

import datetime
import stat as kinds
from typing import Any, Optional

from fsspec import AbstractFileSystem
from fsspec.utils import stringify_path

from draconis.volume import Volume

_NAMES = {kinds.S_IFREG: "file", kinds.S_IFDIR: "directory", kinds.S_IFLNK: "link"}


class ExtFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a volume. ``mode="w"`` to change them, alone: then :meth:`close` makes all
    durable and gives the image back. ``partition`` and ``offset`` are as for
    :class:`draconis.Volume`.

    fsspec keeps the file systems that it made, and each holds its image: before another program
    changes that, ``ExtFileSystem.clear_instance_cache()`` gives up those that are not in use."""

    protocol = "ext"
    root_marker = "/"

    def __init__(
        self,
        image: Optional[str] = None,
        mode: str = "r",
        *,
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
        if target_protocol not in (None, "file", "local") or target_options:
            raise ValueError(
                f"{target_protocol}: an image is a local file or device; get it first"
            )
        image = image if image is not None else fo
        if image is None:
            raise ValueError("no image is given: image=PATH, or ext://path/inside::PATH")
        path = stringify_path(image)
        path = path[len("file://") :] if path.startswith("file://") else path
        self.volume = Volume(path, mode, partition=partition, offset=offset)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        if path.startswith("ext://"):
            path = path[len("ext://") :]
        return "/" + path.strip("/")

    def close(self) -> None:
        """Make all durable, and give the image back. The next file system of these arguments is
        a new one."""
        type(self)._cache.pop(self._fs_token, None)
        self.volume.close()

    def invalidate_cache(self, path: Optional[str] = None) -> None:
        """Nothing is kept."""

    def _info(self, path: str, *, follow: bool) -> dict[str, Any]:
        found = self.volume.stat(path, follow_symlinks=follow)
        info = {
            "name": path,
            "size": found.st_size,
            "type": _NAMES.get(kinds.S_IFMT(found.st_mode), "other"),
            "mode": found.st_mode,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "ino": found.st_ino,
            "nlink": found.st_nlink,
            "mtime": found.st_mtime,
            "created": found.st_ctime,
            "islink": False,
        }
        return info

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """What there is to know of a file; of a symbolic link, of what it leads to."""
        path = self._strip_protocol(path)
        info = self._info(path, follow=False)
        if info["type"] != "link":
            return info
        destination = self.volume.readlink(path)
        try:
            info = self._info(path, follow=True)
        except OSError:
            # It leads nowhere.
            info["size"] = None
        info.update(islink=True, destination=destination)
        return info

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What a directory holds; of a file, itself."""
        path = self._strip_protocol(path)
        info = self.info(path)
        if info["type"] != "directory":
            return [info] if detail else [path]
        paths = [entry.path for entry in self.volume.scandir(path)]
        return [self.info(one) for one in paths] if detail else paths

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Optional[int] = None,
        autocommit: bool = True,
        cache_options: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> Any:
        if not autocommit:
            raise NotImplementedError("ext:// has no transactions of files")
        path = self._strip_protocol(path)
        if mode[0] in "wxa" and self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)
        return self.volume.open(path, mode)

    #: Directories that are missing above a file that is written are made.
    auto_mkdir = True

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory."""
        self.volume.mkdir(self._strip_protocol(path), parents=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory, and those above it."""
        self.volume.mkdir(self._strip_protocol(path), parents=True, exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self.volume.rmdir(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self.volume.remove(self._strip_protocol(path))

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Optional[int] = None) -> None:
        """Remove files, and with ``recursive`` directories."""
        for one in [path] if isinstance(path, (str, bytes)) else path:
            one = self._strip_protocol(one)
            if self.info(one)["type"] != "directory" or self.info(one)["islink"]:
                self.volume.remove(one)
            elif recursive:
                self.volume.rmtree(one)
            else:
                self.volume.rmdir(one)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Move a file or directory."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self.makedirs(self._parent(target), exist_ok=True)
        self.volume.rename(source, target)

    mv_file = mv

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, or make a directory where one is copied."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(source):
            self.makedirs(target, exist_ok=True)
            return
        self.makedirs(self._parent(target), exist_ok=True)
        with self.volume.open(source, "rb") as read, self.volume.open(target, "wb") as write:
            while piece := read.read(1 << 20):
                write.write(piece)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make a file, or empty it."""
        path = self._strip_protocol(path)
        self.makedirs(self._parent(path), exist_ok=True)
        self.volume.open(path, "wb" if truncate else "ab").close()

    def modified(self, path: str) -> datetime.datetime:
        """When the contents of a file changed last."""
        found = self.volume.stat(self._strip_protocol(path))
        return datetime.datetime.fromtimestamp(found.st_mtime, tz=datetime.timezone.utc)

    def created(self, path: str) -> datetime.datetime:
        """When the inode of a file changed last: ext2 keeps nothing else."""
        found = self.volume.stat(self._strip_protocol(path))
        return datetime.datetime.fromtimestamp(found.st_ctime, tz=datetime.timezone.utc)
