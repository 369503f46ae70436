//! The kernel's requests, one after another, answered from a [`Tree`].
//!
//! One thread reads: on a small machine a second one costs more in wake-ups than it
//! brings. Nothing here remembers anything about a file: a node's number is its handle.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use draconis_exchange::contract::directory::{
    Enumerate, GetAttributes, GetXattr, ListXattr, Lookup, ReadLink, Records,
};
use draconis_exchange::contract::file::{FileServer, Read, Seek};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::{AttributeName, Attributes, Kind, Name, Node, Refusal, Time};
use draconis_exchange::heap::Block;
use fuse_backend_rs::abi::fuse_abi::{FsOptions, OpenOptions, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, GetxattrReply, ListxattrReply, ZeroCopyWriter,
};
use fuse_backend_rs::api::server;
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader, Writer};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Largest read or write of one request, in bytes: what the kernel allows without tuning.
const REQUEST_BYTES: usize = 1 << 20;
/// Room for the headers around it.
const HEADER_BYTES: usize = 4096;
/// Nothing changes but through us: what the kernel knows stays true.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// Longest target of a symbolic link, in bytes.
const LINK_BYTES: usize = 4096;
/// Longest value or list of extended attributes that Linux asks for, in bytes.
const XATTR_BYTES: usize = 64 << 10;

/// What `lseek` is asked for, as Linux numbers it.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// What a server is doing, for whoever watches it.
#[derive(Debug)]
pub struct Activity {
    start: Instant,
    requests: AtomicU64,
    /// When the request in hand began, in microseconds since `start`, plus one; 0 if idle.
    busy_since: AtomicU64,
}

impl Default for Activity {
    fn default() -> Self {
        Self { start: Instant::now(), requests: AtomicU64::new(0), busy_since: AtomicU64::new(0) }
    }
}

impl Activity {
    /// How many requests were answered.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// For how long the request in hand has been worked on; zero when idle.
    pub fn busy(&self) -> Duration {
        match self.busy_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.start.elapsed().saturating_sub(Duration::from_micros(since - 1)),
        }
    }

    fn begin(&self) {
        let now = self.start.elapsed().as_micros() as u64;
        self.busy_since.store(now + 1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.busy_since.store(0, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }
}

/// Serves a tree to the kernel.
pub struct Server<'a, T: Tree + Sync> {
    server: server::Server<Handler<'a, T>>,
}

impl<'a, T: Tree + Sync> Server<'a, T> {
    /// A server of `tree`.
    pub fn new(tree: &'a T) -> Self {
        Self { server: server::Server::new(Handler { tree, buffers: Mutex::default() }) }
    }

    /// Answers requests until the mount ends.
    ///
    /// `fuse` may be fresh or one whose kernel side has been initialised already by
    /// another server of the same tree.
    ///
    /// # Errors
    /// What the kernel says when a request cannot be read.
    pub fn serve(&self, fuse: impl AsFd, activity: &Activity) -> io::Result<()> {
        let mut request = vec![0; REQUEST_BYTES + HEADER_BYTES];
        let mut reply = vec![0; REQUEST_BYTES + HEADER_BYTES];
        let raw = fuse.as_fd().as_raw_fd();
        let flags = rustix::fs::fcntl_getfl(&fuse)?;
        rustix::fs::fcntl_setfl(&fuse, flags | rustix::fs::OFlags::NONBLOCK)?;
        let mut patience = Patience::default();
        loop {
            let len = match rustix::io::read(&fuse, &mut request[..]) {
                Ok(len) => len,
                Err(Errno::AGAIN) => {
                    patience.wait(&fuse)?;
                    continue;
                }
                // Interrupted, or the request was withdrawn before we saw it.
                Err(Errno::INTR | Errno::NOENT) => continue,
                // Unmounted, or aborted.
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            };
            patience.paid();
            activity.begin();
            let handled = Reader::from_fuse_buffer(FuseBuf::new(&mut request[..len]))
                .and_then(|reader| Ok((reader, FuseDevWriter::new(raw, &mut reply)?)))
                .map_err(|error| error.to_string())
                .and_then(|(reader, writer)| {
                    let writer = Writer::<'_, ()>::FuseDev(writer);
                    let handled = self.server.handle_message(reader, writer, None, None);
                    handled.map_err(|error| error.to_string())
                });
            activity.end();
            if let Err(error) = handled {
                // A reply to a withdrawn request, most often.
                log::debug!("a reply was not taken: {error}");
            }
        }
    }
}

