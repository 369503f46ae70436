//! Recovery of complete, cut, damaged and constructed logs.

use std::cell::Cell;

use zerocopy::FromZeros;

use super::*;
use crate::format::jbd2::blocks::{escape, needs_escape};
use crate::format::jbd2::{MAGIC, RawJournalSuperblock};

const BLOCK: usize = 1024;
const LOG_BLOCKS: u32 = 32;

/// An in-memory log, and the position of its next block.
struct BuiltJournal {
    journal: JournalSuperblock,
    blocks: Vec<Vec<u8>>,
    at: u32,
    time: u64,
    /// Mount time of the volume.
    since: u64,
    reads: Cell<u32>,
}

impl BuiltJournal {
    fn new(compatible: u32, incompatible: u32, start: u32) -> Self {
        let mut raw = RawJournalSuperblock::new_zeroed();
        raw.h_magic.set(MAGIC);
        raw.h_blocktype.set(4);
        raw.s_blocksize.set(BLOCK as u32);
        raw.s_maxlen.set(LOG_BLOCKS);
        raw.s_first.set(1);
        raw.s_feature_compat.set(compatible);
        raw.s_feature_incompat.set(incompatible);
        raw.s_checksum_type = 4;
        raw.s_num_fc_blks.set(2);
        raw.set_tail(Some(start), u32::MAX - 1);
        let journal = raw.check(BLOCK as u32, LOG_BLOCKS.into()).unwrap();
        let (blocks, reads) = (vec![vec![0; BLOCK]; LOG_BLOCKS as usize], Cell::new(0));
        Self { journal, blocks, at: start, time: 100, since: 100, reads }
    }

    fn append_block(&mut self, block: Vec<u8>) {
        let at = self.at;
        self.blocks[at as usize] = block;
        self.at = self.journal.next(at);
    }

    /// Appends a transaction whose commit time is `age` seconds too old.
    fn append_transaction(&mut self, sequence: u32, blocks: &[(u64, u8)], revoked: &[u64]) {
        let form = self.journal.format;
        let mut stored = vec![];
        let mut tags = vec![];
        for (block, byte) in blocks {
            let mut bytes = vec![*byte; BLOCK];
            if *byte == 0xC0 {
                bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
            }
            let escaped = needs_escape(&bytes);
            if escaped {
                escape(&mut bytes);
            }
            tags.push(BlockTag {
                block: *block,
                escaped,
                sum: form.tag_checksum(sequence, &bytes),
            });
            stored.push(bytes);
        }
        let mut sum = !0;
        if !tags.is_empty() {
            let descriptor = form.build_descriptor(sequence, &tags);
            sum = crc32_be(sum, &descriptor);
            self.append_block(descriptor);
        }
        for bytes in stored {
            sum = crc32_be(sum, &bytes);
            self.append_block(bytes);
        }
        if !revoked.is_empty() {
            self.append_block(form.build_revoke(sequence, revoked));
        }
        self.time += 1;
        self.append_block(form.build_commit(sequence, Duration::from_secs(self.time), sum));
    }

    fn recover(&self) -> ScannedLog {
        scan_log(&self.journal, self).unwrap()
    }

    fn damage(&self) -> Option<&'static str> {
        let found = self.recover();
        found.damage.or(found.skipped).map(|damage| damage.what)
    }

    /// Returns true if each copy has a checksum of its own.
    fn has_tag_sums(&self) -> bool {
        !matches!(self.journal.format.checksums, JournalChecksums::None | JournalChecksums::Commit)
    }

    fn copies(&self) -> Vec<(u64, u32)> {
        let found = self.recover();
        found.copies.into_iter().map(|(block, copy)| (block, copy.at)).collect()
    }
}

impl LogSource for BuiltJournal {
    fn read(&self, at: u32) -> Result<SharedBytes> {
        self.reads.set(self.reads.get() + 1);
        Ok(SharedBytes::from_owned_bytes(self.blocks[at as usize].clone().into()))
    }

    fn invalid_target_reason(&self, block: u64) -> Option<&'static str> {
        (block == 66).then_some("not to be copied")
    }

    fn mount_time(&self) -> Duration {
        Duration::from_secs(self.since)
    }
}

const FIRST_SEQUENCE: u32 = u32::MAX - 1;

