//! `draconis store rollback`

use anyhow::bail;
use clap::Args;
use draconis_service::store_process::Change;

use super::lineage::{InStore, change};
use crate::image::object::disk_name;

/// Make a disk what it was when a snapshot was taken.
///
/// What was written to it since is gone. The snapshot stays, and so do later ones. A disk that is
/// mounted is refused.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The disk, as STORE#NAME.
    #[arg(value_name = "STORE#NAME")]
    disk: InStore,
    /// The snapshot.
    #[arg(value_parser = disk_name)]
    snapshot: String,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { disk, snapshot } = arguments;
    if let Some(snapshot) = &disk.snapshot {
        let shown = format!("{}#{}", disk.store.display(), disk.disk);
        bail!("a disk is rolled back: draconis store rollback {shown} {snapshot}");
    }
    let (name, snapshot) = (disk.disk.clone(), snapshot.clone());
    change(&disk.store, &Change::RollBack { disk: name, snapshot })
}
