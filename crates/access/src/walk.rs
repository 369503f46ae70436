//! A whole tree of a volume, listed first and then read in the order of the disk.
//!
//! ```text
//!   walk: names and inodes ──▶ items ──▶ plan: each directory, then what it holds
//!   reader thread: a window of the plan, read in disk order
//!        ══ bounded queue of batches, in plan order ══▶ the writer
//! ```
//!
//! The plan keeps a directory's files behind it and together, because `tar` gives a
//! directory its time as soon as an archive leaves it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::vec;

use draconis_exchange::contract::{Attributes, FileType};
use draconis_ext::{BlockLocation, Inode, InodeNumber, Run, SharedBytes, Volume};

use crate::listing::{Listing, join, names};
use crate::messages::{ErrorSink, printable, with_context};

/// Batches that may wait between the reader and the writer.
const MAX_QUEUED_BATCHES: usize = 32;
/// A batch is sent once it has so many bytes, or so many pieces: waking the other thread takes
/// longer than copying a small file.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_PIECES: usize = 256;
/// Most bytes of one piece.
const PIECE_BYTES: usize = 128 << 10;
/// Contents that are read in disk order before they are sent in plan order, in bytes.
const WINDOW_BYTES: u64 = 32 << 20;
/// Files of one window.
const WINDOW_FILES: usize = 4096;
/// A file larger than this is read when its turn comes: it makes its own order.
const LARGE_FILE_BYTES: u64 = 1 << 20;

/// Something in the tree.
pub struct Item {
    /// Path from the top of the tree; empty for the top itself.
    pub path: Vec<u8>,
    /// Its attributes.
    pub attributes: Attributes,
    /// The item that has the same inode and came first: this one is a hard link to it.
    pub link_to: Option<usize>,
    inode: Arc<Inode>,
    /// Where its contents begin on the disk.
    first_block: u64,
}

impl Item {
    /// The inode.
    pub fn inode(&self) -> &Inode {
        &self.inode
    }
}

/// A listed tree.
pub struct Walk {
    /// Everything in it; a directory comes before what it holds.
    pub items: Vec<Item>,
    /// Contents of all files together, in bytes that are there.
    pub bytes: u64,
    /// Whether something could not be read and is missing.
    pub damaged: bool,
    /// Each directory that was listed, in order, and the items it holds.
    dirs: Vec<(usize, Range<usize>)>,
}

impl Walk {
    /// Lists what is at and below `top`; `complain` hears of what could not be read.
    ///
    /// # Errors
    /// What the volume says of `top`.
    pub fn new(
        volume: &Volume,
        top: InodeNumber,
        label: &str,
        complain: ErrorSink<'_>,
    ) -> anyhow::Result<Self> {
        let mut walk = Self { items: vec![], bytes: 0, damaged: false, dirs: vec![] };
        let mut links = HashMap::new();
        walk.add(volume, vec![], top, &mut links).map_err(|error| with_context(&label, error))?;
        let mut seen = HashSet::new();
        let mut stack = vec![0];
        while let Some(at) = stack.pop() {
            let (dir, path) = (walk.items[at].inode.number, walk.items[at].path.clone());
            if walk.items[at].attributes.kind != FileType::Directory {
                continue;
            }
            let mut listing = Listing::default();
            // A damaged volume may hold a directory twice, or below itself.
            if seen.insert(dir) {
                let shown = if path.is_empty() { label.to_owned() } else { printable(&path) };
                match names(volume, dir, &shown, complain) {
                    Ok(found) => listing = found,
                    Err(error) => {
                        walk.damaged = true;
                        complain(&error);
                    }
                }
            }
            walk.damaged |= listing.damaged;
            // Inodes are read in the order of their tables.
            listing.names.sort_by_key(|entry| entry.inode);
            let first = walk.items.len();
            for entry in listing.names {
                let below = join(&path, &entry.name);
                let shown = printable(&below);
                if let Err(error) = walk.add(volume, below, entry.inode, &mut links) {
                    walk.damaged = true;
                    complain(&with_context(&shown, error));
                }
            }
            walk.dirs.push((at, first..walk.items.len()));
            let dirs = (first..walk.items.len())
                .filter(|&at| walk.items[at].attributes.kind == FileType::Directory);
            stack.extend(dirs.rev());
        }
        Ok(walk)
    }

