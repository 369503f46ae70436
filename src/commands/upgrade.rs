//! `draconis upgrade`

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_service::client::{RuntimeDir, request_if_running, retire_manager};
use draconis_service::protocol::{Reply, Request};
use draconis_types::path_bytes::ShowPath;
use sha2::{Digest as _, Sha256};

use crate::report;

/// Move running mounts to this version of the program.
///
/// Replaces the keeper and worker of each mount in turn. Running programs pause for some
/// milliseconds. Mounts that cannot be upgraded keep running.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON: an object with a list `mounts`.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let directory = RuntimeDir::open()?;
    retire_manager(&directory)?;
    let mounts = match request_if_running(&directory, &Request::Upgrade { program })? {
        Some(Reply::Upgraded { mounts }) => mounts,
        Some(Reply::Failed { why }) => bail!("{why}"),
        Some(_) => bail!("the manager answered something else; is it another version?"),
        None => vec![],
    };
    let refused = mounts.iter().filter(|mount| mount.why.is_some()).count();
    if arguments.json {
        report::print_line(serde_json::to_string_pretty(
            &serde_json::json!({ "mounts": mounts }),
        )?)?;
    } else if mounts.is_empty() {
        report::print_line("nothing is mounted")?;
    } else {
        // Builds of one version differ by their programs.
        let digest = Sha256::digest(std::fs::read("/proc/self/exe").context("this program")?);
        let build: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        for mount in mounts.iter().filter(|mount| mount.why.is_none()) {
            report::print_line(format_args!(
                "{} goes on with {}, program {build}",
                mount.mount_point.shown(),
                env!("CARGO_PKG_VERSION")
            ))?;
        }
        for why in mounts.iter().filter_map(|mount| mount.why.as_ref()) {
            report::warn_line(format_args!("draconis: {why}"));
        }
    }
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
