//! `draconis store disk`

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use draconis_objects::{Group, LifetimeHint};
use draconis_types::path_bytes::ShowPath;

use super::open::{StoreWriteArgs, close_store, open_writable, with_context};
use crate::image::store_disk::parse_disk_name;
use crate::report;
use crate::text::{self, parse_size};

/// Create or enlarge a virtual disk in a store.
///
/// A disk is an object with a name; STORE#NAME is an image for all commands. It uses only the space
/// of written data. Volumes on it need no repair after power loss.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    #[arg(value_name = "STORE")]
    device: PathBuf,
    /// Name of the disk.
    #[arg(value_parser = parse_disk_name)]
    name: String,
    /// Size (suffixes K, M, G, T); new space reads as zeros.
    #[arg(value_parser = parse_size)]
    size: u64,
}

/// Unit of disk lengths.
const SECTOR_BYTES: u64 = 512;

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { device, name, size, .. } = arguments;
    let shown = device.shown();
    if !size.is_multiple_of(SECTOR_BYTES) || *size == 0 || *size > i64::MAX as u64 {
        bail!(
            "{}: a disk has whole sectors of {SECTOR_BYTES} bytes, at least one",
            text::format_bytes(*size)
        );
    }
    let store = open_writable(device, arguments.write.force)?;
    let say = |error| with_context(device, error);
    let mut group = Group::new();
    let before = match store.find_named_object(name.as_bytes()).map_err(say)? {
        Some(id) => {
            let len = store.len(id).map_err(say)?;
            if len > *size {
                bail!(
                    "{shown}#{name} has {}, {} is less; draconis shrink {shown}#{name} makes it \
                     shorter with its volume",
                    text::format_bytes(len),
                    text::format_bytes(*size)
                );
            }
            group.truncate(id, *size);
            Some(len)
        }
        None => {
            let id = group.create(store.new_object(), LifetimeHint::Unknown);
            group.truncate(id, *size);
            group.set_name(name.as_bytes(), id);
            None
        }
    };
    store.submit(group, &[]).map_err(|refused| say(refused.error))?;
    close_store(&store, device)?;
    match before {
        Some(before) => {
            report::print_line(format_args!(
                "{shown}#{name}: {}, was {}",
                text::format_bytes(*size),
                text::format_bytes(before)
            ))?;
        }
        None => report::print_line(format_args!("{shown}#{name}: {}", text::format_bytes(*size)))?,
    }
    Ok(())
}
