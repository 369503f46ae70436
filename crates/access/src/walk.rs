//! Walking a tree of a volume: list it first, then read contents in disk order.
//!
//! ```text
//!   walk: names and inodes ──▶ items ──▶ plan: each directory, then what it holds
//!   reader thread: a window of the plan, read in disk order
//!        ══ bounded queue of batches, in plan order ══▶ the writer
//! ```
//!
//! The plan puts the files of a directory directly after it, because `tar` sets the time of a
//! directory as soon as the archive leaves it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::vec;

use draconis_ext::{BlockLocation, Inode, InodeNumber, Run, SharedBytes, Volume};
use draconis_types::{Attributes, FileType};

use crate::listing::{DirectoryListing, join_path, list_directory};
use crate::messages::{ErrorSink, escape_control_chars, with_context};

/// Maximum number of batches queued between reader and writer.
const MAX_QUEUED_BATCHES: usize = 32;
/// Bytes and chunks after which a batch is sent: waking the other thread takes longer than
/// copying a small file.
const BATCH_FLUSH_BYTES: usize = 1 << 20;
const BATCH_FLUSH_CHUNKS: usize = 256;
/// Maximum size of one chunk, in bytes.
const MAX_CHUNK_BYTES: usize = 128 << 10;
/// Maximum contents of one window, which is read in disk order and sent in plan order, in bytes.
const MAX_READ_AHEAD_BYTES: u64 = 32 << 20;
/// Maximum number of files in one window.
const MAX_READ_AHEAD_FILES: usize = 4096;
/// Files larger than this are read in plan order, since each is mostly sequential on its own.
const LARGE_FILE_BYTES: u64 = 1 << 20;

/// A file or directory in the tree.
pub struct TreeItem {
    /// Path from the top of the tree; empty for the top itself.
    pub path: Vec<u8>,
    /// Attributes of the inode.
    pub attributes: Attributes,
    /// Index of an earlier item with the same inode: this one is a hard link to it.
    pub link_to: Option<usize>,
    inode: Arc<Inode>,
    /// First block of the contents on the disk.
    first_block: u64,
}

impl TreeItem {
    /// The inode.
    pub fn inode(&self) -> &Inode {
        &self.inode
    }
}

/// Listing of a tree.
pub struct TreeListing {
    /// All items; a directory precedes its contents.
    pub items: Vec<TreeItem>,
    /// Allocated bytes of all files together.
    pub bytes: u64,
    /// True if some items could not be read and are missing.
    pub damaged: bool,
    /// Listed directories in order, each with the range of its items.
    dirs: Vec<(usize, Range<usize>)>,
}

