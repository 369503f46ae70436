//! Block maps, built anew from what is valid in them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use zerocopy::FromBytes;

use super::Fixer;
use crate::check::blocks::walk_map;
use crate::format::extent::{self, Extent, INIT_MAX_LEN};
use crate::format::indirect::addresses_per_block;
use crate::format::inode::{POINTERS, RawInode, flags};
use crate::format::inode_slot::InodeSlot;
use crate::format::put32;
use crate::map::build_extents::{build_extent_tree, nodes_needed};
use crate::map::pointers::{IndirectPath, block_to_path};
use crate::map::{BlockLocation, MapVisitor};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileId, FsBlock, Result};

/// Most blocks of an unwritten extent.
const MAX_UNWRITTEN: u32 = INIT_MAX_LEN - 1;

/// Contiguous blocks of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MappedRun {
    pub(super) from: u32,
    pub(super) start: u64,
    pub(super) blocks: u32,
    pub(super) unwritten: bool,
}

impl MappedRun {
    /// Iterates over the blocks: in the file and in the volume.
    fn blocks(&self) -> impl Iterator<Item = (u32, u64)> + use<> {
        let Self { from, start, blocks, .. } = *self;
        (0..blocks).map(move |nth| (from.saturating_add(nth), start.saturating_add(nth.into())))
    }
}

/// The valid runs of a map, up to a number of blocks.
struct RunCollector {
    runs: Vec<MappedRun>,
    blocks_left: u64,
}

impl MapVisitor for RunCollector {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        let (start, unwritten) = match place {
            BlockLocation::Mapped(FsBlock(start)) => (start, false),
            BlockLocation::Unwritten(FsBlock(start)) => (start, true),
            BlockLocation::Hole | BlockLocation::Damaged(_) => return ControlFlow::Continue(()),
        };
        let Some(left) = self.blocks_left.checked_sub(blocks) else {
            self.blocks_left = 0;
            return ControlFlow::Break(());
        };
        self.blocks_left = left;
        if let (Ok(from), Ok(blocks)) = (u32::try_from(at), u32::try_from(blocks)) {
            self.runs.push(MappedRun { from, start, blocks, unwritten });
        }
        ControlFlow::Continue(())
    }
}

