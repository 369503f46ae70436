"""``ext://`` answers as ``file://`` does, method by method, on the same tree."""

import itertools
import os
import pickle
import subprocess

import pytest
from conftest import judged, skipped

from draconis import Volume

try:
    import fsspec  # noqa: F401
except ImportError:
    skipped("fsspec is not installed")

from fsspec.implementations.local import LocalFileSystem

from draconis.fs import ExtFileSystem


def plant(top):
    """A tree with links of every kind, hard links, and odd names."""
    os.makedirs(f"{top}/d/deep/deeper")
    os.makedirs(f"{top}/empty")
    for name, data in {
        "f": b"0123456789\nabc\n",
        "d/g": b"x" * 5000,
        "d/deep/deeper/h": b"last",
        "nothing": b"",
        "odd *[a] ?": b"odd",
        "line\nbreak": b"2",
        "\u00fc \u6f22 \U0001f409": b"unicode",
        "-dash": b"-",
        ".hidden": b".",
        "a%20b#c;d": b"url",
    }.items():
        with open(f"{top}/{name}", "wb") as file:
            file.write(data)
    with open(os.fsencode(top) + b"/raw\xff", "wb") as file:
        file.write(b"no utf-8")
    os.link(f"{top}/f", f"{top}/d/hard")
    for target, name in {
        "f": "to-file",
        "d": "to-dir",
        ".": "d/here",
        "..": "d/deep/up",
        "nowhere": "dangling",
        "loop-b": "loop-a",
        "loop-a": "loop-b",
        "to-file": "to-link",
        "f/x": "through-file",
    }.items():
        os.symlink(target, f"{top}/{name}")
    os.mkfifo(f"{top}/pipe")


TO_DIRS = {"d", ".", ".."}


class Side:
    """A file system, and where the tree is in it."""

    def __init__(self, fs, top):
        self.fs, self.top = fs, top

    def at(self, value):
        """Puts the top before paths."""
        if isinstance(value, str) and value.startswith("@"):
            return self.top + value[1:]
        if isinstance(value, list):
            return [self.at(one) for one in value]
        if isinstance(value, dict):
            return {self.at(key): one for key, one in value.items()}
        return value

    def plain(self, value):
        """Takes the top away again, and what differs between any two trees."""
        if isinstance(value, str):
            return "@" + value[len(self.top) :] if value.startswith(self.top) else value
        if isinstance(value, dict):
            differs = {"ino", "created", "mtime"}
            size_differs = value.get("type") == "directory" or value.get("destination") in TO_DIRS
            return {
                self.plain(key): self.plain(one)
                for key, one in value.items()
                if key not in differs and not (key == "size" and size_differs)
            }
        if isinstance(value, (list, tuple)):
            return [self.plain(one) for one in value]
        if isinstance(value, Exception):
            return type(value).__name__
        return value

    def answer(self, method, *args, **kwargs):
        """What a method returns, or which error it raises."""
        args = [self.at(one) for one in args]
        try:
            found = getattr(self.fs, method)(*args, **kwargs)
        except Exception as error:
            return ("raised", type(error).__name__)
        if method == "du" and isinstance(found, dict):
            # Sizes of directories differ between any two file systems.
            found = {path: size for path, size in found.items() if not self.fs.isdir(path)}
        if method == "walk":
            found = sorted([top, sorted(dirs), sorted(files)] for top, dirs, files in found)
        if method == "ls":
            found = sorted(found, key=lambda one: one["name"] if kwargs["detail"] else one)
        return self.plain(found)


@pytest.fixture
def sides(tmp_path):
    top = str(tmp_path / "tree")
    os.mkdir(top)
    plant(top)
    image = str(tmp_path / "disk.img")
    copy_tree(image, top)
    yield (
        Side(LocalFileSystem(auto_mkdir=True, skip_instance_cache=True), top),
        Side(ExtFileSystem(image, writable=True, skip_instance_cache=True), "/tree"),
    )
    judged(image)


def copy_tree(image, top):
    """Makes a volume of a tree of the host as it is."""
    archive = f"{top}.tar"
    parent, name = os.path.split(top)
    subprocess.run(["tar", "-cf", archive, "-C", parent, name], check=True)
    Volume.format(image, source=archive, size=32 << 20)


PATHS = [
    "@", "@/", "@/f", "@/d", "@/d/", "@/d/g", "@/d/deep/../g", "@/d//g", "@/./f", "@/nothing",
    "@/empty", "@/odd *[a] ?", "@/line\nbreak", "@/\u00fc \u6f22 \U0001f409", "@/-dash",
    "@/.hidden", "@/a%20b#c;d", "@/raw\udcff", "@/d/hard", "@/to-file", "@/to-dir", "@/to-dir/g",
    "@/d/here", "@/d/here/here/g", "@/d/deep/up", "@/dangling", "@/loop-a", "@/to-link",
    "@/through-file", "@/pipe", "@/none", "@/none/none", "@/f/x", "@/" + "n" * 255,
    "@/" + "n" * 256,
]  # fmt: skip

