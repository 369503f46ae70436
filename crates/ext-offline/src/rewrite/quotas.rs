//! Quota updates: a rebuilt map may use more or fewer blocks.

use super::VolumeRewrite;
use super::maps::MovedRun;
use crate::format::features::ReadOnlyCompatible;
use crate::format::quota::{
    BLOCK_BYTES, QuotaHeader, QuotaType, QuotaUsage, ROOT_BLOCK, RawEntries, TREE_LEVELS, reference,
};
use crate::offline::Result;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, InodeNumber};

impl VolumeRewrite<'_> {
    /// Adds the usage changes of owners to the moved quota files.
    pub(super) fn count_quotas(&mut self) -> Result<()> {
        let has_quotas = self.old.super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
        if !has_quotas || self.redo.is_dry_run() {
            return Ok(());
        }
        let block_bytes = i64::from(self.old.super_.block_bytes);
        let files = std::mem::take(&mut self.quota_files);
        for (nth, kind) in QuotaType::ALL.into_iter().enumerate() {
            let Some(inode) = self.old.super_.quotas.get(nth).filter(|inode| **inode != 0) else {
                continue;
            };
            let Some((size, pieces)) = files.get(inode) else { continue };
            let file = RewrittenQuotaFile { inode: InodeNumber(*inode), size: *size, pieces };
            for (ids, blocks) in &self.usage.clone() {
                let usage = QuotaUsage { inodes: 0, bytes: blocks.saturating_mul(block_bytes) };
                if let Some(id) = ids.get(nth) {
                    self.add_usage(&file, kind, *id, usage)?;
                }
            }
        }
        Ok(())
    }

    fn add_usage(
        &mut self,
        file: &RewrittenQuotaFile<'_>,
        kind: QuotaType,
        id: u32,
        usage: QuotaUsage,
    ) -> Result<()> {
        let of_file = |error: Error| error.with_inode(file.inode);
        let read = |redo: &crate::redo_log::RedoLog<'_>, node: u32| -> crate::Result<Vec<u8>> {
            let (block, at) = file.block_location(node, self.old.super_.block_bytes)?;
            let bytes = redo.block(block)?;
            Ok(bytes
                .get(at..at.saturating_add(saturating_usize(BLOCK_BYTES.into())))
                .unwrap_or_default()
                .to_vec())
        };
        let header = QuotaHeader::check(&read(&self.redo, 0)?, kind, file.size).map_err(of_file)?;
        let mut node = ROOT_BLOCK;
        for level in 0..TREE_LEVELS {
            let bytes = read(&self.redo, node)?;
            match header.check_reference(reference(&bytes, id, level)).map_err(of_file)? {
                Some(below) => node = below,
                // The id has no entry.
                None => return Ok(()),
            }
        }
        let bytes = read(&self.redo, node)?;
        let found = RawEntries::view(&bytes).map_err(of_file)?.find(id);
        let missing = Error::corrupt("quota file: an entry is missing");
        let nth = found.ok_or(of_file(missing))?;
        let (block, at) = file.block_location(node, self.old.super_.block_bytes)?;
        self.redo.modify_block(block, |bytes| {
            let entries = bytes
                .get_mut(at..at.saturating_add(saturating_usize(BLOCK_BYTES.into())))
                .unwrap_or_default();
            RawEntries::view_mut(entries).map(|entries| entries.add_usage_at(nth, usage))
        })??;
        Ok(())
    }
}

/// A quota file.
struct RewrittenQuotaFile<'a> {
    inode: InodeNumber,
    size: u64,
    pieces: &'a [MovedRun],
}

impl RewrittenQuotaFile<'_> {
    /// Returns the planned volume block of a quota block, and the offset in it.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn block_location(&self, nth: u32, block_bytes: u32) -> crate::Result<(FsBlock, usize)> {
        let at = u64::from(nth).saturating_mul(u64::from(BLOCK_BYTES));
        let (block, at) = (at / u64::from(block_bytes), at % u64::from(block_bytes));
        let holds = |piece: &&MovedRun| {
            let from = u64::from(piece.from);
            (from..from.saturating_add(piece.blocks.into())).contains(&block)
        };
        let piece = self.pieces.iter().find(holds);
        let hole = Error::corrupt("quota file: a hole").with_inode(self.inode);
        let piece = piece.ok_or(hole)?;
        Ok((
            FsBlock(piece.new.saturating_add(block).saturating_sub(piece.from.into())),
            saturating_usize(at),
        ))
    }
}
