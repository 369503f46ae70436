//! The teaching examples run.

#[path = "../examples/store.rs"]
mod store;
#[path = "../examples/volume.rs"]
mod volume;

#[test]
fn example_store_runs() {
    store::main().unwrap();
}

#[test]
fn example_volume_runs() {
    volume::main().unwrap();
}
