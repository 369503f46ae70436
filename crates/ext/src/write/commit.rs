//! Commits: what changed, as one chain of groups, each durable before the next is written.
//!
//! ```text
//!   stage 0      contents; new blocks of maps, names and attributes; bitmaps with what is taken;
//!                features that the volume did not have; inodes that die, files first
//!   then         directories that died, those inside before those around them
//!   then         directories: those that got names from others, then those that lost them
//!   then         inodes that are born, outer directories first; pointers of old files
//!   last         bitmaps without what is freed; all counts
//! ```
//! Stages without anything are left out: an overwrite is one, a new file in an old directory
//! two.
//!
//! Law 1: an inode lives on disk only while a durable name leads to it. A name that leads to
//! no living inode is what a cut may leave, and what `e2fsck -p` clears without a question;
//! the opposite it asks about.
//! Law 2: a directory changes by one sector. If more than one of its sectors changed, the
//! blocks are written to new places, and its inode, which is in one sector, leads to them.
//! (Where no space is left for that, they are written in place.)
//! Law 3: a block that an inode leads to is durable before it does, and bitmaps never call
//! free what anything on disk leads to.
//! Law 4: a chain follows the one before it, and the first one the mark that the volume is in
//! use.
//!
//! What a power cut can leave, therefore: blocks and inodes marked as used that are not, wrong
//! counts, names that lead nowhere, lengths that reach to the end of their last block. Three
//! changes cannot be made in one sector, and cut off they leave what `e2fsck` asks about: a
//! directory moved to another parent (two names, or a wrong `..`), an exchange across
//! directories, and giving up a block of attributes that another inode shares. A file that is
//! replaced by a rename from another directory may be gone while the new one has its old name.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with stages, fewer than directories are deep, and places inside a block"
)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use draconis_device::{ChainBounds, Group, Ticket, Write};
use draconis_exchange::heap::{Block, Piece};

use super::Edit;
use super::edit::{Batch, Flight, Frozen, Stop};
use super::groups::Wish;
use super::map::Home;
use super::overlay::{Buffer, Role, State};
use crate::data::Data;
use crate::format::features::{Compatible, ReadOnlyCompatible};
use crate::format::inode::DIRECT;
use crate::format::superblock::{OFFSET_BYTES, STATE_CLEAN};
use crate::format::{le32, put16, put32};
use crate::map::indirect::fan_out;
use crate::units::{index, narrow};
use crate::volume::Volume;
use crate::{Error, FsBlock, InodeNumber, Result};

/// What a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
/// The largest write, in bytes.
const WRITE_BYTES: usize = 1 << 20;
/// Blocks of metadata that stay in the overlay after they were written, in bytes.
const KEPT_BYTES: usize = 32 << 20;
/// Changed metadata that ends a batch, in bytes.
const BATCH_BYTES: usize = 8 << 20;

/// What a stage writes: blocks, in order.
type Stage = BTreeMap<u64, Data>;

impl Volume {
    /// Hands over what changed; the ticket to wait for, if anything is on its way.
    fn hand_over(&self) -> Result<Option<Ticket>> {
        self.edit(|edit| {
            edit.submit()?;
            Ok(edit.w.needed.filter(|ticket| edit.w.durable < Some(*ticket)))
        })
    }

    pub(super) fn commit_now(&self) -> Result<()> {
        self.edit(|edit| {
            let idle = !edit.w.batch.dirty;
            edit.submit()?;
            if idle {
                edit.land(None)?;
            }
            Ok(())
        })?;
        // What was freed is free again once the freeing is durable.
        let frozen = self.edit(|edit| Ok(edit.w.frozen.back().map(|frozen| frozen.ticket)))?;
        match frozen {
            Some(ticket) => self.wait(ticket),
            None => Ok(()),
        }
    }

    pub(super) fn sync_now(&self) -> Result<()> {
        match self.hand_over()? {
            Some(ticket) => self.wait(ticket),
            None => Ok(()),
        }
    }

    pub(super) fn sync_inode_now(&self, inode: InodeNumber, data_only: bool) -> Result<()> {
        let ahead = match data_only {
            true => self.edit(|edit| edit.contents_ahead(inode))?,
            false => None,
        };
        match ahead {
            Some(ticket) => self.wait(ticket),
            None => self.sync_now(),
        }
    }

