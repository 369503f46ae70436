//! A host file that gets its name once it is whole.
//!
//! ```text
//!   begin ─▶ .draconis-PID-N.part ─ contents, attributes ─ publish ─▶ NAME
//!                   └─ dropped, or a signal ends the process ─▶ removed
//! ```
//! Law 1: a part of a file never has its name. A file that has the name keeps it until then.
//! Law 2: only what ends the process without a signal handler leaves the `.part`: SIGKILL, a power
//! cut.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use draconis_access::destination::ReadSources;
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// Names that are tried: others may be left over from killed processes.
const MAX_NAMES: u32 = 1000;

/// Files that this process has not published yet, in their directories.
static UNPUBLISHED: Mutex<Vec<(Arc<OwnedFd>, Vec<u8>)>> = Mutex::new(vec![]);

/// Removes the files that were not published, and lets no other be created: the process ends.
pub fn remove_unpublished() {
    let unpublished = UNPUBLISHED.lock();
    for (dir, part) in unpublished.iter() {
        let _ = rustix::fs::unlinkat(&**dir, &part[..], AtFlags::empty());
    }
    std::mem::forget(unpublished);
}

/// A new file, under a name of its own until it is published. Dropped, it is removed.
pub struct NewFile {
    dir: Arc<OwnedFd>,
    part: Vec<u8>,
}

impl NewFile {
    /// Creates a file in `dir` by `create`, which gets its temporary name.
    ///
    /// # Errors
    /// That of `create`.
    pub fn begin(
        dir: Arc<OwnedFd>,
        mut create: impl FnMut(&str) -> Result<(), Errno>,
    ) -> Result<Self, Errno> {
        let process = std::process::id();
        for nth in 0..MAX_NAMES {
            let part = format!(".draconis-{process}-{nth}.part");
            let mut unpublished = UNPUBLISHED.lock();
            match create(&part) {
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
                Ok(()) => {
                    let part = part.into_bytes();
                    unpublished.push((dir.clone(), part.clone()));
                    return Ok(Self { dir, part });
                }
            }
        }
        Err(Errno::EXIST)
    }

    /// Takes a file that has its name already, for one that is removed unless it is kept.
    pub fn with_name(dir: Arc<OwnedFd>, name: &[u8]) -> Self {
        UNPUBLISHED.lock().push((dir.clone(), name.to_vec()));
        Self { dir, part: name.to_vec() }
    }

    /// Keeps the file under the name that it has.
    pub fn keep(mut self) {
        let part = std::mem::take(&mut self.part);
        UNPUBLISHED.lock().retain(|(_, other)| *other != part);
    }

    /// Returns the directory of the file.
    pub fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Gives the file its name. `replaces` says whether it takes that of an existing file.
    ///
    /// # Errors
    /// The system's error; [`Errno::EXIST`] if a file has the name and is not replaced.
    pub fn publish(self, name: &[u8], replaces: bool) -> Result<(), Errno> {
        let (dir, part) = (&*self.dir, &self.part[..]);
        let _unpublished = UNPUBLISHED.lock();
        let flags = if replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match rustix::fs::renameat_with(dir, part, dir, name, flags) {
            // A file system without the flag, such as NFS. The name of the part is removed below.
            Err(Errno::INVAL) if !replaces => {
                rustix::fs::linkat(dir, part, dir, name, AtFlags::empty())
            }
            renamed => renamed,
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.part.is_empty() {
            return;
        }
        let mut unpublished = UNPUBLISHED.lock();
        unpublished.retain(|(_, part)| *part != self.part);
        // Usually gone. A rename between two names of one file does nothing, and leaves it.
        let _ = rustix::fs::unlinkat(&*self.dir, &self.part[..], AtFlags::empty());
    }
}

/// An output file that is named by its path.
pub struct OutputFile {
    /// The file and its final name; `None` for what is written in place, such as a pipe.
    new: Option<(NewFile, Vec<u8>)>,
    dir: Arc<OwnedFd>,
}

impl OutputFile {
    /// Creates the file for `dest`, which must not be one of the sources or in use.
    ///
    /// # Errors
    /// `dest` is a source, in use, or not writable.
    pub fn begin(sources: &ReadSources, dest: &Path) -> anyhow::Result<(File, Self)> {
        let shown = || dest.shown().to_string();
        // The file behind a link is replaced, not the link.
        let real = dest.canonicalize().unwrap_or_else(|_| dest.to_path_buf());
        let parent = match real.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let name = real.file_name().with_context(|| format!("{}: not a name", shown()))?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent, flags, Mode::empty()).with_context(shown)?;
        let dir = Arc::new(dir);
        let old = match std::fs::metadata(&real) {
            Ok(old) if old.is_file() => {
                // A user who cannot write to a file does not replace it either.
                File::options().write(true).open(&real).with_context(shown)?;
                Some(old)
            }
            Err(_) if std::fs::symlink_metadata(dest).is_err() => None,
            _ => return Ok((sources.create(dest)?, Self { new: None, dir })),
        };
        sources.refuse_source_as_destination_at(&*dir, name.as_bytes(), &shown())?;
        let mut made = None;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let new = NewFile::begin(dir.clone(), |part| {
            made = Some(rustix::fs::openat(&*dir, part, flags, Mode::from_raw_mode(0o666))?);
            Ok(())
        });
        let new = match (new, &old) {
            // The directory takes no new files, but the file can be written.
            (Err(Errno::ACCESS | Errno::PERM), Some(_)) => {
                return Ok((sources.create(dest)?, Self { new: None, dir }));
            }
            (new, _) => new.with_context(shown)?,
        };
        let file = File::from(made.with_context(shown)?);
        if let Some(old) = old {
            // Only root can keep another's owner.
            let _ = std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()));
            let mode = std::fs::Permissions::from_mode(old.mode() & 0o777);
            file.set_permissions(mode).with_context(shown)?;
        }
        Ok((file, Self { new: Some((new, name.as_bytes().to_vec())), dir }))
    }

    /// Returns the directory of the file, for the sandbox.
    pub fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// The system's error.
    pub fn publish(self) -> Result<(), Errno> {
        self.new.map_or(Ok(()), |(file, name)| file.publish(&name, true))
    }
}
