"""Volumes, against images of mke2fs and the judgement of e2fsck."""

import errno
import gzip
import importlib.metadata
import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
import threading
import uuid

import pytest
from conftest import judged, skipped

import draconis
from draconis import Volume


def test_version_is_that_of_the_package():
    assert draconis.__version__ == importlib.metadata.version("draconis")


def test_what_others_made_is_read(image):
    with Volume(image) as volume:
        assert volume.listdir() == ["data", "link", "lost+found", "sparse"]
        assert volume.read_bytes("/data/deep/long") == bytes(range(256)) * 4096
        assert volume.read_text("link").startswith("name,number\n")
        assert volume.readlink("/link") == "data/table.csv"
        found = volume.stat("/data/deep/long")
        assert stat.S_ISREG(found.st_mode) and found.st_mode & 0o7777 == 0o640
        assert found.st_size == 1 << 20 and found.st_nlink == 1 and found.st_mtime_ns > 10**18
        assert stat.S_ISLNK(volume.lstat("/link").st_mode)
        assert volume.stat("/sparse").st_blocks < 100
        assert [top for top, _, _ in volume.walk("/data")] == ["/data", "/data/deep"]
        assert volume.isdir("/data") and volume.isfile("/link") and not volume.exists("/none")
        assert volume.info.kind in ("ext2", "ext4") and volume.info.clean
        assert not volume.writable
        with pytest.raises(OSError) as refused:
            volume.mkdir("/new")
        assert refused.value.errno == errno.EROFS
    assert Volume.check(image).clean


def test_files_are_as_python_has_them(image, tmp_path):
    """The same random calls, on a file of the volume and on one of the host."""
    chance = random.Random(7)
    with Volume(image, "w") as volume:
        for mode in ("w+b", "r+b", "a+b", "rb"):
            ours = volume.open("/both", mode)
            # What appends to a file that is read shows how long its buffer is.
            theirs = open(tmp_path / "both", mode, 1 << 18)
            for _ in range(200):
                at, data = chance.randrange(300_000), chance.randbytes(chance.randrange(9_000))
                call = chance.choice(["read", "write", "seek", "end", "truncate", "tell", "line"])
                if mode == "rb" and call in ("write", "truncate"):
                    continue
                answers = []
                for file in (ours, theirs):
                    if call == "read":
                        answers.append(file.read(at % 20_000))
                    elif call == "write":
                        answers.append(file.write(data))
                    elif call == "seek":
                        answers.append(file.seek(at))
                    elif call == "end":
                        answers.append(file.seek(0, os.SEEK_END))
                    elif call == "truncate":
                        answers.append(file.truncate(at))
                    elif call == "line":
                        answers.append(file.readline(50))
                    else:
                        answers.append(file.tell())
                assert answers[0] == answers[1], (mode, call)
            ours.close()
            theirs.close()
            assert volume.read_bytes("/both") == (tmp_path / "both").read_bytes()
    judged(image)


def test_text_and_modes(image):
    with Volume(image, "w") as volume:
        with volume.open("/t", "x", encoding="utf-8", newline="") as file:
            file.write("Straße\r\n")
        assert volume.read_bytes("/t") == "Straße\r\n".encode()
        with pytest.raises(FileExistsError):
            volume.open("/t", "x")
        with volume.open("/t", "a") as file:
            file.write("more")
        assert volume.read_text("/t").endswith("\nmore")
        raw = volume.open("/t", "rb", buffering=0)
        assert isinstance(raw, io.RawIOBase) and raw.name == "/t"
        assert raw.read(3) == b"Str"
        with pytest.raises(io.UnsupportedOperation):
            raw.write(b"x")
        raw.close()
        with pytest.raises(ValueError):
            raw.read(1)
        for wrong in ("", "rw", "b", "rr", "rbt", "U"):
            with pytest.raises(ValueError):
                volume.open("/t", wrong)
    judged(image)