    /// Waits, with no lock held.
    fn wait(&self, ticket: Ticket) -> Result<()> {
        let gate = self.gate.as_ref().ok_or(Error::ReadOnly)?;
        let disk = gate.read_recursive().disk.clone();
        let waited = disk.wait(ticket);
        let mut writer = gate.write();
        match waited {
            Ok(()) => {
                let mut edit = Edit { volume: self, w: &mut writer, now: Default::default() };
                edit.is_durable(ticket);
                Ok(())
            }
            Err(error) => {
                let error = Error::Io(error);
                writer.stop(&error);
                Err(error)
            }
        }
    }

    /// Tries a change again once what was freed may be given out.
    pub(super) fn edit_with_room<T>(
        &self,
        mut change: impl FnMut(&mut Edit<'_>) -> Result<T>,
    ) -> Result<T> {
        match self.edit(&mut change) {
            Err(Error::NoSpace) => {}
            done => return done,
        }
        let last = self.edit(|edit| {
            let batch = &edit.w.batch;
            let freed = !batch.freed.is_empty() || !batch.freed_inodes.is_empty();
            if !freed && edit.w.frozen.is_empty() {
                return Err(Error::NoSpace);
            }
            edit.submit()?;
            Ok(edit.w.last)
        })?;
        if let Some(ticket) = last {
            self.wait(ticket)?;
        }
        self.edit(change)
    }

    pub(super) fn close_now(&self) -> Result<()> {
        let closed = self.edit(|edit| {
            let orphans: Vec<u32> =
                edit.volume.store.overlay.read().orphans.iter().copied().collect();
            for inode in orphans {
                edit.bury(InodeNumber(inode))?;
            }
            edit.submit()?;
            if !edit.w.marked {
                // Never changed: it is as it was.
                return Ok(None);
            }
            // Clean it is once all of that is durable, the freeing included.
            edit.w.needed = edit.w.last;
            let clean = edit.w.was_clean;
            let now = u32::try_from(edit.now.seconds).unwrap_or(0);
            edit.change_super(|it| {
                if clean {
                    let state = crate::format::le16(it, 0x3A).unwrap_or(0);
                    put16(it, 0x3A, state | STATE_CLEAN);
                }
                put32(it, 0x30, now);
            })?;
            edit.submit()?;
            let last = edit.w.last;
            Ok(last)
        });
        let last = match closed {
            Ok(last) => last,
            // Closed already, or stopped: what could be written was.
            Err(Error::ReadOnly) => {
                return match self.failure() {
                    Some(_) => Err(Error::ReadOnly),
                    None => Ok(()),
                };
            }
            Err(error) => return Err(error),
        };
        if let Some(ticket) = last {
            self.wait(ticket)?;
        }
        if let Some(gate) = &self.gate {
            gate.write().stopped.get_or_insert(Stop::Closed);
        }
        Ok(())
    }
}

impl Edit<'_> {
    /// Ends the batch here: what comes now follows what was.
    pub(super) fn apart(&mut self) -> Result<()> {
        let touched = self.w.touched;
        self.submit()?;
        self.w.touched = touched;
        Ok(())
    }

    /// Keeps what is changed in memory, and what is on its way, below their bounds.
    pub(super) fn keep_bounds(&mut self) -> Result<()> {
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let dirty = self.volume.store.overlay.read().dirty_contents as u64 * block_bytes;
        if dirty >= (self.w.dirty_limit / 8).clamp(1 << 20, 8 << 20) {
            self.stream()?;
        }
        let metadata = self.w.batch.blocks.len() * index(block_bytes);
        if metadata >= BATCH_BYTES {
            self.apart()?;
        }
        while self.w.flying_bytes > self.w.dirty_limit / 2 {
            let Some(first) = self.w.flying.front() else { break };
            let first = first.last;
            self.land(Some(first))?;
        }
        Ok(())
    }

    /// Writes contents ahead of the chain that will lead to them.
    fn stream(&mut self) -> Result<()> {
        let touched = self.w.touched;
        let stage = self.dirty_contents();
        if stage.is_empty() {
            return Ok(());
        }
        let (group, bytes) = self.group(&stage);
        let ticket = self.take_into_use().and_then(|mark| {
            let submitted = self.w.disk.submit(group, mark.as_slice());
            submitted.map_err(|refused| Error::Io(refused.error))
        });
        let ticket = match ticket {
            Ok(ticket) => ticket,
            Err(error) => {
                self.w.stop(&error);
                return Err(error);
            }
        };
        self.w.last = Some(ticket);
        self.contents_fly(&stage, ticket);
        let contents = stage.into_keys().collect();
        self.w.flying.push_back(Flight { last: ticket, contents, bytes });
        self.w.flying_bytes += bytes;
        self.w.touched = touched;
        Ok(())
    }

