//! `draconis umount`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_service::client::{RuntimeDir, request_if_running};
use draconis_service::mount_table::{self, ServerState};
use draconis_service::mounter::Mounter;
use draconis_service::protocol::{Reply, Request};
use draconis_types::path_bytes::ShowPath;

use crate::fuse_mounter::FuseMounter;

/// Unmount a volume or remove a dead mount.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Detach immediately, even if the mount is in use.
    #[arg(short, long, visible_alias = "lazy")]
    force: bool,
    /// Mount point.
    dir: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mount_point = super::mount::resolve_mount_point(&arguments.dir)?;
    // The working directory of this process must not keep the mount busy.
    std::env::set_current_dir("/")?;
    let force = arguments.force;
    let request = Request::Unmount { mount_point: mount_point.clone(), force };
    match request_if_running(&RuntimeDir::open()?, &request)? {
        None | Some(Reply::NotMounted) => unmount_without_manager(&mount_point, force),
        Some(reply) => super::mount::print_reply(reply),
    }
}

/// Unmounts a mount of another user's manager, or one that has lost its keeper.
fn unmount_without_manager(mount_point: &Path, force: bool) -> anyhow::Result<ExitCode> {
    let name = mount_point.shown();
    let Some(entry) = mount_table::find_mount_at(mount_point) else {
        bail!("{name}: nothing is mounted there")
    };
    let dead = entry.is_fuse() && entry.probe_server() == ServerState::Dead;
    if !entry.is_draconis() && !dead {
        bail!("{name}: what is mounted there is not ours but of type {}", entry.fs_type);
    }
    match FuseMounter.detach(mount_point, force || dead) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(why) => bail!("{}", why.message(mount_point)),
    }
}
