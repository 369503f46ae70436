//! A volume taken into use for writing.
//!
//! Law: a volume that is opened and not changed stays as it is, byte for byte; one that is
//! changed says that it is in use before anything else of the change is on disk.

#![allow(clippy::arithmetic_side_effects, reason = "counts mounts and inodes of a group")]

use std::collections::BTreeSet;
use std::sync::Arc;

use draconis_device::{Disk, Properties};
use draconis_exchange::contract::Kind;

use crate::alloc::Groups;
use crate::blocks::data::Data;
use crate::blocks::overlay::State;
use crate::claim::Claim;
use crate::commit::atomic::AtomicGroups;
use crate::commit::journal::Journal;
use crate::commit::outbox::{After, Freed, Outbox, Sealed};
use crate::commit::protocol::{self, Stage};
use crate::commit::seconds_of;
use crate::dir::edit::targets;
use crate::format::requirements::{Asker, broken};
use crate::format::slot::Slot;
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::journal::{self, Log};
use crate::ops::Writing;
use crate::quota::Quotas;
use crate::takeover::Predecessor;
use crate::transaction::{Stop, Transaction, WriteSide, Writer};
use crate::units::index;
use crate::volume::{Options, Volume, read_superblock};
use crate::{Error, InodeNumber, Result};

impl Volume {
    /// With `taken_over` it was in use until now.
    pub(crate) fn mount(
        disk: Arc<dyn Disk>,
        options: Options,
        writing: Writing,
        taken_over: Option<Predecessor>,
        claim: Option<Claim>,
    ) -> Result<Self> {
        let properties = disk.properties();
        if properties.read_only {
            return Err(Error::ReadOnly);
        }
        let mut super_ = read_superblock(&*disk)?;
        let is_claimed = claim.is_some();
        refuse_what_is_not_written(&super_, &properties, is_claimed)?;
        if super_.needs_recovery() {
            journal::replay(&disk, &super_)?;
            super_ = read_superblock(&*disk)?;
            refuse_what_is_not_written(&super_, &properties, is_claimed)?;
        }
        let journal = match super_.journal {
            Some(_) => Some(Journal::new(Log::find(disk.clone(), &super_)?)),
            None => None,
        };
        let mut volume = Self::of(disk.clone(), options, super_);
        let super_ = &volume.super_;
        let is_clean = super_.clean && !super_.errors;
        let clean = taken_over.as_ref().map_or(is_clean, |before| before.was_clean);
        let groups = Groups::load(&volume.store, super_)?;
        let outbox = Outbox::new(disk, super_.block_bytes);
        let protocol = protocol::of(super_, &properties, journal);
        let mut writer = Writer::new(protocol, groups, &writing, clean);
        writer.taken_over = taken_over.is_some();
        writer.marked = writer.taken_over && clean && !is_clean;
        writer.quotas = Quotas::of(super_)?;
        let mut writing = WriteSide::new(writer, outbox, writing);
        writing.claim = claim;
        volume.writing = Some(writing);
        let first = volume.super_.last_orphan;
        volume.transact(|tx| {
            // There is nothing yet that would wait for it.
            tx.may_wait = true;
            tx.look_at_quotas()?;
            tx.process_orphans(first)?;
            tx.process_orphan_file()
        })?;
        if let Some(before) = taken_over {
            volume.transact(|tx| {
                tx.may_wait = true;
                tx.find_nameless(before.clone())
            })?;
        } else if !clean {
            volume.transact(|tx| {
                tx.may_wait = true;
                tx.recount()
            })?;
        }
        Ok(volume)
    }

    /// A volume whose journal is being made good, on a disk in memory: nothing of it is looked at
    /// before, and it is not said to be in use.
    pub(crate) fn for_recovery(
        disk: Arc<dyn Disk>,
        options: Options,
        writing: Writing,
        super_: &Superblock,
    ) -> Result<Self> {
        // Nothing is written but what is in memory, or what is claimed.
        refuse_what_is_not_written(super_, &disk.properties(), true)?;
        let mut volume = Self::of(disk.clone(), options, super_.clone());
        let groups = Groups::load(&volume.store, super_)?;
        let outbox = Outbox::new(disk, super_.block_bytes);
        let mut writer = Writer::new(Box::new(AtomicGroups), groups, &writing, true);
        writer.marked = true;
        volume.writing = Some(WriteSide::new(writer, outbox, writing));
        Ok(volume)
    }