    /// Writes contents alone, if nothing else is needed to read this file back: whatever
    /// its inode says but for its times is on its way already.
    fn contents_ahead(&mut self, inode: InodeNumber) -> Result<Option<Ticket>> {
        let batch = &self.w.batch;
        let is_new = batch.born.contains(&inode.0) || batch.dying.contains_key(&inode.0);
        if is_new || (batch.inodes.contains(&inode.0) && !self.only_times_differ(inode)?) {
            return Ok(None);
        }
        self.stream()?;
        Ok(self.w.last)
    }

    fn only_times_differ(&self, inode: InodeNumber) -> Result<bool> {
        let (block, at) = self.place(inode)?;
        let len = index(self.volume.super_.inode_bytes.into());
        let blocks = self.volume.store.overlay.read();
        let Some(Buffer { state: State::Changed(base), now, .. }) = blocks.metadata.get(&block.0)
        else {
            return Ok(true);
        };
        // Between i_atime, i_ctime, i_mtime and the rest of their nanoseconds.
        let same = |from: usize, end: usize| {
            let range = at + from..at + end.min(len);
            base.get(range.clone()) == now.get(range)
        };
        Ok(same(0, 8) && same(20, 132) && (len <= 144 || same(144, len)))
    }

    fn dirty_contents(&self) -> Stage {
        let blocks = self.volume.store.overlay.read();
        if blocks.dirty_contents == 0 {
            return Stage::new();
        }
        let dirty = blocks.contents.iter().filter(|(_, content)| content.dirty);
        dirty.map(|(block, content)| (*block, content.now.clone())).collect()
    }

    fn contents_fly(&self, stage: &Stage, ticket: Ticket) {
        let mut blocks = self.volume.store.overlay.change();
        for block in stage.keys() {
            if let Some(content) = blocks.contents.get_mut(block) {
                content.dirty = false;
                content.ticket = ticket.0;
            }
        }
        blocks.dirty_contents = 0;
    }

    /// Blocks as writes: neighbours in one.
    fn group(&self, stage: &Stage) -> (Group, u64) {
        let block_bytes = index(self.volume.super_.block_bytes.into());
        let most = (WRITE_BYTES / block_bytes).max(1);
        let mut writes = Vec::new();
        let mut bytes = 0;
        let mut run: Vec<&Data> = Vec::new();
        let mut start = 0u64;
        let mut flush = |start: u64, run: &mut Vec<&Data>| {
            if run.is_empty() {
                return;
            }
            let mut block = Block::vacant(run.len() * block_bytes);
            for (nth, data) in run.drain(..).enumerate() {
                block.put(nth * block_bytes, Piece::new(data.clone()));
            }
            bytes += block.len() as u64;
            writes.push(Write { at_bytes: start * block_bytes as u64, block });
        };
        for (block, data) in stage {
            if run.len() >= most || start + run.len() as u64 != *block {
                flush(start, &mut run);
                start = *block;
            }
            run.push(data);
        }
        flush(start, &mut run);
        (Group { writes }, bytes)
    }

    /// Submits everything that changed as one chain.
    pub(super) fn submit(&mut self) -> Result<()> {
        let touched = self.w.touched;
        let submitted = self.try_submit();
        match &submitted {
            Ok(()) => self.w.touched = touched,
            Err(error) => self.w.stop(error),
        }
        submitted
    }

