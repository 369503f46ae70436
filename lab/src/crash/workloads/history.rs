//! Random calls, next to a model of the tree. A journal keeps transactions whole and in order, so
//! after replay the tree equals the model after one of the calls, in every name and byte.
//!
//! Law: nothing visible is overwritten in place. Files grow, are truncated to block boundaries, and
//! are deleted. Other workloads overwrite; such data may be durable before its size is.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use draconis_ext::{Error, InodeNumber, RenameMode, Volume, XattrSet};
use draconis_types::lock::Mutex;
use draconis_types::{AttributeChange, FileType};

use super::super::judge::PROBE_FILE_NAME;
use super::{RecordingDisk, Workload, create, encode_cells, read_file, walk_volume};
use draconis_device::Random;

/// Files are truncated to multiples of this.
const TRUNCATE_UNIT_BYTES: u64 = 4096;
const XATTR_NAME: &[u8] = b"user.note";
/// Number of names added to a directory at once and removed: its blocks are then reused.
const CROWDED_DIR_NAMES: u64 = 60;

pub(super) struct HistoryWorkload {
    steps: u64,
    /// Hash of the tree after each call.
    trees: Mutex<Vec<u64>>,
}

impl HistoryWorkload {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, trees: Mutex::default() }
    }
}

impl Workload for HistoryWorkload {
    fn name(&self) -> &'static str {
        "history"
    }

    fn run(
        &self,
        volume: &Volume,
        record: &RecordingDisk,
        dice: &mut Random,
    ) -> anyhow::Result<()> {
        let mut trees = self.trees.lock();
        let mut model =
            TreeModel { trees: &mut trees, names: BTreeMap::new(), files: HashMap::new() };
        model.record_tree_hash();
        for step in 0..self.steps {
            match random_change(volume, &mut model, step, dice) {
                Ok(()) => {}
                // A full volume changes nothing.
                Err(error) if matches!(error.downcast_ref(), Some(Error::NoSpace)) => {}
                Err(error) => return Err(error),
            }
            match dice.next_below(10) {
                0 | 1 => {
                    volume.sync()?;
                    record.record_mark(model.trees.len() as u64 - 1);
                }
                2 => volume.commit()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let trees = self.trees.lock();
        let synced = marks.last().copied().unwrap_or(0) as usize;
        let found = volume_tree_hash(volume)?;
        if trees.iter().skip(synced).any(|tree| *tree == found) {
            return Ok(());
        }
        let older = trees.iter().rposition(|tree| *tree == found);
        let calls = trees.len() - 1;
        Err(match older {
            Some(older) => format!("the tree is that of call {older}, and {synced} was synced"),
            None => format!("the tree was never like this (synced: {synced} of {calls} calls)"),
        })
    }
}

/// Model of the tree.
struct TreeModel<'a> {
    trees: &'a mut Vec<u64>,
    /// Inodes by directory and name.
    names: BTreeMap<(InodeNumber, String), InodeNumber>,
    files: HashMap<InodeNumber, HistoryNode>,
}

#[derive(Default)]
struct HistoryNode {
    is_directory: bool,
    bytes: Vec<u8>,
    note: Vec<u8>,
}