OF_A_PATH = [
    ("info", {}),
    ("exists", {}),
    ("lexists", {}),
    ("isfile", {}),
    ("isdir", {}),
    ("islink", {}),
    ("ls", {"detail": True}),
    ("ls", {"detail": False}),
    ("find", {}),
    ("find", {"withdirs": True}),
    ("find", {"maxdepth": 1}),
    ("find", {"withdirs": True, "maxdepth": 2, "detail": True}),
    ("walk", {}),
    ("walk", {"topdown": False}),
    ("walk", {"maxdepth": 1}),
    ("walk", {"maxdepth": 2, "topdown": False}),
    ("du", {"total": False}),
    ("du", {"maxdepth": 1, "total": False, "withdirs": True}),
    ("size", {}),
    ("expand_path", {}),
    ("expand_path", {"recursive": True}),
    ("expand_path", {"recursive": True, "maxdepth": 1}),
]

READS = [
    ("cat", {}),
    ("cat", {"on_error": "return"}),
    ("cat", {"on_error": "omit"}),
    ("cat_file", {}),
    *(
        ("cat_file", {"start": start, "end": end})
        for start, end in itertools.product([None, 0, 4, 5000, -4, -5000], [None, 0, 8, -1, -20])
    ),
    ("head", {}),
    ("head", {"size": 3}),
    ("tail", {}),
    ("tail", {"size": 3}),
    ("read_text", {}),
]


@pytest.mark.parametrize("method, kwargs", OF_A_PATH, ids=str)
def test_a_tree_looks_the_same(sides, method, kwargs):
    local, ext = sides
    for path in PATHS:
        if method == "size" and local.fs.isdir(local.at(path)):
            continue
        expected, found = (side.answer(method, path, **kwargs) for side in sides)
        assert found == expected, (method, path, kwargs)


def test_sizes_are_summed(sides):
    local, ext = sides
    assert ext.fs.du("/tree/d/deep/deeper") == local.fs.du(local.top + "/d/deep/deeper") == 4
    assert ext.fs.du("/tree/d") == sum(ext.fs.du("/tree/d", total=False).values()) > 5000


def test_contents_are_the_same(sides):
    for (method, kwargs), path in itertools.product(READS, PATHS):
        if "pipe" in path:
            continue
        expected, found = (side.answer(method, path, **kwargs) for side in sides)
        assert found == expected, (method, path, kwargs)


def test_patterns_and_lists_are_the_same(sides):
    calls = [
        *(
            ("glob", (pattern,), kwargs)
            for pattern in [
                "@/*", "@/**", "@/**/", "@/*/", "@/d/*", "@/**/g", "@/*/*", "@/to-dir/*",
                "@/to-dir/**", "@/[fn]*", "@/?", "@/d/**/h", "@/none*", "@/f", "@/none",
                "@/odd *", "@/loop-*", "@/dang*",
            ]
            for kwargs in [{}, {"detail": True}, {"maxdepth": 1}, {"maxdepth": 2}]
        ),
        ("sizes", (["@/f", "@/d/g", "@/to-file"],), {}),
        ("sizes", (["@/f", "@/dangling"],), {}),
        ("cat", (["@/f", "@/d/g"],), {}),
        ("cat", ("@/d/*",), {"on_error": "omit"}),
        ("cat", ("@/d",), {"recursive": True, "on_error": "return"}),
        ("cat_ranges", (["@/f", "@/d/g"], [-4, 2], [None, -4990]), {}),
        ("cat_ranges", (["@/f", "@/none"], 1, 3), {}),
        ("cat_ranges", (["@/f", "@/none"], 1, 3), {"on_error": "raise"}),
        ("expand_path", (["@/f", "@/d*"],), {}),
        *(
            ("read_block", ("@/f", offset, length), {"delimiter": delimiter})
            for offset in (0, 3, 11, 100)
            for length in (None, 0, 4, 100)
            for delimiter in (None, b"\n", b"z")
        ),
    ]  # fmt: skip
    for method, args, kwargs in calls:
        expected, found = (side.answer(method, *args, **kwargs) for side in sides)
        assert found == expected, (method, args, kwargs)


