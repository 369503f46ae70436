//! A tree of files put into a volume, below a directory that is there.
//!
//! ```text
//!   names, a directory before what it holds:  create · link · write · attributes
//!   contents that come in an order:           write · attributes
//!   directories, the deepest first:           mode and times, which filling them changes
//! ```
//! Law 1: a directory stays and is added to, also through a symbolic link; no link leads out of the
//! volume.
//! Law 2: anything else that has a name gives way to its like, and to another kind if that is asked
//! for. A directory gives way only when it is empty.
//! Law 3: a directory that the source does not describe replaces nothing, and keeps its attributes.

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

use anyhow::{anyhow, bail, ensure};
use draconis_access::populate::{Source, TimestampPolicy};
use draconis_exchange::contract::{AttributeChange, FileType, SetTime};
use draconis_ext::mkfs::{NodeId, NodeKind, TreeNode};
use draconis_ext::{Error, Follow, Inode, InodeNumber, NewNode, Volume, XattrSet};

use crate::edit::{OwnerArg, now_or_source_date, with_context};
use crate::progress::{Progress, ProgressMode};
use crate::report;
use crate::text::{self, printable};

/// Bytes that are read and written at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The time of what is put.
pub fn timestamp_policy() -> anyhow::Result<TimestampPolicy> {
    let reproducible = std::env::var_os("SOURCE_DATE_EPOCH").is_some();
    Ok(TimestampPolicy { now: now_or_source_date()?, reproducible })
}

/// How a tree is put into a volume.
#[derive(Clone, Copy)]
pub struct How {
    /// The owner of everything, instead of each one's own.
    pub owner: Option<OwnerArg>,
    /// Replaces a file by a directory and an empty directory by a file, as `tar -x` does.
    pub replace_kinds: bool,
    /// When to show progress.
    pub progress: ProgressMode,
}

/// Puts `source` into a directory.
pub fn import_tree(
    volume: &Volume,
    source: &Source<'_>,
    into: InodeNumber,
    label: String,
    how: How,
) -> anyhow::Result<ExitCode> {
    let How { owner, replace_kinds, progress } = how;
    let graft =
        TreeImport { volume, source, into, label, owner, replace_kinds, protected: HashSet::new() };
    let done = graft.run(progress);
    let faults = source.faults.texts();
    report::notes(&faults);
    done?;
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is put where.
pub struct TreeImport<'a> {
    pub volume: &'a Volume,
    pub source: &'a Source<'a>,
    /// The directory that becomes the root of the tree.
    pub into: InodeNumber,
    /// Its path, for messages.
    pub label: String,
    /// The owner of everything, instead of each one's own.
    pub owner: Option<OwnerArg>,
    /// Replaces a file by a directory and an empty directory by a file, as `tar -x` does.
    pub replace_kinds: bool,
    /// Inodes of the volume that are still to be read, and so are not to be replaced.
    pub protected: HashSet<InodeNumber>,
}

