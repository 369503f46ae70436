//! A plan, written: contents in the order of the disk, then the tables, then the superblock.
//!
//! ```text
//!   wipe ─flush─▶ contents (threads fill, the disk writes) ─▶ tables of each group ─flush─▶ super ─flush
//! ```
//! Law: memory is bounded whatever the tree holds: so many requests are under way and no more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use draconis_device::{Disk, Group, Ticket, Write};
use draconis_exchange::contract::Kind;
use draconis_exchange::heap::{Block, Private};
use zerocopy::{FromZeros, IntoBytes};

use super::layout::Layout;
use super::plan::{self, Placed, Plan};
use super::tree::{Contents, NodeId, What};
use super::{Error, Result};
use crate::dir::build::Style;
use crate::format::dirent::BlockWriter;
use crate::format::group::RawGroup;
use crate::format::inode::{NewInode, POINTERS, RawInode, device_pointers, flags, target_pointers};
use crate::format::superblock::{self, RawSuperblock};
use crate::format::xattr::{encode_block, encode_body};
use crate::map::build::{self as map, Part};
use crate::units::{index, narrow};
use crate::{FsBlock, GroupNumber};

/// Bytes of one request for contents.
const REQUEST_BYTES: u64 = 1 << 20;
/// Bytes that may be on their way before they are waited for.
const UNDER_WAY_BYTES: u64 = 32 << 20;
/// Threads that read contents. More than there are CPUs: they wait for the source's disk.
const THREADS: usize = 4;
/// What is wiped at the start and at the end of a disk that may hold something else.
const WIPE_BYTES: u64 = 128 << 10;
/// The inode that keeps the descriptors' reserve.
const RESIZE_INODE: u32 = 7;

/// Where a volume is written.
pub struct Target<'a> {
    /// The disk; at least as long as the volume.
    pub disk: &'a dyn Disk,
    /// All of it reads as zeros, so that zeros need not be written.
    pub zeroed: bool,
    /// Called with the bytes of contents that were handed to the disk.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// Writes the volume. Until this has returned there is none on the disk.
///
/// # Errors
/// [`Error::Io`] and [`Error::Source`].
pub fn write(plan: &Plan<'_>, contents: &dyn Contents, target: &Target<'_>) -> Result<()> {
    let (len_bytes, disk_bytes) = (plan.layout.len_bytes(), target.disk.properties().len_bytes);
    if len_bytes > disk_bytes {
        let text = format!("the disk has {disk_bytes} bytes, the volume needs {len_bytes}");
        return Err(Error::Misuse(text));
    }
    let writer = Writer { target, block_bytes: plan.layout.super_.block_bytes };
    writer.wipe(len_bytes)?;
    let mapped = write_contents(plan, contents, &writer)?;
    let free_blocks = write_groups(plan, &mapped, &writer)?;
    writer.sync()?;
    let primary = superblock_of(plan, 0, free_blocks);
    let ticket = writer.bytes(superblock::OFFSET_BYTES, primary.as_bytes())?;
    Ok(target.disk.wait(ticket)?)
}

/// The disk, in blocks of the volume.
struct Writer<'a> {
    target: &'a Target<'a>,
    block_bytes: u32,
}

