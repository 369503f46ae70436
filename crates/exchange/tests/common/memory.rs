//! A small tree in memory, served through the contracts.

use draconis_exchange::channel::Server;
use draconis_exchange::contract::{
    Attributes, FileType, Node, Refusal, StatFs, Time,
    directory::{self, DirEntry, DirectoryServer, EntryWriter},
    file::{self, File, FileServer},
    tree::Tree,
};

use super::name;

/// `/hello` (a file), `/link` -> `dir/loop` -> `../hello`, `/self` -> `self`, `/dir`.
pub struct MemoryTree;

struct Object {
    node: u64,
    parent: u64,
    name: &'static str,
    kind: FileType,
    bytes: &'static [u8],
}

const OBJECTS: [Object; 6] = [
    Object { node: 1, parent: 1, name: "", kind: FileType::Directory, bytes: b"" },
    Object { node: 2, parent: 1, name: "hello", kind: FileType::File, bytes: b"Hello, tree!" },
    Object { node: 3, parent: 1, name: "dir", kind: FileType::Directory, bytes: b"" },
    Object { node: 4, parent: 1, name: "link", kind: FileType::Symlink, bytes: b"dir/loop" },
    Object { node: 5, parent: 3, name: "loop", kind: FileType::Symlink, bytes: b"../hello" },
    Object { node: 6, parent: 1, name: "self", kind: FileType::Symlink, bytes: b"self" },
];

fn object(node: Node) -> Result<&'static Object, Refusal> {
    OBJECTS.iter().find(|o| o.node == node.0).ok_or(Refusal::NotFound)
}

fn attributes(o: &Object) -> Attributes {
    Attributes {
        node: Node(o.node),
        generation: 1,
        kind: o.kind,
        mode: o.kind.mode_bits() | 0o755,
        links: 1,
        uid: 0,
        gid: 0,
        device: (0, 0),
        size_bytes: o.bytes.len() as u64,
        blocks_512: 0,
        block_size_bytes: 4096,
        flags: 0,
        no_xattrs: true,
        accessed: Time::default(),
        modified: Time::default(),
        changed: Time::default(),
        created: None,
    }
}

impl DirectoryServer for MemoryTree {
    fn lookup(&self, request: &mut directory::Lookup) -> Result<Attributes, Refusal> {
        let parent = object(request.parent)?;
        let found = match request.name.as_bytes() {
            b"." => parent,
            b".." => object(Node(parent.parent))?,
            name => OBJECTS
                .iter()
                .find(|o| o.parent == parent.node && o.node != 1 && o.name.as_bytes() == name)
                .ok_or(Refusal::NotFound)?,
        };
        Ok(attributes(found))
    }

    fn get_attributes(
        &self,
        request: &mut directory::GetAttributes,
    ) -> Result<Attributes, Refusal> {
        object(request.node).map(attributes)
    }

    fn enumerate(&self, request: &mut directory::Enumerate) -> Result<u32, Refusal> {
        let mut entries = EntryWriter::new(&mut request.buffer);
        for o in OBJECTS.iter().filter(|o| o.parent == request.node.0 && o.node != 1) {
            let mut entry = DirEntry::new(o.node, name(o.name), o.kind, Node(o.node));
            entry.attributes = request.with_attributes.then(|| attributes(o));
            if o.node > request.cookie && !entries.push(&entry) {
                break;
            }
        }
        Ok(entries.len())
    }

    fn read_link(&self, request: &mut directory::ReadLink) -> Result<u32, Refusal> {
        let target = object(request.node)?.bytes;
        Ok(request.buffer.copy_in(0, target) as u32)
    }
}

pub struct MemoryFile(Node);

impl FileServer for MemoryFile {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        if !request.is_in_bounds() {
            return Err(Refusal::Invalid);
        }
        let bytes = object(self.0).map_or(&b""[..], |o| o.bytes);
        let from = bytes.get(request.offset as usize..).unwrap_or_default();
        let from = &from[..from.len().min(request.len as usize)];
        Ok(request.buffer.copy_in(request.buffer_offset as usize, from) as u32)
    }

    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        object(self.0).map(attributes)
    }
}

impl Tree for MemoryTree {
    type File<'a> = MemoryFile;
    fn file(&self, node: Node) -> MemoryFile {
        MemoryFile(node)
    }
    fn notify_changes_to(&self, end: &Server<File>) {
        // The tree never changes.
        let _ = end.change_notifier();
    }
    fn statfs(&self) -> StatFs {
        StatFs { block_bytes: 4096, name_bytes_max: 255, ..StatFs::default() }
    }
}