/// Looks for the next request for a while before it sleeps: on a machine with idle CPUs
/// waking up takes longer than most requests do. How long depends on what looking brought.
struct Patience {
    /// How long to look, at most.
    budget: Duration,
    /// Since when we look.
    since: Option<Instant>,
}

/// The longest that is looked: a little more than a program takes between two requests
/// when it has to be woken itself.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// The shortest, so that a busy time is noticed again.
const LOOK_MIN: Duration = Duration::from_micros(2);

impl Default for Patience {
    fn default() -> Self {
        Self { budget: LOOK_MAX, since: None }
    }
}

impl Patience {
    /// A request came.
    fn paid(&mut self) {
        if self.since.take().is_some() {
            self.budget = (self.budget * 2).min(LOOK_MAX);
        }
    }

    /// Returns when there may be a request.
    fn wait(&mut self, fuse: impl AsFd) -> io::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() < self.budget {
            // Whoever else wants this CPU goes first.
            rustix::thread::sched_yield();
            return Ok(());
        }
        self.since = None;
        self.budget = (self.budget / 2).max(LOOK_MIN);
        match poll(&mut [PollFd::new(&fuse, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Fits the directory and file contracts to the requests.
struct Handler<'a, T> {
    tree: &'a T,
    /// Blocks that reads have used: zeroing a new one costs more than the read.
    buffers: Mutex<Vec<Block>>,
}

fn errno(why: Refusal) -> io::Error {
    why.errno().into()
}

/// The errno the kernel expects of a file system that does not do something.
fn not_there() -> io::Error {
    Errno::NOSYS.into()
}

fn name(name: &CStr) -> io::Result<Name> {
    Name::new(name.to_bytes()).map_err(errno)
}

impl<T: Tree + Sync> Handler<'_, T> {
    fn attributes(&self, inode: u64) -> io::Result<Attributes> {
        let asked = self.tree.get_attributes(GetAttributes { node: Node(inode) });
        Ok(asked.map_err(|nak| errno(nak.why))?.attributes)
    }

    fn buffer(&self, len: usize) -> Block {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = buffers.iter().rposition(|block| block.len() >= len);
        match fitting {
            Some(at) => buffers.swap_remove(at),
            None => Block::private(len.next_power_of_two()),
        }
    }

    fn give_back(&self, block: Block) {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < 4 {
            buffers.push(block);
        }
    }

    /// `.` and `..`, which volumes do not show: the cookies 0 and 1 are theirs, and those
    /// of the volume come behind.
    fn dots(
        &self,
        inode: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<Option<u64>> {
        for (at, dot) in [(0, &b"."[..]), (1, b"..")] {
            if offset > at {
                continue;
            }
            let lookup = Lookup { parent: Node(inode), name: Name::new(dot).map_err(errno)? };
            let found = self.tree.lookup(lookup).map_err(|nak| errno(nak.why))?;
            let ino = found.attributes.node.0;
            let entry =
                DirEntry { ino, offset: at + 1, type_: libc_type(Kind::Directory), name: dot };
            if add(entry)? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(offset.saturating_sub(2)))
    }

    fn enumerate(
        &self,
        inode: u64,
        size: u32,
        offset: u64,
        with_attributes: bool,
        add: &mut dyn FnMut(DirEntry<'_>, Option<Attributes>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let Some(mut cookie) = self.dots(inode, offset, &mut |entry| add(entry, None))? else {
            return Ok(());
        };
        loop {
            let buffer = self.buffer((size as usize).max(4096));
            let asked = self.tree.enumerate(Enumerate {
                node: Node(inode),
                cookie,
                buffer,
                with_attributes,
            });
            let ack = asked.map_err(|nak| {
                self.give_back(nak.buffer);
                errno(nak.why)
            })?;
            let records = Records::new(&ack.buffer, ack.len);
            self.give_back(ack.buffer);
            let records = records.map_err(|_| errno(Refusal::Corrupt))?;
            let before = cookie;
            for record in records {
                let record = record.map_err(|_| errno(Refusal::Corrupt))?;
                cookie = record.cookie;
                let name = record.name.as_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let entry = DirEntry {
                    ino: record.node.0,
                    offset: record.cookie + 2,
                    type_: record.kind.map_or(0, libc_type),
                    name,
                };
                if add(entry, record.attributes)? == 0 {
                    return Ok(());
                }
            }
            if cookie == before {
                return Ok(());
            }
        }
    }
}

/// `DT_*` of a kind.
fn libc_type(kind: Kind) -> u32 {
    kind.mode_bits() >> 12
}

fn stat(attributes: &Attributes) -> stat64 {
    let mut stat = Entry::default().attr;
    let (major, minor) = attributes.device;
    stat.st_ino = attributes.node.0;
    stat.st_mode = attributes.mode;
    stat.st_nlink = attributes.links.into();
    stat.st_uid = attributes.uid;
    stat.st_gid = attributes.gid;
    stat.st_rdev = rustix::fs::makedev(major, minor);
    stat.st_size = attributes.size_bytes as i64;
    stat.st_blksize = attributes.block_size_bytes.into();
    stat.st_blocks = attributes.blocks_512 as i64;
    let time = |time: Time| (time.seconds, i64::from(time.nanoseconds));
    (stat.st_atime, stat.st_atime_nsec) = time(attributes.accessed);
    (stat.st_mtime, stat.st_mtime_nsec) = time(attributes.modified);
    (stat.st_ctime, stat.st_ctime_nsec) = time(attributes.changed);
    stat
}

fn entry(attributes: &Attributes) -> Entry {
    Entry {
        inode: attributes.node.0,
        generation: attributes.generation.into(),
        attr: stat(attributes),
        attr_flags: 0,
        attr_timeout: FOR_EVER,
        entry_timeout: FOR_EVER,
    }
}

/// Gives the library's own zeroed answer to `statfs`, which has no other constructor.
struct Nothing;

impl FileSystem for Nothing {
    type Inode = u64;
    type Handle = u64;
}

impl<T: Tree + Sync> FileSystem for Handler<'_, T> {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let wanted = FsOptions::ASYNC_READ
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::DO_READDIRPLUS
            | FsOptions::ZERO_MESSAGE_OPEN
            | FsOptions::ZERO_MESSAGE_OPENDIR
            | FsOptions::CACHE_SYMLINKS
            | FsOptions::ASYNC_DIO
            | FsOptions::EXPLICIT_INVAL_DATA
            | FsOptions::HAS_RESEND;
        Ok(capable & wanted)
    }

    fn lookup(&self, _: &Context, parent: u64, child: &CStr) -> io::Result<Entry> {
        match self.tree.lookup(Lookup { parent: Node(parent), name: name(child)? }) {
            Ok(ack) => Ok(entry(&ack.attributes)),
            // An answer without a node lets the kernel remember that there is none.
            Err(nak) if nak.why == Refusal::NotFound => {
                Ok(Entry { entry_timeout: FOR_EVER, ..Entry::default() })
            }
            Err(nak) => Err(errno(nak.why)),
        }
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((stat(&self.attributes(inode)?), FOR_EVER))
    }

    fn readlink(&self, _: &Context, inode: u64) -> io::Result<Vec<u8>> {
        let buffer = self.buffer(LINK_BYTES);
        let ack = self
            .tree
            .read_link(ReadLink { node: Node(inode), buffer })
            .map_err(|nak| errno(nak.why))?;
        let mut target = vec![0; (ack.len as usize).min(ack.buffer.len())];
        ack.buffer.copy_out(0, &mut target);
        self.give_back(ack.buffer);
        Ok(target)
    }

    fn open(
        &self,
        _: &Context,
        _: u64,
        _: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        // The kernel asks once, then knows that opening needs no message.
        Err(not_there())
    }

    fn opendir(&self, _: &Context, _: u64, _: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        Err(not_there())
    }

    fn read(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        into: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let buffer = self.buffer(size as usize);
        let request = Read { buffer, buffer_offset: 0, offset, len: size };
        let ack = self.tree.file(Node(inode)).read(request).map_err(|nak| {
            self.give_back(nak.buffer);
            errno(nak.why)
        })?;
        let len = ack.len as usize;
        let sent = match ack.buffer.bytes().and_then(|bytes| bytes.get(..len)) {
            Some(bytes) => into.write_all(bytes).map(|()| len),
            None => Err(errno(Refusal::Io)),
        };
        self.give_back(ack.buffer);
        sent
    }

    fn lseek(&self, _: &Context, inode: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        // The kernel asks for nothing else: the rest it knows itself.
        let hole = match whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return Err(Errno::INVAL.into()),
        };
        match self.tree.file(Node(inode)).seek(Seek { offset, hole }) {
            Ok(ack) => ack.offset.ok_or_else(|| Errno::NXIO.into()),
            // Told so, the kernel does not ask again: all is data then.
            Err(nak) if nak.why == Refusal::NotSupported => Err(not_there()),
            Err(nak) => Err(errno(nak.why)),
        }
    }

