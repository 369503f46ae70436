"""Programs of others on ``ext://``: data sets of zarr and of Parquet, in a volume of a store."""

import pytest
from conftest import judged, skipped
from test_docs import importable

from draconis import Store, Volume


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("applications") / "things.store")
    Store.create(path, size=256 << 20, layout="cow", sparse=True)
    return path


@pytest.fixture(params=["file", "store"])
def options(request, store, tmp_path):
    """A volume in a file or in a store, as fsspec is given it."""
    name = request.node.originalname
    if request.param == "store":
        image = f"{store}#{name}"
    else:
        image = str(tmp_path / "disk.img")
    Volume.format(image, size=64 << 20)
    yield {"image": image, "writable": True}
    report = Volume.check(image)
    assert report.clean, report.complaints
    if request.param == "store":
        assert Store.check(store).clean
        copy = str(tmp_path / "copy.img")
        with Store(store) as opened, open(copy, "wb") as file:
            file.write(opened.objects[opened.objects.named(name)])
        judged(copy)
    else:
        judged(image)


def test_zarr_arrays(options):
    zarr, numpy = importable("zarr"), importable("numpy")
    expected = numpy.arange(200 * 300, dtype="f8").reshape(200, 300)
    root = zarr.open_group("ext://measurements", mode="w", storage_options=options)
    array = root.create_array("heat", shape=(200, 300), chunks=(50, 70), dtype="f8")
    array[:] = expected
    array[10:60, 100:200] = expected[10:60, 100:200] = -1
    array.attrs["unit"] = "K"
    sharded = root.create_array(
        "sharded", shape=(200, 300), chunks=(10, 10), shards=(100, 100), dtype="f8"
    )
    sharded[:] = expected
    array.resize((250, 300))
    array[200:] = 7
    expected = numpy.vstack([expected, numpy.full((50, 300), 7.0)])
    zarr.consolidate_metadata(root.store)

    reading = {"image": options["image"]}
    again = zarr.open_group("ext://measurements", mode="r", storage_options=reading)
    assert sorted(again.array_keys()) == ["heat", "sharded"]
    assert again["heat"].attrs["unit"] == "K"
    assert numpy.array_equal(again["heat"][:], expected)
    assert numpy.array_equal(again["heat"][123:201, 5::17], expected[123:201, 5::17])
    assert numpy.array_equal(again["sharded"][:], expected[:200])
    del root["sharded"]
    with Volume(options["image"]) as volume:
        assert sorted(volume.listdir("/measurements")) == ["heat", "zarr.json"]


def test_parquet_data_sets(options):
    pandas = importable("pandas")
    try:
        import pyarrow.dataset
    except ImportError:
        skipped("pyarrow is not installed")
    import fsspec

    rows = 20_000
    table = pandas.DataFrame(
        {
            "id": range(rows),
            "region": [f"region {nth % 5}" for nth in range(rows)],
            "amount": [nth * 7919 % 1000 for nth in range(rows)],
        }
    )
    table.to_parquet(
        "ext://sales", partition_cols=["region"], engine="pyarrow", storage_options=options
    )
    reading = {"image": options["image"]}
    again = pandas.read_parquet("ext://sales", storage_options=reading)
    sums = table.groupby("region").amount.sum().to_dict()
    assert again.groupby("region", observed=True).amount.sum().to_dict() == sums
    fs = fsspec.filesystem("ext", **reading)
    data = pyarrow.dataset.dataset("/sales", filesystem=fs, partitioning="hive")
    field = pyarrow.dataset.field
    wanted = (field("region") == "region 3") & (field("amount") > 990)
    found = data.to_table(filter=wanted, columns=["id", "amount"]).to_pandas()
    expected = table[(table.region == "region 3") & (table.amount > 990)]
    assert sorted(found.id) == expected.id.tolist()
    assert data.count_rows() == rows
