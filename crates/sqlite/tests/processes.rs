//! Other processes: killed writers, a second process, and the extension in SQLite's own programs.

use crate::common;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::common::{Random, TestStore, integrity, text, uri};
use draconis_testkit::{child_test, report_skipped};
use rusqlite::{Connection, ErrorCode};

/// Path of a store, for the test that is the writer of another one.
const WRITER: &str = "DRACONIS_SQLITE_WRITER";

/// Not a test but the process that is killed: it prints the number of each committed transaction.
#[test]
fn writer() {
    let Some(store) = std::env::var_os(WRITER).map(PathBuf::from) else { return };
    common::register();
    draconis_sqlite::test_hooks::set_memory_limit(64 << 10);
    let app = Connection::open(uri(&store, "app.db")).unwrap();
    app.busy_timeout(Duration::from_secs(60)).unwrap();
    app.execute_batch(&format!("ATTACH '{}' AS side", uri(&store, "side.db"))).unwrap();
    for schema in ["main", "side"] {
        app.execute_batch(&format!(
            "CREATE TABLE IF NOT EXISTS {schema}.t(a INTEGER PRIMARY KEY, b)"
        ))
        .unwrap();
    }
    let mut nth: i64 = text(&app, "SELECT coalesce(max(a), 0) FROM t").parse().unwrap();
    loop {
        nth += 1;
        // Every tenth is longer than fits memory.
        let rows = if nth % 10 == 0 { 200 } else { 1 };
        app.execute_batch(&format!(
            "BEGIN; INSERT INTO main.t VALUES ({nth}, randomblob(100));
             UPDATE main.t SET b = randomblob(3000) WHERE a > {nth} - {rows};
             INSERT INTO side.t VALUES ({nth}, randomblob(500)); COMMIT"
        ))
        .unwrap();
        println!("committed {nth}");
        std::io::stdout().flush().unwrap();
    }
}

#[test]
fn killed_writers_lose_nothing_that_they_committed() {
    let runs = std::env::var("DRACONIS_SQLITE_KILLS").map_or(6, |text| text.parse().unwrap());
    let test = TestStore::create(128 << 20);
    let mut random = Random(3);
    let mut total = 0;
    for run in 0..runs {
        let mut writer =
            child_test!(writer).env(WRITER, &test.file).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let next = |lines: &mut dyn Iterator<Item = std::io::Result<String>>| {
            let line = lines.next()?.ok()?;
            let number = line.split_once("committed ").map(|(_, number)| number.parse::<i64>());
            Some(number.map_or(0, Result::unwrap))
        };
        // At least one, then after some time.
        let mut last = total;
        while last == total
            && let Some(committed) = next(&mut lines)
        {
            last = committed.max(last);
        }
        if run == 0 {
            let second = Connection::open(test.uri("app.db")).unwrap();
            second.busy_timeout(Duration::ZERO).unwrap();
            let found = second.execute_batch("INSERT INTO t VALUES (-1, 0)").unwrap_err();
            assert_eq!(found.sqlite_error_code(), Some(ErrorCode::DatabaseBusy), "{found}");
        }
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            Duration::from_micros(random.below(60_000)),
        );
        writer.kill().unwrap();
        writer.wait().unwrap();
        while let Some(committed) = next(&mut lines) {
            last = committed.max(last);
        }
        let app = test.open("app.db");
        app.busy_timeout(Duration::from_secs(60)).unwrap();
        let max: i64 = text(&app, "SELECT max(a) FROM t").parse().unwrap();
        assert!(max == last || max == last + 1, "{last} was committed, {max} is there");
        integrity(&app);
        let side = test.open("side.db");
        integrity(&side);
        assert_eq!(text(&side, "SELECT max(a) FROM t"), max.to_string());
        for one in [&app, &side] {
            assert_eq!(text(one, "SELECT count(*) FROM t"), max.to_string());
        }
        drop((app, side));
        test.check();
        total = max;
    }
    eprintln!("{runs} kills, {total} transactions");
}

/// Path of the extension, which is built with the tests.
fn extension() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let mut directories = exe.ancestors().skip(1);
    let found = directories.find_map(|dir| {
        let path = dir.join("libdraconis_sqlite.so");
        path.exists().then_some(path)
    });
    found.expect("libdraconis_sqlite.so is built with the tests")
}

