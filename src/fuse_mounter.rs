//! FUSE operations of a keeper: attach, tune, detach.

use std::os::fd::OwnedFd;
use std::path::Path;

use draconis_front::fuse;
use draconis_service::mounter::{DetachError, Mounter};
use draconis_service::options::MountOptions;

/// Read-ahead of the kernel on our mounts, in KiB. The FUSE default of 128 KiB makes each read of
/// an uncached file wait for a round trip.
const READ_AHEAD_KIB: u32 = 1024;

/// Mounts through the kernel's FUSE.
pub struct FuseMounter;

impl Mounter for FuseMounter {
    fn attach(
        &self,
        mount_point: &Path,
        volume: &Path,
        device: Option<&Path>,
        connection: Option<&OwnedFd>,
        options: &MountOptions,
    ) -> Result<OwnedFd, String> {
        let options = fuse::KernelOptions {
            device: device.map(Path::to_path_buf),
            ..kernel_options(volume, options)
        };
        fuse::mount(mount_point, connection, &options).map_err(|error| error.to_string())
    }

    fn remount(
        &self,
        mount_point: &Path,
        volume: &Path,
        options: &MountOptions,
    ) -> Result<(), DetachError> {
        fuse::remount(mount_point, &kernel_options(volume, options)).map_err(detach_error)
    }

    fn set_read_ahead(&self, mount_point: &Path) {
        let Some(file) = fuse::read_ahead_file(mount_point) else { return };
        let current = std::fs::read_to_string(&file).ok();
        let current: Option<u32> = current.and_then(|text| text.trim().parse().ok());
        if current.is_some_and(|kib| kib < READ_AHEAD_KIB) {
            // Only root may write this file; see docs/compatibility.md for other users.
            let _ = std::fs::write(&file, READ_AHEAD_KIB.to_string());
        }
    }

    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), DetachError> {
        fuse::unmount(mount_point, force).map_err(detach_error)
    }
}

fn detach_error(error: fuse::MountError) -> DetachError {
    match error {
        fuse::MountError::Busy => DetachError::Busy,
        other => DetachError::Failed(other.to_string()),
    }
}

/// Returns true if the kernel has SELinux. Without it, mount(8) leaves contexts out.
fn has_selinux() -> bool {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.ends_with("\tselinuxfs"))
}

fn kernel_options(volume: &Path, options: &MountOptions) -> fuse::KernelOptions {
    let source = options.source.clone();
    fuse::KernelOptions {
        source: source.unwrap_or_else(|| volume.to_path_buf()),
        device: None,
        subtype: options.subtype.clone().unwrap_or_else(|| "draconis".into()),
        contexts: if has_selinux() { options.contexts.clone() } else { vec![] },
        read_only: options.read_only,
        allow_other: options.allow_other,
        default_permissions: options.default_permissions,
        dev: options.dev,
        suid: options.suid,
        no_exec: options.no_exec,
        access_times: options.access_times,
        sync: options.sync,
        dir_sync: options.dir_sync,
    }
}
