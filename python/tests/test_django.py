"""Django, unmodified, with its database in a store and in a file: the same steps, the same rows.

``DRACONIS_DJANGO_STEPS=5000`` takes longer and kills more often.
"""

import os
import random
import subprocess
import sys

import pytest
from conftest import skipped
from test_docs import importable

from draconis import Store

PROGRAM = os.path.join(os.path.dirname(__file__), "django_program.py")
STEPS = int(os.environ.get("DRACONIS_DJANGO_STEPS", "120"))


class Program:
    """The program with one database."""

    def __init__(self, extension, database):
        self.command = [sys.executable, PROGRAM, extension, database, "--"]

    def run(self, *arguments):
        done = subprocess.run(
            [*self.command, *map(str, arguments)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-500:] + done.stderr
        return done.stdout

    def steps_until_killed(self, first, end, stop):
        """Runs steps, kills the program when it has printed `stop`, and returns how many are known
        to be done."""
        command = [*self.command, "steps", str(first), str(end)]
        done = first
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout:
                # What it printed before it died, too.
                if line.startswith("done"):
                    done = int(line.split()[1]) + 1
                if done >= stop:
                    running.kill()
        return done


@pytest.fixture
def extension():
    importable("django")
    path = os.environ.get("DRACONIS_SQLITE_EXTENSION", "")
    if not os.path.exists(path):
        skipped("Django in a store needs DRACONIS_SQLITE_EXTENSION, which tools/python builds")
    return path


def test_django_has_the_same_rows_as_in_a_file_also_after_kills(extension, tmp_path):
    store = tmp_path / "app.store"
    Store.create(store, size=64 << 20, layout="cow", sparse=True)
    in_store = Program(extension, f"file:app.db?vfs=draconis&store={store}")
    in_file = Program(extension, str(tmp_path / "app.db"))
    for program in (in_store, in_file):
        program.run("migrate")
    chance = random.Random(1)
    at = 0
    while at < STEPS:
        stop = at + chance.randrange(20, 80)
        done = in_store.steps_until_killed(at, STEPS, stop)
        in_file.run("steps", at, done)
        found, expected = in_store.run("dump"), in_file.run("dump")
        if found != expected and done < STEPS:
            # One more was durable before it was printed.
            in_file.run("steps", done, done + 1)
            done, expected = done + 1, in_file.run("dump")
        assert found == expected, f"after step {done}"
        at = done
        report = Store.check(store)
        assert report.clean, report.damage
    assert len(found.splitlines()) > STEPS // 2
    assert in_store.run("count", 20) == "80\n"
    assert in_store.run("dump").count("\t80\t") == 1
    with Store(store) as opened:
        assert list(opened.objects.names()) == ["app.db"]
