"""Stores: objects and keys as mappings."""

import errno

import pytest

from draconis import Store


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "things.store"
    Store.create(path, size=8 << 20, layout="cow", sparse=True)
    return path


def test_objects_are_a_mapping(path):
    with Store(path, "w") as store:
        letter = store.objects.new(b"Dear reader,", name="letter")
        other = store.objects.new()
        store.objects.write(other, 4, b"x")
        store.objects.append(other, b"y")
        store.objects.truncate(letter, 4)
        assert dict(store.objects) == {letter: b"Dear", other: bytes(4) + b"xy"}
        assert store.objects.read(other, 5, 100) == b"y" and store.objects.read(other, 9, 1) == b""
        store.objects[other] = b"z"
        assert (store.objects.named("letter"), store.objects.names()) == (letter, {"letter": letter})
        del store.objects[letter]
        assert len(store.objects) == 1 and letter not in store.objects
        for wrong in (lambda: store.objects[77], lambda: store.objects.named("letter")):
            with pytest.raises(KeyError):
                wrong()
        with pytest.raises(KeyError):
            store.objects[77] = b""
    with Store(path) as store:
        assert dict(store.objects) == {other: b"z"}
        with pytest.raises(OSError):
            store.objects.new(b"")
    report = Store.check(path)
    assert report.clean and report.objects == 1


def test_keys_are_a_mapping_in_order(path):
    with Store(path, "w") as store:
        keys = store.keys
        keys.update({b"%03d" % n: b"%d" % n for n in reversed(range(500))})
        keys[b"long"] = b"x" * 100_000
        assert len(keys) == 501 and list(keys)[:2] == [b"000", b"001"]
        assert keys[b"007"] == b"7" and len(keys[b"long"]) == 100_000
        before = keys.scan(b"100", b"103")
        keys.write({b"new": b"1"}, delete=[b"100", b"101"])
        assert [key for key, _ in before] == [b"100", b"101", b"102"]
        assert [key for key, _ in keys.scan(b"100", b"103", reverse=True)] == [b"102"]
        assert keys.pop(b"new") == b"1" and b"new" not in keys and 7 not in keys
        assert keys.get(b"none") is None and keys.setdefault(b"d", b"e") == b"e"
        with pytest.raises(KeyError):
            del keys[b"none"]
    with Store(path) as store:
        assert len(store.keys) == 500 and store.info["layout"] == "cow"


def test_a_store_is_had_by_one_who_writes_until_it_is_closed(path, tmp_path):
    store = Store(path, "w")
    with pytest.raises(OSError) as busy:
        Store(path)
    assert busy.value.errno == errno.EBUSY
    store.sync()
    store.close()
    with pytest.raises(OSError) as closed:
        store.keys[b"a"]
    assert closed.value.errno == errno.EBADF
    with pytest.raises(FileExistsError):
        Store.create(path, size=8 << 20)
    with pytest.raises(FileNotFoundError):
        Store(tmp_path / "none")
    with pytest.raises(ValueError):
        Store.create(tmp_path / "new", size=8 << 20, layout="tape")
