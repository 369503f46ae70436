//! `draconis store snapshot`

use anyhow::bail;
use clap::Args;
use draconis_service::store_process::DiskCommand;

use super::open::StoreWriteArgs;
use super::snapshots::{StoreDiskArg, run_disk_command, sync_mounted};
use crate::image::store_disk::parse_disk_name;

/// Take a snapshot of a disk.
///
/// STORE#NAME@SNAPSHOT is a read-only image for all commands and for mount -o ro. It uses no space
/// until the disk changes. A mounted disk is synced first.
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
    if disk.snapshot.is_some() {
        bail!("{disk} is a snapshot; draconis store clone {disk} NEW makes a disk of it");
    }
    sync_mounted(disk)?;
    let (name, snapshot) = (disk.disk.clone(), snapshot.clone());
    run_disk_command(&disk.store, &DiskCommand::Snapshot { disk: name, snapshot }, write.force)
}
