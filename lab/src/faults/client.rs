//! A client: makes random calls, and knows the expected result of each.

mod ranges;

use std::collections::BTreeSet;
use std::fs::{File as Open, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use draconis_device::Random;
use rustix::fs::{Advice, AtFlags, CWD, RenameFlags, StatxFlags, XattrFlags};

use super::SharedState;
use super::model::{ModelFile, NamedObject, TreeModel};

/// Maximum number of names of a client.
const MAX_NAMES: u64 = 40;
/// Maximum length of a file, in bytes.
const MAX_FILE_BYTES: u64 = 200 << 10;
/// Maximum number of open files.
const MAX_OPEN_FILES: usize = 6;
const XATTR_NAME: &str = "user.note";

pub(super) struct StressClient {
    dir: PathBuf,
    nth: u64,
    random: Random,
    model: TreeModel,
    /// Open files, by index in the model; they may be orphans.
    held: Vec<(usize, Open)>,
    made: u64,
}

impl StressClient {
    pub(super) fn new(
        at: &Path,
        nth: u64,
        seed: u64,
        shared: &SharedState,
    ) -> anyhow::Result<Self> {
        let dir = at.join(format!("client-{nth}"));
        shared.timed_call(|| std::fs::create_dir(&dir))?;
        let random = Random::new(seed.wrapping_mul(1000) + nth);
        Ok(Self { dir, nth, random, model: TreeModel::default(), held: vec![], made: 0 })
    }

    /// Works until the test ends; fails on a wrong result of a call.
    pub(super) fn run_until_over(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let mut calls = 0u64;
        while !shared.is_over() {
            calls += 1;
            let what = self.random.next_below(24);
            let done = self.random_operation(what, shared);
            if done.is_err() {
                // Stops the other clients.
                shared.end();
            }
            done.with_context(|| format!("client {}, step {calls}, call {what}", self.nth))?;
        }
        Ok(())
    }

    /// Closes all files.
    pub(super) fn close_files(&mut self) {
        self.held.clear();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        // Varying name lengths, which fill directory blocks unevenly.
        let tail = "x".repeat(self.random.next_below(40) as usize);
        format!("{:06}{tail}", self.made)
    }

    fn random_bytes(&mut self, most: u64) -> Vec<u8> {
        let mut bytes = vec![0; 1 + self.random.next_below(most) as usize];
        self.random.fill(&mut bytes);
        bytes
    }

    fn pick_file(&mut self) -> Option<(String, usize)> {
        let nth = self.random.next_u64();
        let name = self.model.pick_name(nth, |named| matches!(named, NamedObject::File(_)))?;
        match self.model.names.get(&name) {
            Some(NamedObject::File(file)) => Some((name, *file)),
            _ => None,
        }
    }

    fn random_operation(&mut self, what: u64, shared: &SharedState) -> anyhow::Result<()> {
        match what {
            0..3 if (self.model.names.len() as u64) < MAX_NAMES => self.make_file(shared),
            3 if (self.model.names.len() as u64) < MAX_NAMES => self.create_dir_or_symlink(shared),
            4 => self.link(shared),
            5 => self.rename(shared),
            6 | 0..3 => self.unlink(shared),
            3 => self.remove_dir_or_symlink(shared),
            7 => self.change_attributes(shared),
            8 => self.open_and_hold_file(shared),
            9 => self.compare_listing(shared),
            10 => self.sync(shared),
            11 => self.change_xattr(shared),
            12 => self.truncate(shared),
            13 => self.read(shared),
            14 => self.check_attributes(shared),
            15 => self.append(shared),
            16 | 17 => self.write_held_file(shared),
            18 => self.read_held_file(shared),
            19 | 20 => self.fallocate_range(shared),
            21 => self.write_direct(shared),
            22 => self.change_inode_flags(shared),
            _ => self.write(shared),
        }
    }

    fn make_file(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let name = self.new_name();
        let mut how = OpenOptions::new();
        how.read(true).write(true).create_new(true).mode(0o640);
        let open = shared.timed_call(|| how.open(self.path(&name))).context("create")?;
        let seen = open.metadata().context("fstat")?;
        ensure!(seen.nlink() == 1 && seen.len() == 0, "a new file has {seen:?}");
        let others = self.model.files.iter().filter(|file| file.links > 0);
        let others = others.filter(|file| file.inode == seen.ino()).count();
        ensure!(others == 0, "inode {} was given out twice", seen.ino());
        let file = ModelFile { inode: seen.ino(), links: 1, mode: 0o640, ..ModelFile::default() };
        self.model.files.push(file);
        let nth = self.model.files.len() - 1;
        self.model.names.insert(name, NamedObject::File(nth));
        if self.random.once_in(2) {
            let bytes = self.random_bytes(9000);
            shared.timed_call(|| open.write_all_at(&bytes, 0)).context("write")?;
            self.model.files[nth].bytes = bytes;
        }
        Ok(())
    }

    fn create_dir_or_symlink(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let name = self.new_name();
        let path = self.path(&name);
        let named = if self.random.once_in(2) {
            shared.timed_call(|| std::fs::create_dir(&path)).context("mkdir")?;
            NamedObject::Directory(std::fs::symlink_metadata(&path)?.ino())
        } else {
            let target = "t".repeat(1 + self.random.next_below(100) as usize);
            shared.timed_call(|| std::os::unix::fs::symlink(&target, &path)).context("symlink")?;
            NamedObject::Link(target)
        };
        self.model.names.insert(name, named);
        Ok(())
    }

    fn remove_dir_or_symlink(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let Some(name) = self.model.pick_name(nth, |named| !matches!(named, NamedObject::File(_)))
        else {
            return self.unlink(shared);
        };
        let path = self.path(&name);
        match self.model.names.get(&name) {
            Some(NamedObject::Directory(_)) => shared.timed_call(|| std::fs::remove_dir(&path)),
            _ => shared.timed_call(|| std::fs::remove_file(&path)),
        }
        .context("remove")?;
        self.model.remove_name(&name);
        Ok(())
    }

    fn link(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        if self.model.names.len() as u64 >= MAX_NAMES {
            return Ok(());
        }
        let new = self.new_name();
        let (from, to) = (self.path(&name), self.path(&new));
        shared.timed_call(|| std::fs::hard_link(from, to)).context("link")?;
        self.model.files[file].links += 1;
        self.model.names.insert(new, NamedObject::File(file));
        Ok(())
    }

    fn rename(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let over = self.pick_file().filter(|(_, other)| *other != file && self.random.once_in(2));
        let new = match &over {
            Some((over, _)) => over.clone(),
            None => self.new_name(),
        };
        let flags = if over.is_none() { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        let (from, to) = (self.path(&name), self.path(&new));
        shared
            .timed_call(|| rustix::fs::renameat_with(CWD, from, CWD, to, flags))
            .context("rename")?;
        let named = self.model.names.remove(&name).context("the model lost a name")?;
        self.model.remove_name(&new);
        self.model.names.insert(new, named);
        Ok(())
    }

    fn unlink(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, _)) = self.pick_file() else { return Ok(()) };
        let path = self.path(&name);
        shared.timed_call(|| std::fs::remove_file(path)).context("unlink")?;
        self.model.remove_name(&name);
        Ok(())
    }

    fn change_attributes(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let mode = [0o600, 0o644, 0o755, 0o440][self.random.next_below(4) as usize];
        let path = self.path(&name);
        let permissions = std::fs::Permissions::from_mode(mode);
        shared.timed_call(|| std::fs::set_permissions(path, permissions)).context("chmod")?;
        self.model.files[file].mode = mode;
        Ok(())
    }

    fn open_and_hold_file(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        if self.held.len() >= MAX_OPEN_FILES {
            let nth = self.random.next_below(MAX_OPEN_FILES as u64) as usize;
            self.held.swap_remove(nth);
        }
        let path = self.path(&name);
        let mut how = OpenOptions::new();
        let open = shared.timed_call(|| how.read(true).write(true).open(path)).context("open")?;
        self.held.push((file, open));
        Ok(())
    }

    fn compare_listing(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let listed = shared.timed_call(|| -> std::io::Result<BTreeSet<String>> {
            let all = std::fs::read_dir(&self.dir)?;
            all.map(|one| Ok(one?.file_name().to_string_lossy().into_owned())).collect()
        });
        let listed = listed.context("list")?;
        let known: BTreeSet<String> = self.model.names.keys().cloned().collect();
        ensure!(
            listed == known,
            "listed are {:?} beside, missing are {:?}",
            listed.difference(&known).collect::<Vec<_>>(),
            known.difference(&listed).collect::<Vec<_>>(),
        );
        Ok(())
    }

    fn sync(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let Some((_, open)) = pick_nth(&self.held, nth) else { return Ok(()) };
        shared.timed_call(|| open.sync_all()).context("fsync")
    }

    fn change_xattr(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let path = self.path(&name);
        if self.model.files[file].note.is_some() {
            shared
                .timed_call(|| rustix::fs::removexattr(&path, XATTR_NAME))
                .context("removexattr")?;
            self.model.files[file].note = None;
        } else {
            let note = self.random_bytes(60);
            let flags = XattrFlags::CREATE;
            shared
                .timed_call(|| rustix::fs::setxattr(&path, XATTR_NAME, &note, flags))
                .context("setxattr")?;
            self.model.files[file].note = Some(note);
        }
        Ok(())
    }

    fn truncate(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let len = self.random.next_below(MAX_FILE_BYTES / 4);
        let Some((file, open)) = pick_nth(&self.held, nth) else { return Ok(()) };
        shared.timed_call(|| open.set_len(len)).context("ftruncate")?;
        self.model.files[*file].bytes.resize(len as usize, 0);
        Ok(())
    }

    fn write(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let path = self.path(&name);
        // Opening fails only if the mode forbids writing and the client is not root.
        let open = match shared.timed_call(|| OpenOptions::new().write(true).open(path)) {
            Err(_) if self.model.files[file].mode & 0o200 == 0 => return Ok(()),
            open => open.context("open")?,
        };
        self.write_at(file, &open, shared)
    }

    fn write_held_file(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let Some((file, open)) = pick_nth(&self.held, nth) else { return Ok(()) };
        let (file, open) = (*file, open.try_clone()?);
        self.write_at(file, &open, shared)
    }

    fn write_at(&mut self, file: usize, open: &Open, shared: &SharedState) -> anyhow::Result<()> {
        let at = self.random.next_below(MAX_FILE_BYTES - 70_000);
        let most = if self.random.once_in(4) { 70_000 } else { 5000 };
        let bytes = self.random_bytes(most);
        shared.timed_call(|| open.write_all_at(&bytes, at)).context("write")?;
        let (at, end) = (at as usize, at as usize + bytes.len());
        let whole = &mut self.model.files[file].bytes;
        whole.resize(whole.len().max(end), 0);
        whole[at..end].copy_from_slice(&bytes);
        Ok(())
    }

    fn append(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        use std::io::Write;
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        if self.model.files[file].bytes.len() as u64 > MAX_FILE_BYTES {
            return Ok(());
        }
        let path = self.path(&name);
        let mut open = match OpenOptions::new().append(true).open(path) {
            Err(_) if self.model.files[file].mode & 0o200 == 0 => return Ok(()),
            open => open.context("open")?,
        };
        let bytes = self.random_bytes(3000);
        let written = shared.timed_call(|| open.write(&bytes)).context("append")?;
        ensure!(written == bytes.len(), "{written} of {} bytes were appended", bytes.len());
        self.model.files[file].bytes.extend_from_slice(&bytes);
        Ok(())
    }

    fn read(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let open = shared.timed_call(|| Open::open(self.path(&name))).context("open")?;
        shared.timed_call(|| check_bytes(&open, &self.model.files[file])).with_context(|| name)
    }

    fn read_held_file(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let Some((file, open)) = pick_nth(&self.held, nth) else { return Ok(()) };
        let known = &self.model.files[*file];
        shared.timed_call(|| check_bytes(open, known))?;
        let seen = open.metadata()?;
        ensure!(
            (seen.ino(), seen.nlink()) == (known.inode, known.links),
            "an open file is inode {} with {} links, not {} with {}",
            seen.ino(),
            seen.nlink(),
            known.inode,
            known.links
        );
        Ok(())
    }

    /// Reads what a name refers to, past the kernel's caches.
    fn check_attributes(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        let path = self.path(&name);
        let seen =
            shared.timed_call(|| rustix::fs::statx(CWD, path, flags, StatxFlags::BASIC_STATS));
        let seen = seen.context("statx")?;
        let known = &self.model.files[file];
        let (mode, len) = (u32::from(seen.stx_mode) & 0o7777, known.bytes.len() as u64);
        let same = seen.stx_ino == known.inode
            && u64::from(seen.stx_nlink) == known.links
            && (mode, seen.stx_size) == (known.mode, len);
        ensure!(
            same,
            "{name}: inode {}, {} links, mode {mode:o}, {} bytes, not {}, {}, {:o}, {len}",
            seen.stx_ino,
            seen.stx_nlink,
            seen.stx_size,
            known.inode,
            known.links,
            known.mode,
        );
        Ok(())
    }

    /// Compares the whole directory with the model.
    pub(super) fn compare_all(&self) -> anyhow::Result<()> {
        let mut left: BTreeSet<&String> = self.model.names.keys().collect();
        for one in std::fs::read_dir(&self.dir)? {
            let name = one?.file_name().to_string_lossy().into_owned();
            ensure!(left.remove(&name), "client {}: {name} is there", self.nth);
        }
        ensure!(left.is_empty(), "client {}: {left:?} are not there", self.nth);
        for (name, named) in &self.model.names {
            let same = self.compare_one(name, named);
            same.with_context(|| format!("client {}, {name} at the end", self.nth))?;
        }
        Ok(())
    }

    fn compare_one(&self, name: &str, named: &NamedObject) -> anyhow::Result<()> {
        let path = self.path(name);
        let seen = std::fs::symlink_metadata(&path)?;
        match named {
            NamedObject::File(file) => {
                let known = &self.model.files[*file];
                let now = (seen.ino(), seen.nlink(), seen.mode() & 0o7777);
                let then = (known.inode, known.links, known.mode);
                ensure!(now == then, "inode, links, mode {now:?}, not {then:?}");
                check_bytes(&Open::open(&path)?, known)?;
                let mut note = [0; 256];
                let len = match rustix::fs::getxattr(&path, XATTR_NAME, &mut note) {
                    Ok(len) => Some(len),
                    Err(rustix::io::Errno::NODATA) => None,
                    Err(errno) => bail!("getxattr: {errno}"),
                };
                let note = len.and_then(|len| note.get(..len)).map(<[u8]>::to_vec);
                ensure!(note == known.note, "its note is {note:?}, not {:?}", known.note);
            }
            NamedObject::Directory(inode) => {
                ensure!(seen.is_dir() && seen.ino() == *inode, "no directory {inode}");
            }
            NamedObject::Link(target) => {
                let read = std::fs::read_link(&path)?;
                ensure!(read == Path::new(target), "it leads to {}", read.display());
            }
        }
        Ok(())
    }
}

fn pick_nth<T>(all: &[T], nth: u64) -> Option<&T> {
    all.get(nth.checked_rem(all.len() as u64)? as usize)
}

/// Compares a file's contents with the model, as the server has them.
fn check_bytes(open: &Open, known: &ModelFile) -> anyhow::Result<()> {
    // Dirty pages are written back, and read again.
    rustix::fs::fadvise(open, 0, None, Advice::DontNeed)?;
    let mut bytes = vec![0; known.bytes.len() + 1];
    let mut len = 0;
    while len < bytes.len() {
        match open.read_at(&mut bytes[len..], len as u64).context("read")? {
            0 => break,
            more => len += more,
        }
    }
    ensure!(len == known.bytes.len(), "{len} bytes, not {}", known.bytes.len());
    if let Some(at) = bytes.iter().zip(&known.bytes).position(|(now, then)| now != then) {
        bail!("byte {at} of {len} is {}, not {}", bytes[at], known.bytes[at]);
    }
    Ok(())
}
