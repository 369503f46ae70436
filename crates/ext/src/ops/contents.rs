//! Contents of files: written, cut, reserved.
//!
//! Law 1: a block that a file gets is written whole before anything leads to it: what the
//! file does not fill is zero.
//! Law 2: behind the end of a file its last block is zero.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with offsets below the largest file, which is checked first"
)]

use draconis_exchange::contract::Kind;

use super::Reserve;
use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::commit::batch::Intent;
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::inode::{Inode, flags};
use crate::format::quota::Usage;
use crate::format::requirements::Feature;
use crate::format::slot::Stamp;
use crate::map::edit::{MappedRun, Taking};
use crate::map::pointers::reach_blocks;
use crate::map::{self, Map};
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::volume::Volume;
use crate::{Error, FsBlock, InodeNumber, Result};

/// Files above this length need the feature `large_file`.
const LARGE_BYTES: u64 = 1 << 31;
/// Bytes that one change takes at most: between two of them others get their turn.
const WRITE_BYTES: usize = 1 << 20;
/// Bytes that one change reserves at most.
const RESERVE_BYTES: u64 = 4 << 20;

impl Volume {
    /// The longest file that the format can hold, in bytes: by extents, if the volume has them.
    pub fn most_file_bytes(&self) -> u64 {
        match self.super_.incompatible.contains(Incompatible::EXTENTS) {
            true => self.most_bytes_by_extents(),
            false => self.most_bytes_by_pointers(),
        }
    }

    /// The longest that a file can become.
    fn most_bytes_of(&self, inode: &Inode) -> u64 {
        match inode.has_extents() {
            true => self.most_bytes_by_extents(),
            false => self.most_bytes_by_pointers(),
        }
    }

    /// File blocks have 32 bits, the last of which says that there is none.
    fn most_bytes_by_extents(&self) -> u64 {
        let bytes = u64::from(self.super_.block_bytes);
        let huge = self.super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
        let blocks = u64::from(u32::MAX);
        if huge { blocks * bytes } else { (blocks * bytes).min(u64::from(u32::MAX) * 512) }
    }

    fn most_bytes_by_pointers(&self) -> u64 {
        let bytes = u64::from(self.super_.block_bytes);
        // Sectors are counted in 32 bits, those of indirect blocks among them.
        let sectors = u64::from(u32::MAX) * 512;
        let blocks = sectors / bytes;
        let maps = blocks / (bytes / 4) + blocks / (bytes / 4) / (bytes / 4) + 2;
        (reach_blocks(self.super_.block_bytes).min(blocks - maps)) * bytes
    }

