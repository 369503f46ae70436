//! The command line: names, flags and help texts, and nothing that acts.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use draconis_exchange::contract::Time;

use crate::change::Owner;
use crate::commands::{NewOwner, NewSize};
use crate::modes::ModeChange;
use crate::target::Target;
use crate::text;

/// Ext volumes you do not trust, mounted by a process that can do nothing else.
#[derive(Debug, Parser)]
#[command(name = "draconis", version, max_term_width = 100, propagate_version = true)]
#[command(after_help = "IMAGE is a file or a block device; IMAGE:/path is something in it.\n\
    Exit status: 0 done, 1 something failed, 2 the command line makes no sense.")]
pub struct Cli {
    /// Say more: once what is done, twice everything.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Mount a volume on a directory, served by a sandboxed process of its own.
    ///
    /// A manager is started in the background where none runs. Without root this needs
    /// fusermount3 (package fuse3) and write access to the directory.
    #[command(after_long_help = MOUNT_OPTIONS)]
    Mount(Mount),
    /// Unmount a directory, or clear the dead mount that a lost worker or manager left there.
    #[command(alias = "unmount")]
    Umount(Umount),
    /// Show what is mounted: worker, sandbox, caches, requests, memory.
    Status(Status),
    /// Run the manager in the foreground.
    Serve(Serve),
    /// Show what kind of volume an image holds.
    Info(Info),
    /// Check a volume without changing it.
    #[command(after_help = "Exit status: 0 clean, 4 damaged, 8 it cannot be checked.")]
    Check(Check),
    /// List files and directories of a volume.
    #[command(after_long_help = LS_JSON)]
    Ls(Ls),
    /// Write files of a volume to standard output.
    Cat(Cat),
    /// Show everything about files of a volume.
    Stat(Stat),
    /// List a directory of a volume as a tree.
    Tree(Tree),
    /// Copy a file or, with -r, a tree out of a volume.
    Get(Get),
    /// Write a tree of a volume to standard output as a tar archive.
    Tar(Tar),
    /// Make an ext2 volume, empty or filled from a directory or a tar archive.
    ///
    /// The options are those of mke2fs, and so is the layout.
    #[command(after_long_help = FORMAT_OPTIONS, visible_alias = "mkfs")]
    Format(Box<Format>),
    /// Copy files or, with -r, trees of this machine into a volume.
    ///
    /// Owners, modes, times, hard links, holes and extended attributes are kept.
    Put(Put),
    /// Unpack a tar archive into a directory of a volume, as it is.
    Untar(Untar),
    /// Copy files or, with -r, trees inside a volume or from one volume into another.
    Cp(Cp),
    /// Make directories in a volume.
    Mkdir(Mkdir),
    /// Remove files or, with -r, trees of a volume.
    Rm(Rm),
    /// Rename or move files of a volume.
    Mv(Mv),
    /// Give a file of a volume another name, or make a symbolic link.
    Ln(Ln),
    /// Change the modes of files of a volume.
    Chmod(Chmod),
    /// Change the owners of files of a volume.
    Chown(Chown),
    /// Set the times of files of a volume; make those that are missing.
    Touch(Touch),
    /// Set the lengths of files of a volume; make those that are missing.
    Truncate(Truncate),
    /// Give a volume a label.
    SetLabel(SetLabel),
    /// Make a volume larger, as far as its reserve of group descriptors goes.
    ///
    /// Files stay where they are. An image that is a file is lengthened, with a hole.
    Grow(Grow),
    /// Keep objects in a store: a file or block device laid out for the disk below.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Keep keys and their values in a store.
    #[command(subcommand)]
    Kv(KvCommand),
    /// Measure: how a disk, a file system, memory or a store behaves.
    ///
    /// Everything after `lab` goes to the program draconis-lab, which is beside this one:
    /// list, run, report, compare, crash.
    #[command(disable_help_flag = true)]
    Lab {
        /// What draconis-lab is told.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Write a completion script for a shell to standard output.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory.
    Manpages {
        /// The directory.
        dir: PathBuf,
    },
    /// List what a path in an image may go on with: asked by completion scripts.
    #[command(hide = true)]
    CompletePath(CompletePath),
    /// Be a worker: started by the manager, never by hand.
    #[command(hide = true)]
    Worker {
        /// Most private memory it may have, in bytes.
        #[arg(long)]
        memory: Option<u64>,
    },
}

const MOUNT_OPTIONS: &str = "\
Options for -o, separated by commas:
  ro, rw               read-only, or as the volume allows (rw)
  allow_other          let other users in (user_allow_other in /etc/fuse.conf)
  fakeroot             no permission checks: whoever may enter may read everything
  inode_cache=N        inodes kept in memory (16384)
  block_map_cache=N    files whose block lists are kept (4096)
  data_cache=SIZE      file data kept, such as 64M
  dots                 show . and .. in native listings too
  offset=N             the volume starts at this byte of IMAGE
  partition=N          the volume is this partition of IMAGE
  relatime, noatime, strictatime, lazytime
                       when reading changes the time of access (relatime)
  sync, dirsync        changes, or those of directories, are durable when they are answered
  writeback            the kernel keeps what is written for a while: better for many small
                       writes, worse for many small files (nowriteback)
  commit=SECONDS       hand changes to the disk after so long (5)
  dirty=SIZE           or when there are so many (64M)
  deadline=SECONDS     kill a worker that does not answer for so long (30)
  dev, suid, noexec    as mount(8) has them; devices and setuid are ignored by default
  user, owner          as mount(8) has them: without devices and setuid
  errors=WHAT          a volume that says that it is damaged is mounted read-only (remount-ro)
                       or as any other (continue)
  grpid                new files have the group of their directory
  minixdf              df counts what can never be a file's, too
  fsname=, subtype=    what /proc/mounts shows as source and type
  nofuseblk            no block device as the source of root's mounts: sync(2) does not reach them
  remount,ro|rw        change that of a mount, and nothing else: with ro everything is brought
                       home and the volume marked as unmounted (root only)
Options of the kernel's driver, of fuse2fs, mount(8) and systemd that change nothing here
are taken: defaults, loop, acl, user_xattr, nofail, x-systemd.automount and others.";

const FORMAT_OPTIONS: &str = "\
Options for -E, separated by commas:
  root_owner=UID:GID   owner of the root directory; without UID:GID, and where this is left
                       out, the user who runs this (with --from: the tree's own)
  hash_seed=UUID       what hashes of file names start from (random)
  hash_alg=NAME        how indexed directories hash names: legacy, half_md4, tea (half_md4)

Features for -O: ext_attr, resize_inode, dir_index, filetype, sparse_super, large_file (all
of them are the default), dir_nlink, extra_isize; ^FEATURE takes one away, none takes all.

--seed N with SOURCE_DATE_EPOCH in the environment makes the image reproducible bit for bit:
the same source gives the same bytes. Times later than SOURCE_DATE_EPOCH become that time.";

const LS_JSON: &str = "\
With --json each name is an object, one a line, in the order of the listing:
  path, name           the whole path in the volume, and the last part of it
  inode, kind, mode    the kind as stat has it, the mode in octal
  links, uid, gid, size
  device               [major, minor] of devices, else null
  link_target          of symbolic links, else null
  modified             [seconds, nanoseconds] since 1970
Bytes that are not UTF-8 are \\xNN in path, name and link_target, and then the member path_hex,
name_hex or link_target_hex has all bytes. What cannot be read has a member error instead of
what would follow inode.";

/// Where in an image the volume is.
#[derive(Debug, Clone, Copy, Args)]
pub struct Place {
    /// The volume starts at this byte of IMAGE (K, M, G allowed).
    #[arg(long, value_name = "BYTES", value_parser = size, conflicts_with = "partition")]
    pub offset: Option<u64>,
    /// The volume is this partition of IMAGE, counted from 1.
    #[arg(long, value_name = "N")]
    pub partition: Option<u32>,
}

/// Parses a size for clap.
fn size(text: &str) -> Result<u64, String> {
    draconis_service::options::parse_size(text)
        .ok_or_else(|| "not a size such as 4096, 64K or 1G".to_string())
}

/// `draconis complete-path`
#[derive(Debug, Args)]
pub struct CompletePath {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The path as far as it is written.
    #[arg(value_name = "IMAGE:/path")]
    pub target: Target,
}

/// `draconis mount`
#[derive(Debug, Args)]
pub struct Mount {
    /// Stay in the foreground until it is unmounted; Ctrl-C unmounts.
    #[arg(short, long)]
    pub foreground: bool,
    /// Mount options, separated by commas; may be repeated.
    #[arg(short, value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// If DIR has a dead mount of ours on it, clear that first.
    #[arg(long)]
    pub replace: bool,
    /// Make IMAGE, an empty volume of this size, first.
    #[arg(long, value_name = "SIZE")]
    pub create: Option<String>,
    /// The file or block device; `-o remount` does without.
    pub image: PathBuf,
    /// The directory.
    pub dir: Option<PathBuf>,
}

/// `draconis umount`
#[derive(Debug, Args)]
pub struct Umount {
    /// Even if it is in use: it disappears at once.
    #[arg(short, long, visible_alias = "lazy")]
    pub force: bool,
    /// The directory.
    pub dir: PathBuf,
}

/// `draconis status`
#[derive(Debug, Args)]
pub struct Status {
    /// Write JSON: an object with a list `mounts`.
    #[arg(long)]
    pub json: bool,
}

/// `draconis serve`
#[derive(Debug, Args)]
pub struct Serve {
    /// End some seconds after the last mount has.
    #[arg(long)]
    pub until_idle: bool,
}

/// `draconis info`
#[derive(Debug, Args)]
pub struct Info {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
    /// The file or block device.
    pub image: PathBuf,
}

/// `draconis check`
#[derive(Debug, Args)]
pub struct Check {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub image: PathBuf,
}

/// `draconis ls`
#[derive(Debug, Args)]
pub struct Ls {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Show mode, links, owner, group, size and time of each name.
    #[arg(short)]
    pub long: bool,
    /// Show names that begin with a dot, too.
    #[arg(short)]
    pub all: bool,
    /// List directories below, too.
    #[arg(short = 'R')]
    pub recursive: bool,
    /// Show directories and symbolic links themselves, not what they hold or lead to.
    #[arg(short, conflicts_with = "recursive")]
    pub directory: bool,
    /// Write JSON: a list with an object for each name.
    #[arg(long)]
    pub json: bool,
    /// What to list; the root directory if only IMAGE is given.
    #[arg(value_name = "IMAGE[:/path]", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis cat`
#[derive(Debug, Args)]
pub struct Cat {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis stat`
#[derive(Debug, Args)]
pub struct Stat {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Write JSON, a list.
    #[arg(long)]
    pub json: bool,
    /// Follow a symbolic link at the end of the path.
    #[arg(short = 'L', long)]
    pub dereference: bool,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis tree`
#[derive(Debug, Args)]
pub struct Tree {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Show names that begin with a dot, too.
    #[arg(short)]
    pub all: bool,
    /// Go down this many levels only.
    #[arg(short = 'L', long, value_name = "N")]
    pub level: Option<usize>,
    /// What to list.
    #[arg(value_name = "IMAGE[:/path]")]
    pub target: Target,
}

/// `draconis get`
#[derive(Debug, Args)]
pub struct Get {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Copy a whole tree.
    #[arg(short, long)]
    pub recursive: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// What to copy.
    #[arg(value_name = "IMAGE:/path")]
    pub target: Target,
    /// Where to: a directory to put it in, or the name it gets; - is standard output.
    pub dest: PathBuf,
}

/// `draconis tar`
#[derive(Debug, Args)]
pub struct Tar {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Archive files with holes as sparse ones: from 1 MiB of holes on, always, or never.
    #[arg(long, value_enum, default_value_t = When::Auto, hide_possible_values = true,
        value_name = "auto|always|never")]
    pub sparse: When,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// What to archive; the whole volume if only IMAGE is given.
    #[arg(value_name = "IMAGE[:/path]")]
    pub target: Target,
}

/// `draconis put`
#[derive(Debug, Args)]
pub struct Put {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Copy whole trees; symbolic links as they are.
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// Take the last argument as the name, never as the directory to put it in.
    #[arg(short = 'T', long)]
    pub no_target_directory: bool,
    /// The owner of everything that is put, instead of each file's own.
    #[arg(long, value_name = "UID:GID")]
    pub owner: Option<Owner>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// What to copy; - is standard input, which needs a name to get.
    #[arg(value_name = "SRC", required = true)]
    pub sources: Vec<PathBuf>,
    /// Where to: a directory to put it in, or the name it gets.
    #[arg(value_name = "IMAGE:/path")]
    pub target: Target,
}

/// `draconis untar`
#[derive(Debug, Args)]
pub struct Untar {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The archive, plain or compressed with gzip, zstd or xz; standard input if left out.
    #[arg(short, long, value_name = "TAR")]
    pub file: Option<PathBuf>,
    /// The owner of everything that is unpacked, instead of each file's own.
    #[arg(long, value_name = "UID:GID")]
    pub owner: Option<Owner>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The directory to unpack it in; the root directory if only IMAGE is given.
    #[arg(value_name = "IMAGE[:/path]")]
    pub target: Target,
}

/// `draconis cp`
#[derive(Debug, Args)]
pub struct Cp {
    /// Where the volumes are.
    #[command(flatten)]
    pub place: Place,
    /// Copy whole trees; symbolic links as they are.
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// Keep owners, times and extended attributes.
    #[arg(short, long)]
    pub preserve: bool,
    /// The same as -rp.
    #[arg(short, long)]
    pub archive: bool,
    /// Take the last argument as the name, never as the directory to copy into.
    #[arg(short = 'T', long)]
    pub no_target_directory: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// What to copy, and where to: a directory to copy into, or the name it gets.
    #[arg(value_name = "IMAGE:/path", num_args = 2.., required = true)]
    pub targets: Vec<Target>,
}

/// `draconis mkdir`
#[derive(Debug, Args)]
pub struct Mkdir {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Make what is missing of the path, too; a directory that is there is no error.
    #[arg(short, long)]
    pub parents: bool,
    /// The mode, as with chmod.
    #[arg(short, long)]
    pub mode: Option<ModeChange>,
    /// The owner, instead of the user who runs this.
    #[arg(long, value_name = "UID:GID")]
    pub owner: Option<Owner>,
    /// The directories.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis rm`
#[derive(Debug, Args)]
pub struct Rm {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Remove directories and all they hold.
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// What is not there is no error.
    #[arg(short, long)]
    pub force: bool,
    /// What to remove.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis mv`
#[derive(Debug, Args)]
pub struct Mv {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Leave what is there.
    #[arg(short, long)]
    pub no_clobber: bool,
    /// Exchange the two.
    #[arg(long, conflicts_with = "no_clobber")]
    pub exchange: bool,
    /// Take the last argument as the name, never as the directory to move into.
    #[arg(short = 'T', long)]
    pub no_target_directory: bool,
    /// What to move, and where to: a directory to move into, or the name it gets.
    #[arg(value_name = "IMAGE:/path", num_args = 2.., required = true)]
    pub targets: Vec<Target>,
}

/// `draconis ln`
#[derive(Debug, Args)]
pub struct Ln {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Make a symbolic link: TARGET is written into it as it is.
    #[arg(short, long)]
    pub symbolic: bool,
    /// Replace what is there.
    #[arg(short, long)]
    pub force: bool,
    /// Take LINK as the name, never as the directory to put it in.
    #[arg(short = 'T', long)]
    pub no_target_directory: bool,
    /// The owner of a symbolic link, instead of the user who runs this.
    #[arg(long, value_name = "UID:GID")]
    pub owner: Option<Owner>,
    /// IMAGE:/path of a file; with -s any path.
    pub target: OsString,
    /// The new name.
    #[arg(value_name = "IMAGE:/path")]
    pub link: Target,
}

/// `draconis chmod`
#[derive(Debug, Args)]
pub struct Chmod {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Change all that is in directories, too.
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// The mode: octal, or such as u+x,go-w.
    #[arg(allow_hyphen_values = true)]
    pub mode: ModeChange,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis chown`, where `-h` is not help.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Chown {
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    pub help: Option<bool>,
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// Change all that is in directories, too; of symbolic links in them, the links.
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Change a symbolic link itself.
    #[arg(short = 'h', long)]
    pub no_dereference: bool,
    /// UID, UID:GID or :GID.
    pub owner: NewOwner,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis touch`
#[derive(Debug, Args)]
pub struct Touch {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The time of access only.
    #[arg(short)]
    pub access: bool,
    /// The time of modification only.
    #[arg(short)]
    pub modification: bool,
    /// Make nothing.
    #[arg(short = 'c', long)]
    pub no_create: bool,
    /// This time instead of now: 2026-11-20, 2026-11-20 23:36:01, or @SECONDS.
    #[arg(short, long, value_name = "TIME", value_parser = text::time)]
    pub date: Option<Time>,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis truncate`
#[derive(Debug, Args)]
pub struct Truncate {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The length, or by how much it grows or shrinks: 64K, +1M, -100.
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: NewSize,
    /// Make nothing.
    #[arg(short = 'c', long)]
    pub no_create: bool,
    /// The files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    pub targets: Vec<Target>,
}

/// `draconis set-label`
#[derive(Debug, Args)]
pub struct SetLabel {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// The file or block device.
    pub image: PathBuf,
    /// The label, at most 16 bytes; nothing takes it away.
    #[arg(default_value = "")]
    pub label: OsString,
}

/// `draconis grow`
#[derive(Debug, Args)]
pub struct Grow {
    /// Where the volume is.
    #[command(flatten)]
    pub place: Place,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub image: PathBuf,
    /// Size of the volume: in KiB, or with K, M, G, T; if left out, all of IMAGE.
    pub size: Option<String>,
}

/// `draconis format`
#[derive(Debug, Args)]
pub struct Format {
    /// The kind of volume: ext2 is the only one yet.
    #[arg(short = 't', value_name = "TYPE", default_value = "ext2")]
    pub kind: String,
    /// Bytes of a block: 1024, 2048, 4096 .. 65536; by the size of the volume if left out.
    #[arg(short = 'b', value_name = "SIZE", value_parser = size)]
    pub block: Option<u64>,
    /// One inode for so many bytes.
    #[arg(short = 'i', value_name = "BYTES_PER_INODE", value_parser = size, conflicts_with = "inodes")]
    pub bytes_per_inode: Option<u64>,
    /// So many inodes.
    #[arg(short = 'N', value_name = "INODES")]
    pub inodes: Option<u32>,
    /// Bytes of an inode.
    #[arg(short = 'I', value_name = "INODE_SIZE", value_parser = size, default_value = "256")]
    pub inode_size: u64,
    /// Label, at most 16 bytes.
    #[arg(short = 'L', value_name = "LABEL", default_value = "")]
    pub label: String,
    /// Identity: a UUID, random, time or clear.
    #[arg(short = 'U', value_name = "UUID", default_value = "random")]
    pub uuid: String,
    /// Features to give or, with ^, to take away, separated by commas.
    #[arg(short = 'O', value_name = "FEATURE,^FEATURE", allow_hyphen_values = true)]
    pub features: Vec<String>,
    /// Blocks kept for the superuser, in percent.
    #[arg(short = 'm', value_name = "PERCENT", default_value = "5")]
    pub reserved: String,
    /// More options, separated by commas; see below.
    #[arg(short = 'E', value_name = "OPTIONS")]
    pub extended: Vec<String>,
    /// Fill the volume from a directory, or from a tar archive, plain or compressed with
    /// gzip, zstd or xz; - is an archive on standard input.
    #[arg(long, value_name = "DIR|TAR|-")]
    pub from: Option<PathBuf>,
    /// Room to leave free where SIZE is left out.
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "from", conflicts_with = "size")]
    pub free: Option<u64>,
    /// Take identity and hash seed from this number instead of at random.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Overwrite what IMAGE holds.
    #[arg(long)]
    pub force: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device; a file that is not there is created.
    pub image: PathBuf,
    /// Size of the volume: in blocks with -b, else in KiB, or with K, M, G, T; if left out,
    /// that of IMAGE, or what the tree needs.
    pub size: Option<String>,
}

/// `draconis store ..`
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Measure a disk, and say which store suits it.
    ///
    /// Measured is a file that is made beside DEVICE and is gone afterwards; a block device
    /// itself only with --destroy. Takes some ten seconds and 256 MiB.
    Probe(StoreProbe),
    /// Make an empty store.
    ///
    /// Layout and sizes follow from what is measured in the file that the store will be in,
    /// or come from --profile. What was chosen is printed with its reasons.
    Create(StoreCreate),
    /// Show layout, sizes and what is used.
    Info(StoreShow),
    /// Check a store without changing it: every sum, map and count.
    #[command(after_help = "Exit status: 0 clean, 4 damaged, 8 it cannot be checked.")]
    Check(StoreCheck),
    /// List objects: number and length.
    Ls(StoreShow),
    /// Put a file into a store as an object, or in place of one.
    ///
    /// Up to 64 MiB an object is replaced at once or not at all, whatever happens meanwhile;
    /// what is longer is written piece by piece.
    Put(StorePut),
    /// Write an object to a file or to standard output.
    Get(StoreGet),
    /// Write a file behind the end of an object.
    Append(StoreAppend),
    /// Remove objects, all at once.
    Rm(StoreRm),
}

/// `draconis store probe`
#[derive(Debug, Args)]
pub struct StoreProbe {
    /// Measure the block device itself: what it holds is lost.
    #[arg(long)]
    pub destroy: bool,
    /// Write JSON, which store create --profile reads.
    #[arg(long)]
    pub json: bool,
    /// Room to measure in.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<u64>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// A directory, a file or a block device.
    pub device: PathBuf,
}

/// `draconis store create`
#[derive(Debug, Args)]
pub struct StoreCreate {
    /// Length of the store (K, M, G, T allowed); if left out, that of DEVICE.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<u64>,
    /// Leave a file one hole instead of writing it out.
    ///
    /// It is made at once and takes as much room as what it holds, and gives room back. But
    /// whenever something is to be durable, the file system below has to find room for it
    /// first: that is half as fast, or less.
    #[arg(long)]
    pub sparse: bool,
    /// Choose the layout: log for disks that seek, cow for flash.
    #[arg(long, value_enum)]
    pub layout: Option<Layout>,
    /// Take layout and sizes from this file instead of measuring; - is standard input.
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Overwrite what a file holds.
    #[arg(long)]
    pub force: bool,
    /// Measure a block device and make a store of it: what it holds is lost.
    #[arg(long)]
    pub destroy: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device; a file that is not there is created.
    pub device: PathBuf,
}

/// A layout, as `--layout` spells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Layout {
    /// One log.
    Log,
    /// Several, by how long things live.
    Cow,
}

/// `draconis store info` and `ls`
#[derive(Debug, Args)]
pub struct StoreShow {
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
    /// The file or block device.
    pub device: PathBuf,
}

/// `draconis store check`
#[derive(Debug, Args)]
pub struct StoreCheck {
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub device: PathBuf,
}

/// `draconis store put`
#[derive(Debug, Args)]
pub struct StorePut {
    /// What is known of its future: rewritten soon (hot) or kept (cold).
    #[arg(long, value_enum)]
    pub hint: Option<Heat>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub device: PathBuf,
    /// The number of the object to replace, or new: its number is printed.
    #[arg(value_name = "OBJECT|new")]
    pub object: ObjectName,
    /// What to put; standard input if left out or -.
    pub file: Option<PathBuf>,
}

/// What is known of an object's future, as `--hint` spells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Heat {
    /// Rewritten soon.
    Hot,
    /// Kept.
    Cold,
}

/// An object on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectName {
    /// One that is to be made.
    New,
    /// One that is there.
    Number(u64),
}

impl std::str::FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "new" => Ok(Self::New),
            _ => number(text).map(Self::Number).map_err(|_| "a number, or new".to_string()),
        }
    }
}

/// Parses the number of an object for clap.
fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "not a number; draconis store ls shows them".to_string())
}

/// `draconis store get`
#[derive(Debug, Args)]
pub struct StoreGet {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub device: PathBuf,
    /// The number of the object.
    #[arg(value_parser = number)]
    pub object: u64,
    /// Where to; standard output if left out or -.
    pub file: Option<PathBuf>,
}

/// `draconis store append`
#[derive(Debug, Args)]
pub struct StoreAppend {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub device: PathBuf,
    /// The number of the object.
    #[arg(value_parser = number)]
    pub object: u64,
    /// What to append; standard input if left out or -.
    pub file: Option<PathBuf>,
}

/// `draconis store rm`
#[derive(Debug, Args)]
pub struct StoreRm {
    /// What is not there is no error.
    #[arg(short, long)]
    pub force: bool,
    /// The file or block device.
    pub device: PathBuf,
    /// The numbers of the objects.
    #[arg(value_name = "OBJECT", required = true, value_parser = number)]
    pub objects: Vec<u64>,
}

/// `draconis kv ..`
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Give a key a value.
    Put(KvPut),
    /// Write the value of a key to standard output, as it is.
    Get(KvGet),
    /// Take keys away, all at once.
    Del(KvDel),
    /// Write keys and values in order: key, tab, value.
    Scan(KvScan),
    /// Count keys and bytes.
    Stats(KvStats),
    /// Put what a file says: lines of key, tab, value.
    ///
    /// Lines come in by lots of 1 MiB: after a power cut the first ones are there, up to
    /// some line.
    Load(KvLoad),
}

/// `draconis kv put`
#[derive(Debug, Args)]
pub struct KvPut {
    /// The file or block device.
    pub store: PathBuf,
    /// The key.
    pub key: OsString,
    /// The value; standard input if left out.
    pub value: Option<OsString>,
}

/// `draconis kv get`
#[derive(Debug, Args)]
pub struct KvGet {
    /// The file or block device.
    pub store: PathBuf,
    /// The key.
    pub key: OsString,
}

/// `draconis kv del`
#[derive(Debug, Args)]
pub struct KvDel {
    /// The file or block device.
    pub store: PathBuf,
    /// The keys; one that is not there is no error.
    #[arg(value_name = "KEY", required = true)]
    pub keys: Vec<OsString>,
}

/// `draconis kv scan`
#[derive(Debug, Args)]
pub struct KvScan {
    /// Begin at this key.
    #[arg(long, value_name = "KEY")]
    pub from: Option<OsString>,
    /// End before this key.
    #[arg(long, value_name = "KEY")]
    pub to: Option<OsString>,
    /// Only keys that begin like this.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["from", "to"])]
    pub prefix: Option<OsString>,
    /// From the last to the first.
    #[arg(short, long)]
    pub reverse: bool,
    /// At most so many.
    #[arg(short = 'n', long, value_name = "N")]
    pub limit: Option<usize>,
    /// Keys only.
    #[arg(short, long)]
    pub keys: bool,
    /// The file or block device.
    pub store: PathBuf,
}

/// `draconis kv stats`
#[derive(Debug, Args)]
pub struct KvStats {
    /// Write JSON.
    #[arg(long)]
    pub json: bool,
    /// The file or block device.
    pub store: PathBuf,
}

/// `draconis kv load`
#[derive(Debug, Args)]
pub struct KvLoad {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    pub progress: When,
    /// The file or block device.
    pub store: PathBuf,
    /// The lines; - is standard input.
    #[arg(value_name = "FILE|-")]
    pub file: PathBuf,
}

/// When to show progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum When {
    /// On a terminal, if it takes longer than two seconds.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn flags_do_not_contradict() {
        Cli::command().debug_assert();
    }

    #[test]
    fn modes_and_lengths_may_begin_with_a_hyphen() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.command);
        let Ok(Command::Chmod(chmod)) = parse("draconis chmod -R -x a.img:/b") else { panic!() };
        assert!(chmod.recursive && chmod.mode == "-x".parse().unwrap());
        assert!(matches!(parse("draconis truncate -s -5K a.img:/b"), Ok(Command::Truncate(_))));
        assert!(matches!(parse("draconis chown -h 5 a.img:/b"), Ok(Command::Chown(_))));
        assert!(parse("draconis mv a.img:/b").is_err());
        assert!(parse("draconis put a.img:/b").is_err());
    }
}
