//! `draconis get`: a file or a tree of a volume, copied into a directory.
//!
//! Law 1: nothing is created outside the destination, whatever names, links or twins the
//! volume holds: every path is opened beneath it and through no symbolic link, and the
//! kernel holds the process to that directory besides.
//! Law 2: what may not be restored without privilege (owners, devices) is left out as `cp`
//! does; what should have been restored and was not is told, and the exit status says so.
//! Law 3: nothing that is read, mounted or attached to a loop device is replaced.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::destination::Sources;
use draconis_access::walk::{Item, Piece, Pieces, Walk, queue, read_ahead};
use draconis_exchange::contract::{Attributes, Kind, Time};
use draconis_ext::{Follow, Volume};
use draconis_service::sandbox::open_beneath;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::change::tell;
use crate::image::{self, Place, find};
use crate::progress::{Progress, When};
use crate::say;
use crate::target::Target;
use crate::text::printable;

/// Copy files from a volume to the host.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Copy directories recursively; copy symbolic links as links.
    #[arg(short, long)]
    recursive: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Source files.
    #[arg(value_name = "IMAGE:/path")]
    target: Target,
    /// Destination file or directory; - for standard output.
    dest: PathBuf,
}

/// Directories that are kept open.
const OPEN_DIRS: usize = 256;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.dest == Path::new("-") {
        return to_output(arguments);
    }
    let (parent, name) = destination(arguments)?;
    // Loop devices are only seen before the process is confined.
    let sources = image::sources(&arguments.target.image, &arguments.place);
    let beneath = open_beneath(&parent).with_context(|| parent.display().to_string())?;
    let root = rustix::fs::open(&parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| parent.display().to_string())?;
    sources.refuse(&parent.join(OsStr::from_bytes(&name)))?;
    let is_root = rustix::process::geteuid().is_root();
    rustix::process::umask(Mode::empty());
    let tree = image::open(&arguments.target.image, &arguments.place, Some(beneath.as_fd()))?;
    let volume = tree.volume();
    let follow = if arguments.recursive { Follow::No } else { Follow::Yes };
    let top = find(volume, &arguments.target, follow)?;
    if !arguments.recursive && volume.inode(top)?.kind == Kind::Directory {
        bail!("{} is a directory; -r copies it with all it holds", arguments.target);
    }
    let mut complain = |error: &anyhow::Error| say::complain(error);
    let walk = Walk::new(volume, top, &arguments.target.to_string(), &mut complain)?;
    let plan = walk.plan();
    let failed = std::thread::scope(|scope| {
        let (send, pieces) = queue();
        let (walk, plan) = (&walk, &plan);
        scope.spawn(move || read_ahead(volume, walk, plan, send));
        let mut copy = Copy {
            volume,
            walk,
            root,
            parent,
            name,
            sources,
            is_root,
            dirs: HashMap::new(),
            pieces,
            progress: Progress::new(arguments.progress, walk.bytes),
            failed: false,
            is_full: false,
        };
        copy.all(plan);
        copy.failed
    });
    Ok(if failed || walk.damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A file to standard output, by a process that can create nothing.
fn to_output(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    if arguments.recursive {
        bail!(
            "-: standard output takes no tree; draconis tar {target} writes an archive, and ./- \
             is a directory of that name"
        );
    }
    let tree = image::open(&target.image, &arguments.place, None)?;
    super::cat::write_file(tree.volume(), target)?;
    Ok(ExitCode::SUCCESS)
}

/// The directory to create in, and the name that the top gets there. As with `cp`: into
/// DEST if it is a directory, else as DEST. The root directory has no name of its own and
/// becomes DEST.
fn destination(arguments: &Arguments) -> anyhow::Result<(PathBuf, Vec<u8>)> {
    let dest = &arguments.dest;
    let own = arguments.target.file_name();
    if dest.is_dir() {
        return Ok((dest.clone(), own.to_vec()));
    }
    let name = dest.file_name().with_context(|| format!("{}: not a name", dest.display()))?;
    let parent = match dest.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => Path::new(".").to_path_buf(),
    };
    if !parent.is_dir() {
        bail!("{}: no such directory", parent.display());
    }
    Ok((parent, name.as_bytes().to_vec()))
}

struct Copy<'a> {
    volume: &'a Volume,
    walk: &'a Walk,
    root: OwnedFd,
    /// Its path, for messages.
    parent: PathBuf,
    /// Name of the top beneath `root`; empty if it is `root` itself.
    name: Vec<u8>,
    sources: Sources,
    is_root: bool,
    dirs: HashMap<Vec<u8>, Rc<OwnedFd>>,
    pieces: Pieces,
    progress: Progress,
    failed: bool,
    /// The destination takes nothing more: there is no use in going on.
    is_full: bool,
}