    fn add(
        &mut self,
        volume: &Volume,
        path: Vec<u8>,
        number: InodeNumber,
        links: &mut HashMap<InodeNumber, usize>,
    ) -> draconis_ext::Result<()> {
        let inode = volume.inode(number)?;
        let attributes = volume.attributes_of(&inode);
        let shared = attributes.links > 1 && attributes.kind != FileType::Directory;
        let at = self.items.len();
        let link_to =
            shared.then(|| *links.entry(number).or_insert(at)).filter(|&first| first != at);
        if attributes.kind == FileType::File && link_to.is_none() {
            self.bytes += attributes.size_bytes.min(attributes.blocks_512.saturating_mul(512));
        }
        let first_block = volume.first_block(&inode).map_or(0, |block| block.0);
        self.items.push(Item { path, attributes, link_to, inode, first_block });
        Ok(())
    }

    /// The order in which to write the tree: each directory, then what it holds as that
    /// lies on the disk. A hard link comes after the item it links to.
    pub fn plan(&self) -> Vec<usize> {
        let mut plan = Vec::with_capacity(self.items.len());
        if self.dirs.is_empty() {
            plan.extend(0..self.items.len());
        }
        for (dir, below) in &self.dirs {
            plan.push(*dir);
            let from = plan.len();
            let is_dir = |at: &usize| self.items[*at].attributes.kind == FileType::Directory;
            plan.extend(below.clone().filter(|at| !is_dir(at)));
            plan[from..].sort_by_key(|&at| self.items[at].first_block);
        }
        plan
    }

    /// Whether the contents of an item are to be read.
    fn has_contents(&self, at: usize) -> bool {
        self.items[at].attributes.kind == FileType::File && self.items[at].link_to.is_none()
    }
}

/// A piece of a file's contents.
pub enum FileChunk {
    /// Bytes at an offset.
    Data(u64, SharedBytes),
    /// All of the file has been sent, or why not.
    End(draconis_ext::Result<()>),
}

/// Reads the contents of the planned files and sends them in the order of the plan; ends
/// early when there is no listener any more.
pub fn read_ahead(volume: &Volume, walk: &Walk, plan: &[usize], mut pieces: ChunkSender) {
    let files: Vec<usize> = plan.iter().copied().filter(|&at| walk.has_contents(at)).collect();
    let mut rest = &files[..];
    while !rest.is_empty() {
        let (window, after) = rest.split_at(window_len(walk, rest));
        rest = after;
        let mut small = read_small(volume, walk, window);
        for &at in window {
            let sent = match small.remove(&at) {
                Some(kept) => kept.into_iter().all(|piece| pieces.send(piece)),
                None => send_large(volume, walk.items[at].inode(), &mut pieces),
            };
            if !sent {
                return;
            }
        }
    }
    pieces.flush();
}

/// How many of the files fit one window; at least one.
fn window_len(walk: &Walk, files: &[usize]) -> usize {
    let mut bytes = 0;
    let fits = |&&at: &&usize| {
        let size = walk.items[at].attributes.size_bytes;
        bytes += if size > LARGE_FILE_BYTES { 0 } else { size };
        bytes <= WINDOW_BYTES
    };
    files.iter().take(WINDOW_FILES).take_while(fits).count().max(1)
}

/// Reads the small files of a window in the order of the disk.
fn read_small(volume: &Volume, walk: &Walk, window: &[usize]) -> HashMap<usize, Vec<FileChunk>> {
    let is_small = |at: &usize| walk.items[*at].attributes.size_bytes <= LARGE_FILE_BYTES;
    let mut order: Vec<usize> = window.iter().copied().filter(is_small).collect();
    order.sort_by_key(|&at| walk.items[at].first_block);
    let mut kept = HashMap::with_capacity(order.len());
    for at in order {
        let mut pieces = vec![];
        let read = visit_data(volume, walk.items[at].inode(), |offset, data| {
            pieces.push(FileChunk::Data(offset, data));
            true
        });
        pieces.push(FileChunk::End(read));
        kept.insert(at, pieces);
    }
    kept
}

fn send_large(volume: &Volume, inode: &Inode, pieces: &mut ChunkSender) -> bool {
    let mut listening = true;
    let read = visit_data(volume, inode, |offset, data| {
        listening = pieces.send(FileChunk::Data(offset, data));
        listening
    });
    listening && pieces.send(FileChunk::End(read))
}

/// The queue between [`read_ahead`] and a writer.
pub fn queue() -> (ChunkSender, ChunkReceiver) {
    let (to, from) = sync_channel(MAX_QUEUED_BATCHES);
    (ChunkSender { to, batch: vec![], bytes: 0 }, ChunkReceiver { from, batch: vec![].into_iter() })
}

