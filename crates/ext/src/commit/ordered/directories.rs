//! Directories, arranged so that each changes by one sector.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Names, SECTOR_BYTES};
use crate::alloc::Request;
use crate::blocks::overlay::{Buffer, Role, State};
use crate::format::inode::DIRECT;
use crate::format::le32;
use crate::format::slot::Change;
use crate::map::edit::PointerAt;
use crate::map::indirect::fan_out;
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::{FsBlock, InodeNumber, Result};

/// How a directory that lives on disk is brought up to date.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arranged {
    /// Its inode, or an indirect block in place, leads to blocks of stage 0.
    pub(super) switches: bool,
    /// Names go that lead to dying inodes, or might.
    pub(super) removes: bool,
}

impl Transaction<'_> {
    /// Sees to it that each directory changes by one sector, and says how.
    pub(super) fn arrange_directories(
        &mut self,
        names: &HashMap<u32, Names>,
    ) -> Result<HashMap<u32, Arranged>> {
        let mut changed: HashMap<u32, Vec<u64>> = HashMap::new();
        {
            let blocks = self.volume.store.overlay.read();
            for block in &self.writer.batch.blocks {
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
        let dirs: BTreeMap<u32, Names> = names.iter().map(|(dir, names)| (*dir, *names)).collect();
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
        let part = at..at + index(self.volume.super_.inode_bytes.into());
        let old = base.get(part.clone()).unwrap_or_default();
        Ok(Change::new(old, now.get(part).unwrap_or_default()).is_of_reach())
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
            let pointers = self.pointers_to(dir, at)?;
            let Some((place, pointer)) = pointers.last().copied() else { break };
            if own.contains(&pointer.into()) && self.is_names(pointer) {
                let new = self.shift(pointer, Role::Directory(dir.0))?;
                self.set_pointer(dir, place, new)?;
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
                self.maps_below(PointerAt::Inode(slot), pointer, levels, most, &mut maps)?;
            }
        }
        // A block comes behind the one that leads to it.
        for (place, block) in maps.into_iter().rev() {
            let is_changed = {
                let blocks = self.volume.store.overlay.read();
                let buffer = blocks.metadata.get(&u64::from(block));
                buffer.is_some_and(|it| matches!(it.state, State::Changed(_)))
            };
            if !is_changed {
                continue;
            }
            let new = self.shift(block, Role::Map(dir.0))?;
            self.set_pointer(dir, place, new)?;
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
        place: PointerAt,
        block: u32,
        levels: u32,
        most: usize,
        all: &mut Vec<(PointerAt, u32)>,
    ) -> Result<()> {
        if all.len() < most {
            all.push((place, block));
        }
        if levels <= 1 || all.len() >= most {
            return Ok(());
        }
        let bytes = self.block(FsBlock(block.into()))?;
        for nth in 0..fan_out(&self.volume.super_) {
            let pointer = le32(&bytes, index(nth) * 4).unwrap_or(0);
            if pointer != 0 {
                let place = PointerAt::Block(FsBlock(block.into()), nth);
                self.maps_below(place, pointer, levels - 1, most, all)?;
            }
        }
        Ok(())
    }

    /// Moves a changed block to a new place.
    fn shift(&mut self, block: u32, role: Role) -> Result<u32> {
        let old = FsBlock(block.into());
        let request = Request { goal: old.0, want: 1, grows: None, privileged: true };
        let (new, _) = self.allocate_blocks(request)?;
        let now = self.block(old)?.to_vec();
        self.free_blocks(old.0, 1)?;
        self.put_fresh(FsBlock(new), role, now);
        Ok(narrow(new))
    }
}