def test_names_are_changed(image):
    with Volume(image, "w") as volume:
        volume.mkdir("/a/b/c", parents=True)
        volume.mkdir("/a", exist_ok=True)
        with pytest.raises(FileExistsError):
            volume.mkdir("/a")
        volume.write_bytes("/a/b/f", b"1", permissions=0o600)
        volume.link("/a/b/f", "/a/g")
        volume.symlink("g", "/a/h")
        volume.rename("/a/b/f", "/a/b/c/f")
        assert volume.read_bytes("/a/h") == b"1" and volume.stat("/a/g").st_nlink == 2
        volume.chmod("/a/g", 0o644)
        volume.chown("/a/g", 7, -1)
        volume.utime("/a/g", (10**18 + 1, -5))
        found = volume.stat("/a/b/c/f")
        assert (found.st_mode & 0o7777, found.st_uid) == (0o644, 7)
        assert (found.st_atime_ns, found.st_mtime_ns) == (10**18 + 1, -5)
        volume.truncate("/a/g", 100)
        assert volume.read_bytes("/a/g") == b"1" + bytes(99)
        with pytest.raises(OSError) as refused:
            volume.rmdir("/a")
        assert refused.value.errno == errno.ENOTEMPTY
        assert f"{image}:/a: directory not empty" in str(refused.value)
        volume.rmtree("/a")
        with pytest.raises(FileNotFoundError):
            volume.remove("/a")
        with pytest.raises(IsADirectoryError):
            volume.open("/data")
        name = b"/\xff\xfe"
        volume.write_bytes(name, b"any bytes")
        assert os.fsdecode(name[1:]) in volume.listdir() and volume.read_bytes(name) == b"any bytes"
    judged(image)


def test_attributes_are_set_and_removed(image):
    with Volume(image, "w") as volume:
        volume.write_bytes("/f", b"1")
        volume.symlink("f", "/l")
        volume.setxattr("/l", "user.x", b"value", os.XATTR_CREATE)
        with pytest.raises(FileExistsError):
            volume.setxattr("/f", "user.x", b"other", os.XATTR_CREATE)
        volume.setxattr("/f", "user.x", bytearray(b"other"), os.XATTR_REPLACE)
        volume.setxattr("/f", "user.y", b"")
        assert volume.listxattr("/f") == ["user.x", "user.y"]
        assert volume.getxattr("/l", "user.x") == b"other" and volume.getxattr("/f", "user.y") == b""
        volume.removexattr("/f", "user.x")
        for wrong in [
            lambda: volume.removexattr("/f", "user.x"),
            lambda: volume.setxattr("/f", "user.x", b"", os.XATTR_REPLACE),
        ]:
            with pytest.raises(OSError) as refused:
                wrong()
            assert refused.value.errno == errno.ENODATA
        with pytest.raises(ValueError):
            volume.setxattr("/f", "user.x", b"", 4)
    judged(image)


def test_an_archive_is_what_tar_reads(image):
    out = io.BytesIO()
    with Volume(image) as volume:
        assert volume.tar(out) == []
        with pytest.raises(ZeroDivisionError):
            volume.tar(type("Bad", (), {"write": lambda self, data: 1 / 0})())
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        assert archive.extractfile("./data/deep/long").read() == bytes(range(256)) * 4096
        assert archive.getmember("./link").linkname == "data/table.csv"
        sparse = archive.extractfile("./sparse").read()
        assert len(sparse) == 10 << 20 and sparse[5 << 20 :][:6] == b"middle"
    assert len(out.getvalue()) < 3 << 20


def test_a_volume_is_had_by_one_who_writes_until_it_is_closed(image):
    volume = Volume(image, "w")
    with pytest.raises(OSError) as busy:
        Volume(image)
    assert busy.value.errno == errno.EBUSY
    file = volume.open("/data/table.csv", "rb")
    volume.close()
    volume.close()
    with Volume(image) as again, Volume(image) as beside:
        assert again.listdir() == beside.listdir()
    with pytest.raises(OSError) as closed:
        file.read()
    assert closed.value.errno == errno.EBADF
    judged(image)


