//! Buckets: opening disks in them, and request statistics.
//!
//! ```text
//!   store, kv ── in this process ──▶ bucket
//!   a command on a volume, confined ══ disk process ──▶ bucket
//!   mounts ══ store process, confined ══ store keeper ──▶ bucket
//! ```
//!
//! Law 1: a command that opens a store for writing fences the previous writer. Mounts are the
//! exception: only `--take-over` ends them. Readers disturb no writer.
//! Law 2: the requests of a command are counted until everything is uploaded.
//! Law 3: the process that parses a volume has no network access.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::{Args, Command};
use draconis_access::bucket_host;
pub use draconis_access::bucket_host::normalize_url;
use draconis_access::uuid::UuidGenerator;
use draconis_bucket::{
    BucketDisk, BucketWriteState, JournalDevice, JournalStatistics, ObjectStoreBucket,
    RequestStatistics,
};
use draconis_device::{Disk, ForwardingDisk};
use draconis_objects::Profile;
use draconis_service::remote_disk::{
    self, DiskProcess, RemoteCredentials, RemoteDiskProvider, RemoteDiskRequest, UNSENT_PREFIX,
};
use draconis_types::lock::Mutex;
use serde::{Deserialize, Serialize};

use crate::{report, text};

// Options of buckets. Not a doc comment: `augment_args` would make it the description of every
// command that takes them.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct BucketArgs {
    /// Minimum interval between commits, in milliseconds; commits in between are merged.
    #[arg(long, value_name = "MS", default_value_t = 50)]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    commit_ms: u64,
    /// Retry failed requests for up to SECONDS.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    deadline: u64,
    /// Cache data read from the bucket in DIR, up to SIZE bytes (suffixes K, M, G, T).
    #[arg(long, value_name = "DIR,SIZE", value_parser = |text: &str| bucket_host::parse_cache(text, ','))]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    cache: Option<(PathBuf, u64)>,
    /// Acknowledge writes once they are durable in FILE on a local disk; upload to the bucket in
    /// the background.
    ///
    /// FILE is created with SIZE bytes (default: 256M; suffixes K, M, G, T). After a crash, the next
    /// command or mount that changes the store must use the same FILE: it uploads the rest.
    /// --take-over discards it.
    // Its own ID, because some commands have a `journal` option for volumes.
    #[arg(id = "bucket_journal", long = "journal")]
    #[arg(value_name = "FILE[,SIZE]", value_parser = |text: &str| bucket_host::parse_journal(text, ','))]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    journal: Option<(PathBuf, u64)>,
    /// Print bucket request counts to standard error at exit.
    #[arg(long)]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    stats: bool,
    /// Fence off the machine that has the store mounted; its mounts become read-only. Data that is
    /// only in its journal is lost.
    #[arg(long)]
    #[arg(help_heading = "Bucket options", hide_short_help = true)]
    take_over: bool,
}

/// Commands that open a volume or store by its name, which may be in a bucket: they alone take
/// [`BucketArgs`].
const COMMANDS: &[&str] = &[
    "cat",
    "check",
    "chmod",
    "chown",
    "cp",
    "export",
    "format",
    "get",
    "grow",
    "info",
    "kv del",
    "kv get",
    "kv load",
    "kv put",
    "kv scan",
    "kv stats",
    "ln",
    "ls",
    "mkdir",
    "mount",
    "mv",
    "put",
    "repair",
    "rescue",
    "rm",
    "set-label",
    "shrink",
    "stat",
    "store append",
    "store check",
    "store clone",
    "store create",
    "store disk",
    "store get",
    "store grow",
    "store info",
    "store ls",
    "store put",
    "store rm",
    "store rollback",
    "store salvage",
    "store shrink",
    "store snapshot",
    "tar",
    "touch",
    "tree",
    "truncate",
    "tune",
    "undelete",
    "untar",
];

/// Returns true if a command, such as `store put`, takes [`BucketArgs`].
pub fn takes_options(command: &str) -> bool {
    COMMANDS.contains(&command)
}

/// Adds [`BucketArgs`] to a command that takes them.
pub fn add_options(name: &str, command: Command) -> Command {
    if takes_options(name) { BucketArgs::augment_args(command) } else { command }
}

