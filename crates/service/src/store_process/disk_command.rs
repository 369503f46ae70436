//! Commands on the disks of a store. The process that has the store open executes them: the tool,
//! or the store process while some disks are mounted.

use std::sync::Arc;

use draconis_objects::Store;
use serde::{Deserialize, Serialize};

/// A change of a store's disks and snapshots.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskCommand {
    /// Takes a snapshot of a disk.
    Snapshot {
        /// The disk.
        disk: String,
        /// The name of the snapshot, without the disk.
        snapshot: String,
    },
    /// Creates a disk with the contents of another one.
    Clone {
        /// The disk, or its snapshot as DISK@SNAPSHOT.
        of: String,
        /// The name of the new disk.
        disk: String,
    },
    /// Rolls a disk back to a snapshot.
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
        /// True to remove a disk with all of its snapshots.
        with_snapshots: bool,
    },
}

impl DiskCommand {
    /// Executes the command; returns once it is durable.
    ///
    /// # Errors
    /// The store's error.
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
