//! `draconis kv scan`

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::ops::Bound;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use draconis_objects::Store;
use draconis_objects::kv::Kv;

use super::form::TextEncoding;
use crate::commands::store::follow::{FollowArgs, print_changes};
use crate::commands::store::open::{open_readable, with_context};

/// List keys and values in key order.
///
/// A backslash is written as \\, a tab as \t, a newline as \n, a carriage return as \r, and every
/// byte that is not printable text as \xHH. `draconis kv load` reads such lines back unchanged.
#[derive(Debug, Args)]
pub struct Arguments {
    /// First key to print.
    #[arg(long, value_name = "KEY")]
    from: Option<OsString>,
    /// Stop before this key.
    #[arg(long, value_name = "KEY")]
    to: Option<OsString>,
    /// Print only keys that start with TEXT.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["from", "to"])]
    prefix: Option<OsString>,
    /// Reverse order.
    #[arg(short, long)]
    reverse: bool,
    /// Print at most N keys.
    #[arg(short = 'n', long, value_name = "N")]
    limit: Option<usize>,
    /// Write every byte of keys and values as two hexadecimal digits.
    #[arg(long)]
    hex: bool,
    /// Print keys only.
    #[arg(short, long)]
    keys: bool,
    #[command(flatten)]
    follow: FollowArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(interval) = arguments.follow.follow {
        return print_changes(&arguments.store, interval, |store| {
            let mut text = vec![];
            for_each_line(arguments, store, |line| {
                text.extend_from_slice(line);
                Ok(())
            })
            // Writing to memory cannot fail.
            .map(|_: std::io::Result<()>| text)
        });
    }
    let store = open_readable(&arguments.store)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    for_each_line(arguments, &store, |line| out.write_all(line))
        .map_err(|error| with_context(&arguments.store, error))??;
    out.flush()?;
    Ok(())
}

/// Passes the lines of the scan to `write`, until it fails.
fn for_each_line(
    arguments: &Arguments,
    store: &Arc<Store>,
    mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> draconis_objects::Result<std::io::Result<()>> {
    let bytes = |text: &std::ffi::OsString| text.clone().into_vec();
    let (from, to) = match &arguments.prefix {
        Some(prefix) => (Bound::Included(bytes(prefix)), prefix_end(prefix.as_bytes())),
        None => (
            arguments.from.as_ref().map_or(Bound::Unbounded, |key| Bound::Included(bytes(key))),
            arguments.to.as_ref().map_or(Bound::Unbounded, |key| Bound::Excluded(bytes(key))),
        ),
    };
    let range = (from.as_ref().map(Vec::as_slice), to.as_ref().map(Vec::as_slice));
    let mut pairs = Kv::new(store.clone()).scan::<(Bound<&[u8]>, Bound<&[u8]>)>(&range);
    let form = TextEncoding::from_hex_flag(arguments.hex);
    let mut line = vec![];
    for _ in 0..arguments.limit.unwrap_or(usize::MAX) {
        let next = if arguments.reverse { pairs.next_back() } else { pairs.next() };
        let Some(pair) = next else { break };
        let (key, value) = pair?;
        line.clear();
        form.encode(&key, &mut line);
        if !arguments.keys {
            line.push(b'\t');
            form.encode(&value, &mut line);
        }
        line.push(b'\n');
        if let Err(error) = write(&line) {
            return Ok(Err(error));
        }
    }
    Ok(Ok(()))
}

/// Returns the end of the range of keys that begin with `prefix`.
fn prefix_end(prefix: &[u8]) -> Bound<Vec<u8>> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Bound::Excluded(end);
        }
    }
    Bound::Unbounded
}