impl TreeModel<'_> {
    /// Records the tree after a call.
    fn record_tree_hash(&mut self) {
        let mut links = HashMap::new();
        self.names.values().for_each(|inode| *links.entry(*inode).or_insert(0u64) += 1);
        let path_of = |dir: &InodeNumber| {
            // All directories are in the root.
            let named = self.names.iter().find(|(_, inode)| *inode == dir);
            named.map_or(String::new(), |((_, name), _)| format!("/{name}"))
        };
        let mut all: Vec<FileState<'_>> = vec![];
        for ((dir, name), inode) in &self.names {
            let Some(node) = self.files.get(inode) else { continue };
            let path = format!("{}/{name}", path_of(dir));
            let links = if node.is_directory { 0 } else { links[inode] };
            all.push((path, node.is_directory, links, node.note.clone(), &node.bytes[..]));
        }
        self.trees.push(tree_hash(all));
    }

    /// Picks a random named inode that `which` accepts.
    fn pick_inode(
        &self,
        dice: &mut Random,
        which: impl Fn(&HistoryNode) -> bool,
    ) -> Option<(InodeNumber, String, InodeNumber)> {
        let meant = |inode: &InodeNumber| self.files.get(inode).is_some_and(&which);
        let all: Vec<_> = self.names.iter().filter(|(_, inode)| meant(inode)).collect();
        let nth = dice.next_below(all.len().max(1) as u64) as usize;
        all.get(nth).map(|((dir, name), inode)| (*dir, name.clone(), **inode))
    }

    fn pick_directory(&self, dice: &mut Random) -> InodeNumber {
        match self.pick_inode(dice, |node| node.is_directory) {
            Some((_, _, inode)) if dice.next_below(4) > 0 => inode,
            _ => InodeNumber::ROOT,
        }
    }

    fn create(
        &mut self,
        volume: &Volume,
        dir: InodeNumber,
        name: &str,
        kind: FileType,
    ) -> anyhow::Result<InodeNumber> {
        let inode = create(volume, dir, name, kind)?;
        self.names.insert((dir, name.to_owned()), inode);
        let is_directory = kind == FileType::Directory;
        self.files.insert(inode, HistoryNode { is_directory, ..HistoryNode::default() });
        self.record_tree_hash();
        Ok(inode)
    }

    fn unlink(&mut self, volume: &Volume, dir: InodeNumber, name: &str) -> anyhow::Result<()> {
        volume.unlink(dir, name.as_bytes())?;
        self.remove_name(dir, name);
        self.record_tree_hash();
        Ok(())
    }

    /// Removes a name from the model.
    fn remove_name(&mut self, dir: InodeNumber, name: &str) {
        let inode = self.names.remove(&(dir, name.to_owned()));
        if let Some(inode) = inode.filter(|inode| !self.names.values().any(|it| it == inode)) {
            self.files.remove(&inode);
        }
    }

    fn append(
        &mut self,
        volume: &Volume,
        file: InodeNumber,
        step: u64,
        len: u64,
    ) -> anyhow::Result<()> {
        let Some(at) = self.files.get(&file).map(|node| node.bytes.len() as u64) else {
            return Ok(());
        };
        let bytes = encode_cells(file.0, step as u32 + 1, at, len);
        let mut put = 0;
        while put < bytes.len() {
            let some = volume.write(file, at + put as u64, &bytes[put..])?;
            if let Some(node) = self.files.get_mut(&file) {
                node.bytes.extend_from_slice(&bytes[put..put + some]);
            }
            put += some;
            self.record_tree_hash();
        }
        Ok(())
    }
}

fn random_change(
    volume: &Volume,
    model: &mut TreeModel<'_>,
    step: u64,
    dice: &mut Random,
) -> anyhow::Result<()> {
    let is_file = |node: &HistoryNode| !node.is_directory;
    let new = format!("{step} {}", "n".repeat(dice.next_below(60) as usize));
    let len = 16 + dice.next_below(9_000) / 16 * 16;
    let what = dice.next_below(20);
    if what < 5 || model.files.len() < 4 {
        let kind = if what == 0 { FileType::Directory } else { FileType::File };
        let dir = if what == 0 { InodeNumber::ROOT } else { model.pick_directory(dice) };
        let inode = model.create(volume, dir, &new, kind)?;
        return if what == 0 { Ok(()) } else { model.append(volume, inode, step, len) };
    }
    if what == 5 {
        return churn_directory(volume, model, &new);
    }
    let Some((dir, name, file)) = model.pick_inode(dice, is_file) else { return Ok(()) };
    let to = model.pick_directory(dice);
    match what {
        6..9 => model.append(volume, file, step, len)?,
        9 => {
            let size = dice.next_below(6) * TRUNCATE_UNIT_BYTES;
            let change = AttributeChange { size_bytes: Some(size), ..AttributeChange::default() };
            volume.set_attributes(file, &change)?;
            if let Some(node) = model.files.get_mut(&file) {
                node.bytes.resize(size as usize, 0);
            }
            model.record_tree_hash();
        }
        10 | 11 => model.unlink(volume, dir, &name)?,
        12 | 13 => {
            let how = RenameMode::NoReplace;
            volume.rename(dir, name.as_bytes(), to, new.as_bytes(), how)?;
            model.names.remove(&(dir, name));
            model.names.insert((to, new), file);
            model.record_tree_hash();
        }
        14 | 15 => {
            let Some((to, over, victim)) = model.pick_inode(dice, is_file) else { return Ok(()) };
            if victim == file {
                return Ok(());
            }
            let how = if what == 14 { RenameMode::Replace } else { RenameMode::Exchange };
            volume.rename(dir, name.as_bytes(), to, over.as_bytes(), how)?;
            if what == 14 {
                model.remove_name(to, &over);
                model.names.remove(&(dir, name));
            } else {
                model.names.insert((dir, name), victim);
            }
            model.names.insert((to, over), file);
            model.record_tree_hash();
        }
        16 => {
            volume.link(file, to, new.as_bytes())?;
            model.names.insert((to, new), file);
            model.record_tree_hash();
        }
        17 => {
            let note = vec![b'a' + (step % 26) as u8; dice.next_below(400) as usize];
            volume.set_xattr(file, XATTR_NAME, &note, XattrSet::Any, false)?;
            if let Some(node) = model.files.get_mut(&file) {
                node.note = note;
            }
            model.record_tree_hash();
        }
        _ => return change_directory(volume, model, &new, dice),
    }
    Ok(())
}

