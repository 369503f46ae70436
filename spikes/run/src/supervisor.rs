//! The supervisor: who called, with which path or descriptor, and what is answered.

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use draconis_ext::{Attributes, InodeNumber, Time};

use crate::files::{Files, errno};
use crate::sys::{self, Notification};
use crate::tree::{Caller, Place, Tree, Walked, normalise};

/// What a call is answered with; `None` lets the kernel do it.
pub enum Reply {
    Value(i64),
    Descriptor(OwnedFd, bool),
}

pub type Answer = Result<Option<Reply>, i32>;

/// What a descriptor of a program stands for.
pub enum Object {
    File(InodeNumber),
    Directory(InodeNumber, OwnedFd),
}

impl Object {
    pub fn inode(&self) -> InodeNumber {
        match self {
            Object::File(inode) | Object::Directory(inode, _) => *inode,
        }
    }
}

#[derive(Clone)]
enum Cwd {
    Volume(InodeNumber),
    Host(Vec<u8>),
}

struct Process {
    pidfd: OwnedFd,
    tgid: u32,
    caller: Rc<Caller>,
    umask: u32,
    /// Unknown after `chdir` and at first.
    cwd: Option<Cwd>,
    /// `/proc/PID/mem`; unknown after `execve` and at first.
    memory: OnceCell<OwnedFd>,
}

pub struct Supervisor {
    pub listener: OwnedFd,
    pub tree: Tree,
    pub files: Files,
    pub write: bool,
    processes: HashMap<u32, Process>,
    /// Programs copied to the host for `execve`: path, and inode, length and time of the copy.
    pub programs: HashMap<Vec<u8>, (u32, u64, Time)>,
    pub calls: u64,
    pub passed_on: u64,
    /// Stands for the confined worker of a product, to measure what a message to it costs.
    pub worker: Option<Worker>,
    /// The call that was last found to be waiting still.
    checked: Cell<u64>,
}

/// Device number that `stat` shows.
const DEVICE: (u32, u32) = (0, 0xD7AC0);
const EMPTY_PATH: u64 = libc::AT_EMPTY_PATH as u64;

impl Supervisor {
    pub fn new(listener: OwnedFd, tree: Tree, write: bool) -> Result<Self, i32> {
        let (processes, programs) = Default::default();
        let files = Files::new()?;
        Ok(Self {
            listener,
            tree,
            files,
            write,
            processes,
            programs,
            calls: 0,
            passed_on: 0,
            worker: None,
            checked: Cell::new(0),
        })
    }

    /// Receives one call and answers it. Returns false if there was none.
    pub fn serve_one(&mut self) -> bool {
        let mut call = Notification::default();
        if sys::ioctl(self.listener.as_raw_fd(), sys::RECV, &mut call).is_err() {
            return false;
        }
        self.calls += 1;
        let answer = match self.register(&call) {
            Ok(()) => self.answer(&call),
            Err(error) => Err(error),
        };
        if let Some(worker) = &self.worker
            && !matches!(answer, Ok(None))
        {
            worker.ask();
        }
        let (mut val, mut error, mut flags) = (0, 0, 0);
        match answer {
            Ok(Some(Reply::Descriptor(fd, cloexec))) => {
                let mut add = sys::AddFd {
                    id: call.id,
                    // SEND: installs and answers in one step.
                    flags: 1 << 1,
                    srcfd: fd.as_raw_fd() as u32,
                    newfd: 0,
                    newfd_flags: if cloexec { libc::O_CLOEXEC as u32 } else { 0 },
                };
                match sys::ioctl(self.listener.as_raw_fd(), sys::ADDFD, &mut add) {
                    Ok(_) | Err(libc::ENOENT) => return true,
                    Err(why) => error = -why,
                }
            }
            Ok(Some(Reply::Value(value))) => val = value,
            Ok(None) => (flags, self.passed_on) = (1, self.passed_on + 1),
            Err(why) => error = -why,
        }
        let mut response = sys::Response { id: call.id, val, error, flags };
        // ENOENT: the caller died.
        let _ = sys::ioctl(self.listener.as_raw_fd(), sys::SEND, &mut response);
        true
    }

