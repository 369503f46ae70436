//! An analytical load, on a database in a store and on one in a file: the same results. The longer
//! form prints seconds:
//!
//! ```sh
//! DRACONIS_SQLITE_ROWS=1000000 cargo test --release -p draconis-sqlite --test main analytics:: -- --nocapture
//! ```

use crate::common::{TestStore, integrity};
use rusqlite::Connection;

const GROUPS: &str = "SELECT region, count(*), sum(amount), avg(price) FROM sales GROUP BY region";

/// Statements, and queries whose rows are compared.
fn statements(rows: u64, copy: &str) -> [(&'static str, String); 9] {
    [
        (
            "load",
            format!(
                "CREATE TABLE sales(id INTEGER PRIMARY KEY, customer, region, amount, price, note);
                 WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
                 INSERT INTO sales SELECT i, i * 7919 % 50021, 'region ' || (i * 31 % 17),
                     i * 104729 % 1000, (i * 1299709 % 100000) / 100.0, hex(i * 15485863) FROM n"
            ),
        ),
        ("group by, without an index", GROUPS.into()),
        ("create index of two columns", "CREATE INDEX by_region ON sales(region, amount)".into()),
        ("create index of text", "CREATE INDEX by_note ON sales(note)".into()),
        ("analyze", "ANALYZE".into()),
        (
            "group by, with an index",
            "SELECT region, count(*), max(amount) FROM sales GROUP BY region".into(),
        ),
        (
            "join and sort",
            "SELECT a.region, b.region, count(*) FROM sales a JOIN sales b ON b.id = a.customer + 1
             WHERE a.amount < 500 GROUP BY 1, 2 ORDER BY 3, 1, 2"
                .into(),
        ),
        (
            "update of each tenth row",
            "UPDATE sales SET note = 'n' || note WHERE id % 10 = 0".into(),
        ),
        ("vacuum into", format!("VACUUM INTO '{copy}'")),
    ]
}

fn rows(connection: &Connection, sql: &str) -> Vec<String> {
    let mut statement = connection.prepare(sql).unwrap();
    let columns = statement.column_count();
    let row = |row: &rusqlite::Row<'_>| -> rusqlite::Result<String> {
        (0..columns).map(|at| Ok(format!("{:?} ", row.get_ref(at)?))).collect()
    };
    statement.query_map([], row).unwrap().map(Result::unwrap).collect()
}

#[test]
fn results_are_those_of_a_file() {
    let wanted = std::env::var("DRACONIS_SQLITE_ROWS").map(|text| text.parse().unwrap());
    let count = wanted.unwrap_or(20_000);
    let test = TestStore::create((64 << 20) + count * 1024);
    let file = |name: &str| test.dir.path().join(name).display().to_string();
    let both = [test.open("app.db"), Connection::open(file("app.db")).unwrap()];
    both[1].execute_batch("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL").unwrap();
    let copies = [test.uri("copy.db"), file("copy.db")];
    let all = copies.each_ref().map(|copy| statements(count, copy));
    for (ours, theirs) in all[0].iter().zip(&all[1]) {
        let mut seconds = [0.0; 2];
        let mut found = [vec![], vec![]];
        for (nth, sql) in [&ours.1, &theirs.1].into_iter().enumerate() {
            let execute = || match sql.starts_with("SELECT") {
                true => found[nth] = rows(&both[nth], sql),
                false => both[nth].execute_batch(sql).unwrap(),
            };
            seconds[nth] = draconis_testkit::wait::measure(execute).1.as_secs_f64();
        }
        assert!(found[0] == found[1], "{}: {:?} and {:?}", ours.0, found[0], found[1]);
        let [store, file] = seconds;
        eprintln!("{}: {store:.2} s, in a file {file:.2} s", ours.0);
    }
    let copies = copies.map(|copy| Connection::open(copy).unwrap());
    let tables = "SELECT * FROM sales ORDER BY id";
    let [first, second, third, fourth] =
        [&both[0], &both[1], &copies[0], &copies[1]].map(|one| rows(one, tables));
    assert!(first == second && first == third && first == fourth && first.len() as u64 == count);
    both.iter().chain(&copies).for_each(integrity);
    drop((both, copies));
    test.check();
}
