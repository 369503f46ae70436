//! Contents of open files: each open inode has one memfd, which every opener shares.
//!
//! ```text
//!   volume ──load──▶ memfd ◀── read, write, mmap, dup, fork: the kernel's own
//!      ▲               │
//!      └── write back ─┘   when nobody else has it open (a lease says so), and at fsync
//! ```
//! `close` is not notified: it costs the program 0.1 µs, as without the supervisor.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use draconis_ext::{AttributeChange, InodeNumber, SetTime, Time, Volume};

use crate::sys;

/// Open or cached files at most; more only while programs have them open.
const MAX_FILES: usize = 512;
/// Bytes of cached contents at most; more only while programs have them open.
const MAX_BYTES: u64 = 64 << 20;
/// Changed files that wait to be written back before each reply pays for one.
const MAX_WAITING: usize = 128;
/// Unused memfds; those of small files keep their pages.
const POOL: usize = 64;
const POOLED_BYTES: u64 = 64 << 10;
/// Period of writing back files that stay open.
const OPEN_FOR: Duration = Duration::from_secs(5);
/// Files of this length and more may have holes that are not written.
const HOLES_FROM: u64 = 64 << 10;
const CHUNK: usize = 1 << 20;

pub struct File {
    /// Opened by its path in `/proc`: the lease counts such a descriptor, and not the first one.
    memfd: OwnedFd,
    /// Its inode in the kernel's memory file system.
    key: u64,
    /// A program may have changed it since the last write-back.
    writable: bool,
    /// It may have been changed through a mapping.
    mapped: bool,
    /// The volume holds no bytes of it: holes need not be written.
    fresh: bool,
    /// Length and change time at the last write-back.
    base: (i64, i64, i64),
    bytes: u64,
}

pub struct Files {
    by_inode: HashMap<u32, File>,
    by_key: HashMap<u64, u32>,
    /// Least recently opened first.
    order: VecDeque<u32>,
    waiting: VecDeque<u32>,
    pool: Vec<(OwnedFd, u64)>,
    bytes: u64,
    pub device: u64,
    pub most_bytes: u64,
    pub most_files: usize,
    pub loaded: u64,
    pub written: u64,
    buffer: Vec<u8>,
    proc: OwnedFd,
    open_files_written: Instant,
    calls: u64,
}

pub fn errno(error: draconis_ext::Error) -> i32 {
    if matches!(error, draconis_ext::Error::Corrupt { .. } | draconis_ext::Error::Io(_)) {
        eprintln!("draconis-run: {error}");
    }
    error.refusal().errno().raw_os_error()
}

fn change_of(stat: &libc::stat) -> (i64, i64, i64) {
    (stat.st_size, stat.st_ctime, stat.st_ctime_nsec)
}

impl Files {
    pub fn new() -> Result<Self, i32> {
        let probe = sys::memfd("probe")?;
        let device = sys::fstat(probe.as_raw_fd())?.st_dev;
        let proc =
            sys::open_at(libc::AT_FDCWD, b"/proc/self/fd", libc::O_PATH | libc::O_DIRECTORY, 0)?;
        Ok(Self {
            by_inode: HashMap::new(),
            by_key: HashMap::new(),
            order: VecDeque::new(),
            waiting: VecDeque::new(),
            pool: Vec::new(),
            bytes: 0,
            device,
            most_bytes: 0,
            most_files: 0,
            loaded: 0,
            written: 0,
            buffer: Vec::new(),
            proc,
            open_files_written: Instant::now(),
            calls: 0,
        })
    }

    /// Returns the inode whose contents an open file of the memory file system holds.
    pub fn inode_of(&self, stat: &libc::stat) -> Option<InodeNumber> {
        if stat.st_dev != self.device {
            return None;
        }
        self.by_key.get(&stat.st_ino).copied().map(InodeNumber)
    }

    fn empty_memfd(&mut self) -> Result<(OwnedFd, u64), i32> {
        if let Some(pooled) = self.pool.pop() {
            return Ok(pooled);
        }
        let made = sys::memfd("draconis")?;
        // SAFETY: plain numbers.
        sys::check(unsafe { libc::fchmod(made.as_raw_fd(), 0o777) }.into())?;
        let key = sys::fstat(made.as_raw_fd())?.st_ino;
        Ok((reopen(&self.proc, &made, libc::O_RDWR)?, key))
    }

    /// Opens an inode's contents. `empty` says that the volume holds none: a new file, or one that
    /// was truncated just now.
    pub fn open(
        &mut self,
        volume: &Volume,
        inode: InodeNumber,
        flags: i32,
        empty: bool,
    ) -> Result<OwnedFd, i32> {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY && flags & libc::O_PATH == 0;
        if !self.by_inode.contains_key(&inode.0) {
            self.install(volume, inode, empty)?;
        }
        let Some(file) = self.by_inode.get_mut(&inode.0) else { return Err(libc::EIO) };
        let truncate = if empty { libc::O_TRUNC } else { 0 };
        // A descriptor of O_PATH cannot be installed: an ordinary one stands for it.
        let keep = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK;
        let flags = if flags & libc::O_PATH == 0 { flags & keep | truncate } else { 0 };
        let opened = reopen(&self.proc, &file.memfd, flags)?;
        if writes {
            file.mapped |= flags & libc::O_ACCMODE == libc::O_RDWR;
            file.fresh |= empty;
            if !file.writable {
                file.writable = true;
                self.waiting.push_back(inode.0);
            }
        }
        Ok(opened)
    }

