//! The teaching examples run.

#[path = "../examples/own_disk.rs"]
mod own_disk;

#[test]
fn example_own_disk_runs() {
    own_disk::main().unwrap();
}
