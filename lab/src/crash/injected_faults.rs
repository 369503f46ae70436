//! Faults injected into a recording: each breaks one law of the journal, and judges must detect it.
//!
//! Law: a fault changes one thing only; the rest of the recording stays as it was.

use draconis_device::Ticket;
use draconis_ext::format::jbd2::BlockType;
use draconis_ext::format::jbd2::blocks::header;
use draconis_testkit::Event;

use super::journal::JournalLocation;

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
    pub(super) fn inject(self, events: &mut Vec<Event>, log: &JournalLocation) -> usize {
        match self {
            Self::Flush => {
                remove_ordering(events, log, |part| part == JournalBlockKind::Of(BlockType::Commit))
            }
            Self::Ordered => delay_data_to_commit(events, log),
            Self::Tail => remove_ordering(events, log, |part| part == JournalBlockKind::Superblock),
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
            Self::Discard => move_discards_early(events),
        }
    }
}

/// Moves discards before the groups that they waited for.
fn move_discards_early(events: &mut Vec<Event>) -> usize {
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
enum JournalBlockKind {
    Superblock,
    Of(BlockType),
    Copy,
}

/// Returns the type of a block if it is in the journal.
fn journal_block_kind(log: &JournalLocation, block: u64, bytes: &[u8]) -> Option<JournalBlockKind> {
    let nth = log.blocks.iter().position(|it| *it == block)?;
    Some(match header(bytes) {
        _ if nth == 0 => JournalBlockKind::Superblock,
        Some((kind, _)) => JournalBlockKind::Of(kind),
        None => JournalBlockKind::Copy,
    })
}

type BlockWrites = Vec<(u64, Vec<u8>)>;

/// Splits writes into blocks.
fn split_into_blocks(log: &JournalLocation, writes: &BlockWrites) -> BlockWrites {
    let cut = |(at, bytes): &(u64, Vec<u8>)| -> BlockWrites {
        let blocks = bytes.chunks(log.block_bytes as usize).zip(0..);
        blocks.map(|(block, nth)| (at + nth * log.block_bytes, block.to_vec())).collect()
    };
    writes.iter().flat_map(cut).collect()
}

fn journal_write_kind(log: &JournalLocation, write: &(u64, Vec<u8>)) -> Option<JournalBlockKind> {
    journal_block_kind(log, write.0 / log.block_bytes, &write.1)
}

/// Removes the ordering of groups that contain only `which`.
fn remove_ordering(
    events: &mut [Event],
    log: &JournalLocation,
    which: impl Fn(JournalBlockKind) -> bool,
) -> usize {
    let mut count = 0;
    for event in events {
        let Event::Group { after, writes, .. } = event else { continue };
        if split_into_blocks(log, writes)
            .iter()
            .all(|write| journal_write_kind(log, write).is_some_and(&which))
        {
            count += usize::from(!after.is_empty());
            after.clear();
        }
    }
    count
}

/// Delays each tail update to the commit block of the third transaction after its checkpoint.
fn delay_tail_updates(events: &mut [Event], log: &JournalLocation) -> usize {
    const DELAY_GROUPS: usize = 3;
    let (mut count, mut late): (usize, Option<(usize, BlockWrites)>) = (0, None);
    for event in events {
        let Event::Group { writes, .. } = event else { continue };
        let is = |part| {
            split_into_blocks(log, writes)
                .iter()
                .all(|it| journal_write_kind(log, it) == Some(part))
        };
        if is(JournalBlockKind::Superblock) {
            late = Some((DELAY_GROUPS, std::mem::take(writes)));
            count += 1;
        } else if is(JournalBlockKind::Of(BlockType::Commit)) {
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
fn delay_data_to_commit(events: &mut [Event], log: &JournalLocation) -> usize {
    let (mut count, mut late): (usize, Option<(Ticket, BlockWrites)>) = (0, None);
    for event in events {
        let Event::Group { ticket, writes, after, .. } = event else { continue };
        if let Some((stage, contents)) = late.take() {
            assert!(after.contains(&stage), "the commit block follows the log");
            count += contents.len();
            writes.extend(contents);
        }
        let (in_log, contents): (BlockWrites, BlockWrites) = split_into_blocks(log, writes)
            .into_iter()
            .partition(|write| journal_write_kind(log, write).is_some());
        let is_log = in_log.iter().any(|it| {
            journal_write_kind(log, it) == Some(JournalBlockKind::Of(BlockType::Descriptor))
        });
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
    log: &JournalLocation,
    kind: BlockType,
    alter: impl Fn(&mut [u8]),
) -> usize {
    let mut count = 0;
    for event in events {
        let Event::Group { writes, .. } = event else { continue };
        *writes = split_into_blocks(log, writes);
        for write in writes {
            if journal_write_kind(log, write) == Some(JournalBlockKind::Of(kind)) {
                alter(&mut write.1);
                count += 1;
            }
        }
    }
    count
}