impl Writer<'_> {
    fn submit(&self, at_bytes: u64, block: Block) -> Result<Ticket> {
        let group = Group { writes: vec![Write { at_bytes, block }] };
        self.target.disk.submit(group, &[]).map_err(|refused| Error::Io(refused.error))
    }

    fn bytes(&self, at_bytes: u64, bytes: &[u8]) -> Result<Ticket> {
        let mut block = Block::private(bytes.len());
        block.copy_in(0, bytes);
        self.submit(at_bytes, block)
    }

    fn blocks(&self, at: u64, bytes: &[u8]) -> Result<Ticket> {
        self.bytes(at * u64::from(self.block_bytes), bytes)
    }

    /// Zeros from block `from` up to `end`, where they are not there already.
    fn zeros(&self, from: u64, end: u64) -> Result<()> {
        if self.target.zeroed {
            return Ok(());
        }
        self.zero_bytes(from * u64::from(self.block_bytes), end * u64::from(self.block_bytes))
    }

    fn zero_bytes(&self, from: u64, end: u64) -> Result<()> {
        let mut at = from;
        while at < end {
            let len = (end - at).min(REQUEST_BYTES);
            self.submit(at, Block::private(index(len)))?;
            at += len;
        }
        Ok(())
    }

    /// Everything submitted so far is durable.
    fn sync(&self) -> Result<()> {
        let empty = self.target.disk.submit(Group::default(), &[]);
        let ticket = empty.map_err(|refused| Error::Io(refused.error))?;
        Ok(self.target.disk.wait(ticket)?)
    }

    /// Takes away what others would know this disk by.
    fn wipe(&self, len_bytes: u64) -> Result<()> {
        if !self.target.zeroed {
            let end = len_bytes.max(4096);
            self.zero_bytes(0, WIPE_BYTES.min(end))?;
            self.zero_bytes(end.saturating_sub(WIPE_BYTES), end)?;
            self.sync()?;
        }
        Ok(())
    }
}

/// A stretch of the disk and what it is filled with.
struct Request {
    at: u64,
    blocks: u64,
    parts: Vec<(u64, Fill)>,
}

/// What blocks of a request hold.
enum Fill {
    Bytes(Vec<u8>),
    Contents { node: u32, at_bytes: u64, len_bytes: u64 },
}

/// What is known of an inode once its contents are mapped.
#[derive(Clone, Copy, Default)]
struct Mapped {
    pointers: [u32; POINTERS],
    size_bytes: u64,
    indexed: bool,
}

/// Writes what files, directories and links hold; returns how each placed inode was mapped.
fn write_contents(
    plan: &Plan<'_>,
    contents: &dyn Contents,
    writer: &Writer<'_>,
) -> Result<Vec<Mapped>> {
    let producer = Mutex::new(Producer::new(plan));
    let window = Mutex::new((0, None::<Ticket>));
    let failed = AtomicBool::new(false);
    let work = || -> Result<()> {
        while !failed.load(Ordering::Relaxed) {
            let request = producer.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(request) = request else { break };
            let bytes = request.blocks * u64::from(writer.block_bytes);
            let at = request.at;
            let block = fill(plan, contents, request)?;
            let ticket = writer.submit(at * u64::from(writer.block_bytes), block)?;
            (writer.target.progress)(bytes);
            throttle(writer, &window, ticket, bytes)?;
        }
        Ok(())
    };
    let guarded = || work().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    let done = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..THREADS).map(|_| scope.spawn(guarded)).collect();
        let mut done = guarded();
        for helper in helpers {
            let joined =
                helper.join().unwrap_or_else(|_| Err(Error::Misuse("a thread died".into())));
            done = done.and(joined);
        }
        done
    });
    done?;
    let producer = producer.into_inner().unwrap_or_else(PoisonError::into_inner);
    match producer.broken {
        true => Err(Error::Misuse("the plan gave out too few blocks".into())),
        false => Ok(producer.mapped),
    }
}

/// Waits for what was submitted a window ago, so that memory is bounded.
fn throttle(
    writer: &Writer<'_>,
    window: &Mutex<(u64, Option<Ticket>)>,
    ticket: Ticket,
    bytes: u64,
) -> Result<()> {
    let earlier = {
        let mut window = window.lock().unwrap_or_else(PoisonError::into_inner);
        window.0 += bytes;
        if window.0 < UNDER_WAY_BYTES {
            return Ok(());
        }
        window.0 = 0;
        window.1.replace(ticket)
    };
    match earlier {
        Some(earlier) => Ok(writer.target.disk.wait(earlier)?),
        None => Ok(()),
    }
}