/// A path beneath the destination.
struct There {
    dir: Rc<OwnedFd>,
    name: Vec<u8>,
}

/// Why something was not created.
enum Failure {
    System(Errno),
    /// What has the name may not be replaced.
    Refused(anyhow::Error),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

impl Copy<'_> {
    fn all(&mut self, plan: &[usize]) {
        for &at in plan {
            if self.is_full {
                break;
            }
            let item = &self.walk.items[at];
            let has_pieces = item.attributes.kind == Kind::File && item.link_to.is_none();
            if let Err(failure) = self.item(item) {
                match failure {
                    Failure::System(errno) => self.complain(item, "cannot be created", errno),
                    Failure::Refused(error) => {
                        self.failed = true;
                        say::complain(&error);
                    }
                }
                if has_pieces {
                    while let Some(Piece::Data(..)) = self.pieces.next() {}
                }
            }
        }
        // Directories get their modes and times last, the deepest first: a read-only one
        // could not be filled, and filling it changes its time.
        for &at in plan.iter().rev() {
            let item = &self.walk.items[at];
            if item.attributes.kind == Kind::Directory
                && let Err(errno) = self.finish_dir(item)
                // Those that were not reached are missing.
                && !self.is_full
            {
                self.complain(item, "attributes cannot be set", errno);
            }
        }
    }

    fn complain(&mut self, item: &Item, what: &str, errno: Errno) {
        self.failed = true;
        self.is_full |= matches!(errno, Errno::NOSPC | Errno::DQUOT | Errno::ROFS);
        let path = self.shown(item);
        let is_last = !self.is_full || self.walk.items.len() == 1;
        let rest = if is_last { "" } else { "; stopped, what follows is not copied" };
        say::complain(&anyhow::Error::from(errno).context(format!("{path}: {what}{rest}")));
    }

    /// Where an item is put, as messages have it.
    fn shown(&self, item: &Item) -> String {
        let path = self.path(item);
        let path = printable(path.strip_suffix(b"/").unwrap_or(&path));
        self.parent.join(path).display().to_string()
    }

    fn path(&self, item: &Item) -> Vec<u8> {
        crate::target::join(&self.name, &item.path)
    }

    fn there(&mut self, item: &Item) -> Result<There, Errno> {
        let path = self.path(item);
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        let cut = path.iter().rposition(|&b| b == b'/');
        let (dir, name) = cut.map_or((&b""[..], path), |cut| (&path[..cut], &path[cut + 1..]));
        Ok(There { dir: self.dir(dir)?, name: name.to_vec() })
    }

