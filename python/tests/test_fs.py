"""The file system for fsspec: its own suite where that fits, and those who build on it."""

import os

import pytest
from conftest import judged, skipped

from draconis import Volume

try:
    import fsspec
except ImportError:
    skipped("fsspec is not installed")

import fsspec.tests.abstract as abstract
from fsspec.implementations.local import LocalFileSystem

from draconis.fs import ExtFileSystem


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    image = str(tmp_path_factory.mktemp("fs") / "disk.img")
    Volume.format(image, size=64 << 20)
    fs = ExtFileSystem(image, writable=True)
    yield fs
    fs.close()
    judged(image)


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, volume):
        return volume

    @pytest.fixture
    def fs_path(self):
        return "/within"

    @pytest.fixture
    def fs_sanitize_path(self):
        return lambda path: path


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


def test_what_is_in_an_image_has_an_address(image):
    fs = fsspec.filesystem("ext", image=image)
    assert isinstance(fs, ExtFileSystem)
    assert fs.ls("/", detail=False) == ["/data", "/link", "/lost+found", "/sparse"]
    assert fs.find("/data") == ["/data/deep/long", "/data/table.csv"]
    assert fs.glob("/data/*.csv") == ["/data/table.csv"]
    link = fs.info("/link")
    assert link["islink"] and link["destination"] == "data/table.csv" and link["type"] == "file"
    assert fs.cat_file("data/table.csv", start=5, end=11) == b"number"
    assert fs.du("/data") == (1 << 20) + 24
    with fsspec.open(f"ext://data/table.csv::file://{image}", "r") as file:
        assert file.readline() == "name,number\n"
    with pytest.raises(FileNotFoundError):
        fs.cat("/none")
    with pytest.raises(OSError, match="writable=True"):
        fs.touch("/new")
    with pytest.raises(ValueError, match="writable=True"):
        fsspec.filesystem("ext", image=image, mode="w")
    with pytest.raises(ValueError):
        fsspec.filesystem("ext")
    with pytest.raises(ValueError):
        fsspec.filesystem("ext", fo="x", target_protocol="http")
    with fs.open("/link"), pytest.raises(OSError):
        ExtFileSystem(image, writable=True)
    fs = fsspec.filesystem("ext", image=image, writable=True)
    fs.pipe_file("/a/b/c", b"made with what is above")
    fs.mv("/a", "/moved")
    assert fs.cat_file("/moved/b/c") == b"made with what is above"
    fs.rm("/moved", recursive=True)
    assert not fs.exists("/moved") and fs.modified("/link").year > 2000
    fs.close()
    judged(image)


def test_trees_go_in_and_out(image, tmp_path):
    fs = ExtFileSystem(image)
    fs.get("/data", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out/deep/long").read_bytes() == bytes(range(256)) * 4096
    assert sorted(os.listdir(tmp_path / "out")) == ["deep", "table.csv"]
    assert LocalFileSystem().exists(str(tmp_path / "out/table.csv"))
    fs.close()


def test_pandas_reads_a_table_out_of_an_image(image):
    try:
        import pandas
    except ImportError:
        skipped("pandas is not installed")
    table = pandas.read_csv("ext://data/table.csv", storage_options={"image": image})
    assert list(table.columns) == ["name", "number"] and table.number.sum() == 6
    table = pandas.read_csv(f"ext://link::{image}")
    assert table.name.tolist() == ["a", "b", "c"]
    options = {"image": image, "writable": True}
    sums = table.assign(twice=table.number * 2)
    sums.to_csv("ext://sums.csv", index=False, storage_options=options)
    with Volume(image) as volume:
        assert volume.read_text("/sums.csv").splitlines()[1] == "a,1,2"
    judged(image)
