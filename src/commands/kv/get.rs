//! `draconis kv get`

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use draconis_objects::kv::Kv;
use draconis_types::path_bytes::ShowPath;

use crate::commands::store::follow::{FollowArgs, print_changes};
use crate::commands::store::open::{open_readable, with_context};
use crate::text::escape_control_chars;

/// Print the value of a key.
///
/// With --follow, a key that does not exist has an empty value.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    follow: FollowArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
    /// Key.
    key: OsString,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let key = arguments.key.as_bytes();
    if let Some(interval) = arguments.follow.follow {
        return print_changes(&arguments.store, interval, |store| {
            Ok(Kv::new(store.clone()).get(key)?.unwrap_or_default())
        });
    }
    let kv = Kv::new(open_readable(&arguments.store)?);
    match kv.get(key).map_err(|error| with_context(&arguments.store, error))? {
        Some(value) => {
            let mut out = std::io::stdout().lock();
            out.write_all(&value)?;
            out.flush()?;
            Ok(())
        }
        None => {
            bail!("{}: there is no key {}", arguments.store.shown(), escape_control_chars(key))
        }
    }
}