/// Returns true for one of [`BucketArgs`], such as `--deadline`.
pub fn is_option(name: &str) -> bool {
    let all = BucketArgs::augment_args(Command::new(""));
    let name = name.strip_prefix("--");
    name.is_some_and(|name| all.get_arguments().any(|one| one.get_long() == Some(name)))
}

impl BucketArgs {
    /// Parses `-o bucket_NAME=VALUE`, the mount option for a flag, as used in fstab. A size follows
    /// a colon, since commas separate options.
    fn add(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "cache" => self.cache = Some(bucket_host::parse_cache(value, ':')?),
            "journal" => self.journal = Some(bucket_host::parse_journal(value, ':')?),
            "deadline" => self.deadline = parse_number(value)?,
            "commit_ms" => self.commit_ms = parse_number(value)?,
            "take_over" if value.is_empty() => self.take_over = true,
            "take_over" => return Err("it takes no value".to_owned()),
            _ => return Err("no such option; see draconis-mount(1)".to_owned()),
        }
        Ok(())
    }
}

/// Bucket settings that a command passes to the process that opens the bucket.
#[derive(Serialize, Deserialize)]
struct BucketSettings {
    options: BucketArgs,
    /// Process ID of the command; `None` for the opening process itself.
    process: Option<u32>,
}

/// Options of this command line.
static CLI_OPTIONS: OnceLock<BucketArgs> = OnceLock::new();
/// Disks that this process has opened.
static OPEN_BUCKETS: Mutex<Vec<OpenBucket>> = Mutex::new(vec![]);

/// An open disk in a bucket.
struct OpenBucket {
    disk: Arc<BucketDisk>,
    stats: bool,
    /// Lock that prevents mounts on this machine meanwhile.
    _claim: Option<std::fs::File>,
}

/// Stores the command line's options until [`close_open_buckets`].
pub fn set_cli_options(options: BucketArgs) {
    let _ = CLI_OPTIONS.set(options);
}

/// Closes the open disks, and prints statistics if requested.
pub fn close_open_buckets() {
    let opened = std::mem::take(&mut *OPEN_BUCKETS.lock());
    for OpenBucket { disk, stats, .. } in opened {
        disk.close();
        if let Some(left) = disk.close_error() {
            log::warn!("{left}");
        }
        if stats {
            report::warn_line(format_requests(&disk.requests(), disk.usage()));
            disk.journal_statistics()
                .iter()
                .for_each(|kept| report::warn_line(format_journal(kept)));
        }
    }
}

fn format_requests(requests: &RequestStatistics, (objects, bytes): (u64, u64)) -> String {
    let RequestStatistics { puts, gets, heads, lists, deletes, again, .. } = requests;
    format!(
        "requests: {puts} PUT, {gets} GET, {heads} HEAD, {lists} LIST, {deletes} DELETE; {again} of \
         them again; {} sent, {} received; the bucket has {bytes} in {}",
        text::format_bytes(requests.sent_bytes),
        text::format_bytes(requests.received_bytes),
        text::pluralize(objects, "object", "objects"),
        bytes = text::format_bytes(bytes),
    )
}

fn format_journal(kept: &JournalStatistics) -> String {
    let JournalStatistics { records, bytes, flushes, full, sent_late } = kept;
    format!(
        "journal: {} in {}, flushed {flushes} times, full {full} times; {} of an earlier writer sent",
        text::format_bytes(*bytes),
        text::pluralize(*records, "record", "records"),
        text::pluralize(*sent_late, "object", "objects"),
    )
}

fn parse_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("a whole number, not '{text}'"))
}

/// Returns the path as a bucket URL, if it is one.
pub fn bucket_url(device: &Path) -> Option<&str> {
    remote_disk::parse_url(device)
}

/// Opens a disk in a bucket for writing; fences the previous writer.
pub fn open_writable(address: &str) -> anyhow::Result<Arc<BucketDisk>> {
    let claim = lock_bucket_url(address)?;
    let disk = BucketDisk::open(
        connect_to_bucket(address, false)?,
        address,
        &options_for_this_process(true)?,
    );
    Ok(register_open(disk.map_err(|error| anyhow!("{error}"))?, claim))
}

/// Opens a disk in a bucket for reading, while others may write to it.
pub fn open_readable(address: &str) -> anyhow::Result<Arc<dyn Disk>> {
    let options = options_for_this_process(false)?;
    let disk = BucketDisk::open_to_read(connect_to_bucket(address, false)?, address, &options);
    Ok(register_open(disk.map_err(|error| anyhow!("{error}"))?, None))
}