    fn try_submit(&mut self) -> Result<()> {
        if !self.w.batch.dirty {
            return Ok(());
        }
        // Bounded chains: what is large goes ahead.
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        if self.volume.store.overlay.read().dirty_contents as u64 * block_bytes > 4 << 20 {
            self.stream()?;
        }
        self.take_into_use()?;
        let dirs = self.arrange_directories()?;
        self.write_counts()?;
        let plan = Plan::of(&self.w.batch, &dirs);
        let (stages, needed) = self.stages(&plan)?;
        if stages.is_empty() {
            self.w.batch = Batch::default();
            return Ok(());
        }
        let mut chain = Vec::with_capacity(stages.len());
        let mut bytes = 0;
        for stage in &stages {
            let (group, len) = self.group(stage);
            bytes += len;
            chain.push(group);
        }
        let tickets = self.submit_chain(chain)?;
        let last = tickets.last().copied().ok_or(Error::Misuse("a chain without a ticket"))?;
        self.w.needed = tickets.get(needed).copied().or(Some(last));
        self.w.last = Some(last);

        let batch = std::mem::take(&mut self.w.batch);
        let contents: Vec<u64> = {
            let mut blocks = self.volume.store.overlay.change();
            for block in &batch.blocks {
                if let Some(buffer) = blocks.metadata.get_mut(block) {
                    buffer.state = State::Clean;
                    buffer.ticket = last.0;
                }
            }
            let keys = stages.first().into_iter().flat_map(|stage| stage.keys().copied());
            keys.filter(|block| blocks.contents.contains_key(block)).collect()
        };
        if let Some(stage) = stages.first() {
            self.contents_fly(stage, last);
        }
        if !batch.freed.is_empty() || !batch.freed_inodes.is_empty() {
            let (blocks, inodes) = (batch.freed, batch.freed_inodes);
            self.w.frozen.push_back(Frozen { ticket: last, blocks, inodes });
        }
        self.w.flying.push_back(Flight { last, contents, bytes });
        self.w.flying_bytes += bytes;
        self.shrink()
    }

    /// Submits a chain whole, or one that is too long for the disk (inodes of many megabytes,
    /// each block of their tables in many stages) piece by piece. What death may leave between
    /// two pieces is what a power cut may leave anywhere.
    fn submit_chain(&self, chain: Vec<Group>) -> Result<Vec<Ticket>> {
        let bounds = self.w.disk.chain_bounds();
        let mut after = self.w.needed.filter(|ticket| self.w.durable < Some(*ticket));
        let mut tickets = Vec::with_capacity(chain.len());
        let mut chain = chain.into_iter().peekable();
        while chain.peek().is_some() {
            let mut piece = Vec::new();
            let mut needs = ChainBounds { groups: 0, writes: 0, bytes: 0 };
            while let Some(group) = chain.next_if(|group| {
                let more = needs.and(ChainBounds::of(std::slice::from_ref(group)));
                let fits = needs.groups == 0 || more.is_within(bounds);
                needs = if fits { more } else { needs };
                fits
            }) {
                piece.push(group);
            }
            let submitted = self.w.disk.submit_chain(piece, after.as_slice());
            tickets.extend(submitted.map_err(|refused| Error::Io(refused.error))?);
            after = tickets.last().copied();
        }
        Ok(tickets)
    }

    /// Waits until readers of the disk see what was submitted up to `ticket`, or all of it,
    /// and lets the overlay forget it.
    fn land(&mut self, ticket: Option<Ticket>) -> Result<()> {
        let Some(last) = ticket.or(self.w.flying.back().map(|flight| flight.last)) else {
            return Ok(());
        };
        if let Err(error) = self.w.disk.settle(last) {
            let error = Error::Io(error);
            self.w.stop(&error);
            return Err(error);
        }
        self.has_landed(last);
        Ok(())
    }

    fn has_landed(&mut self, last: Ticket) {
        while let Some(flight) = self.w.flying.front().filter(|flight| flight.last <= last) {
            self.w.flying_bytes = self.w.flying_bytes.saturating_sub(flight.bytes);
            let mut blocks = self.volume.store.overlay.change();
            for block in &flight.contents {
                let gone = blocks.contents.get(block);
                if gone.is_some_and(|content| !content.dirty && content.ticket <= last.0) {
                    blocks.contents.remove(block);
                    self.volume.store.forget_block(FsBlock(*block));
                }
            }
            drop(blocks);
            self.w.flying.pop_front();
        }
        self.w.landed = self.w.landed.max(Some(last));
    }

    /// Forgets metadata that was written, when there is much of it.
    fn shrink(&mut self) -> Result<()> {
        let block_bytes = index(self.volume.super_.block_bytes.into());
        let most = KEPT_BYTES / block_bytes;
        if self.volume.store.overlay.read().metadata.len() <= most {
            return Ok(());
        }
        self.land(None)?;
        let landed = self.w.landed.map_or(0, |ticket| ticket.0);
        let mut blocks = self.volume.store.overlay.change();
        let store = &self.volume.store;
        blocks.metadata.retain(|block, buffer| {
            let keep = buffer.is_dirty() || buffer.ticket > landed;
            if !keep {
                store.forget_block(FsBlock(*block));
            }
            keep
        });
        Ok(())
    }

