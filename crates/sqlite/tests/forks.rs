//! Forked children of a process with connections, as workers of a server are.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::time::Duration;

use draconis_device::CloseOnFork;
use draconis_testkit::{ForkedChild, in_own_process};
use rusqlite::ErrorCode;

use crate::common::{TestStore, integrity, text};

#[test]
fn forked_children_find_the_store_busy_and_have_it_after_the_parent() {
    in_own_process!();
    let test = TestStore::create(64 << 20);
    let app = test.open("app.db");
    app.execute_batch("CREATE TABLE t(who, b)").unwrap();
    // Not while a thread is in SQLite, whose own mutexes a child would wait for.
    for rows in 1..=20 {
        app.execute("INSERT INTO t VALUES ('parent', randomblob(3000))", []).unwrap();
        ForkedChild::start(|| {
            let code = |sql: &str| app.execute_batch(sql).unwrap_err().sqlite_error_code();
            assert_eq!(code("SELECT * FROM t"), Some(ErrorCode::ApiMisuse));
            assert_eq!(code("INSERT INTO t VALUES ('child', 0)"), Some(ErrorCode::ApiMisuse));
            let own = test.open("app.db");
            own.busy_timeout(Duration::ZERO).unwrap();
            let busy = own.execute_batch("INSERT INTO t VALUES ('child', 0)").unwrap_err();
            assert_eq!(busy.sqlite_error_code(), Some(ErrorCode::DatabaseBusy), "{busy}");
        })
        .assert_success();
        assert_eq!(text(&app, "SELECT count(*) FROM t"), rows.to_string());
    }
    // A child that does nothing keeps no lock, and closes what it inherited without an effect.
    let (mut until, signal) = std::io::pipe().unwrap();
    let signal = CloseOnFork::new(OwnedFd::from(signal));
    let idle = ForkedChild::start(move || {
        until.read_to_end(&mut vec![]).unwrap();
        drop(app);
    });
    ForkedChild::start(|| {
        let own = test.open("app.db");
        own.execute_batch("DELETE FROM t; INSERT INTO t VALUES ('child', 0)").unwrap();
    })
    .assert_success();
    let app = test.open("app.db");
    assert_eq!(text(&app, "SELECT group_concat(who) FROM t"), "child");
    integrity(&app);
    drop(signal);
    idle.assert_success();
    app.execute_batch("INSERT INTO t VALUES ('parent', 0)").unwrap();
    drop(app);
    test.check();
}