fn fill(plan: &Plan<'_>, contents: &dyn Contents, request: Request) -> Result<Block> {
    let block_bytes = u64::from(plan.layout.super_.block_bytes);
    let mut memory = Private::new(index(request.blocks * block_bytes));
    for (nth, what) in request.parts {
        let Some(room) = memory.get_mut(index(nth * block_bytes)..) else { continue };
        match what {
            Fill::Bytes(bytes) => {
                if let Some(room) = room.get_mut(..bytes.len()) {
                    room.copy_from_slice(&bytes);
                }
            }
            Fill::Contents { node, at_bytes, len_bytes } => {
                let Some(room) = room.get_mut(..index(len_bytes)) else { continue };
                let What::File { source, .. } = plan.tree.node(NodeId(node)).what else { continue };
                contents
                    .read(source, at_bytes, room)
                    .map_err(|error| Error::Source { path: plan.tree.path(NodeId(node)), error })?;
            }
        }
    }
    Ok(memory.into())
}

/// Turns the plan into requests, in the order of the disk.
struct Producer<'a> {
    plan: &'a Plan<'a>,
    next: usize,
    shared: usize,
    /// Parts of what was placed already that no request has taken.
    parts: std::collections::VecDeque<(u64, u64, Fill)>,
    mapped: Vec<Mapped>,
    broken: bool,
}

impl<'a> Producer<'a> {
    fn new(plan: &'a Plan<'a>) -> Self {
        Self {
            plan,
            next: 0,
            shared: 0,
            parts: Default::default(),
            mapped: Vec::with_capacity(plan.placed.len()),
            broken: false,
        }
    }

    /// The next request: parts that follow each other on the disk, up to the size of one.
    fn next(&mut self) -> Option<Request> {
        let most = REQUEST_BYTES / u64::from(self.plan.layout.super_.block_bytes);
        self.refill();
        let (at, ..) = *self.parts.front()?;
        let mut request = Request { at, blocks: 0, parts: vec![] };
        loop {
            self.refill();
            let Some((start, blocks, what)) = self.parts.pop_front() else { break };
            let room = most - request.blocks;
            if start != request.at + request.blocks || room == 0 {
                self.parts.push_front((start, blocks, what));
                break;
            }
            let taken = blocks.min(room);
            let (now, later) = self.split(what, taken, blocks);
            request.parts.push((request.blocks, now));
            request.blocks += taken;
            if let Some(later) = later {
                self.parts.push_front((start + taken, blocks - taken, later));
            }
        }
        Some(request)
    }

    /// The first `taken` of `blocks` blocks, and the rest.
    fn split(&self, what: Fill, taken: u64, blocks: u64) -> (Fill, Option<Fill>) {
        if taken >= blocks {
            return (what, None);
        }
        let cut = taken * u64::from(self.plan.layout.super_.block_bytes);
        match what {
            Fill::Bytes(mut bytes) => {
                let later = bytes.split_off(index(cut).min(bytes.len()));
                (Fill::Bytes(bytes), Some(Fill::Bytes(later)))
            }
            Fill::Contents { node, at_bytes, len_bytes } => {
                let now = Fill::Contents { node, at_bytes, len_bytes: len_bytes.min(cut) };
                let later = Fill::Contents {
                    node,
                    at_bytes: at_bytes + cut,
                    len_bytes: len_bytes.saturating_sub(cut),
                };
                (now, Some(later))
            }
        }
    }

    /// Maps what was placed next until there is a part.
    fn refill(&mut self) {
        while self.parts.is_empty() {
            let Some(placed) = self.plan.placed.get(self.next) else { return };
            self.next += 1;
            let mapped = self.map(placed);
            self.broken |= mapped.is_none();
            self.mapped.push(mapped.unwrap_or_default());
        }
    }

