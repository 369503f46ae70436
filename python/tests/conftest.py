"""Images made by mke2fs of a directory, and the judgement of e2fsck."""

import os
import shutil
import subprocess

import pytest

os.environ["PATH"] += ":/usr/sbin:/sbin"


def skipped(what):
    """Says what is skipped; where all that tests need must be there, that is a failure."""
    lacks = os.environ.get("DRACONIS_LACKS", "").split()
    if os.environ.get("DRACONIS_REQUIRE") == "all" and not any(word in what for word in lacks):
        pytest.fail(f"DRACONIS_REQUIRE=all, but this would be skipped: {what}")
    pytest.skip(what)


def judged(image):
    """Lets e2fsck judge an image, where it is there."""
    if shutil.which("e2fsck"):
        found = subprocess.run(["e2fsck", "-fn", image], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.fixture(params=["ext2", "ext4"])
def image(request, tmp_path):
    """An image that others made, of a small tree."""
    if not shutil.which("mke2fs"):
        skipped("images that others made need mke2fs")
    tree = tmp_path / "tree"
    (tree / "data/deep").mkdir(parents=True)
    (tree / "data/table.csv").write_text("name,number\na,1\nb,2\nc,3\n")
    (tree / "data/deep/long").write_bytes(bytes(range(256)) * 4096)
    (tree / "link").symlink_to("data/table.csv")
    with open(tree / "sparse", "wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    os.chmod(tree / "data/deep/long", 0o640)
    path = str(tmp_path / "disk.img")
    command = ["mke2fs", "-q", "-t", request.param, "-d", str(tree), path, "64M"]
    subprocess.run(command, check=True, capture_output=True)
    return path
