//! `draconis kv put`

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::kv::{Batch, Kv};

use super::write;
use crate::commands::store::open::{StoreWriteArgs, close_store, open_writable};

/// Set the value of a key.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
    /// Key.
    key: OsString,
    /// Value (default: standard input).
    value: Option<OsString>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let value = match &arguments.value {
        Some(value) => value.as_bytes().to_vec(),
        None => {
            let mut value = vec![];
            std::io::stdin().lock().read_to_end(&mut value)?;
            value
        }
    };
    let kv = Kv::new(open_writable(&arguments.store, arguments.write.force)?);
    let mut batch = Batch::new();
    batch.put(arguments.key.as_bytes(), &value);
    write(&kv, &arguments.store, batch)?;
    close_store(kv.store(), &arguments.store)
}
