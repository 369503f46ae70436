//! `draconis store ls`

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use draconis_objects::ObjectId;
use serde::Serialize;

use super::opened::{readable, tell};

/// List objects: number and length.
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
    let listed = |&(id, len_bytes): &(ObjectId, u64)| Listed { object: id.0, len_bytes };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let all: Vec<Listed> = list.iter().map(listed).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        for (id, len) in &list {
            writeln!(out, "{id}\t{len}")?;
        }
    }
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct Listed {
    object: u64,
    len_bytes: u64,
}
