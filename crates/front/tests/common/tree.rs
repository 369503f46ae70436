//! A tree in memory: directories, files, and records of some requests.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use draconis_exchange::contract::directory::{self, DirEntry, DirectoryServer, EntryWriter};
use draconis_exchange::contract::file::{self, FileServer};
use draconis_exchange::contract::tree::Tree;
use draconis_types::SharedSlice;
use draconis_types::{Attributes, CacheValidity, FileType, Name, Node, Refusal, StatFs, Time};

#[derive(Default)]
pub struct MemoryTree(Mutex<TreeState>);

#[derive(Default)]
pub struct TreeState {
    pub nodes: BTreeMap<u64, TreeObject>,
    /// Reference counts of the nodes, as counted by the front end.
    pub user_counts: BTreeMap<u64, i64>,
    /// Result of open; `None` if open needs no request.
    pub open_result: Option<Result<CacheValidity, Refusal>>,
    /// Maximum length of one write, in bytes.
    pub max_write_bytes: Option<usize>,
    /// The `no_atime` flags of the reads.
    pub no_atime: Vec<bool>,
}

pub struct TreeObject {
    pub parent: u64,
    pub kind: FileType,
    pub bytes: Vec<u8>,
    pub names: BTreeMap<Vec<u8>, u64>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub flags: u32,
}

impl MemoryTree {
    /// Creates a tree with only a root directory.
    pub fn new() -> Self {
        let tree = Self::default();
        tree.add(0, b"", FileType::Directory);
        tree
    }

    pub fn state(&self) -> MutexGuard<'_, TreeState> {
        self.0.lock().unwrap()
    }

    /// Adds a node; returns its number.
    pub fn add(&self, parent: u64, name: &[u8], kind: FileType) -> u64 {
        let mut state = self.state();
        let node = state.nodes.len() as u64 + 1;
        let object = TreeObject {
            parent: parent.max(1),
            kind,
            bytes: vec![],
            names: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            flags: 0,
        };
        state.nodes.insert(node, object);
        if let Some(directory) = state.nodes.get_mut(&parent) {
            directory.names.insert(name.to_vec(), node);
        }
        node
    }
}

impl TreeState {
    fn get(&self, node: Node) -> Result<&TreeObject, Refusal> {
        self.nodes.get(&node.0).ok_or(Refusal::NotFound)
    }

    fn get_mut(&mut self, node: Node) -> Result<&mut TreeObject, Refusal> {
        self.nodes.get_mut(&node.0).ok_or(Refusal::NotFound)
    }

    fn attributes(&self, node: Node) -> Result<Attributes, Refusal> {
        let object = self.get(node)?;
        let time = Time { seconds: 5, nanoseconds: 6 };
        Ok(Attributes {
            node,
            generation: 3,
            kind: object.kind,
            mode: object.kind.mode_bits() | 0o644,
            links: 1,
            uid: 1,
            gid: 2,
            device: (0, 0),
            size_bytes: object.bytes.len() as u64,
            blocks_512: 0,
            block_size_bytes: 4096,
            flags: object.flags,
            no_xattrs: object.xattrs.is_empty(),
            accessed: time,
            modified: time,
            changed: time,
            created: None,
        })
    }
}

impl DirectoryServer for MemoryTree {
    fn lookup(&self, request: &mut directory::Lookup) -> Result<Attributes, Refusal> {
        let state = self.state();
        let parent = state.get(request.parent)?;
        let found = match request.name.as_bytes() {
            b"." => request.parent.0,
            b".." => parent.parent,
            name => *parent.names.get(name).ok_or(Refusal::NotFound)?,
        };
        state.attributes(Node(found))
    }

    fn get_attributes(
        &self,
        request: &mut directory::GetAttributes,
    ) -> Result<Attributes, Refusal> {
        self.state().attributes(request.node)
    }

    fn enumerate(&self, request: &mut directory::Enumerate) -> Result<u32, Refusal> {
        let state = self.state();
        let names = &state.get(request.node)?.names;
        let mut entries = EntryWriter::new(&mut request.buffer);
        for (nth, (name, node)) in (1..).zip(names).skip(request.cookie as usize) {
            let attributes = state.attributes(Node(*node))?;
            let mut entry = DirEntry::new(nth, Name::new(name)?, attributes.kind, Node(*node));
            entry.attributes = request.with_attributes.then_some(attributes);
            if !entries.push(&entry) {
                break;
            }
        }
        Ok(entries.len())
    }

