//! Copying a tree of files into an existing directory of a volume.
//!
//! ```text
//!   names, a directory before what it holds:  create · link · write · attributes
//!   contents that come in an order:           write · attributes
//!   directories, the deepest first:           mode and times, which filling them changes
//! ```
//! Law 1: existing directories are kept and merged, also through a symbolic link; no link leads
//! out of the volume.
//! Law 2: any other existing file is replaced by one of the same kind, and by another kind only
//! on request. A directory is replaced only if it is empty.
//! Law 3: an implied directory replaces nothing, and does not change existing attributes.

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

use anyhow::{anyhow, bail, ensure};
use draconis_access::populate::{PopulateSource, TimestampPolicy};
use draconis_ext::mkfs::{NodeId, NodeKind, TreeNode};
use draconis_ext::{Error, Follow, Inode, InodeNumber, NewNode, Volume, XattrSet};
use draconis_types::{AttributeChange, FileType, SetTime};

use crate::edit::{OwnerArg, now_or_source_date, with_context};
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::text::{self, escape_control_chars};

/// Size of one read and write, in bytes.
const READ_CHUNK_BYTES: u64 = 1 << 20;

/// Returns the timestamp rules for copied files.
pub fn timestamp_policy() -> anyhow::Result<TimestampPolicy> {
    let reproducible = std::env::var_os("SOURCE_DATE_EPOCH").is_some();
    Ok(TimestampPolicy { now: now_or_source_date()?, reproducible })
}

/// Options for copying a tree into a volume.
#[derive(Clone, Copy)]
pub struct ImportOptions {
    /// Owner of all files, instead of their own.
    pub owner: Option<OwnerArg>,
    /// Replaces a file by a directory and an empty directory by a file, as `tar -x` does.
    pub replace_kinds: bool,
    /// Progress mode.
    pub progress: ProgressMode,
}

/// Copies `source` into a directory.
pub fn import_tree(
    volume: &Volume,
    source: &PopulateSource<'_>,
    into: InodeNumber,
    label: String,
    how: ImportOptions,
) -> anyhow::Result<ExitCode> {
    let ImportOptions { owner, replace_kinds, progress } = how;
    let graft =
        TreeImport { volume, source, into, label, owner, replace_kinds, protected: HashSet::new() };
    let done = graft.run(progress);
    let faults = source.faults.messages();
    report::print_notes(&faults);
    done?;
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Source and destination of a copy.
pub struct TreeImport<'a> {
    pub volume: &'a Volume,
    pub source: &'a PopulateSource<'a>,
    /// Directory that becomes the root of the tree.
    pub into: InodeNumber,
    /// Path of the directory, for messages.
    pub label: String,
    /// Owner of all files, instead of their own.
    pub owner: Option<OwnerArg>,
    /// Replaces a file by a directory and an empty directory by a file, as `tar -x` does.
    pub replace_kinds: bool,
    /// Inodes that are still to be read, and so must not be replaced.
    pub protected: HashSet<InodeNumber>,
}

