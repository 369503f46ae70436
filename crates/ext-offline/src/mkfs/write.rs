//! Writing of a plan: contents in disk order, then the tables, then the superblock.
//!
//! ```text
//!   wipe ─flush─▶ contents (threads fill buffers, the disk writes) ─▶ tables ─flush─▶ super ─flush
//! ```
//! Contents of a sequential source are written last, in batches: read in source order, written in
//! disk order.
//!
//! Law: memory is bounded whatever the tree holds: the number of requests in flight is limited.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_device::{Ticket, Write};
use draconis_types::lock::Mutex;
use draconis_types::{Block, PrivateBuffer};
use zerocopy::IntoBytes;

use super::disk_writer::{
    DiskWriter, FormatTarget, MAX_UNWRITTEN_BYTES, MappedInode, REQUEST_BYTES,
};
use super::plan::{self, NodePlacement, VolumePlan};
use super::system_files::{self, SystemFileKind};
use super::tree::{FileSource, NodeId, NodeKind};
use super::{FormatError, Result, groups, inline_data, reserved_gdt};
use crate::dir::build::DirectoryFormat;
use crate::format::dirent::DirBlockBuilder;
use crate::format::inode::{POINTERS, device_pointers, fast_symlink_pointers, flags};
use crate::format::quota::{QuotaType, QuotaUsage};
use crate::format::xattr::encode_block;
use crate::format::{dir_tail, quota, superblock, xattr};
use crate::map::build::{BuiltMap, MapPart};
use crate::units::{saturating_u32, saturating_usize};
use crate::{FileId, FsBlock};

/// Limit of bytes not yet durable. It keeps the disk busy from the start, and progress close to the
/// truth.
const MAX_UNDURABLE_BYTES: u64 = 32 << 20;
/// Bytes read in source order before they are written in disk order.
const SOURCE_BATCH_BYTES: u64 = 4 << 20;
/// Reader threads; more than CPUs, because they wait for the source's disk.
const READER_THREADS: usize = 4;

/// Writes the volume. Until this function returns, the disk holds no valid volume.
///
/// # Errors
/// [`FormatError::Io`] and [`FormatError::Source`].
pub fn write(
    plan: &VolumePlan<'_>,
    contents: &dyn FileSource,
    target: &FormatTarget<'_>,
) -> Result<()> {
    let (len_bytes, disk_bytes) = (plan.layout.len_bytes(), target.disk.properties().len_bytes);
    if len_bytes > disk_bytes {
        let text = format!("the disk has {disk_bytes} bytes, the volume needs {len_bytes}");
        return Err(FormatError::Misuse(text));
    }
    let writer = DiskWriter { target, block_bytes: plan.layout.super_.block_bytes };
    writer.wipe(len_bytes)?;
    let mapped = write_contents(plan, contents, &writer)?;
    let hidden = write_system_files(plan, &writer)?;
    let primary = groups::write_groups(plan, &mapped, &hidden, &writer)?;
    writer.sync()?;
    let ticket = writer.write_bytes(superblock::OFFSET_BYTES, primary.as_bytes())?;
    Ok(target.disk.wait_durable(ticket)?)
}