    pub(crate) fn write_some(
        &self,
        number: InodeNumber,
        offset: u64,
        bytes: &[u8],
        lent: Option<&Data>,
    ) -> Result<usize> {
        self.bring_out(number)?;
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            // Up to where a large piece ends: they are written in one go.
            let at = offset.saturating_add(done as u64);
            let skew = index(at % WRITE_BYTES as u64);
            let part = rest.get(..WRITE_BYTES - skew).unwrap_or(rest);
            let lent = lent.map(|lent| lent.slice(done..done + part.len()));
            let write = |tx: &mut Transaction<'_>| tx.write(number, at, part, lent.as_ref());
            let taken = match self.transact_with_room(part.len() as u64, write) {
                Ok(taken) => taken,
                Err(Error::NoSpace) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            };
            done += taken;
            if taken < part.len() {
                break;
            }
        }
        Ok(done)
    }

    pub(crate) fn reserve_all(
        &self,
        number: InodeNumber,
        offset: u64,
        len: u64,
        how: Reserve,
    ) -> Result<()> {
        if len == 0 {
            return Err(Error::Misuse("no bytes to reserve"));
        }
        self.bring_out(number)?;
        let inode = self.inode(number)?;
        let end = offset.checked_add(len).filter(|end| *end <= self.most_bytes_of(&inode));
        let end = end.ok_or(Error::TooLarge)?;
        if how == Reserve::PunchHole {
            return self.transact_with_room(0, |tx| tx.clear(number, offset, end, false));
        }
        let keep = matches!(how, Reserve::KeepSize | Reserve::ZeroRange { keep_size: true });
        if keep && !inode.has_extents() {
            // A map of blocks cannot say that blocks behind the end are meant.
            let size = self.transact(|tx| Ok(tx.file(number)?.size_bytes))?;
            if end > size.next_multiple_of(self.super_.block_bytes.into()) {
                let feature = "blocks behind the end of a file need: extent".to_owned();
                return Err(Error::Unsupported { feature });
            }
        }
        if matches!(how, Reserve::ZeroRange { .. }) {
            self.transact_with_room(0, |tx| tx.clear(number, offset, end, true))?;
        }
        let bytes = u64::from(self.super_.block_bytes);
        let before = self.transact(|tx| Ok(tx.file(number)?.size_bytes))?;
        let mut grown = before;
        let mut at = narrow(offset / bytes);
        let last = narrow(end.div_ceil(bytes));
        while at < last {
            let step = last.min(at + narrow(RESERVE_BYTES / bytes));
            // The length comes along: a commit between two steps leaves nothing behind it.
            let reserved = self.transact_with_room(0, |tx| {
                let reserved_to = tx.reserve(number, at, step)?;
                let inode = tx.file(number)?;
                let reached = end.min(u64::from(reserved_to) * bytes);
                if !keep && reached > inode.size_bytes {
                    tx.set_size(&inode, reached)?;
                    grown = reached;
                }
                Ok(reserved_to)
            });
            match reserved {
                // What is left may have room once what was freed is free.
                Ok(reserved_to) if reserved_to > at => at = reserved_to,
                // With extents the file keeps what it was given, as Linux leaves it.
                Ok(_) | Err(Error::NoSpace) if inode.has_extents() => return Err(Error::NoSpace),
                Ok(_) | Err(Error::NoSpace) => {
                    // Behind the end of a file there are no blocks.
                    self.transact(|tx| {
                        let inode = tx.file(number)?;
                        let mut size = inode.size_bytes;
                        if size == grown && size > before {
                            tx.set_size(&inode, before)?;
                            size = before;
                        }
                        tx.unmap(number, narrow(size.div_ceil(bytes))..u32::MAX)
                    })?;
                    return Err(Error::NoSpace);
                }
                Err(error) => return Err(error),
            }
        }
        self.transact(|tx| {
            let inode = tx.file(number)?;
            if !keep && end > inode.size_bytes {
                tx.set_size(&inode, end)?;
            }
            tx.stamp(number, &[Stamp::Modified, Stamp::Changed])
        })
    }
}

