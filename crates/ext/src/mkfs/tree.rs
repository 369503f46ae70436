//! A tree of files that is to become a volume.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use draconis_exchange::contract::{FileType, Time};

use super::values::Value;
use super::{FormatError, Result};
use crate::format::acl::Acl;
use crate::format::xattr::NewXattr;

/// The number of a node in its tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// The root directory of every tree.
    pub const ROOT: Self = Self(0);
}

/// What a node is.
#[derive(Clone, Debug)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// Length in bytes.
        size_bytes: u64,
        /// Where it has data: start and end in bytes, rising; holes elsewhere.
        data: Vec<(u64, u64)>,
        /// What [`FileSource::read`] is asked for.
        source: u64,
    },
    /// A symbolic link and its target.
    Symlink(Vec<u8>),
    /// A character device: major and minor number.
    CharDevice(u32, u32),
    /// A block device: major and minor number.
    BlockDevice(u32, u32),
    /// A pipe with a name.
    Fifo,
    /// A socket.
    Socket,
}

/// A file of any kind, under any number of names.
#[derive(Clone, Debug)]
pub struct TreeNode {
    /// What it is.
    pub what: NodeKind,
    /// Permissions, setuid, setgid and sticky bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last read.
    pub accessed: Time,
    /// Contents changed last.
    pub modified: Time,
    /// Inode changed last.
    pub changed: Time,
    /// Made.
    pub created: Time,
    /// Extended attributes by [`Node::attribute`], in the order of the format.
    pub(super) attributes: Vec<NewXattr>,
}

impl TreeNode {
    /// Drops its access control lists.
    pub fn remove_acls(&mut self) {
        self.attributes.retain(|attribute| !attribute.is_acl());
    }
}

/// The contents of the files of a tree.
pub trait FileSource: Sync {
    /// Fills `into` with what file `source` has at `at_bytes`; all of it was said to be there.
    ///
    /// # Errors
    /// What the source says; it becomes [`FormatError::Source`] with the path of the file.
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()>;

    /// Whether they had better be read in the order of `source`, and each file from its start:
    /// what comes as a stream is begun again for every step back.
    fn is_sequential(&self) -> bool {
        false
    }
}

impl NodeKind {
    /// Where a file of this length has data, in bytes.
    pub(super) fn data_within(&self, size_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
        let data = match self {
            Self::File { data, .. } => &data[..],
            _ => &[],
        };
        data.iter().map(move |(start, end)| (*start, (*end).min(size_bytes)))
    }

    /// The kind.
    pub fn kind(&self) -> FileType {
        match self {
            Self::Directory => FileType::Directory,
            Self::File { .. } => FileType::File,
            Self::Symlink(_) => FileType::Symlink,
            Self::CharDevice(..) => FileType::CharDevice,
            Self::BlockDevice(..) => FileType::BlockDevice,
            Self::Fifo => FileType::Fifo,
            Self::Socket => FileType::Socket,
        }
    }
}

impl TreeNode {
    /// A node of the superuser, from 1970.
    pub fn new(what: NodeKind, mode: u16) -> Self {
        let never = Time::default();
        Self {
            what,
            mode: mode & 0o7777,
            uid: 0,
            gid: 0,
            accessed: never,
            modified: never,
            changed: never,
            created: never,
            attributes: vec![],
        }
    }

    /// The same with all its times set.
    #[must_use]
    pub fn at(mut self, time: Time) -> Self {
        (self.accessed, self.modified, self.changed, self.created) = (time, time, time, time);
        self
    }

    /// Gives it an extended attribute, named and valued as with Linux's `setxattr`; `false` if
    /// ext2 has no place for such a name, or Linux refuses such an access control list. An access
    /// list sets the permission bits, and is kept if it says more than they do.
    pub fn attribute(&mut self, name: &[u8], value: &[u8]) -> bool {
        let Ok(Some(new)) = NewXattr::new(name, value) else { return false };
        let is_kept = match name {
            b"system.posix_acl_access" => self.set_access_list(value),
            b"system.posix_acl_default" => {
                let is_dir = matches!(self.what, NodeKind::Directory);
                Acl::from_xattr(value).ok().filter(|_| is_dir).map(|list| list.is_some())
            }
            _ => Some(true),
        };
        let Some(is_kept) = is_kept else { return false };
        self.attributes.retain(|old| !old.same_name(&new));
        if is_kept {
            self.attributes.push(new);
        }
        self.attributes.sort();
        true
    }

    /// Sets the permission bits from an access list; whether the list says more, `None` if it is
    /// not sound.
    fn set_access_list(&mut self, value: &[u8]) -> Option<bool> {
        let is_link = matches!(self.what, NodeKind::Symlink(_));
        let list = Acl::from_xattr(value).ok().filter(|_| !is_link)?;
        let Some(list) = list else { return Some(false) };
        self.mode = self.mode & !0o777 | list.access_mode();
        Some(!list.is_equivalent_to_mode())
    }

