//! `draconis keeper`: started by the manager for each mount.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use draconis_service::keeper::{Keeper, upgrade};
use draconis_service::sandbox::close_other_fds;

use super::serve::on_signal;
use crate::fuse_mounter::FuseMounter;
use crate::report;

/// Run a mount's keeper (started by the manager).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Go on with what another program hands over.
    #[arg(long)]
    resume: bool,
    /// Say what can be taken over from another program.
    #[arg(long)]
    formats: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.formats {
        report::print_line(serde_json::to_string(&upgrade::supported_formats())?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    close_other_fds(&[socket.as_fd()]);
    let keeper = if arguments.resume {
        Keeper::resume(Box::new(FuseMounter), socket).map_err(anyhow::Error::msg)?
    } else {
        let by_hand = "a keeper is started by the manager; see draconis-mount(1)";
        let listener = UnixListener::from(socket);
        listener.local_addr().context(by_hand)?;
        Keeper::new(Box::new(FuseMounter), listener)
    };
    let ending = keeper.clone();
    on_signal(move || ending.shut_down())?;
    keeper.run()?;
    Ok(ExitCode::SUCCESS)
}
