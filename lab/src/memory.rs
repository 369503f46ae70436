//! A file system tree in memory, with almost no cost of its own: the upper bound for any server
//! behind our FUSE front end.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use draconis_exchange::contract::directory::{
    self, DirectoryServer, EntryWriter, RENAME_EXCHANGE, RENAME_NO_REPLACE,
};
use draconis_exchange::contract::file::{self, FileServer};
use draconis_exchange::contract::tree::Tree;
use draconis_types::lock::{Mutex, MutexGuard};
use draconis_types::{
    Attributes, FallocateMode, FileType, Name, Node, Refusal, SetTime, StatFs, Time,
    clear_suid_sgid,
};
use draconis_types::{Block, SharedSlice};

/// Block size for counting the blocks of a file, in bytes.
const BLOCK_BYTES: u64 = 4096;

/// Contents of holes, and of files whose data is discarded.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The tree.
pub struct MemoryTree {
    nodes: Mutex<NodeTable>,
    /// True if written data is stored; otherwise files read as zeros.
    keeps: bool,
    errors: InjectedErrors,
}

/// Errors of the contents of all files, as of a failing disk.
#[derive(Default)]
pub struct InjectedErrors {
    /// Kind of the calls that fail, and the bytes of the file that they fail for.
    failing: Mutex<Option<(FileCall, Range<u64>)>>,
    failed: AtomicU64,
}

/// A call on the contents of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileCall {
    Read,
    Write,
    Sync,
}

impl InjectedErrors {
    /// Has all further calls of this kind on these bytes fail with EIO, or none.
    pub fn set_failing(&self, calls: Option<(FileCall, Range<u64>)>) {
        *self.failing.lock() = calls;
    }