    /// Everything up to `ticket` is durable.
    fn is_durable(&mut self, ticket: Ticket) {
        self.w.durable = self.w.durable.max(Some(ticket));
        self.has_landed(ticket);
        while let Some(frozen) = self.w.frozen.front().filter(|it| it.ticket <= ticket) {
            let (blocks, inodes) = (frozen.blocks.clone(), frozen.inodes.clone());
            self.w.groups.thaw(&blocks, &inodes);
            self.w.frozen.pop_front();
        }
    }

    /// Brings descriptors and superblock up to date.
    fn write_counts(&mut self) -> Result<()> {
        let changed = self.w.groups.take_changed();
        if changed.is_empty() {
            return Ok(());
        }
        let descriptor = index(self.volume.super_.descriptor_bytes.into());
        for (group, counts) in changed {
            let (block, slot) = self.volume.super_.descriptor_place(group);
            self.change(block, Role::Counts, |bytes| {
                let at = index(slot.into()) * descriptor;
                for (nth, count) in counts.into_iter().enumerate() {
                    put16(bytes, at + 12 + nth * 2, u16::try_from(count).unwrap_or(u16::MAX));
                }
            })?;
        }
        let blocks = narrow(self.w.groups.free_blocks);
        let inodes = narrow(self.w.groups.free_inodes);
        let now = u32::try_from(self.now.seconds).unwrap_or(0);
        self.change_super(|it| {
            put32(it, 0x0C, blocks);
            put32(it, 0x10, inodes);
            if now != 0 {
                put32(it, 0x30, now);
            }
        })
    }

    /// Changes the superblock.
    pub(super) fn change_super(&mut self, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let at = index(OFFSET_BYTES % block_bytes);
        self.change(FsBlock(OFFSET_BYTES / block_bytes), Role::Counts, |bytes| {
            change(bytes.get_mut(at..).unwrap_or_default());
        })
    }

    /// Says in the superblock that the volume uses a feature.
    pub(super) fn need_feature(&mut self, feature: ReadOnlyCompatible) -> Result<()> {
        self.change_super(|it| {
            let all = le32(it, 0x64).unwrap_or(0) | feature.bits();
            put32(it, 0x64, all);
        })
    }

    /// Says in the superblock that the volume uses a feature.
    pub(super) fn need_compatible(&mut self, feature: Compatible) -> Result<()> {
        self.change_super(|it| {
            let all = le32(it, 0x5C).unwrap_or(0) | feature.bits();
            put32(it, 0x5C, all);
        })
    }
}

/// How a directory that lives on disk is brought up to date.
#[derive(Clone, Copy, Debug)]
struct Arranged {
    /// Its inode, or an indirect block in place, leads to blocks of stage 0.
    switches: bool,
    /// Names go that lead to dying inodes, or might.
    removes: bool,
}

