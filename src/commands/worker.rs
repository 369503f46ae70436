//! `draconis worker`: started by the keeper.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use draconis_exchange::contract::request_log::RequestLog;
use draconis_exchange::notices::NoticeSender;
use draconis_front::fuse::{Activity, Server, ServerOptions};
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
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    worker::run_worker(FuseServer(Activity::default()), arguments.remote, arguments.memory)
        .map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}

struct FuseServer(Activity);

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
        };
        let server = Server::new(tree, options).with_recorder(recorder).with_notices(notices);
        server.serve(connection, &self.0)
    }

    fn answered_requests(&self) -> u64 {
        self.0.answered_requests()
    }

    fn requests_by_opcode(&self) -> BTreeMap<&'static str, u64> {
        self.0.requests_by_opcode()
    }

    fn current_request_age(&self) -> Duration {
        self.0.current_request_age()
    }
}
