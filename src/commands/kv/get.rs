//! `draconis kv get`

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use draconis_objects::kv::Kv;

use crate::commands::store::open::{open_readable, with_context};
use crate::text::escape_control_chars;

/// Print the value of a key.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
    /// Key.
    key: OsString,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let kv = Kv::new(open_readable(&arguments.store)?);
    let key = arguments.key.as_bytes();
    match kv.get(key).map_err(|error| with_context(&arguments.store, error))? {
        Some(value) => {
            let mut out = std::io::stdout().lock();
            out.write_all(&value)?;
            out.flush()?;
            Ok(())
        }
        None => {
            bail!("{}: there is no key {}", arguments.store.display(), escape_control_chars(key))
        }
    }
}