    /// Makes sure that the caller is known.
    fn register(&mut self, call: &Notification) -> Result<(), i32> {
        if self.processes.contains_key(&call.pid) {
            return Ok(());
        }
        if self.processes.len() > 256 {
            // Long before process numbers come again.
            self.processes.retain(|_, known| sys::poll(known.pidfd.as_raw_fd(), 0) == 0);
        }
        let pidfd = sys::pidfd_open(call.pid)?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", call.pid));
        let status = status.map_err(|_| libc::ESRCH)?;
        self.check_alive(call)?;
        let line = |name: &str| {
            let found = status.lines().find_map(|line| line.strip_prefix(name));
            found.unwrap_or_default().split_whitespace()
        };
        let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0);
        let umask = line("Umask:").next().and_then(|text| u32::from_str_radix(text, 8).ok());
        let caller = Caller {
            // The fourth is the one that file systems look at.
            uid: number(line("Uid:").nth(3)),
            gid: number(line("Gid:").nth(3)),
            groups: line("Groups:").filter_map(|text| text.parse().ok()).collect(),
        };
        let tgid = number(line("Tgid:").next());
        let caller = Rc::new(caller);
        let process = Process {
            pidfd,
            tgid,
            caller,
            umask: umask.unwrap_or(0o22),
            cwd: None,
            memory: OnceCell::new(),
        };
        self.processes.insert(call.pid, process);
        Ok(())
    }

    /// Checks once a call that the caller waits still, so that its number is not another's by now.
    fn check_alive(&self, call: &Notification) -> Result<(), i32> {
        if self.checked.get() == call.id {
            return Ok(());
        }
        let mut id = call.id;
        sys::ioctl(self.listener.as_raw_fd(), sys::ID_VALID, &mut id)?;
        self.checked.set(call.id);
        Ok(())
    }

    fn process(&self, call: &Notification) -> Result<&Process, i32> {
        self.processes.get(&call.pid).ok_or(libc::ESRCH)
    }

    pub fn caller(&self, call: &Notification) -> Result<Rc<Caller>, i32> {
        Ok(Rc::clone(&self.process(call)?.caller))
    }

    pub fn umask(&self, call: &Notification) -> u32 {
        self.process(call).map_or(0o22, |process| process.umask)
    }

    /// Applies a change to all threads of the caller's process.
    fn all_threads(&mut self, call: &Notification, change: impl Fn(&mut Process)) {
        let Ok(tgid) = self.process(call).map(|process| process.tgid) else { return };
        self.processes.values_mut().filter(|process| process.tgid == tgid).for_each(change);
    }

    pub fn set_umask(&mut self, call: &Notification, umask: u32) {
        self.all_threads(call, |process| process.umask = umask);
    }

    pub fn forget_cwd(&mut self, call: &Notification) {
        self.all_threads(call, |process| process.cwd = None);
    }

    pub fn forget_memory(&mut self, call: &Notification) {
        self.all_threads(call, |process| drop(process.memory.take()));
    }

    /// Reads from the caller's memory; fewer bytes at the end of what is mapped. Reading a file of
    /// `/proc` is a little faster than `process_vm_readv`.
    fn read_some(&self, call: &Notification, at: u64, into: &mut [u8]) -> Result<usize, i32> {
        let process = self.process(call)?;
        let memory = match process.memory.get() {
            Some(memory) => memory,
            None => {
                let path = format!("/proc/{}/mem", call.pid);
                let opened = sys::open_at(libc::AT_FDCWD, path.as_bytes(), libc::O_RDONLY, 0)?;
                process.memory.get_or_init(|| opened)
            }
        };
        sys::pread(memory, at, into).map_err(|_| libc::EFAULT)
    }

    /// Copies a string of the caller, once: what it holds later does not count.
    pub fn string(&self, call: &Notification, at: u64) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0; 256];
        let mut len = 0;
        loop {
            let read = self.read_some(call, at + len as u64, &mut bytes[len..])?;
            if let Some(end) = bytes[len..len + read].iter().position(|byte| *byte == 0) {
                self.check_alive(call)?;
                bytes.truncate(len + end);
                return Ok(bytes);
            }
            len += read;
            if read == 0 || len >= 4096 {
                return Err(if read == 0 { libc::EFAULT } else { libc::ENAMETOOLONG });
            }
            bytes.resize(4096, 0);
        }
    }

    pub fn read(&self, call: &Notification, at: u64, len: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match self.read_some(call, at + done as u64, &mut bytes[done..])? {
                0 => return Err(libc::EFAULT),
                some => done += some,
            }
        }
        self.check_alive(call)?;
        Ok(bytes)
    }

    pub fn write(&self, call: &Notification, to: u64, bytes: &[u8]) -> Answer {
        // Not by `/proc/PID/mem`, which writes to read-only memory, too.
        self.check_alive(call)?;
        sys::write_memory(call.pid, to, bytes)?;
        Ok(Some(Reply::Value(0)))
    }

    /// Returns what a descriptor stands for, if it is one of the volume. The kernel knows:
    /// whatever was duplicated, inherited or sent, the open file is the same.
    pub fn object(&self, call: &Notification, fd: u64) -> Result<Option<Object>, i32> {
        let fd = fd as i32;
        if fd < 0 {
            return Ok(None);
        }
        // EBADF: the kernel says so itself.
        let Ok(copy) = sys::pidfd_getfd(&self.process(call)?.pidfd, fd) else { return Ok(None) };
        let stat = sys::fstat(copy.as_raw_fd())?;
        if let Some(inode) = self.files.inode_of(&stat) {
            return Ok(Some(Object::File(inode)));
        }
        let directory = self.tree.directory_of(&stat);
        Ok(directory.map(|inode| Object::Directory(inode, copy)))
    }

    fn cwd(&mut self, call: &Notification) -> Result<Cwd, i32> {
        if let Some(cwd) = &self.process(call)?.cwd {
            return Ok(cwd.clone());
        }
        let link = format!("/proc/{}/cwd", call.pid);
        let opened = sys::open_at(libc::AT_FDCWD, link.as_bytes(), libc::O_PATH, 0)?;
        let cwd = match self.tree.directory_of(&sys::fstat(opened.as_raw_fd())?) {
            Some(inode) => Cwd::Volume(inode),
            None => {
                let path = std::fs::read_link(link).map_err(crate::tree::io_errno)?;
                Cwd::Host(path.into_os_string().into_encoded_bytes())
            }
        };
        if let Some(process) = self.processes.get_mut(&call.pid) {
            process.cwd = Some(cwd.clone());
        }
        Ok(cwd)
    }

    /// Returns the descriptor that a path of `/proc` names, and what follows it.
    pub fn descriptor<'p>(&self, call: &Notification, path: &'p [u8]) -> Option<(u64, &'p [u8])> {
        let rest = path.strip_prefix(b"/proc/").or_else(|| path.strip_prefix(b"/dev/"))?;
        let own = format!("{}/fd/", self.process(call).ok()?.tgid);
        let names = [b"self/fd/".as_slice(), b"thread-self/fd/", b"fd/", own.as_bytes()];
        let rest = names.iter().find_map(|name| rest.strip_prefix(*name))?;
        let len = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
        let (number, rest) = rest.split_at(len);
        Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
    }

    /// Returns the place that a path names; `None` if it is on the host.
    pub fn place(
        &mut self,
        call: &Notification,
        dirfd: u64,
        path: &[u8],
        follow: bool,
    ) -> Result<Option<Place>, i32> {
        if path.is_empty() {
            return Ok(None);
        }
        let root = self.tree.volume.root();
        let by_descriptor =
            self.descriptor(call, path).filter(|(_, rest)| follow || !rest.is_empty());
        let (start, rest) = if let Some((fd, rest)) = by_descriptor {
            match self.object(call, fd)? {
                Some(Object::Directory(inode, _)) => (inode, rest.to_vec()),
                _ => return Ok(None),
            }
        } else if path.first() == Some(&b'/') {
            let plain = self.tree.below(path).map(<[u8]>::to_vec);
            let odd = |part: &[u8]| path.windows(part.len()).any(|window| window == part);
            let rest = match plain {
                None if odd(b"//") || odd(b"/.") => {
                    let mut normal = normalise(path);
                    normal.extend(path.ends_with(b"/").then_some(b'/'));
                    self.tree.below(&normal).map(<[u8]>::to_vec)
                }
                plain => plain,
            };
            let Some(rest) = rest else { return Ok(None) };
            (root, rest)
        } else if dirfd as i32 == libc::AT_FDCWD {
            match self.cwd(call)? {
                Cwd::Volume(inode) => (inode, path.to_vec()),
                Cwd::Host(cwd) => {
                    // Links of the host that lead to the mount point are not seen: a limit.
                    let mut joined = normalise(&[&cwd, b"/".as_slice(), path].concat());
                    joined.extend(path.ends_with(b"/").then_some(b'/'));
                    let Some(rest) = self.tree.below(&joined) else { return Ok(None) };
                    (root, rest.to_vec())
                }
            }
        } else {
            match self.object(call, dirfd)? {
                Some(Object::Directory(inode, _)) => (inode, path.to_vec()),
                Some(Object::File(_)) => return Err(libc::ENOTDIR),
                None => return Ok(None),
            }
        };
        let caller = self.caller(call)?;
        match self.tree.walk(start, &rest, follow, &caller)? {
            Walked::Volume(place) => Ok(Some(place)),
            Walked::Host => Ok(None),
        }
    }

    /// Returns the inode that a call names by path, or by descriptor with an empty path.
    pub fn target(
        &mut self,
        call: &Notification,
        (dirfd, path): (u64, u64),
        flags: u64,
        follow: bool,
    ) -> Result<Option<InodeNumber>, i32> {
        let path = match path {
            0 => Vec::new(),
            at => self.string(call, at)?,
        };
        if path.is_empty() {
            if flags & EMPTY_PATH == 0 {
                // The kernel refuses it.
                return Ok(None);
            }
            if dirfd as i32 == libc::AT_FDCWD {
                return Ok(match self.cwd(call)? {
                    Cwd::Volume(inode) => Some(inode),
                    Cwd::Host(_) => None,
                });
            }
            return Ok(self.object(call, dirfd)?.map(|object| object.inode()));
        }
        if let Some(rest) = self.tree.below(&path)
            && self.process(call)?.caller.uid == 0
            && let Some(found) = self.tree.find_known(self.tree.volume.root(), rest, follow)
        {
            return Ok(Some(found));
        }
        if follow && let Some((fd, b"")) = self.descriptor(call, &path) {
            return Ok(self.object(call, fd)?.map(|object| object.inode()));
        }
        match self.place(call, dirfd, &path, follow)? {
            Some(place) => place.found().map(Some),
            None => Ok(None),
        }
    }

    /// Returns the attributes of an inode, with what programs wrote a moment ago.
    pub fn attributes(&self, inode: InodeNumber) -> Result<Attributes, i32> {
        let mut held = self.tree.volume.attributes(inode).map_err(errno)?;
        if let Some(now) = self.files.changing(inode) {
            let time =
                |seconds, nanoseconds: i64| Time { seconds, nanoseconds: nanoseconds as u32 };
            held.size_bytes = now.st_size as u64;
            held.blocks_512 = held.size_bytes.div_ceil(4096) * 8;
            held.modified = time(now.st_mtime, now.st_mtime_nsec);
            held.changed = time(now.st_ctime, now.st_ctime_nsec);
        }
        Ok(held)
    }

    pub fn stat(&self, call: &Notification, inode: InodeNumber, to: u64) -> Answer {
        let held = self.attributes(inode)?;
        let mut stat: libc::stat = sys::zeroed();
        stat.st_dev = libc::makedev(DEVICE.0, DEVICE.1);
        stat.st_ino = inode.0.into();
        stat.st_mode = held.mode;
        stat.st_nlink = held.links.into();
        (stat.st_uid, stat.st_gid) = (held.uid, held.gid);
        stat.st_rdev = libc::makedev(held.device.0, held.device.1);
        stat.st_size = held.size_bytes as i64;
        stat.st_blocks = held.blocks_512 as i64;
        stat.st_blksize = held.block_size_bytes.into();
        (stat.st_atime, stat.st_atime_nsec) = pair(held.accessed);
        (stat.st_mtime, stat.st_mtime_nsec) = pair(held.modified);
        (stat.st_ctime, stat.st_ctime_nsec) = pair(held.changed);
        self.write(call, to, sys::bytes_of(&stat))
    }

    pub fn statx(&self, call: &Notification, inode: InodeNumber, to: u64) -> Answer {
        let held = self.attributes(inode)?;
        let mut stat: libc::statx = sys::zeroed();
        let time = |of: Time| {
            let mut time: libc::statx_timestamp = sys::zeroed();
            (time.tv_sec, time.tv_nsec) = (of.seconds, of.nanoseconds);
            time
        };
        stat.stx_mask = libc::STATX_BASIC_STATS;
        if let Some(created) = held.created {
            stat.stx_mask |= libc::STATX_BTIME;
            stat.stx_btime = time(created);
        }
        stat.stx_blksize = held.block_size_bytes;
        stat.stx_nlink = held.links;
        (stat.stx_uid, stat.stx_gid) = (held.uid, held.gid);
        stat.stx_mode = held.mode as u16;
        stat.stx_ino = inode.0.into();
        stat.stx_size = held.size_bytes;
        stat.stx_blocks = held.blocks_512;
        stat.stx_atime = time(held.accessed);
        stat.stx_mtime = time(held.modified);
        stat.stx_ctime = time(held.changed);
        (stat.stx_rdev_major, stat.stx_rdev_minor) = held.device;
        (stat.stx_dev_major, stat.stx_dev_minor) = DEVICE;
        self.write(call, to, sys::bytes_of(&stat))
    }

    pub fn statfs(&self, call: &Notification, to: u64) -> Answer {
        let space = self.tree.volume.space();
        let mut held: libc::statfs = sys::zeroed();
        held.f_type = 0xEF53;
        (held.f_bsize, held.f_frsize) = (space.block_bytes.into(), space.block_bytes.into());
        (held.f_blocks, held.f_bfree) = (space.blocks, space.free_blocks);
        held.f_bavail = space.available_blocks;
        (held.f_files, held.f_ffree) = (space.inodes, space.free_inodes);
        held.f_namelen = space.name_bytes_max.into();
        self.write(call, to, sys::bytes_of(&held))
    }
}

/// A thread that answers messages of no contents.
pub struct Worker {
    words: Arc<[AtomicU32; 2]>,
    sleeps: bool,
}

impl Worker {
    pub fn start(sleeps: bool) -> Self {
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let shared = Arc::clone(&words);
        std::thread::spawn(move || {
            let mut last = 0;
            loop {
                sys::wait_change(&shared[0], last, sleeps);
                last = shared[0].load(Ordering::Acquire);
                shared[1].store(last, Ordering::Release);
                sys::wake(&shared[1], sleeps);
            }
        });
        Self { words, sleeps }
    }

    fn ask(&self) {
        let last = self.words[1].load(Ordering::Relaxed);
        self.words[0].store(last.wrapping_add(1), Ordering::Release);
        sys::wake(&self.words[0], self.sleeps);
        sys::wait_change(&self.words[1], last, self.sleeps);
    }
}

fn pair(time: Time) -> (i64, i64) {
    (time.seconds, time.nanoseconds.into())
}
