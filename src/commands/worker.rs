//! `draconis worker`: what the manager starts.

use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::Duration;

use draconis_front::fuse::{Activity, Server};
use draconis_service::volume::VolumeTree;
use draconis_service::worker::{self, Serve};

pub fn run(memory_limit_bytes: Option<u64>) -> anyhow::Result<ExitCode> {
    worker::run(Fuse(Activity::default()), memory_limit_bytes).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}

struct Fuse(Activity);

impl Serve for Fuse {
    fn serve(&self, connection: OwnedFd, tree: &VolumeTree) -> std::io::Result<()> {
        Server::new(tree, tree.permissions()).serve(connection, &self.0)
    }

    fn requests(&self) -> u64 {
        self.0.requests()
    }

    fn busy(&self) -> Duration {
        self.0.busy()
    }
}
