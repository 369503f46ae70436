"""The examples of the documentation run, and its types are true."""

import doctest
import importlib
import os
import subprocess
import sys

import pytest
from conftest import skipped


@pytest.mark.parametrize("name", ["draconis", "draconis.volume", "draconis.store", "draconis.fs"])
def test_examples(name, tmp_path, monkeypatch):
    if name == "draconis.fs":
        importable("fsspec")
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert found.attempted > 2 and found.failed == 0


def importable(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        skipped(f"{name} is not installed")


def test_types(tmp_path):
    importable("mypy")
    config = os.path.join(os.path.dirname(__file__), "../pyproject.toml")
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 5 source files" in done.stdout, done.stdout
