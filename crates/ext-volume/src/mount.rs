//! Opening a volume, and mounting it for writing.
//!
//! Law: a volume that is opened and not changed keeps every byte. The first change is preceded on
//! disk by the "in use" mark.

use std::collections::BTreeSet;
use std::sync::Arc;

use draconis_device::{Atomic, Disk, Properties};
use draconis_types::{AccessTimes, FileType, Time};

use crate::alloc::Groups;
use crate::backup::{SuperblockPlace, UsableVolume, open_superblock};
use crate::blocks::uncached::read_superblock;
use crate::commit::protocol::CommitProtocol;
use crate::commit::protocol::atomic::AtomicProtocol;
use crate::commit::protocol::journal::JournalProtocol;
use crate::commit::protocol::ordered::OrderedProtocol;
use crate::commit::protocol::unordered::UnorderedProtocol;
use crate::commit::queue::CommitQueue;
use crate::dir::edit::referenced_inodes;
use crate::format::inode_slot::InodeSlot;
use crate::format::requirements::{Enforcer, violated_rules};
use crate::format::superblock::Superblock;
use crate::journal::{self, ReplayedVolume};
use crate::mmp::MmpClaim;
use crate::options::{OpenOptions, WriteOptions};
use crate::quota::Quotas;
use crate::resume::CrashedProcess;
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::write_context::{WriteContext, WriteState};
use crate::{Error, InodeNumber, Result};

impl Volume {
    /// Opens the volume on `disk` for reading. A damaged descriptor of a group is replaced by a
    /// backup. A journal that needs recovery is replayed in memory, up to its first damage; the disk
    /// does not change.
    ///
    /// # Errors
    /// [`Error::NotExt`]; [`Error::Unsupported`] naming all unsupported features;
    /// [`Error::Corrupt`] for an invalid superblock; [`Error::Io`].
    pub fn open(disk: Arc<dyn Disk>, options: OpenOptions) -> Result<Self> {
        let super_ = read_superblock(&*disk)?;
        Self::open_usable(UsableVolume { disk, super_, substitute: None }, options)
    }

    /// [`Volume::open`] with the superblock at `place`, or with a backup of one that is damaged. A
    /// disk that was formatted anew may still have backups of an old volume.
    ///
    /// # Errors
    /// As [`Volume::open`]; [`Error::Corrupt`] if there is no valid backup at `place`.
    pub fn open_damaged(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        place: &SuperblockPlace,
    ) -> Result<Self> {
        Self::open_usable(open_superblock(disk, place)?, options)
    }

    fn open_usable(usable: UsableVolume, options: OpenOptions) -> Result<Self> {
        let UsableVolume { mut disk, mut super_, substitute } = usable;
        let mut damage = None;
        if super_.needs_recovery() {
            ReplayedVolume { disk, super_, damage, .. } = journal::open_replayed(disk, &super_)?;
        }
        let disk_bytes = disk.properties().len_bytes;
        if super_.len_bytes() > disk_bytes {
            let (volume, disk) = (super_.len_bytes(), disk_bytes);
            log::warn!("the volume has {volume} bytes, its image only {disk}: the rest is missing");
        }
        let mut volume = Self::open_unreplayed(disk, options, super_);
        volume.journal_damage = damage;
        volume.substitute = substitute;
        if let Some(reason) = &volume.substitute {
            log::warn!("{reason}");
        }
        if let Some(reason) = volume.journal_damage_text() {
            log::warn!("{reason}");
        }
        // Descriptors without checksums may be valid and wrong.
        if volume.reader.directory(InodeNumber::ROOT).is_err() {
            volume.reader.prefers_backups = true;
            volume.reader.prefers_backups = volume.reader.directory(InodeNumber::ROOT).is_ok();
            if volume.reader.prefers_backups {
                log::warn!("the group descriptors are damaged: their backups are used");
            }
        }
        Ok(volume)
    }