    /// Takes a volume that was closed into use again.
    pub(crate) fn reopen_now(&self) -> Result<()> {
        let writing = self.writing.as_ref().ok_or(Error::ReadOnly)?;
        if writing.claim.is_some() {
            let feature = "the volume guards against two hosts (mmp), and was given back: unmount it \
                           and mount it again";
            return Err(Error::Unsupported { feature: feature.to_owned() });
        }
        let mut writer = writing.gate.write();
        match writer.stopped() {
            Some(Stop::Failed(_)) => Err(Error::ReadOnly),
            Some(Stop::Closed) => {
                writer.set_stopped(None);
                writer.marked = false;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Transaction<'_> {
    /// Says on disk that the volume is in use, if it does not yet: whatever is sealed next
    /// follows that. Nothing but that changes, whatever has changed in memory.
    pub(crate) fn take_into_use(&mut self) -> Result<()> {
        if self.writer.marked {
            return Ok(());
        }
        self.writer.marked = true;
        let (block, at) = self.volume.super_.place();
        let now = seconds_of(self.now);
        let recovers = self.writer.protocol.recovers();
        let mark = |bytes: &mut Data| {
            let bytes = bytes.make_mut().get_mut(at..).unwrap_or_default();
            RawSuperblock::view_mut(bytes).map(|raw| {
                if recovers {
                    raw.need_recovery(now);
                } else {
                    raw.mark_in_use(now);
                }
                raw.balance();
            })
        };
        // As a change of its own, so that the block is in the overlay.
        self.change_super(|_| Ok(()))?;
        let mut blocks = self.volume.store.overlay.change();
        let Some(buffer) = blocks.metadata.get_mut(&block.0) else {
            return Err(Error::Misuse("a superblock that is not in memory"));
        };
        mark(&mut buffer.now)?;
        let mut marked = buffer.now.clone();
        if let State::Changed(base) = &mut buffer.state {
            mark(base)?;
            marked = base.clone();
        }
        drop(blocks);
        let stages = vec![Stage::from([(block.0, marked)])];
        let (after, needed) = (After::Needed, Some(0));
        let (contents, freed, placed) = (vec![], Freed::default(), vec![]);
        self.seal(Sealed { after, stages, needed, contents, freed, placed }).map(drop)
    }

    /// On a volume that was not unmounted properly: counts what is free, and frees what was
    /// unlinked but still open. Inodes that are dead and that names lead to are used from now
    /// on, as are dead ones that are marked so: until `e2fsck` takes the names away, they must
    /// not lead to another file one day.
    fn recount(&mut self) -> Result<()> {
        let mut living = vec![0u64; index(u64::from(self.volume.super_.inodes)) / 64 + 1];
        let (mut dirs, mut open) = (vec![InodeNumber::ROOT], Vec::new());
        for inode in self.used_inodes()? {
            let of = |it: &Slot<'_>| (it.links(), it.mode(), it.deleted());
            match self.read_slot(inode, of)? {
                (0, mode, 0) if mode != 0 => open.push(inode),
                (0, ..) => {}
                (_, mode, _) => {
                    let (word, bit) = place_of(inode);
                    living.get_mut(word).into_iter().for_each(|word| *word |= bit);
                    if Kind::from_mode(mode.into()) == Some(Kind::Directory) {
                        dirs.push(inode);
                    }
                }
            }
        }
        let named = self.names_of_the_dead(&dirs, &living);
        for inode in open {
            if !named.contains(&inode) {
                self.delete(inode)?;
            }
        }
        for inode in named {
            self.set_aside(inode)?;
        }
        Ok(())
    }

    /// The inodes that names lead to and that are not `living`. What cannot be read is left out:
    /// nothing can be looked up there either.
    fn names_of_the_dead(&self, dirs: &[InodeNumber], living: &[u64]) -> BTreeSet<InodeNumber> {
        let super_ = &self.volume.super_;
        let mut named = BTreeSet::new();
        let is_dead = |inode: &InodeNumber| {
            let (word, bit) = place_of(*inode);
            let is_living = living.get(word).is_some_and(|word| word & bit != 0);
            (super_.first_inode.0..=super_.inodes).contains(&inode.0) && !is_living
        };
        // A block belongs to one directory; a damaged volume may say otherwise.
        let mut blocks_left = super_.blocks;
        for dir in dirs {
            let Ok(node) = self.directory(*dir) else { continue };
            if node.is_inline() {
                let Ok(inside) = self.inside(&node) else { continue };
                let dead = inside.parts().into_iter().flat_map(|part| targets(part.entries));
                named.extend(dead.filter(is_dead));
                continue;
            }
            for nth in 0..self.volume.directory_blocks(&node) {
                if blocks_left == 0 {
                    log::warn!("directories have more blocks than the volume: run e2fsck on it");
                    return named;
                }
                blocks_left -= 1;
                let Ok(Some((_, block))) = self.names_in(&node, nth) else { continue };
                named.extend(targets(&block).filter(is_dead));
            }
        }
        named
    }
}

fn refuse_what_is_not_written(
    super_: &Superblock,
    disk: &Properties,
    is_claimed: bool,
) -> Result<()> {
    if let Some(feature) = super_.read_only_reason(is_claimed) {
        return Err(Error::Unsupported { feature });
    }
    if let Some(journal) = super_.external_journal() {
        let feature = format!(
            "writing needs: the journal, which is on another device ({journal}); Linux takes it by \
             mount -o journal_path=JOURNAL"
        );
        return Err(Error::Unsupported { feature });
    }
    if let Some(rule) = broken(Asker::Writer, super_.features(), super_.inode_bytes).next() {
        let feature = format!("writing needs: another set of features: {rule}");
        return Err(Error::Unsupported { feature });
    }
    if super_.len_bytes() > disk.len_bytes {
        let feature = "writing needs: all of the volume; its disk is shorter".to_owned();
        return Err(Error::Unsupported { feature });
    }
    if super_.block_bytes < disk.sector_bytes {
        let feature = format!("writing needs: blocks of {} bytes", disk.sector_bytes);
        return Err(Error::Unsupported { feature });
    }
    Ok(())
}

/// The bit of an inode: word and bit.
fn place_of(inode: InodeNumber) -> (usize, u64) {
    (index(u64::from(inode.0 / 64)), 1 << (inode.0 % 64))
}