/// Creates a disk in a bucket.
pub fn create_disk(address: &str, len_bytes: u64, over: bool) -> anyhow::Result<Arc<BucketDisk>> {
    let engine = connect_to_bucket(address, true)?;
    let claim = lock_bucket_url(address)?;
    let disk =
        BucketDisk::create(engine, address, len_bytes, over, &options_for_this_process(true)?);
    Ok(register_open(disk.map_err(|error| anyhow!("{error}"))?, claim))
}

/// Opens a disk in a bucket through a separate process, so that this one can confine itself.
pub fn start_disk_process(
    address: &str,
    write: bool,
) -> anyhow::Result<(DiskProcess, Option<std::fs::File>)> {
    let claim = if write { lock_bucket_url(address)? } else { None };
    let settings = BucketSettings { options: cli_options(), process: Some(std::process::id()) };
    let opening = RemoteDiskRequest {
        address: address.to_owned(),
        read_only: !write,
        stays: false,
        seat: bucket_host::host_id(),
        settings: serde_json::to_string(&settings)?,
    };
    let served = DiskProcess::open(Path::new("/proc/self/exe"), &opening);
    Ok((served.map_err(|why| anyhow!("{why}"))?, claim))
}

/// Returns the credentials of this process for a mount, and the retry timeout in seconds.
/// `words` are the bucket options of `-o`.
pub fn remote_credentials(
    words: &[(String, String)],
) -> anyhow::Result<(Box<RemoteCredentials>, u64)> {
    let mut options = cli_options();
    for (name, value) in words {
        options.add(name, value).map_err(|why| anyhow!("mount option 'bucket_{name}': {why}"))?;
    }
    let deadline_s = options.deadline;
    let settings = BucketSettings { options, process: None };
    // Settings and credentials are always UTF-8.
    let all = std::env::vars_os();
    let all =
        all.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let environment = all.map(|(name, value)| match absolute_credentials_path(&name, &value) {
        Some(path) => (name, path),
        None => (name, value),
    });
    let environment = environment.collect();
    Ok((
        Box::new(RemoteCredentials { settings: serde_json::to_string(&settings)?, environment }),
        deadline_s,
    ))
}

/// Returns the absolute path of a credentials file, for a process with another working directory.
fn absolute_credentials_path(variable: &str, path: &str) -> Option<String> {
    let is_file = matches!(
        variable,
        "AWS_SHARED_CREDENTIALS_FILE"
            | "AWS_CONFIG_FILE"
            | "AWS_WEB_IDENTITY_TOKEN_FILE"
            | "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
    );
    let is_relative = is_file && !path.is_empty() && !path.starts_with(['/', '~']);
    let path = is_relative.then(|| std::path::absolute(path).ok())??;
    path.into_os_string().into_string().ok()
}

/// Opens buckets for the processes that serve disks in them.
pub struct BucketProvider;

impl RemoteDiskProvider for BucketProvider {
    fn open(&self, opening: &RemoteDiskRequest) -> Result<Arc<dyn Disk>, String> {
        let RemoteDiskRequest { address, read_only, stays, seat, settings } = opening;
        let BucketSettings { options, process } = serde_json::from_str(settings)
            .map_err(|error| format!("{address}: what is said of it makes no sense: {error}"))?;
        let stats = options.stats;
        let process = process.unwrap_or_else(std::process::id);
        let how = draconis_bucket::BucketOptions {
            is_mount: *stays,
            host_id: seat.clone(),
            ..bucket_options(options, process, !read_only)?
        };
        let engine = Arc::new(ObjectStoreBucket::open(address, false, how.deadline)?);
        let disk = match read_only {
            true => BucketDisk::open_to_read(engine, address, &how),
            false => BucketDisk::open(engine, address, &how),
        };
        let disk = Arc::new(disk.map_err(|error| error.to_string())?);
        let used = OpenBucket { disk: disk.clone(), stats, _claim: None };
        OPEN_BUCKETS.lock().push(used);
        Ok(Arc::new(MonitoredBucketDisk(disk)))
    }

    fn prepare_close(&self) {
        let opened = OPEN_BUCKETS.lock();
        opened.iter().for_each(|used| used.disk.finish());
    }