def test_threads_make_one_directory(image):
    """With ``exist_ok`` none fails, whoever makes the directories above and the last one."""
    failed = []
    with Volume(image, "w") as volume:
        start = threading.Barrier(8)

        def work():
            try:
                for number in range(40):
                    start.wait()
                    volume.mkdir(f"/{number}/a/b/c", parents=True, exist_ok=True)
            except (OSError, threading.BrokenBarrierError) as error:
                start.abort()
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert all(volume.isdir(f"/{number}/a/b/c") for number in range(40))
    judged(image)


def test_threads_share_a_volume(image):
    failures = []
    with Volume(image, "w") as volume:

        def work(number):
            try:
                for nth in range(20):
                    path = f"/{number}-{nth}"
                    volume.write_bytes(path, bytes([number]) * 10_000)
                    assert volume.read_bytes(path) == bytes([number]) * 10_000
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert failures == []
    judged(image)


def test_a_volume_is_made_and_checked(tmp_path):
    image = tmp_path / "new.img"
    Volume.format(image, size=32 << 20, kind="ext3", label="new", block_size=1024)
    with Volume(image) as volume:
        info = volume.info
        assert (info.kind, info.label, info.size, info.block_size) == ("ext3", "new", 32 << 20, 1024)
        assert "has_journal" in info.features and info.free_blocks < info.blocks
    with pytest.raises(FileExistsError):
        Volume.format(image)
    Volume.format(image, force=True, features="^has_journal")
    judged(image)
    for wrong in (dict(kind="xfs"), dict(block_size=1000), dict(features="x")):
        with pytest.raises(OSError) as refused:
            Volume.format(tmp_path / "wrong.img", size=32 << 20, **wrong)
        assert refused.value.errno == errno.EINVAL
    with open(image, "r+b") as file:
        file.seek(1024 + 0x10)
        file.write(b"\xff\xff\xff\x7f")
    report = Volume.check(image)
    assert not report.clean and report.complaints


def qemu_img(*words):
    if not shutil.which("qemu-img"):
        skipped("disk images need qemu-img")
    subprocess.run(["qemu-img", *map(str, words)], check=True, capture_output=True)


def test_a_volume_is_filled(tmp_path):
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/motd").write_text("hello")
    (tree / "etc/left.o").write_text("out")
    archive = tmp_path / "more.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree / "etc/motd", "srv/motd")
    image = tmp_path / "filled.img"
    Volume.format(image, source=tree, exclude=["*.o"], give_to=(12, 34), free=8 << 20, inodes=4096)
    with Volume(image) as volume:
        assert volume.listdir("/etc") == ["motd"] and volume.read_text("/etc/motd") == "hello"
        found = volume.stat("/etc/motd")
        assert (found.st_uid, found.st_gid) == (12, 34)
        assert volume.info.inodes >= 4096 and volume.info.free_blocks * volume.info.block_size > 6 << 20
    judged(image)
    for kind in ("qcow2", "vhdx"):
        image = tmp_path / kind
        Volume.format(image, source=[archive], size=32 << 20, image_format=kind, reserved=0)
        with Volume(image, "w") as volume:
            assert volume.read_text("/srv/motd") == "hello"
            volume.mkdir("/new")
        qemu_img("check", "-q", "-f", kind, image)
        qemu_img("convert", "-f", kind, "-O", "raw", image, tmp_path / "raw")
        judged(tmp_path / "raw")
    one, two = tmp_path / "one", tmp_path / "two"
    for image in (one, two):
        Volume.format(image, source=str(archive), reproducible=True)
    assert one.read_bytes() == two.read_bytes()
    least, usual, half = (tmp_path / name for name in ("least", "usual", "half"))
    Volume.format(least, source=tree, min=True)
    Volume.format(usual, source=tree)
    Volume.format(half, source=tree, free="50%")
    length = least.stat().st_size
    assert usual.stat().st_size >= length + (16 << 20)
    assert length * 3 // 2 < half.stat().st_size < usual.stat().st_size
    for wrong in ({"free": "96%"}, {"free": "x"}, {"min": True, "size": 32 << 20}, {"min": True, "free": 1}):
        with pytest.raises(ValueError):
            Volume.format(tmp_path / "none", source=tree, **wrong)
    oci = tmp_path / "oci"
    oci.mkdir()
    (oci / "oci-layout").write_text("{}")
    (oci / "index.json").write_text("{}")
    with pytest.warns(UserWarning, match="is a container image, taken as the files"):
        Volume.format(tmp_path / "files.img", source=oci)
    new = tmp_path / "wrong.img"
    with pytest.raises(FileNotFoundError):
        Volume.format(new, source=tmp_path / "none")
    with pytest.raises(ValueError):
        Volume.format(new, source=tree, platform="x")
    with pytest.raises(OSError, match="vmdk: raw, qcow2 and vhdx"):
        Volume.format(new, source=tree, image_format="vmdk")
    assert not new.exists()