impl Fixer<'_> {
    /// Returns the valid part of an inode's map, in file order.
    pub(super) fn runs(&self, number: u32, slot: &[u8]) -> Result<Vec<MappedRun>> {
        let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
        let mut found = RunCollector { runs: vec![], blocks_left: self.blocks_left.get() };
        walk_map(self.check()?, number, raw, &mut found)?;
        self.blocks_left.set(found.blocks_left);
        if found.blocks_left == 0 {
            let feature = "files that claim many times the blocks of the volume".to_owned();
            return Err(Error::Unsupported { feature });
        }
        Ok(found.runs)
    }

    /// Replaces the map of an inode, in its bytes and in new blocks.
    pub(super) fn set_map(
        &mut self,
        number: u32,
        slot: &mut [u8],
        runs: &[MappedRun],
    ) -> Result<()> {
        let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
        let is_tree = raw.i_flags.get() & flags::EXTENTS != 0;
        let file = FileId { inode: number, generation: raw.i_generation.get() };
        let pointers = match is_tree {
            true => self.write_extents(file, runs)?,
            false => self.write_pointers(runs)?,
        };
        InodeSlot::from_bytes(slot)?.set_pointers(pointers);
        Ok(())
    }

    fn write_extents(&mut self, file: FileId, runs: &[MappedRun]) -> Result<[u32; POINTERS]> {
        let check = self.check()?;
        let mut extents: Vec<Extent> = vec![];
        for run in runs {
            let most = if run.unwritten { MAX_UNWRITTEN } else { INIT_MAX_LEN };
            if let Some(last) = extents.last_mut()
                && last.end() == u64::from(run.from)
                && last.start.0.saturating_add(last.blocks.into()) == run.start
                && last.is_unwritten == run.unwritten
                && last.blocks.saturating_add(run.blocks) <= most
            {
                last.blocks = last.blocks.saturating_add(run.blocks);
                continue;
            }
            extents.push(Extent {
                from: run.from,
                blocks: run.blocks,
                start: FsBlock(run.start),
                is_unwritten: run.unwritten,
            });
        }
        let block_bytes = check.super_.block_bytes;
        let nodes = nodes_needed(extents.len() as u64, block_bytes);
        let places = self.allocate(saturating_usize(nodes))?;
        let (root, nodes) = build_extent_tree(&extents, block_bytes, &mut places.into_iter())
            .ok_or(Error::NoSpace)?;
        for (at, mut bytes) in nodes {
            if let Some(seed) = check.super_.file_checksum_seed(file) {
                extent::set_checksum(&mut bytes, seed);
            }
            self.put(at, bytes)?;
        }
        Ok(root)
    }

    fn write_pointers(&mut self, runs: &[MappedRun]) -> Result<[u32; POINTERS]> {
        let block_bytes = self.check()?.super_.block_bytes;
        let fan_out = addresses_per_block(block_bytes);
        let too_far = Error::corrupt("block map: a block beyond its reach");
        let mut root = [0; POINTERS];
        // Each indirect block by its slot in the inode, its height and its number on that level.
        let mut nodes: BTreeMap<(usize, u32, u64), (u64, Vec<u8>)> = BTreeMap::new();
        for run in runs {
            for nth in 0..run.blocks {
                let at = u64::from(run.from).saturating_add(nth.into());
                let to = FsBlock(run.start.saturating_add(nth.into())).to_u32()?;
                let IndirectPath { slot, levels, offset } =
                    block_to_path(at, fan_out).ok_or(too_far.clone())?;
                let mut target = to;
                for height in 1..=levels {
                    let span = fan_out.saturating_pow(height);
                    let key = (slot, height, offset.checked_div(span).unwrap_or(0));
                    let below = fan_out.saturating_pow(height.saturating_sub(1));
                    let index = offset.checked_div(below).unwrap_or(0);
                    let index = index.checked_rem(fan_out).unwrap_or(0);
                    let (place, bytes) = match nodes.entry(key) {
                        Entry::Occupied(node) => node.into_mut(),
                        Entry::Vacant(node) => {
                            let place = self.allocate(1)?.first().copied().ok_or(Error::NoSpace)?;
                            node.insert((place, vec![0; saturating_usize(block_bytes.into())]))
                        }
                    };
                    let _ = put32(bytes, saturating_usize(index).saturating_mul(4), target);
                    target = FsBlock(*place).to_u32()?;
                }
                *root.get_mut(slot).ok_or(too_far.clone())? = target;
            }
        }
        for (at, bytes) in nodes.into_values() {
            self.put(at, bytes)?;
        }
        Ok(root)
    }

    /// Builds the map of an inode anew. What lies in a cluster of the `shared` blocks or of metadata
    /// is copied, with all that the file has beside it: a cluster holds blocks of one place.
    pub(super) fn rebuild_map(
        &mut self,
        number: u32,
        slot: &mut [u8],
        shared: &BTreeSet<u64>,
    ) -> Result<()> {
        let check = self.check()?;
        let ratio = check.super_.cluster_blocks.max(1);
        let place_of = |from: u32| {
            let within = from.checked_rem(ratio).unwrap_or(0);
            (from.saturating_sub(within), u64::from(within))
        };
        let shared: BTreeSet<u64> = shared.iter().map(|at| check.cluster_index(*at)).collect();
        let old = self.runs(number, slot)?;
        // New clusters, by the first block of the file in them.
        let mut copies: BTreeMap<u32, u64> = BTreeMap::new();
        let mut last = None;
        for (from, at) in old.iter().flat_map(MappedRun::blocks) {
            let (first, within) = place_of(from);
            let cluster = check.cluster_index(at);
            let is_split = last.is_some_and(|(it, other)| it == first && other != cluster);
            last = Some((first, cluster));
            let is_aligned = check.block_index(at).checked_rem(ratio.into()) == Some(within);
            if is_split
                || !is_aligned
                || shared.contains(&cluster)
                || check.metadata.contains(check.block_index(at))
            {
                copies.insert(first, 0);
            }
        }
        for new in copies.values_mut() {
            *new = self.allocate(1)?.first().copied().ok_or(Error::NoSpace)?;
        }
        let mut runs = vec![];
        for run in &old {
            for (from, at) in run.blocks() {
                let (first, within) = place_of(from);
                let start = match copies.get(&first) {
                    Some(new) => {
                        let new = new.saturating_add(within);
                        self.put(new, self.block(at)?)?;
                        new
                    }
                    None => at,
                };
                match runs.last_mut() {
                    Some(MappedRun { from: first, start: to, blocks, unwritten })
                        if first.saturating_add(*blocks) == from
                            && to.saturating_add(u64::from(*blocks)) == start
                            && *unwritten == run.unwritten
                            && *blocks < MAX_UNWRITTEN =>
                    {
                        *blocks = blocks.saturating_add(1);
                    }
                    _ => runs.push(MappedRun { from, start, blocks: 1, unwritten: run.unwritten }),
                }
            }
        }
        self.set_map(number, slot, &runs)
    }

    /// Cuts the map of a file behind its size.
    pub(super) fn cut_map(&mut self, number: u32, slot: &mut [u8], size: u64) -> Result<()> {
        let block_bytes = u64::from(self.check()?.super_.block_bytes).max(1);
        let end = saturating_u32(size.div_ceil(block_bytes));
        let clip = |run: MappedRun| {
            let blocks = run.blocks.min(end.saturating_sub(run.from));
            (blocks > 0).then_some(MappedRun { blocks, ..run })
        };
        let runs: Vec<_> = self.runs(number, slot)?.into_iter().filter_map(clip).collect();
        self.set_map(number, slot, &runs)
    }
}
