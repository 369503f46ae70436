//! `draconis kv stats`

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::kv::Kv;
use serde::Serialize;

use crate::commands::store::open::{open_readable, with_context};
use crate::{report, text};

/// Show the number and size of keys and values.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let kv = Kv::new(open_readable(&arguments.store)?);
    let count = kv.count().map_err(|error| with_context(&arguments.store, error))?;
    let info = kv.store().info();
    if arguments.json {
        let facts = KvStatsJson {
            keys: count.keys,
            key_bytes: count.key_bytes,
            value_bytes: count.value_bytes,
            long_values: count.long_values,
            used_bytes: info.used_bytes,
            capacity_bytes: info.capacity_bytes,
            pending_keys: info.pending_keys,
        };
        report::print_line(serde_json::to_string_pretty(&facts)?)?;
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "keys          {}", count.keys)?;
    writeln!(out, "their bytes   {}", text::format_bytes(count.key_bytes))?;
    writeln!(out, "values        {}", text::format_bytes(count.value_bytes))?;
    writeln!(out, "long values   {}", count.long_values)?;
    writeln!(out, "not in tree   {} changes", info.pending_keys)?;
    let (used, capacity) =
        (text::format_bytes(info.used_bytes), text::format_bytes(info.capacity_bytes));
    writeln!(out, "store         {used} of {capacity}")?;
    Ok(())
}

#[derive(Serialize)]
struct KvStatsJson {
    keys: u64,
    key_bytes: u64,
    value_bytes: u64,
    long_values: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    pending_keys: u64,
}
