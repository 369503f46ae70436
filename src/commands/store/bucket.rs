//! Stores in buckets: how they are opened, and what that took.
//!
//! Law 1: who changes a store in a bucket takes it over from who did before; who reads it is not
//! noticed.
//! Law 2: what a command asked of a bucket is counted until all is done.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use draconis_access::uuid::Identities;
use draconis_bucket::{BucketDisk, Cloud, Requests, is_address};
use draconis_device::Disk;
use draconis_objects::{LayoutKind, Profile};

use crate::text;

/// What is said of stores in buckets on the command line.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Send what is waited for at least so many milliseconds after what was sent before: what
    /// comes between goes with it.
    #[arg(long, global = true, value_name = "MS", default_value_t = 50)]
    #[arg(help_heading = "Stores in buckets")]
    commit_ms: u64,
    /// Try requests that are refused or not answered again, for so many seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 60)]
    #[arg(help_heading = "Stores in buckets")]
    deadline: u64,
    /// Keep what is read in a directory, up to SIZE bytes (K, M, G, T allowed).
    #[arg(long, global = true, value_name = "DIR,SIZE", value_parser = cache)]
    #[arg(help_heading = "Stores in buckets")]
    cache: Option<(PathBuf, u64)>,
    /// Say at the end, on standard error, what was asked of the bucket.
    #[arg(long, global = true)]
    #[arg(help_heading = "Stores in buckets")]
    stats: bool,
}

/// What this process was told.
static TOLD: OnceLock<Options> = OnceLock::new();
/// What it opened.
static OPENED: Mutex<Vec<Arc<BucketDisk>>> = Mutex::new(vec![]);

/// Keeps what the command line says, until [`end`].
pub fn begin(options: &Options) {
    let _ = TOLD.set(options.clone());
}

/// Ends what was opened, and says what it took if that was asked for.
pub fn end() {
    let opened = std::mem::take(&mut *OPENED.lock().unwrap_or_else(PoisonError::into_inner));
    for disk in opened {
        disk.close();
        if TOLD.get().is_some_and(|options| options.stats) {
            eprintln!("{}", told(&disk.requests(), disk.held()));
        }
    }
}

fn told(requests: &Requests, (objects, bytes): (u64, u64)) -> String {
    let Requests { puts, gets, heads, lists, deletes, again, .. } = requests;
    format!(
        "requests: {puts} PUT, {gets} GET, {heads} HEAD, {lists} LIST, {deletes} DELETE; {again} of \
         them again; {} sent, {} received; the bucket has {bytes} in {}",
        text::bytes(requests.sent_bytes),
        text::bytes(requests.received_bytes),
        text::counted(objects, "object", "objects"),
        bytes = text::bytes(bytes),
    )
}

/// Parses a directory and a size for clap.
fn cache(text: &str) -> Result<(PathBuf, u64), String> {
    let (dir, most) = text.rsplit_once(',').ok_or("a directory, a comma and a size")?;
    Ok((dir.into(), text::size(most)?))
}

/// The address, if it is one of a bucket.
pub fn address(device: &Path) -> Option<&str> {
    device.to_str().filter(|text| is_address(text))
}

/// Opens the disk in a bucket to change it, and takes it over.
pub fn writable(address: &str) -> anyhow::Result<Arc<BucketDisk>> {
    let disk = BucketDisk::open(engine(address, false)?, address, &options());
    Ok(kept(disk.map_err(|error| anyhow!("{error}"))?))
}

/// Opens the disk in a bucket to read it, while others may change it.
pub fn readable(address: &str) -> anyhow::Result<Arc<dyn Disk>> {
    let disk = BucketDisk::open_to_read(engine(address, false)?, address, &options());
    Ok(kept(disk.map_err(|error| anyhow!("{error}"))?))
}

/// Makes a disk in a bucket.
pub fn made(address: &str, len_bytes: u64, over: bool) -> anyhow::Result<Arc<BucketDisk>> {
    let engine = engine(address, true)?;
    let disk = BucketDisk::create(engine, address, len_bytes, over, &options());
    Ok(kept(disk.map_err(|error| anyhow!("{error}"))?))
}

/// What suits all buckets.
pub fn profile(len_bytes: u64) -> (Profile, Vec<String>) {
    let segment_bytes = (1u64 << (len_bytes / 128).max(1).ilog2()).clamp(64 << 10, 16 << 20) as u32;
    let profile =
        Profile { layout: LayoutKind::Bucket, page_bytes: 512, segment_bytes, queue_depth: 16 };
    (profile, vec!["layout bucket: requests take long and have a price".to_owned()])
}

/// Refuses a bucket where there is nothing that could be done with one.
pub fn refuse(device: &Path, why: &str) -> anyhow::Result<()> {
    match address(device) {
        Some(address) => bail!("{address}: {why}"),
        None => Ok(()),
    }
}

fn engine(address: &str, makes: bool) -> anyhow::Result<Arc<Cloud>> {
    Ok(Arc::new(Cloud::at(address, makes).map_err(|why| anyhow!("{why}"))?))
}

fn kept(disk: BucketDisk) -> Arc<BucketDisk> {
    let disk = Arc::new(disk);
    OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(disk.clone());
    disk
}

fn options() -> draconis_bucket::Options {
    let names = rustix::system::uname();
    let mut options = draconis_bucket::Options {
        who: format!(
            "{}, process {}, at {:.0}",
            names.nodename().to_string_lossy(),
            std::process::id(),
            jiff::Timestamp::now()
        ),
        token: u128::from_le_bytes(Identities::new(None).uuid()),
        ..draconis_bucket::Options::default()
    };
    if let Some(told) = TOLD.get() {
        options.commit = Duration::from_millis(told.commit_ms);
        options.cache.clone_from(&told.cache);
        options.deadline = Duration::from_secs(told.deadline);
    }
    options
}