impl TreeListing {
    /// Lists the tree at `top`; reports unreadable items to `complain`.
    ///
    /// # Errors
    /// `top` cannot be read.
    pub fn new(
        volume: &Volume,
        top: InodeNumber,
        label: &str,
        complain: ErrorSink<'_>,
    ) -> anyhow::Result<Self> {
        let mut walk = Self { items: vec![], bytes: 0, damaged: false, dirs: vec![] };
        let mut links = HashMap::new();
        walk.add_item(volume, vec![], top, &mut links)
            .map_err(|error| with_context(&label, error))?;
        let mut seen = HashSet::new();
        let mut stack = vec![0];
        while let Some(at) = stack.pop() {
            let (dir, path) = (walk.items[at].inode.number, walk.items[at].path.clone());
            if walk.items[at].attributes.kind != FileType::Directory {
                continue;
            }
            let mut listing = DirectoryListing::default();
            // In a damaged volume a directory may occur twice, or below itself.
            if seen.insert(dir) {
                let shown =
                    if path.is_empty() { label.to_owned() } else { escape_control_chars(&path) };
                match list_directory(volume, dir, &shown, complain) {
                    Ok(found) => listing = found,
                    Err(error) => {
                        walk.damaged = true;
                        complain(&error);
                    }
                }
            }
            walk.damaged |= listing.damaged;
            // Reads inodes in the order of the inode tables.
            listing.names.sort_by_key(|entry| entry.inode);
            let first = walk.items.len();
            for entry in listing.names {
                let below = join_path(&path, &entry.name);
                let shown = escape_control_chars(&below);
                if let Err(error) = walk.add_item(volume, below, entry.inode, &mut links) {
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

    fn add_item(
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
        self.items.push(TreeItem { path, attributes, link_to, inode, first_block });
        Ok(())
    }

    /// Returns the order in which to write the tree: each directory, then its contents in disk
    /// order. A hard link comes after the item that it links to.
    pub fn write_order(&self) -> Vec<usize> {
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

    /// Returns true if the contents of an item must be read.
    fn has_contents(&self, at: usize) -> bool {
        self.items[at].attributes.kind == FileType::File && self.items[at].link_to.is_none()
    }
}

/// A chunk of a file's contents.
pub enum FileChunk {
    /// Bytes at an offset.
    Data(u64, SharedBytes),
    /// End of the file, or the error that ended it.
    End(draconis_ext::Result<()>),
}

/// Reads the contents of the planned files and sends them in plan order; ends early if the
/// receiver is gone.
pub fn read_ahead(volume: &Volume, walk: &TreeListing, plan: &[usize], mut pieces: ChunkSender) {
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

/// Returns the number of files that fit one window; at least one.
fn window_len(walk: &TreeListing, files: &[usize]) -> usize {
    let mut bytes = 0;
    let fits = |&&at: &&usize| {
        let size = walk.items[at].attributes.size_bytes;
        bytes += if size > LARGE_FILE_BYTES { 0 } else { size };
        bytes <= MAX_READ_AHEAD_BYTES
    };
    files.iter().take(MAX_READ_AHEAD_FILES).take_while(fits).count().max(1)
}

/// Reads the small files of a window in disk order.
fn read_small(
    volume: &Volume,
    walk: &TreeListing,
    window: &[usize],
) -> HashMap<usize, Vec<FileChunk>> {
    let is_small = |at: &usize| walk.items[*at].attributes.size_bytes <= LARGE_FILE_BYTES;
    let mut order: Vec<usize> = window.iter().copied().filter(is_small).collect();
    order.sort_by_key(|&at| walk.items[at].first_block);
    let mut kept = HashMap::with_capacity(order.len());
    for at in order {
        let mut pieces = vec![];
        let read = for_each_data_chunk(volume, walk.items[at].inode(), |offset, data| {
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
    let read = for_each_data_chunk(volume, inode, |offset, data| {
        listening = pieces.send(FileChunk::Data(offset, data));
        listening
    });
    listening && pieces.send(FileChunk::End(read))
}

/// Creates the queue between [`read_ahead`] and a writer.
pub fn chunk_queue() -> (ChunkSender, ChunkReceiver) {
    let (to, from) = sync_channel(MAX_QUEUED_BATCHES);
    (ChunkSender { to, batch: vec![], bytes: 0 }, ChunkReceiver { from, batch: vec![].into_iter() })
}

/// Sending end of the queue.
pub struct ChunkSender {
    to: SyncSender<Vec<FileChunk>>,
    batch: Vec<FileChunk>,
    /// Bytes in the current batch.
    bytes: usize,
}

impl ChunkSender {
    /// Queues a chunk; returns false once the receiver is known to be gone.
    pub fn send(&mut self, piece: FileChunk) -> bool {
        if let FileChunk::Data(_, data) = &piece {
            self.bytes += data.len();
        }
        self.batch.push(piece);
        let is_full = self.bytes >= BATCH_FLUSH_BYTES || self.batch.len() >= BATCH_FLUSH_CHUNKS;
        !is_full || self.flush()
    }

    /// Sends what is queued; returns false if the receiver is gone.
    pub fn flush(&mut self) -> bool {
        self.bytes = 0;
        self.to.send(std::mem::take(&mut self.batch)).is_ok()
    }
}

/// Receiving end of the queue: chunks in plan order.
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

/// Reads everything outside holes; stops when `visit` returns false.
fn for_each_data_chunk(
    volume: &Volume,
    inode: &Inode,
    mut visit: impl FnMut(u64, SharedBytes) -> bool,
) -> draconis_ext::Result<()> {
    for segment in data_segments(volume, inode) {
        let (start, end) = segment?;
        let mut offset = start;
        while offset < end {
            let want =
                usize::try_from(end - offset).unwrap_or(MAX_CHUNK_BYTES).min(MAX_CHUNK_BYTES);
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

/// Returns the data segments of a file as sorted, disjoint byte ranges; one range if the file has
/// no hole. Finds them lazily, so that memory does not depend on the file.
pub fn data_segments<'a>(volume: &'a Volume, inode: &'a Inode) -> DataSegments<'a> {
    let size = inode.size_bytes;
    let space = volume.attributes_of(inode).blocks_512.saturating_mul(512);
    // More blocks than the size needs: no hole, unless indirect blocks make up for a small one.
    let whole = size > 0 && size <= LARGE_FILE_BYTES && space >= size;
    let (at, open) = if whole { (size, Some((0, size))) } else { (0, None) };
    DataSegments { volume, inode, at, runs: vec![].into_iter(), open }
}

/// Iterator of [`data_segments`].
pub struct DataSegments<'a> {
    volume: &'a Volume,
    inode: &'a Inode,
    /// Offset of the next map lookup.
    at: u64,
    runs: std::vec::IntoIter<Run>,
    /// Segment whose end is not known yet.
    open: Option<(u64, u64)>,
}

impl DataSegments<'_> {
    /// Returns the next run of the map; `None` at the end of the file.
    fn next_run(&mut self) -> draconis_ext::Result<Option<Run>> {
        if let Some(run) = self.runs.next() {
            return Ok(Some(run));
        }
        if self.at >= self.inode.size_bytes {
            return Ok(None);
        }
        let runs = self.volume.map_inode(self.inode, self.at)?;
        self.at = runs.last().map_or(u64::MAX, |last| self.run_byte_range(last).1).max(self.at + 1);
        self.runs = runs.into_iter();
        Ok(self.runs.next())
    }

    /// Returns the byte range of a run.
    fn run_byte_range(&self, run: &Run) -> (u64, u64) {
        let block_bytes = u64::from(self.volume.space().block_bytes);
        let (from, blocks) = (u64::from(run.from.0), u64::from(run.blocks));
        (from * block_bytes, (from + blocks) * block_bytes)
    }
}

impl Iterator for DataSegments<'_> {
    type Item = draconis_ext::Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let run = match self.next_run() {
                Ok(Some(run)) => run,
                Ok(None) => return self.open.take().map(Ok),
                Err(error) => {
                    self.at = u64::MAX;
                    self.open = None;
                    return Some(Err(error));
                }
            };
            let (start, end) = self.run_byte_range(&run);
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
