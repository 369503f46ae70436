//! `draconis store rollback`

use anyhow::bail;
use clap::Args;
use draconis_service::store_process::DiskCommand;
use draconis_types::path_bytes::ShowPath;

use super::open::StoreWriteArgs;
use super::snapshots::{StoreDiskArg, run_disk_command};
use crate::image::store_disk::parse_disk_name;

/// Restore a disk to a snapshot.
///
/// Discards later writes and keeps all snapshots. The disk must not be mounted.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Disk, as STORE#NAME.
    #[arg(value_name = "STORE#NAME")]
    disk: StoreDiskArg,
    /// Name of the snapshot.
    #[arg(value_parser = parse_disk_name)]
    snapshot: String,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { disk, snapshot, write } = arguments;
    if let Some(snapshot) = &disk.snapshot {
        let shown = format!("{}#{}", disk.store.shown(), disk.disk);
        bail!("a disk is rolled back: draconis store rollback {shown} {snapshot}");
    }
    let (name, snapshot) = (disk.disk.clone(), snapshot.clone());
    run_disk_command(&disk.store, &DiskCommand::RollBack { disk: name, snapshot }, write.force)
}
