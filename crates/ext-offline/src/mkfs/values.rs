//! Attribute values of a new volume in EA inodes (`ea_inode`).
//!
//! ```text
//!   node | entry ──▶ inode | flag EA_INODE | one entry | hash | value |
//! ```
//! Law 1: a value moves only if the attributes of a node do not fit otherwise.
//! Law 2: each value has one entry, so xattr blocks with such an entry are not shared.
//! Law 3: EA inodes follow the other system files, in the order of the nodes.

use std::collections::BTreeSet;

use super::FormatOptions;
use super::LOST_FOUND_INODE;
use super::ea_value::EaInodeValue;
use super::layout::Layout;
use super::tree::{NodeId, Tree};
use crate::InodeNumber;
use crate::format::features::{Compatible, Incompatible};
use crate::format::quota::QuotaType;
use crate::format::xattr::{NewXattr, block_capacity, inode_capacity};
use crate::units::{saturating_u32, saturating_usize};

/// Maximum value length in bytes.
const MAX_VALUE_BYTES: usize = 64 << 10;

/// Returns the inodes of system files between the reserved ones and the EA inodes.
pub(super) fn system_inodes_before_ea_inodes(options: &FormatOptions) -> u32 {
    let has_orphans = options.compatible.contains(Compatible::ORPHAN_FILE);
    let has_projects = options.quota_kinds().any(|kind| kind == QuotaType::Project);
    u32::from(has_orphans).saturating_add(u32::from(has_projects))
}

/// Returns how many attributes go into the inode, if the others fit in one block.
pub(super) fn attributes_in_inode(all: &[NewXattr], layout: &Layout) -> Option<usize> {
    let fits = |list: &[NewXattr], room: usize| {
        list.iter().map(NewXattr::entry_and_value_bytes).fold(0, usize::saturating_add) <= room
    };
    let body = inode_capacity(layout.super_.inode_bytes);
    let in_body = (0..=all.len()).rev().find(|it| all.get(..*it).is_some_and(|it| fits(it, body)));
    let rest = all.get(in_body?..)?;
    fits(rest, block_capacity(layout.super_.block_bytes)).then_some(in_body?)
}

/// Moves values that do not fit to EA inodes, the longest first.
pub(super) fn move_values_to_ea_inodes(layout: &Layout, tree: &mut Tree) {
    if !layout.options.incompatible.contains(Incompatible::EA_INODE) {
        return;
    }
    let first =
        (LOST_FOUND_INODE + 1).saturating_add(system_inodes_before_ea_inodes(&layout.options));
    for id in reachable_nodes(tree) {
        loop {
            let nth = saturating_u32(tree.values.len() as u64);
            let Some(node) = tree.node_mut(id) else { break };
            if attributes_in_inode(&node.attributes, layout).is_some() {
                break;
            }
            let owner = (node.uid, node.gid);
            let candidates = node.attributes.iter_mut();
            let candidates =
                candidates.filter(|it| (1..=MAX_VALUE_BYTES).contains(&it.value().len()));
            let Some(longest) = candidates.max_by_key(|it| it.value().len()) else { break };
            let bytes = longest.value().to_vec();
            let hash = layout.super_.value_seed.update(&bytes).value();
            *longest = longest.with_ea_inode(InodeNumber(first.saturating_add(nth)), hash);
            tree.values.push(EaInodeValue { bytes, owner, hash });
        }
    }
}

/// Returns all reachable nodes, with the root.
fn reachable_nodes(tree: &Tree) -> BTreeSet<NodeId> {
    let mut seen = BTreeSet::from([NodeId::ROOT]);
    let mut stack = vec![NodeId::ROOT];
    while let Some(dir) = stack.pop() {
        stack.extend(tree.names(dir).map(|(_, id)| id).filter(|id| seen.insert(*id)));
    }
    seen
}

/// Returns how many attributes have EA inodes, and the blocks of those.
pub(super) fn count_ea_inodes(attributes: &[NewXattr], layout: &Layout) -> (u32, u64) {
    let lens = attributes.iter().filter_map(NewXattr::ea_inode).map(|it| it.len);
    lens.fold((0, 0), |(count, blocks), len| {
        (
            count.saturating_add(1),
            blocks.saturating_add(
                layout.round_to_clusters(layout.blocks_for_bytes(len.into()).into()),
            ),
        )
    })
}

/// Returns the reason why attributes do not fit, with a remedy.
pub(super) fn unfit_reason(all: &[NewXattr], layout: &Layout) -> &'static str {
    let has_values = layout.options.incompatible.contains(Incompatible::EA_INODE);
    let needed = all.iter().map(NewXattr::entry_and_value_bytes).fold(0, usize::saturating_add);
    let is_small = layout.super_.block_bytes < 4096;
    match needed <= block_capacity(4096) && is_small {
        true => "its extended attributes do not fit in one block; larger ones (-b 4096) have room",
        false if has_values => "its extended attributes do not fit, even with values elsewhere",
        false if saturating_usize(needed as u64) <= MAX_VALUE_BYTES => {
            "its extended attributes do not fit in one block; with -O ea_inode large values have \
             inodes of their own"
        }
        false => "its extended attributes do not fit in one block",
    }
}