    /// Maps one, and queues its parts; `None` if it has fewer blocks than it needs.
    fn map(&mut self, placed: &Placed) -> Option<Mapped> {
        let block_bytes = self.plan.layout.super_.block_bytes;
        let mut mapped = Mapped::default();
        match &self.plan.tree.node(NodeId(placed.node)).what {
            What::Directory => {
                let (bytes, indexed) = directory_bytes(self.plan, placed);
                let blocks = narrow(bytes.len() as u64 / u64::from(block_bytes));
                mapped.size_bytes = bytes.len() as u64;
                mapped.indexed = indexed;
                mapped.pointers = self.queue(placed, &[(0, blocks)], |start, end| {
                    let bytes = bytes.get(index(start)..index(end)).unwrap_or_default();
                    Fill::Bytes(bytes.to_vec())
                })?;
            }
            What::Symlink(target) => {
                mapped.size_bytes = target.len() as u64;
                mapped.pointers = match target_pointers(target) {
                    Some(pointers) => pointers,
                    None => self.queue(placed, &[(0, 1)], |_, _| Fill::Bytes(target.clone()))?,
                };
            }
            What::CharDevice(major, minor) | What::BlockDevice(major, minor) => {
                mapped.pointers = device_pointers((*major, *minor));
            }
            what @ What::File { size_bytes, .. } => {
                mapped.size_bytes = *size_bytes;
                let runs = plan::data_runs(what, block_bytes);
                mapped.pointers = self.queue(placed, &runs, |start, end| Fill::Contents {
                    node: placed.node,
                    at_bytes: start,
                    len_bytes: end.min(*size_bytes).saturating_sub(start),
                })?;
            }
            What::Fifo | What::Socket => {}
        }
        self.queue_attributes(placed);
        if placed.inode == plan::LOST_FOUND && self.plan.reserve_map != 0 {
            let top = reserve_top(&self.plan.layout).ok()?;
            self.parts.push_back((self.plan.reserve_map.into(), 1, Fill::Bytes(top)));
        }
        Some(mapped)
    }

    /// Builds the map of a file with these runs and queues its blocks; `fill` says what is
    /// between two bytes of it.
    fn queue(
        &mut self,
        placed: &Placed,
        runs: &[(u32, u32)],
        fill: impl Fn(u64, u64) -> Fill,
    ) -> Option<[u32; POINTERS]> {
        let block_bytes = self.plan.layout.super_.block_bytes;
        let mine = self.plan.runs_of(placed).iter();
        let mut mine = mine.flat_map(|(from, count)| *from..*from + *count);
        let built = map::build(runs, block_bytes, &mut || mine.next())?;
        for part in built.parts {
            let (at, blocks, what) = match part {
                Part::Indirect { at, pointers } => (at, 1, Fill::Bytes(pointers)),
                Part::Data { at, from, blocks } => {
                    let start = u64::from(from) * u64::from(block_bytes);
                    let end = start + u64::from(blocks) * u64::from(block_bytes);
                    (at, blocks, fill(start, end))
                }
            };
            self.parts.push_back((at.into(), blocks.into(), what));
        }
        Some(built.pointers)
    }

    /// Queues the block of attributes that lies behind this one's contents, if it is new.
    fn queue_attributes(&mut self, placed: &Placed) {
        if let Some(shared) = self.plan.shared.get(self.shared)
            && shared.at == placed.attribute_block
        {
            self.shared += 1;
            let block_bytes = self.plan.layout.super_.block_bytes;
            let bytes = encode_block(&shared.attributes, block_bytes, shared.owners);
            self.parts.push_back((shared.at.into(), 1, Fill::Bytes(bytes)));
        }
    }
}

/// The blocks of a directory, padded to what it was given; whether it is indexed.
fn directory_bytes(plan: &Plan<'_>, placed: &Placed) -> (Vec<u8>, bool) {
    let Style { shape, .. } = plan.style;
    let parent = plan.inodes.get(index(placed.parent.into())).copied().unwrap_or(0);
    let own = (placed.inode, parent);
    let built = plan::directory_of(plan.tree, NodeId(placed.node), own, &plan.inodes, plan.style);
    let mut bytes = built.bytes;
    if placed.inode == plan::LOST_FOUND && !built.indexed {
        let least = index(plan.layout.lost_found_blocks()) * plan.layout.block_len();
        while bytes.len() < least {
            bytes.extend(BlockWriter::new(shape).finish());
        }
    }
    (bytes, built.indexed)
}