def test_a_volume_becomes_larger_smaller_and_another(tmp_path):
    image = tmp_path / "new.img"
    Volume.format(image, size=16 << 20)
    assert Volume.grow(image, 48 << 20) == 48 << 20 == os.path.getsize(image)
    with pytest.raises(OSError, match="draconis shrink makes it smaller"):
        Volume.grow(image, 8 << 20)
    with pytest.raises(OSError) as refused:
        Volume.shrink(image, 1 << 10)
    assert refused.value.errno == errno.ENOSPC
    least = Volume.shrink(image)
    assert least < 16 << 20 and os.path.getsize(image) == least
    Volume.grow(image, 32 << 20)
    identity = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")
    Volume.tune(image, label="other", uuid=identity, reserved="0%", errors="panic", max_mounts=7)
    with Volume(image) as volume:
        assert (volume.info.label, volume.info.uuid) == ("other", identity)
        with pytest.raises(OSError) as refused:
            Volume.tune(image, label="x")
        assert refused.value.errno == errno.EBUSY
    Volume.tune(image, label="", uuid="random")
    with Volume(image) as volume:
        assert volume.info.label == "" and volume.info.uuid != identity
    for wrong in (dict(errors="x"), dict(reserved="many"), dict(max_mounts=0), dict(uuid="x"), dict(features="x")):
        with pytest.raises((OSError, ValueError)):
            Volume.tune(image, **wrong)
    judged(image)


def test_images_over_others_and_packed_ones(image, tmp_path):
    base, middle, top = (tmp_path / name for name in ("base", "middle", "top"))
    qemu_img("convert", "-f", "raw", "-O", "qcow2", image, base)
    for behind, over in ((base, middle), (middle, top)):
        qemu_img("create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", behind, over)
    with pytest.raises(OSError, match="only what differs from"):
        Volume(top, "w", backing=[middle])
    with Volume(top, "w", backing=[middle, base]) as volume:
        volume.write_text("/data/new", "over")
    qemu_img("check", "-q", top)
    qemu_img("convert", "-O", "raw", top, tmp_path / "raw")
    judged(tmp_path / "raw")
    with Volume(tmp_path / "raw") as volume:
        assert volume.read_text("/data/new") == "over"
    packed = tmp_path / "packed.gz"
    with open(image, "rb") as plain, gzip.open(packed, "wb", 1) as out:
        shutil.copyfileobj(plain, out)
    with Volume(packed) as volume:
        assert volume.listdir("/data") == ["deep", "table.csv"]


def test_what_is_in_a_bucket_is_refused():
    for open in (Volume, draconis.Store):
        with pytest.raises(OSError, match="uses no network") as refused:
            open("s3://bucket/store")
        assert refused.value.errno == errno.EOPNOTSUPP


def test_what_is_no_volume_is_named(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"hsqs" + bytes(8192))
    with pytest.raises(OSError, match="not an ext volume; it holds a SquashFS"):
        Volume(other)
    with pytest.raises(FileNotFoundError):
        Volume(tmp_path / "none")
    with pytest.raises(ValueError):
        Volume(other, "r+")


def test_every_public_thing_is_documented():
    for name in draconis.__all__:
        if name == "__version__":
            continue
        kind = getattr(draconis, name)
        assert kind.__doc__, name
        for member, thing in vars(kind).items():
            if not member.startswith("_") and (callable(thing) or isinstance(thing, property)):
                assert thing.__doc__, f"{name}.{member}"
