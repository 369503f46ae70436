//! The requests that the library decodes, answered from a [`Tree`]. None of them changes it.
//!
//! Nothing here keeps state of a file. A node is identified by its number; the handle only tells
//! how it was opened.
//!
//! Law: every reply with a node is one `add_user`, and every forget is so many `remove_users`. The
//! root is not counted, nor are `.` and `..`.

use std::ffi::CStr;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use draconis_exchange::contract::directory::{
    EntryReader, Enumerate, GetAttributes, GetXattr, ListXattr, Lookup, ReadLink,
};
use draconis_exchange::contract::file::{FileServer, Seek};
use draconis_exchange::contract::tree::Tree;
use draconis_types::Block;
use draconis_types::lock::Mutex;
use draconis_types::{AttributeName, Attributes, FileType, Name, Node, Refusal, Time};
use fuse_backend_rs::abi::fuse_abi::{stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, GetxattrReply, ListxattrReply,
};
use rustix::io::Errno;

use super::open::NO_ATIME_HANDLE;
use super::reply::{self, CACHE_TIMEOUT_SECONDS};

/// Cache timeout: the volume changes only through this server, so the kernel's caches stay valid.
const CACHE_TIMEOUT: Duration = Duration::from_secs(CACHE_TIMEOUT_SECONDS);
/// Longest target of a symbolic link, in bytes.
const MAX_LINK_BYTES: usize = 4096;
/// Longest value or list of extended attributes that Linux requests, in bytes.
const MAX_XATTR_BYTES: usize = 64 << 10;

/// `whence` values of `lseek` in Linux.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Adapter of the directory and file contracts to the library's requests.
pub(super) struct Handler<'a, T> {
    pub(super) tree: &'a T,
    /// The root directory's node number in the tree.
    root: OnceLock<Node>,
    /// Blocks that listings have used: zeroing a new one costs more than the listing.
    buffers: Mutex<Vec<Block>>,
}

pub(super) fn io_error_from_refusal(why: Refusal) -> io::Error {
    why.errno().into()
}

/// Returns the errno that the kernel expects for an operation that is not implemented.
fn enosys_error() -> io::Error {
    Errno::NOSYS.into()
}

fn name_from_cstr(name: &CStr) -> io::Result<Name> {
    Name::new(name.to_bytes()).map_err(io_error_from_refusal)
}

/// Converts a refusal to an errno. `NotSupported` becomes ENOSYS, after which the kernel does not
/// send such requests again.
fn errno_or_enosys(why: Refusal) -> io::Error {
    if why == Refusal::NotSupported { enosys_error() } else { io_error_from_refusal(why) }
}

impl<'a, T: Tree + Sync> Handler<'a, T> {
    pub(super) fn new(tree: &'a T) -> Self {
        Self { tree, root: OnceLock::new(), buffers: Mutex::default() }
    }

    /// Returns the reply with a node, which the kernel references from now on.
    fn referenced_entry(&self, attributes: &Attributes) -> Entry {
        self.tree.add_user(attributes.node);
        let entry = entry_from_attributes(attributes);
        // The root has a node number that names lead to, and another one in FUSE.
        if attributes.kind == FileType::Directory && self.root_node() == Some(attributes.node) {
            return Entry { inode: Node::ROOT.0, generation: 0, ..entry };
        }
        entry
    }

    /// Returns [`Handler::referenced_entry`] with the entry timeout of a name in `parent`.
    fn entry_of_name_in(&self, parent: u64, attributes: &Attributes) -> Entry {
        let entry_timeout = self.entry_timeout(parent);
        Entry { entry_timeout, ..self.referenced_entry(attributes) }
    }

    /// Returns the entry timeout of names in a directory.
    fn entry_timeout(&self, directory: u64) -> Duration {
        match self.attributes(directory) {
            Ok(directory) => Duration::from_secs(reply::entry_timeout_seconds(&directory)),
            Err(_) => Duration::ZERO,
        }
    }

    fn root_node(&self) -> Option<Node> {
        if let Some(root) = self.root.get() {
            return Some(*root);
        }
        let root = self.attributes(Node::ROOT.0).ok()?.node;
        Some(*self.root.get_or_init(|| root))
    }

