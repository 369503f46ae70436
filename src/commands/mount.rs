//! `draconis mount`

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};
use draconis_service::client::{RuntimeDir, request_if_running, request_or_start, send_request};
use draconis_service::mount_table;
use draconis_service::options::MountOptions;
use draconis_service::protocol::{Reply, Request};
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{Mode, OFlags};

use super::format;
use crate::image::store_disk::StoreDiskName;
use crate::{bucket, image, report};

const MOUNT_OPTIONS: &str = "\
Options for -o, separated by commas:
  ro, rw               mount read-only, or read-write if the volume allows it (rw)
  allow_other          allow access by other users (needs user_allow_other in /etc/fuse.conf)
  fakeroot             disable permission checks for all users of the mount
  inode_cache=N        maximum number of cached inodes (16384)
  block_map_cache=N    maximum number of cached block maps (4096)
  data_cache=SIZE      size of the data cache, such as 64M
  dots                 list . and .. through the library API as well
  offset=N             start of the volume in IMAGE, in bytes
  partition=N          use partition N of IMAGE
  backing=FILE         as --backing
  deleted              mount the deleted files read-only, as IMAGE@deleted does
  relatime, noatime, strictatime, nostrictatime, lazytime
                       when reads update access times (relatime)
  sync, dirsync        make all changes, or directory changes, durable before returning
  writeback            use the kernel's write-back cache: faster small writes, slower small
                       files (nowriteback)
  commit=SECONDS       commit interval (5)
  dirty=SIZE           commit when this much data is dirty (64M)
  deadline=SECONDS     kill and restart a worker that hangs for SECONDS (30)
  bucket_cache=DIR:SIZE, bucket_journal=FILE[:SIZE], bucket_deadline=SECONDS,
  bucket_commit_ms=MS, bucket_take_over
                       for a volume in a bucket: as --cache, --journal, --deadline,
                       --commit-ms and --take-over, for lines of fstab
  polling=off          do not busy-poll (up to 0.1 ms) for the next request; saves power (auto)
  force=raid-member    write to one disk of a RAID, which splits it from the others
  norestart            do not restart a worker that died; the mount stays dead
  uring=auto|on|off    use FUSE over io_uring, for faster small calls: only root's mounts with
                       norestart, where root has written Y to
                       /sys/module/fuse/parameters/enable_uring (auto); on fails elsewhere
  dev, suid, noexec    as in mount(8); devices and setuid are ignored by default
  user, owner          as in mount(8): without devices and setuid
  errors=WHAT          how to mount a volume marked as damaged: remount-ro (read-only) or
                       continue
  data=ordered         journal mode: data is written before metadata; writeback is treated as
                       ordered, journal is not supported
  discard, nodiscard   discard freed blocks (discard in stores, nodiscard elsewhere)
  grpid                new files inherit the directory's group
  minixdf              df includes metadata blocks
  fsname=, subtype=    source and type in /proc/mounts
  context=, fscontext=, defcontext=, rootcontext=
                       labels for SELinux, as in mount(8); ignored without it
  nofuseblk            do not use fuseblk for root's mounts; sync(2) then does not flush them
  remount,ro|rw        switch between read-only and read-write; ro commits all changes and
                       marks the volume clean (root only)
Accepted and ignored: defaults, loop, acl, user_xattr, nofail, x-systemd.automount and other
options of mount(8), ext4, fuse2fs and systemd.";