    /// Mounts a volume for writing. With `crashed`, resumes it after a crash.
    pub(crate) fn mount(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
        crashed: Option<CrashedProcess>,
        claim: Option<MmpClaim>,
    ) -> Result<Self> {
        let properties = disk.properties();
        if properties.read_only {
            return Err(Error::ReadOnly);
        }
        let mut super_ = read_superblock(&*disk)?;
        let is_claimed = claim.is_some();
        check_writable(&super_, &properties, is_claimed)?;
        if super_.needs_recovery() {
            journal::replay(&disk, &super_)?;
            super_ = read_superblock(&*disk)?;
            check_writable(&super_, &properties, is_claimed)?;
        }
        let journal = match super_.journal {
            Some(_) => Some(JournalProtocol::new(journal::open_journal(disk.clone(), &super_)?)),
            None => None,
        };
        let mut volume = Self::open_unreplayed(disk.clone(), options, super_);
        let super_ = &volume.reader.super_;
        let is_clean = super_.clean && !super_.errors;
        let clean = crashed.as_ref().map_or(is_clean, |before| before.was_clean);
        let groups = Groups::load(&volume.reader.store, super_)?;
        let commit_queue = CommitQueue::new(disk, super_.block_bytes);
        let protocol = choose_protocol(super_, &properties, journal);
        let mut writer = WriteState::new(protocol, groups, &writing, clean);
        writer.is_resumed = crashed.is_some();
        writer.is_marked_in_use = writer.is_resumed && clean && !is_clean;
        writer.quotas = Quotas::from_superblock(super_)?;
        let mut writing = WriteContext::new(writer, commit_queue, writing);
        writing.claim = claim;
        volume.set_writing(writing);
        let first = volume.reader.super_.last_orphan;
        volume.transact(|tx| {
            // No other thread can wait for the lock yet.
            tx.may_block = true;
            tx.check_quota_files()?;
            tx.process_orphans(first)?;
            tx.process_orphan_file()
        })?;
        if let Some(before) = crashed {
            volume.transact(|tx| {
                tx.may_block = true;
                tx.find_orphans(before.clone())
            })?;
        } else if !clean {
            volume.transact(|tx| {
                tx.may_block = true;
                tx.rebuild_free_counts()
            })?;
        }
        Ok(volume)
    }

    /// Opens a volume for fast-commit replay on an in-memory disk: no orphan processing, no "in
    /// use" mark.
    pub(crate) fn for_recovery(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
        super_: &Superblock,
    ) -> Result<Self> {
        // Only memory is written, or a volume with an MMP claim.
        check_writable(super_, &disk.properties(), true)?;
        let mut volume = Self::open_unreplayed(disk.clone(), options, super_.clone());
        let groups = Groups::load(&volume.reader.store, super_)?;
        let commit_queue = CommitQueue::new(disk, super_.block_bytes);
        let mut writer = WriteState::new(Box::new(AtomicProtocol), groups, &writing, true);
        writer.is_marked_in_use = true;
        volume.set_writing(WriteContext::new(writer, commit_queue, writing));
        Ok(volume)
    }

    /// Deletes or cuts the orphans of the volume on `disk`, which is in memory, at the time `now`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage on the way; `disk` is changed in part then.
    pub fn process_orphans_in_memory(
        disk: Arc<dyn Disk>,
        super_: &Superblock,
        now: Time,
    ) -> Result<()> {
        let writing = WriteOptions {
            clock: Arc::new(move || now),
            dirty_bytes: 64 << 20,
            atime: AccessTimes::Never,
            discard: false,
        };
        let volume = Self::for_recovery(disk, OpenOptions::default(), writing, super_)?;
        volume.transact(|tx| {
            tx.may_block = true;
            tx.writer.quotas = Quotas::from_superblock(&tx.volume.super_)?;
            tx.check_quota_files()?;
            tx.process_orphans(tx.volume.super_.last_orphan)?;
            tx.process_orphan_file()
        })?;
        volume.sync()
    }
}

