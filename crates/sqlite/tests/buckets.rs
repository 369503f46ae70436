//! Databases in stores in buckets: in a directory, and on versitygw if it is installed.

use crate::common;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::buckets::TestBucket;
use crate::common::{Random, integrity, open_read_only, text};
use draconis_testkit::wait::wait_until;
use draconis_testkit::{child_test, find_versitygw, report_skipped};
use rusqlite::{Connection, ErrorCode};

/// Name of a database, for the test that is the writer of another one.
const WRITER: &str = "DRACONIS_SQLITE_BUCKET_WRITER";

/// Not a test but another process, on another machine if it has another runtime directory. It
/// prints the number of each committed transaction.
#[test]
fn writer() {
    let Ok(uri) = std::env::var(WRITER) else { return };
    common::register();
    let opened = Connection::open(&uri).and_then(|app| {
        app.busy_timeout(Duration::from_millis(200))?;
        app.execute_batch("CREATE TABLE IF NOT EXISTS t(a INTEGER PRIMARY KEY, b)")?;
        Ok(app)
    });
    let app = match opened {
        Ok(app) => app,
        Err(error) => {
            let memory = Connection::open_in_memory().unwrap();
            let why = text(&memory, "SELECT draconis_error()");
            println!("refused {error}: {why}");
            return;
        }
    };
    let mut nth: i64 = text(&app, "SELECT coalesce(max(a), 0) FROM t").parse().unwrap();
    loop {
        nth += 1;
        if let Err(error) = app.execute("INSERT INTO t VALUES (?1, randomblob(2000))", [nth]) {
            println!("failed {error}: {}", text(&app, "SELECT draconis_error()"));
            return;
        }
        println!("committed {nth}");
        std::io::stdout().flush().unwrap();
    }
}

/// A process that commits.
struct Writer {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Writer {
    fn start(uri: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = child_test!(writer)
            .env(WRITER, uri)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The harness prints the name of the test before the first line.
        let said = |line: String| {
            let words = ["committed ", "refused ", "failed "];
            let at = words.iter().filter_map(|word| line.find(word)).min()?;
            Some(line[at..].to_owned())
        };
        Self { child, lines: Box::new(lines.map_while(Result::ok).filter_map(said)) }
    }

    fn next(&mut self) -> String {
        self.lines.next().unwrap_or_default()
    }

    fn next_commit(&mut self) -> i64 {
        let line = self.next();
        let number = line.strip_prefix("committed ").unwrap_or_else(|| panic!("{line}"));
        number.parse().unwrap()
    }

    /// Kills the process; returns its last commit.
    fn kill(mut self, mut last: i64) -> i64 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        for line in self.lines {
            if let Some(number) = line.strip_prefix("committed ") {
                last = number.parse().unwrap();
            }
        }
        last
    }
}

fn count(app: &Connection) -> i64 {
    integrity(app);
    let found: i64 = text(app, "SELECT count(*) FROM t").parse().unwrap();
    assert_eq!(text(app, "SELECT coalesce(max(a), 0) FROM t"), found.to_string());
    found
}

#[test]
fn a_database_in_a_bucket_is_used_as_one_in_a_file() {
    let bucket = TestBucket::create(64 << 20);
    let app = bucket.open("app.db", "&bucket_commit_ms=0");
    app.execute_batch(&format!(
        "CREATE TABLE t(a, b); INSERT INTO t VALUES (1, randomblob(100000)); PRAGMA page_size=1024;
         VACUUM; ATTACH '{}' AS side;
         BEGIN; CREATE TABLE side.u AS SELECT a FROM t; DELETE FROM t; COMMIT;
         BEGIN; DELETE FROM side.u; ROLLBACK",
        bucket.uri("side.db", "")
    ))
    .unwrap();
    assert_eq!(text(&app, "PRAGMA draconis_snapshot = 'first'"), "app.db@first");
    integrity(&app);
    drop(app);
    let app = bucket.open("side.db", "");
    assert_eq!(text(&app, "SELECT count(*) FROM u"), "1");
    // Readers see the state in which they opened the store.
    drop(app);
    let reader = open_read_only(&bucket.uri("side.db", "&mode=ro")).unwrap();
    assert_eq!(text(&reader, "SELECT count(*) FROM u"), "1");
    drop(reader);
    let report = bucket.check();
    assert!(report.is_clean(), "{:?}", report.damage);
}