    fn readdir(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.enumerate(inode, size, offset, false, &mut |entry, _| add(entry))
    }

    fn readdirplus(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.enumerate(inode, size, offset, true, &mut |dirent, attributes| {
            // Without a node the kernel takes the name alone and asks for the rest later.
            add(dirent, attributes.as_ref().map(entry).unwrap_or_default())
        })
    }

    fn statfs(&self, context: &Context, inode: u64) -> io::Result<statvfs64> {
        let space = self.tree.space();
        let mut answer = Nothing.statfs(context, inode)?;
        answer.f_bsize = space.block_bytes.into();
        answer.f_frsize = space.block_bytes.into();
        answer.f_blocks = space.blocks;
        answer.f_bfree = space.free_blocks;
        answer.f_bavail = space.available_blocks;
        answer.f_files = space.inodes;
        answer.f_ffree = space.free_inodes;
        answer.f_favail = space.free_inodes;
        answer.f_namemax = space.name_bytes_max.into();
        Ok(answer)
    }

    fn getxattr(
        &self,
        _: &Context,
        inode: u64,
        key: &CStr,
        size: u32,
    ) -> io::Result<GetxattrReply> {
        let buffer = Block::private((size as usize).min(XATTR_BYTES));
        let name = AttributeName::new(key.to_bytes()).map_err(errno)?;
        let request = GetXattr { node: Node(inode), name, buffer };
        let ack = self.tree.get_xattr(request).map_err(|nak| errno(nak.why))?;
        if size == 0 {
            return Ok(GetxattrReply::Count(ack.len));
        }
        Ok(GetxattrReply::Value(taken(&ack.buffer, ack.len)))
    }