impl TreeImport<'_> {
    /// Bytes of all files.
    fn bytes(&self) -> u64 {
        self.each().map(data_bytes).sum()
    }

    /// Refuses what cannot fit before anything is changed. Directories and maps come on top;
    /// what is replaced may make room: this is no promise.
    fn check_space(&self) -> anyhow::Result<()> {
        let space = self.volume.space();
        let block = u64::from(space.block_bytes).max(1);
        let blocks: u64 = self.each().map(|node| data_bytes(node).div_ceil(block)).sum();
        ensure!(
            blocks <= space.free_blocks,
            "{}: {} are needed and {} are free; remove something, or take a larger volume",
            self.label,
            text::format_bytes(blocks.saturating_mul(block)),
            text::format_bytes(space.free_blocks.saturating_mul(block))
        );
        Ok(())
    }

    /// All nodes, each once.
    fn each(&self) -> impl Iterator<Item = &TreeNode> {
        self.source.nodes().map(|id| self.source.tree.node(id))
    }

    /// Puts all of it.
    pub fn run(&self, progress: ProgressMode) -> anyhow::Result<()> {
        report::notes(&self.source.notes);
        self.check_space()?;
        let outside = self.outside()?;
        // A target lives on when something takes its only name.
        outside.values().for_each(|number| self.volume.add_user(*number));
        let done = self.put(outside.clone(), progress);
        outside.values().for_each(|number| self.volume.remove_users(*number, 1));
        done
    }

    /// The inodes of the volume that hard links of the source lead to.
    fn outside(&self) -> anyhow::Result<HashMap<NodeId, InodeNumber>> {
        let mut found = HashMap::new();
        for id in self.source.nodes() {
            let Some(target) = self.source.outside.get(&id) else { continue };
            let link = || format!("{}: a hard link to {}", self.path(id, b""), printable(target));
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

    fn put(
        &self,
        links: HashMap<NodeId, InodeNumber>,
        progress: ProgressMode,
    ) -> anyhow::Result<()> {
        let mut run = ImportRun {
            graft: self,
            links,
            made: HashMap::new(),
            entered: HashSet::from([self.into]),
            buffer: vec![],
            in_order: self.source.contents.is_sequential().then(Vec::new),
            progress: &mut Progress::new(progress, self.bytes()),
        };
        let mut dirs = vec![(NodeId::ROOT, self.into)];
        let mut at = 0;
        while let Some((dir, number)) = dirs.get(at).copied() {
            at += 1;
            for (name, id) in self.source.tree.names(dir) {
                let made = run.entry(number, name, id);
                let made = made.map_err(|error| self.with_context(dir, name, error))?;
                if matches!(self.source.tree.node(id).kind_data, NodeKind::Directory) {
                    run.entered.insert(made);
                    dirs.push((id, made));
                }
            }
        }
        for (_, id, number) in run.take_streamed_files() {
            let done = run.fill(number, self.source.tree.node(id));
            done.map_err(|error| self.with_context(id, b"", error))?;
        }
        for (id, number) in dirs.into_iter().rev() {
            if !self.source.implied_dirs.contains(&id) {
                let done = run.finish(number, self.source.tree.node(id));
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
        let path = format!("{}/{}", above.trim_end_matches('/'), printable(name));
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
    graft: &'a TreeImport<'a>,
    /// The inodes of nodes that may have more names.
    links: HashMap<NodeId, InodeNumber>,
    /// The nodes of inodes that were made.
    made: HashMap<InodeNumber, NodeId>,
    /// Directories of the volume that something is put into.
    entered: HashSet<InodeNumber>,
    buffer: Vec<u8>,
    /// Files whose contents come later, in the order of their source.
    in_order: Option<Vec<(u64, NodeId, InodeNumber)>>,
    progress: &'a mut Progress,
}

impl ImportRun<'_> {
    /// Gives `name` in `dir` to a node; its inode.
    fn entry(&mut self, dir: InodeNumber, name: &[u8], id: NodeId) -> anyhow::Result<InodeNumber> {
        let volume = self.graft.volume;
        let node = self.graft.source.tree.node(id);
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
                if is_dir && let Some(behind) = self.directory_behind(dir, name, inode)? {
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
            self.made.insert(made, id);
            match (&node.kind_data, &mut self.in_order) {
                (NodeKind::File { source, .. }, Some(later)) => later.push((*source, id, made)),
                _ => self.fill(made, node)?,
            }
        }
        Ok(made)
    }

    fn take_streamed_files(&mut self) -> Vec<(u64, NodeId, InodeNumber)> {
        let mut later = self.in_order.take().unwrap_or_default();
        later.retain(|(_, id, number)| self.links.get(id) == Some(number));
        later.sort_unstable();
        later
    }

    /// Contents and attributes of what is no directory.
    fn fill(&mut self, made: InodeNumber, node: &TreeNode) -> anyhow::Result<()> {
        if let NodeKind::File { data, source, .. } = &node.kind_data {
            self.contents(made, *source, data)?;
        }
        self.finish(made, node)
    }

    /// The directory that a symbolic link leads to, if it leads to one.
    fn directory_behind(
        &self,
        dir: InodeNumber,
        name: &[u8],
        there: &Inode,
    ) -> anyhow::Result<Option<InodeNumber>> {
        let volume = self.graft.volume;
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

    /// Takes away what has the name of a node, if it may be replaced by that.
    fn replace(
        &mut self,
        dir: InodeNumber,
        name: &[u8],
        there: &Inode,
        id: NodeId,
    ) -> anyhow::Result<()> {
        let TreeImport { volume, source, protected: kept, replace_kinds, .. } = self.graft;
        let is_dir = matches!(source.tree.node(id).kind_data, NodeKind::Directory);
        ensure!(!kept.contains(&there.number), "is the same file");
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
        // Two paths of the source may lead to one name, through a link on the volume.
        if there.links() <= 1
            && let Some(gone) = self.made.remove(&there.number)
        {
            self.links.remove(&gone);
        }
        Ok(())
    }

    fn new_node<'n>(&self, node: &'n TreeNode) -> NewNode<'n> {
        let OwnerArg { uid, gid } =
            self.graft.owner.unwrap_or(OwnerArg { uid: node.uid, gid: node.gid });
        let (device, target) = match &node.kind_data {
            NodeKind::CharDevice(major, minor) | NodeKind::BlockDevice(major, minor) => {
                ((*major, *minor), &[][..])
            }
            NodeKind::Symlink(target) => ((0, 0), &target[..]),
            _ => ((0, 0), &[][..]),
        };
        NewNode { kind: node.kind_data.kind(), mode: node.mode.into(), uid, gid, device, target }
    }

    /// Writes what a file has; holes stay holes.
    fn contents(
        &mut self,
        number: InodeNumber,
        source: u64,
        data: &[(u64, u64)],
    ) -> anyhow::Result<()> {
        for (start, end) in data {
            let mut at = *start;
            while at < *end {
                let len = (end - at).min(PIECE_BYTES);
                self.buffer.resize(len as usize, 0);
                self.graft.source.contents.read(source, at, &mut self.buffer)?;
                write_all(self.graft.volume, number, at, &self.buffer)?;
                self.progress.add(len);
                at += len;
            }
        }
        Ok(())
    }

    /// Attributes, in the order in which they do not undo each other.
    fn finish(&self, number: InodeNumber, node: &TreeNode) -> anyhow::Result<()> {
        let volume = self.graft.volume;
        for (name, value) in node.attributes() {
            volume.set_xattr(number, &name, &value, XattrSet::Any, false).map_err(|error| {
                with_context(&format!("the attribute {}", printable(&name)), error)
            })?;
        }
        let new = self.new_node(node);
        let size_bytes = match &node.kind_data {
            // A hole at the end; nothing else is longer than what was written.
            NodeKind::File { size_bytes, data, source } => {
                let written = data.last().map_or(0, |(_, end)| *end);
                // One that became shorter has zeros where there was nothing to be read.
                let read = self.graft.source.faults.len_bytes(*source);
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