#[test]
fn wrong_parameters_and_addresses_are_named() {
    let bucket = TestBucket::create(64 << 20);
    let refused = |store: &str, more: &str, why: &str| {
        let uri = common::uri(Path::new(store), "app.db") + more;
        let found = Connection::open(&uri).unwrap_err();
        assert_eq!(found.sqlite_error_code(), Some(ErrorCode::CannotOpen), "{found}");
        let memory = Connection::open_in_memory().unwrap();
        let message = text(&memory, "SELECT draconis_error()");
        assert!(message.contains(why), "{message}");
    };
    let missing = format!("{}/missing", bucket.address);
    refused(&missing, "", "no such directory; draconis store create");
    refused("ftp://x/y", "", "ftp:// is not known");
    refused(&bucket.address, "&bucket_deadline=soon", "bucket_deadline: a whole number");
    refused(&bucket.address, "&bucket_cache=x", "bucket_cache: a directory, a ':' and a size");
    refused(&bucket.address, "&bucket_take_over=no", "bucket_take_over: 1 or nothing");
    refused(&bucket.address, "&bucket_journal=/dev/null", "a journal is a file");
    let file = bucket.dir.path().join("no.store");
    refused(file.to_str().unwrap(), "&bucket_journal=j", "bucket_journal is for stores in buckets");
}

/// With a journal, a commit is durable before the bucket has it.
#[test]
fn killed_writers_lose_nothing_that_they_committed() {
    let kills = std::env::var("DRACONIS_SQLITE_KILLS").map_or(3, |text| text.parse().unwrap());
    for has_journal in [false, true] {
        let bucket = TestBucket::create(64 << 20);
        let journal = bucket.dir.path().join("journal");
        let more = match has_journal {
            true => format!("&bucket_journal={}:16M", journal.display()),
            false => "&bucket_commit_ms=1".to_owned(),
        };
        let uri = bucket.uri("app.db", &more);
        let (mut random, mut total) = (Random(5), 0);
        for run in 0..kills {
            let mut writer = Writer::start(&uri, &[]);
            let mut last = writer.next_commit();
            if run == 0 {
                // A process on the same machine waits as for a lock.
                let mut second = Writer::start(&uri, &[]);
                let line = second.next();
                assert!(line.contains("refused database is locked"), "{line}");
                second.child.wait().unwrap();
            }
            for _ in 0..random.below(20) {
                last = writer.next_commit();
            }
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_micros(random.below(20_000)),
            );
            last = writer.kill(last);
            if has_journal && run == 0 {
                let memory = Connection::open_in_memory().unwrap();
                Connection::open(bucket.uri("app.db", "")).unwrap_err();
                let message = text(&memory, "SELECT draconis_error()");
                assert!(message.contains("is written with a journal"), "{message}");
            }
            let app = bucket.open("app.db", &more);
            let found = count(&app);
            assert!(found == last || found == last + 1, "{last} was committed, {found} is there");
            assert!(found > total);
            total = found;
            drop(app);
            assert!(bucket.check().is_clean());
        }
        eprintln!("{kills} kills, {total} transactions, journal: {has_journal}");
    }
}

#[test]
fn another_machine_has_to_take_over_and_nothing_is_lost() {
    let bucket = TestBucket::create(64 << 20);
    let app = bucket.open("app.db", "&bucket_commit_ms=0");
    app.execute_batch("CREATE TABLE t(a INTEGER PRIMARY KEY, b); INSERT INTO t VALUES (1, 'x')")
        .unwrap();
    let other = bucket.dir.path().join("other");
    let other = [("DRACONIS_RUNTIME_DIR", other.to_str().unwrap())];
    let mut refused = Writer::start(&bucket.uri("app.db", ""), &other);
    let line = refused.next();
    assert!(line.starts_with("refused unable to open") && line.contains("is mounted by"), "{line}");
    refused.child.wait().unwrap();
    app.execute("INSERT INTO t VALUES (2, 'x')", []).unwrap();
    let mut writer = Writer::start(&bucket.uri("app.db", "&bucket_take_over=1"), &other);
    let last = writer.next_commit();
    let found = app.execute("INSERT INTO t VALUES (100, 'x')", []).unwrap_err();
    assert_eq!(found.sqlite_error_code(), Some(ErrorCode::SystemIoFailure), "{found}");
    let message = text(&app, "SELECT draconis_error()");
    assert!(message.contains("was taken over by SQLite on"), "{message}");
    app.execute("INSERT INTO t VALUES (101, 'x')", []).unwrap_err();
    let last = writer.kill(last);
    drop(app);
    // The other machine is gone, and did not say so.
    let app = bucket.open("app.db", "&bucket_take_over=1");
    let found = count(&app);
    assert!(found == last || found == last + 1, "{last} was committed, {found} is there");
    assert_eq!(text(&app, "SELECT group_concat(b) FROM t WHERE a < 3"), "x,x");
}