    fn create(&self, request: &mut directory::Create) -> Result<Attributes, Refusal> {
        let name = request.name.as_bytes();
        if self.state().get(request.parent)?.names.contains_key(name) {
            return Err(Refusal::Exists);
        }
        let node = self.add(request.parent.0, name, FileType::File);
        self.state().attributes(Node(node))
    }

    fn open(&self, _: &mut directory::Open) -> Result<CacheValidity, Refusal> {
        self.state().open_result.unwrap_or(Err(Refusal::NotSupported))
    }

    fn get_xattr(&self, request: &mut directory::GetXattr) -> Result<u32, Refusal> {
        let state = self.state();
        let xattrs = &state.get(request.node)?.xattrs;
        let value = xattrs.get(request.name.as_bytes()).ok_or(Refusal::NoAttribute)?;
        if !request.buffer.is_empty() && request.buffer.copy_in(0, value) < value.len() {
            return Err(Refusal::BufferTooSmall);
        }
        Ok(value.len() as u32)
    }

    fn set_xattr(&self, request: &mut directory::SetXattr) -> Result<(), Refusal> {
        let mut value = vec![0; request.len as usize];
        request.value.copy_out(0, &mut value);
        let name = request.name.as_bytes().to_vec();
        self.state().get_mut(request.node)?.xattrs.insert(name, value);
        Ok(())
    }

    fn set_flags(&self, request: &mut directory::SetFlags) -> Result<Attributes, Refusal> {
        self.state().get_mut(request.node)?.flags = request.flags;
        self.state().attributes(request.node)
    }
}

impl Tree for MemoryTree {
    type File<'a> = MemoryFile<'a>;

    fn file(&self, node: Node) -> MemoryFile<'_> {
        MemoryFile { tree: self, node }
    }

    fn statfs(&self) -> StatFs {
        StatFs { block_bytes: 4096, name_bytes_max: 255, ..StatFs::default() }
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn handles_open(&self, _: FileType) -> bool {
        self.state().open_result.is_some()
    }

    fn add_user(&self, node: Node) {
        *self.state().user_counts.entry(node.0).or_default() += 1;
    }

    fn remove_users(&self, node: Node, users: u64) {
        *self.state().user_counts.entry(node.0).or_default() -= users as i64;
    }
}

pub struct MemoryFile<'a> {
    tree: &'a MemoryTree,
    node: Node,
}

impl FileServer for MemoryFile<'_> {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        let mut state = self.tree.state();
        state.no_atime.push(request.no_atime);
        let bytes = &state.get(self.node)?.bytes;
        let end = bytes.len().min((request.offset + u64::from(request.len)) as usize);
        let wanted = bytes.get(request.offset as usize..end).unwrap_or_default();
        // In two slices, as a cache would lend them; a short one is copied.
        let (first, second) = wanted.split_at(wanted.len() / 2);
        let mut len = request.buffer.put_slice(0, SharedSlice::new(first.to_vec()));
        len += match second.len() {
            ..100 => request.buffer.copy_in(len, second),
            _ => request.buffer.put_slice(len, SharedSlice::new(second.to_vec())),
        };
        Ok(len as u32)
    }

    fn write(&self, request: &mut file::Write) -> Result<u32, Refusal> {
        assert!(request.is_in_bounds());
        let mut state = self.tree.state();
        let len = (request.len as usize).min(state.max_write_bytes.unwrap_or(usize::MAX));
        let bytes = &mut state.get_mut(self.node)?.bytes;
        let at = request.offset as usize;
        bytes.resize(bytes.len().max(at + len), 0);
        request.buffer.copy_out(request.buffer_offset as usize, &mut bytes[at..at + len]);
        Ok(len as u32)
    }

    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        self.tree.state().attributes(self.node)
    }

    fn sync(&self, _: &mut file::Sync) -> Result<(), Refusal> {
        Ok(())
    }
}