CHANGES = [
    ("mkdir", ("@/new",), {}),
    ("mkdir", ("@/new/a/b",), {}),
    ("mkdir", ("@/new2/a",), {"create_parents": False}),
    *(("mkdir", (path,), {}) for path in ["@/f", "@/d", "@/dangling", "@/to-dir", "@/f/x", "@"]),
    *(("makedirs", (path,), {}) for path in ["@/m/n", "@/m", "@/f", "@/f/x", "@/dangling/x", "@"]),
    *(
        ("makedirs", (path,), {"exist_ok": True})
        for path in ["@/m/n", "@/f", "@/to-dir", "@/dangling", "@/to-dir/in", "/"]
    ),
    *(("rmdir", (path,), {}) for path in ["@/m/n", "@/d", "@/f", "@/to-dir", "@/none"]),
    *(("touch", (path,), {}) for path in ["@/f", "@/t/new", "@/to-file", "@/d", "@/none/"]),
    *(("touch", (path,), {"truncate": False}) for path in ["@/d/g", "@/t/n2", "@/d", "@/f/x"]),
    ("touch", ("@/dangling",), {}),
    ("pipe_file", ("@/piped/a", b"abc"), {}),
    ("pipe_file", ("@/piped/a", b"xyz"), {"mode": "create"}),
    ("pipe_file", ("@/d", b"abc"), {}),
    ("pipe", ({"@/piped/b": b"1", "@/piped/c": b"2"},), {}),
    ("pipe", ("@/to-link", b"by way of two links"), {}),
    ("write_text", ("@/text", "one\ntwo\n"), {}),
    ("cp_file", ("@/d/g", "@/copied/g"), {}),
    ("cp_file", ("@/d/g", "@/d/g"), {}),
    ("cp_file", ("@/to-file", "@/f"), {}),
    ("cp_file", ("@/d/hard", "@/d/hard"), {}),
    ("cp_file", ("@/d", "@/copied/d"), {}),
    ("cp_file", ("@/none", "@/copied/none"), {}),
    ("cp_file", ("@/pipe", "@/copied/pipe"), {}),
    ("cp_file", ("@/d/g", "@/empty"), {}),
    ("copy", ("@/d", "@/tree-copy"), {"recursive": True}),
    ("copy", ("@/d/", "@/empty"), {"recursive": True}),
    ("copy", ("@/*", "@/several/"), {}),
    ("copy", ("@/none", "@/x"), {}),
    ("mv", ("@/text", "@/moved/text"), {}),
    ("mv", ("@/moved/text", "@/empty"), {}),
    ("mv", ("@/piped/a", "@/empty/text"), {}),
    ("mv", ("@/d", "@/d/deep/in"), {}),
    ("mv", ("@/d/deep", "@/d/g"), {}),
    ("mv", ("@/none", "@/x"), {}),
    ("mv", ("@/to-dir", "@/moved-link"), {}),
    ("mv", ("@/dangling", "@/empty"), {}),
    ("mv", ("@/d/deep", "@/empty"), {}),
    ("mv", ("@/d/deep", "@/empty"), {}),
    ("link", ("@/f", "@/hard2"), {}),
    ("link", ("@/d", "@/hard3"), {}),
    ("link", ("@/to-file", "@/hard4"), {}),
    ("symlink", ("@/f", "@/soft"), {}),
    ("symlink", ("@/f", "@/soft"), {}),
    ("chmod", ("@/f", 0o600), {}),
    ("chmod", ("@/none", 0o600), {}),
    ("rm_file", ("@/empty",), {}),
    ("rm_file", ("@/none",), {}),
    ("rm", ("@/copied",), {}),
    ("rm", ("@/copied",), {"recursive": True}),
    ("rm", ("@/moved-link",), {"recursive": True}),
    ("rm", (["@/loop-a", "@/hard2"],), {}),
    ("rm", ("@/none",), {"recursive": True}),
    ("rm", ("@/d",), {"recursive": True}),
    ("delete", ("@/f",), {}),
    ("sign", ("@/f",), {}),
]  # fmt: skip


def test_changes_leave_the_same_tree(sides):
    for method, args, kwargs in CHANGES:
        expected, found = (side.answer(method, *args, **kwargs) for side in sides)
        assert found == expected, (method, args, kwargs)
        trees = [side.answer("find", "@", withdirs=True, detail=True) for side in sides]
        for tree in trees:
            # Who has which umask is of no interest, nor the top's links.
            for info in tree.values():
                info.pop("mode"), info.pop("nlink")
        assert trees[1] == trees[0], (method, args, kwargs)


