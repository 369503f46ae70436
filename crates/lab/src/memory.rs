//! A tree in memory: a file system that costs next to nothing, so that what is left is the
//! kernel's part and the front's. The limit that a server behind the same front can reach.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use draconis_exchange::contract::directory::{
    self, DirectoryServer, Entries, RENAME_EXCHANGE, RENAME_NO_REPLACE,
};
use draconis_exchange::contract::file::{self, FileServer};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::{
    Attributes, Call, Kind, Name, Node, Refusal, Reservation, SetTime, Space, Time,
    without_privileges,
};

/// What the blocks of a file are counted in, in bytes.
const BLOCK_BYTES: u64 = 4096;

/// The tree.
pub struct Memory {
    nodes: Mutex<Nodes>,
    /// Whether written bytes are kept; otherwise files read as zeros.
    keeps: bool,
}

struct Nodes {
    by_number: HashMap<u64, Object>,
    next: u64,
}

struct Object {
    attributes: Attributes,
    holds: u64,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    what: What,
}

enum What {
    File(Vec<u8>),
    Directory(Names),
    Link(Vec<u8>),
    Other,
}

/// Names by themselves, and in the order in which they came.
#[derive(Default)]
struct Names {
    parent: u64,
    by_name: HashMap<Vec<u8>, (u64, u64)>,
    by_age: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

type Done<T> = Result<T, Refusal>;

fn now() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

impl Names {
    fn add(&mut self, name: &[u8], node: u64) {
        self.next += 1;
        self.by_name.insert(name.to_vec(), (node, self.next));
        self.by_age.insert(self.next, name.to_vec());
    }

    fn take(&mut self, name: &[u8]) -> Option<u64> {
        let (node, age) = self.by_name.remove(name)?;
        self.by_age.remove(&age);
        Some(node)
    }
}

impl Nodes {
    fn get(&self, node: Node) -> Done<&Object> {
        self.by_number.get(&node.0).ok_or(Refusal::NotFound)
    }

    fn get_mut(&mut self, node: Node) -> Done<&mut Object> {
        self.by_number.get_mut(&node.0).ok_or(Refusal::NotFound)
    }

    fn names(&mut self, node: Node) -> Done<&mut Names> {
        match &mut self.get_mut(node)?.what {
            What::Directory(names) => Ok(names),
            _ => Err(Refusal::NotADirectory),
        }
    }

    fn find(&mut self, parent: Node, name: &[u8]) -> Done<Node> {
        let names = self.names(parent)?;
        match name {
            b"." => Ok(parent),
            b".." => Ok(Node(names.parent)),
            _ => names.by_name.get(name).map(|(node, _)| Node(*node)).ok_or(Refusal::NotFound),
        }
    }

    fn touch(&mut self, node: Node) {
        if let Ok(object) = self.get_mut(node) {
            let now = now();
            (object.attributes.modified, object.attributes.changed) = (now, now);
        }
    }

