//! What is done to the disks of a store as a whole, by who has it open: a command, or the process
//! of the store while some of them are mounted.

use std::sync::Arc;

use draconis_objects::Store;
use serde::{Deserialize, Serialize};

/// A change of which disks and snapshots there are, or of what they show.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskCommand {
    /// Keeps a disk as it is.
    Snapshot {
        /// The disk.
        disk: String,
        /// What its snapshot is called, without the disk.
        snapshot: String,
    },
    /// Makes a disk that has what another one has.
    Clone {
        /// The disk, or its snapshot as DISK@SNAPSHOT.
        of: String,
        /// What the new one is called.
        disk: String,
    },
    /// Makes a disk what it was.
    RollBack {
        /// The disk.
        disk: String,
        /// Its snapshot, without the disk.
        snapshot: String,
    },
    /// Removes a disk or a snapshot.
    Remove {
        /// The disk, or its snapshot as DISK@SNAPSHOT.
        name: String,
        /// A disk with all of its snapshots.
        with_snapshots: bool,
    },
}

impl DiskCommand {
    /// Does it; it is durable then.
    ///
    /// # Errors
    /// What the store refuses.
    pub fn execute(&self, store: &Arc<Store>) -> draconis_objects::Result<()> {
        match self {
            Self::Snapshot { disk, snapshot } => {
                store.take_snapshot(disk.as_bytes(), snapshot.as_bytes())
            }
            Self::Clone { of, disk } => store.clone_disk(of.as_bytes(), disk.as_bytes()),
            Self::RollBack { disk, snapshot } => {
                store.roll_back(disk.as_bytes(), snapshot.as_bytes())
            }
            Self::Remove { name, with_snapshots } => {
                store.remove_disk(name.as_bytes(), *with_snapshots)
            }
        }
    }
}