impl Transaction<'_> {
    fn block_bytes(&self) -> u64 {
        u64::from(self.volume.super_.block_bytes)
    }

    /// A file whose contents may change.
    pub(crate) fn file(&self, number: InodeNumber) -> Result<std::sync::Arc<Inode>> {
        let inode = self.node(number)?;
        match inode.kind {
            Kind::File => {}
            Kind::Directory => return Err(Error::IsADirectory),
            _ => return Err(Error::Misuse("only files have contents")),
        }
        inode.readable()?;
        if inode.flags & (flags::IMMUTABLE | flags::VERITY) != 0 {
            return Err(Error::NotPermitted);
        }
        Ok(inode)
    }

    fn taking(&self, inode: &Inode, grows: bool) -> Taking {
        let (uid, _) = inode.owner();
        Taking { grows, privileged: self.is_privileged(uid), unwritten: false }
    }

    /// Writes bytes that do not cross a large piece, which may be lent; says how many were
    /// taken.
    fn write(
        &mut self,
        number: InodeNumber,
        offset: u64,
        bytes: &[u8],
        lent: Option<&Data>,
    ) -> Result<usize> {
        let inode = self.file(number)?;
        let most = self.volume.most_bytes_of(&inode).saturating_sub(offset);
        if most == 0 {
            return Err(Error::TooLarge);
        }
        let bytes = bytes.get(..index(most)).unwrap_or(bytes);
        if inode.flags & flags::APPEND != 0 && offset < inode.size_bytes {
            // A cache above writes whole pages: what it repeats is no change.
            let len = index(inode.size_bytes - offset).min(bytes.len());
            let mut old = vec![0; len];
            self.volume.read_now(&inode, offset, &mut old)?;
            if bytes.get(..len) != Some(&old[..]) {
                return Err(Error::NotPermitted);
            }
        }
        let end = offset + bytes.len() as u64;
        let block_bytes = self.block_bytes();
        let (first, last) = (narrow(offset / block_bytes), narrow(end.div_ceil(block_bytes)));
        // Most files are written once: only what comes back for more gets a window.
        let taking = self.taking(&inode, end > inode.size_bytes && first > 0);
        self.have_edges(number, offset, end)?;
        let touched = self.writer.touched;
        if offset > inode.size_bytes && !inode.size_bytes.is_multiple_of(block_bytes) {
            // Others may have left something behind the end.
            let stop = inode.size_bytes.next_multiple_of(block_bytes).min(offset);
            self.zero_part(number, inode.size_bytes, stop)?;
        }
        let all = match self.map_blocks(number, first..last, taking) {
            // Nothing but perhaps an empty indirect block was made, and zeros behind the end.
            Err(Error::NoSpace) => {
                self.writer.touched = touched;
                return Err(Error::NoSpace);
            }
            all => all?,
        };
        let mut taken = offset;
        for run in &all {
            if u64::from(run.from) * block_bytes > taken {
                break;
            }
            taken = self.fill(run, offset, bytes, lent)?;
        }
        let size = inode.size_bytes;
        if taken > size {
            self.set_size(&inode, taken)?;
        }
        self.forget_contents(number, offset.min(size), taken);
        self.stamp(number, &[Stamp::Modified, Stamp::Changed])?;
        Ok(index(taken - offset))
    }

    /// Puts the part of `bytes` that belongs there into a run of blocks; says where it ends.
    fn fill(
        &mut self,
        run: &MappedRun,
        offset: u64,
        bytes: &[u8],
        lent: Option<&Data>,
    ) -> Result<u64> {
        let block_bytes = self.block_bytes();
        let start = u64::from(run.from) * block_bytes;
        let len = u64::from(run.blocks) * block_bytes;
        let from = offset.max(start);
        let end = (offset + bytes.len() as u64).min(start + len);
        let part = bytes.get(index(from - offset)..index(end - offset)).unwrap_or_default();
        let exact = part.len() as u64 == len;
        if let (true, Some(lent)) = (exact, lent) {
            self.put_contents(run.at, &lent.slice(index(from - offset)..index(end - offset)));
            return Ok(end);
        }
        draconis_exchange::copies::count(part.len());
        let memory: Box<[u8]> = if exact {
            part.into()
        } else {
            let mut memory = vec![0; index(len)];
            if !run.fresh {
                self.keep_edges(run, (from - start, end - start), &mut memory)?;
            }
            let at = index(from - start);
            if let Some(into) = memory.get_mut(at..at + part.len()) {
                into.copy_from_slice(part);
            }
            memory.into_boxed_slice()
        };
        self.put_contents(run.at, &Data::owned(memory));
        Ok(end)
    }

    /// Sees to it that blocks which are overwritten in part can be kept without the device.
    fn have_edges(&self, number: InodeNumber, from: u64, end: u64) -> Result<()> {
        let block_bytes = self.block_bytes();
        for edge in [from, end] {
            if !edge.is_multiple_of(block_bytes)
                && let Some(block) = self.mapped(number, narrow(edge / block_bytes))?
            {
                self.block(block, Role::Contents)?;
            }
        }
        Ok(())
    }

    /// Fills the first and the last block with what they hold, where they are not
    /// overwritten as a whole.
    fn keep_edges(
        &self,
        run: &MappedRun,
        (from, end): (u64, u64),
        memory: &mut [u8],
    ) -> Result<()> {
        let block_bytes = self.block_bytes();
        let mut edges = vec![];
        if !from.is_multiple_of(block_bytes) {
            edges.push(from / block_bytes);
        }
        if !end.is_multiple_of(block_bytes) {
            edges.push(end / block_bytes);
        }
        for nth in edges {
            let old = self.block(run.at.after(nth), Role::Contents)?;
            let at = index(nth * block_bytes);
            if let Some(into) = memory.get_mut(at..at + old.len()) {
                into.copy_from_slice(&old);
            }
        }
        Ok(())
    }

    pub(crate) fn put_contents(&mut self, at: FsBlock, bytes: &Data) {
        self.writer.touched = true;
        self.writer.batch.dirty = true;
        let len = index(self.block_bytes());
        let mut blocks = self.volume.store.overlay.change();
        for (nth, start) in (0u64..).zip((0..bytes.len()).step_by(len)) {
            let block = at.after(nth);
            blocks.metadata.remove(&block.0);
            blocks.put_content(block, bytes.slice(start..start + len));
        }
    }

    /// Zeros blocks that a file was given but did not fill.
    fn zero_fresh(&mut self, all: &[MappedRun]) {
        let len = index(self.block_bytes());
        let zeros = Data::owned(vec![0; len].into_boxed_slice());
        for run in all.iter().filter(|run| run.fresh) {
            let mut blocks = self.volume.store.overlay.change();
            for nth in 0..run.blocks {
                let block = run.at.after(nth.into());
                blocks.metadata.remove(&block.0);
                blocks.put_content(block, zeros.clone());
            }
        }
        self.writer.batch.dirty = true;
    }

    /// Zeros the bytes of one block from `from` up to `end`, if the file has that block.
    fn zero_part(&mut self, number: InodeNumber, from: u64, end: u64) -> Result<()> {
        let block_bytes = self.block_bytes();
        let nth = narrow(from / block_bytes);
        let (start, stop) = (index(from % block_bytes), index(end - u64::from(nth) * block_bytes));
        let Some(block) = self.mapped(number, nth)? else { return Ok(()) };
        let old = self.block(block, Role::Contents)?;
        let Some(part) = old.get(start..stop) else { return Ok(()) };
        if part.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let mut new: Box<[u8]> = old[..].into();
        if let Some(part) = new.get_mut(start..stop) {
            part.fill(0);
        }
        self.put_contents(block, &Data::owned(new));
        Ok(())
    }

    /// Sets the length, and nothing else of the contents.
    fn set_size(&mut self, inode: &Inode, bytes: u64) -> Result<()> {
        let before = inode.size_bytes;
        let (low, high) = (before.min(bytes), before.max(bytes));
        let block_bytes = self.block_bytes();
        // The last chunk and segment of the shorter file end where that did.
        self.forget_contents(inode.number, low.saturating_sub(1), high);
        let last = narrow(low.saturating_sub(1) / block_bytes);
        self.forget_map(inode.number, last, narrow(high.div_ceil(block_bytes)));
        self.change_slot(inode.number, |it| it.set_size(bytes))?;
        if bytes >= LARGE_BYTES && before < LARGE_BYTES {
            self.need_feature(Feature::R(ReadOnlyCompatible::LARGE_FILE))?;
        }
        Ok(())
    }

    /// Cuts a file, or lets it grow by a hole.
    pub(crate) fn resize(&mut self, inode: &Inode, bytes: u64) -> Result<()> {
        if bytes > self.volume.most_bytes_of(inode) {
            return Err(Error::TooLarge);
        }
        let moved = self.move_out(inode, bytes)?;
        let inode = moved.as_deref().unwrap_or(inode);
        let number = inode.number;
        let block_bytes = self.block_bytes();
        let before = inode.size_bytes;
        if bytes <= before {
            self.have_map(inode, bytes.div_ceil(block_bytes))?;
            self.writer.groups.drop_window(number.0);
            let from = narrow(bytes.div_ceil(block_bytes));
            let cuts = self.cuts(number, from)?;
            let lists = !cuts.is_empty() && bytes != before;
            if lists {
                self.list_orphan(number)?;
                self.set_size(inode, bytes)?;
            }
            self.unmap_behind(number, &cuts)?;
            if lists {
                self.forget_orphan(number)?;
            }
            self.unmap(number, from..u32::MAX)?;
            if !bytes.is_multiple_of(block_bytes) {
                let end = bytes.next_multiple_of(block_bytes);
                self.zero_part(number, bytes, end)?;
            }
        } else if !before.is_multiple_of(block_bytes) {
            // Others may have left something behind the end.
            let end = before.next_multiple_of(block_bytes).min(bytes);
            self.zero_part(number, before, end)?;
        }
        if bytes != before {
            self.set_size(inode, bytes)?;
        }
        self.stamp(number, &[Stamp::Modified, Stamp::Changed])
    }

    /// Makes a hole, or keeps blocks that read as zeros; what is covered only in part becomes zero.
    fn clear(&mut self, number: InodeNumber, from: u64, end: u64, keep_blocks: bool) -> Result<()> {
        let inode = self.file(number)?;
        if inode.flags & flags::APPEND != 0 {
            return Err(Error::NotPermitted);
        }
        let block_bytes = self.block_bytes();
        let (first, last) = (from.div_ceil(block_bytes), end / block_bytes);
        if first <= last {
            let range = narrow(first)..narrow(last);
            map::of(&inode)?.have_room_for_hole(self, number, range.clone())?;
            if !from.is_multiple_of(block_bytes) {
                self.zero_part(number, from, first * block_bytes)?;
            }
            if !end.is_multiple_of(block_bytes) {
                self.zero_part(number, last * block_bytes, end)?;
            }
            match keep_blocks {
                true => map::of(&*self.node(number)?)?.zero(self, number, range)?,
                false => self.unmap(number, range)?,
            }
        } else {
            self.zero_part(number, from, end)?;
        }
        self.forget_contents(number, from, end.min(inode.size_bytes).max(from));
        self.stamp(number, &[Stamp::Modified, Stamp::Changed])
    }

    /// Gives blocks that read as zeros; says up to which file block there are any.
    fn reserve(&mut self, number: InodeNumber, from: u32, end: u32) -> Result<u32> {
        let inode = self.file(number)?;
        let taking = Taking { unwritten: inode.has_extents(), ..self.taking(&inode, false) };
        let touched = self.writer.touched;
        let all = match self.map_blocks(number, from..end, taking) {
            Err(Error::NoSpace) => {
                self.writer.touched = touched;
                return Err(Error::NoSpace);
            }
            all => all?,
        };
        self.zero_fresh(&all);
        let bytes = self.block_bytes();
        self.forget_contents(number, u64::from(from) * bytes, u64::from(end) * bytes);
        Ok(all.last().map_or(from, |run| run.from + run.blocks))
    }

    /// Frees all that an inode has and the inode itself.
    pub(crate) fn delete(&mut self, number: InodeNumber) -> Result<()> {
        let inode = self.peek(number)?;
        let (kind, size) = (inode.kind, inode.size_bytes);
        let values = self.values_lost(&inode)?;
        let counted = self.counted_values(number)?;
        if inode.has_map(&self.volume.super_) {
            let cuts = self.cuts(number, 0)?;
            self.unmap_behind(number, &cuts)?;
            self.unmap(number, 0..u32::MAX)?;
            self.forget_contents(number, 0, size);
        }
        self.drop_attribute_block(number)?;
        self.count_usage_of_blocks(number, counted.blocks, false)?;
        self.count_usage(number, Usage { inodes: -1 - counted.entries, bytes: 0 })?;
        let old = self.is_old(number);
        let now = u32::try_from(self.now.seconds.max(1)).unwrap_or(u32::MAX);
        self.forget_access(number);
        self.forget_orphan(number)?;
        self.change_slot(number, |it| {
            let mode = it.mode();
            it.clear();
            // What undeletes wants to know.
            if old {
                it.set_mode(mode);
                it.set_deleted(now);
            }
        })?;
        self.record(Intent::Freed { inode: number });
        self.free_inode(number, kind)?;
        self.writer.hints.remove(&number.0);
        self.disown_values(values)
    }
}