    fn make(
        &mut self,
        parent: Node,
        name: &Name,
        mode: u32,
        owner: (u32, u32),
        device: (u32, u32),
        what: What,
    ) -> Done<Attributes> {
        let name = name.as_bytes();
        if self.find(parent, name).is_ok() {
            return Err(Refusal::Exists);
        }
        self.next += 1;
        let now = now();
        let kind = Kind::from_mode(mode).ok_or(Refusal::Invalid)?;
        let size_bytes = if let What::Link(target) = &what { target.len() as u64 } else { 0 };
        let attributes = Attributes {
            node: Node(self.next),
            generation: 1,
            kind,
            mode,
            links: if kind == Kind::Directory { 2 } else { 1 },
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
        self.names(parent)?.add(name, attributes.node.0);
        if kind == Kind::Directory {
            self.get_mut(parent)?.attributes.links += 1;
        }
        let object = Object { attributes, holds: 0, xattrs: BTreeMap::new(), what };
        self.by_number.insert(attributes.node.0, object);
        self.touch(parent);
        Ok(attributes)
    }

    /// One name less.
    fn drop_link(&mut self, node: Node) -> Done<()> {
        let object = self.get_mut(node)?;
        let links = if object.attributes.kind == Kind::Directory { 2 } else { 1 };
        object.attributes.links = object.attributes.links.saturating_sub(links);
        object.attributes.changed = now();
        if object.attributes.links == 0 && object.holds == 0 {
            self.by_number.remove(&node.0);
        }
        Ok(())
    }

    fn remove(&mut self, parent: Node, name: &[u8], directory: bool) -> Done<()> {
        let node = self.find(parent, name)?;
        match (&self.get(node)?.what, directory) {
            (What::Directory(names), true) if !names.by_name.is_empty() => {
                return Err(Refusal::NotEmpty);
            }
            (What::Directory(_), false) => return Err(Refusal::IsADirectory),
            (What::Directory(_), true) => self.get_mut(parent)?.attributes.links -= 1,
            (_, true) => return Err(Refusal::NotADirectory),
            (_, false) => {}
        }
        self.names(parent)?.take(name);
        self.touch(parent);
        self.drop_link(node)
    }

    fn is_directory(&self, node: Node) -> bool {
        self.get(node).is_ok_and(|object| object.attributes.kind == Kind::Directory)
    }

    /// Gives `node` the name it has now; directories know their parent.
    fn settle(&mut self, from: Node, to: Node, node: Node) -> Done<()> {
        if from != to && self.is_directory(node) {
            self.names(node)?.parent = to.0;
            self.get_mut(from)?.attributes.links -= 1;
            self.get_mut(to)?.attributes.links += 1;
        }
        Ok(())
    }

    fn rename(&mut self, m: &directory::Rename) -> Done<()> {
        let (old, new) = (m.name.as_bytes(), m.new_name.as_bytes());
        let node = self.find(m.from, old)?;
        let other = self.find(m.to, new).ok();
        match (other, m.flags) {
            (Some(_), RENAME_NO_REPLACE) => return Err(Refusal::Exists),
            (None, RENAME_EXCHANGE) => return Err(Refusal::NotFound),
            (Some(other), _) if other == node => return Ok(()),
            (Some(other), RENAME_EXCHANGE) => {
                self.names(m.from)?.take(old);
                self.names(m.to)?.take(new);
                self.names(m.from)?.add(old, other.0);
                self.names(m.to)?.add(new, node.0);
                self.settle(m.to, m.from, other)?;
                return self.settle(m.from, m.to, node);
            }
            (Some(_), _) => self.remove(m.to, new, self.is_directory(node))?,
            (None, _) => {}
        }
        self.names(m.from)?.take(old);
        self.names(m.to)?.add(new, node.0);
        self.touch(m.from);
        self.touch(m.to);
        self.settle(m.from, m.to, node)
    }

    fn change(&mut self, m: &directory::SetAttributes) -> Done<Attributes> {
        let object = self.get_mut(m.node)?;
        let time = |wanted: Option<SetTime>, had: Time| match wanted {
            Some(SetTime::Now) => now(),
            Some(SetTime::To(time)) => time,
            None => had,
        };
        let (change, a) = (&m.change, &mut object.attributes);
        let mode = change.mode.map_or(a.mode, |mode| a.kind.mode_bits() | (mode & 0o7777));
        a.mode = match change.clear_privileges {
            Some(caller) if a.kind != Kind::Directory => {
                without_privileges(mode, a.gid, Some(caller))
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
            if let What::File(bytes) = &mut object.what
                && bytes.len() as u64 > size
            {
                bytes.truncate(size as usize);
            }
        }
        Ok(object.attributes)
    }
}

impl Memory {
    /// An empty tree, with a root directory for everybody.
    pub fn new(keeps: bool) -> Self {
        let mut nodes = Nodes { by_number: HashMap::new(), next: 2 };
        let time = now();
        let attributes = Attributes {
            node: Node::ROOT,
            generation: 1,
            kind: Kind::Directory,
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
        let what = What::Directory(Names { parent: 1, ..Names::default() });
        let root = Object { attributes, holds: 1, xattrs: BTreeMap::new(), what };
        nodes.by_number.insert(1, root);
        Self { nodes: Mutex::new(nodes), keeps }
    }

    fn lock(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.lock().by_number.len()
    }

    fn attributes(&self, node: Node) -> Done<Attributes> {
        Ok(self.lock().get(node)?.attributes)
    }

    fn list(&self, m: &mut directory::Enumerate) -> Done<u32> {
        let mut nodes = self.lock();
        let names = std::mem::take(nodes.names(m.node)?);
        let mut entries = Entries::new(&mut m.buffer);
        let mut full = false;
        for (age, name) in names.by_age.range(m.cookie + 1..) {
            let node = Node(names.by_name.get(name).map_or(0, |(node, _)| *node));
            let Ok(object) = nodes.get(node) else { continue };
            let entry = directory::Entry {
                cookie: *age,
                node,
                kind: Some(object.attributes.kind),
                name: Name::new(name)?,
                attributes: m.with_attributes.then_some(object.attributes),
            };
            if !entries.push(&entry) {
                full = entries.is_empty();
                break;
            }
        }
        let len = entries.len();
        *nodes.names(m.node)? = names;
        if full { Err(Refusal::BufferTooSmall) } else { Ok(len) }
    }

    fn get(&self, m: &mut directory::GetXattr) -> Done<u32> {
        let nodes = self.lock();
        let xattrs = &nodes.get(m.node)?.xattrs;
        let value = xattrs.get(m.name.as_bytes()).ok_or(Refusal::NoAttribute)?;
        if !m.buffer.is_empty() && m.buffer.copy_in(0, value) < value.len() {
            return Err(Refusal::BufferTooSmall);
        }
        Ok(value.len() as u32)
    }

    fn names(&self, m: &mut directory::ListXattr) -> Done<u32> {
        let nodes = self.lock();
        let xattrs = &nodes.get(m.node)?.xattrs;
        let list: Vec<u8> = xattrs.keys().flat_map(|name| [&name[..], b"\0"].concat()).collect();
        if !m.buffer.is_empty() && m.buffer.copy_in(0, &list) < list.len() {
            return Err(Refusal::BufferTooSmall);
        }
        Ok(list.len() as u32)
    }

    fn target(&self, m: &mut directory::ReadLink) -> Done<u32> {
        match &self.lock().get(m.node)?.what {
            What::Link(target) => Ok(m.buffer.copy_in(0, target) as u32),
            _ => Err(Refusal::Invalid),
        }
    }

    fn symlink(&self, m: &directory::Symlink) -> Done<Attributes> {
        let mut target = vec![0; m.len as usize];
        m.target.copy_out(0, &mut target);
        let (owner, what) = ((m.uid, m.gid), What::Link(target));
        self.lock().make(m.parent, &m.name, 0o120_777, owner, (0, 0), what)
    }

    fn link(&self, m: &directory::Link) -> Done<Attributes> {
        let mut nodes = self.lock();
        if nodes.find(m.parent, m.name.as_bytes()).is_ok() {
            return Err(Refusal::Exists);
        }
        nodes.names(m.parent)?.add(m.name.as_bytes(), m.node.0);
        nodes.touch(m.parent);
        let object = nodes.get_mut(m.node)?;
        object.attributes.links += 1;
        object.attributes.changed = now();
        Ok(object.attributes)
    }

    fn set(&self, m: &directory::SetXattr) -> Done<()> {
        let mut value = vec![0; m.len as usize];
        m.value.copy_out(0, &mut value);
        let mut nodes = self.lock();
        let xattrs = &mut nodes.get_mut(m.node)?.xattrs;
        match (m.flags, xattrs.contains_key(m.name.as_bytes())) {
            (1, true) => return Err(Refusal::Exists),
            (2, false) => return Err(Refusal::NoAttribute),
            _ => {}
        }
        xattrs.insert(m.name.as_bytes().to_vec(), value);
        Ok(())
    }

    fn unset(&self, m: &directory::RemoveXattr) -> Done<()> {
        let mut nodes = self.lock();
        let removed = nodes.get_mut(m.node)?.xattrs.remove(m.name.as_bytes());
        removed.map(drop).ok_or(Refusal::NoAttribute)
    }

    fn flag(&self, m: &directory::SetFlags) -> Done<Attributes> {
        let mut nodes = self.lock();
        let object = nodes.get_mut(m.node)?;
        object.attributes.flags = m.flags;
        Ok(object.attributes)
    }
}

/// Answers each message with what a method gives: attributes, nothing, or goods as well.
macro_rules! answers {
    ($($method:ident($m:ident: $T:ident) $Ack:ident $Nak:ident = $call:expr => $value:pat => { $($f:ident: $v:expr),* };)*) => {$(
        fn $method(
            &self,
            #[allow(unused_mut)] mut $m: directory::$T,
        ) -> Result<directory::$Ack, directory::$Nak> {
            // The method's name for itself inside the expression.
            let answer = |tree: &Self, $m: &mut directory::$T| ($call)(tree, $m);
            match answer(self, &mut $m) {
                Ok($value) => Ok(directory::$Ack { $($f: $v),* }),
                Err(why) => Err($m.refuse(why)),
            }
        }
    )*};
}

impl DirectoryServer for Memory {
    answers! {
        lookup(m: Lookup) AckLookup NakLookup = |tree: &Self, m: &mut directory::Lookup| {
            let mut nodes = tree.lock();
            let node = nodes.find(m.parent, m.name.as_bytes())?;
            Ok(nodes.get(node)?.attributes)
        } => attributes => { attributes: attributes };
        get_attributes(m: GetAttributes) AckGetAttributes NakGetAttributes =
            |tree: &Self, m: &mut directory::GetAttributes| tree.attributes(m.node)
            => attributes => { attributes: attributes };
        enumerate(m: Enumerate) AckEnumerate NakEnumerate = Self::list
            => len => { buffer: m.buffer, len: len };
        read_link(m: ReadLink) AckReadLink NakReadLink = Self::target
            => len => { buffer: m.buffer, len: len };
        get_xattr(m: GetXattr) AckGetXattr NakGetXattr = Self::get
            => len => { buffer: m.buffer, len: len };
        list_xattr(m: ListXattr) AckListXattr NakListXattr = Self::names
            => len => { buffer: m.buffer, len: len };
        create(m: Create) AckCreate NakCreate = |tree: &Self, m: &mut directory::Create| {
            let what = match Kind::from_mode(m.mode) {
                Some(Kind::File) => What::File(vec![]),
                _ => What::Other,
            };
            let (mode, owner) = (m.mode & !m.umask, (m.uid, m.gid));
            tree.lock().make(m.parent, &m.name, mode, owner, m.device, what)
        } => attributes => { attributes: attributes };
        make_directory(m: MakeDirectory) AckMakeDirectory NakMakeDirectory =
            |tree: &Self, m: &mut directory::MakeDirectory| {
                let mode = Kind::Directory.mode_bits() | (m.mode & 0o7777 & !m.umask);
                let what = What::Directory(Names { parent: m.parent.0, ..Names::default() });
                tree.lock().make(m.parent, &m.name, mode, (m.uid, m.gid), (0, 0), what)
            } => attributes => { attributes: attributes };
        symlink(m: Symlink) AckSymlink NakSymlink = |tree: &Self, m: &mut _| Self::symlink(tree, m)
            => attributes => { target: m.target, attributes: attributes };
        link(m: Link) AckLink NakLink = |tree: &Self, m: &mut _| Self::link(tree, m)
            => attributes => { attributes: attributes };
        unlink(m: Unlink) AckUnlink NakUnlink =
            |tree: &Self, m: &mut directory::Unlink| tree.lock().remove(m.parent, m.name.as_bytes(), false)
            => () => {};
        remove_directory(m: RemoveDirectory) AckRemoveDirectory NakRemoveDirectory =
            |tree: &Self, m: &mut directory::RemoveDirectory| {
                tree.lock().remove(m.parent, m.name.as_bytes(), true)
            } => () => {};
        rename(m: Rename) AckRename NakRename = |tree: &Self, m: &mut _| tree.lock().rename(m)
            => () => {};
        set_attributes(m: SetAttributes) AckSetAttributes NakSetAttributes =
            |tree: &Self, m: &mut _| tree.lock().change(m)
            => attributes => { attributes: attributes };
        set_flags(m: SetFlags) AckSetFlags NakSetFlags = |tree: &Self, m: &mut _| Self::flag(tree, m)
            => attributes => { attributes: attributes };
        set_xattr(m: SetXattr) AckSetXattr NakSetXattr = |tree: &Self, m: &mut _| Self::set(tree, m)
            => () => { value: m.value };
        remove_xattr(m: RemoveXattr) AckRemoveXattr NakRemoveXattr =
            |tree: &Self, m: &mut _| Self::unset(tree, m)
            => () => {};
        sync_volume(m: SyncVolume) AckSyncVolume NakSyncVolume =
            |_: &Self, _: &mut directory::SyncVolume| Ok(())
            => () => {};
    }
}

impl Tree for Memory {
    type File<'a> = MemoryFile<'a>;

    fn file(&self, node: Node) -> MemoryFile<'_> {
        MemoryFile { tree: self, node }
    }

    fn space(&self) -> Space {
        Space {
            block_bytes: BLOCK_BYTES as u32,
            blocks: 1 << 30,
            free_blocks: 1 << 29,
            available_blocks: 1 << 29,
            inodes: 1 << 30,
            free_inodes: 1 << 29,
            name_bytes_max: Name::MAX_BYTES as u32,
        }
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn hold(&self, node: Node) {
        if let Ok(object) = self.lock().get_mut(node) {
            object.holds += 1;
        }
    }

    fn release(&self, node: Node, users: u64) {
        let mut nodes = self.lock();
        let Ok(object) = nodes.get_mut(node) else { return };
        object.holds = object.holds.saturating_sub(users);
        if object.holds == 0 && object.attributes.links == 0 {
            nodes.by_number.remove(&node.0);
        }
    }
}

/// One file of the tree.
pub struct MemoryFile<'a> {
    tree: &'a Memory,
    node: Node,
}

impl MemoryFile<'_> {
    fn fill(&self, m: &mut file::Read) -> Done<u32> {
        let nodes = self.tree.lock();
        let object = nodes.get(self.node)?;
        let What::File(bytes) = &object.what else { return Err(Refusal::Invalid) };
        let end = object.attributes.size_bytes.min(m.offset.saturating_add(m.len.into()));
        let len = end.saturating_sub(m.offset) as usize;
        let from = usize::try_from(m.offset).unwrap_or(usize::MAX);
        let there = bytes.get(from..).unwrap_or_default();
        let there = &there[..there.len().min(len)];
        let at = m.buffer_offset as usize;
        m.buffer.copy_in(at, there);
        if let Some(hole) = m.buffer.bytes_mut().and_then(|b| b.get_mut(at + there.len()..at + len))
        {
            hole.fill(0);
        }
        Ok(len as u32)
    }

    fn take(&self, m: &file::Write) -> Done<u32> {
        let mut nodes = self.tree.lock();
        let object = nodes.get_mut(self.node)?;
        let What::File(bytes) = &mut object.what else { return Err(Refusal::Invalid) };
        let end = m.offset + u64::from(m.len);
        if self.tree.keeps {
            let (from, len) = (m.offset as usize, m.len as usize);
            if bytes.len() < from + len {
                bytes.resize(from + len, 0);
            }
            m.buffer.copy_out(m.buffer_offset as usize, &mut bytes[from..from + len]);
        }
        let a = &mut object.attributes;
        a.size_bytes = a.size_bytes.max(end);
        a.blocks_512 = a.size_bytes.div_ceil(BLOCK_BYTES) * (BLOCK_BYTES / 512);
        if m.clear_privileges {
            a.mode = without_privileges(a.mode, a.gid, None);
        }
        (a.modified, a.changed) = (now(), now());
        Ok(m.len)
    }

    fn space(&self, m: &file::Reserve) -> Done<()> {
        let mut nodes = self.tree.lock();
        let object = nodes.get_mut(self.node)?;
        let What::File(bytes) = &mut object.what else { return Err(Refusal::Invalid) };
        let end = m.offset.checked_add(m.len).ok_or(Refusal::TooLarge)?;
        let grows =
            matches!(m.how, Reservation::Extend | Reservation::ZeroRange { keep_size: false });
        if grows {
            object.attributes.size_bytes = object.attributes.size_bytes.max(end);
        }
        if matches!(m.how, Reservation::PunchHole | Reservation::ZeroRange { .. }) {
            let end = (end as usize).min(bytes.len());
            if let Some(range) = bytes.get_mut((m.offset as usize).min(end)..end) {
                range.fill(0);
            }
        }
        Ok(())
    }
}

impl FileServer for MemoryFile<'_> {
    fn read(&self, mut m: file::Read) -> Result<file::AckRead, file::NakRead> {
        match self.fill(&mut m) {
            Ok(len) => Ok(file::AckRead { buffer: m.buffer, len }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn write(&self, m: file::Write) -> Result<file::AckWrite, file::NakWrite> {
        match self.take(&m) {
            Ok(len) => Ok(file::AckWrite { buffer: m.buffer, len }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn get_attributes(
        &self,
        m: file::GetAttributes,
    ) -> Result<file::AckGetAttributes, file::NakGetAttributes> {
        match self.tree.attributes(self.node) {
            Ok(attributes) => Ok(file::AckGetAttributes { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn reserve(&self, m: file::Reserve) -> Result<file::AckReserve, file::NakReserve> {
        match self.space(&m) {
            Ok(()) => Ok(file::AckReserve {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn seek(&self, m: file::Seek) -> Result<file::AckSeek, file::NakSeek> {
        // All is data.
        match self.tree.attributes(self.node) {
            Ok(a) if m.offset >= a.size_bytes => Ok(file::AckSeek { offset: None }),
            Ok(a) => {
                let offset = Some(if m.hole { a.size_bytes } else { m.offset });
                Ok(file::AckSeek { offset })
            }
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn sync(&self, _: file::Sync) -> Result<file::AckSync, file::NakSync> {
        Ok(file::AckSync {})
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
