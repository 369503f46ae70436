//! `draconis store create`

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use draconis_access::create_store;
use draconis_access::destination::ReadSources;
use draconis_access::overwrite::OverwritePermission;
use draconis_container::signature::STORE_KIND;
use draconis_objects::{LayoutKind, Profile};
use draconis_types::path_bytes::ShowPath;

use super::profile::{ProfileInput, print_profile_reasons};
use crate::bucket;
use crate::image;
use crate::progress::{ByteProgress, ProgressMode};
use crate::text::{self, parse_size};

/// Create an empty store.
///
/// Measures the disk for about ten seconds to choose layout and sizes, unless --layout or --profile
/// is given, and prints the reasons.
///
/// For buckets, --size is the maximum size; unused space costs nothing. The bucket is tested for
/// conditional writes first.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Size of the store (suffixes K, M, G, T; default: size of DEVICE).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Do not preallocate the file.
    ///
    /// The store is created instantly, uses only the space of its data and returns freed space.
    /// Durable writes take at least twice as long.
    #[arg(long)]
    sparse: bool,
    /// Layout: log (hard disks: one log), cow (flash: streams by data lifetime), bucket (large
    /// requests). Sizes are the defaults, or those of --profile.
    #[arg(long, value_enum)]
    layout: Option<LayoutArg>,
    /// Read layout and sizes from FILE instead of measuring; - for standard input.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Overwrite an existing store or ext volume. Other data needs its kind, such as --force=gpt;
    /// the error names it. Compressed files are never overwritten.
    #[arg(long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "")]
    force: Option<OverwritePermission>,
    /// Allow overwriting a block device (destroys its data).
    #[arg(long)]
    destroy: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// File, block device or bucket; a missing file is created.
    device: PathBuf,
}

/// A layout, as `--layout` spells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum LayoutArg {
    /// One log.
    Log,
    /// Several, by how long things live.
    Cow,
    /// Segments of many MiB, for the long requests of a bucket.
    Bucket,
}

impl From<LayoutArg> for LayoutKind {
    fn from(layout: LayoutArg) -> Self {
        match layout {
            LayoutArg::Log => Self::Log,
            LayoutArg::Cow => Self::Cow,
            LayoutArg::Bucket => Self::Bucket,
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.shown();
    let mut sources = ReadSources::new();
    arguments.profile.iter().for_each(|file| sources.add(file));
    sources.refuse_source_as_destination(device)?;
    let given = arguments.profile.as_deref().map(ProfileInput::read).transpose()?;
    if let Some(address) = bucket::bucket_url(device) {
        return create_store_in_bucket(arguments, address, given);
    }
    let opened = image::open_exclusive(device)?;
    if let Some(file) = &opened {
        check_overwrite(arguments, file)?;
    }
    let created = opened.is_none();
    let made = match opened {
        Some(file) => create_in_file(arguments, file, given),
        None => {
            ensure!(arguments.size.is_some(), "{shown} does not exist: --size is needed");
            let file = File::options().read(true).write(true).create_new(true).open(device);
            let file = file.with_context(|| shown.to_string())?;
            image::claim_exclusive(&file, device)?;
            create_in_file(arguments, file, given)
        }
    };
    if made.is_err() && created {
        let _ = std::fs::remove_file(device);
    }
    made
}

/// Refuses to overwrite contents that the options do not allow.
fn check_overwrite(arguments: &Arguments, file: &File) -> anyhow::Result<()> {
    let shown = arguments.device.shown();
    let force = arguments.force.clone().unwrap_or_default();
    let is_file = file.metadata()?.is_file();
    if !is_file && !arguments.destroy {
        let what = image::detect_contents(file)?;
        bail!(
            "{shown} is a block device{}; --destroy makes a store of it, and what it holds is lost",
            what.map_or(String::new(), |held| format!(" that holds {}", held.what))
        );
    }
    let is_usual = !is_file && force == OverwritePermission::Nothing;
    let force = if is_usual { OverwritePermission::Usual } else { force };
    create_store::check_overwrite(&arguments.device, file, &force, "--force")
}

/// Creates a store in an open file or device.
fn create_in_file(
    arguments: &Arguments,
    file: File,
    profile: Option<Profile>,
) -> anyhow::Result<()> {
    let device = &arguments.device;
    let is_file = file.metadata()?.is_file();
    let there = image::len_bytes(&file)?;
    let len = arguments.size.unwrap_or(there);
    let shown = device.shown();
    ensure!(len > 0, "{shown} is empty: --size is needed");
    if !is_file && len != there {
        bail!("{shown} has {there} bytes; a store takes all of a device, without --size");
    }
    let wanted = create_store::StoreSpec {
        len_bytes: len,
        sparse: arguments.sparse,
        profile,
        layout: arguments.layout.map(Into::into),
    };
    let mut bars = StepProgress::new(arguments.progress);
    let made = create_store::create_in_file(device, file, &wanted, &mut |step, done, total| {
        bars.show_progress(step, done, total);
    })?;
    print_summary(device, len, &made.profile, &made.why)
}

/// A progress bar for each step.
pub struct StepProgress {
    when: ProgressMode,
    bar: Option<(create_store::CreateStep, ByteProgress, u64)>,
}

impl StepProgress {
    pub fn new(when: ProgressMode) -> Self {
        Self { when, bar: None }
    }

    pub fn show_progress(&mut self, step: create_store::CreateStep, done: u64, total: u64) {
        if self.bar.as_ref().is_none_or(|(of, ..)| *of != step) {
            self.bar = Some((step, ByteProgress::new(self.when, total), 0));
        }
        if let Some((_, bar, told)) = &mut self.bar {
            bar.add(done.saturating_sub(*told));
            *told = done;
        }
    }
}

/// Creates a store in a bucket.
fn create_store_in_bucket(
    arguments: &Arguments,
    address: &str,
    given: Option<Profile>,
) -> anyhow::Result<()> {
    ensure!(!arguments.sparse, "{address}: --sparse is of files; a bucket keeps no holes");
    ensure!(!arguments.destroy, "{address}: --destroy is of block devices; --force overwrites");
    let len = arguments.size.with_context(|| format!("{address}: --size is needed"))?;
    let (mut profile, why) = match given {
        Some(profile) => (profile, vec!["as --profile says".to_owned()]),
        None => bucket::default_bucket_profile(len),
    };
    profile.layout = arguments.layout.map_or(profile.layout, Into::into);
    let is_forced = arguments.force.as_ref().is_some_and(|force| force.allows_usual(&[STORE_KIND]));
    let disk = bucket::create_disk(address, len, is_forced)?;
    create_store::create_on_disk(&arguments.device, disk, profile)?;
    print_summary(&arguments.device, len, &profile, &why)
}

/// Prints layout and size of the new store.
fn print_summary(device: &Path, len: u64, profile: &Profile, why: &[String]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{}: {}, layout {}, pages of {}, segments of {}, queue depth {}",
        device.shown(),
        text::format_bytes(len),
        profile.layout,
        text::format_bytes(profile.page_bytes.into()),
        text::format_bytes(profile.segment_bytes.into()),
        profile.queue_depth
    )?;
    print_profile_reasons(&mut out, why)?;
    Ok(())
}
