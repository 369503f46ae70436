//! The teaching examples run.

#[path = "../examples/put_and_get.rs"]
mod put_and_get;
#[path = "../examples/snapshot.rs"]
mod snapshot;

#[test]
fn example_put_and_get_runs() {
    put_and_get::main().unwrap();
}

#[test]
fn example_snapshot_runs() {
    snapshot::main().unwrap();
}
