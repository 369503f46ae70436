//! `draconis store append`

use std::path::PathBuf;

use clap::Args;
use draconis_objects::Group;

use super::ObjectArg;
use super::copy::{BATCH_BYTES, GROUP_BYTES, ObjectInput, read_up_to};
use super::open::{StoreWriteArgs, close_store, open_writable, with_context};
use crate::progress::{ByteProgress, ProgressMode};

/// Append a file to an object.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// Object number or disk name.
    object: ObjectArg,
    /// Input file (default: standard input).
    file: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    arguments.object.check_writable(device)?;
    let mut from = ObjectInput::open(arguments.file.as_deref(), device)?;
    let store = open_writable(device, arguments.write.force)?;
    let id = arguments.object.find_object(&store, device)?;
    store.len(id).map_err(|error| with_context(device, error))?;
    let mut progress = ByteProgress::new(arguments.progress, from.len_bytes());
    let mut most = GROUP_BYTES;
    loop {
        let bytes = read_up_to(&mut from, most, &mut progress)?;
        if bytes.is_empty() {
            break;
        }
        let mut group = Group::new();
        group.append(id, &bytes);
        store.submit(group, &[]).map_err(|refused| with_context(device, refused.error))?;
        most = BATCH_BYTES;
    }
    close_store(&store, device)?;
    from.check_unchanged()
}
