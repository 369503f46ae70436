//! Renames: to a new name, another directory, over an existing name, or an exchange.
//!
//! Law: on disk, a replaced name always references an inode. In one directory the two names are
//! swapped first, and the next chain removes the old one.

use draconis_types::FileType;

use super::super::{RenameMode, Whiteout};
use super::{AllocatedWhiteout, DirAndName, MAX_DIRECTORY_DEPTH, is_dot_or_dot_dot};
use crate::commit::batch::{Effect, NameMove, Operation};
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::transaction::Transaction;
use crate::{Error, InodeNumber, Result};

impl Transaction<'_> {
    pub(crate) fn rename(
        &mut self,
        (from_dir, from): DirAndName<'_>,
        (to_dir, to): DirAndName<'_>,
        how: RenameMode,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let source = self.writable_directory(from_dir, true)?;
        let target = self.writable_directory(to_dir, false)?;
        if is_dot_or_dot_dot(from) || is_dot_or_dot_dot(to) {
            return Err(Error::Misuse("`.` and `..` cannot be renamed"));
        }
        let Ok(spot) = self.find_name_or_slot(&source, from)? else { return Err(Error::NotFound) };
        // Both names would have to be encrypted again.
        self.check_not_encrypted(&source)?;
        self.check_not_encrypted(&target)?;
        let inode = spot.found.inode;
        if let Some(first) = self.writer.replaying.and_then(|it| it.renamed_inode)
            && first != inode
        {
            return self.finish_replayed_replace((from_dir, from), (to_dir, to), first, whiteout);
        }
        self.writer.renamed_inode = Some(inode);
        let node = self.node(inode)?;
        if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        let is_dir = node.kind == FileType::Directory;
        if is_dir && from_dir != to_dir {
            self.check_no_loop(to_dir, inode)?;
        }
        if whiteout.is_some() && how == RenameMode::Exchange {
            return Err(Error::Misuse("an exchange leaves no name for a whiteout"));
        }
        let of_whiteout = match whiteout.map(Whiteout::as_new_node) {
            Some(new) => self.plan_new_inode(&source, &new)?.blocks(new.kind),
            None => 0,
        };
        let there = self.find_name_or_slot(&target, to)?;
        match (there, how) {
            (Ok(_), RenameMode::NoReplace) => Err(Error::Exists),
            (Err(_), RenameMode::Exchange) => Err(Error::NotFound),
            (Ok(other), _) if other.found.inode == inode => Ok(()),
            // No name leaves such a directory.
            (Ok(_), _) if target.flags & flags::APPEND != 0 => Err(Error::NotPermitted),
            _ if self.check_project(&node, &target).is_err() => Err(Error::OtherProject),
            (Ok(_), RenameMode::Exchange) => self.exchange(from_dir, from, to_dir, to),
            (Ok(other), RenameMode::Replace) => {
                let victim = self.node(other.found.inode)?;
                self.can_replace(&node, &victim, to_dir)?;
                self.preload_for_deletion(&victim)?;
                self.ensure_free_blocks(of_whiteout, target.owner().0)?;
                self.replace((from_dir, from), (to_dir, to), &node, &victim, whiteout)
            }
            (Err(place), _) => {
                if is_dir && from_dir != to_dir {
                    self.check_subdirectory_limit(&target)?;
                }
                let needs = self.max_insert_blocks(to_dir, &place)?;
                self.ensure_free_blocks(needs.saturating_add(of_whiteout), target.owner().0)?;
                self.join_batch(Operation::Move(NameMove { inode, from: from_dir, to: to_dir }))?;
                let Err(place) = self.find_name_or_slot(&*self.directory(to_dir)?, to)? else {
                    return Err(Error::Exists);
                };
                // The batch that was closed may have used some of the space.
                let needs = self.max_insert_blocks(to_dir, &place)?;
                self.ensure_free_blocks(needs.saturating_add(of_whiteout), target.owner().0)?;
                let whiteout = self.allocate_whiteout(from_dir, whiteout)?;
                self.insert_name(to_dir, place, to, inode, node.kind)?;
                self.finish_move((from_dir, from), to_dir, &node, whiteout)
            }
        }
    }

    /// Completes a move after the new name is inserted: removes the old one and updates the inode.
    fn finish_move(
        &mut self,
        (from_dir, from): DirAndName<'_>,
        to_dir: InodeNumber,
        node: &Inode,
        whiteout: Option<AllocatedWhiteout>,
    ) -> Result<()> {
        let inode = node.number;
        // Recorded only now: a move that failed must not affect the order.
        self.record_effect(Effect::Moved(NameMove { inode, from: from_dir, to: to_dir }));
        self.remove_old_name((from_dir, from), whiteout)?;
        if node.kind == FileType::Directory && from_dir != to_dir {
            self.set_parent(inode, to_dir)?;
            self.count_subdirectory(from_dir, false)?;
            self.count_subdirectory(to_dir, true)?;
        }
        self.set_times_now(inode, &[InodeTime::Changed])?;
        self.touch_directory(from_dir)?;
        if from_dir != to_dir {
            self.touch_directory(to_dir)?;
        }
        Ok(())
    }

    /// Allocates the inode of a whiteout before anything moves: there may be none.
    fn allocate_whiteout(
        &mut self,
        dir: InodeNumber,
        whiteout: Option<Whiteout>,
    ) -> Result<Option<AllocatedWhiteout>> {
        let Some(whiteout) = whiteout else { return Ok(None) };
        let parent = self.directory(dir)?;
        let owner = self.plan_new_inode(&parent, &whiteout.as_new_node())?.owner(whiteout.uid);
        self.ensure_entries(owner)?;
        let number = self.allocate_inode_for(dir, FileType::CharDevice)?;
        Ok(Some(AllocatedWhiteout { number, whiteout }))
    }

    /// Removes the old name, or retargets it to a new whiteout.
    fn remove_old_name(
        &mut self,
        (dir, name): DirAndName<'_>,
        whiteout: Option<AllocatedWhiteout>,
    ) -> Result<()> {
        let Some(AllocatedWhiteout { number, whiteout }) = whiteout else {
            // Looked up again: inserting the new name may have moved the old one.
            let slot = self.find_existing(dir, name)?;
            return self.remove_name(dir, slot);
        };
        let parent = self.directory(dir)?;
        let new = whiteout.as_new_node();
        let birth = self.plan_new_inode(&parent, &new)?;
        self.make_inode(&parent, number, &new, birth, 1)?;
        let slot = self.find_existing(dir, name)?;
        // For the order of the chain, this is a removal and an insert.
        self.record_effect(Effect::NameRemoved { dir });
        self.retarget_name(dir, slot, number, new.kind)
    }

    fn set_parent(&mut self, dir: InodeNumber, parent: InodeNumber) -> Result<()> {
        let slot = self.find_dot_dot(dir)?;
        self.record_effect(Effect::Reparented { dir, parent });
        self.retarget_name(dir, slot, parent, FileType::Directory)
    }

    fn can_replace(&self, node: &Inode, victim: &Inode, to_dir: InodeNumber) -> Result<()> {
        if victim.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        match (node.kind == FileType::Directory, victim.kind == FileType::Directory) {
            (true, false) => Err(Error::NotADirectory),
            (false, true) => Err(Error::IsADirectory),
            (true, true) if victim.number == to_dir || victim.number == InodeNumber::ROOT => {
                Err(Error::corrupt("directory: names itself").with_inode(to_dir))
            }
            (true, true) if !self.is_empty(victim)? => Err(Error::NotEmpty),
            _ => Ok(()),
        }
    }

    /// Renames over an existing name. On disk the name always references an inode: the two names
    /// are swapped first, and the next chain removes the old one. Only across directories, the
    /// replaced inode is deleted before its name is retargeted.
    fn replace(
        &mut self,
        (from_dir, from): DirAndName<'_>,
        (to_dir, to): DirAndName<'_>,
        node: &Inode,
        victim: &Inode,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let inode = node.number;
        let moved = NameMove { inode, from: from_dir, to: to_dir };
        self.join_batch(Operation::Replace { moved, victim: victim.number })?;
        let whiteout = self.allocate_whiteout(from_dir, whiteout)?;
        let there = self.find_existing(to_dir, to)?;
        if from_dir == to_dir
            && self.writer.protocol.requires_name_swap(&self.writer.batch, victim.number)
        {
            let here = self.find_existing(from_dir, from)?;
            self.retarget_name(to_dir, there, inode, node.kind)?;
            self.retarget_name(from_dir, here, victim.number, victim.kind)?;
            self.record_effect(Effect::NamesSwapped { victim: victim.number });
            self.join_batch(Operation::Unlink { inode: victim.number })?;
            return self.finish_swap((from_dir, from), inode, victim, whiteout);
        }
        // The name of the replaced inode goes: for the order of the chain, that is after its deletion.
        self.record_effect(Effect::NameRemoved { dir: to_dir });
        self.retarget_name(to_dir, there, inode, node.kind)?;
        self.finish_move((from_dir, from), to_dir, node, whiteout)?;
        self.drop_replaced(to_dir, victim)
    }

    /// Completes a swap: removes the old name and its inode.
    fn finish_swap(
        &mut self,
        (dir, from): DirAndName<'_>,
        moved: InodeNumber,
        victim: &Inode,
        whiteout: Option<AllocatedWhiteout>,
    ) -> Result<()> {
        self.remove_old_name((dir, from), whiteout)?;
        self.set_times_now(moved, &[InodeTime::Changed])?;
        self.touch_directory(dir)?;
        self.drop_replaced(dir, victim)
    }

    fn drop_replaced(&mut self, dir: InodeNumber, victim: &Inode) -> Result<()> {
        if victim.kind == FileType::Directory {
            self.drop_directory(dir, victim.number)
        } else {
            self.drop_link(dir, victim.number)
        }
    }

    /// Completes the replay of a rename whose swap is on disk: see [`Transaction::replace`].
    fn finish_replayed_replace(
        &mut self,
        (from_dir, from): DirAndName<'_>,
        (to_dir, to): DirAndName<'_>,
        moved: InodeNumber,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let (here, there) = (self.find_existing(from_dir, from)?, self.find_existing(to_dir, to)?);
        if from_dir != to_dir || there.found.inode != moved {
            return Err(Error::corrupt("directory: a name moved elsewhere").with_inode(from_dir));
        }
        self.writer.renamed_inode = Some(moved);
        let victim = self.node(here.found.inode)?;
        self.preload_for_deletion(&victim)?;
        // The inode was allocated with the first half.
        let taken = whiteout.zip(self.replayed_inode());
        let taken = taken.map(|(whiteout, number)| AllocatedWhiteout { number, whiteout });
        self.finish_swap((from_dir, from), moved, &victim, taken)
    }

    fn exchange(
        &mut self,
        from_dir: InodeNumber,
        from: &[u8],
        to_dir: InodeNumber,
        to: &[u8],
    ) -> Result<()> {
        let spots = |tx: &Self| {
            Ok::<_, Error>((tx.find_existing(from_dir, from)?, tx.find_existing(to_dir, to)?))
        };
        let (here, there) = spots(self)?;
        let (one, two) = (self.node(here.found.inode)?, self.node(there.found.inode)?);
        if two.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        self.check_project(&two, &*self.directory(from_dir)?)?;
        let is_across = from_dir != to_dir;
        if two.kind == FileType::Directory && is_across {
            self.check_no_loop(from_dir, two.number)?;
        }
        let inodes = [one.number, two.number];
        self.join_batch(Operation::Exchange { inodes, is_across })?;
        let (here, there) = spots(self)?;
        self.retarget_name(from_dir, here, two.number, two.kind)?;
        self.retarget_name(to_dir, there, one.number, one.kind)?;
        for (node, old, new) in [(&one, from_dir, to_dir), (&two, to_dir, from_dir)] {
            if is_across && node.kind == FileType::Directory {
                self.set_parent(node.number, new)?;
                self.count_subdirectory(old, false)?;
                self.count_subdirectory(new, true)?;
            }
            self.set_times_now(node.number, &[InodeTime::Changed])?;
            self.touch_directory(old)?;
        }
        if is_across {
            self.record_effect(Effect::NamesExchanged);
        }
        Ok(())
    }

    /// Refuses to move a directory below itself.
    fn check_no_loop(&self, at: InodeNumber, moved: InodeNumber) -> Result<()> {
        let mut at = at;
        for _ in 0..MAX_DIRECTORY_DEPTH {
            if at == moved {
                return Err(Error::Misuse("a directory cannot be moved into itself"));
            }
            if at == InodeNumber::ROOT {
                return Ok(());
            }
            at = self.find_dot_dot(at)?.found.inode;
        }
        Err(Error::corrupt("directory: a circle").with_inode(at))
    }
}
