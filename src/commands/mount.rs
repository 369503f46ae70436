//! `draconis mount`

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};
use draconis_service::client::{Directory, ask, ask_or_start, ask_running};
use draconis_service::options::MountOptions;
use draconis_service::protocol::{Reply, Request};

use super::format;
use crate::image::object::Name;
use crate::{bucket, image, say};

const MOUNT_OPTIONS: &str = "\
Options for -o, separated by commas:
  ro, rw               read-only, or as the volume allows (rw)
  allow_other          let other users in (user_allow_other in /etc/fuse.conf)
  fakeroot             no permission checks: every user who may enter may read everything
  inode_cache=N        inodes kept in memory (16384)
  block_map_cache=N    files whose block lists are kept (4096)
  data_cache=SIZE      file data kept, such as 64M
  dots                 show . and .. in native listings too
  offset=N             the volume starts at this byte of IMAGE
  partition=N          the volume is this partition of IMAGE
  backing=FILE         as --backing
  relatime, noatime, strictatime, lazytime
                       when reading changes the time of access (relatime)
  sync, dirsync        changes, or those of directories, are durable when they are answered
  writeback            the kernel keeps what is written for a while: better for many small
                       writes, worse for many small files (nowriteback)
  commit=SECONDS       hand changes to the disk after so long (5)
  dirty=SIZE           or when there are so many (64M)
  deadline=SECONDS     kill a worker that does not answer for so long (30)
  bucket_cache=DIR:SIZE, bucket_journal=FILE[:SIZE], bucket_deadline=SECONDS,
  bucket_commit_ms=MS, bucket_take_over
                       of a volume in a bucket: as --cache, --journal, --deadline, --commit-ms
                       and --take-over, for lines of fstab
  polling=off          sleep until there is a request, rather than look for the next one for up
                       to 0.1 ms: for batteries (auto)
  norestart            no other worker takes over from one that died: the mount is dead then
  dev, suid, noexec    as mount(8) has them; devices and setuid are ignored by default
  user, owner          as mount(8) has them: without devices and setuid
  errors=WHAT          a volume that says that it is damaged is mounted read-only (remount-ro)
                       or as any other (continue)
  data=ordered         of a journal: contents are on the disk before what leads to them;
                       writeback is taken and done as ordered, journal is refused
  discard, nodiscard   tell the disk what is free (discard in stores, else nodiscard)
  grpid                new files have the group of their directory
  minixdf              df counts what can never be a file's, too
  fsname=, subtype=    what /proc/mounts shows as source and type
  nofuseblk            no block device as the source of root's mounts: sync(2) does not reach them
  remount,ro|rw        change that of a mount, and nothing else: with ro everything is brought
                       home and the volume marked as unmounted (root only)
Options of the kernel's driver, of fuse2fs, mount(8) and systemd that change nothing here
are taken: defaults, loop, acl, user_xattr, nofail, x-systemd.automount and others.";