/// Feature sets of every journal format.
const JOURNAL_FEATURE_SETS: [(u32, u32); 7] =
    [(0, 1), (0, 3), (1, 1), (0, 1 | 8), (0, 1 | 2 | 8), (0, 1 | 0x10), (0, 1 | 2 | 0x10)];

#[test]
fn newest_copy_wins_across_sequence_and_log_wrap() {
    for (compatible, incompatible) in JOURNAL_FEATURE_SETS {
        let mut made = BuiltJournal::new(compatible, incompatible, LOG_BLOCKS - 4);
        made.append_transaction(FIRST_SEQUENCE, &[(70, 1), (71, 2)], &[]);
        made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 3)], &[]);
        made.append_transaction(0, &[(72, 0xC0)], &[]);
        let found = made.recover();
        assert_eq!((found.transactions, found.next, found.damage), (3, 1, None));
        let copies: Vec<_> = found.copies.iter().map(|(b, c)| (*b, c.at, c.escaped)).collect();
        assert_eq!(copies, [(70, LOG_BLOCKS - 3, false), (71, 2, false), (72, 5, true)]);
    }
}

#[test]
fn revoke_skips_older_copies() {
    for (compatible, incompatible) in JOURNAL_FEATURE_SETS {
        let mut made = BuiltJournal::new(compatible, incompatible, 1);
        made.append_transaction(FIRST_SEQUENCE, &[(70, 1), (71, 2), (72, 3)], &[]);
        made.append_transaction(FIRST_SEQUENCE + 1, &[(75, 1)], &[70, 71, 99]);
        made.append_transaction(0, &[(71, 3)], &[]);
        let blocks: Vec<u64> = made.copies().into_iter().map(|(block, _)| block).collect();
        assert_eq!(blocks, [71, 72, 75]);
    }
}

/// A transaction without its commit block ends the log. With it, any other missing block is damage,
/// and the transactions before stay valid.
#[test]
fn missing_committed_block_is_damage() {
    for (compatible, incompatible) in JOURNAL_FEATURE_SETS {
        let mut made = BuiltJournal::new(compatible, incompatible, 1);
        made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
        let end = made.at;
        made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 1)], &[70]);
        let commit = made.at - 1;
        for at in end..=commit {
            let kept = std::mem::replace(&mut made.blocks[at as usize], vec![0; BLOCK]);
            let is_copy = at == end + 1;
            if !(is_copy && made.journal.format.checksums == JournalChecksums::None) {
                // A copy with a checksum of its own is left out, and the revocation counts.
                let left: &[_] = if is_copy && made.has_tag_sums() { &[] } else { &[(70, 2)] };
                assert_eq!(made.copies(), left, "block {at} of {:?}", made.journal.format);
                assert_eq!(made.damage().is_some(), at < commit, "{at}: {:?}", made.journal.format);
            }
            made.blocks[at as usize] = kept;
        }
        assert_eq!((made.copies(), made.damage()), (vec![(71, 5)], None));
    }
}

#[test]
fn failed_transaction_checksum_is_damage() {
    for (compatible, incompatible) in &JOURNAL_FEATURE_SETS[2..] {
        for is_last in [false, true] {
            let mut made = BuiltJournal::new(*compatible, *incompatible, 1);
            made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
            made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 1)], &[]);
            if !is_last {
                made.append_transaction(0, &[(72, 1)], &[]);
            }
            made.blocks[5][9] ^= 1;
            assert!(made.damage().is_some(), "{:?}", made.journal.format);
            let left: &[_] = match made.has_tag_sums() && !is_last {
                true => &[(70, 2), (72, 8)],
                false => &[(70, 2)],
            };
            assert_eq!(made.copies(), left);
        }
    }
    // If a commit block may be durable before the rest, only a later commit block proves damage.
    for is_last in [false, true] {
        let mut made = BuiltJournal::new(0, 1 | 4 | 0x10, 1);
        made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
        made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 1)], &[]);
        if !is_last {
            made.append_transaction(0, &[(72, 1)], &[]);
        }
        made.blocks[5][9] ^= 1;
        assert_eq!((made.copies(), made.damage().is_some()), (vec![(70, 2)], !is_last));
    }
    let mut made = BuiltJournal::new(0, 1, 1);
    made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
    made.append_transaction(FIRST_SEQUENCE + 1, &[(66, 1)], &[]);
    assert_eq!((made.copies(), made.damage()), (vec![(70, 2)], Some("not to be copied")));
}

