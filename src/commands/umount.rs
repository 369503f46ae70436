//! `draconis umount`

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use draconis_service::client::{Directory, ask};
use draconis_service::manager::Front;
use draconis_service::protocol::{Reply, Request};
use draconis_service::table::{self, Answer};

use crate::cli::Umount;
use crate::front::Fuse;

pub fn run(arguments: &Umount) -> anyhow::Result<ExitCode> {
    let mount_point = super::mount::mount_point(&arguments.dir)?;
    if let Some(manager) = Directory::open()?.connect() {
        let force = arguments.force;
        let request = Request::Unmount { mount_point: mount_point.clone(), force };
        match ask(&manager, &request)? {
            Reply::NotMounted => {}
            reply => return super::mount::told(reply),
        }
    }
    without_manager(&mount_point, arguments.force)
}

/// Unmounts what another manager mounted, or one that is gone.
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
