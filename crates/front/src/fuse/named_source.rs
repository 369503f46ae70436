//! Mounts of a block device that the kernel shows under the name of the image.
//!
//! The kernel finds the device of a `fuseblk` mount by the name of its source, and shows that name.
//! A thread whose root directory is a file system in memory finds a device node by any name:
//!
//! ```text
//!   this process    /dev/loop0     /srv/disk.img (a file)     /mnt ◀── move_mount ──┐
//!   the thread                     /srv/disk.img (7:0) ──▶ fsopen, fsmount ────────┘
//! ```
//!
//! Law: neither the process nor its mount namespace changes but for the mount itself.

use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{CWD, Dev, FileType, Mode};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use rustix::thread::UnshareFlags;

/// A mount of the type `fuseblk`: parameters, flags of the file system, and of the mount.
pub(super) struct NamedMount<'m> {
    pub(super) source: &'m Path,
    pub(super) parameters: &'m [(&'m str, String)],
    pub(super) flags: &'m [&'m str],
    pub(super) attributes: MountAttrFlags,
}

impl NamedMount<'_> {
    /// Creates the mount of `device`, which [`attach`] puts in place.
    ///
    /// # Errors
    /// The system's error. Names over 255 bytes, kernels before 5.2, and containers without device
    /// nodes are such.
    pub(super) fn create(&self, device: &Path) -> rustix::io::Result<OwnedFd> {
        let number = rustix::fs::stat(device)?.st_rdev;
        let memory = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&memory)?;
        let root = fsmount(&memory, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        std::thread::scope(|scope| {
            scope.spawn(|| self.create_below(&root, number)).join().unwrap_or(Err(Errno::NOMEM))
        })
    }

    /// Changes the root directory of the calling thread, and creates the mount there.
    fn create_below(&self, root: &OwnedFd, device: Dev) -> rustix::io::Result<OwnedFd> {
        #[expect(deprecated, reason = "its successor is unsafe for descriptor tables alone")]
        rustix::thread::unshare(UnshareFlags::FS)?;
        rustix::process::fchdir(root)?;
        rustix::process::chroot(".")?;
        make_device_node(self.source, device)?;
        let context = fsopen("fuseblk", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", self.source)?;
        for (name, value) in self.parameters {
            fsconfig_set_string(&context, *name, value.as_str())?;
        }
        for flag in self.flags {
            fsconfig_set_flag(&context, *flag)?;
        }
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, self.attributes)
    }
}

/// Mounts what [`NamedMount::create`] returned on `dir`, or where a link `dir` leads, as mount(2)
/// does.
///
/// # Errors
/// The system's error.
pub(super) fn attach(mount: &OwnedFd, dir: &Path) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(mount, "", CWD, dir, flags)
}

/// Makes the node and the directories above it.
fn make_device_node(name: &Path, device: Dev) -> rustix::io::Result<()> {
    let is_plain = |it: Component<'_>| matches!(it, Component::RootDir | Component::Normal(_));
    if !name.components().all(is_plain) {
        return Err(Errno::INVAL);
    }
    let above = name.parent().map(|above| above.ancestors().collect::<Vec<_>>());
    for dir in above.unwrap_or_default().into_iter().rev().filter(|dir| dir.file_name().is_some()) {
        rustix::fs::mkdir(dir, Mode::RWXU)?;
    }
    rustix::fs::mknodat(CWD, name, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, device)
}