    fn install(&mut self, volume: &Volume, inode: InodeNumber, empty: bool) -> Result<(), i32> {
        let (memfd, key) = self.empty_memfd()?;
        let mut base = (0, 0, 0);
        let mut bytes = 0;
        if !empty {
            let size = volume.inode(inode).map_err(errno)?.size_bytes;
            let mut at = 0;
            while at < size {
                let part = volume.read(inode, at, CHUNK).map_err(errno)?;
                if part.is_empty() {
                    break;
                }
                write_all(&memfd, &part, at)?;
                at += part.len() as u64;
            }
            // A used memfd of the pool keeps its pages until here.
            set_len(&memfd, size)?;
            base = change_of(&sys::fstat(memfd.as_raw_fd())?);
            (bytes, self.loaded) = (size, self.loaded + size);
        }
        volume.add_user(inode);
        self.by_key.insert(key, inode.0);
        let (writable, mapped, fresh) = (false, false, empty);
        self.by_inode.insert(inode.0, File { memfd, key, writable, mapped, fresh, base, bytes });
        self.order.push_back(inode.0);
        self.bytes += bytes;
        self.most_bytes = self.most_bytes.max(self.bytes);
        self.most_files = self.most_files.max(self.by_inode.len());
        Ok(())
    }

    /// Returns length and times of a file that programs may be changing, for `stat`.
    pub fn changing(&self, inode: InodeNumber) -> Option<libc::stat> {
        let file = self.by_inode.get(&inode.0).filter(|file| file.writable)?;
        let stat = sys::fstat(file.memfd.as_raw_fd()).ok()?;
        (change_of(&stat) != file.base && !(file.base.1 == 0 && stat.st_size == 0)).then_some(stat)
    }

    /// Sets the length of a file's memfd, if it has one.
    pub fn truncate(&mut self, inode: InodeNumber, size: u64) -> Result<(), i32> {
        let Some(file) = self.by_inode.get_mut(&inode.0) else { return Ok(()) };
        set_len(&file.memfd, size)?;
        file.base = change_of(&sys::fstat(file.memfd.as_raw_fd())?);
        Ok(())
    }

    /// Writes a file back if it was changed.
    pub fn write_back(&mut self, volume: &Volume, inode: InodeNumber) -> Result<(), i32> {
        let Some(file) = self.by_inode.get_mut(&inode.0).filter(|file| file.writable) else {
            return Ok(());
        };
        let fd = file.memfd.as_raw_fd();
        let stat = sys::fstat(fd)?;
        let is_changed = change_of(&stat) != file.base && !(file.base.1 == 0 && stat.st_size == 0);
        if !is_changed && !file.mapped {
            return Ok(());
        }
        let size = stat.st_size as u64;
        if self.buffer.is_empty() {
            self.buffer.resize(CHUNK, 0);
        }
        let mut at = 0u64;
        let mut differs = is_changed;
        while at < size {
            if file.fresh && size > HOLES_FROM {
                match sys::lseek(fd, at as i64, libc::SEEK_DATA) {
                    Ok(data) => at = data as u64,
                    Err(_) => break,
                }
            }
            let want = CHUNK.min((size - at) as usize);
            // SAFETY: the buffer has that many bytes.
            let got = sys::check(unsafe {
                libc::pread(fd, self.buffer.as_mut_ptr().cast(), want, at as i64) as i64
            })? as usize;
            if got == 0 {
                break;
            }
            let part = &self.buffer[..got];
            // A mapping leaves no trace in the times: compare.
            let same = !is_changed
                && volume
                    .read(inode, at, got)
                    .is_ok_and(|held| held.len() == got && *held == *part);
            if !same {
                differs = true;
                let mut done = 0;
                while done < got {
                    match volume.write(inode, at + done as u64, &part[done..]).map_err(errno)? {
                        0 => return Err(libc::ENOSPC),
                        some => done += some,
                    }
                }
                self.written += got as u64;
            }
            at += got as u64;
        }
        if differs {
            let time = |seconds, nanoseconds: i64| {
                SetTime::To(Time { seconds, nanoseconds: nanoseconds as u32 })
            };
            let held = volume.inode(inode).map_err(errno)?.size_bytes;
            let change = AttributeChange {
                size_bytes: (held != size).then_some(size),
                modified: is_changed.then(|| time(stat.st_mtime, stat.st_mtime_nsec)),
                changed: is_changed.then(|| time(stat.st_ctime, stat.st_ctime_nsec)),
                ..AttributeChange::default()
            };
            volume.set_attributes(inode, &change).map_err(errno)?;
        }
        file.base = change_of(&stat);
        file.fresh = false;
        self.bytes = self.bytes + size - file.bytes;
        file.bytes = size;
        self.most_bytes = self.most_bytes.max(self.bytes);
        Ok(())
    }