impl Edit<'_> {
    /// Sees to it that each directory changes by one sector, and says how.
    fn arrange_directories(&mut self) -> Result<HashMap<u32, Arranged>> {
        let mut changed: HashMap<u32, Vec<u64>> = HashMap::new();
        {
            let blocks = self.volume.store.overlay.read();
            for block in &self.w.batch.blocks {
                let Some(Buffer { state: State::Changed(_), role, .. }) =
                    blocks.metadata.get(block)
                else {
                    continue;
                };
                if let Role::Directory(dir) | Role::Map(dir) = role {
                    changed.entry(*dir).or_default().push(*block);
                }
            }
        }
        let dirs: BTreeMap<u32, super::edit::Names> =
            self.w.batch.dirs.iter().map(|(dir, names)| (*dir, *names)).collect();
        let mut arranged = HashMap::new();
        for (dir, names) in dirs {
            let mut own = changed.remove(&dir).unwrap_or_default();
            own.sort_unstable();
            own.dedup();
            let inode_switches = self.inode_switches(InodeNumber(dir))?;
            let mut map_switches = false;
            let mut sectors = usize::from(inode_switches);
            {
                let blocks = self.volume.store.overlay.read();
                for block in &own {
                    let Some(buffer) = blocks.metadata.get(block) else { continue };
                    let State::Changed(base) = &buffer.state else { continue };
                    map_switches |= matches!(buffer.role, Role::Map(_));
                    let pairs = base.chunks(SECTOR_BYTES).zip(buffer.now.chunks(SECTOR_BYTES));
                    sectors += pairs.filter(|(old, new)| old != new).count();
                }
            }
            let only_removals = !names.added && !inode_switches && !map_switches;
            let mut switches = inode_switches || map_switches;
            if sectors > 1 && !only_removals && self.relocate(InodeNumber(dir), &own)? {
                switches = true;
            }
            arranged.insert(dir, Arranged { switches, removes: names.removed });
        }
        Ok(arranged)
    }

    /// Whether the inode of a directory leads to other blocks than on disk.
    fn inode_switches(&self, dir: InodeNumber) -> Result<bool> {
        let (block, at) = self.place(dir)?;
        let blocks = self.volume.store.overlay.read();
        let Some(Buffer { state: State::Changed(base), now, .. }) = blocks.metadata.get(&block.0)
        else {
            return Ok(false);
        };
        // i_size, i_flags, i_block, i_file_acl, i_size_high.
        let fields = [(4, 8), (32, 36), (40, 100), (104, 112)];
        Ok(fields.iter().any(|(from, end)| {
            let range = at + from..at + end;
            base.get(range.clone()) != now.get(range)
        }))
    }

    /// Writes the changed blocks of a directory to new places; `false` if there is no space.
    fn relocate(&mut self, dir: InodeNumber, own: &[u64]) -> Result<bool> {
        // Each block of names may pull three indirect blocks along.
        let needed = own.len() as u64 * 4 + 3;
        if self.available_now(true) < needed {
            return Ok(false);
        }
        let own: BTreeSet<u64> = own.iter().copied().collect();
        let node = self.volume.peek(dir)?;
        let count = self.volume.directory_blocks(&node);
        let mut at = 0;
        while at < count {
            let way = self.way(dir, at)?;
            let Some((home, pointer)) = way.last().copied() else { break };
            if own.contains(&pointer.into()) && self.is_names(pointer) {
                let new = self.shift(pointer, Role::Directory(dir.0))?;
                self.set_pointer(dir, home, new)?;
            }
            at += 1;
        }
        // Indirect blocks, the lower ones first. No more than so many lead to names: the rest
        // of a damaged map may go in circles.
        let fan_out = narrow(fan_out(&self.volume.super_));
        let most = index(u64::from(count / fan_out + count / fan_out / fan_out) + 6);
        let mut maps = Vec::new();
        for slot in index(u64::from(DIRECT))..crate::format::inode::POINTERS {
            let levels = narrow(slot as u64) - DIRECT + 1;
            let pointer = self.read_slot(dir, |it| it.pointer(slot))?;
            if pointer != 0 {
                self.maps_below(Home::Inode(slot), pointer, levels, most, &mut maps)?;
            }
        }
        // A block comes behind the one that leads to it.
        for (home, block) in maps.into_iter().rev() {
            let is_changed = {
                let blocks = self.volume.store.overlay.read();
                let buffer = blocks.metadata.get(&u64::from(block));
                buffer.is_some_and(|it| matches!(it.state, State::Changed(_)))
            };
            if !is_changed {
                continue;
            }
            let new = self.shift(block, Role::Map(dir.0))?;
            self.set_pointer(dir, home, new)?;
        }
        self.forget_map(dir, 0, count);
        self.volume.inodes.forget(dir.0);
        Ok(true)
    }

    fn is_names(&self, block: u32) -> bool {
        let blocks = self.volume.store.overlay.read();
        let buffer = blocks.metadata.get(&u64::from(block));
        buffer.is_some_and(|it| {
            matches!((&it.state, it.role), (State::Changed(_), Role::Directory(_)))
        })
    }

    /// The indirect blocks from this one down, at most so many, with where their pointers stand.
    fn maps_below(
        &self,
        home: Home,
        block: u32,
        levels: u32,
        most: usize,
        all: &mut Vec<(Home, u32)>,
    ) -> Result<()> {
        if all.len() < most {
            all.push((home, block));
        }
        if levels <= 1 || all.len() >= most {
            return Ok(());
        }
        let bytes = self.block(FsBlock(block.into()))?;
        for nth in 0..fan_out(&self.volume.super_) {
            let pointer = le32(&bytes, index(nth) * 4).unwrap_or(0);
            if pointer != 0 {
                let home = Home::Block(FsBlock(block.into()), nth);
                self.maps_below(home, pointer, levels - 1, most, all)?;
            }
        }
        Ok(())
    }

    /// Moves a changed block to a new place.
    fn shift(&mut self, block: u32, role: Role) -> Result<u32> {
        let old = FsBlock(block.into());
        let wish = Wish { goal: old.0, want: 1, grows: None, privileged: true };
        let (new, _) = self.take_blocks(wish)?;
        let now = self.block(old)?.to_vec();
        self.free_blocks(old.0, 1)?;
        self.put_fresh(FsBlock(new), role, now);
        Ok(narrow(new))
    }
}