    fn close(&self) -> Option<String> {
        let opened = OPEN_BUCKETS.lock();
        opened.iter().for_each(|used| used.disk.close());
        let left: Vec<String> = opened.iter().filter_map(|used| used.disk.close_error()).collect();
        (!left.is_empty()).then(|| left.join("; "))
    }
}

/// A disk in a bucket that reports upload failures.
struct MonitoredBucketDisk(Arc<BucketDisk>);

impl ForwardingDisk for MonitoredBucketDisk {
    type Inner = BucketDisk;

    fn inner_disk(&self) -> &BucketDisk {
        &self.0
    }

    fn outage(&self) -> Option<String> {
        let BucketWriteState { error, away, waiting_bytes } = self.0.write_state();
        error.or_else(|| {
            let (why, since) = away?;
            let since = jiff::Timestamp::try_from(since).ok()?;
            let bytes = text::format_bytes(waiting_bytes);
            Some(format!("{UNSENT_PREFIX}{bytes}, since {since:.0}: {why}"))
        })
    }
}

/// Returns the store profile for buckets.
pub fn default_bucket_profile(len_bytes: u64) -> (Profile, Vec<String>) {
    let profile = bucket_host::store_profile(len_bytes);
    (profile, vec!["layout bucket: requests take long and have a price".to_owned()])
}

/// Refuses a bucket for a command that does not support buckets.
pub fn refuse_bucket(device: &Path, why: &str) -> anyhow::Result<()> {
    match bucket_url(device) {
        Some(address) => bail!("{address}: {why}"),
        None => Ok(()),
    }
}

/// Returns the journal file of the command line.
pub fn cli_journal_file() -> Option<PathBuf> {
    CLI_OPTIONS.get()?.journal.as_ref().map(|(file, _)| file.clone())
}

fn connect_to_bucket(address: &str, makes: bool) -> anyhow::Result<Arc<ObjectStoreBucket>> {
    let timeout = Duration::from_secs(cli_options().deadline);
    Ok(Arc::new(ObjectStoreBucket::open(address, makes, timeout).map_err(|why| anyhow!("{why}"))?))
}

fn register_open(disk: BucketDisk, claim: Option<std::fs::File>) -> Arc<BucketDisk> {
    let disk = Arc::new(disk);
    let used = OpenBucket { disk: disk.clone(), stats: cli_options().stats, _claim: claim };
    OPEN_BUCKETS.lock().push(used);
    disk
}

/// Locks a bucket URL against mounts on this machine.
fn lock_bucket_url(address: &str) -> anyhow::Result<Option<std::fs::File>> {
    bucket_host::lock_url(address).map_err(|why| anyhow!("{why}"))
}

/// Returns the options of the command line.
fn cli_options() -> BucketArgs {
    let defaults = BucketArgs {
        commit_ms: 50,
        deadline: 60,
        cache: None,
        journal: None,
        stats: false,
        take_over: false,
    };
    CLI_OPTIONS.get().cloned().unwrap_or(defaults)
}

fn options_for_this_process(writes: bool) -> anyhow::Result<draconis_bucket::BucketOptions> {
    let options = bucket_options(cli_options(), std::process::id(), writes);
    Ok(draconis_bucket::BucketOptions {
        host_id: bucket_host::host_id(),
        ..options.map_err(|why| anyhow!("{why}"))?
    })
}

fn bucket_options(
    options: BucketArgs,
    process: u32,
    writes: bool,
) -> Result<draconis_bucket::BucketOptions, String> {
    let names = rustix::system::uname();
    let BucketArgs { commit_ms, deadline, cache, journal, take_over, .. } = options;
    let number = || u128::from_le_bytes(UuidGenerator::new(None).uuid());
    // A reader uses an existing journal, but creates none.
    let journal = journal.filter(|(file, _)| writes || file.exists());
    let journal =
        journal.map(|(file, len)| JournalDevice::file(&file, len, number())).transpose()?;
    Ok(draconis_bucket::BucketOptions {
        who: format!(
            "{}, process {process}, at {:.0}",
            names.nodename().to_string_lossy(),
            jiff::Timestamp::now()
        ),
        token: number(),
        journal,
        commit: Duration::from_millis(commit_ms),
        deadline: Duration::from_secs(deadline),
        cache,
        take_over,
        ..draconis_bucket::BucketOptions::default()
    })
}
