//! `draconis store ls`

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::ObjectId;
use serde::Serialize;

use super::opened::{readable, tell};
use crate::text::printable;

/// List objects: number, length, and name if it is a disk.
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
    let mut names: HashMap<ObjectId, Vec<String>> = HashMap::new();
    for (name, id) in store.names().map_err(|error| tell(&arguments.device, error))? {
        names.entry(id).or_default().push(printable(&name));
    }
    let mut listed = |&(id, len_bytes): &(ObjectId, u64)| {
        let names = names.remove(&id).unwrap_or_default();
        Listed { object: id.0, len_bytes, names }
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let all: Vec<Listed> = list.iter().map(listed).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        for Listed { object, len_bytes, names } in list.iter().map(&mut listed) {
            write!(out, "{object}\t{len_bytes}")?;
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
    names: Vec<String>,
}
