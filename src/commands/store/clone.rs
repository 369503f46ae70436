//! `draconis store clone`

use clap::Args;
use draconis_service::store_process::Change;

use super::lineage::{InStore, change, commit_mounted};
use crate::image::object::disk_name;

/// Create a writable copy of a disk or snapshot.
///
/// Unchanged data is shared. Cloning a disk first takes the snapshot STORE#NAME@NEW.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Disk or snapshot, as STORE#NAME or STORE#NAME@SNAPSHOT.
    #[arg(value_name = "STORE#NAME[@SNAPSHOT]")]
    of: InStore,
    /// Name of the new disk.
    #[arg(value_name = "NEW", value_parser = disk_name)]
    disk: String,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { of, disk } = arguments;
    if of.snapshot.is_none() {
        commit_mounted(of)?;
    }
    change(&of.store, &Change::Clone { of: of.name(), disk: disk.clone() })
}
