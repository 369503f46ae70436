//! What a keeper asks of a way in from Linux.

use std::os::fd::OwnedFd;
use std::path::Path;

use crate::mount_table;
use crate::mount_users::describe_mount_users;
use crate::options::MountOptions;

/// How a keeper makes a volume appear to Linux programs. FUSE is the only way today.
pub trait Mounter: Send + Sync + 'static {
    /// Attaches `mount_point` and returns the descriptor over which its requests come. With
    /// a block `device` that is what the kernel shows as the source, and has for itself.
    ///
    /// # Errors
    /// A sentence that says what to do.
    fn attach(
        &self,
        mount_point: &Path,
        volume: &Path,
        device: Option<&Path>,
        options: &MountOptions,
    ) -> Result<OwnedFd, String>;

    /// Has the kernel take a mount for read-only, or not any more; `options` say which, and
    /// are otherwise those of the mount.
    ///
    /// # Errors
    /// See [`DetachError`].
    fn remount(
        &self,
        mount_point: &Path,
        volume: &Path,
        options: &MountOptions,
    ) -> Result<(), DetachError>;

    /// Sets the kernel up for speed once the mount is served, as far as it may.
    fn set_read_ahead(&self, mount_point: &Path);

    /// Takes `mount_point` away; with `force` even while it is in use.
    ///
    /// # Errors
    /// See [`DetachError`].
    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), DetachError>;
}

/// Why a mount was not taken away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetachError {
    /// It is in use.
    Busy,
    /// Anything else: a sentence that says what.
    Failed(String),
}

impl DetachError {
    /// The sentence for the user.
    pub fn message(self, mount_point: &Path) -> String {
        match self {
            Self::Failed(why) => why,
            Self::Busy => {
                let holders =
                    mount_table::mount_at(mount_point).map(|mount| describe_mount_users(&mount));
                let holders = holders.unwrap_or_else(|| "it is in use".into());
                let name = mount_point.display();
                format!("{name} is busy: {holders}; end that, or take it away at once with --force")
            }
        }
    }
}