/// Writes the system files; returns their maps.
fn write_system_files(plan: &VolumePlan<'_>, writer: &DiskWriter<'_>) -> Result<Vec<BuiltMap>> {
    let layout = &plan.layout;
    if plan.mmp_block != 0 {
        writer.write_blocks(plan.mmp_block, &system_files::mmp_block(layout))?;
    }
    let too_few = || FormatError::Misuse("the plan gave out too few blocks".into());
    let mut maps = vec![];
    for hidden in &plan.system_files {
        let bytes = match hidden.purpose {
            SystemFileKind::Quota(kind) => {
                Some(quota::build_quota_file(kind, &count_tree_usage(plan, kind)))
            }
            SystemFileKind::Value(nth) => plan.tree.values.get(nth).map(|it| it.bytes.clone()),
            SystemFileKind::Journal(_) | SystemFileKind::Orphans => None,
        };
        let bytes = bytes.unwrap_or_default();
        let built = hidden.build_map(layout).ok_or_else(too_few)?;
        for part in &built.parts {
            let (at, from, blocks) = match part {
                MapPart::Indirect { at, pointers } => {
                    writer.write_blocks(*at, pointers)?;
                    continue;
                }
                MapPart::Data { at, from, blocks } => (*at, *from, *blocks),
            };
            let mut zeros_from = at;
            for nth in 0..blocks {
                let place = at.saturating_add(nth.into());
                if let Some(bytes) =
                    hidden.encode_block(layout, &bytes, from.saturating_add(nth), place)
                {
                    writer.zero_blocks(zeros_from, place)?;
                    writer.write_blocks(place, &bytes)?;
                    zeros_from = place.saturating_add(1);
                }
            }
            writer.zero_blocks(zeros_from, at.saturating_add(blocks.into()))?;
        }
        maps.push(built);
    }
    Ok(maps)
}

/// A run of the disk with its contents.
struct WriteRequest {
    at: u64,
    blocks: u64,
    parts: Vec<(u64, RequestContents)>,
}

/// Contents of some blocks of a request.
enum RequestContents {
    Bytes(Vec<u8>),
    Contents { node: u32, at_bytes: u64, len_bytes: u64 },
}

impl MappedInode {
    /// Stores contents inline.
    fn store_inline(&mut self, bytes: &[u8]) {
        let (pointers, value) = inline_data::split_inline(bytes);
        (self.pointers, self.value) = (pointers, Some(value.to_vec()));
        self.size_bytes = bytes.len() as u64;
        self.flags = flags::INLINE_DATA;
    }
}

/// Writes the contents of files, directories and links; returns the map of each placed inode.
fn write_contents(
    plan: &VolumePlan<'_>,
    contents: &dyn FileSource,
    writer: &DiskWriter<'_>,
) -> Result<Vec<MappedInode>> {
    let producer = Mutex::new(RequestProducer::new(plan, contents.is_sequential()));
    let windows = Mutex::new(FlightWindows::default());
    let failed = AtomicBool::new(false);
    let work = || -> Result<()> {
        while !failed.load(Ordering::Relaxed) {
            let request = producer.lock().next();
            let Some(request) = request else { break };
            let bytes = request.blocks.saturating_mul(writer.block_bytes.into());
            let at = request.at;
            let block = read_request_contents(plan, contents, request)?;
            let ticket = writer.submit(at.saturating_mul(writer.block_bytes.into()), block)?;
            (writer.target.progress)(bytes);
            throttle(writer, &windows, ticket, bytes)?;
        }
        Ok(())
    };
    let guarded = || work().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    let done = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..READER_THREADS).map(|_| scope.spawn(guarded)).collect();
        let mut done = guarded();
        for helper in helpers {
            let joined =
                helper.join().unwrap_or_else(|_| Err(FormatError::Misuse("a thread died".into())));
            done = done.and(joined);
        }
        done
    });
    done?;
    let mut producer = producer.into_inner();
    match producer.has_failed {
        true => return Err(FormatError::Misuse("the plan gave out too few blocks".into())),
        false => write_deferred(plan, contents, writer, producer.deferred, &mut producer.mapped)?,
    }
    Ok(producer.mapped)
}

/// A run of contents that is written later, in source order.
struct DeferredRun {
    source: u64,
    node: u32,
    at_bytes: u64,
    len_bytes: u64,
    to: DeferredTarget,
}

/// Destination of a deferred run.
enum DeferredTarget {
    /// This disk block.
    Block(u64),
    /// The inode with this index in the map list.
    Inode(usize),
}

