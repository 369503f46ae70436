//! Pass 5: bitmaps and counts, from what the check found in use.

use std::collections::BTreeSet;

use super::Fixer;
use crate::check::bit_set::AtomicBitSet;
use crate::check::counts::used_inodes;
use crate::check::layout::clusters_in_group;
use crate::check::{Problem, What};
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::features::ReadOnlyCompatible;
use crate::format::group::flags;
use crate::units::{saturating_u32, saturating_usize};
use crate::{GroupNumber, Result};

impl Fixer<'_> {
    pub(super) fn fix_bitmaps(&mut self, problems: &[&Problem]) -> Result<()> {
        let check = self.check()?;
        let inodes = used_inodes(check);
        let groups: BTreeSet<u32> =
            problems.iter().filter_map(|it| it.group.map(|group| group.0)).collect();
        for group in groups {
            self.write_group(group, &inodes)?;
        }
        let count = |set: &AtomicBitSet| -> u64 {
            let words = (0..set.len()).step_by(64).map(|at| set.word_from(at));
            words.map(|word| u64::from(word.count_ones())).sum()
        };
        let ratio = u64::from(check.super_.cluster_blocks.max(1));
        let free_blocks = check.used.len().saturating_sub(count(&check.used)).saturating_mul(ratio);
        let free_inodes = u64::from(check.super_.inodes).saturating_sub(count(&inodes));
        self.edit_super(|raw| raw.set_free(free_blocks, free_inodes))??;
        for problem in problems.iter().filter(|it| it.what != What::Quota) {
            self.done(problem, "set to what is in use");
        }
        Ok(())
    }

    /// Writes both bitmaps of a group, and its counts.
    fn write_group(&self, group: u32, inodes: &AtomicBitSet) -> Result<()> {
        let check = self.check()?;
        let super_ = &check.super_;
        let len = saturating_usize(super_.block_bytes.into());
        let bitmap = |set: &AtomicBitSet, start: u64, count: u32| {
            let mut bytes = vec![0; len];
            for (nth, word) in bytes.chunks_mut(8).enumerate() {
                let at = (nth as u64).saturating_mul(64);
                let bits = set.word_from(start.saturating_add(at));
                word.copy_from_slice(bits.to_le_bytes().get(..word.len()).unwrap_or_default());
            }
            let all = saturating_u32((len as u64).saturating_mul(8));
            fill(&mut bytes, BitRun { start: count, len: all.saturating_sub(count) }, true);
            bytes
        };
        let clusters = saturating_u32(clusters_in_group(super_, group));
        let first = check.cluster_index(super_.group_start(GroupNumber(group)).0);
        let blocks = bitmap(&check.used, first, clusters);
        let per_group = super_.inodes_per_group;
        let start = u64::from(group).saturating_mul(per_group.into());
        let inodes = bitmap(inodes, start, per_group);
        let used = Bitmap::new(&inodes, per_group);
        let mut end = 0;
        while let Some(one) = used.next_one(end) {
            end = one.saturating_add(used.ones_at(one, u32::MAX));
        }
        let trailing = per_group.saturating_sub(end.min(per_group));
        let directories = (1..=per_group)
            .filter(|nth| {
                let number = saturating_u32(start).saturating_add(*nth);
                check.inode_states.get(number).is_directory()
            })
            .count();
        let lazy = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
        let mut places = None;
        self.edit_group(group, |it| {
            places = Some((it.block_bitmap, it.inode_bitmap));
            it.free_clusters = Bitmap::new(&blocks, clusters).count_zeros();
            it.free_inodes = used.count_zeros();
            it.directories = saturating_u32(directories as u64);
            it.flags &= !flags::BLOCK_UNINIT;
            if end > 0 {
                it.flags &= !flags::INODE_UNINIT;
            }
            it.unused_inodes = if lazy { it.unused_inodes.min(trailing) } else { 0 };
            it.set_block_bitmap_csum(&blocks, super_);
            it.set_inode_bitmap_csum(&inodes, super_);
        })?;
        if let Some((block_bitmap, inode_bitmap)) = places {
            self.put(block_bitmap.0, blocks)?;
            self.put(inode_bitmap.0, inodes)?;
        }
        Ok(())
    }
}