/// Mount a volume, served by its own sandboxed process.
///
/// Starts the manager in the background if none is running. Without root this needs
/// fusermount3 (package fuse3) and write access to the directory.
#[derive(Debug, Args)]
#[command(after_long_help = MOUNT_OPTIONS)]
pub struct Arguments {
    /// Run in the foreground; Ctrl-C unmounts.
    #[arg(short, long)]
    foreground: bool,
    /// Check the arguments, and do not mount (mount -f).
    #[arg(long, conflicts_with_all = ["foreground", "create"])]
    fake: bool,
    /// Mount options, separated by commas; may be repeated.
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Remove a dead draconis mount from DIR first.
    #[arg(long)]
    replace: bool,
    /// Backing file of a differencing IMAGE (qcow2, VHDX, VHD, VMDK), opened read-only; repeat for
    /// the backing file of FILE. Differencing images other than qcow2 are mounted read-only.
    #[arg(long, value_name = "FILE")]
    backing: Vec<PathBuf>,
    /// Create IMAGE as an empty volume of SIZE first.
    #[arg(long, value_name = "SIZE")]
    create: Option<String>,
    /// Image to mount (omit with -o remount).
    image: PathBuf,
    /// Mount point.
    dir: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut options = MountOptions::default();
    for list in &arguments.options {
        options.add_list(list)?;
    }
    options.backing.extend_from_slice(&arguments.backing);
    let Some(dir) = &arguments.dir else {
        if options.remount {
            return send_remount(&arguments.image, &options, arguments.fake);
        }
        let what = "the directory is missing: draconis mount IMAGE DIR";
        return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, what).into());
    };
    if options.remount {
        return send_remount(dir, &options, arguments.fake);
    }
    let mount_point = resolve_mount_point(dir)?;
    if let Some(size) = &arguments.create {
        create_image(&arguments.image, size)?;
    }
    let of_deleted = image::image_of_deleted(&arguments.image);
    let image = of_deleted.as_deref().unwrap_or(&arguments.image);
    if of_deleted.is_some() || options.deleted {
        (options.deleted, options.read_only) = (true, true);
        // The source that the kernel shows tells it from a mount of the volume.
        let mut source = image.as_os_str().to_owned();
        source.push("@deleted");
        options.source.get_or_insert_with(|| source.into());
    }
    let name = image::parse_store_disk(image)?;
    if name.as_ref().is_some_and(StoreDiskName::is_snapshot) && !options.read_only {
        options.read_only = true;
        report::print_notes(&[format!("read-only: {} is a snapshot", arguments.image.shown())]);
    }
    let file = name.as_ref().map_or(image, |name| &name.store);
    let disk = name.as_ref().map(|name| name.name.clone());
    let (volume, means) = match bucket::bucket_url(file) {
        Some(_) => {
            let (means, deadline_s) = bucket::remote_credentials(&options.bucket)?;
            // A worker that waits for a bucket is not hung: an upload and the check of its fencing
            // epoch may each take the whole retry timeout.
            let patience_s = deadline_s.saturating_mul(2).saturating_add(30);
            options.deadline_s = options.deadline_s.max(patience_s);
            (file.to_owned(), Some(means))
        }
        None => (absolute_path(file)?, None),
    };
    if let (None, Some((name, _))) = (&means, options.bucket.first()) {
        bail!("mount option 'bucket_{name}': {} is in no bucket", arguments.image.shown());
    }
    if name.is_none() && means.is_none() {
        options.parts = image::extent_files(file);
    }
    for file in &mut options.backing {
        *file = absolute_path(file)?;
    }
    if arguments.fake {
        let found = mount_point.metadata().map_err(|error| path_error(&mount_point, &error))?;
        if !found.is_dir() {
            bail!("{} is not a directory", mount_point.shown());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let directory = RuntimeDir::open()?;
    let replace = arguments.replace;
    let at = mount_point.clone();
    let options = Box::new(options);
    // It lives until the reply.
    let passage = open_automount_point(&mount_point)?;
    let place = passage.as_ref().map(|passage| {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), passage.as_raw_fd()))
    });
    let request = Request::Mount { volume, disk, mount_point, place, options, replace, means };
    if arguments.foreground {
        return mount_in_foreground(&directory, at, &request);
    }
    print_reply(request_or_start(&directory, &request)?)
}

/// Opens a mount point of autofs. While something is mounted there for others, only the processes of
/// the automounter's group can pass, as this one when systemd runs it; the manager's would wait.
fn open_automount_point(mount_point: &Path) -> anyhow::Result<Option<OwnedFd>> {
    let entry = mount_table::find_mount_at(mount_point);
    if !entry.is_some_and(|entry| entry.is_automount_point()) {
        return Ok(None);
    }
    // Neither this nor a later use of the descriptor mounts what autofs would.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(mount_point, flags, Mode::empty());
    opened.map(Some).map_err(|errno| path_error(mount_point, &errno.into()))
}

