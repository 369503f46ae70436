"""A program with Django's own applications, which the tests start, kill and compare.

    django_program.py EXTENSION DATABASE [PRAGMAS] -- migrate | steps FIRST END | count N | dump

``DATABASE`` is a file, or ``file:NAME?vfs=draconis&store=STORE``. Each step is one transaction, or
a failed one, and depends on its number only: a database has the same rows wherever it lies.
"""

import ctypes
import datetime
import random
import sqlite3
import sys
import threading
import time


def register(extension):
    """Registers the file system of the extension for this process."""
    base = sqlite3.connect(":memory:")
    if hasattr(base, "enable_load_extension"):
        base.enable_load_extension(True)
        base.load_extension(extension)
        return
    # A Python without extensions of SQLite: what sqlite3_load_extension does.
    library = ctypes.CDLL("libsqlite3.so.0")
    entry = ctypes.CDLL(extension).sqlite3_draconissqlite_init
    assert library.sqlite3_auto_extension(entry) == 0
    sqlite3.connect(":memory:").close()


def configure(database, pragmas):
    import django
    from django.conf import settings

    # init_command is run by each connection; a URI needs `uri`.
    options = {"uri": True, "timeout": 30, "transaction_mode": "IMMEDIATE"}
    if pragmas:
        options["init_command"] = pragmas
    settings.configure(
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.admin",
        ],
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database, "OPTIONS": options}
        },
        SECRET_KEY="of a test",
        USE_TZ=True,
    )
    django.setup()


START = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def step(number):
    """One transaction, or one that fails and changes nothing."""
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.auth.models import Group, User
    from django.contrib.contenttypes.models import ContentType
    from django.contrib.sessions.models import Session
    from django.db import IntegrityError, transaction
    from django.db.models import F, Value
    from django.db.models.functions import Concat

    chance = random.Random(number)
    now = START + datetime.timedelta(seconds=number)
    users = User.objects.order_by("pk")
    some_user = users[chance.randrange(users.count())] if number else None
    kind = chance.randrange(8) if number else 0
    if kind in (0, 1):
        with transaction.atomic():
            user = User.objects.create(username=f"user {number}", password="!", date_joined=now)
            group, _ = Group.objects.get_or_create(name=f"group {chance.randrange(20)}")
            user.groups.add(group)
    elif kind == 2:
        Session.objects.create(
            session_key=f"key {number}",
            session_data="x" * chance.randrange(6000),
            expire_date=now + datetime.timedelta(days=14),
        )
    elif kind == 3:
        with transaction.atomic():
            some_user.last_login = now
            some_user.save(update_fields=["last_login"])
            LogEntry.objects.create(
                user=some_user,
                content_type=ContentType.objects.get_for_model(User),
                object_id=some_user.pk,
                object_repr=str(some_user),
                action_flag=CHANGE,
                action_time=now,
                change_message=f"step {number}",
            )
    elif kind == 4:
        # The name is taken: the user is there afterwards as before, and no group is.
        try:
            with transaction.atomic():
                Group.objects.create(name=f"of step {number}")
                User.objects.create(username=some_user.username, password="!", date_joined=now)
            raise AssertionError("two users have one name")
        except IntegrityError:
            pass
    elif kind == 5:
        with transaction.atomic():
            User.objects.filter(pk=some_user.pk).update(
                first_name=f"step {number}", is_staff=number % 2 == 0
            )
            try:
                with transaction.atomic():
                    User.objects.all().delete()
                    LogEntry.objects.all().delete()
                    raise ValueError("only this savepoint is rolled back")
            except ValueError:
                pass
            Session.objects.create(
                session_key=f"saved {number}", session_data="", expire_date=now
            )
    elif kind == 6:
        last = User.objects.filter(pk__gte=some_user.pk).order_by("pk")[:20]
        User.objects.filter(pk__in=list(last.values_list("pk", flat=True))).update(
            last_name=Concat(F("username"), Value(f" {number}"))
        )
    else:
        Session.objects.filter(expire_date__lt=now + datetime.timedelta(days=13)).delete()


def dump():
    """Prints all rows, without the times of the migrations."""
    from django.apps import apps
    from django.db import connection

    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert cursor.execute("PRAGMA foreign_key_check").fetchall() == []
    for model in sorted(apps.get_models(), key=lambda model: model._meta.db_table):
        for row in model.objects.order_by("pk").values_list():
            print(model._meta.db_table, *row, sep="\t")
    for row in apps.get_model("auth.User").groups.through.objects.order_by("pk").values_list():
        print("groups", *row, sep="\t")


def count(times):
    """Four threads that increment one counter."""
    from django.contrib.auth.models import User
    from django.db import connection, transaction

    def work():
        for _ in range(times):
            with transaction.atomic():
                user = User.objects.get(username="user 0")
                user.last_name = str(int(user.last_name or 0) + 1)
                user.save()
        connection.close()

    User.objects.filter(username="user 0").update(last_name="0")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(User.objects.get(username="user 0").last_name)


def main():
    at = sys.argv.index("--")
    extension, database, *pragmas = sys.argv[1:at]
    action, *numbers = sys.argv[at + 1 :]
    register(extension)
    configure(database, "".join(pragmas))
    if action == "migrate":
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
    elif action == "steps":
        first, end = map(int, numbers)
        began = time.monotonic()
        for number in range(first, end):
            step(number)
            print("done", number, flush=True)
        print(f"{(end - first) / (time.monotonic() - began):.1f} steps per second")
    elif action == "count":
        count(int(numbers[0]))
    else:
        dump()


if __name__ == "__main__":
    main()
