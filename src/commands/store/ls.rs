//! `draconis store ls`

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::{DiskInfo, ObjectId};
use serde::Serialize;

use super::opened::{readable, tell};
use crate::text::printable;

/// List objects: number, length, what is its own of it, and name if it is a disk or snapshot.
///
/// A snapshot, and a disk or clone over one, has of its own what it does not share with what it is
/// over, in bytes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Write JSON.
    #[arg(long)]
    json: bool,
    /// The file or block device.
    device: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let store = readable(&arguments.device)?;
    let list = store.list().map_err(|error| tell(&arguments.device, error))?;
    let mut disks: HashMap<ObjectId, Vec<DiskInfo>> = HashMap::new();
    for disk in store.disks().map_err(|error| tell(&arguments.device, error))? {
        disks.entry(disk.id).or_default().push(disk);
    }
    let mut listed = |&(id, len_bytes): &(ObjectId, u64)| {
        let disks = disks.remove(&id).unwrap_or_default();
        let own_bytes = disks.first().map(|disk| disk.own_bytes);
        let over = disks.first().and_then(|disk| disk.over.as_deref()).map(printable);
        let names = disks.iter().map(|disk| printable(&disk.name)).collect();
        Listed { object: id.0, len_bytes, own_bytes, over, names }
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let all: Vec<Listed> = list.iter().map(listed).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        for Listed { object, len_bytes, own_bytes, names, .. } in list.iter().map(&mut listed) {
            write!(out, "{object}\t{len_bytes}")?;
            own_bytes.map_or(Ok(()), |own| write!(out, "\t{own}"))?;
            names.iter().try_for_each(|name| write!(out, "\t{name}"))?;
            writeln!(out)?;
        }
    }
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct Listed {
    object: u64,
    len_bytes: u64,
    /// Of a disk or snapshot: bytes that it does not share with what it is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<String>,
    names: Vec<String>,
}