/// Mount a volume on a directory, served by a sandboxed process of its own.
///
/// A manager is started in the background where none runs. Without root this needs
/// fusermount3 (package fuse3) and write access to the directory.
#[derive(Debug, Args)]
#[command(after_long_help = MOUNT_OPTIONS)]
pub struct Arguments {
    /// Stay in the foreground until it is unmounted; Ctrl-C unmounts.
    #[arg(short, long)]
    foreground: bool,
    /// Mount options, separated by commas; may be repeated.
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// If DIR has a dead mount of ours on it, clear that first.
    #[arg(long)]
    replace: bool,
    /// IMAGE is a qcow2, VHDX, VHD or VMDK file that holds only what differs from FILE, which is
    /// only read; given again, what FILE differs from. All but qcow2 are only read themselves.
    #[arg(long, value_name = "FILE")]
    backing: Vec<PathBuf>,
    /// Make IMAGE, an empty volume of this size, first.
    #[arg(long, value_name = "SIZE")]
    create: Option<String>,
    /// The file or block device, or STORE#NAME; `-o remount` does without.
    image: PathBuf,
    /// The directory.
    dir: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut options = MountOptions::default();
    for list in &arguments.options {
        options.add(list)?;
    }
    options.backing.extend_from_slice(&arguments.backing);
    let Some(dir) = &arguments.dir else {
        if options.remount {
            return remount(&arguments.image, &options);
        }
        let what = "the directory is missing: draconis mount IMAGE DIR";
        return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, what).into());
    };
    if options.remount {
        return remount(dir, &options);
    }
    let mount_point = mount_point(dir)?;
    if let Some(size) = &arguments.create {
        create(&arguments.image, size)?;
    }
    let name = image::in_store(&arguments.image)?;
    if name.as_ref().is_some_and(Name::is_snapshot) && !options.read_only {
        options.read_only = true;
        say::notes(&[format!("read-only: {} is a snapshot", arguments.image.display())]);
    }
    let file = name.as_ref().map_or(&arguments.image, |name| &name.store);
    let disk = name.as_ref().map(|name| name.name.clone());
    let (volume, means) = match bucket::address(file) {
        Some(_) => {
            let (means, deadline_s) = bucket::means(&options.bucket)?;
            // A worker that waits for a bucket does not hang: to send something and to ask whether
            // that counts may each take as long as requests are tried again.
            let patience_s = deadline_s.saturating_mul(2).saturating_add(30);
            options.deadline_s = options.deadline_s.max(patience_s);
            (file.clone(), Some(means))
        }
        None => (absolute(file)?, None),
    };
    if let (None, Some((name, _))) = (&means, options.bucket.first()) {
        bail!("mount option 'bucket_{name}': {} is in no bucket", arguments.image.display());
    }
    if name.is_none() && means.is_none() {
        options.parts = image::parts_of(file);
    }
    for file in &mut options.backing {
        *file = absolute(file)?;
    }
    let directory = Directory::open()?;
    let replace = arguments.replace;
    let at = mount_point.clone();
    let options = Box::new(options);
    let request = Request::Mount { volume, disk, mount_point, options, replace, means };
    if arguments.foreground {
        return foreground(&directory, at, &request);
    }
    told(ask_or_start(&directory, &request)?)
}

/// Lets a mount be written, or not.
fn remount(dir: &Path, options: &MountOptions) -> anyhow::Result<ExitCode> {
    let mount_point = mount_point(dir)?;
    let name = mount_point.display().to_string();
    let read_only = options.read_only;
    match ask_running(&Directory::open()?, &Request::Remount { mount_point, read_only })? {
        None | Some(Reply::NotMounted) => bail!("{name}: no volume of this user is mounted there"),
        Some(reply) => told(reply),
    }
}

/// Makes an empty volume that belongs to the caller, as `draconis format` would.
fn create(image: &Path, size: &str) -> anyhow::Result<()> {
    let line = ["format", "-E", "root_owner", "--"].map(OsStr::new);
    let line = line.into_iter().chain([image.as_os_str(), OsStr::new(size)]);
    let matches =
        format::Arguments::augment_args(Command::new("format")).try_get_matches_from(line)?;
    format::run(&format::Arguments::from_arg_matches(&matches)?).map(drop)
}

/// Mounts, and waits for the end.
fn foreground(
    directory: &Directory,
    mount_point: PathBuf,
    request: &Request,
) -> anyhow::Result<ExitCode> {
    let unmount = Request::Unmount { mount_point: mount_point.clone(), force: true };
    let wait = Request::Wait { mount_point };
    told(ask_or_start(directory, request)?)?;
    let other = directory.clone();
    super::serve::on_signal(move || {
        if let Some(manager) = other.connect() {
            // The wait below tells how it went.
            let _ = ask(&manager, &unmount);
        }
    })?;
    match ask_or_start(directory, &wait)? {
        Reply::Ended { why } => ended(why),
        other => told(other),
    }
}

fn ended(why: Option<String>) -> anyhow::Result<ExitCode> {
    match why {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => bail!("{why}"),
    }
}

/// Writes what a manager answered; its exit code.
pub fn told(reply: Reply) -> anyhow::Result<ExitCode> {
    match reply {
        Reply::Failed { why } => bail!("{why}"),
        Reply::NotMounted => bail!("no volume of ours is mounted there"),
        Reply::Mounted { notes } => say::notes(&notes),
        Reply::Cleared { why } => say::notes(&[format!("the mount was dead: {why}")]),
        Reply::Done
        | Reply::Status(_)
        | Reply::Ended { .. }
        | Reply::Upgraded { .. }
        | Reply::Kept(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().map_err(|error| no_path(path, &error))
}

/// The directory without links, found without asking the directory itself: a mount whose
/// worker hangs must be possible to name.
pub fn mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    without_links(dir).map_err(|error| no_path(dir, &error))
}

fn no_path(path: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow!("{}: {error}", path.display())
}

fn without_links(dir: &Path) -> std::io::Result<PathBuf> {
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