def test_trees_come_and_go_as_with_local_files(sides, tmp_path):
    local, ext = sides
    for number, (path, kwargs) in enumerate(
        [
            ("@/d", {"recursive": True}),
            ("@/d/", {"recursive": True, "maxdepth": 1}),
            ("@/f", {}),
            ("@/d/*", {}),
            ("@/dangling", {}),
            ("@/pipe", {}),
            ("@", {"recursive": True}),
        ]
    ):
        outs = []
        for side in sides:
            out = str(tmp_path / f"out-{number}-{side is ext}") + "/"
            os.mkdir(out)
            told = side.answer("get", path, out, **kwargs)
            names = [one[len(out) :] for one in LocalFileSystem().find(out, withdirs=True)]
            outs.append((told, names, LocalFileSystem().du(out)))
        if path == "@":
            # Each stops at the first that leads nowhere.
            outs = [told for told, _, _ in outs]
        assert outs[0] == outs[1], path
    for path in ["d", "f", "d/", "dangling", "pipe", "none", "to-dir"]:
        for recursive in (False, True):
            expected, found = (
                side.answer("put", f"{local.top}/{path}", "@/in/", recursive=recursive)
                for side in sides
            )
            assert found == expected, path
            expected, found = (side.answer("find", "@/in", withdirs=True) for side in sides)
            assert found == expected, path


def test_open_files_are_as_local_ones(sides):
    def steps(side, path, mode):
        told = []
        try:
            file = side.fs.open(side.at(path), mode)
        except Exception as error:
            return type(error).__name__
        with file:
            inner = file if "b" in mode else file.buffer
            told.append(getattr(inner, "size", None))
            told.append(file.tell())
            for step in [
                lambda: file.read(3),
                lambda: file.readline(),
                lambda: file.seek(0, 2),
                lambda: file.seek(2),
                lambda: file.write(b"XY" if "b" in mode else "XY"),
                lambda: file.seek(0),
                lambda: list(file),
                lambda: file.readable() and inner.seek(-2, 2) and inner.readinto(bytearray(9)),
            ]:
                try:
                    told.append(step())
                except Exception as error:
                    told.append(type(error).__name__)
        told.append(file.closed)
        told.append(side.fs.cat_file(side.at(path)))
        return told

    paths = ["@/f", "@/d/g", "@/fresh", "@/to-file", "@/d", "@/none/a"]
    modes = ["rb", "r", "r+b", "ab", "a+b", "w", "wb", "w+b", "xb", "q"]
    for mode, path in itertools.product(modes, paths):
        expected, found = (steps(side, path, mode) for side in sides)
        if mode in ("wb", "w", "ab", "xb") and isinstance(expected, list):
            # LocalFileOpener calls itself readable when it is not.
            expected[9:10], found[9:10] = [], []
        assert found == expected, (mode, path)


def test_a_transaction_is_whole_or_nothing(sides):
    for side in sides:
        with side.fs.transaction, side.fs.open(side.at("@/f"), "wb") as file:
            file.write(b"whole")
            assert side.fs.cat_file(side.at("@/f")) != b"whole"
        assert side.fs.cat_file(side.at("@/f")) == b"whole"
        with pytest.raises(KeyError), side.fs.transaction:
            with side.fs.open(side.at("@/f"), "wb") as file:
                file.write(b"nothing")
            raise KeyError
        assert side.fs.cat_file(side.at("@/f")) == b"whole"


def test_a_file_says_whether_it_changed(sides):
    for side in sides:
        path = side.at("@/f")
        before = [side.fs.checksum(path), side.fs.ukey(path), side.fs.modified(path)]
        assert before == [side.fs.checksum(path), side.fs.ukey(path), side.fs.modified(path)]
        side.fs.pipe_file(path, b"other and longer than before")
        after = [side.fs.checksum(path), side.fs.ukey(path), side.fs.modified(path)]
        assert all(one != other for one, other in zip(before, after))
        assert side.fs.created(path).tzinfo is not None


def test_the_image_is_held_only_while_in_use(sides):
    fs = sides[1].fs
    image = fs._path
    reading = ExtFileSystem(image)
    with reading.open("/tree/f", "rb") as file, pytest.raises(OSError):
        Volume(image, "w")
    assert file.closed
    copy = pickle.loads(pickle.dumps(reading))
    assert copy.cat_file("/tree/f") == reading.cat_file("/tree/f")
    with fs.open("/tree/f", "wb") as file:
        file.write(b"durable")
    with Volume(image, "w") as volume:
        assert volume.read_bytes("/tree/f") == b"durable"
    with reading.open("/tree/f", "rb") as file:
        file.seek(3)
        with pickle.loads(pickle.dumps(file)) as again:
            assert again.read() == b"able"
    with reading:
        with pytest.raises(OSError):
            Volume(image, "w")
    Volume(image, "w").close()
