//! `draconis store salvage`

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::create_store::preallocate;
use draconis_access::uuid::UuidGenerator;
use draconis_device::Disk;
use draconis_objects::{CreateOptions, OpenOptions, SalvageOptions, Store};
use draconis_types::path_bytes::ShowPath;

use super::open::{close_store, open_disk_shared, open_store_disk, with_context};
use crate::bucket;
use crate::exit_status;
use crate::image;
use crate::progress::{ByteProgress, ProgressMode};
use crate::{report, text};

/// Copy intact data from a damaged store to a new one.
///
/// The new store has the same size and layout. Objects keep their numbers; unreadable ranges become
/// zeros. The old store is not changed.
///
/// What the index of the store lost comes from the frames of its log, which name their keys; the
/// newest intact version counts. One flipped bit in a block of up to 64 KiB is changed back. Lost
/// superblocks and checkpoints are searched for. Every loss is printed. A removed key can come back
/// only where that is printed: if both its part of the index and the frame of its removal are lost.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Copy values also if they may be old or removed.
    ///
    /// This is not known where a newer part of the index is lost and later commits are not on the
    /// disk any more. Such values are left out without this option.
    #[arg(long)]
    unsure: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Damaged store: file, block device or bucket (s3://BUCKET/PREFIX).
    old: PathBuf,
    /// New store: a file that does not exist.
    new: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (old, new) = (&arguments.old, &arguments.new);
    let shown = new.shown();
    let damaged = open_disk_shared(old, true)?;
    let (len, profile) =
        Store::profile_for_salvage(&*damaged).map_err(|error| with_context(old, error))?;
    let id = u128::from_le_bytes(UuidGenerator::new(None).uuid());
    let begin = |into: Arc<dyn Disk>| {
        Store::create(into.clone(), &CreateOptions { profile, id })
            .and_then(|()| Store::open(into, &OpenOptions::default()))
            .map_err(|error| with_context(new, error))
    };
    if let Some(address) = bucket::bucket_url(new) {
        let store = begin(bucket::create_disk(address, len, false)?)?;
        return copy_readable(arguments, &store, damaged);
    }
    let file = match File::options().read(true).write(true).create_new(true).open(new) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!("{shown} exists; salvage makes a new store")
        }
        opened => opened.with_context(|| shown.to_string())?,
    };
    image::claim_exclusive(&file, new)?;
    let made = || -> anyhow::Result<_> {
        file.set_len(len).with_context(|| format!("{shown}: {}", text::format_bytes(len)))?;
        preallocate(&file, len).with_context(|| format!("{shown}: {}", text::format_bytes(len)))?;
        let into = open_store_disk(file.try_clone()?, new, true, true)?;
        begin(into)
    };
    let store = match made() {
        Ok(store) => store,
        Err(error) => {
            let _ = std::fs::remove_file(new);
            return Err(error);
        }
    };
    copy_readable(arguments, &store, damaged)
}

/// Copies all readable data, and reports what is lost.
fn copy_readable(
    arguments: &Arguments,
    store: &Store,
    damaged: Arc<dyn Disk>,
) -> anyhow::Result<ExitCode> {
    let (old, new) = (&arguments.old, &arguments.new);
    let shown = new.shown();
    let mut bar: Option<ByteProgress> = None;
    let mut shown_bytes = 0;
    let options = SalvageOptions { unsure: arguments.unsure, ..SalvageOptions::default() };
    let salvaged = store.salvage_with(damaged, &options, &mut |done, total| {
        bar.get_or_insert_with(|| ByteProgress::new(arguments.progress, total))
            .add(done.saturating_sub(shown_bytes));
        shown_bytes = done;
    });
    drop(bar);
    let salvaged = salvaged.map_err(|error| with_context(old, error))?;
    close_store(store, new)?;
    for lost in &salvaged.lost {
        report::print_line(format_args!("lost: {lost}"))?;
    }
    if salvaged.more > 0 {
        report::print_line(format_args!("and {} more", salvaged.more))?;
    }
    if salvaged.repaired_bits > 0 {
        let bits = text::pluralize(salvaged.repaired_bits, "flipped bit", "flipped bits");
        report::print_line(format_args!("{bits} changed back"))?;
    }
    if salvaged.from_frames > 0 {
        let pairs = text::pluralize(salvaged.from_frames, "entry", "entries");
        report::print_line(format_args!("{pairs} of the damaged index came from the log"))?;
    }
    report::print_line(format_args!(
        "{shown}: {}, {}, {}{}",
        text::pluralize(salvaged.objects, "object", "objects"),
        text::pluralize(salvaged.keys, "key", "keys"),
        text::format_bytes(salvaged.bytes),
        if salvaged.lost.is_empty() { ", all there was" } else { "" }
    ))?;
    Ok(ExitCode::from(if salvaged.lost.is_empty() { 0 } else { exit_status::DAMAGED }))
}