/// Remounts read-only or read-write.
fn send_remount(dir: &Path, options: &MountOptions, fake: bool) -> anyhow::Result<ExitCode> {
    let mount_point = resolve_mount_point(dir)?;
    if fake {
        return Ok(ExitCode::SUCCESS);
    }
    let name = mount_point.shown().to_string();
    let read_only = options.read_only;
    match request_if_running(&RuntimeDir::open()?, &Request::Remount { mount_point, read_only })? {
        None | Some(Reply::NotMounted) => bail!("{name}: no volume of this user is mounted there"),
        Some(reply) => print_reply(reply),
    }
}

/// Creates an empty volume that belongs to the caller, as `draconis format` does.
fn create_image(image: &Path, size: &str) -> anyhow::Result<()> {
    let line = ["format", "-E", "root_owner", "--"].map(OsStr::new);
    let line = line.into_iter().chain([image.as_os_str(), OsStr::new(size)]);
    let matches =
        format::Arguments::augment_args(Command::new("format")).try_get_matches_from(line)?;
    format::run(&format::Arguments::from_arg_matches(&matches)?).map(drop)
}

/// Mounts, and waits for the unmount.
fn mount_in_foreground(
    directory: &RuntimeDir,
    mount_point: PathBuf,
    request: &Request,
) -> anyhow::Result<ExitCode> {
    let unmount = Request::Unmount { mount_point: mount_point.clone(), force: true };
    let wait = Request::Wait { mount_point };
    print_reply(request_or_start(directory, request)?)?;
    let other = directory.clone();
    super::serve::on_signal(move || {
        let Some(manager) = other.connect() else { return };
        match send_request(&manager, &unmount) {
            // The wait below would last as long as the copies.
            Ok(reply @ Reply::Copied { .. }) => {
                let _ = print_reply(reply);
                std::process::exit(0);
            }
            Ok(Reply::Failed { why }) => report::warn_line(format_args!("draconis: {why}")),
            // The wait below reports the result.
            _ => {}
        }
    })?;
    match request_or_start(directory, &wait)? {
        Reply::Ended { why } => exit_code(why),
        other => print_reply(other),
    }
}

fn exit_code(why: Option<String>) -> anyhow::Result<ExitCode> {
    match why {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => bail!("{why}"),
    }
}

/// Prints the reply of a manager; returns the exit code.
pub fn print_reply(reply: Reply) -> anyhow::Result<ExitCode> {
    match reply {
        Reply::Failed { why } => bail!("{why}"),
        Reply::NotMounted => bail!("no volume of ours is mounted there"),
        Reply::Mounted { notes } => report::print_notes(&notes),
        Reply::Cleared { why } => report::print_notes(&[format!("the mount was dead: {why}")]),
        Reply::Copied { copies } => report::print_notes(&[format!(
            "it is unmounted, and all changes are durable; it goes on in {}",
            copies.join(", ")
        )]),
        Reply::Done
        | Reply::Status(_)
        | Reply::Ended { .. }
        | Reply::Upgraded { .. }
        | Reply::Kept(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn absolute_path(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().map_err(|error| path_error(path, &error))
}

/// Resolves symbolic links above the directory, without a request to the directory itself: the
/// worker of its mount may hang.
pub fn resolve_mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    resolve_links(dir).map_err(|error| path_error(dir, &error))
}

fn path_error(path: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow!("{}: {error}", path.shown())
}

fn resolve_links(dir: &Path) -> std::io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let last = dir.components().next_back();
    match (dir.parent(), last) {
        (Some(parent), Some(Component::Normal(name))) => {
            let within = parent.canonicalize()?.join(name);
            let link = std::fs::read_link(&within).is_ok();
            if link { within.canonicalize() } else { Ok(within) }
        }
        _ => dir.canonicalize(),
    }
}
