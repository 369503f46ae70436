//! `draconis umount`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_service::client::{Directory, ask_running};
use draconis_service::front::Front;
use draconis_service::protocol::{Reply, Request};
use draconis_service::table::{self, Answer};

use crate::front::Fuse;

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
    let mount_point = super::mount::mount_point(&arguments.dir)?;
    // This process is not to be what keeps the mount busy.
    std::env::set_current_dir("/")?;
    let force = arguments.force;
    let request = Request::Unmount { mount_point: mount_point.clone(), force };
    match ask_running(&Directory::open()?, &request)? {
        None | Some(Reply::NotMounted) => without_manager(&mount_point, force),
        Some(reply) => super::mount::told(reply),
    }
}

/// Unmounts what another user's manager mounted, or has lost its keeper.
fn without_manager(mount_point: &Path, force: bool) -> anyhow::Result<ExitCode> {
    let name = mount_point.display();
    let Some(entry) = table::at(mount_point) else { bail!("{name}: nothing is mounted there") };
    let dead = entry.is_fuse() && entry.answers() == Answer::Dead;
    if !entry.is_ours() && !dead {
        bail!("{name}: what is mounted there is not ours but of type {}", entry.kind);
    }
    match Fuse.detach(mount_point, force || dead) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(why) => bail!("{}", why.sentence(mount_point)),
    }
}
