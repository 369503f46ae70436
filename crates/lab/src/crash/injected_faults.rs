//! Faults injected into a recording: each breaks one law of the journal, and judges must detect it.
//!
//! Law: a fault changes one thing only; the rest of the recording stays as it was.

use draconis_device::{Event, Ticket};
use draconis_ext::format::jbd2::BlockType;
use draconis_ext::format::jbd2::blocks::header;

use super::journal::Log;

/// The law that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JournalFault {
    /// A transaction is durable before its commit block is written.
    Flush,
    /// File data is durable before the commit block, too (data=ordered).
    Ordered,
    /// Blocks are checkpointed before the tail moves.
    Tail,
    /// The tail moves before the next transaction begins: freed blocks are revoked only if
    /// the journal has a copy behind the tail.
    Checkpoint,
    /// A revoke block cancels the copies of a freed block.
    Revokes,
    /// Commit blocks have the right checksum.
    Sum,
    /// Data is durable when a sync returns.
    Sync,
    /// Discarded blocks are durably free.
    Discard,
}

impl JournalFault {
    pub(super) const ALL: [Self; 8] = [
        Self::Flush,
        Self::Ordered,
        Self::Tail,
        Self::Checkpoint,
        Self::Revokes,
        Self::Sum,
        Self::Sync,
        Self::Discard,
    ];

    /// Injects the fault into the recording; returns how often.
    pub(super) fn inject(self, events: &mut Vec<Event>, log: &Log) -> usize {
        match self {
            Self::Flush => remove_ordering(events, log, |part| part == Part::Of(BlockType::Commit)),
            Self::Ordered => contents_with_commits(events, log),
            Self::Tail => remove_ordering(events, log, |part| part == Part::Superblock),
            Self::Checkpoint => delay_tail_updates(events, log),
            Self::Revokes => alter_blocks(events, log, BlockType::Revoke, |block| {
                // An r_count of 16 leaves only the header.
                block[12..16].copy_from_slice(&16u32.to_be_bytes());
            }),
            Self::Sum => alter_blocks(events, log, BlockType::Commit, |block| block[16] ^= 1),
            Self::Sync => {
                let before = events.len();
                events.retain(|event| !matches!(event, Event::Durable(_)));
                before - events.len()
            }
            Self::Discard => early_discards(events),
        }
    }
}

/// Moves discards before the groups that they waited for.
fn early_discards(events: &mut Vec<Event>) -> usize {
    let mut count = 0;
    for nth in 0..events.len() {
        if !matches!(events[nth], Event::Discard { .. }) {
            continue;
        }
        let group = |event: &Event| matches!(event, Event::Group { .. });
        let durable = events[..nth].iter().rposition(|event| matches!(event, Event::Durable(_)));
        let Some(durable) = durable else { continue };
        let before = events[..durable].iter().rposition(|event| !group(event));
        let mut event = events.remove(nth);
        if let Event::Discard { after, .. } = &mut event {
            after.clear();
        }
        events.insert(before.map_or(0, |at| at + 1), event);
        count += 1;
    }
    count
}

/// Type of a journal block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Superblock,
    Of(BlockType),
    Copy,
}

/// Returns the type of a block if it is in the journal.
fn part(log: &Log, block: u64, bytes: &[u8]) -> Option<Part> {
    let nth = log.blocks.iter().position(|it| *it == block)?;
    Some(match header(bytes) {
        _ if nth == 0 => Part::Superblock,
        Some((kind, _)) => Part::Of(kind),
        None => Part::Copy,
    })
}

type Writes = Vec<(u64, Vec<u8>)>;

/// Splits writes into blocks.
fn by_block(log: &Log, writes: &Writes) -> Writes {
    let cut = |(at, bytes): &(u64, Vec<u8>)| -> Writes {
        let blocks = bytes.chunks(log.block_bytes as usize).zip(0..);
        blocks.map(|(block, nth)| (at + nth * log.block_bytes, block.to_vec())).collect()
    };
    writes.iter().flat_map(cut).collect()
}

fn part_of(log: &Log, write: &(u64, Vec<u8>)) -> Option<Part> {
    part(log, write.0 / log.block_bytes, &write.1)
}

/// Removes the ordering of groups that contain only `which`.
fn remove_ordering(events: &mut [Event], log: &Log, which: impl Fn(Part) -> bool) -> usize {
    let mut count = 0;
    for event in events {
        let Event::Group { after, writes, .. } = event else { continue };
        if by_block(log, writes).iter().all(|write| part_of(log, write).is_some_and(&which)) {
            count += usize::from(!after.is_empty());
            after.clear();
        }
    }
    count
}

/// Delays each tail update to the commit block of the third transaction after its checkpoint.
fn delay_tail_updates(events: &mut [Event], log: &Log) -> usize {
    const LATE: usize = 3;
    let (mut count, mut late): (usize, Option<(usize, Writes)>) = (0, None);
    for event in events {
        let Event::Group { writes, .. } = event else { continue };
        let is = |part| by_block(log, writes).iter().all(|it| part_of(log, it) == Some(part));
        if is(Part::Superblock) {
            late = Some((LATE, std::mem::take(writes)));
            count += 1;
        } else if is(Part::Of(BlockType::Commit)) {
            late = match late.take() {
                Some((1, tail)) => {
                    writes.extend(tail);
                    None
                }
                other => other.map(|(left, tail)| (left - 1, tail)),
            };
        }
    }
    count
}

/// Writes file data together with the commit block instead of before it.
fn contents_with_commits(events: &mut [Event], log: &Log) -> usize {
    let (mut count, mut late): (usize, Option<(Ticket, Writes)>) = (0, None);
    for event in events {
        let Event::Group { ticket, writes, after, .. } = event else { continue };
        if let Some((stage, contents)) = late.take() {
            assert!(after.contains(&stage), "the commit block follows the log");
            count += contents.len();
            writes.extend(contents);
        }
        let (in_log, contents): (Writes, Writes) =
            by_block(log, writes).into_iter().partition(|write| part_of(log, write).is_some());
        let is_log =
            in_log.iter().any(|it| part_of(log, it) == Some(Part::Of(BlockType::Descriptor)));
        if is_log && !contents.is_empty() {
            *writes = in_log;
            late = Some((*ticket, contents));
        }
    }
    count
}

/// Alters all blocks of a type.
fn alter_blocks(
    events: &mut [Event],
    log: &Log,
    kind: BlockType,
    alter: impl Fn(&mut [u8]),
) -> usize {
    let mut count = 0;
    for event in events {
        let Event::Group { writes, .. } = event else { continue };
        *writes = by_block(log, writes);
        for write in writes {
            if part_of(log, write) == Some(Part::Of(kind)) {
                alter(&mut write.1);
                count += 1;
            }
        }
    }
    count
}
