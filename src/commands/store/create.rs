//! `draconis store create`

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use draconis_device::Disk;
use draconis_exchange::heap::Block;
use draconis_objects::{CreateOptions, Error, LayoutKind, Profile, Store, probe};
use rustix::io::Errno;

use super::bucket;
use super::opened::disk;
use super::profile::{Given, MEASURED_BYTES_MIN, measured, tell_profile, unmeasured};
use crate::image;
use crate::progress::{Progress, When};
use crate::text::{self, size};
use crate::uuid::Identities;

/// Make an empty store.
///
/// Layout and sizes follow from what is measured in the file that the store will be in,
/// or come from --profile. What was chosen is printed with its reasons.
///
/// In a bucket --size is the most that the store may hold; what is not used takes no room. First
/// the bucket is asked whether it does what the store relies on: that what exists is not created
/// again, however many try.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Length of the store (K, M, G, T allowed); if left out, that of DEVICE.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// Leave a file one hole instead of writing it out.
    ///
    /// It is made at once and takes as much room as what it holds, and gives room back. But
    /// whenever something is to be durable, the file system below has to find room for it
    /// first: that is half as fast, or less.
    #[arg(long)]
    sparse: bool,
    /// Choose the layout: log for disks that seek, cow for flash, bucket for buckets.
    #[arg(long, value_enum)]
    layout: Option<Layout>,
    /// Take layout and sizes from this file instead of measuring; - is standard input.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Overwrite what a file holds.
    #[arg(long)]
    force: bool,
    /// Measure a block device and make a store of it: what it holds is lost.
    #[arg(long)]
    destroy: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The file, block device or bucket; a file that is not there is created.
    device: PathBuf,
}

/// A layout, as `--layout` spells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Layout {
    /// One log.
    Log,
    /// Several, by how long things live.
    Cow,
    /// Long requests.
    Bucket,
}

impl From<Layout> for LayoutKind {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Log => Self::Log,
            Layout::Cow => Self::Cow,
            Layout::Bucket => Self::Bucket,
        }
    }
}

/// What is written at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    let given = arguments.profile.as_deref().map(Given::read).transpose()?;
    if let Some(address) = bucket::address(device) {
        return make_in_bucket(arguments, address, given);
    }
    let opened = image::alone(device)?;
    if let Some(file) = &opened {
        may_overwrite(arguments, file)?;
    }
    let created = opened.is_none();
    let made = match opened {
        Some(file) => make(arguments, file, given),
        None => {
            ensure!(arguments.size.is_some(), "{shown} does not exist: --size is needed");
            let file = File::options().read(true).write(true).create_new(true).open(device);
            let file = file.with_context(|| shown.to_string())?;
            image::claim_alone(&file, device)?;
            make(arguments, file, given)
        }
    };
    if made.is_err() && created {
        let _ = std::fs::remove_file(device);
    }
    made
}

/// Refuses what holds something, unless the command line says that it may go.
fn may_overwrite(arguments: &Arguments, file: &File) -> anyhow::Result<()> {
    let shown = arguments.device.display();
    let holds = image::held(file)?;
    match (file.metadata()?.is_file(), holds) {
        (true, Some(what)) if !arguments.force => {
            bail!("{shown} holds {what}; --force overwrites it")
        }
        (false, what) if !arguments.destroy => bail!(
            "{shown} is a block device{}; --destroy makes a store of it, and what it holds is lost",
            what.map_or(String::new(), |what| format!(" that holds {what}"))
        ),
        _ => Ok(()),
    }
}