/// A directory whose place a file takes fails each request, as a server that cannot be reached.
#[test]
fn commits_fail_while_the_bucket_is_away_and_go_on_when_it_is_back() {
    for has_journal in [false, true] {
        let bucket = TestBucket::create(64 << 20);
        let journal = bucket.dir.path().join("journal");
        let journal = format!("&bucket_journal={}:16M", journal.display());
        let more = if has_journal { &journal } else { "&bucket_commit_ms=0" };
        let app = bucket.open("app.db", &format!("{more}&bucket_deadline=1"));
        app.execute_batch("CREATE TABLE t(a INTEGER PRIMARY KEY, b); INSERT INTO t VALUES (1, 1)")
            .unwrap();
        let (here, away) = (bucket.path(), bucket.dir.path().join("away"));
        std::fs::rename(&here, &away).unwrap();
        std::fs::write(&here, "").unwrap();
        let inserted = app.execute("INSERT INTO t VALUES (2, 2)", []);
        match has_journal {
            true => assert_eq!(inserted.unwrap(), 1),
            false => {
                let found = inserted.unwrap_err();
                assert_eq!(found.sqlite_error_code(), Some(ErrorCode::SystemIoFailure), "{found}");
                let message = text(&app, "SELECT draconis_error()");
                assert!(message.contains("it waits in memory"), "{message}");
            }
        }
        // What is cached is read.
        assert_eq!(text(&app, "SELECT a FROM t WHERE a = 1"), "1");
        std::fs::remove_file(&here).unwrap();
        std::fs::rename(&away, &here).unwrap();
        wait_until("the bucket is back", || {
            app.execute("INSERT OR REPLACE INTO t VALUES (2, 3)", []).is_ok()
        });
        drop(app);
        let app = bucket.open("app.db", more);
        assert_eq!(text(&app, "SELECT group_concat(b) FROM t"), "1,3");
        integrity(&app);
        drop(app);
        assert!(bucket.check().is_clean());
    }
}

/// What happens to the bucket around a commit over two databases that is not acknowledged.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Outage {
    /// It comes back while the connection is open.
    Ends,
    /// It comes back after the connection was closed.
    OutlastsConnection,
    /// It begins once a part of the commit is there, and ends after the connection was closed.
    CutsCommit,
    /// Another machine takes over before the commit.
    OtherWriter,
}

