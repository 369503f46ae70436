//! Shared code of the front's tests: a scripted kernel, and a tree to serve.

pub mod kernel;
pub mod recorder;
pub mod tree;

use draconis_front::fuse::{Activity, Server, ServerOptions};

use kernel::ScriptedKernel;
use recorder::ScriptedLog;
use tree::MemoryTree;

/// Serves a tree to a scripted kernel until the test is done.
pub fn with_kernel(tree: &MemoryTree, test: impl FnOnce(&mut ScriptedKernel)) {
    let (mut kernel, device) = ScriptedKernel::new();
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

/// Serves a tree with a server that replays the requests of `heir`.
pub fn with_kernel_and_log(
    tree: &MemoryTree,
    heir: &ScriptedLog,
    test: impl FnOnce(&mut ScriptedKernel),
) {
    let (mut kernel, device) = ScriptedKernel::new();
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