    /// Writes back the oldest file that waits, if nobody has it open; called after a reply.
    pub fn tidy(&mut self, volume: &Volume, idle: bool) -> bool {
        let mut did = false;
        if idle && self.open_files_written.elapsed() > OPEN_FOR {
            self.open_files_written = Instant::now();
            if let Err(error) = self.write_back_all(volume) {
                eprintln!("draconis-run: open files are not written: errno {error}");
            }
        }
        self.calls += 1;
        let is_turn = idle || self.waiting.len() > MAX_WAITING || self.calls.is_multiple_of(4);
        if is_turn && let Some(inode) = self.waiting.pop_front() {
            did = self.settle(volume, inode);
        }
        if self.by_inode.len() > MAX_FILES || self.bytes > MAX_BYTES {
            did |= self.evict(volume);
        }
        did
    }

    fn settle(&mut self, volume: &Volume, inode: u32) -> bool {
        let Some(file) = self.by_inode.get(&inode) else { return true };
        let closed = sys::is_sole_user(file.memfd.as_raw_fd());
        if closed {
            let orphan = is_orphan(volume, inode);
            if !orphan && let Err(error) = self.write_back(volume, InodeNumber(inode)) {
                eprintln!("draconis-run: inode {inode} is not written: errno {error}");
            }
            if orphan {
                self.release(volume, inode);
                return true;
            }
        }
        match self.by_inode.get_mut(&inode) {
            Some(file) if closed => (file.writable, file.mapped) = (false, false),
            _ => self.waiting.push_back(inode),
        }
        closed
    }

    fn evict(&mut self, volume: &Volume) -> bool {
        for _ in 0..4 {
            let Some(inode) = self.order.pop_front() else { return false };
            let Some(file) = self.by_inode.get(&inode) else { continue };
            if file.writable || !sys::is_sole_user(file.memfd.as_raw_fd()) {
                self.order.push_back(inode);
                continue;
            }
            self.release(volume, inode);
            return true;
        }
        false
    }

    fn release(&mut self, volume: &Volume, inode: u32) {
        let Some(file) = self.by_inode.remove(&inode) else { return };
        self.by_key.remove(&file.key);
        self.bytes -= file.bytes;
        volume.remove_users(InodeNumber(inode), 1);
        if self.pool.len() < POOL && (file.bytes <= POOLED_BYTES || set_len(&file.memfd, 0).is_ok())
        {
            self.pool.push((file.memfd, file.key));
        }
    }

    /// Drops the contents of an inode that lost its last name, if nobody has it open.
    pub fn drop_orphan(&mut self, volume: &Volume, inode: InodeNumber) {
        let Some(file) = self.by_inode.get(&inode.0) else { return };
        if is_orphan(volume, inode.0) && sys::is_sole_user(file.memfd.as_raw_fd()) {
            self.release(volume, inode.0);
        }
    }

    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes back everything.
    pub fn write_back_all(&mut self, volume: &Volume) -> Result<(), i32> {
        let all: Vec<u32> = self.waiting.iter().copied().collect();
        for inode in all {
            if !is_orphan(volume, inode) {
                self.write_back(volume, InodeNumber(inode))?;
            }
        }
        Ok(())
    }

    /// Copies the contents of an inode into a file of the host.
    pub fn copy_out(
        &mut self,
        volume: &Volume,
        inode: InodeNumber,
        to: &OwnedFd,
    ) -> Result<(), i32> {
        self.write_back(volume, inode)?;
        let mut at = 0;
        loop {
            let part = volume.read(inode, at, CHUNK).map_err(errno)?;
            if part.is_empty() {
                return Ok(());
            }
            write_all(to, &part, at)?;
            at += part.len() as u64;
        }
    }
}

fn is_orphan(volume: &Volume, inode: u32) -> bool {
    volume.attributes(InodeNumber(inode)).is_ok_and(|found| found.links == 0)
}

/// Opens the file of a descriptor again: an open file of its own. `proc` is `/proc/self/fd`.
fn reopen(proc: &OwnedFd, file: &OwnedFd, flags: i32) -> Result<OwnedFd, i32> {
    sys::open_at(proc.as_raw_fd(), file.as_raw_fd().to_string().as_bytes(), flags, 0)
}

fn set_len(file: &OwnedFd, len: u64) -> Result<(), i32> {
    // SAFETY: plain numbers.
    sys::check(unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) }.into()).map(drop)
}

fn write_all(to: &OwnedFd, bytes: &[u8], at: u64) -> Result<(), i32> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        let at = (at + done as u64) as i64;
        // SAFETY: `rest` is valid for its length.
        let wrote = unsafe { libc::pwrite(to.as_raw_fd(), rest.as_ptr().cast(), rest.len(), at) };
        done += sys::check(wrote as i64)? as usize;
    }
    Ok(())
}
