//! `draconis store clone`

use clap::Args;
use draconis_service::store_process::DiskCommand;

use super::open::StoreWriteArgs;
use super::snapshots::{StoreDiskArg, run_disk_command, sync_mounted};
use crate::image::store_disk::parse_disk_name;

/// Create a writable copy of a disk or snapshot.
///
/// Unchanged data is shared. Cloning a disk first takes the snapshot STORE#NAME@NEW.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Disk or snapshot, as STORE#NAME or STORE#NAME@SNAPSHOT.
    #[arg(value_name = "STORE#NAME[@SNAPSHOT]")]
    of: StoreDiskArg,
    /// Name of the new disk.
    #[arg(value_name = "NEW", value_parser = parse_disk_name)]
    disk: String,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { of, disk, write } = arguments;
    if of.snapshot.is_none() {
        sync_mounted(of)?;
    }
    run_disk_command(
        &of.store,
        &DiskCommand::Clone { of: of.name(), disk: disk.clone() },
        write.force,
    )
}