/// Flips every bit of the headers of a log. Without a checksum, a wrong number in the last commit
/// block looks like a commit block of an earlier cycle.
#[test]
fn flipped_header_bit_is_damage() {
    for (compatible, incompatible) in JOURNAL_FEATURE_SETS {
        let mut made = BuiltJournal::new(compatible, incompatible, 1);
        made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
        made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 1)], &[70]);
        let last = made.at - 1;
        for at in [1, 3, 4, 6, 7] {
            for bit in 0..96 {
                made.blocks[at][bit / 8] ^= 1 << (bit % 8);
                let is_number_of_last = at == last as usize && bit >= 64;
                let has_sums = !matches!(
                    made.journal.format.checksums,
                    JournalChecksums::None | JournalChecksums::Commit
                );
                // Descriptor and revoke blocks differ in one bit: only a checksum shows the flip.
                let is_other_kind = bit == 58 && !has_sums && matches!(at, 1 | 4 | 6);
                if (has_sums || !is_number_of_last) && !is_other_kind {
                    assert!(
                        made.damage().is_some(),
                        "{at}, bit {bit} of {:?}",
                        made.journal.format
                    );
                }
                made.blocks[at][bit / 8] ^= 1 << (bit % 8);
            }
        }
        assert_eq!(made.damage(), None);
    }
}

#[test]
fn blocks_of_previous_lap_are_ignored() {
    let mut made = BuiltJournal::new(0, 1 | 0x10, 1);
    made.append_transaction(FIRST_SEQUENCE, &[(70, 1)], &[]);
    made.time = 50;
    made.append_transaction(FIRST_SEQUENCE + 1, &[(71, 1)], &[]);
    made.blocks[5][9] ^= 1;
    made.append_transaction(0, &[(72, 1)], &[]);
    assert_eq!((made.copies(), made.damage()), (vec![(70, 2)], None));
    // The log has transactions of a previous volume, with higher numbers; the first transaction of
    // the new volume is missing.
    for (compatible, incompatible) in JOURNAL_FEATURE_SETS {
        let mut made = BuiltJournal::new(compatible, incompatible, 1);
        for nth in 0..4 {
            made.append_transaction(FIRST_SEQUENCE.wrapping_add(nth), &[(70, 1)], &[]);
        }
        made.blocks[1] = vec![0; BLOCK];
        assert!(made.damage().is_some());
        made.since = 200;
        assert_eq!((made.copies(), made.damage()), (vec![], None));
    }
}

#[test]
fn log_full_of_commits_ends_after_one_lap() {
    let mut made = BuiltJournal::new(0, 1, 1);
    for sequence in 0..LOG_BLOCKS - 1 {
        let commit = made.journal.format.build_commit(
            FIRST_SEQUENCE.wrapping_add(sequence),
            Duration::ZERO,
            0,
        );
        made.append_block(commit);
    }
    assert_eq!((made.recover().transactions, made.reads.get()), (LOG_BLOCKS - 1, LOG_BLOCKS - 1));
}

#[test]
fn random_bytes_fail_only_with_errors() {
    let mut random = draconis_device::Random::new(7);
    for round in 0..3000u32 {
        let (compatible, incompatible) =
            JOURNAL_FEATURE_SETS[round as usize % JOURNAL_FEATURE_SETS.len()];
        let mut made = BuiltJournal::new(compatible, incompatible, 1 + round % 3);
        for sequence in 0..4 {
            let block = random.next_below(1 << 40);
            made.append_transaction(
                FIRST_SEQUENCE.wrapping_add(sequence),
                &[(block, 1), (7, 2)],
                &[block, 8],
            );
        }
        for _ in 0..1 + random.next_below(8) {
            let at = random.next_below(LOG_BLOCKS.into()) as usize;
            match random.next_below(3) {
                0 => {
                    let byte = made.blocks[at].get_mut(random.next_below(40) as usize);
                    byte.into_iter().for_each(|byte| *byte = random.next_below(256) as u8);
                }
                1 => {
                    made.blocks[at] =
                        made.blocks[random.next_below(LOG_BLOCKS.into()) as usize].clone()
                }
                _ => made.blocks[at].truncate(random.next_below(64) as usize),
            }
        }
        assert!(made.recover().copies.len() < LOG_BLOCKS as usize);
    }
}
