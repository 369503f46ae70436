//! The interface through which a keeper attaches and detaches mount points.

use std::os::fd::OwnedFd;
use std::path::Path;

use draconis_types::path_bytes::ShowPath;

use crate::mount_table;
use crate::mount_users::describe_mount_users;
use crate::options::MountOptions;

/// Makes a volume appear to Linux programs. FUSE is the only implementation today.
pub trait Mounter: Send + Sync + 'static {
    /// Attaches `mount_point` and returns the descriptor of its FUSE connection. The kernel shows a
    /// block `device`, if given, as the source of the mount, and opens it exclusively. The mount has
    /// `connection`, an open `/dev/fuse`, if given (root only).
    ///
    /// # Errors
    /// A message with the next step for the user.
    fn attach(
        &self,
        mount_point: &Path,
        volume: &Path,
        device: Option<&Path>,
        connection: Option<&OwnedFd>,
        options: &MountOptions,
    ) -> Result<OwnedFd, String>;

    /// Has the kernel remount read-only or writable, as `options` say. The other options are those
    /// of the mount.
    ///
    /// # Errors
    /// See [`DetachError`].
    fn remount(
        &self,
        mount_point: &Path,
        volume: &Path,
        options: &MountOptions,
    ) -> Result<(), DetachError>;

    /// Raises the kernel's read-ahead of a served mount, as far as permitted.
    fn set_read_ahead(&self, mount_point: &Path);

    /// Unmounts `mount_point`; with `force` even while it is in use.
    ///
    /// # Errors
    /// See [`DetachError`].
    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), DetachError>;
}

/// Reasons why a mount was not detached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetachError {
    /// It is in use.
    Busy,
    /// Any other reason, as a message.
    Failed(String),
}

impl DetachError {
    /// Returns the message for the user.
    pub fn message(self, mount_point: &Path) -> String {
        match self {
            Self::Failed(why) => why,
            Self::Busy => {
                let holders = mount_table::find_mount_at(mount_point)
                    .map(|mount| describe_mount_users(&mount));
                let holders = holders.unwrap_or_else(|| "it is in use".into());
                let name = mount_point.shown();
                format!("{name} is busy: {holders}; end that, or take it away at once with --force")
            }
        }
    }
}
