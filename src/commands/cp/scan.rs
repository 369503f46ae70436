//! Scanning files of a volume into a tree, to copy them within the volume or to another one.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_access::populate::{PopulateSource, SkippedItems};
use draconis_access::walk::data_segments;
use draconis_ext::mkfs::{FileSource, NodeId, NodeKind, Tree, TreeNode};
use draconis_ext::{Inode, InodeNumber, Volume};
use draconis_types::{FileType, Time};

use crate::edit::NewFileOwner;
use crate::image;
use crate::text::escape_control_chars;

/// Metadata to copy.
#[derive(Clone, Copy)]
pub enum PreserveAttributes {
    /// Contents and permissions.
    Contents {
        /// Owner of the copies, and their time.
        maker: NewFileOwner,
        now: Time,
    },
    /// Contents, permissions, owners, times and extended attributes.
    All,
}

struct CopySource<'a> {
    volume: &'a Volume,
    files: Vec<Arc<Inode>>,
}

impl FileSource for CopySource<'_> {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        let inode = usize::try_from(source).ok().and_then(|nth| self.files.get(nth));
        let inode = inode.ok_or(std::io::ErrorKind::NotFound)?;
        let mut filled = 0;
        while filled < into.len() {
            let rest = &mut into[filled..];
            let data = self.volume.read_from_inode(inode, at_bytes + filled as u64, rest.len());
            let data = data.map_err(std::io::Error::other)?;
            if data.is_empty() {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            rest[..data.len()].copy_from_slice(&data);
            filled += data.len();
        }
        Ok(())
    }
}

struct CopyScan<'a> {
    tree: Tree,
    files: CopySource<'a>,
    keep: PreserveAttributes,
    seen: HashMap<InodeNumber, NodeId>,
    left_out: SkippedItems,
}

/// Scans `tops` of a volume under new names; returns the tree and the scanned inodes.
pub fn scan_copy_source<'a>(
    volume: &'a Volume,
    tops: &[(Vec<u8>, InodeNumber)],
    keep: PreserveAttributes,
) -> anyhow::Result<(PopulateSource<'a>, HashSet<InodeNumber>)> {
    let mut scan = CopyScan {
        tree: Tree::new(TreeNode::new(NodeKind::Directory, 0o755)),
        files: CopySource { volume, files: vec![] },
        keep,
        seen: HashMap::new(),
        left_out: SkippedItems::default(),
    };
    let mut stack = vec![];
    for (name, top) in tops {
        if scan.tree.lookup(NodeId::ROOT, name).is_some() {
            bail!("{}: another source has that name", escape_control_chars(name));
        }
        stack.extend(scan.add_entry(NodeId::ROOT, name, *top)?);
    }
    while let Some((id, number)) = stack.pop() {
        let listing = image::list_directory(volume, number, &scan.tree.path(id))?;
        if listing.damaged {
            bail!("{}: it cannot be copied whole", scan.tree.path(id));
        }
        for entry in listing.names {
            let below = scan.add_entry(id, &entry.name, entry.inode);
            stack.extend(below.with_context(|| escape_control_chars(&entry.name))?);
        }
    }
    let seen = scan.seen.keys().copied().collect();
    let implied_dirs = HashSet::from([NodeId::ROOT]);
    let notes = scan.left_out.notes;
    Ok((PopulateSource { implied_dirs, notes, ..PopulateSource::new(scan.tree, scan.files) }, seen))
}

impl CopyScan<'_> {
    /// Adds one name; returns its node if it is a directory.
    fn add_entry(
        &mut self,
        dir: NodeId,
        name: &[u8],
        number: InodeNumber,
    ) -> anyhow::Result<Option<(NodeId, InodeNumber)>> {
        let volume = self.files.volume;
        let inode = volume.inode(number)?;
        if let Some(first) = self.seen.get(&number) {
            if inode.kind == FileType::Directory {
                bail!("a directory with two names; draconis check shows the damage");
            }
            self.tree.link(dir, name, *first)?;
            return Ok(None);
        }
        let attributes = volume.attributes_of(&inode);
        let (major, minor) = attributes.device;
        let what = match inode.kind {
            FileType::Directory => NodeKind::Directory,
            FileType::Symlink => NodeKind::Symlink(volume.read_link_of(&inode)?),
            FileType::CharDevice => NodeKind::CharDevice(major, minor),
            FileType::BlockDevice => NodeKind::BlockDevice(major, minor),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket => NodeKind::Socket,
            FileType::File => {
                let source = self.files.files.len() as u64;
                self.files.files.push(inode.clone());
                let data = data_segments(volume, &inode).collect::<Result<_, _>>()?;
                NodeKind::File { size_bytes: inode.size_bytes, data, source }
            }
        };
        let mut node = TreeNode::new(what, (attributes.mode & 0o7777) as u16);
        match self.keep {
            PreserveAttributes::Contents { maker, now } => {
                (node.uid, node.gid) = (maker.uid, maker.gid);
                // Drops setuid and setgid, which were the old owner's.
                node.mode &= (0o1777 & !maker.umask) as u16;
                node = node.with_all_times(now);
            }
            PreserveAttributes::All => {
                (node.uid, node.gid) = (attributes.uid, attributes.gid);
                node.accessed = attributes.accessed;
                node.modified = attributes.modified;
                self.read_attributes(&mut node, &inode, name)?;
            }
        }
        let id = self.tree.add(dir, name, node)?;
        self.seen.insert(number, id);
        Ok((inode.kind == FileType::Directory).then_some((id, number)))
    }

    fn read_attributes(
        &mut self,
        node: &mut TreeNode,
        inode: &Inode,
        name: &[u8],
    ) -> anyhow::Result<()> {
        let volume = self.files.volume;
        for attribute in volume.xattr_names(inode.number)? {
            let value = volume.xattr(inode.number, &attribute)?;
            if !node.set_xattr(&attribute, &value) {
                let what = format!("the attribute {} is", escape_control_chars(&attribute));
                self.left_out.record_skipped(&what, &escape_control_chars(name));
            }
        }
        Ok(())
    }
}