    fn dir(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, Errno> {
        if let Some(open) = self.dirs.get(path) {
            return Ok(open.clone());
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let name = if path.is_empty() { b"." } else { path };
        let open = Rc::new(rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve)?);
        if self.dirs.len() >= OPEN_DIRS {
            self.dirs.clear();
        }
        self.dirs.insert(path.to_vec(), open.clone());
        Ok(open)
    }

    /// Creates; what has the name already goes first, as with `tar x`. A directory stays, and so
    /// does what is read or in use.
    fn replacing(
        &self,
        item: &Item,
        there: &There,
        mut create: impl FnMut() -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        match create() {
            Err(Errno::EXIST) => {
                let refused = self.sources.refuse_at(&*there.dir, &there.name, &self.shown(item));
                refused.map_err(Failure::Refused)?;
                rustix::fs::unlinkat(&there.dir, &there.name[..], AtFlags::empty())?;
                Ok(create()?)
            }
            created => Ok(created?),
        }
    }

    fn item(&mut self, item: &Item) -> Result<(), Failure> {
        if item.path.is_empty() && self.name.is_empty() {
            return Ok(());
        }
        let there = self.there(item)?;
        if let Some(first) = item.link_to {
            let target = self.there(&self.walk.items[first])?;
            return self.replacing(item, &there, || {
                let (from, to) = (&target.dir, &there.dir);
                rustix::fs::linkat(from, &target.name[..], to, &there.name[..], AtFlags::empty())
            });
        }
        let attributes = &item.attributes;
        let private = Mode::from_raw_mode(0o600);
        match attributes.kind {
            Kind::Directory => match rustix::fs::mkdirat(&there.dir, &there.name[..], Mode::RWXU) {
                // It may be there already, but it must not be a link to elsewhere.
                Err(Errno::EXIST) => {
                    let path = self.path(item);
                    Ok(self.dir(&path).map(drop)?)
                }
                made => Ok(made?),
            },
            Kind::File => self.file(item, &there),
            Kind::Symlink => {
                let target = self.volume.read_link_of(item.inode()).map_err(|_| Errno::UCLEAN)?;
                self.replacing(item, &there, || {
                    rustix::fs::symlinkat(&target[..], &there.dir, &there.name[..])
                })?;
                Ok(self.finish_name(attributes, &there)?)
            }
            kind => {
                let device = rustix::fs::makedev(attributes.device.0, attributes.device.1);
                let file_type = match kind {
                    Kind::CharDevice => FileType::CharacterDevice,
                    Kind::BlockDevice => FileType::BlockDevice,
                    Kind::Socket => FileType::Socket,
                    _ => FileType::Fifo,
                };
                self.replacing(item, &there, || {
                    rustix::fs::mknodat(&there.dir, &there.name[..], file_type, private, device)
                })?;
                Ok(self.finish_name(attributes, &there)?)
            }
        }
    }

    fn file(&mut self, item: &Item, there: &There) -> Result<(), Failure> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let private = Mode::from_raw_mode(0o600);
        let mut made = None;
        self.replacing(item, there, || {
            made = Some(rustix::fs::openat(&there.dir, &there.name[..], flags, private)?);
            Ok(())
        })?;
        let Some(file) = made else { return Err(Errno::IO.into()) };
        let (mut failed, mut end) = (None, 0);
        while let Some(piece) = self.pieces.next() {
            match piece {
                Piece::Data(offset, data) => {
                    end = offset + data.len() as u64;
                    if failed.is_none() {
                        failed = write_at(&file, offset, &data).err();
                    }
                    if failed == Some(Errno::NOSPC) {
                        break;
                    }
                    self.progress.add(data.len() as u64);
                }
                Piece::End(read) => {
                    if let Err(error) = read {
                        self.failed = true;
                        say::complain(&tell(&self.shown(item), error));
                    }
                    break;
                }
            }
        }
        if let Some(errno) = failed {
            self.complain(item, "cannot be written", errno);
            return Ok(());
        }
        if end != item.attributes.size_bytes {
            // A hole at the end, or contents that could not be read.
            rustix::fs::ftruncate(&file, item.attributes.size_bytes)?;
        }
        Ok(self.finish(item, &file)?)
    }

    fn finish_dir(&mut self, item: &Item) -> Result<(), Errno> {
        let path = self.path(item);
        let dir = self.dir(path.strip_suffix(b"/").unwrap_or(&path))?;
        self.finish(item, &*dir)
    }

    /// Owner, attributes, mode and times, in the order in which they do not undo each other.
    fn finish(&mut self, item: &Item, file: impl AsFd) -> Result<(), Errno> {
        let attributes = &item.attributes;
        let mut mode = attributes.mode & 0o7777;
        if self.is_root {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        } else if attributes.kind == Kind::File {
            // A setuid file would be one of the wrong user.
            mode &= 0o1777;
        }
        if !attributes.no_xattrs {
            self.xattrs(item, &file)?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
        rustix::fs::futimens(&file, &times(attributes))
    }

    fn xattrs(&mut self, item: &Item, file: impl AsFd) -> Result<(), Errno> {
        let number = item.inode().number;
        for name in self.volume.xattr_names(number).map_err(|_| Errno::UCLEAN)? {
            let value = self.volume.xattr(number, &name).map_err(|_| Errno::UCLEAN)?;
            match rustix::fs::fsetxattr(&file, &name[..], &value, XattrFlags::empty()) {
                // Only root may set these; a destination without attributes takes none.
                Err(Errno::PERM | Errno::OPNOTSUPP) if !self.is_root => {}
                set => set?,
            }
        }
        Ok(())
    }

    /// Owner, mode and times of something that is not opened.
    fn finish_name(&self, attributes: &Attributes, there: &There) -> Result<(), Errno> {
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        let name = &there.name[..];
        if self.is_root {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            rustix::fs::chownat(&there.dir, name, Some(uid), Some(gid), nofollow)?;
        }
        if attributes.kind != Kind::Symlink {
            let mode = Mode::from_raw_mode(attributes.mode & 0o7777);
            rustix::fs::chmodat(&there.dir, name, mode, AtFlags::empty())?;
        }
        rustix::fs::utimensat(&there.dir, name, &times(attributes), nofollow)
    }
}

fn write_at(file: impl AsFd, offset: u64, data: &[u8]) -> Result<(), Errno> {
    let mut put = 0;
    while put < data.len() {
        match rustix::io::pwrite(&file, &data[put..], offset + put as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => put += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn times(attributes: &Attributes) -> Timestamps {
    let time = |time: Time| Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    Timestamps {
        last_access: time(attributes.accessed),
        last_modification: time(attributes.modified),
    }
}
