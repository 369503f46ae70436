//! Building quota files from usage.

use std::collections::{BTreeMap, BTreeSet};

use zerocopy::FromBytes;

use super::{
    BLOCK_BYTES, ENTRIES_PER_BLOCK, QuotaType, QuotaUsage, ROOT_BLOCK, RawEntries, RawQuotaHeader,
    TREE_LEVELS, VERSION, reference, set_reference,
};
use crate::units::{saturating_u32, saturating_usize};

/// Grace period of soft limits: a week, as in Linux.
const GRACE_SECONDS: u32 = 7 * 24 * 60 * 60;

/// Returns the bytes of a file with entries for exactly these ids.
pub fn file_bytes(ids: &BTreeSet<u32>) -> u64 {
    let nodes = |level: u32| {
        let above: BTreeSet<u32> = ids
            .iter()
            .map(|id| id >> TREE_LEVELS.saturating_sub(level).saturating_mul(8))
            .collect();
        above.len() as u64
    };
    let entries = (ids.len() as u64).div_ceil(ENTRIES_PER_BLOCK as u64);
    (1..TREE_LEVELS)
        .map(nodes)
        .sum::<u64>()
        .saturating_add(2)
        .saturating_add(entries)
        .saturating_mul(u64::from(BLOCK_BYTES))
}

/// Builds a quota file of this usage, without limits.
#[allow(clippy::arithmetic_side_effects, reason = "the divisor is a constant")]
pub fn build_quota_file(kind: QuotaType, all: &BTreeMap<u32, QuotaUsage>) -> Vec<u8> {
    let block = saturating_usize(BLOCK_BYTES.into());
    // The header and the root.
    let mut bytes = vec![0; block.saturating_mul(2)];
    let mut room = 0;
    for (id, usage) in all {
        let mut node = ROOT_BLOCK;
        for level in 0..TREE_LEVELS {
            let is_last = level.saturating_add(1) == TREE_LEVELS;
            let next = saturating_u32((bytes.len() / block) as u64);
            let Some(there) = bytes.chunks_exact_mut(block).nth(saturating_usize(node.into()))
            else {
                break;
            };
            let below = match reference(there, *id, level) {
                0 if is_last && room != 0 => room,
                0 => next,
                there => there,
            };
            set_reference(there, *id, level, below);
            if below == next {
                bytes.resize(bytes.len().saturating_add(block), 0);
            }
            node = below;
        }
        let entries = bytes.chunks_exact_mut(block).nth(saturating_usize(node.into()));
        if let Some(Ok(entries)) = entries.map(RawEntries::view_mut) {
            room = if entries.add(*id, *usage) { node } else { 0 };
        }
    }
    let blocks = saturating_u32((bytes.len() / block) as u64);
    if let Ok((raw, _)) = RawQuotaHeader::mut_from_prefix(&mut bytes) {
        raw.dqh_magic.set(kind.magic());
        raw.dqh_version.set(VERSION);
        raw.dqi_bgrace.set(GRACE_SECONDS);
        raw.dqi_igrace.set(GRACE_SECONDS);
        raw.dqi_blocks.set(blocks);
        raw.dqi_free_entry.set(room);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::QuotaHeader;
    use super::*;

    #[test]
    fn built_file_has_predicted_length_and_all_ids() {
        let sparse = (0..40).map(|nth: u32| nth.wrapping_mul(0x0103_0507));
        let sets: [Vec<u32>; 4] =
            [vec![0], (0..600).collect(), vec![0, 255, 256, 65_536, u32::MAX], sparse.collect()];
        for ids in sets {
            let of = |id: u32| QuotaUsage { inodes: 1, bytes: i64::from(id) };
            let all: BTreeMap<u32, QuotaUsage> = ids.iter().map(|id| (*id, of(*id))).collect();
            let bytes = build_quota_file(QuotaType::Group, &all);
            assert_eq!(bytes.len() as u64, file_bytes(&all.keys().copied().collect()));
            let header = QuotaHeader::check(&bytes, QuotaType::Group, bytes.len() as u64).unwrap();
            let block = |nth: u32| bytes.chunks_exact(1024).nth(nth as usize).unwrap();
            for id in ids {
                let node = (0..TREE_LEVELS).fold(ROOT_BLOCK, |node, level| {
                    header.check_reference(reference(block(node), id, level)).unwrap().unwrap()
                });
                let entries = RawEntries::view(block(node)).unwrap();
                let entry = &entries.entries[entries.find(id).unwrap()];
                assert_eq!((entry.dqb_curinodes.get(), entry.dqb_curspace.get()), (1, id.into()));
            }
            let has_room = header.first_free_entry_block != 0
                && RawEntries::view(block(header.first_free_entry_block))
                    .unwrap()
                    .has_free_entry()
                    .unwrap();
            assert_eq!(has_room, !all.len().is_multiple_of(ENTRIES_PER_BLOCK));
        }
    }
}