fn sqlite3(script: &str) -> Option<Output> {
    let mut child = match Command::new("sqlite3")
        .arg("-batch")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(error) => {
            report_skipped(format!("sqlite3: {error}"));
            return None;
        }
    };
    // A command with a dot begins its line.
    let lines: String = script.lines().map(|line| format!("{}\n", line.trim_start())).collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    Some(child.wait_with_output().unwrap())
}

#[test]
#[ignore = "tools: sqlite3"]
fn the_sqlite_program_loads_the_extension() {
    let test = TestStore::create(32 << 20);
    let load = format!(".load {}\n", extension().with_extension("").display());
    let open = format!(".open '{}'\n", test.uri("app.db"));
    let Some(found) = sqlite3(&format!(
        "{load}{open}PRAGMA journal_mode=WAL;
         CREATE TABLE t(a); INSERT INTO t VALUES ('one'), ('two');
         BEGIN; DELETE FROM t; ROLLBACK;
         PRAGMA page_size=1024; VACUUM;
         PRAGMA draconis_snapshot = 'first';
         INSERT INTO t VALUES ('three');
         ATTACH '{}' AS side;
         BEGIN; CREATE TABLE side.u AS SELECT a FROM t; DELETE FROM t WHERE a = 'one'; COMMIT;
         SELECT group_concat(a) FROM t; SELECT count(*) FROM side.u;
         PRAGMA integrity_check; PRAGMA page_size;
         .open '{}'
         SELECT group_concat(a) FROM t;
         .vfsname\n",
        test.uri("side.db"),
        test.uri("app.db@first"),
    )) else {
        return;
    };
    let (out, err) =
        (String::from_utf8_lossy(&found.stdout), String::from_utf8_lossy(&found.stderr));
    let wanted = "delete\napp.db@first\ntwo,three\n3\nok\n1024\none,two\n";
    assert!(out.starts_with(wanted), "{out}\n{err}");
    assert!(out.ends_with("draconis\n"), "{out}");
    assert_eq!(err, "");
    assert_eq!(text(&test.open("app.db"), "SELECT count(*) FROM t"), "2");
    test.check();
    // A message of a failure.
    let missing = test.dir.path().join("missing.store");
    let script = format!(".log stderr\n{load}.open '{}'\n", uri(&missing, "app.db"));
    let found = sqlite3(&script).unwrap();
    let err = String::from_utf8_lossy(&found.stderr);
    assert!(err.contains("missing.store: no such file; draconis store create"), "{err}");
}

#[test]
fn python_loads_the_extension() {
    let test = TestStore::create(32 << 20);
    let script = r#"
import sqlite3, sys
extension, uri, missing = sys.argv[1:]
base = sqlite3.connect(":memory:")
base.enable_load_extension(True)
base.load_extension(extension)
app = sqlite3.connect(uri, uri=True)
with app:
    app.execute("CREATE TABLE t(a, b)")
    app.executemany("INSERT INTO t VALUES (?, ?)", [(i, bytes(i)) for i in range(500)])
try:
    with app:
        app.execute("DELETE FROM t")
        raise ValueError
except ValueError:
    pass
assert app.execute("SELECT count(*), sum(length(b)) FROM t").fetchone() == (500, 124750)
copy = sqlite3.connect(":memory:")
app.backup(copy)
copy.execute("DELETE FROM t WHERE a > 9")
copy.commit()
copy.backup(app)
assert app.execute("SELECT count(*) FROM t").fetchone() == (10,)
assert app.execute("PRAGMA integrity_check").fetchone() == ("ok",)
try:
    sqlite3.connect(missing, uri=True)
    raise SystemExit("opened")
except sqlite3.OperationalError:
    message = base.execute("SELECT draconis_error()").fetchone()[0]
    assert "no such file" in message, message
print("done")
"#;
    let has_extensions = "import sqlite3; sqlite3.connect(':memory:').enable_load_extension(True)";
    let found = ["/usr/bin/python3", "python3"].into_iter().find(|python| {
        let asked = Command::new(python).args(["-c", has_extensions]).output();
        asked.is_ok_and(|asked| asked.status.success())
    });
    let Some(python) = found else {
        report_skipped("python3 with extensions of SQLite");
        return;
    };
    let found = Command::new(python)
        .args(["-c", script])
        .arg(extension())
        .arg(test.uri("app.db"))
        .arg(uri(&test.dir.path().join("missing.store"), "app.db"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "done\n", "{found:?}");
    test.check();
}
