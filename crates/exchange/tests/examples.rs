//! The teaching examples run.

#[path = "../examples/channel.rs"]
mod channel;

#[test]
fn example_channel_runs() {
    channel::main().unwrap();
}