    fn attributes(&self, inode: u64) -> io::Result<Attributes> {
        self.tree
            .get_attributes(&mut GetAttributes { node: Node(inode) })
            .map_err(io_error_from_refusal)
    }

    fn take_buffer(&self, len: usize) -> Block {
        let mut buffers = self.buffers.lock();
        let fitting = buffers.iter().rposition(|block| block.len() >= len);
        match fitting {
            Some(at) => buffers.swap_remove(at),
            None => Block::private(len.next_power_of_two()),
        }
    }

    fn recycle_buffer(&self, block: Block) {
        let mut buffers = self.buffers.lock();
        if buffers.len() < 4 {
            buffers.push(block);
        }
    }

    /// Lists `.` and `..`, which volumes omit. Their cookies are 0 and 1; those of the volume
    /// follow.
    fn list_dot_entries(
        &self,
        inode: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<Option<u64>> {
        for (at, name) in [(0, &b"."[..]), (1, b"..")] {
            if offset > at {
                continue;
            }
            let mut lookup = Lookup {
                parent: Node(inode),
                name: Name::new(name).map_err(io_error_from_refusal)?,
            };
            let ino = self.tree.lookup(&mut lookup).map_err(io_error_from_refusal)?.node.0;
            let entry =
                DirEntry { ino, offset: at + 1, type_: dirent_type(FileType::Directory), name };
            if add(entry)? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(offset.saturating_sub(2)))
    }

    fn enumerate(
        &self,
        (inode, handle): (u64, u64),
        size: u32,
        offset: u64,
        with_attributes: bool,
        add: &mut dyn FnMut(DirEntry<'_>, Option<Attributes>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let Some(mut cookie) =
            self.list_dot_entries(inode, offset, &mut |entry| add(entry, None))?
        else {
            return Ok(());
        };
        let mut has_names = false;
        loop {
            let mut request = Enumerate {
                node: Node(inode),
                cookie,
                buffer: self.take_buffer((size as usize).max(4096)),
                with_attributes,
                no_atime: handle == NO_ATIME_HANDLE,
            };
            let listed = self.tree.enumerate(&mut request);
            let records = listed.and_then(|len| {
                EntryReader::new(&request.buffer, len).map_err(|_| Refusal::Corrupt)
            });
            self.recycle_buffer(request.buffer);
            let records = match records {
                // The collected entries are returned first; the next request gets the error.
                Err(_) if has_names => return Ok(()),
                records => records.map_err(io_error_from_refusal)?,
            };
            let before = cookie;
            for record in records {
                let record = record.map_err(|_| io_error_from_refusal(Refusal::Corrupt))?;
                cookie = record.cookie;
                let name = record.name.as_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let entry = DirEntry {
                    ino: record.node.0,
                    offset: record.cookie + 2,
                    type_: record.kind.map_or(0, dirent_type),
                    name,
                };
                if add(entry, record.attributes)? == 0 {
                    return Ok(());
                }
                has_names = true;
                if with_attributes && let Some(attributes) = record.attributes {
                    self.tree.add_user(attributes.node);
                }
            }
            if cookie == before {
                return Ok(());
            }
        }
    }
}

/// Returns the `DT_*` value of a file type.
fn dirent_type(kind: FileType) -> u32 {
    kind.mode_bits() >> 12
}

fn stat_from_attributes(attributes: &Attributes) -> stat64 {
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

fn entry_from_attributes(attributes: &Attributes) -> Entry {
    Entry {
        inode: attributes.node.0,
        generation: attributes.generation.into(),
        attr: stat_from_attributes(attributes),
        attr_flags: 0,
        attr_timeout: CACHE_TIMEOUT,
        entry_timeout: CACHE_TIMEOUT,
    }
}

/// File system whose only use is the library's default `statfs` reply, which has no other
/// constructor.
struct DefaultStatfs;

impl FileSystem for DefaultStatfs {
    type Inode = u64;
    type Handle = u64;
}

impl<T: Tree + Sync> FileSystem for Handler<'_, T> {
    type Inode = u64;
    type Handle = u64;

    fn lookup(&self, _: &Context, parent: u64, child: &CStr) -> io::Result<Entry> {
        match self.tree.lookup(&mut Lookup { parent: Node(parent), name: name_from_cstr(child)? }) {
            Ok(found) => Ok(self.entry_of_name_in(parent, &found)),
            // A reply without a node is a negative dentry for the kernel.
            Err(Refusal::NotFound) => {
                Ok(Entry { entry_timeout: self.entry_timeout(parent), ..Entry::default() })
            }
            Err(why) => Err(io_error_from_refusal(why)),
        }
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((stat_from_attributes(&self.attributes(inode)?), CACHE_TIMEOUT))
    }

    fn forget(&self, _: &Context, inode: u64, count: u64) {
        self.tree.remove_users(Node(inode), count);
    }

    fn readlink(&self, _: &Context, inode: u64) -> io::Result<Vec<u8>> {
        let mut request = ReadLink { node: Node(inode), buffer: self.take_buffer(MAX_LINK_BYTES) };
        let len = self.tree.read_link(&mut request);
        let target = len.map(|len| leading_bytes(&request.buffer, len));
        self.recycle_buffer(request.buffer);
        target.map_err(io_error_from_refusal)
    }

    fn release(
        &self,
        _: &Context,
        _: u64,
        _: u32,
        _: u64,
        _: bool,
        _: bool,
        _: Option<u64>,
    ) -> io::Result<()> {
        // There is no state of open files.
        Ok(())
    }

    fn releasedir(&self, _: &Context, _: u64, _: u32, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn lseek(&self, _: &Context, inode: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        // The kernel sends only these two, and handles the others itself.
        let hole = match whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return Err(Errno::INVAL.into()),
        };
        // After ENOSYS the kernel does not send it again, and treats everything as data.
        let found = self.tree.file(Node(inode)).seek(&mut Seek { offset, hole });
        found.map_err(errno_or_enosys)?.ok_or_else(|| Errno::NXIO.into())
    }

    fn readdir(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.enumerate((inode, handle), size, offset, false, &mut |entry, _| add(entry))
    }

    fn readdirplus(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let entry_timeout = self.entry_timeout(inode);
        self.enumerate((inode, handle), size, offset, true, &mut |dirent, attributes| {
            let named = |attributes| Entry { entry_timeout, ..entry_from_attributes(attributes) };
            // Without a node the kernel uses only the name, and looks it up later.
            add(dirent, attributes.as_ref().map(named).unwrap_or_default())
        })
    }

    fn statfs(&self, context: &Context, inode: u64) -> io::Result<statvfs64> {
        let space = self.tree.statfs();
        let mut answer = DefaultStatfs.statfs(context, inode)?;
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
        let buffer = Block::private((size as usize).min(MAX_XATTR_BYTES));
        let name = AttributeName::new(key.to_bytes()).map_err(io_error_from_refusal)?;
        let mut request = GetXattr { node: Node(inode), name, buffer };
        let len = self.tree.get_xattr(&mut request).map_err(io_error_from_refusal)?;
        if size == 0 {
            return Ok(GetxattrReply::Count(len));
        }
        Ok(GetxattrReply::Value(leading_bytes(&request.buffer, len)))
    }

    fn listxattr(&self, context: &Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        let mut request = ListXattr { node: Node(inode), buffer: Block::private(MAX_XATTR_BYTES) };
        let len = self.tree.list_xattr(&mut request).map_err(io_error_from_refusal)?;
        let mut names = leading_bytes(&request.buffer, len);
        if context.uid != 0 {
            names = without_trusted(&names);
        }
        match size as usize {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            room if room < names.len() => Err(io_error_from_refusal(Refusal::BufferTooSmall)),
            _ => Ok(ListxattrReply::Names(names)),
        }
    }
}

/// Returns the list without the names that only root may see (xattr(7)).
fn without_trusted(names: &[u8]) -> Vec<u8> {
    let each = names.split_inclusive(|&b| b == 0);
    each.filter(|name| !name.starts_with(b"trusted.")).flatten().copied().collect()
}

fn leading_bytes(buffer: &Block, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; (len as usize).min(buffer.len())];
    buffer.copy_out(0, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_xattrs_are_listed_only_for_root() {
        let names = b"user.a\0trusted.b\0security.c\0trusted\0";
        assert_eq!(without_trusted(names), b"user.a\0security.c\0trusted\0");
        assert_eq!(without_trusted(b""), b"");
    }
}