/// The block of the map of the resize inode that leads to each reserved descriptor block of
/// group 0, which in turn leads to its copies. A descriptor block's place among all
/// descriptor blocks is its place in this one, counted round.
fn reserve_top(layout: &Layout) -> crate::Result<Vec<u8>> {
    let mut top = vec![0; layout.block_len()];
    let first = u64::from(layout.super_.descriptor_blocks());
    let table = u64::from(layout.super_.first_data_block) + 1;
    for nth in first..first + u64::from(layout.super_.reserved_descriptor_blocks) {
        let at = index(nth % layout.fan_out() * 4);
        if let Some(field) = top.get_mut(at..).and_then(|rest| rest.get_mut(..4)) {
            field.copy_from_slice(&FsBlock(table + nth).in_32_bits()?.to_le_bytes());
        }
    }
    Ok(top)
}

/// The reserved descriptor blocks of group 0: each leads to its copies in other groups.
fn reserve_blocks(layout: &Layout) -> crate::Result<Vec<u8>> {
    let super_ = &layout.super_;
    let backups: Vec<u64> = (1..super_.groups)
        .filter(|group| plan::has_copy(layout, *group))
        .map(|group| super_.group_start(GroupNumber(group)).0)
        .collect();
    let mut bytes = vec![];
    let first = 1 + u64::from(super_.descriptor_blocks());
    for nth in first..first + u64::from(super_.reserved_descriptor_blocks) {
        let start = bytes.len();
        for backup in &backups {
            bytes.extend(FsBlock(backup + nth).in_32_bits()?.to_le_bytes());
        }
        bytes.resize(start + layout.block_len(), 0);
    }
    Ok(bytes)
}

/// Blocks that the reserve's map owns: its top, its blocks in group 0 and all their copies.
fn reserve_owned(layout: &Layout) -> u64 {
    let super_ = &layout.super_;
    let copies = (0..super_.groups).filter(|group| plan::has_copy(layout, *group)).count() as u64;
    1 + copies * u64::from(super_.reserved_descriptor_blocks)
}

/// The superblock as group `group` keeps it.
fn superblock_of(plan: &Plan<'_>, group: u32, free_blocks: u64) -> RawSuperblock {
    let mut raw = plan.layout.raw.clone();
    let used = plan.placed.len() as u64 - 1 + 10;
    let free_inodes = u64::from(plan.layout.super_.inodes) - used;
    // No more than the layout has, which fits.
    let _ = raw.set_free(free_blocks, free_inodes);
    if group > 0 {
        // A copy knows nothing of how the volume was left.
        raw.s_state = 0.into();
    }
    raw.s_block_group_nr = u16::try_from(group).unwrap_or(0).into();
    raw
}

/// What a group has, for its descriptor.
struct Counted {
    raw: RawGroup,
    block_bitmap: Vec<u8>,
    inode_bitmap: Vec<u8>,
}

/// Writes bitmaps, tables and the copies of superblock and descriptors of every group, the
/// superblock of group 0 excepted; returns how many blocks are free.
fn write_groups(plan: &Plan<'_>, mapped: &[Mapped], writer: &Writer<'_>) -> Result<u64> {
    let layout = &plan.layout;
    let groups = layout.super_.groups;
    let mut by_inode: Vec<usize> = (0..plan.placed.len()).collect();
    by_inode.sort_unstable_by_key(|nth| plan.placed.get(*nth).map(|placed| placed.inode));
    let mut used = &plan.used[..];
    let mut inodes = &by_inode[..];
    let mut descriptors = Vec::new();
    let mut free_blocks = 0;
    let mut pending = 0;
    for group in 0..groups {
        let last = (u64::from(group) + 1) * u64::from(layout.super_.inodes_per_group);
        let inode_of = |nth: &usize| plan.placed.get(*nth).map_or(0, |placed| placed.inode);
        let here = inodes.partition_point(|nth| u64::from(inode_of(nth)) <= last);
        let (mine, later) = inodes.split_at(here);
        inodes = later;
        let counted = count(plan, group, &mut used, mine).map_err(|_| layout.too_large())?;
        free_blocks += u64::from(counted.raw.bg_free_blocks_count_lo.get());
        descriptors.extend(counted.raw.as_bytes());
        let at = layout.bitmaps(group);
        let mut bytes = counted.block_bitmap;
        bytes.extend(counted.inode_bitmap);
        bytes.extend(inode_table(plan, group, mine, mapped));
        let end = at.0 + bytes.len() as u64 / u64::from(writer.block_bytes);
        pending += bytes.len() as u64;
        let ticket = writer.blocks(at.0, &bytes)?;
        writer.zeros(end, layout.data_start(group))?;
        if pending >= UNDER_WAY_BYTES {
            pending = 0;
            writer.target.disk.wait(ticket)?;
        }
    }
    descriptors.resize(index(layout.super_.descriptor_blocks().into()) * layout.block_len(), 0);
    let reserve = reserve_blocks(layout).map_err(|_| layout.too_large())?;
    for group in (0..groups).filter(|group| plan::has_copy(layout, *group)) {
        let start = layout.super_.group_start(GroupNumber(group));
        let mut bytes = vec![];
        if group > 0 {
            bytes.extend(superblock_of(plan, group, free_blocks).as_bytes());
            bytes.resize(layout.block_len(), 0);
        }
        bytes.extend(&descriptors);
        let at = if group > 0 { start } else { start.after(1) };
        let table_end = at.0 + bytes.len() as u64 / u64::from(writer.block_bytes);
        if group == 0 {
            bytes.extend(&reserve);
        }
        writer.blocks(at.0, &bytes)?;
        if group > 0 {
            writer.zeros(table_end, layout.bitmaps(group).0)?;
        }
    }
    Ok(free_blocks)
}