fn write_deferred(
    plan: &VolumePlan<'_>,
    contents: &dyn FileSource,
    writer: &DiskWriter<'_>,
    mut later: Vec<DeferredRun>,
    mapped: &mut [MappedInode],
) -> Result<()> {
    let block_bytes = u64::from(writer.block_bytes);
    later.sort_unstable_by_key(|run| (run.source, run.at_bytes));
    let mut batch: Vec<Write> = vec![];
    let mut held = 0u64;
    let mut before = None;
    for run in later {
        let read = |at_bytes: u64, room: &mut [u8]| {
            contents.read(run.source, at_bytes, room).map_err(|error| FormatError::Source {
                path: plan.tree.path(NodeId(run.node)),
                error,
            })
        };
        let at = match run.to {
            DeferredTarget::Block(at) => at,
            DeferredTarget::Inode(nth) => {
                let mut bytes = vec![0; saturating_usize(run.len_bytes)];
                let what = &plan.tree.node(NodeId(run.node)).kind_data;
                for (start, end) in what.data_within(run.len_bytes) {
                    if let Some(room) =
                        bytes.get_mut(saturating_usize(start)..saturating_usize(end))
                    {
                        read(start, room)?;
                    }
                }
                if let Some(mapped) = mapped.get_mut(nth) {
                    mapped.store_inline(&bytes);
                }
                continue;
            }
        };
        let mut done = 0;
        while done < run.len_bytes {
            let len = run.len_bytes.saturating_sub(done).min(REQUEST_BYTES);
            let mut memory =
                PrivateBuffer::new(saturating_usize(len.next_multiple_of(block_bytes)));
            let Some(room) = memory.get_mut(..saturating_usize(len)) else { break };
            read(run.at_bytes.saturating_add(done), room)?;
            held = held.saturating_add(memory.len() as u64);
            let at_bytes = at.saturating_mul(block_bytes).saturating_add(done);
            batch.push(Write { at_bytes, block: memory.into() });
            done = done.saturating_add(len);
            if held >= SOURCE_BATCH_BYTES {
                writer.write_batch(std::mem::take(&mut batch), &mut before)?;
                held = 0;
            }
        }
    }
    writer.write_batch(batch, &mut before)
}

/// Bytes submitted since a ticket.
#[derive(Default)]
struct InFlightWindow(u64, Option<Ticket>);

impl InFlightWindow {
    /// Counts bytes; once the window has `most` bytes, returns the previous window's ticket.
    fn advance(&mut self, most: u64, ticket: Ticket, bytes: u64) -> Option<Ticket> {
        self.0 = self.0.saturating_add(bytes);
        if self.0 < most {
            return None;
        }
        self.0 = 0;
        self.1.replace(ticket)
    }
}

#[derive(Default)]
struct FlightWindows {
    unwritten: InFlightWindow,
    undurable: InFlightWindow,
}

/// Waits for the requests of the window before, so that memory is bounded.
fn throttle(
    writer: &DiskWriter<'_>,
    windows: &Mutex<FlightWindows>,
    ticket: Ticket,
    bytes: u64,
) -> Result<()> {
    let (settled, durable) = {
        let mut windows = windows.lock();
        let settled = windows.unwritten.advance(MAX_UNWRITTEN_BYTES, ticket, bytes);
        (settled, windows.undurable.advance(MAX_UNDURABLE_BYTES, ticket, bytes))
    };
    if let Some(ticket) = settled {
        writer.target.disk.wait_visible(ticket)?;
    }
    match durable {
        Some(ticket) => Ok(writer.target.disk.wait_durable(ticket)?),
        None => Ok(()),
    }
}

fn read_request_contents(
    plan: &VolumePlan<'_>,
    contents: &dyn FileSource,
    request: WriteRequest,
) -> Result<Block> {
    let block_bytes = u64::from(plan.layout.super_.block_bytes);
    let mut memory =
        PrivateBuffer::new(saturating_usize(request.blocks.saturating_mul(block_bytes)));
    for (nth, what) in request.parts {
        let Some(room) = memory.get_mut(saturating_usize(nth.saturating_mul(block_bytes))..) else {
            continue;
        };
        match what {
            RequestContents::Bytes(bytes) => {
                if let Some(room) = room.get_mut(..bytes.len()) {
                    room.copy_from_slice(&bytes);
                }
            }
            RequestContents::Contents { node, at_bytes, len_bytes } => {
                let Some(room) = room.get_mut(..saturating_usize(len_bytes)) else { continue };
                let NodeKind::File { source, .. } = plan.tree.node(NodeId(node)).kind_data else {
                    continue;
                };
                contents.read(source, at_bytes, room).map_err(|error| FormatError::Source {
                    path: plan.tree.path(NodeId(node)),
                    error,
                })?;
            }
        }
    }
    Ok(memory.into())
}

