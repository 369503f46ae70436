//! Names that move: to another name, another directory, over what is there, or with another.
//!
//! Law: on disk a name that is replaced never leads nowhere. In one directory the two names are
//! exchanged first, and the old one goes with the next chain.

#![allow(clippy::arithmetic_side_effects, reason = "counts blocks of a volume")]

use draconis_exchange::contract::FileType;

use super::super::{Renaming, Whiteout};
use super::{At, MOST_DEPTH, Taken, is_dots};
use crate::commit::batch::{Intent, Move, Operation};
use crate::format::inode::{Inode, flags};
use crate::format::slot::Stamp;
use crate::transaction::Transaction;
use crate::{Error, InodeNumber, Result};

impl Transaction<'_> {
    pub(crate) fn rename(
        &mut self,
        (from_dir, from): At<'_>,
        (to_dir, to): At<'_>,
        how: Renaming,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let source = self.changeable(from_dir, true)?;
        let target = self.changeable(to_dir, false)?;
        if is_dots(from) || is_dots(to) {
            return Err(Error::Misuse("`.` and `..` cannot be renamed"));
        }
        let Ok(spot) = self.seek(&source, from)? else { return Err(Error::NotFound) };
        // The names of both would have to be encrypted anew.
        self.need_key(&source)?;
        self.need_key(&target)?;
        let moved = spot.found.inode;
        if let Some(first) = self.writer.repeated.and_then(|it| it.moved)
            && first != moved
        {
            return self.finish_replacing((from_dir, from), (to_dir, to), first, whiteout);
        }
        self.writer.moved = Some(moved);
        let node = self.node(moved)?;
        if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        let is_dir = node.kind == FileType::Directory;
        if is_dir && from_dir != to_dir {
            self.not_below(to_dir, moved)?;
        }
        if whiteout.is_some() && how == Renaming::Exchange {
            return Err(Error::Misuse("an exchange leaves no name for a whiteout"));
        }
        let of_whiteout = match whiteout.map(Whiteout::node) {
            Some(new) => self.plan_inode(&source, &new)?.blocks(new.kind),
            None => 0,
        };
        let there = self.seek(&target, to)?;
        match (there, how) {
            (Ok(_), Renaming::NoReplace) => Err(Error::Exists),
            (Err(_), Renaming::Exchange) => Err(Error::NotFound),
            (Ok(other), _) if other.found.inode == moved => Ok(()),
            _ if self.may_belong(&node, &target).is_err() => Err(Error::OtherProject),
            (Ok(_), Renaming::Exchange) => self.exchange(from_dir, from, to_dir, to),
            (Ok(other), Renaming::Replace) => {
                let victim = self.node(other.found.inode)?;
                self.can_replace(&node, &victim, to_dir)?;
                self.have_for_death(&victim)?;
                self.need(of_whiteout, target.owner().0)?;
                self.replace((from_dir, from), (to_dir, to), &node, &victim, whiteout)
            }
            (Err(place), _) => {
                if is_dir && from_dir != to_dir {
                    self.one_more_directory(&target)?;
                }
                let needs = self.blocks_of_name(to_dir, &place)?;
                self.need(needs + of_whiteout, target.owner().0)?;
                self.begin(Operation::Move(Move { inode: moved, from: from_dir, to: to_dir }))?;
                let Err(place) = self.seek(&*self.directory(to_dir)?, to)? else {
                    return Err(Error::Exists);
                };
                // A batch that was ended may have taken some of it.
                let needs = self.blocks_of_name(to_dir, &place)?;
                self.need(needs + of_whiteout, target.owner().0)?;
                let whiteout = self.take_whiteout(from_dir, whiteout)?;
                self.put_in(to_dir, place, to, moved, node.kind)?;
                self.finish_move((from_dir, from), to_dir, &node, whiteout)
            }
        }
    }

    /// The new name is there: takes the old one out, and tells the moved inode.
    fn finish_move(
        &mut self,
        (from_dir, from): At<'_>,
        to_dir: InodeNumber,
        node: &Inode,
        whiteout: Option<Taken>,
    ) -> Result<()> {
        let moved = node.number;
        // Only now: a move that could not be made says nothing of the order.
        self.record(Intent::Moved(Move { inode: moved, from: from_dir, to: to_dir }));
        self.clear_name((from_dir, from), whiteout)?;
        if node.kind == FileType::Directory && from_dir != to_dir {
            self.set_parent(moved, to_dir)?;
            self.count_subdirectory(from_dir, false)?;
            self.count_subdirectory(to_dir, true)?;
        }
        self.stamp(moved, &[Stamp::Changed])?;
        self.stamp_directory(from_dir)?;
        if from_dir != to_dir {
            self.stamp_directory(to_dir)?;
        }
        Ok(())
    }

    /// Takes the inode of a whiteout before anything moves: there may be none.
    fn take_whiteout(
        &mut self,
        dir: InodeNumber,
        whiteout: Option<Whiteout>,
    ) -> Result<Option<Taken>> {
        let Some(whiteout) = whiteout else { return Ok(None) };
        let parent = self.directory(dir)?;
        let owner = self.plan_inode(&parent, &whiteout.node())?.owner(whiteout.uid);
        self.have_entries(owner)?;
        let number = self.inode_for(dir, FileType::CharDevice)?;
        Ok(Some(Taken { number, whiteout }))
    }

    /// Takes out the name of what has moved, or lets it lead to a new whiteout.
    fn clear_name(&mut self, (dir, name): At<'_>, whiteout: Option<Taken>) -> Result<()> {
        let Some(Taken { number, whiteout }) = whiteout else {
            // Looked up again: the new name may have moved the old one.
            let spot = self.spot(dir, name)?;
            return self.take_out(dir, spot);
        };
        let parent = self.directory(dir)?;
        let new = whiteout.node();
        let birth = self.plan_inode(&parent, &new)?;
        self.make_inode(&parent, number, &new, birth, 1)?;
        let spot = self.spot(dir, name)?;
        // For the order of the chain this is both: a name goes, and one comes.
        self.record(Intent::Unnamed { dir });
        self.point_elsewhere(dir, spot, number, new.kind)
    }

    fn set_parent(&mut self, dir: InodeNumber, parent: InodeNumber) -> Result<()> {
        let spot = self.parent(dir)?;
        self.record(Intent::Reparented { dir, parent });
        self.point_elsewhere(dir, spot, parent, FileType::Directory)
    }

    fn can_replace(&self, node: &Inode, victim: &Inode, to_dir: InodeNumber) -> Result<()> {
        if victim.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        match (node.kind == FileType::Directory, victim.kind == FileType::Directory) {
            (true, false) => Err(Error::NotADirectory),
            (false, true) => Err(Error::IsADirectory),
            (true, true) if victim.number == to_dir || victim.number == InodeNumber::ROOT => {
                Err(Error::corrupt("directory: names itself").of_inode(to_dir))
            }
            (true, true) if !self.is_empty(victim)? => Err(Error::NotEmpty),
            _ => Ok(()),
        }
    }

    /// Renames over a name that is there. On disk the name never leads nowhere: the two names
    /// are exchanged first, and the old one goes with the next chain. Only where they are in
    /// two directories, what is replaced dies before its name leads elsewhere.
    fn replace(
        &mut self,
        (from_dir, from): At<'_>,
        (to_dir, to): At<'_>,
        node: &Inode,
        victim: &Inode,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let moved = node.number;
        let on_the_move = Move { inode: moved, from: from_dir, to: to_dir };
        self.begin(Operation::Replace { moved: on_the_move, victim: victim.number })?;
        let whiteout = self.take_whiteout(from_dir, whiteout)?;
        let there = self.spot(to_dir, to)?;
        if from_dir == to_dir && self.writer.protocol.swaps_names(&self.writer.batch, victim.number)
        {
            let here = self.spot(from_dir, from)?;
            self.point_elsewhere(to_dir, there, moved, node.kind)?;
            self.point_elsewhere(from_dir, here, victim.number, victim.kind)?;
            self.record(Intent::Swapped { victim: victim.number });
            self.begin(Operation::Unlink { inode: victim.number })?;
            return self.end_swap((from_dir, from), moved, victim, whiteout);
        }
        self.point_elsewhere(to_dir, there, moved, node.kind)?;
        self.finish_move((from_dir, from), to_dir, node, whiteout)?;
        self.lose_replaced(to_dir, victim)
    }

    /// The two names were exchanged: takes the old one, and what it leads to now.
    fn end_swap(
        &mut self,
        (dir, from): At<'_>,
        moved: InodeNumber,
        victim: &Inode,
        whiteout: Option<Taken>,
    ) -> Result<()> {
        self.clear_name((dir, from), whiteout)?;
        self.stamp(moved, &[Stamp::Changed])?;
        self.stamp_directory(dir)?;
        self.lose_replaced(dir, victim)
    }

    fn lose_replaced(&mut self, dir: InodeNumber, victim: &Inode) -> Result<()> {
        if victim.kind == FileType::Directory {
            self.lose_directory(dir, victim.number)
        } else {
            self.lose_name(dir, victim.number)
        }
    }

    /// Ends a renaming that is repeated, and whose first half the disk has: see
    /// [`Transaction::replace`].
    fn finish_replacing(
        &mut self,
        (from_dir, from): At<'_>,
        (to_dir, to): At<'_>,
        moved: InodeNumber,
        whiteout: Option<Whiteout>,
    ) -> Result<()> {
        let (here, there) = (self.spot(from_dir, from)?, self.spot(to_dir, to)?);
        if from_dir != to_dir || there.found.inode != moved {
            return Err(Error::corrupt("directory: a name moved elsewhere").of_inode(from_dir));
        }
        self.writer.moved = Some(moved);
        let victim = self.node(here.found.inode)?;
        self.have_for_death(&victim)?;
        // It was taken with the first half.
        let taken = whiteout.zip(self.repeated_inode());
        let taken = taken.map(|(whiteout, number)| Taken { number, whiteout });
        self.end_swap((from_dir, from), moved, &victim, taken)
    }

    fn exchange(
        &mut self,
        from_dir: InodeNumber,
        from: &[u8],
        to_dir: InodeNumber,
        to: &[u8],
    ) -> Result<()> {
        self.changeable(to_dir, true)?;
        let spots = |tx: &Self| Ok::<_, Error>((tx.spot(from_dir, from)?, tx.spot(to_dir, to)?));
        let (here, there) = spots(self)?;
        let (one, two) = (self.node(here.found.inode)?, self.node(there.found.inode)?);
        if two.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        self.may_belong(&two, &*self.directory(from_dir)?)?;
        let across = from_dir != to_dir;
        if two.kind == FileType::Directory && across {
            self.not_below(from_dir, two.number)?;
        }
        let inodes = [one.number, two.number];
        self.begin(Operation::Exchange { inodes, is_across: across })?;
        let (here, there) = spots(self)?;
        self.point_elsewhere(from_dir, here, two.number, two.kind)?;
        self.point_elsewhere(to_dir, there, one.number, one.kind)?;
        for (node, old, new) in [(&one, from_dir, to_dir), (&two, to_dir, from_dir)] {
            if across && node.kind == FileType::Directory {
                self.set_parent(node.number, new)?;
                self.count_subdirectory(old, false)?;
                self.count_subdirectory(new, true)?;
            }
            self.stamp(node.number, &[Stamp::Changed])?;
            self.stamp_directory(old)?;
        }
        if across {
            self.record(Intent::Exchanged);
        }
        Ok(())
    }

    /// Refuses to move a directory to where only itself leads.
    fn not_below(&self, at: InodeNumber, moved: InodeNumber) -> Result<()> {
        let mut at = at;
        for _ in 0..MOST_DEPTH {
            if at == moved {
                return Err(Error::Misuse("a directory cannot be moved into itself"));
            }
            if at == InodeNumber::ROOT {
                return Ok(());
            }
            at = self.parent(at)?.found.inode;
        }
        Err(Error::corrupt("directory: a circle").of_inode(at))
    }
}
