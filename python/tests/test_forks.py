"""Workers of multiprocessing, however they are started: what they inherit cannot be used, and they
open their own."""

import errno
import multiprocessing
import os
import threading

import pytest
from conftest import judged, skipped

from draconis import Store, Volume

KINDS = ("fork", "spawn", "forkserver")
#: What children inherit.
opened = {}


def fails_with(number, call):
    with pytest.raises(OSError) as failed:
        call()
    assert failed.value.errno == number, failed.value


def work(store, is_fork, free):
    assert bool(opened) == is_fork
    if is_fork:
        fails_with(errno.EBADF, lambda: opened["store"].keys[b"a"])
        fails_with(errno.EBADF, opened["store"].sync)
        fails_with(errno.EBADF, lambda: opened["volume"].read_bytes("/a"))
        opened.clear()
    fails_with(errno.EBUSY, lambda: Store(store, "w"))
    free.send(None)
    free.recv()
    with Store(store, "w") as own:
        own.keys[b"a"] += b"2"


@pytest.mark.parametrize("kind", KINDS)
def test_workers_open_their_own(kind, tmp_path):
    context = multiprocessing.get_context(kind)
    store, image = str(tmp_path / "s.store"), str(tmp_path / "i.img")
    Store.create(store, size=8 << 20, layout="cow", sparse=True)
    Volume.format(image, size=8 << 20)
    with Volume(image, "w") as volume:
        volume.write_bytes("/a", b"1")
    opened.update(store=Store(store, "w"), volume=Volume(image))
    opened["store"].keys[b"a"] = b"1"
    ours, theirs = context.Pipe()
    # A daemon: one that hangs is ended with this process.
    worker = context.Process(target=work, args=(store, kind == "fork", theirs), daemon=True)
    worker.start()
    theirs.close()
    ours.recv()
    opened["store"].keys[b"a"] = b"3"
    opened["store"].close()
    opened["volume"].close()
    opened.clear()
    ours.send(None)
    worker.join(300)
    assert worker.exitcode == 0
    with Store(store) as own:
        assert own.keys[b"a"] == b"32"
    assert Store.check(store).clean
    judged(image)


def test_idle_children_of_busy_threads_end(tmp_path):
    store = str(tmp_path / "s.store")
    Store.create(store, size=8 << 20, layout="cow", sparse=True)
    over = threading.Event()
    with Store(store, "w") as ours:

        def change():
            while not over.is_set():
                ours.keys[b"a"] = bytes(9000)
                ours.sync()

        thread = threading.Thread(target=change)
        thread.start()
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=os.getpid) for _ in range(10)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(300)
        over.set()
        thread.join()
        assert [worker.exitcode for worker in workers] == [0] * len(workers)


def read(fs):
    assert fs.cat("/a") == b"1"


def test_forked_workers_use_an_inherited_file_system(tmp_path):
    try:
        from draconis.fs import ExtFileSystem
    except ImportError:
        skipped("fsspec is not installed")
    image = str(tmp_path / "i.img")
    Volume.format(image, size=8 << 20)
    with Volume(image, "w") as volume:
        volume.write_bytes("/a", b"1")
    fs = ExtFileSystem(image)
    with fs:
        worker = multiprocessing.get_context("fork").Process(target=read, args=(fs,))
        worker.start()
        worker.join(300)
        assert worker.exitcode == 0 and fs.cat("/a") == b"1"
