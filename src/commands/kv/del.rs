//! `draconis kv del`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::kv::{Batch, Kv};

use super::write;
use crate::commands::store::open::{StoreWriteArgs, close_store, open_writable};

/// Delete keys atomically.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
    /// Keys; missing keys are ignored.
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let kv = Kv::new(open_writable(&arguments.store, arguments.write.force)?);
    let mut batch = Batch::new();
    arguments.keys.iter().for_each(|key| batch.delete(key.as_bytes()));
    write(&kv, &arguments.store, batch)?;
    close_store(kv.store(), &arguments.store)
}