/// The reader's end.
pub struct ChunkSender {
    to: SyncSender<Vec<FileChunk>>,
    batch: Vec<FileChunk>,
    /// Of the batch.
    bytes: usize,
}

impl ChunkSender {
    /// Whether there still is a writer, as far as is known.
    fn send(&mut self, piece: FileChunk) -> bool {
        if let FileChunk::Data(_, data) = &piece {
            self.bytes += data.len();
        }
        self.batch.push(piece);
        let is_full = self.bytes >= BATCH_BYTES || self.batch.len() >= BATCH_PIECES;
        !is_full || self.flush()
    }

    fn flush(&mut self) -> bool {
        self.bytes = 0;
        self.to.send(std::mem::take(&mut self.batch)).is_ok()
    }
}

/// The writer's end: pieces in the order of the plan.
pub struct ChunkReceiver {
    from: Receiver<Vec<FileChunk>>,
    batch: vec::IntoIter<FileChunk>,
}

impl Iterator for ChunkReceiver {
    type Item = FileChunk;

    fn next(&mut self) -> Option<FileChunk> {
        loop {
            if let Some(piece) = self.batch.next() {
                return Some(piece);
            }
            self.batch = self.from.recv().ok()?.into_iter();
        }
    }
}

/// Reads all that is not a hole; stops when `visit` returns false.
fn visit_data(
    volume: &Volume,
    inode: &Inode,
    mut visit: impl FnMut(u64, SharedBytes) -> bool,
) -> draconis_ext::Result<()> {
    for segment in segments(volume, inode) {
        let (start, end) = segment?;
        let mut offset = start;
        while offset < end {
            let want = usize::try_from(end - offset).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let data = volume.read_from_inode(inode, offset, want)?;
            if data.is_empty() {
                break;
            }
            let len = data.len() as u64;
            if !visit(offset, data) {
                return Ok(());
            }
            offset += len;
        }
    }
    Ok(())
}

/// Where a file has contents, as byte ranges in order that do not touch: everything, if it
/// has no hole. They are found as they are asked for, so that a file of any shape takes the
/// same memory.
pub fn segments<'a>(volume: &'a Volume, inode: &'a Inode) -> Segments<'a> {
    let size = inode.size_bytes;
    let space = volume.attributes_of(inode).blocks_512.saturating_mul(512);
    // More space than size: no hole, unless indirect blocks hide one that is small.
    let whole = size > 0 && size <= LARGE_FILE_BYTES && space >= size;
    let (at, open) = if whole { (size, Some((0, size))) } else { (0, None) };
    Segments { volume, inode, at, runs: vec![].into_iter(), open }
}

/// What [`segments`] finds.
pub struct Segments<'a> {
    volume: &'a Volume,
    inode: &'a Inode,
    /// Where the map is to be asked next.
    at: u64,
    runs: std::vec::IntoIter<Run>,
    /// Contents whose end was not met yet.
    open: Option<(u64, u64)>,
}

impl Segments<'_> {
    /// The next run of the map; none at the end of the file.
    fn run(&mut self) -> draconis_ext::Result<Option<Run>> {
        if let Some(run) = self.runs.next() {
            return Ok(Some(run));
        }
        if self.at >= self.inode.size_bytes {
            return Ok(None);
        }
        let runs = self.volume.map_inode(self.inode, self.at)?;
        self.at = runs.last().map_or(u64::MAX, |last| self.range(last).1).max(self.at + 1);
        self.runs = runs.into_iter();
        Ok(self.runs.next())
    }

    /// The bytes of a run.
    fn range(&self, run: &Run) -> (u64, u64) {
        let block_bytes = u64::from(self.volume.space().block_bytes);
        let (from, blocks) = (u64::from(run.from.0), u64::from(run.blocks));
        (from * block_bytes, (from + blocks) * block_bytes)
    }
}

impl Iterator for Segments<'_> {
    type Item = draconis_ext::Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let run = match self.run() {
                Ok(Some(run)) => run,
                Ok(None) => return self.open.take().map(Ok),
                Err(error) => {
                    self.at = u64::MAX;
                    self.open = None;
                    return Some(Err(error));
                }
            };
            let (start, end) = self.range(&run);
            let end = end.min(self.inode.size_bytes);
            let before = match (&mut self.open, run.location) {
                (open, BlockLocation::Hole) => open.take(),
                (Some(open), _) if open.1 == start => {
                    open.1 = end;
                    None
                }
                (open, _) => open.replace((start, end)),
            };
            if let Some(before) = before {
                return Some(Ok(before));
            }
        }
    }
}