/// Which stage everything of a batch belongs to.
#[derive(Debug)]
struct Plan {
    dirs: HashMap<u32, (u32, bool)>,
    births: u32,
    /// How deep a directory lies below the last one that lives on disk.
    depths: HashMap<u32, u32>,
    deepest: u32,
}

impl Plan {
    fn of(batch: &Batch, arranged: &HashMap<u32, Arranged>) -> Self {
        let after_deaths = batch.dying.values().max().map_or(0, |height| height + 1);
        let base = |dir: &Arranged| match dir {
            Arranged { switches: true, .. } => after_deaths.max(1),
            Arranged { removes: true, .. } => after_deaths,
            _ => 0,
        };
        let mut dirs: HashMap<u32, (u32, bool)> =
            arranged.iter().map(|(dir, it)| (*dir, (base(it), it.switches))).collect();
        let received = dirs
            .iter()
            .filter(|(dir, _)| batch.receivers.contains(dir))
            .map(|(_, (stage, _))| stage + 1)
            .max();
        for (dir, (stage, _)) in &mut dirs {
            if batch.givers.contains(dir) && !batch.receivers.contains(dir) {
                *stage = (*stage).max(received.unwrap_or(0));
            }
        }
        let named = dirs.values().map(|(stage, _)| stage + 1).max().unwrap_or(0);
        let mut depths = HashMap::new();
        for dir in batch.born_dirs.keys() {
            depth(*dir, batch, &mut depths);
        }
        let deepest = depths.values().map(|depth| depth + 1).max().unwrap_or(0);
        Self { dirs, births: named.max(1), depths, deepest }
    }
}

/// How many directories that are born in this batch lie around this one.
fn depth(dir: u32, batch: &Batch, known: &mut HashMap<u32, u32>) -> u32 {
    let mut way = vec![dir];
    let mut at = dir;
    // Never longer than there are directories: a tree has no circle.
    let above = loop {
        if let Some(depth) = known.get(&at) {
            way.pop();
            break depth + 1;
        }
        match batch.born_dirs.get(&at) {
            Some(parent) if batch.born_dirs.contains_key(parent) && !way.contains(parent) => {
                at = *parent;
                way.push(at);
            }
            _ => break 0,
        }
    };
    for (nth, dir) in (above..).zip(way.into_iter().rev()) {
        known.insert(dir, nth);
    }
    known.get(&dir).copied().unwrap_or(0)
}

