//! `draconis worker`: what the manager starts.

use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::Duration;

use draconis_front::fuse::{Activity, Behaviour, Server};
use draconis_service::volume::VolumeTree;
use draconis_service::worker::{self, Serve};

pub fn run(memory_limit_bytes: Option<u64>) -> anyhow::Result<ExitCode> {
    worker::run(Fuse(Activity::default()), memory_limit_bytes).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}

struct Fuse(Activity);

impl Serve for Fuse {
    fn serve(&self, connection: OwnedFd, tree: &VolumeTree) -> std::io::Result<()> {
        let behaviour =
            Behaviour { permissions: tree.permissions(), write_back: tree.write_back() };
        Server::new(tree, behaviour).serve(connection, &self.0)
    }

    fn requests(&self) -> u64 {
        self.0.requests()
    }

    fn busy(&self) -> Duration {
        self.0.busy()
    }
}
