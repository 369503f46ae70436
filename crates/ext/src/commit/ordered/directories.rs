//! Directories, arranged so that each changes by one sector.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;

use super::{Names, SECTOR_BYTES};
use crate::alloc::Request;
use crate::blocks::overlay::{Buffer, State};
use crate::blocks::role::Role;
use crate::format::slot::Change;
use crate::map::{Node, Place, Visit};
use crate::transaction::Transaction;
use crate::units::index;
use crate::{Error, FsBlock, InodeNumber, Result};

/// How a directory that lives on disk is brought up to date.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arranged {
    /// Its inode, or an indirect block in place, leads to blocks of stage 0.
    pub(super) switches: bool,
    /// Names go that lead to dying inodes, or might.
    pub(super) removes: bool,
}

/// The blocks of a directory that may have to move.
struct Found {
    /// Blocks of names that changed.
    own: BTreeSet<u64>,
    /// Those that the directory leads to: which block of it, and where.
    names: Vec<(u64, FsBlock)>,
    /// The blocks of its map.
    maps: Vec<Node>,
    damaged: Option<FsBlock>,
}

impl Visit for Found {
    fn run(&mut self, at: u64, blocks: u64, place: Place) -> ControlFlow<()> {
        match place {
            Place::Hole | Place::Unwritten(_) => {}
            Place::At(first) => {
                let all = (0..blocks).map(|nth| (at + nth, first.after(nth)));
                self.names.extend(all.filter(|(_, block)| self.own.contains(&block.0)));
            }
            Place::Damaged(block) => {
                self.damaged = Some(block);
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    fn node(&mut self, node: Node) -> bool {
        self.maps.push(node);
        true
    }
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
                if let Role::Directory(file) | Role::Map(file) | Role::Extents(file) = role {
                    changed.entry(file.inode).or_default().push(*block);
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
                    map_switches |= matches!(buffer.role, Role::Map(_) | Role::Extents(_));
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
        let node = self.peek(dir)?;
        let count = self.volume.directory_blocks(&node);
        let own = own.iter().copied().filter(|block| self.is_names(*block)).collect();
        let mut found = Found { own, names: vec![], maps: vec![], damaged: None };
        self.walk(dir, 0..count.into(), &mut found)?;
        if let Some(block) = found.damaged {
            return Err(Error::corrupt("block map: pointer").in_block(block).of_inode(dir));
        }
        for (at, block) in found.names {
            let new = self.shift(block, self.directory_role(dir)?)?;
            let pointer = self.pointer_of(dir, at)?;
            self.set_pointer(dir, pointer, new)?;
        }
        // A block comes behind the one that leads to it.
        for Node { block, pointer } in found.maps.into_iter().rev() {
            let is_changed = {
                let blocks = self.volume.store.overlay.read();
                let buffer = blocks.metadata.get(&block.0);
                buffer.is_some_and(|it| matches!(it.state, State::Changed(_)))
            };
            if !is_changed {
                continue;
            }
            let new = self.shift(block, self.map_role(dir)?)?;
            self.set_pointer(dir, pointer, new)?;
        }
        self.forget_map(dir, 0, count);
        self.volume.inodes.forget(dir.0);
        Ok(true)
    }

    fn is_names(&self, block: u64) -> bool {
        let blocks = self.volume.store.overlay.read();
        let buffer = blocks.metadata.get(&block);
        buffer.is_some_and(|it| {
            matches!((&it.state, it.role), (State::Changed(_), Role::Directory(_)))
        })
    }

    /// Moves a changed block to a new place.
    fn shift(&mut self, old: FsBlock, role: Role) -> Result<FsBlock> {
        let request =
            Request { goal: old.0, want: 1, grows: None, privileged: true, of_tree: false };
        let (new, _) = self.allocate_blocks(request)?;
        let now = self.block(old, role)?.to_vec();
        self.free_blocks(old.0, 1)?;
        self.put_fresh(FsBlock(new), role, now);
        Ok(FsBlock(new))
    }
}