impl TreeImport<'_> {
    /// Returns the bytes of all files.
    fn total_data_bytes(&self) -> u64 {
        self.unique_nodes().map(data_bytes).sum()
    }

    /// Refuses contents that exceed the free space. This is an estimate: it ignores metadata and
    /// files that will be replaced.
    fn check_space(&self) -> anyhow::Result<()> {
        let space = self.volume.space();
        let block = u64::from(space.block_bytes).max(1);
        let blocks: u64 = self.unique_nodes().map(|node| data_bytes(node).div_ceil(block)).sum();
        ensure!(
            blocks <= space.free_blocks,
            "{}: {} are needed and {} are free; remove something, or take a larger volume",
            self.label,
            text::format_bytes(blocks.saturating_mul(block)),
            text::format_bytes(space.free_blocks.saturating_mul(block))
        );
        Ok(())
    }

    /// Returns all nodes, each once.
    fn unique_nodes(&self) -> impl Iterator<Item = &TreeNode> {
        self.source.nodes().map(|id| self.source.tree.node(id))
    }

    /// Copies the whole tree.
    pub fn run(&self, progress: ProgressMode) -> anyhow::Result<()> {
        report::print_notes(&self.source.notes);
        self.check_space()?;
        let outside = self.resolve_outside_links()?;
        // Keeps the inode of a link target alive if its only name is replaced.
        outside.values().for_each(|number| self.volume.add_user(*number));
        let done = self.copy_tree(outside.clone(), progress);
        outside.values().for_each(|number| self.volume.remove_users(*number, 1));
        done
    }

    /// Resolves hard links to targets outside the source to inodes of the volume.
    fn resolve_outside_links(&self) -> anyhow::Result<HashMap<NodeId, InodeNumber>> {
        let mut found = HashMap::new();
        for id in self.source.nodes() {
            let Some(target) = self.source.outside.get(&id) else { continue };
            let link = || {
                format!("{}: a hard link to {}", self.path(id, b""), escape_control_chars(target))
            };
            let number = match self.volume.resolve(self.into, target, Follow::No) {
                Err(Error::NotFound | Error::NotADirectory) => {
                    bail!("{}, which is neither before it in the archive nor on the volume", link())
                }
                number => number.map_err(|error| with_context(&link(), error))?,
            };
            let kind = self.volume.inode(number)?.kind;
            ensure!(kind != FileType::Directory, "{}, which is a directory", link());
            found.insert(id, number);
        }
        Ok(found)
    }

    fn copy_tree(
        &self,
        links: HashMap<NodeId, InodeNumber>,
        progress: ProgressMode,
    ) -> anyhow::Result<()> {
        let mut run = ImportRun {
            import: self,
            links,
            created: HashMap::new(),
            entered: HashSet::from([self.into]),
            buffer: vec![],
            in_order: self.source.contents.is_sequential().then(Vec::new),
            progress: &mut ByteProgress::new(progress, self.total_data_bytes()),
        };
        let mut dirs = vec![(NodeId::ROOT, self.into)];
        let mut at = 0;
        while let Some((dir, number)) = dirs.get(at).copied() {
            at += 1;
            for (name, id) in self.source.tree.names(dir) {
                let made = run.copy_entry(number, name, id);
                let made = made.map_err(|error| self.with_context(dir, name, error))?;
                if matches!(self.source.tree.node(id).kind_data, NodeKind::Directory) {
                    run.entered.insert(made);
                    dirs.push((id, made));
                }
            }
        }
        for (_, id, number) in run.take_files_in_archive_order() {
            let done = run.write_contents_and_attributes(number, self.source.tree.node(id));
            done.map_err(|error| self.with_context(id, b"", error))?;
        }
        for (id, number) in dirs.into_iter().rev() {
            if !self.source.implied_dirs.contains(&id) {
                let done = run.set_attributes(number, self.source.tree.node(id));
                done.map_err(|error| self.with_context(id, b"", error))?;
            }
        }
        Ok(())
    }

    fn with_context(&self, dir: NodeId, name: &[u8], error: anyhow::Error) -> anyhow::Error {
        let path = self.path(dir, name);
        match error.downcast::<Error>() {
            Ok(error) => with_context(&path, error),
            Err(error) => error.context(path),
        }
    }

    fn path(&self, dir: NodeId, name: &[u8]) -> String {
        let above = self.source.tree.path(dir);
        let path = format!("{}/{}", above.trim_end_matches('/'), escape_control_chars(name));
        format!("{}{}", self.label.trim_end_matches('/'), path.trim_end_matches('/'))
    }
}

fn data_bytes(node: &TreeNode) -> u64 {
    match &node.kind_data {
        NodeKind::File { data, .. } => data.iter().map(|(start, end)| end - start).sum(),
        _ => 0,
    }
}