/// Makes a store in an open file or device.
fn make(arguments: &Arguments, file: File, given: Option<Profile>) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    let is_file = file.metadata()?.is_file();
    let there = image::len_bytes(&file)?;
    let len = arguments.size.unwrap_or(there);
    ensure!(len > 0, "{shown} is empty: --size is needed");
    if !is_file && len != there {
        bail!("{shown} has {there} bytes; a store takes all of a device, without --size");
    }
    let make_hole = || -> anyhow::Result<()> {
        // Cut off and lengthened it is one hole.
        file.set_len(0)?;
        file.set_len(len).with_context(|| format!("{shown}: {}", text::bytes(len)))
    };
    if is_file {
        make_hole()?;
    }
    let is_written_out = is_file && !arguments.sparse;
    if is_written_out {
        reserve(&file, len).with_context(|| format!("{shown}: {}", text::bytes(len)))?;
    }
    let (mut profile, mut why) = match given {
        Some(profile) => (profile, vec!["as --profile says".to_owned()]),
        None if len < MEASURED_BYTES_MIN => unmeasured(len),
        None => {
            let wanted = probe::REGION_BYTES;
            let measured = measured(device, file.try_clone()?, wanted, arguments.progress)
                .map_err(|error| anyhow!("{shown}: {error}"))?;
            if is_file && arguments.sparse {
                make_hole()?;
            }
            measured.profile(len)
        }
    };
    if is_written_out {
        let disk = disk(file.try_clone()?, device, true, true)?;
        write_out(&*disk, arguments.progress).map_err(|error| anyhow!("{shown}: {error}"))?;
    }
    if let Some(layout) = arguments.layout {
        profile.layout = layout.into();
        why.push(format!("layout {}: --layout says so", profile.layout));
    }
    let disk = disk(file, device, true, true)?;
    finish(device, disk, len, profile, &why)
}

/// Makes a store in a bucket.
fn make_in_bucket(
    arguments: &Arguments,
    address: &str,
    given: Option<Profile>,
) -> anyhow::Result<()> {
    ensure!(!arguments.sparse, "{address}: --sparse is of files; a bucket keeps no holes");
    ensure!(!arguments.destroy, "{address}: --destroy is of block devices; --force overwrites");
    let len = arguments.size.with_context(|| format!("{address}: --size is needed"))?;
    let (mut profile, why) = match given {
        Some(profile) => (profile, vec!["as --profile says".to_owned()]),
        None => bucket::profile(len),
    };
    profile.layout = arguments.layout.map_or(profile.layout, Into::into);
    let disk = bucket::made(address, len, arguments.force)?;
    finish(&arguments.device, disk, len, profile, &why)
}

/// Makes the store, and says how it is.
fn finish(
    device: &Path,
    disk: Arc<dyn Disk>,
    len: u64,
    profile: Profile,
    why: &[String],
) -> anyhow::Result<()> {
    let shown = device.display();
    let id = u128::from_le_bytes(Identities::new(None).uuid());
    Store::create(disk, &CreateOptions { profile, id }).map_err(|error| match error {
        Error::Misuse(why) => anyhow!("{shown}: {why}; choose a larger --size"),
        error => anyhow!("{shown}: {error}"),
    })?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{shown}: {}, layout {}, pages of {}, segments of {}, queue depth {}",
        text::bytes(len),
        profile.layout,
        text::bytes(profile.page_bytes.into()),
        text::bytes(profile.segment_bytes.into()),
        profile.queue_depth
    )?;
    tell_profile(&mut out, why)?;
    Ok(())
}

/// Takes room for a file where the file system can do that; if there is none, it says so now.
pub fn reserve(file: &File, len: u64) -> rustix::io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

/// Writes zeros everywhere: what was written once is written again without a change of the
/// file system's.
pub fn write_out(disk: &dyn Disk, progress: When) -> Result<(), draconis_device::Error> {
    let len = disk.properties().len_bytes;
    let mut bar = Progress::new(progress, len);
    let (mut at, mut last) = (0, None);
    while at < len {
        let mut writes = vec![];
        while at < len && writes.len() < 8 {
            let bytes = (len - at).min(PIECE_BYTES as u64);
            writes.push(draconis_device::Write {
                at_bytes: at,
                block: Block::private(bytes as usize),
            });
            at += bytes;
        }
        let group = draconis_device::Group { writes };
        let ticket = disk.submit(group, &[]).map_err(|refused| refused.error)?;
        // One is written while the next one is made.
        if let Some(before) = last.replace(ticket) {
            disk.settle(before)?;
            bar.add(8 * PIECE_BYTES as u64);
        }
    }
    last.map_or(Ok(()), |ticket| disk.wait(ticket))
}
