//! The file that the journal is, block by block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{Disk, Extent, Group, Ticket, Write};
use draconis_exchange::heap::Block;

use super::lay::{Contents, lay};
use super::missing;
use super::recovery::{Copy, Damage, Recovery, Source, recover};
use crate::blocks::data::Data;
use crate::format::inode::Inode;
use crate::format::jbd2::blocks::unescape;
use crate::format::jbd2::{JournalSuperblock, RawJournalSuperblock};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::map::{Place, SEGMENT_BLOCKS};
use crate::units::index;
use crate::volume::{Options, Volume};
use crate::{Error, FileBlock, FsBlock, Result, Run};

/// What opening a volume takes that nothing but the map of one inode is read from.
const FEW: Options = Options {
    inode_cache: 16,
    block_map_cache: 64,
    data_cache_bytes: 1 << 20,
    dots: false,
    read_ahead_bytes: 0,
};
/// Runs of a journal that are remembered.
const MOST_RUNS: usize = 1 << 16;
const MISSING: &str = "journal: a block of its file is missing";
/// Bytes that are put in place at once.
const PIECE_BYTES: usize = 1 << 20;

/// A journal inside of its volume.
pub(crate) struct Log {
    disk: Arc<dyn Disk>,
    volume: Superblock,
    pub(crate) super_: JournalSuperblock,
    /// Its first block.
    pub(crate) first: Data,
    /// Where its blocks are, in order.
    runs: Vec<Run>,
    /// The blocks of the volume that are its own, in order.
    own: Vec<Range<u64>>,
}

impl Log {
    /// Finds the journal of a volume.
    ///
    /// # Errors
    /// As [`super::replayed`].
    pub(crate) fn find(disk: Arc<dyn Disk>, volume: &Superblock) -> Result<Self> {
        let inode = volume.journal.ok_or_else(|| missing(volume))?;
        let plain = Volume::of(disk.clone(), FEW, volume.clone());
        let node = plain.inode(inode).map_err(|error| match error {
            Error::NotFound if volume.journal_device != 0 => missing(volume),
            Error::NotFound => Error::corrupt("journal: its inode is unused").of_inode(inode),
            other => other,
        })?;
        let blocks = node.size_bytes.checked_div(volume.block_bytes.into()).unwrap_or(0);
        let mut runs = runs(&plain, &node, FileBlock(0)..FileBlock(1))?;
        let Some(Run { place: Place::At(first), .. }) = runs.pop() else {
            return Err(Error::corrupt(MISSING).of_inode(inode));
        };
        let first = read_block(&*disk, volume, first)?;
        let super_ = RawJournalSuperblock::view(&first)
            .and_then(|raw| raw.check(volume.block_bytes, blocks.min(plain.disk_blocks())))
            .map_err(|error| error.of_inode(inode))?;
        let runs = self::runs(&plain, &node, FileBlock(0)..FileBlock(super_.len))?;
        let blocks = |run: &Run| match run.place {
            Place::At(first) => Some(first.0..first.after(run.blocks.into()).0),
            _ => None,
        };
        let mut own: Vec<Range<u64>> = runs.iter().filter_map(blocks).collect();
        own.sort_unstable_by_key(|own| own.start);
        Ok(Self { disk, volume: volume.clone(), super_, first, runs, own })
    }

    /// The block of the volume that a block of the log is.
    pub(crate) fn place(&self, at: u32) -> Option<FsBlock> {
        let at = FileBlock(at);
        let nth = self.runs.partition_point(|run| run.end() <= at);
        let run = self.runs.get(nth)?.clip(at, at.after(1))?;
        match run.place {
            Place::At(block) => Some(block),
            _ => None,
        }
    }

    /// What the disk writes whole, in bytes.
    pub(crate) fn sector_bytes(&self) -> u32 {
        self.disk.properties().sector_bytes
    }

    /// The bytes that a copy stands for.
    pub(crate) fn copy(&self, copy: Copy) -> Result<Data> {
        let mut bytes = self.read(copy.at)?;
        if copy.escaped {
            unescape(bytes.make_mut());
        }
        Ok(bytes)
    }

    /// What is in the log. Damage of what was committed is part of the answer.
    ///
    /// # Errors
    /// What the device says.
    pub(crate) fn recover(&self) -> Result<Recovery> {
        recover(&self.super_, self)
    }

    /// The error that damage of the log is.
    pub(crate) fn error(&self, damage: Damage) -> Error {
        let error = Error::corrupt(damage.what);
        match self.place(damage.at) {
            Some(block) => error.in_block(block),
            None => error,
        }
    }

