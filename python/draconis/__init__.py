"""ext2, ext3 and ext4 volumes, and stores of objects and keys, without mounting and without root.

A volume is made, filled, and read again:

>>> import draconis
>>> draconis.Volume.format("disk.img", size=16 << 20, label="demo")
>>> with draconis.Volume("disk.img", "w") as volume:
...     volume.mkdir("/etc")
...     with volume.open("/etc/motd", "w") as file:
...         _ = file.write("hello\\n")
>>> with draconis.Volume("disk.img") as volume:
...     volume.read_bytes("/etc/motd")
b'hello\\n'
>>> draconis.Volume.check("disk.img").clean
True

A store keeps objects and keys; changes are whole or absent after any crash:

>>> draconis.Store.create("things.store", size=8 << 20, sparse=True)
>>> with draconis.Store("things.store", "w") as store:
...     store.keys[b"a"] = b"1"
...     store.keys.update({b"b": b"2", b"c": b"3"})
...     list(store.keys)
[b'a', b'b', b'c']

With ``fsspec``, what is in an image has an address: ``ext://path/inside``; see :mod:`draconis.fs`.

Failures are :class:`OSError` with an errno, so that a file that is not there raises
:class:`FileNotFoundError`; their text names the image and the path. Objects may be shared by
threads; the interpreter's lock is given up while anything is read or written.
"""

from draconis._draconis import __version__
from draconis.store import Keys, Objects, Store, StoreReport
from draconis.volume import DirEntry, Report, Volume, VolumeInfo

__all__ = [
    "DirEntry",
    "Keys",
    "Objects",
    "Report",
    "Store",
    "StoreReport",
    "Volume",
    "VolumeInfo",
    "__version__",
]