/// Producer of write requests from a plan, in disk order.
struct RequestProducer<'a> {
    plan: &'a VolumePlan<'a>,
    next: usize,
    shared: usize,
    /// Parts of mapped nodes that no request holds yet.
    parts: std::collections::VecDeque<(u64, u64, RequestContents)>,
    mapped: Vec<MappedInode>,
    has_failed: bool,
    /// True if contents are deferred to source order.
    is_sequential: bool,
    deferred: Vec<DeferredRun>,
}

impl<'a> RequestProducer<'a> {
    fn new(plan: &'a VolumePlan<'a>, is_sequential: bool) -> Self {
        Self {
            plan,
            next: 0,
            shared: 0,
            parts: Default::default(),
            mapped: Vec::with_capacity(plan.placed.len()),
            has_failed: false,
            is_sequential,
            deferred: vec![],
        }
    }

    /// Returns the next request: parts adjacent on disk, up to the request size.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn next(&mut self) -> Option<WriteRequest> {
        let most = REQUEST_BYTES / u64::from(self.plan.layout.super_.block_bytes);
        self.map_next_node();
        let (at, ..) = *self.parts.front()?;
        let mut request = WriteRequest { at, blocks: 0, parts: vec![] };
        loop {
            self.map_next_node();
            let Some((start, blocks, what)) = self.parts.pop_front() else { break };
            let room = most.saturating_sub(request.blocks);
            if start != request.at.saturating_add(request.blocks) || room == 0 {
                self.parts.push_front((start, blocks, what));
                break;
            }
            let taken = blocks.min(room);
            let (now, later) = self.split_contents(what, taken, blocks);
            request.parts.push((request.blocks, now));
            request.blocks = request.blocks.saturating_add(taken);
            if let Some(later) = later {
                self.parts.push_front((
                    start.saturating_add(taken),
                    blocks.saturating_sub(taken),
                    later,
                ));
            }
        }
        Some(request)
    }

    /// Splits `blocks` blocks into the first `taken` and the rest.
    fn split_contents(
        &self,
        what: RequestContents,
        taken: u64,
        blocks: u64,
    ) -> (RequestContents, Option<RequestContents>) {
        if taken >= blocks {
            return (what, None);
        }
        let cut = taken.saturating_mul(self.plan.layout.super_.block_bytes.into());
        match what {
            RequestContents::Bytes(mut bytes) => {
                let later = bytes.split_off(saturating_usize(cut).min(bytes.len()));
                (RequestContents::Bytes(bytes), Some(RequestContents::Bytes(later)))
            }
            RequestContents::Contents { node, at_bytes, len_bytes } => {
                let now =
                    RequestContents::Contents { node, at_bytes, len_bytes: len_bytes.min(cut) };
                let later = RequestContents::Contents {
                    node,
                    at_bytes: at_bytes.saturating_add(cut),
                    len_bytes: len_bytes.saturating_sub(cut),
                };
                (now, Some(later))
            }
        }
    }

    /// Maps placed nodes until there is a part.
    fn map_next_node(&mut self) {
        while self.parts.is_empty() {
            let Some(placed) = self.plan.placed.get(self.next) else { return };
            self.next = self.next.saturating_add(1);
            let mapped = self.map_node(placed);
            self.has_failed |= mapped.is_none();
            self.mapped.push(mapped.unwrap_or_default());
        }
    }

    /// Stores the contents of a node inline.
    fn store_inline(&mut self, placed: &NodePlacement, mapped: &mut MappedInode) {
        let id = NodeId(placed.node);
        match &self.plan.tree.node(id).kind_data {
            NodeKind::Directory => {
                let names = plan::directory_names(self.plan.tree, id, &self.plan.inodes);
                let parent = self.plan.inodes.get(saturating_usize(placed.parent.into())).copied();
                let filetype = self.plan.directory_format.shape.filetype;
                mapped.store_inline(&inline_data::build_inline_directory(
                    parent.unwrap_or(0),
                    &names,
                    filetype,
                ));
            }
            NodeKind::File { source, size_bytes, .. } => self.deferred.push(DeferredRun {
                source: *source,
                node: placed.node,
                at_bytes: 0,
                len_bytes: *size_bytes,
                to: DeferredTarget::Inode(self.mapped.len()),
            }),
            _ => {}
        }
    }

    /// Maps a node and queues its parts; `None` if it has too few blocks.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn map_node(&mut self, placed: &NodePlacement) -> Option<MappedInode> {
        let block_bytes = self.plan.layout.super_.block_bytes;
        let mapping = if self.plan.layout.options.has_extents() { flags::EXTENTS } else { 0 };
        let mut mapped = MappedInode::default();
        match &self.plan.tree.node(NodeId(placed.node)).kind_data {
            _ if placed.is_inline => self.store_inline(placed, &mut mapped),
            NodeKind::Directory => {
                let (bytes, indexed) = directory_bytes(self.plan, placed);
                let blocks = saturating_u32(bytes.len() as u64 / u64::from(block_bytes));
                mapped.size_bytes = bytes.len() as u64;
                mapped.flags = mapping | if indexed { flags::INDEX } else { 0 };
                mapped.pointers = self.queue_mapped(placed, &[(0, blocks)], |start, end| {
                    let bytes = bytes
                        .get(saturating_usize(start)..saturating_usize(end))
                        .unwrap_or_default();
                    RequestContents::Bytes(bytes.to_vec())
                })?;
            }
            NodeKind::Symlink(target) => {
                mapped.size_bytes = target.len() as u64;
                mapped.pointers = match fast_symlink_pointers(target) {
                    Some(pointers) => pointers,
                    None => {
                        mapped.flags = mapping;
                        self.queue_mapped(placed, &[(0, 1)], |_, _| {
                            RequestContents::Bytes(target.clone())
                        })?
                    }
                };
            }
            NodeKind::CharDevice(major, minor) | NodeKind::BlockDevice(major, minor) => {
                mapped.pointers = device_pointers((*major, *minor));
            }
            what @ NodeKind::File { size_bytes, .. } => {
                mapped.size_bytes = *size_bytes;
                mapped.flags = mapping;
                let runs = plan::data_runs(what, block_bytes);
                mapped.pointers =
                    self.queue_mapped(placed, &runs, |start, end| RequestContents::Contents {
                        node: placed.node,
                        at_bytes: start,
                        len_bytes: end.min(*size_bytes).saturating_sub(start),
                    })?;
            }
            NodeKind::Fifo | NodeKind::Socket => {}
        }
        self.queue_xattr_block(placed);
        if placed.inode == super::LOST_FOUND_INODE && self.plan.resize_dind_block != 0 {
            let top = reserved_gdt::resize_dind_block(&self.plan.layout).ok()?;
            self.parts.push_back((self.plan.resize_dind_block, 1, RequestContents::Bytes(top)));
        }
        Some(mapped)
    }

    /// Builds the map of a file with these runs and queues its blocks; `fill` returns the contents
    /// of a byte range.
    fn queue_mapped(
        &mut self,
        placed: &NodePlacement,
        runs: &[(u32, u32)],
        fill: impl Fn(u64, u64) -> RequestContents,
    ) -> Option<[u32; POINTERS]> {
        let block_bytes = self.plan.layout.super_.block_bytes;
        let places = self.plan.runs_of_node(placed);
        let built = self.plan.layout.build_map(placed.inode, runs, places)?;
        for part in built.parts {
            let (at, blocks, what) = match part {
                MapPart::Indirect { at, pointers } => (at, 1, RequestContents::Bytes(pointers)),
                MapPart::Data { at, from, blocks } => {
                    let start = u64::from(from).saturating_mul(block_bytes.into());
                    let end =
                        start.saturating_add(u64::from(blocks).saturating_mul(block_bytes.into()));
                    (at, blocks, fill(start, end))
                }
            };
            match what {
                RequestContents::Contents { node, at_bytes, len_bytes } if self.is_sequential => {
                    let NodeKind::File { source, .. } = self.plan.tree.node(NodeId(node)).kind_data
                    else {
                        continue;
                    };
                    self.deferred.push(DeferredRun {
                        source,
                        node,
                        at_bytes,
                        len_bytes,
                        to: DeferredTarget::Block(at),
                    });
                }
                what => self.parts.push_back((at, blocks.into(), what)),
            }
        }
        Some(built.pointers)
    }

    /// Queues the xattr block behind the node's contents, if it is new.
    fn queue_xattr_block(&mut self, placed: &NodePlacement) {
        if let Some(shared) = self.plan.shared.get(self.shared)
            && shared.at == placed.xattr_block
        {
            self.shared = self.shared.saturating_add(1);
            let block_bytes = self.plan.layout.super_.block_bytes;
            let mut bytes = encode_block(&shared.attributes, block_bytes, shared.owners);
            if let Some(seed) = self.plan.layout.super_.checksum_seed {
                xattr::set_checksum(&mut bytes, seed, FsBlock(shared.at));
            }
            self.parts.push_back((shared.at, 1, RequestContents::Bytes(bytes)));
        }
    }
}

