//! What the tests of the front share: the kernel's end, and a tree to serve.

pub mod kernel;
pub mod recorder;
pub mod tree;

use draconis_front::fuse::{Activity, Server, ServerOptions};

use kernel::Kernel;
use recorder::Heir;
use tree::Memory;

/// Serves a tree to a kernel whose messages the test says, until the test is done.
pub fn with_kernel(tree: &Memory, test: impl FnOnce(&mut Kernel)) {
    let (mut kernel, device) = Kernel::new();
    let activity = Activity::default();
    std::thread::scope(|scope| {
        let server = Server::new(tree, ServerOptions::default());
        let activity = &activity;
        let served = scope.spawn(move || server.serve(device, activity));
        test(&mut kernel);
        drop(kernel);
        served.join().unwrap().unwrap();
    });
}

/// The same with a server that takes over what `heir` has.
pub fn with_heir(tree: &Memory, heir: &Heir, test: impl FnOnce(&mut Kernel)) {
    let (mut kernel, device) = Kernel::new();
    let activity = Activity::default();
    std::thread::scope(|scope| {
        let server = Server::new(tree, ServerOptions::default()).with_recorder(heir);
        let activity = &activity;
        let served = scope.spawn(move || server.serve(device, activity));
        test(&mut kernel);
        drop(kernel);
        served.join().unwrap().unwrap();
    });
}
