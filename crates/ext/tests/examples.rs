//! The teaching examples run.

#[path = "../examples/check_volume.rs"]
mod check_volume;
#[path = "../examples/list_and_read.rs"]
mod list_and_read;
#[path = "../examples/make_volume.rs"]
mod make_volume;

#[test]
fn example_check_volume_runs() {
    check_volume::main().unwrap();
}

#[test]
fn example_list_and_read_runs() {
    list_and_read::main().unwrap();
}

#[test]
fn example_make_volume_runs() {
    make_volume::main().unwrap();
}