    /// Returns the number of calls that have failed.
    pub fn failed_calls(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    fn check(&self, call: FileCall, bytes: Range<u64>) -> FileResult<()> {
        let failing = self.failing.lock();
        let is_failing = |(which, range): &(FileCall, Range<u64>)| {
            *which == call && range.start < bytes.end && bytes.start < range.end
        };
        if !failing.as_ref().is_some_and(is_failing) {
            return Ok(());
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        Err(Refusal::Io)
    }
}

struct NodeTable {
    by_number: HashMap<u64, MemoryNode>,
    next: u64,
}

struct MemoryNode {
    attributes: Attributes,
    holds: u64,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    what: NodeContent,
}

enum NodeContent {
    File(Vec<u8>),
    Directory(NameTable),
    Link(Vec<u8>),
    Other,
}

/// Names of a directory, by name and in order of creation.
#[derive(Default)]
struct NameTable {
    parent: u64,
    by_name: HashMap<Vec<u8>, (u64, u64)>,
    by_age: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

type FileResult<T> = Result<T, Refusal>;

fn current_time() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

impl NameTable {
    fn insert(&mut self, name: &[u8], node: u64) {
        self.next += 1;
        self.by_name.insert(name.to_vec(), (node, self.next));
        self.by_age.insert(self.next, name.to_vec());
    }

    fn remove(&mut self, name: &[u8]) -> Option<u64> {
        let (node, age) = self.by_name.remove(name)?;
        self.by_age.remove(&age);
        Some(node)
    }
}

impl NodeTable {
    fn get(&self, node: Node) -> FileResult<&MemoryNode> {
        self.by_number.get(&node.0).ok_or(Refusal::NotFound)
    }

    fn get_mut(&mut self, node: Node) -> FileResult<&mut MemoryNode> {
        self.by_number.get_mut(&node.0).ok_or(Refusal::NotFound)
    }

    fn name_table(&mut self, node: Node) -> FileResult<&mut NameTable> {
        match &mut self.get_mut(node)?.what {
            NodeContent::Directory(names) => Ok(names),
            _ => Err(Refusal::NotADirectory),
        }
    }

    fn find(&mut self, parent: Node, name: &[u8]) -> FileResult<Node> {
        let names = self.name_table(parent)?;
        match name {
            b"." => Ok(parent),
            b".." => Ok(Node(names.parent)),
            _ => names.by_name.get(name).map(|(node, _)| Node(*node)).ok_or(Refusal::NotFound),
        }
    }

    fn update_mtime(&mut self, node: Node) {
        if let Ok(object) = self.get_mut(node) {
            let now = current_time();
            (object.attributes.modified, object.attributes.changed) = (now, now);
        }
    }

    fn create_node(
        &mut self,
        parent: Node,
        name: &Name,
        mode: u32,
        owner: (u32, u32),
        device: (u32, u32),
        what: NodeContent,
    ) -> FileResult<Attributes> {
        let name = name.as_bytes();
        if self.find(parent, name).is_ok() {
            return Err(Refusal::Exists);
        }
        self.next += 1;
        let now = current_time();
        let kind = FileType::from_mode(mode).ok_or(Refusal::Invalid)?;
        let size_bytes =
            if let NodeContent::Link(target) = &what { target.len() as u64 } else { 0 };
        let attributes = Attributes {
            node: Node(self.next),
            generation: 1,
            kind,
            mode,
            links: if kind == FileType::Directory { 2 } else { 1 },
            uid: owner.0,
            gid: owner.1,
            device,
            size_bytes,
            blocks_512: 0,
            block_size_bytes: BLOCK_BYTES as u32,
            flags: 0,
            no_xattrs: true,
            accessed: now,
            modified: now,
            changed: now,
            created: Some(now),
        };
        self.name_table(parent)?.insert(name, attributes.node.0);
        if kind == FileType::Directory {
            self.get_mut(parent)?.attributes.links += 1;
        }
        let object = MemoryNode { attributes, holds: 0, xattrs: BTreeMap::new(), what };
        self.by_number.insert(attributes.node.0, object);
        self.update_mtime(parent);
        Ok(attributes)
    }

    /// Removes a link of a node.
    fn drop_link(&mut self, node: Node) -> FileResult<()> {
        let object = self.get_mut(node)?;
        let links = if object.attributes.kind == FileType::Directory { 2 } else { 1 };
        object.attributes.links = object.attributes.links.saturating_sub(links);
        object.attributes.changed = current_time();
        if object.attributes.links == 0 && object.holds == 0 {
            self.by_number.remove(&node.0);
        }
        Ok(())
    }

    fn remove_name(&mut self, parent: Node, name: &[u8], directory: bool) -> FileResult<()> {
        let node = self.find(parent, name)?;
        match (&self.get(node)?.what, directory) {
            (NodeContent::Directory(names), true) if !names.by_name.is_empty() => {
                return Err(Refusal::NotEmpty);
            }
            (NodeContent::Directory(_), false) => return Err(Refusal::IsADirectory),
            (NodeContent::Directory(_), true) => self.get_mut(parent)?.attributes.links -= 1,
            (_, true) => return Err(Refusal::NotADirectory),
            (_, false) => {}
        }
        self.name_table(parent)?.remove(name);
        self.update_mtime(parent);
        self.drop_link(node)
    }

    fn is_directory(&self, node: Node) -> bool {
        self.get(node).is_ok_and(|object| object.attributes.kind == FileType::Directory)
    }

    /// Updates the parent of a moved directory.
    fn finish_rename(&mut self, from: Node, to: Node, node: Node) -> FileResult<()> {
        if from != to && self.is_directory(node) {
            self.name_table(node)?.parent = to.0;
            self.get_mut(from)?.attributes.links -= 1;
            self.get_mut(to)?.attributes.links += 1;
        }
        Ok(())
    }

    fn rename(&mut self, m: &directory::Rename) -> FileResult<()> {
        let (old, new) = (m.name.as_bytes(), m.new_name.as_bytes());
        let node = self.find(m.from, old)?;
        let other = self.find(m.to, new).ok();
        match (other, m.flags) {
            (Some(_), RENAME_NO_REPLACE) => return Err(Refusal::Exists),
            (None, RENAME_EXCHANGE) => return Err(Refusal::NotFound),
            (Some(other), _) if other == node => return Ok(()),
            (Some(other), RENAME_EXCHANGE) => {
                self.name_table(m.from)?.remove(old);
                self.name_table(m.to)?.remove(new);
                self.name_table(m.from)?.insert(old, other.0);
                self.name_table(m.to)?.insert(new, node.0);
                self.finish_rename(m.to, m.from, other)?;
                return self.finish_rename(m.from, m.to, node);
            }
            (Some(_), _) => self.remove_name(m.to, new, self.is_directory(node))?,
            (None, _) => {}
        }
        self.name_table(m.from)?.remove(old);
        self.name_table(m.to)?.insert(new, node.0);
        self.update_mtime(m.from);
        self.update_mtime(m.to);
        self.finish_rename(m.from, m.to, node)
    }

    fn change_attributes(&mut self, m: &directory::SetAttributes) -> FileResult<Attributes> {
        let object = self.get_mut(m.node)?;
        let time = |wanted: Option<SetTime>, had: Time| match wanted {
            Some(SetTime::Now) => current_time(),
            Some(SetTime::To(time)) => time,
            None => had,
        };
        let (change, a) = (&m.change, &mut object.attributes);
        let mode = change.mode.map_or(a.mode, |mode| a.kind.mode_bits() | (mode & 0o7777));
        a.mode = match change.clear_privileges {
            Some(caller) if a.kind != FileType::Directory => {
                clear_suid_sgid(mode, a.gid, Some(caller))
            }
            _ => mode,
        };
        a.uid = change.uid.unwrap_or(a.uid);
        a.gid = change.gid.unwrap_or(a.gid);
        a.accessed = time(change.accessed, a.accessed);
        a.modified = time(change.modified, a.modified);
        a.changed = time(change.changed.or(Some(SetTime::Now)), a.changed);
        if let Some(size) = change.size_bytes {
            a.size_bytes = size;
            a.blocks_512 = size.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
            a.modified = time(change.modified.or(Some(SetTime::Now)), a.modified);
            if let NodeContent::File(bytes) = &mut object.what
                && bytes.len() as u64 > size
            {
                bytes.truncate(size as usize);
            }
        }
        Ok(object.attributes)
    }
}

impl MemoryTree {
    /// Creates an empty tree with a world-writable root directory.
    pub fn new(keeps: bool) -> Self {
        let mut nodes = NodeTable { by_number: HashMap::new(), next: 2 };
        let time = current_time();
        let attributes = Attributes {
            node: Node::ROOT,
            generation: 1,
            kind: FileType::Directory,
            mode: 0o041_777,
            links: 2,
            uid: 0,
            gid: 0,
            device: (0, 0),
            size_bytes: BLOCK_BYTES,
            blocks_512: 8,
            block_size_bytes: BLOCK_BYTES as u32,
            flags: 0,
            no_xattrs: true,
            accessed: time,
            modified: time,
            changed: time,
            created: None,
        };
        let what = NodeContent::Directory(NameTable { parent: 1, ..NameTable::default() });
        let root = MemoryNode { attributes, holds: 1, xattrs: BTreeMap::new(), what };
        nodes.by_number.insert(1, root);
        Self { nodes: Mutex::new(nodes), keeps, errors: InjectedErrors::default() }
    }

    /// Returns the errors that its files have.
    pub fn errors(&self) -> &InjectedErrors {
        &self.errors
    }

    fn lock(&self) -> MutexGuard<'_, NodeTable> {
        self.nodes.lock()
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.lock().by_number.len()
    }

    fn attributes(&self, node: Node) -> FileResult<Attributes> {
        Ok(self.lock().get(node)?.attributes)
    }
}

impl DirectoryServer for MemoryTree {
    fn lookup(&self, request: &mut directory::Lookup) -> FileResult<Attributes> {
        let mut nodes = self.lock();
        let node = nodes.find(request.parent, request.name.as_bytes())?;
        Ok(nodes.get(node)?.attributes)
    }

    fn get_attributes(&self, request: &mut directory::GetAttributes) -> FileResult<Attributes> {
        self.attributes(request.node)
    }

    fn enumerate(&self, request: &mut directory::Enumerate) -> FileResult<u32> {
        let mut nodes = self.lock();
        let names = std::mem::take(nodes.name_table(request.node)?);
        let mut entries = EntryWriter::new(&mut request.buffer);
        let mut full = false;
        for (age, name) in names.by_age.range(request.cookie + 1..) {
            let node = Node(names.by_name.get(name).map_or(0, |(node, _)| *node));
            let Ok(object) = nodes.get(node) else { continue };
            let entry = directory::DirEntry {
                cookie: *age,
                node,
                kind: Some(object.attributes.kind),
                name: Name::new(name)?,
                attributes: request.with_attributes.then_some(object.attributes),
            };
            if !entries.push(&entry) {
                full = entries.is_empty();
                break;
            }
        }
        let len = entries.len();
        *nodes.name_table(request.node)? = names;
        if full { Err(Refusal::BufferTooSmall) } else { Ok(len) }
    }

    fn read_link(&self, request: &mut directory::ReadLink) -> FileResult<u32> {
        match &self.lock().get(request.node)?.what {
            NodeContent::Link(target) => Ok(request.buffer.copy_in(0, target) as u32),
            _ => Err(Refusal::Invalid),
        }
    }

    fn get_xattr(&self, request: &mut directory::GetXattr) -> FileResult<u32> {
        let nodes = self.lock();
        let xattrs = &nodes.get(request.node)?.xattrs;
        let value = xattrs.get(request.name.as_bytes()).ok_or(Refusal::NoAttribute)?;
        copy_to_buffer(&mut request.buffer, value)
    }

    fn list_xattr(&self, request: &mut directory::ListXattr) -> FileResult<u32> {
        let nodes = self.lock();
        let xattrs = &nodes.get(request.node)?.xattrs;
        let list: Vec<u8> = xattrs.keys().flat_map(|name| [&name[..], b"\0"].concat()).collect();
        copy_to_buffer(&mut request.buffer, &list)
    }

    fn create(&self, request: &mut directory::Create) -> FileResult<Attributes> {
        let what = match FileType::from_mode(request.mode) {
            Some(FileType::File) => NodeContent::File(vec![]),
            _ => NodeContent::Other,
        };
        let (mode, owner) = (request.mode & !request.umask, (request.uid, request.gid));
        self.lock().create_node(request.parent, &request.name, mode, owner, request.device, what)
    }

    fn make_directory(&self, request: &mut directory::MakeDirectory) -> FileResult<Attributes> {
        let mode = FileType::Directory.mode_bits() | (request.mode & 0o7777 & !request.umask);
        let what =
            NodeContent::Directory(NameTable { parent: request.parent.0, ..NameTable::default() });
        let owner = (request.uid, request.gid);
        self.lock().create_node(request.parent, &request.name, mode, owner, (0, 0), what)
    }

    fn symlink(&self, request: &mut directory::Symlink) -> FileResult<Attributes> {
        let mut target = vec![0; request.len as usize];
        request.target.copy_out(0, &mut target);
        let (owner, what) = ((request.uid, request.gid), NodeContent::Link(target));
        self.lock().create_node(request.parent, &request.name, 0o120_777, owner, (0, 0), what)
    }

    fn link(&self, request: &mut directory::Link) -> FileResult<Attributes> {
        let mut nodes = self.lock();
        if nodes.find(request.parent, request.name.as_bytes()).is_ok() {
            return Err(Refusal::Exists);
        }
        nodes.name_table(request.parent)?.insert(request.name.as_bytes(), request.node.0);
        nodes.update_mtime(request.parent);
        let object = nodes.get_mut(request.node)?;
        object.attributes.links += 1;
        object.attributes.changed = current_time();
        Ok(object.attributes)
    }

    fn unlink(&self, request: &mut directory::Unlink) -> FileResult<()> {
        self.lock().remove_name(request.parent, request.name.as_bytes(), false)
    }

    fn remove_directory(&self, request: &mut directory::RemoveDirectory) -> FileResult<()> {
        self.lock().remove_name(request.parent, request.name.as_bytes(), true)
    }

    fn rename(&self, request: &mut directory::Rename) -> FileResult<()> {
        self.lock().rename(request)
    }

    fn set_attributes(&self, request: &mut directory::SetAttributes) -> FileResult<Attributes> {
        self.lock().change_attributes(request)
    }

    fn set_flags(&self, request: &mut directory::SetFlags) -> FileResult<Attributes> {
        let mut nodes = self.lock();
        let object = nodes.get_mut(request.node)?;
        object.attributes.flags = request.flags;
        Ok(object.attributes)
    }

    fn set_xattr(&self, request: &mut directory::SetXattr) -> FileResult<()> {
        let mut value = vec![0; request.len as usize];
        request.value.copy_out(0, &mut value);
        let mut nodes = self.lock();
        let xattrs = &mut nodes.get_mut(request.node)?.xattrs;
        match (request.flags, xattrs.contains_key(request.name.as_bytes())) {
            (1, true) => return Err(Refusal::Exists),
            (2, false) => return Err(Refusal::NoAttribute),
            _ => {}
        }
        xattrs.insert(request.name.as_bytes().to_vec(), value);
        Ok(())
    }

    fn remove_xattr(&self, request: &mut directory::RemoveXattr) -> FileResult<()> {
        let mut nodes = self.lock();
        let removed = nodes.get_mut(request.node)?.xattrs.remove(request.name.as_bytes());
        removed.map(drop).ok_or(Refusal::NoAttribute)
    }

    fn sync_volume(&self, _: &mut directory::SyncVolume) -> FileResult<()> {
        Ok(())
    }
}

/// Copies a reply into a buffer; an empty buffer asks for the length.
fn copy_to_buffer(buffer: &mut Block, bytes: &[u8]) -> FileResult<u32> {
    if !buffer.is_empty() && buffer.copy_in(0, bytes) < bytes.len() {
        return Err(Refusal::BufferTooSmall);
    }
    Ok(bytes.len() as u32)
}

impl Tree for MemoryTree {
    type File<'a> = MemoryFile<'a>;

    fn file(&self, node: Node) -> MemoryFile<'_> {
        MemoryFile { tree: self, node }
    }

    fn statfs(&self) -> StatFs {
        StatFs {
            block_bytes: BLOCK_BYTES as u32,
            blocks: 1 << 30,
            free_blocks: 1 << 29,
            available_blocks: 1 << 29,
            inodes: 1 << 30,
            free_inodes: 1 << 29,
            name_bytes_max: Name::MAX_BYTES as u32,
            id: 0,
        }
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn add_user(&self, node: Node) {
        if let Ok(object) = self.lock().get_mut(node) {
            object.holds += 1;
        }
    }

    fn remove_users(&self, node: Node, users: u64) {
        let mut nodes = self.lock();
        let Ok(object) = nodes.get_mut(node) else { return };
        object.holds = object.holds.saturating_sub(users);
        if object.holds == 0 && object.attributes.links == 0 {
            nodes.by_number.remove(&node.0);
        }
    }
}

/// A file of the tree.
pub struct MemoryFile<'a> {
    tree: &'a MemoryTree,
    node: Node,
}

impl FileServer for MemoryFile<'_> {
    fn read(&self, request: &mut file::Read) -> FileResult<u32> {
        if !request.is_in_bounds() {
            return Err(Refusal::Invalid);
        }
        let bytes = request.offset..request.offset.saturating_add(request.len.into());
        self.tree.errors.check(FileCall::Read, bytes)?;
        let nodes = self.tree.lock();
        let object = nodes.get(self.node)?;
        let NodeContent::File(bytes) = &object.what else { return Err(Refusal::Invalid) };
        let end =
            object.attributes.size_bytes.min(request.offset.saturating_add(request.len.into()));
        let len = end.saturating_sub(request.offset) as usize;
        let from = usize::try_from(request.offset).unwrap_or(usize::MAX);
        let there = bytes.get(from..).unwrap_or_default();
        let there = &there[..there.len().min(len)];
        let mut at = request.buffer_offset as usize;
        let end = at + len;
        at += request.buffer.copy_in(at, there);
        while at < end {
            at +=
                request.buffer.put_slice(at, SharedSlice::new(&ZEROS[..ZEROS.len().min(end - at)]));
        }
        Ok(len as u32)
    }