impl Transaction<'_> {
    /// Recounts the free space of a volume that was not cleanly unmounted, and deletes orphans.
    /// Unused inodes that names reference are quarantined as used, until `e2fsck` removes the
    /// names: otherwise a name would reference another file one day.
    fn rebuild_free_counts(&mut self) -> Result<()> {
        let mut living = vec![
            0u64;
            (saturating_usize(u64::from(self.volume.super_.inodes)) / 64)
                .saturating_add(1)
        ];
        let (mut dirs, mut open) = (vec![InodeNumber::ROOT], Vec::new());
        for inode in self.used_inodes()? {
            let of = |it: &InodeSlot<'_>| (it.links(), it.mode(), it.deletion_time());
            match self.read_slot(inode, of)? {
                (0, mode, 0) if mode != 0 => open.push(inode),
                (0, ..) => {}
                (_, mode, _) => {
                    let (word, bit) = bit_of_inode(inode);
                    living.get_mut(word).into_iter().for_each(|word| *word |= bit);
                    if FileType::from_mode(mode.into()) == Some(FileType::Directory) {
                        dirs.push(inode);
                    }
                }
            }
        }
        let named = self.find_names_of_unused_inodes(&dirs, &living);
        for inode in open {
            if !named.contains(&inode) {
                self.evict_inode(inode)?;
            }
        }
        for inode in named {
            self.quarantine_inode(inode)?;
        }
        Ok(())
    }

    /// Returns the inodes that names reference and that are not `living`. Unreadable directories
    /// are skipped: lookups fail there, too.
    fn find_names_of_unused_inodes(
        &self,
        dirs: &[InodeNumber],
        living: &[u64],
    ) -> BTreeSet<InodeNumber> {
        let super_ = &self.volume.super_;
        let mut named = BTreeSet::new();
        let is_dead = |inode: &InodeNumber| {
            let (word, bit) = bit_of_inode(*inode);
            let is_living = living.get(word).is_some_and(|word| word & bit != 0);
            (super_.first_inode.0..=super_.inodes).contains(&inode.0) && !is_living
        };
        // A block belongs to one directory; a damaged volume may claim otherwise.
        let mut blocks_left = super_.blocks;
        for dir in dirs {
            let Ok(node) = self.directory(*dir) else { continue };
            if node.is_inline() {
                let Ok(inside) = self.read_inline(&node) else { continue };
                let dead =
                    inside.dir_parts().into_iter().flat_map(|part| referenced_inodes(part.entries));
                named.extend(dead.filter(is_dead));
                continue;
            }
            for nth in 0..self.volume.directory_blocks(&node) {
                if blocks_left == 0 {
                    log::warn!("directories have more blocks than the volume: run e2fsck on it");
                    return named;
                }
                blocks_left = blocks_left.saturating_sub(1);
                let Ok(Some((_, block))) = self.read_directory_block(&node, nth) else { continue };
                named.extend(referenced_inodes(&block).filter(is_dead));
            }
        }
        named
    }
}

/// Returns the commit protocol for a volume on a disk with these properties and this journal.
fn choose_protocol(
    super_: &Superblock,
    disk: &Properties,
    journal: Option<JournalProtocol>,
) -> Box<dyn CommitProtocol> {
    match (disk.atomic, journal, OrderedProtocol::for_volume(super_)) {
        (Atomic::AgainstPowerCut, ..) => Box::new(AtomicProtocol),
        (Atomic::None | Atomic::AgainstDeath, Some(journal), _) => Box::new(journal),
        (Atomic::None | Atomic::AgainstDeath, None, Some(ordered)) => Box::new(ordered),
        (Atomic::None | Atomic::AgainstDeath, None, None) => Box::new(UnorderedProtocol),
    }
}

fn check_writable(super_: &Superblock, disk: &Properties, is_claimed: bool) -> Result<()> {
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
    if let Some(rule) =
        violated_rules(Enforcer::Writer, super_.features(), super_.inode_bytes).next()
    {
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

/// Returns the word and bit of an inode in a bit set.
fn bit_of_inode(inode: InodeNumber) -> (usize, u64) {
    (saturating_usize(u64::from(inode.0 / 64)), 1 << (inode.0 % 64))
}
