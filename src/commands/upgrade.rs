//! `draconis upgrade`

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_service::client::{Directory, ask_running, retire};
use draconis_service::protocol::{Reply, Request};

use crate::say;

/// Have this program take over what another version of it has mounted, while it is in use.
///
/// One mount after the other gets a keeper and a worker of this program. Who uses a mount
/// waits some milliseconds, and sees nothing else of it. A mount that this program cannot take
/// over goes on as it is.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Write JSON: an object with a list `mounts`.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let directory = Directory::open()?;
    retire(&directory)?;
    let mounts = match ask_running(&directory, &Request::Upgrade { program })? {
        Some(Reply::Upgraded { mounts }) => mounts,
        Some(Reply::Failed { why }) => bail!("{why}"),
        Some(_) => bail!("the manager answered something else; is it another version?"),
        None => vec![],
    };
    let refused = mounts.iter().filter(|mount| mount.why.is_some()).count();
    if arguments.json {
        say::print_line(serde_json::to_string_pretty(&serde_json::json!({ "mounts": mounts }))?)?;
    } else if mounts.is_empty() {
        say::print_line("nothing is mounted")?;
    } else {
        for mount in mounts.iter().filter(|mount| mount.why.is_none()) {
            say::print_line(format_args!(
                "{} goes on with {}",
                mount.mount_point.display(),
                env!("CARGO_PKG_VERSION")
            ))?;
        }
        for why in mounts.iter().filter_map(|mount| mount.why.as_ref()) {
            say::warn_line(format_args!("draconis: {why}"));
        }
    }
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