/// Law: after a commit that failed, and after the store was opened again, both databases have the
/// change or neither. What was acknowledged before is there.
#[test]
fn a_commit_over_two_databases_that_fails_to_become_durable_is_in_both_or_in_neither() {
    use Outage::{CutsCommit, Ends, OtherWriter, OutlastsConnection};
    // A commit that was faster than its cut is tried again.
    let mut cuts_left = 20;
    let mut outages = vec![OtherWriter, CutsCommit, OutlastsConnection, Ends];
    while let Some(outage) = outages.pop() {
        let bucket = TestBucket::create(128 << 20);
        let open = |more: &str| {
            let more = format!("&bucket_commit_ms=0&bucket_deadline=1{more}");
            let app = bucket.open("a.db", &more);
            let attach = format!("ATTACH '{}' AS side", bucket.uri("b.db", &more));
            app.execute_batch(&attach).unwrap();
            app
        };
        let counts = |app: &Connection| {
            ["main", "side"].map(|schema| {
                assert_eq!(text(app, &format!("PRAGMA {schema}.integrity_check")), "ok");
                text(app, &format!("SELECT group_concat(a) FROM {schema}.t"))
            })
        };
        let app = open("");
        app.execute_batch(
            "CREATE TABLE main.t(a, b); CREATE TABLE side.t(a, b);
             BEGIN; INSERT INTO main.t VALUES (1, 'x'); INSERT INTO side.t VALUES (1, 'x'); COMMIT",
        )
        .unwrap();
        let (here, away) = (bucket.path(), bucket.dir.path().join("away"));
        let begin = || {
            std::fs::rename(&here, &away).unwrap();
            std::fs::write(&here, "").unwrap();
        };
        let end = || {
            std::fs::remove_file(&here).unwrap();
            std::fs::rename(&away, &here).unwrap();
        };
        // Of a commit that is cut, several objects of 4 MiB.
        let len = if outage == CutsCommit { 6 << 20 } else { 5000 };
        let change = format!(
            "BEGIN; INSERT INTO main.t VALUES (2, randomblob({len}));
             INSERT INTO side.t VALUES (2, randomblob({len})); COMMIT"
        );
        let mut writer = None;
        match outage {
            OtherWriter => {
                let other = bucket.dir.path().join("other");
                let other = [("DRACONIS_RUNTIME_DIR", other.to_str().unwrap())];
                let uri = bucket.uri("other.db", "&bucket_take_over=1");
                let writer = writer.insert(Writer::start(&uri, &other));
                assert_eq!(writer.next_commit(), 1);
            }
            CutsCommit => {}
            Ends | OutlastsConnection => begin(),
        }
        let done = std::thread::scope(|scope| {
            if outage == CutsCommit {
                let count = || std::fs::read_dir(&here).unwrap().map(count_files).sum::<usize>();
                let before = count();
                scope.spawn(move || {
                    while count() == before {
                        std::thread::yield_now();
                    }
                    begin();
                });
            }
            app.execute_batch(&change)
        });
        if outage == CutsCommit && done.is_ok() && cuts_left > 0 {
            cuts_left -= 1;
            outages.push(outage);
            end();
            continue;
        }
        let failed = done.unwrap_err();
        assert_eq!(failed.sqlite_error_code(), Some(ErrorCode::SystemIoFailure), "{failed}");
        let why = text(&app, "SELECT draconis_error()");
        let wanted =
            if outage == OtherWriter { "was taken over by SQLite on" } else { "waits in memory" };
        assert!(why.contains(wanted), "{outage:?}: {why}");
        if outage == Ends {
            end();
        }
        // Nobody knows how it ended, so the store takes no more changes.
        let refused = app.execute("INSERT INTO main.t VALUES (3, 3)", []).unwrap_err();
        assert_eq!(refused.sqlite_error_code(), Some(ErrorCode::SystemIoFailure), "{refused}");
        let why = text(&app, "SELECT draconis_error()");
        assert!(why.contains("close all connections to the store"), "{outage:?}: {why}");
        drop(app);
        if let Some(writer) = writer {
            writer.kill(1);
        } else if outage != Ends {
            end();
        }
        let app = open("&bucket_take_over=1");
        let found = counts(&app);
        assert_eq!(found[0], found[1], "{outage:?}");
        // A cut may come after the last object, too.
        let wanted = match outage {
            Ends => "1,2",
            CutsCommit if found[0] == "1,2" => "1,2",
            CutsCommit | OutlastsConnection | OtherWriter => "1",
        };
        assert_eq!(found[0], wanted, "{outage:?}");
        app.execute_batch(&change).unwrap();
        drop(app);
        assert_eq!(counts(&open("")), [format!("{wanted},2"), format!("{wanted},2")]);
        assert!(bucket.check().is_clean());
    }
}

/// Returns the number of files in an entry of a directory.
fn count_files(entry: std::io::Result<std::fs::DirEntry>) -> usize {
    let path = entry.unwrap().path();
    match std::fs::read_dir(&path) {
        Ok(entries) => entries.map(count_files).sum(),
        Err(_) => 1,
    }
}

#[cfg(feature = "clouds")]
#[test]
#[ignore = "tools: versitygw"]
fn a_server_that_is_gone_for_a_moment_delays_a_commit() {
    let Some(program) = find_versitygw() else {
        report_skipped("buckets of a real server: versitygw (tools/packages test)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("bucket")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = || {
        let server = Command::new(&program)
            .args(["--access", "access", "--secret", "secret-of-a-test", "--quiet", "--port"])
            .arg(format!("127.0.0.1:{port}"))
            .arg("posix")
            .arg(dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("versitygw answers", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        server
    };
    let mut server = start();
    let endpoint = format!("http://127.0.0.1:{port}");
    let runtime = dir.path().join("runtime");
    let environment = [
        ("AWS_ACCESS_KEY_ID", "access"),
        ("AWS_SECRET_ACCESS_KEY", "secret-of-a-test"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", &endpoint),
        ("DRACONIS_RUNTIME_DIR", runtime.to_str().unwrap()),
    ];
    common::buckets::create_in_child("s3://bucket/a/prefix", 64 << 20, &environment);
    let uri = "file:app.db?vfs=draconis&store=s3://bucket/a/prefix&bucket_commit_ms=0";
    let mut writer = Writer::start(uri, &environment);
    assert_eq!(writer.next_commit(), 1);
    server.kill().unwrap();
    server.wait().unwrap();
    draconis_testkit::wait::pause("the server is away for a while", Duration::from_millis(500));
    let mut server = start();
    // More than can have been printed before the server was killed.
    let last = (0..60).map(|_| writer.next_commit()).last().unwrap();
    let last = writer.kill(last);
    let mut writer = Writer::start(uri, &environment);
    let next = writer.next_commit();
    assert!(next == last + 1 || next == last + 2, "{last} was committed, {next} is the next");
    writer.kill(next);
    server.kill().unwrap();
    server.wait().unwrap();
}
