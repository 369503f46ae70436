//! `draconis store append`

use std::path::PathBuf;

use clap::Args;
use draconis_objects::Group;

use super::Object;
use super::opened::{close, tell, writable};
use super::stream::{GROUP_BYTES, Input, LOT_BYTES, take};
use crate::progress::{Progress, When};

/// Append a file to an object.
#[derive(Debug, Args)]
pub struct Arguments {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// Object number or disk name.
    object: Object,
    /// Input file (default: standard input).
    file: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    arguments.object.is_to_change(device)?;
    let mut from = Input::open(arguments.file.as_deref(), device)?;
    let store = writable(device)?;
    let id = arguments.object.find(&store, device)?;
    store.len(id).map_err(|error| tell(device, error))?;
    let mut progress = Progress::new(arguments.progress, from.len_bytes());
    let mut most = GROUP_BYTES;
    loop {
        let bytes = take(&mut from, most, &mut progress)?;
        if bytes.is_empty() {
            break;
        }
        let mut group = Group::new();
        group.append(id, &bytes);
        store.submit(group, &[]).map_err(|refused| tell(device, refused.error))?;
        most = LOT_BYTES;
    }
    close(&store, device)?;
    from.is_unchanged()
}
