//! `draconis umount`

use std::process::ExitCode;

use anyhow::bail;
use draconis_service::client::{Directory, ask};
use draconis_service::protocol::Request;

use crate::cli::Umount;

pub fn run(arguments: &Umount) -> anyhow::Result<ExitCode> {
    let mount_point = super::mount::mount_point(&arguments.dir)?;
    let Some(manager) = Directory::open()?.connect() else {
        bail!("{}: no manager runs, so nothing is mounted", mount_point.display());
    };
    super::mount::told(ask(&manager, &Request::Unmount { mount_point, force: arguments.force })?)
}
