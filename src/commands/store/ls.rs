//! `draconis store ls`

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use draconis_service::store_process::{self, ObjectEntry};
use serde::Serialize;

use super::follow::{FollowArgs, print_changes};
use super::open::{self, open_readable, with_context};
use crate::text::escape_control_chars;

/// List objects with size, unshared bytes and names.
///
/// Unshared bytes are those not shared with the parent. If disks are mounted, the store process
/// lists the store.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    follow: FollowArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    if let Some(interval) = arguments.follow.follow {
        return print_changes(device, interval, |store| {
            let mut text = vec![];
            // Writing to memory cannot fail.
            let _ = write_list(&store_process::list_objects(store)?, arguments.json, &mut text);
            Ok(text)
        });
    }
    let list = match open::list_from_store_process(device)? {
        Some(list) => list,
        None => store_process::list_objects(&open_readable(device)?)
            .map_err(|error| with_context(device, error))?,
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    write_list(&list, arguments.json, &mut out)?;
    out.flush()?;
    Ok(())
}

fn write_list(list: &[ObjectEntry], json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    if json {
        let all: Vec<ObjectJson> = list.iter().map(ObjectJson::from_entry).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(());
    }
    for ObjectJson { object, len_bytes, own_bytes, names, .. } in
        list.iter().map(ObjectJson::from_entry)
    {
        write!(out, "{object}\t{len_bytes}")?;
        own_bytes.map_or(Ok(()), |own| write!(out, "\t{own}"))?;
        names.iter().try_for_each(|name| write!(out, "\t{name}"))?;
        writeln!(out)?;
    }
    Ok(())
}

#[derive(Serialize)]
struct ObjectJson {
    object: u64,
    len_bytes: u64,
    /// Bytes that a disk or snapshot does not share with its parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<String>,
    names: Vec<String>,
}

impl ObjectJson {
    fn from_entry(listed: &ObjectEntry) -> Self {
        Self {
            object: listed.object,
            len_bytes: listed.len_bytes,
            own_bytes: listed.own_bytes,
            over: listed.over.as_deref().map(escape_control_chars),
            names: listed.names.iter().map(|name| escape_control_chars(name)).collect(),
        }
    }
}
