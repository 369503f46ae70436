//! A small tree in memory, served through the contracts.

use draconis_exchange::contract::{
    Attributes, Kind, Node, Refusal, Space, Time,
    directory::{self, DirectoryServer, Entries, Entry},
    file::{self, FileServer},
    tree::Tree,
};

use super::name;

/// `/hello` (a file), `/link` -> `dir/loop` -> `../hello`, `/self` -> `self`, `/dir`.
pub struct Memory;

struct Object {
    node: u64,
    parent: u64,
    name: &'static str,
    kind: Kind,
    bytes: &'static [u8],
}

const OBJECTS: [Object; 6] = [
    Object { node: 1, parent: 1, name: "", kind: Kind::Directory, bytes: b"" },
    Object { node: 2, parent: 1, name: "hello", kind: Kind::File, bytes: b"Hello, tree!" },
    Object { node: 3, parent: 1, name: "dir", kind: Kind::Directory, bytes: b"" },
    Object { node: 4, parent: 1, name: "link", kind: Kind::Symlink, bytes: b"dir/loop" },
    Object { node: 5, parent: 3, name: "loop", kind: Kind::Symlink, bytes: b"../hello" },
    Object { node: 6, parent: 1, name: "self", kind: Kind::Symlink, bytes: b"self" },
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

impl DirectoryServer for Memory {
    fn lookup(&self, m: directory::Lookup) -> Result<directory::AckLookup, directory::NakLookup> {
        let parent = object(m.parent).map_err(|why| directory::NakLookup { why })?;
        let found = match m.name.as_bytes() {
            b"." => Some(parent),
            b".." => object(Node(parent.parent)).ok(),
            name => OBJECTS
                .iter()
                .find(|o| o.parent == parent.node && o.node != 1 && o.name.as_bytes() == name),
        };
        match found {
            Some(o) => Ok(directory::AckLookup { attributes: attributes(o) }),
            None => Err(directory::NakLookup { why: Refusal::NotFound }),
        }
    }

    fn get_attributes(
        &self,
        m: directory::GetAttributes,
    ) -> Result<directory::AckGetAttributes, directory::NakGetAttributes> {
        match object(m.node) {
            Ok(o) => Ok(directory::AckGetAttributes { attributes: attributes(o) }),
            Err(why) => Err(directory::NakGetAttributes { why }),
        }
    }

    fn enumerate(
        &self,
        mut m: directory::Enumerate,
    ) -> Result<directory::AckEnumerate, directory::NakEnumerate> {
        let mut entries = Entries::new(&mut m.buffer);
        for o in OBJECTS.iter().filter(|o| o.parent == m.node.0 && o.node != 1) {
            let mut entry = Entry::new(o.node, name(o.name), o.kind, Node(o.node));
            entry.attributes = m.with_attributes.then(|| attributes(o));
            if o.node > m.cookie && !entries.push(&entry) {
                break;
            }
        }
        let len = entries.len();
        Ok(directory::AckEnumerate { buffer: m.buffer, len })
    }

    fn read_link(
        &self,
        mut m: directory::ReadLink,
    ) -> Result<directory::AckReadLink, directory::NakReadLink> {
        match object(m.node) {
            Ok(o) => {
                let len = m.buffer.copy_in(0, o.bytes) as u32;
                Ok(directory::AckReadLink { buffer: m.buffer, len })
            }
            Err(why) => Err(directory::NakReadLink { buffer: m.buffer, why }),
        }
    }
}

pub struct MemoryFile(Node);

impl FileServer for MemoryFile {
    fn read(&self, mut m: file::Read) -> Result<file::AckRead, file::NakRead> {
        if !m.fits() {
            return Err(file::NakRead { buffer: m.buffer, why: Refusal::Invalid });
        }
        let bytes = object(self.0).map_or(&b""[..], |o| o.bytes);
        let from = bytes.get(m.offset as usize..).unwrap_or_default();
        let from = &from[..from.len().min(m.len as usize)];
        let len = m.buffer.copy_in(m.buffer_offset as usize, from) as u32;
        Ok(file::AckRead { buffer: m.buffer, len })
    }

    fn get_attributes(
        &self,
        _: file::GetAttributes,
    ) -> Result<file::AckGetAttributes, file::NakGetAttributes> {
        match object(self.0) {
            Ok(o) => Ok(file::AckGetAttributes { attributes: attributes(o) }),
            Err(why) => Err(file::NakGetAttributes { why }),
        }
    }
}

impl Tree for Memory {
    type File<'a> = MemoryFile;
    fn file(&self, node: Node) -> MemoryFile {
        MemoryFile(node)
    }
    fn space(&self) -> Space {
        Space { block_bytes: 4096, name_bytes_max: 255, ..Space::default() }
    }
}