    fn write(&self, request: &mut file::Write) -> FileResult<u32> {
        let bytes = request.offset..request.offset.saturating_add(request.len.into());
        self.tree.errors.check(FileCall::Write, bytes)?;
        let mut nodes = self.tree.lock();
        let object = nodes.get_mut(self.node)?;
        let NodeContent::File(bytes) = &mut object.what else { return Err(Refusal::Invalid) };
        let end = request.offset + u64::from(request.len);
        if self.tree.keeps {
            let (from, len) = (request.offset as usize, request.len as usize);
            if bytes.len() < from + len {
                bytes.resize(from + len, 0);
            }
            request.buffer.copy_out(request.buffer_offset as usize, &mut bytes[from..from + len]);
        }
        let a = &mut object.attributes;
        a.size_bytes = a.size_bytes.max(end);
        a.blocks_512 = a.size_bytes.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
        if request.clear_privileges {
            a.mode = clear_suid_sgid(a.mode, a.gid, None);
        }
        (a.modified, a.changed) = (current_time(), current_time());
        Ok(request.len)
    }

    fn get_attributes(&self, _: &mut file::GetAttributes) -> FileResult<Attributes> {
        self.tree.attributes(self.node)
    }

    fn fallocate(&self, request: &mut file::Fallocate) -> FileResult<()> {
        let mut nodes = self.tree.lock();
        let object = nodes.get_mut(self.node)?;
        let NodeContent::File(bytes) = &mut object.what else { return Err(Refusal::Invalid) };
        let end = request.offset.checked_add(request.len).ok_or(Refusal::TooLarge)?;
        let grows = matches!(
            request.how,
            FallocateMode::Allocate | FallocateMode::ZeroRange { keep_size: false }
        );
        if grows {
            object.attributes.size_bytes = object.attributes.size_bytes.max(end);
        }
        if matches!(request.how, FallocateMode::PunchHole | FallocateMode::ZeroRange { .. }) {
            let end = (end as usize).min(bytes.len());
            if let Some(range) = bytes.get_mut((request.offset as usize).min(end)..end) {
                range.fill(0);
            }
        }
        Ok(())
    }

    fn seek(&self, request: &mut file::Seek) -> FileResult<Option<u64>> {
        // Files have no holes: everything is data.
        let len = self.tree.attributes(self.node)?.size_bytes;
        Ok((request.offset < len).then_some(if request.hole { len } else { request.offset }))
    }

    fn sync(&self, _: &mut file::Sync) -> FileResult<()> {
        self.tree.errors.check(FileCall::Sync, 0..u64::MAX)
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