impl Edit<'_> {
    /// The stages of the batch, none of them empty, and which one a sync waits for.
    fn stages(&self, plan: &Plan) -> Result<(Vec<Stage>, usize)> {
        let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
        let mut last: Stage = Stage::new();
        let mut freed = false;
        let contents = self.dirty_contents();
        if !contents.is_empty() {
            stages.insert(0, contents);
        }
        let slots = self.slots(plan)?;
        let mut all = self.w.batch.blocks.clone();
        all.sort_unstable();
        all.dedup();
        let blocks = self.volume.store.overlay.read();
        for block in all {
            let Some(buffer) = blocks.metadata.get(&block) else { continue };
            let now = buffer.now.clone();
            match (&buffer.state, buffer.role) {
                (State::Clean, _) => {}
                (State::Fresh, _) => drop(stages.entry(0).or_default().insert(block, now)),
                (State::Changed(base), Role::Counts) => {
                    if let Some(features) = self.features_only(block, base, &now) {
                        stages.entry(0).or_default().insert(block, features);
                    }
                    last.insert(block, now);
                }
                (State::Changed(_), Role::Attributes) => {
                    last.insert(block, now);
                }
                (State::Changed(base), Role::Bitmap) => {
                    let both: Box<[u8]> = base.iter().zip(now.iter()).map(|(a, b)| a | b).collect();
                    let frees = both[..] != now[..];
                    if both[..] != base[..] {
                        let both = if frees { Data::owned(both) } else { now.clone() };
                        stages.entry(0).or_default().insert(block, both);
                    }
                    if frees {
                        freed = true;
                        last.insert(block, now);
                    }
                }
                (State::Changed(base), Role::Inodes) => {
                    let slots = slots.get(&block).map(Vec::as_slice).unwrap_or_default();
                    for (stage, version) in self.versions(base, &now, slots) {
                        stages.entry(stage).or_default().insert(block, version);
                    }
                }
                (State::Changed(_), Role::Directory(dir)) => {
                    let stage = plan.dirs.get(&dir).map_or(0, |(stage, _)| *stage);
                    stages.entry(stage).or_default().insert(block, now);
                }
                (State::Changed(_), Role::Map(inode)) => {
                    let stage = plan.dirs.get(&inode).map_or(1, |(stage, _)| (*stage).max(1));
                    stages.entry(stage).or_default().insert(block, now);
                }
            }
        }
        drop(blocks);
        let mut all: Vec<Stage> = stages.into_values().collect();
        let mut needed = all.len().saturating_sub(1);
        if !last.is_empty() {
            match all.last_mut().filter(|_| !freed) {
                Some(stage) => stage.extend(last),
                None => all.push(last),
            }
            if all.len() == 1 {
                needed = 0;
            }
        }
        Ok((all, needed))
    }

    /// The superblock with new features and nothing else: what needs them comes behind.
    fn features_only(&self, block: u64, base: &Data, now: &Data) -> Option<Data> {
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let start = index(OFFSET_BYTES % block_bytes);
        let fields = start + 0x5C..start + 0x68;
        let new = now.get(fields.clone()).filter(|_| block == OFFSET_BYTES / block_bytes)?;
        let mut bytes = base.to_vec();
        let old = bytes.get_mut(fields).filter(|old| *old != new)?;
        old.copy_from_slice(new);
        Some(Data::owned(bytes.into_boxed_slice()))
    }

    /// The changed inodes by the blocks of their tables: place, and stage.
    fn slots(&self, plan: &Plan) -> Result<HashMap<u64, Vec<(usize, u32)>>> {
        let mut slots: HashMap<u64, Vec<(usize, u32)>> = HashMap::new();
        let batch = &self.w.batch;
        for inode in &batch.inodes {
            let (block, at) = self.place(InodeNumber(*inode))?;
            let stage = if let Some(depth) = plan.depths.get(inode) {
                plan.births + depth
            } else if batch.born.contains(inode) {
                plan.births + plan.deepest
            } else if let Some(height) = batch.dying.get(inode) {
                *height
            } else if let Some((stage, true)) = plan.dirs.get(inode) {
                *stage
            } else {
                // A file whose inode leads to other blocks than before waits for those.
                u32::from(self.inode_switches_blocks(block, at))
            };
            slots.entry(block.0).or_default().push((at, stage));
        }
        Ok(slots)
    }

    fn inode_switches_blocks(&self, block: FsBlock, at: usize) -> bool {
        let blocks = self.volume.store.overlay.read();
        let Some(Buffer { state: State::Changed(base), now, .. }) = blocks.metadata.get(&block.0)
        else {
            return false;
        };
        let differs = |from, end| base.get(at + from..at + end) != now.get(at + from..at + end);
        differs(40, 100) || differs(104, 108)
    }

    /// A block of an inode table as each stage leaves it.
    fn versions(&self, base: &Data, now: &Data, slots: &[(usize, u32)]) -> Vec<(u32, Data)> {
        let len = index(self.volume.super_.inode_bytes.into());
        let stages: BTreeSet<u32> = slots.iter().map(|(_, stage)| *stage).collect();
        if let (1, Some(stage)) = (stages.len(), stages.first()) {
            return vec![(*stage, now.clone())];
        }
        let mut version = base.to_vec();
        let mut versions = Vec::new();
        for stage in stages {
            for (at, _) in slots.iter().filter(|(_, of)| *of == stage) {
                let range = *at..*at + len;
                if let (Some(into), Some(from)) = (version.get_mut(range.clone()), now.get(range)) {
                    into.copy_from_slice(from);
                }
            }
            versions.push((stage, Data::owned(version.clone().into_boxed_slice())));
        }
        versions
    }
}