/// Renames a directory, or empties and removes it.
fn change_directory(
    volume: &Volume,
    model: &mut TreeModel<'_>,
    new: &str,
    dice: &mut Random,
) -> anyhow::Result<()> {
    let root = InodeNumber::ROOT;
    let Some((_, name, dir)) = model.pick_inode(dice, |node| node.is_directory) else {
        return Ok(());
    };
    if dice.next_below(2) == 0 {
        volume.rename(root, name.as_bytes(), root, new.as_bytes(), RenameMode::NoReplace)?;
        model.names.remove(&(root, name));
        model.names.insert((root, new.to_owned()), dir);
        model.record_tree_hash();
        return Ok(());
    }
    let below: Vec<String> =
        model.names.keys().filter(|it| it.0 == dir).map(|it| it.1.clone()).collect();
    for name in below {
        model.unlink(volume, dir, &name)?;
    }
    remove_directory(volume, model, &name)
}

/// Creates and removes a directory of several blocks; a file then reuses its blocks.
fn churn_directory(volume: &Volume, model: &mut TreeModel<'_>, new: &str) -> anyhow::Result<()> {
    let dir = model.create(volume, InodeNumber::ROOT, new, FileType::Directory)?;
    let names: Vec<String> =
        (0..CROWDED_DIR_NAMES).map(|nth| format!("{nth} {}", "c".repeat(90))).collect();
    let file = model.create(volume, dir, "crowd", FileType::File)?;
    for name in &names {
        volume.link(file, dir, name.as_bytes())?;
        model.names.insert((dir, name.clone()), file);
        model.record_tree_hash();
    }
    volume.sync()?;
    for name in names.iter().map(String::as_str).chain(["crowd"]) {
        model.unlink(volume, dir, name)?;
    }
    remove_directory(volume, model, new)?;
    volume.sync()?;
    let file = model.create(volume, InodeNumber::ROOT, new, FileType::File)?;
    model.append(volume, file, 0, 20_000)?;
    volume.sync()?;
    Ok(())
}

fn remove_directory(volume: &Volume, model: &mut TreeModel<'_>, name: &str) -> anyhow::Result<()> {
    volume.remove_directory(InodeNumber::ROOT, name.as_bytes())?;
    model.remove_name(InodeNumber::ROOT, name);
    model.record_tree_hash();
    Ok(())
}

/// Path, whether it is a directory, link count, note and contents.
type FileState<'a> = (String, bool, u64, Vec<u8>, &'a [u8]);

fn tree_hash(mut all: Vec<FileState<'_>>) -> u64 {
    all.sort_unstable();
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    hasher.finish()
}

/// Returns the hash of a volume's tree.
fn volume_tree_hash(volume: &Volume) -> Result<u64, String> {
    let mut all = vec![];
    for (path, inode, kind) in walk_volume(volume)? {
        if path == "/lost+found" || path.strip_prefix('/') == Some(PROBE_FILE_NAME) {
            continue;
        }
        let describe = |error: Error| format!("{path}: {error}");
        let attributes = volume.attributes(inode).map_err(describe)?;
        let is_directory = kind == FileType::Directory;
        let (links, note, bytes) = if is_directory {
            (0, vec![], vec![])
        } else {
            let note = match volume.xattr(inode, XATTR_NAME) {
                Ok(note) => note,
                Err(Error::NoAttribute) => vec![],
                Err(error) => return Err(describe(error)),
            };
            (u64::from(attributes.links), note, read_file(volume, inode)?)
        };
        all.push((path, is_directory, links, note, bytes));
    }
    let all = all.iter().map(|(path, is_directory, links, note, bytes)| {
        (path.clone(), *is_directory, *links, note.clone(), &bytes[..])
    });
    Ok(tree_hash(all.collect()))
}
