//! The tree of files for a new volume.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use draconis_types::{FileType, Time};

use super::ea_value::EaInodeValue;
use super::{FormatError, Result};
use crate::format::acl::Acl;
use crate::format::xattr::NewXattr;

/// Index of a node in its tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// The root directory of every tree.
    pub const ROOT: Self = Self(0);
}

/// Type-specific part of a node.
#[derive(Clone, Debug)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A regular file.
    File {
        /// Length in bytes.
        size_bytes: u64,
        /// Data ranges in bytes, ascending; the rest are holes.
        data: Vec<(u64, u64)>,
        /// Argument for [`FileSource::read`].
        source: u64,
    },
    /// A symbolic link and its target.
    Symlink(Vec<u8>),
    /// A character device: major and minor number.
    CharDevice(u32, u32),
    /// A block device: major and minor number.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

/// An inode of the tree, with any number of names.
#[derive(Clone, Debug)]
pub struct TreeNode {
    /// Type and type-specific data.
    pub kind_data: NodeKind,
    /// Permissions, setuid, setgid and sticky bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last access.
    pub accessed: Time,
    /// Last change of the contents.
    pub modified: Time,
    /// Last change of the inode.
    pub changed: Time,
    /// Creation.
    pub created: Time,
    /// Extended attributes, in on-disk order.
    pub(super) attributes: Vec<NewXattr>,
}

impl TreeNode {
    /// Removes the access control lists.
    pub fn remove_acls(&mut self) {
        self.attributes.retain(|attribute| !attribute.is_acl());
    }
}

/// Source of the contents of a tree's files.
pub trait FileSource: Sync {
    /// Fills `into` with the data of file `source` at `at_bytes`, all within its data ranges.
    ///
    /// # Errors
    /// Error of the source; it becomes [`FormatError::Source`] with the path of the file.
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()>;

    /// Returns true if files should be read in the order of `source`, each from its start: a stream
    /// restarts for every step back.
    fn is_sequential(&self) -> bool {
        false
    }
}

impl NodeKind {
    /// Iterates over the data ranges within `size_bytes`.
    pub(super) fn data_within(&self, size_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
        let data = match self {
            Self::File { data, .. } => &data[..],
            _ => &[],
        };
        data.iter().map(move |(start, end)| (*start, (*end).min(size_bytes)))
    }

    /// Returns the file type.
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
    /// Creates a node owned by the superuser, with times of 1970.
    pub fn new(what: NodeKind, mode: u16) -> Self {
        let never = Time::default();
        Self {
            kind_data: what,
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

    /// Sets all times.
    #[must_use]
    pub fn with_all_times(mut self, time: Time) -> Self {
        (self.accessed, self.modified, self.changed, self.created) = (time, time, time, time);
        self
    }

    /// Sets an extended attribute, with name and value as for Linux's `setxattr`. Returns false if
    /// ext2 cannot store the name, or Linux refuses the access control list. An access list sets
    /// the permission bits, and is stored if they cannot express it.
    pub fn set_xattr(&mut self, name: &[u8], value: &[u8]) -> bool {
        let Ok(Some(new)) = NewXattr::new(name, value) else { return false };
        let is_kept = match name {
            b"system.posix_acl_access" => self.set_access_list(value),
            b"system.posix_acl_default" => {
                let is_dir = matches!(self.kind_data, NodeKind::Directory);
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

    /// Sets the permission bits from an access list; returns true if they cannot express it, `None`
    /// if it is invalid.
    fn set_access_list(&mut self, value: &[u8]) -> Option<bool> {
        let is_link = matches!(self.kind_data, NodeKind::Symlink(_));
        let list = Acl::from_xattr(value).ok().filter(|_| !is_link)?;
        let Some(list) = list else { return Some(false) };
        self.mode = self.mode & !0o777 | list.access_mode();
        Some(!list.is_equivalent_to_mode())
    }

    /// Iterates over the extended attributes, with names and values as for Linux's `setxattr`.
    pub fn attributes(&self) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
        self.attributes.iter().filter_map(|it| Some((it.name()?, it.linux_value().ok()?)))
    }

    /// Returns `i_mode`.
    pub(super) fn raw_mode(&self) -> u16 {
        let [low, high, ..] = self.kind_data.kind().mode_bits().to_le_bytes();
        u16::from_le_bytes([low, high]) | self.mode & 0o7777
    }
}

/// A tree of files.
#[derive(Clone, Debug)]
pub struct Tree {
    nodes: Vec<TreeNode>,
    /// Names in each directory.
    names: BTreeMap<NodeId, BTreeMap<Box<[u8]>, NodeId>>,
    /// One parent directory per node: enough for messages.
    parents: Vec<NodeId>,
    /// Values moved to EA inodes.
    pub(super) values: Vec<EaInodeValue>,
}

impl Tree {
    /// Creates a tree with only its root.
    pub fn new(root: TreeNode) -> Self {
        Self {
            nodes: vec![root],
            names: BTreeMap::from([(NodeId::ROOT, BTreeMap::new())]),
            parents: vec![NodeId::ROOT],
            values: vec![],
        }
    }

    /// Returns a node.
    pub fn node(&self, id: NodeId) -> &TreeNode {
        // Ids come only from `add`; the id of another tree may be out of range.
        self.nodes.get(index(id)).or(self.nodes.first()).unwrap_or(&MISSING_NODE)
    }

    /// Returns a mutable node.
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut TreeNode> {
        self.nodes.get_mut(index(id))
    }

    /// Returns the number of nodes, reachable or not.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns false: there is always a root.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Iterates over the names in a directory, in byte order.
    pub fn names(&self, dir: NodeId) -> impl Iterator<Item = (&[u8], NodeId)> {
        self.names.get(&dir).into_iter().flatten().map(|(name, id)| (&name[..], *id))
    }

    /// Looks up `name` in `dir`.
    pub fn lookup(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.names.get(&dir)?.get(name).copied()
    }

    /// Adds a node under a name, replacing an existing one.
    ///
    /// # Errors
    /// [`FormatError::Tree`] for an invalid name, or if `dir` is no directory.
    pub fn add(&mut self, dir: NodeId, name: &[u8], node: TreeNode) -> Result<NodeId> {
        let id = NodeId(crate::units::saturating_u32(self.nodes.len() as u64));
        let is_dir = matches!(node.kind_data, NodeKind::Directory);
        self.nodes.push(node);
        self.parents.push(dir);
        self.link(dir, name, id)?;
        if is_dir {
            self.names.insert(id, BTreeMap::new());
        }
        Ok(id)
    }

    /// Adds a name to a node, replacing an existing one.
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

    /// Removes a name from a directory; returns its node, which may have other names.
    pub fn remove(&mut self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.names.get_mut(&dir)?.remove(name)
    }

    /// Returns a path of a node.
    pub fn path(&self, id: NodeId) -> String {
        let names = self.path_components(id);
        let shown: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
        format!("/{}", shown.join("/"))
    }

    /// Returns the names on the path from the root to a node.
    pub fn path_components(&self, id: NodeId) -> Vec<Vec<u8>> {
        let mut names = vec![];
        let mut at = id;
        // A parent has a lower index than its children, so the loop ends at the root.
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

static MISSING_NODE: TreeNode = TreeNode {
    kind_data: NodeKind::Directory,
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