/// Fills the bitmaps of a group and counts what is free. `used` begins with the first run that
/// may be in this group.
fn count(
    plan: &Plan<'_>,
    group: u32,
    used: &mut &[plan::Blocks],
    mine: &[usize],
) -> crate::Result<Counted> {
    let layout = &plan.layout;
    let start = layout.super_.group_start(GroupNumber(group)).0;
    let end = layout.group_end(group);
    let mut blocks = Bitmap::new(layout.block_len());
    let mut free = end - layout.data_start(group);
    blocks.set(0, layout.data_start(group) - start);
    while let Some(((from, count), later)) = used.split_first()
        && u64::from(*from) < end
    {
        // A run never reaches into the next group: that begins with tables.
        let from = u64::from(*from) - start;
        blocks.set(from, from + u64::from(*count));
        free -= u64::from(*count);
        *used = later;
    }
    blocks.set(end - start, u64::from(layout.super_.block_bytes) * 8);
    let per_group = u64::from(layout.super_.inodes_per_group);
    let first = u64::from(group) * per_group + 1;
    let mut inodes = Bitmap::new(layout.block_len());
    let mut free_inodes = per_group;
    let mut directories = 0u16;
    // The root is one of these ten. A group may have only eight.
    let reserved = 10u64.saturating_sub(first - 1).min(per_group);
    inodes.set(0, reserved);
    free_inodes -= reserved;
    for placed in mine.iter().filter_map(|nth| plan.placed.get(*nth)) {
        let nth = u64::from(placed.inode) - first;
        if placed.inode != crate::InodeNumber::ROOT.0 {
            inodes.set(nth, nth + 1);
            free_inodes -= 1;
        }
        let node = plan.tree.node(NodeId(placed.node));
        directories += u16::from(node.what.kind() == Kind::Directory);
    }
    inodes.set(per_group, u64::from(layout.super_.block_bytes) * 8);
    let at = layout.bitmaps(group);
    let short = |count: u64| u16::try_from(count).unwrap_or(u16::MAX);
    let mut raw = RawGroup::new_zeroed();
    raw.set_places([at, at.after(1), at.after(2)])?;
    raw.bg_free_blocks_count_lo = short(free).into();
    raw.bg_free_inodes_count_lo = short(free_inodes).into();
    raw.bg_used_dirs_count_lo = directories.into();
    Ok(Counted { raw, block_bitmap: blocks.0, inode_bitmap: inodes.0 })
}

