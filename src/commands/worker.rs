//! `draconis worker`: started by the keeper.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use draconis_exchange::contract::request_log::RequestLog;
use draconis_exchange::notices::NoticeSender;
use draconis_front::fuse::{Activity, RingSet, Server, ServerOptions};
use draconis_service::volume::VolumeTree;
use draconis_service::worker::{self, RequestServer};

/// Run a mount's sandboxed worker (started by the keeper).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Most private memory it may have, in bytes.
    #[arg(long)]
    memory: Option<u64>,
    /// The volume is served by the process of a store.
    #[arg(long)]
    remote: bool,
    /// It gets /dev/fuse to make rings for its mount.
    #[arg(long)]
    rings: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { memory, remote, rings } = *arguments;
    worker::run_worker(FuseServer::default(), remote, rings, memory).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Default)]
struct FuseServer {
    activity: Activity,
    rings: Option<RingSet>,
}

impl RequestServer for FuseServer {
    fn serve(
        &self,
        connection: OwnedFd,
        notices: &NoticeSender,
        tree: &VolumeTree,
        recorder: &dyn RequestLog,
    ) -> std::io::Result<()> {
        let options = ServerOptions {
            permissions: tree.kernel_checks_permissions(),
            write_back: tree.uses_writeback_cache(),
            no_polling: tree.is_polling_disabled(),
            over_rings: false,
        };
        let server = Server::new(tree, options).with_recorder(recorder).with_notices(notices);
        let server = match &self.rings {
            Some(rings) => server.with_rings(rings),
            None => server,
        };
        server.serve(connection, &self.activity)
    }

    fn prepare_rings(&mut self, device: OwnedFd) -> Result<(), String> {
        self.rings = Some(RingSet::new(device).map_err(|error| format!("io_uring: {error}"))?);
        Ok(())
    }

    fn is_over_rings(&self) -> bool {
        self.rings.as_ref().is_some_and(RingSet::is_used)
    }

    fn answered_requests(&self) -> u64 {
        self.activity.answered_requests()
    }

    fn requests_by_opcode(&self) -> BTreeMap<&'static str, u64> {
        self.activity.requests_by_opcode()
    }

    fn current_request_age(&self) -> Duration {
        self.activity.current_request_age()
    }
}
