//! A no-op FUSE server that discards contents: the upper bound for our FUSE front end.

use std::path::Path;

use draconis_front::fuse::{self, Activity};

use crate::memory::MemoryTree;

/// Returns the options of a mount of the lab's own servers.
pub fn kernel_options(source: &str) -> fuse::KernelOptions {
    fuse::KernelOptions {
        source: source.into(),
        device: None,
        subtype: "draconis".into(),
        read_only: false,
        allow_other: true,
        default_permissions: true,
        dev: false,
        suid: false,
        no_exec: false,
        access_times: draconis_types::AccessTimes::Relative,
        sync: false,
        dir_sync: false,
        contexts: vec![],
    }
}

/// Serves an empty tree that discards contents, until it is unmounted.
///
/// # Errors
/// Mounting fails.
pub fn serve_null_fs(at: &Path, write_back: bool) -> anyhow::Result<()> {
    let connection = fuse::mount(at, None, &kernel_options("memory"))?;
    let tree = MemoryTree::new(false);
    let behaviour =
        fuse::ServerOptions { permissions: true, write_back, ..fuse::ServerOptions::default() };
    Ok(fuse::Server::new(&tree, behaviour).serve(connection, &Activity::default())?)
}