    /// Puts the copies in place, then empties the log, then says that the volume is whole: each
    /// durable before the next. With `more` blocks, which become a transaction of their own before,
    /// and with the counts of what is `free`, if they are known.
    pub(crate) fn put_in_place(
        &self,
        found: &Recovery,
        more: &BTreeMap<u64, Data>,
        free: Option<(u64, u64)>,
    ) -> Result<()> {
        let mut sender = Sender { disk: &*self.disk, last: None };
        let block_bytes = u64::from(self.volume.block_bytes);
        let mut writes = Vec::new();
        let mut held = 0usize;
        for (block, copy) in found.between(FsBlock(0)..FsBlock(u64::MAX)) {
            let bytes = self.copy(copy)?;
            held = held.saturating_add(bytes.len());
            writes.push(write(block.0.saturating_mul(block_bytes), &bytes));
            if held >= PIECE_BYTES {
                sender.send(std::mem::take(&mut writes), false)?;
                held = 0;
            }
        }
        sender.send(writes, false)?;

        let mut first = self.first.clone();
        let at = self.place(0).ok_or(Error::corrupt(MISSING))?;
        let mut next = found.next;
        if !more.is_empty() {
            // The fast commits follow what is before this number: they count until it is there.
            let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
            raw.set_tail(Some(self.super_.first), next);
            sender.send(vec![write(at.0.saturating_mul(block_bytes), &first)], true)?;
            let time = Duration::from_secs(self.volume.dates.written.into());
            let contents = Contents { sequence: next, time, copies: more, revoked: &[] };
            let laid = lay(self, self.super_.first, &contents)?;
            for stage in [&laid.first, &laid.commit, more] {
                let write =
                    |(block, bytes): (&u64, &Data)| write(block.saturating_mul(block_bytes), bytes);
                sender.send(stage.iter().map(write).collect(), true)?;
            }
            next = next.wrapping_add(1);
        }

        // Numbers that the log has seen are not used again: what is left in it is older.
        let next = next.wrapping_add(1);
        let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
        raw.set_tail(None, next);
        raw.set_errno(0);
        sender.send(vec![write(at.0.saturating_mul(block_bytes), &first)], true)?;

        let (block, at) = self.volume.place();
        let mut bytes = match (more.get(&block.0), found.copies.get(&block.0)) {
            (Some(bytes), _) => bytes.clone(),
            (None, Some(copy)) => self.copy(*copy)?,
            (None, None) => read_block(&*self.disk, &self.volume, block)?,
        };
        let raw = RawSuperblock::view_mut(bytes.make_mut().get_mut(at..).unwrap_or_default())?;
        raw.set_recovered();
        if let Some((blocks, inodes)) = free {
            raw.set_free(blocks, inodes)?;
        }
        if self.super_.errno != 0 {
            raw.mark_errors();
        }
        raw.balance();
        sender.send(vec![write(block.0.saturating_mul(block_bytes), &bytes)], true)?;
        sender.wait()
    }
}

impl Source for Log {
    fn read(&self, at: u32) -> Result<Data> {
        read_block(&*self.disk, &self.volume, self.place(at).ok_or(Error::corrupt(MISSING))?)
    }

    fn refusal(&self, block: u64) -> Option<&'static str> {
        if block >= self.volume.blocks {
            return Some("journal: a copy of a block that the volume does not have");
        }
        let nth = self.own.partition_point(|own| own.start <= block);
        let own = nth.checked_sub(1).and_then(|nth| self.own.get(nth));
        let is_own = own.is_some_and(|own| own.contains(&block));
        is_own.then_some("journal: a copy of a block of its own")
    }

    fn in_use_since(&self) -> Duration {
        Duration::from_secs(self.volume.dates.mounted.into())
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("super_", &self.super_).finish_non_exhaustive()
    }
}

/// Sends groups, one after the other.
struct Sender<'a> {
    disk: &'a dyn Disk,
    last: Option<Ticket>,
}

impl Sender<'_> {
    /// Sends writes as one group; with `ordered`, once everything before it is durable.
    fn send(&mut self, writes: Vec<Write>, ordered: bool) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let after = self.last.filter(|_| ordered);
        let sent = self.disk.submit(Group { writes }, after.as_slice());
        self.last = Some(sent.map_err(|refused| Error::Io(refused.error))?);
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        match self.last {
            Some(last) => Ok(self.disk.wait(last)?),
            None => Ok(()),
        }
    }
}

fn write(at_bytes: u64, bytes: &[u8]) -> Write {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    Write { at_bytes, block }
}

/// Where the blocks of a journal are: none of them is missing.
fn runs(volume: &Volume, node: &Inode, range: Range<FileBlock>) -> Result<Vec<Run>> {
    let mut all = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let end = at.after(SEGMENT_BLOCKS).min(range.end);
        all.extend(volume.runs_of(node, at, end)?);
        if all.iter().rev().take(index(SEGMENT_BLOCKS.into())).any(|run| !is_there(run)) {
            return Err(Error::corrupt(MISSING).of_inode(node.number));
        }
        if all.len() > MOST_RUNS {
            let feature = format!("needs: a journal in at most {MOST_RUNS} pieces");
            return Err(Error::Unsupported { feature });
        }
        at = end;
    }
    Ok(all)
}

fn is_there(run: &Run) -> bool {
    matches!(run.place, Place::At(_))
}

/// A block of the volume, past all caches.
fn read_block(disk: &dyn Disk, volume: &Superblock, block: FsBlock) -> Result<Data> {
    let len_bytes = u64::from(volume.block_bytes);
    let bytes = read_bytes(disk, Extent::new(block.0.saturating_mul(len_bytes), len_bytes))?;
    Ok(Data::owned(bytes.into_boxed_slice()))
}

/// Bytes of a disk, whole sectors or not.
pub(super) fn read_bytes(
    disk: &dyn Disk,
    at: Extent,
) -> std::result::Result<Vec<u8>, draconis_device::Error> {
    let sector = u64::from(disk.properties().sector_bytes.max(1));
    let start = at.start_bytes.saturating_sub(at.start_bytes.checked_rem(sector).unwrap_or(0));
    let end = at.start_bytes.saturating_add(at.len_bytes);
    let end = end.checked_next_multiple_of(sector).unwrap_or(end);
    let len = end.saturating_sub(start);
    let read = disk.read_now(Extent::new(start, len), Block::private(index(len)));
    let block = read.map_err(|refused| refused.error)?;
    let mut bytes = vec![0; index(at.len_bytes)];
    block.copy_out(index(at.start_bytes.saturating_sub(start)), &mut bytes);
    Ok(bytes)
}