struct ImportRun<'a> {
    import: &'a TreeImport<'a>,
    /// Inodes of nodes that may have several names.
    links: HashMap<NodeId, InodeNumber>,
    /// Nodes of new inodes.
    created: HashMap<InodeNumber, NodeId>,
    /// Directories of the volume that receive files.
    entered: HashSet<InodeNumber>,
    buffer: Vec<u8>,
    /// Files whose contents are written later, in source order.
    in_order: Option<Vec<(u64, NodeId, InodeNumber)>>,
    progress: &'a mut ByteProgress,
}

impl ImportRun<'_> {
    /// Creates or links `name` in `dir` for a node, and returns its inode.
    fn copy_entry(
        &mut self,
        dir: InodeNumber,
        name: &[u8],
        id: NodeId,
    ) -> anyhow::Result<InodeNumber> {
        let volume = self.import.volume;
        let node = self.import.source.tree.node(id);
        let is_dir = matches!(node.kind_data, NodeKind::Directory);
        let there = match volume.lookup(dir, name) {
            Ok(number) => Some(volume.inode(number)?),
            Err(Error::NotFound) => None,
            Err(error) => return Err(error.into()),
        };
        let linked = self.links.get(&id).copied();
        match &there {
            Some(inode) if is_dir && inode.kind == FileType::Directory => return Ok(inode.number),
            Some(inode) if linked == Some(inode.number) => return Ok(inode.number),
            Some(inode) => {
                if is_dir && let Some(behind) = self.link_target_directory(dir, name, inode)? {
                    return Ok(behind);
                }
                self.replace(dir, name, inode, id)?;
            }
            None => {}
        }
        if let Some(linked) = linked {
            volume.link(linked, dir, name)?;
            return Ok(linked);
        }
        let made = volume.create(dir, name, &self.new_node(node))?;
        if !is_dir {
            self.links.insert(id, made);
            self.created.insert(made, id);
            match (&node.kind_data, &mut self.in_order) {
                (NodeKind::File { source, .. }, Some(later)) => later.push((*source, id, made)),
                _ => self.write_contents_and_attributes(made, node).inspect_err(|_| {
                    // A full volume keeps no part of a file.
                    let _ = volume.unlink(dir, name);
                })?,
            }
        }
        Ok(made)
    }

    fn take_files_in_archive_order(&mut self) -> Vec<(u64, NodeId, InodeNumber)> {
        let mut later = self.in_order.take().unwrap_or_default();
        later.retain(|(_, id, number)| self.links.get(id) == Some(number));
        later.sort_unstable();
        later
    }

    /// Writes contents and attributes of a node that is no directory.
    fn write_contents_and_attributes(
        &mut self,
        made: InodeNumber,
        node: &TreeNode,
    ) -> anyhow::Result<()> {
        if let NodeKind::File { data, source, .. } = &node.kind_data {
            self.write_file_data(made, *source, data)?;
        }
        self.set_attributes(made, node)
    }

    /// Returns the directory that a symbolic link leads to, if it leads to one.
    fn link_target_directory(
        &self,
        dir: InodeNumber,
        name: &[u8],
        there: &Inode,
    ) -> anyhow::Result<Option<InodeNumber>> {
        let volume = self.import.volume;
        if there.kind != FileType::Symlink {
            return Ok(None);
        }
        match volume.resolve(dir, name, Follow::Yes) {
            Ok(behind) => {
                let is_dir = volume.inode(behind)?.kind == FileType::Directory;
                Ok(is_dir.then_some(behind))
            }
            Err(Error::NotFound | Error::NotADirectory | Error::TooManyLinks) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the existing file of a name, if the node may replace it.
    fn replace(
        &mut self,
        dir: InodeNumber,
        name: &[u8],
        there: &Inode,
        id: NodeId,
    ) -> anyhow::Result<()> {
        let TreeImport { volume, source, protected, replace_kinds, .. } = self.import;
        let is_dir = matches!(source.tree.node(id).kind_data, NodeKind::Directory);
        ensure!(!protected.contains(&there.number), "is the same file");
        if there.kind == FileType::Directory {
            ensure!(*replace_kinds, "is a directory; rm -r removes it");
            let is_entered = self.entered.contains(&there.number);
            ensure!(!is_entered, "is a directory that other names put something into");
            return match volume.remove_directory(dir, name) {
                Err(Error::NotEmpty) => {
                    bail!("is a directory with something in it; rm -r removes it")
                }
                done => Ok(done?),
            };
        }
        let may_become_dir = *replace_kinds && !source.implied_dirs.contains(&id);
        ensure!(!is_dir || may_become_dir, "is there and no directory; remove it first");
        volume.unlink(dir, name)?;
        // Through a link on the volume, two paths of the source may lead to one name.
        if there.links() <= 1
            && let Some(gone) = self.created.remove(&there.number)
        {
            self.links.remove(&gone);
        }
        Ok(())
    }

    fn new_node<'n>(&self, node: &'n TreeNode) -> NewNode<'n> {
        let OwnerArg { uid, gid } =
            self.import.owner.unwrap_or(OwnerArg { uid: node.uid, gid: node.gid });
        let (device, target) = match &node.kind_data {
            NodeKind::CharDevice(major, minor) | NodeKind::BlockDevice(major, minor) => {
                ((*major, *minor), &[][..])
            }
            NodeKind::Symlink(target) => ((0, 0), &target[..]),
            _ => ((0, 0), &[][..]),
        };
        NewNode { kind: node.kind_data.kind(), mode: node.mode.into(), uid, gid, device, target }
    }

    /// Writes the data of a file; holes stay holes.
    fn write_file_data(
        &mut self,
        number: InodeNumber,
        source: u64,
        data: &[(u64, u64)],
    ) -> anyhow::Result<()> {
        for (start, end) in data {
            let mut at = *start;
            while at < *end {
                let len = (end - at).min(READ_CHUNK_BYTES);
                self.buffer.resize(len as usize, 0);
                self.import.source.contents.read(source, at, &mut self.buffer)?;
                write_all(self.import.volume, number, at, &self.buffer)?;
                self.progress.add(len);
                at += len;
            }
        }
        Ok(())
    }

    /// Sets the attributes, in an order in which none undoes another.
    fn set_attributes(&self, number: InodeNumber, node: &TreeNode) -> anyhow::Result<()> {
        let volume = self.import.volume;
        for (name, value) in node.attributes() {
            volume.set_xattr(number, &name, &value, XattrSet::Any, false).map_err(|error| {
                with_context(&format!("the attribute {}", escape_control_chars(&name)), error)
            })?;
        }
        let new = self.new_node(node);
        let size_bytes = match &node.kind_data {
            // Only a hole at the end makes the file longer than its written data.
            NodeKind::File { size_bytes, data, source } => {
                let written = data.last().map_or(0, |(_, end)| *end);
                // A file that became shorter while it was read ends where reading ended.
                let read = self.import.source.faults.shortened_len_bytes(*source);
                let size_bytes = read.unwrap_or(*size_bytes);
                (written != size_bytes).then_some(size_bytes)
            }
            _ => None,
        };
        let change = AttributeChange {
            mode: (new.kind != FileType::Symlink).then_some(new.mode),
            uid: Some(new.uid),
            gid: Some(new.gid),
            size_bytes,
            accessed: Some(SetTime::To(node.accessed)),
            modified: Some(SetTime::To(node.modified)),
            ..AttributeChange::default()
        };
        volume.set_attributes(number, &change)?;
        Ok(())
    }
}

fn write_all(volume: &Volume, number: InodeNumber, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let mut put = 0;
    while put < bytes.len() {
        match volume.write(number, at + put as u64, &bytes[put..])? {
            0 => return Err(anyhow!(Error::NoSpace)),
            taken => put += taken,
        }
    }
    Ok(())
}