/// The inode table of a group, up to the block with its last inode in use.
fn inode_table(plan: &Plan<'_>, group: u32, mine: &[usize], mapped: &[Mapped]) -> Vec<u8> {
    let super_ = &plan.layout.super_;
    let inode_bytes = index(super_.inode_bytes.into());
    let first = group * super_.inodes_per_group + 1;
    let mut bytes: Vec<u8> = vec![];
    let mut put = |number: u32, slot: Vec<u8>| {
        bytes.resize(index(u64::from(number - first)) * inode_bytes, 0);
        bytes.extend(slot);
    };
    if group == 0 {
        put(1, bad_blocks(plan));
    }
    for nth in mine {
        let Some(placed) = plan.placed.get(*nth) else { continue };
        let mapped = mapped.get(*nth).copied().unwrap_or_default();
        put(placed.inode, inode(plan, placed, mapped));
        if placed.inode == crate::InodeNumber::ROOT.0 && plan.reserve_map != 0 {
            put(RESIZE_INODE, resize_inode(plan));
        }
    }
    bytes.resize(bytes.len().next_multiple_of(plan.layout.block_len()), 0);
    bytes
}

/// Inode 1, the list of bad blocks: empty, and only its times are set.
fn bad_blocks(plan: &Plan<'_>) -> Vec<u8> {
    let now = now(plan);
    let inode = NewInode { accessed: now, modified: now, changed: now, ..NewInode::default() };
    let mut bytes = inode.encode(128);
    debug_assert_eq!(bytes.len(), size_of::<RawInode>());
    bytes.resize(index(plan.layout.super_.inode_bytes.into()), 0);
    bytes
}

/// The inode that owns the descriptors' reserve, as a file beyond any that could be.
fn resize_inode(plan: &Plan<'_>) -> Vec<u8> {
    let layout = &plan.layout;
    let now = now(plan);
    let block_bytes = u64::from(layout.super_.block_bytes);
    let fan_out = layout.fan_out();
    let mut pointers = [0; POINTERS];
    let [.., double, _] = &mut pointers;
    *double = plan.reserve_map;
    let inode = NewInode {
        mode: 0o100600,
        size_bytes: block_bytes * (12 + fan_out + fan_out * fan_out),
        links: 1,
        sectors: narrow(reserve_owned(layout) * (block_bytes / 512)),
        pointers,
        accessed: now,
        modified: now,
        changed: now,
        created: now,
        ..NewInode::default()
    };
    inode.encode(layout.super_.inode_bytes)
}

fn now(plan: &Plan<'_>) -> draconis_exchange::contract::Time {
    draconis_exchange::contract::Time {
        seconds: i64::from(plan.layout.options.time),
        nanoseconds: 0,
    }
}

fn inode(plan: &Plan<'_>, placed: &Placed, mapped: Mapped) -> Vec<u8> {
    let super_ = &plan.layout.super_;
    let node = plan.tree.node(NodeId(placed.node));
    let owned = placed.blocks + u64::from(placed.attribute_block != 0);
    let in_body = node.attributes.get(..index(placed.in_body.into())).unwrap_or_default();
    let body = match in_body {
        [] => vec![],
        some => encode_body(some, super_.inode_bytes),
    };
    let inode = NewInode {
        mode: node.raw_mode(),
        uid: node.uid,
        gid: node.gid,
        size_bytes: mapped.size_bytes,
        links: u16::try_from(placed.links).unwrap_or(u16::MAX),
        sectors: narrow(owned * u64::from(super_.block_bytes / 512)),
        flags: if mapped.indexed { flags::INDEX } else { 0 },
        pointers: mapped.pointers,
        accessed: node.accessed,
        modified: node.modified,
        changed: node.changed,
        created: node.created,
        attribute_block: placed.attribute_block,
        attributes: &body,
    };
    inode.encode(super_.inode_bytes)
}

/// Bits of a block, set in runs.
struct Bitmap(Vec<u8>);

impl Bitmap {
    fn new(block_bytes: usize) -> Self {
        Self(vec![0; block_bytes])
    }

    /// Sets the bits from `from` up to `end`.
    fn set(&mut self, from: u64, end: u64) {
        let mut bit = from;
        while bit < end {
            let Some(byte) = self.0.get_mut(index(bit / 8)) else { return };
            if bit.is_multiple_of(8) && end - bit >= 8 {
                *byte = 0xFF;
                bit += 8;
            } else {
                *byte |= 1 << (bit % 8);
                bit += 1;
            }
        }
    }
}