    /// Its extended attributes, named and valued as with Linux's `setxattr`.
    pub fn attributes(&self) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
        self.attributes.iter().filter_map(|it| Some((it.name()?, it.linux_value().ok()?)))
    }

    /// `i_mode`.
    pub(super) fn raw_mode(&self) -> u16 {
        let kind = match self.what.kind() {
            FileType::Fifo => 0o010000,
            FileType::CharDevice => 0o020000,
            FileType::Directory => 0o040000,
            FileType::BlockDevice => 0o060000,
            FileType::File => 0o100000,
            FileType::Symlink => 0o120000,
            FileType::Socket => 0o140000,
        };
        kind | self.mode & 0o7777
    }
}

/// A tree of files.
#[derive(Clone, Debug)]
pub struct Tree {
    nodes: Vec<TreeNode>,
    /// The names in each directory.
    names: BTreeMap<NodeId, BTreeMap<Box<[u8]>, NodeId>>,
    /// One directory that a node is in, and its name there: enough for messages.
    parents: Vec<NodeId>,
    /// Values of attributes that were moved out of their nodes.
    pub(super) values: Vec<Value>,
}

impl Tree {
    /// A tree of nothing but its root.
    pub fn new(root: TreeNode) -> Self {
        Self {
            nodes: vec![root],
            names: BTreeMap::from([(NodeId::ROOT, BTreeMap::new())]),
            parents: vec![NodeId::ROOT],
            values: vec![],
        }
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &TreeNode {
        // An id is given out only by `add` of this tree; one of another may lie beyond it.
        self.nodes.get(index(id)).or(self.nodes.first()).unwrap_or(&NO_NODE)
    }

    /// A node, to be changed.
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut TreeNode> {
        self.nodes.get_mut(index(id))
    }

    /// Nodes that were added, reachable or not.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Never: there is a root.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The names in a directory, in the order of their bytes.
    pub fn names(&self, dir: NodeId) -> impl Iterator<Item = (&[u8], NodeId)> {
        self.names.get(&dir).into_iter().flatten().map(|(name, id)| (&name[..], *id))
    }

    /// What `name` names in `dir`.
    pub fn lookup(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.names.get(&dir)?.get(name).copied()
    }

    /// Adds a node under a name; what had the name is replaced.
    ///
    /// # Errors
    /// [`FormatError::Tree`] for a name that cannot be, or if `dir` is no directory.
    pub fn add(&mut self, dir: NodeId, name: &[u8], node: TreeNode) -> Result<NodeId> {
        let id = NodeId(crate::units::saturating_u32(self.nodes.len() as u64));
        let is_dir = matches!(node.what, NodeKind::Directory);
        self.nodes.push(node);
        self.parents.push(dir);
        self.link(dir, name, id)?;
        if is_dir {
            self.names.insert(id, BTreeMap::new());
        }
        Ok(id)
    }

    /// Gives a node another name; what had the name is replaced.
    ///
    /// # Errors
    /// As [`Tree::add`].
    pub fn link(&mut self, dir: NodeId, name: &[u8], to: NodeId) -> Result<()> {
        let wrong = match name {
            b"" | b"." | b".." => Some("not a name"),
            name if name.len() > 255 => Some("a name has at most 255 bytes"),
            name if name.iter().any(|byte| matches!(byte, 0 | b'/')) => Some("not a name"),
            _ => None,
        };
        let path = |tree: &Self| {
            let shown = String::from_utf8_lossy(name).into_owned();
            format!("{}/{shown}", tree.path(dir).trim_end_matches('/'))
        };
        if let Some(what) = wrong {
            return Err(FormatError::Tree { path: path(self), what: what.to_owned() });
        }
        let not_dir = path(self);
        let Some(names) = self.names.get_mut(&dir) else {
            return Err(FormatError::Tree {
                path: not_dir,
                what: "its parent is no directory".into(),
            });
        };
        match names.entry(name.into()) {
            Entry::Vacant(free) => {
                free.insert(to);
            }
            Entry::Occupied(mut taken) => {
                taken.insert(to);
            }
        }
        Ok(())
    }

    /// Takes a name from a directory; what had it, which may have others.
    pub fn remove(&mut self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.names.get_mut(&dir)?.remove(name)
    }

    /// A path that leads to a node.
    pub fn path(&self, id: NodeId) -> String {
        let names = self.names_to(id);
        let shown: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
        format!("/{}", shown.join("/"))
    }

    /// The names on the way from the root to a node.
    pub fn names_to(&self, id: NodeId) -> Vec<Vec<u8>> {
        let mut names = vec![];
        let mut at = id;
        // A parent is older than what lives in it, so this ends at the root.
        while at != NodeId::ROOT {
            let Some(parent) = self.parents.get(index(at)).copied().filter(|parent| *parent < at)
            else {
                break;
            };
            let name = self.names(parent).find(|(_, found)| *found == at);
            names.push(name.map_or(b"?".to_vec(), |it| it.0.to_vec()));
            at = parent;
        }
        names.reverse();
        names
    }
}

static NO_NODE: TreeNode = TreeNode {
    what: NodeKind::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    accessed: Time { seconds: 0, nanoseconds: 0 },
    modified: Time { seconds: 0, nanoseconds: 0 },
    changed: Time { seconds: 0, nanoseconds: 0 },
    created: Time { seconds: 0, nanoseconds: 0 },
    attributes: vec![],
};

fn index(id: NodeId) -> usize {
    crate::units::saturating_usize(id.0.into())
}