/// Returns the blocks of a directory, padded to its allocation, and true if it has an htree.
fn directory_bytes(plan: &VolumePlan<'_>, placed: &NodePlacement) -> (Vec<u8>, bool) {
    let DirectoryFormat { shape, .. } = plan.directory_format;
    let parent = plan.inodes.get(saturating_usize(placed.parent.into())).copied().unwrap_or(0);
    let own = (placed.inode, parent);
    let built = plan::build_directory_of(
        plan.tree,
        NodeId(placed.node),
        own,
        &plan.inodes,
        plan.directory_format,
    );
    let mut bytes = built.bytes;
    if placed.inode == super::LOST_FOUND_INODE && !built.indexed {
        let least = saturating_usize(plan.layout.lost_found_blocks())
            .saturating_mul(plan.layout.block_len());
        while bytes.len() < least {
            bytes.extend(DirBlockBuilder::new(shape).finish());
        }
    }
    let file = FileId { inode: placed.inode, generation: 0 };
    if let Some(seed) = plan.layout.super_.file_checksum_seed(file) {
        for block in bytes.chunks_exact_mut(plan.layout.block_len()) {
            dir_tail::set_checksum(block, seed);
        }
    }
    (bytes, built.indexed)
}

/// Returns the usage of the owners in a tree, by id.
fn count_tree_usage(plan: &VolumePlan<'_>, kind: QuotaType) -> BTreeMap<u32, QuotaUsage> {
    let layout = &plan.layout;
    let block_bytes = u64::from(layout.super_.block_bytes);
    let mut all: BTreeMap<u32, QuotaUsage> = BTreeMap::new();
    for placed in &plan.placed {
        let node = plan.tree.node(NodeId(placed.node));
        let id = match kind {
            QuotaType::User => node.uid,
            QuotaType::Group => node.gid,
            QuotaType::Project => 0,
        };
        let bytes = placed.allocated_blocks(layout).saturating_mul(block_bytes);
        let inodes = i64::from(placed.ea_inodes).saturating_add(1);
        let usage = QuotaUsage { inodes, bytes: bytes.cast_signed() };
        let sum = all.entry(id).or_default();
        *sum = sum.plus(usage);
    }
    all
}