    fn listxattr(&self, context: &Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        let request = ListXattr { node: Node(inode), buffer: Block::private(XATTR_BYTES) };
        let ack = self.tree.list_xattr(request).map_err(|nak| errno(nak.why))?;
        let mut names = taken(&ack.buffer, ack.len);
        if context.uid != 0 {
            names = without_trusted(&names);
        }
        match size as usize {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            room if room < names.len() => Err(errno(Refusal::BufferTooSmall)),
            _ => Ok(ListxattrReply::Names(names)),
        }
    }
}

/// The list without the names that only root may see (xattr(7)).
fn without_trusted(names: &[u8]) -> Vec<u8> {
    let each = names.split_inclusive(|&b| b == 0);
    each.filter(|name| !name.starts_with(b"trusted.")).flatten().copied().collect()
}

fn taken(buffer: &Block, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; (len as usize).min(buffer.len())];
    buffer.copy_out(0, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_sees_trusted_attributes() {
        let names = b"user.a\0trusted.b\0security.c\0trusted\0";
        assert_eq!(without_trusted(names), b"user.a\0security.c\0trusted\0");
        assert_eq!(without_trusted(b""), b"");
    }

    #[test]
    fn looking_pays_or_is_given_up() {
        let mut patience = Patience::default();
        let nothing = std::fs::File::open("/dev/zero").unwrap();
        for _ in 0..20 {
            patience.since = Some(Instant::now() - LOOK_MAX);
            patience.wait(&nothing).unwrap();
        }
        assert_eq!((patience.budget, patience.since), (LOOK_MIN, None));
        for _ in 0..20 {
            patience.since = Some(Instant::now());
            patience.paid();
        }
        assert_eq!((patience.budget, patience.since), (LOOK_MAX, None));
    }
}
