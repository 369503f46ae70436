//! Logs that are whole, cut, worn and made up.

use std::cell::Cell;

use zerocopy::FromZeros;

use super::*;
use crate::format::jbd2::blocks::{escape, needs_escape};
use crate::format::jbd2::{MAGIC, RawJournalSuperblock};

const BLOCK: usize = 1024;
const LEN: u32 = 32;

/// A log in memory, and where the next block of it goes.
struct Made {
    journal: JournalSuperblock,
    blocks: Vec<Vec<u8>>,
    at: u32,
    time: u64,
}

impl Made {
    fn new(compatible: u32, incompatible: u32, start: u32) -> Self {
        let mut raw = RawJournalSuperblock::new_zeroed();
        raw.h_magic.set(MAGIC);
        raw.h_blocktype.set(4);
        raw.s_blocksize.set(BLOCK as u32);
        raw.s_maxlen.set(LEN);
        raw.s_first.set(1);
        raw.s_feature_compat.set(compatible);
        raw.s_feature_incompat.set(incompatible);
        raw.s_checksum_type = 4;
        raw.s_num_fc_blks.set(2);
        raw.set_tail(Some(start), u32::MAX - 1);
        let journal = raw.check(BLOCK as u32, LEN.into()).unwrap();
        Self { journal, blocks: vec![vec![0; BLOCK]; LEN as usize], at: start, time: 100 }
    }

    fn put(&mut self, block: Vec<u8>) {
        let at = self.at;
        self.blocks[at as usize] = block;
        self.at = self.journal.next(at);
    }

    /// A transaction; `age` seconds older than it should be.
    fn transaction(&mut self, sequence: u32, blocks: &[(u64, u8)], revoked: &[u64]) {
        let form = self.journal.form;
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
            tags.push(Tag { block: *block, escaped, sum: form.copy_sum(sequence, &bytes) });
            stored.push(bytes);
        }
        let mut sum = !0;
        if !tags.is_empty() {
            let descriptor = form.descriptor(sequence, &tags);
            sum = crc32_be(sum, &descriptor);
            self.put(descriptor);
        }
        for bytes in stored {
            sum = crc32_be(sum, &bytes);
            self.put(bytes);
        }
        if !revoked.is_empty() {
            self.put(form.revoke_block(sequence, revoked));
        }
        self.time += 1;
        self.put(form.commit_block(sequence, Duration::from_secs(self.time), sum));
    }

    fn recover(&self) -> Result<Recovery> {
        recover(&self.journal, &|at| Ok(Data::owned(self.blocks[at as usize].clone().into())))
    }

    fn copies(&self) -> Vec<(u64, u32)> {
        let found = self.recover().unwrap();
        found.copies.into_iter().map(|(block, copy)| (block, copy.at)).collect()
    }
}

const FIRST: u32 = u32::MAX - 1;

/// Features of every kind of journal.
const KINDS: [(u32, u32); 7] =
    [(0, 1), (0, 3), (1, 1), (0, 1 | 8), (0, 1 | 2 | 8), (0, 1 | 0x10), (0, 1 | 2 | 0x10)];

#[test]
fn the_newest_copy_counts_and_numbers_and_places_wrap() {
    for (compatible, incompatible) in KINDS {
        let mut made = Made::new(compatible, incompatible, LEN - 4);
        made.transaction(FIRST, &[(70, 1), (71, 2)], &[]);
        made.transaction(FIRST + 1, &[(71, 3)], &[]);
        made.transaction(0, &[(72, 0xC0)], &[]);
        let found = made.recover().unwrap();
        assert_eq!((found.transactions, found.next), (3, 1));
        let copies: Vec<_> = found.copies.iter().map(|(b, c)| (*b, c.at, c.escaped)).collect();
        assert_eq!(copies, [(70, LEN - 3, false), (71, 2, false), (72, 5, true)]);
    }
}

#[test]
fn a_revoke_ends_what_is_not_newer() {
    for (compatible, incompatible) in KINDS {
        let mut made = Made::new(compatible, incompatible, 1);
        made.transaction(FIRST, &[(70, 1), (71, 2), (72, 3)], &[]);
        made.transaction(FIRST + 1, &[(75, 1)], &[70, 71, 99]);
        made.transaction(0, &[(71, 3)], &[]);
        let blocks: Vec<u64> = made.copies().into_iter().map(|(block, _)| block).collect();
        assert_eq!(blocks, [71, 72, 75]);
    }
}

#[test]
fn what_is_not_committed_does_not_count() {
    for (compatible, incompatible) in KINDS {
        let mut made = Made::new(compatible, incompatible, 1);
        made.transaction(FIRST, &[(70, 1)], &[]);
        let end = made.at;
        made.transaction(FIRST + 1, &[(71, 1)], &[70]);
        let commit = made.at - 1;
        for at in end..=commit {
            let kept = std::mem::replace(&mut made.blocks[at as usize], vec![0; BLOCK]);
            let is_copy = at == end + 1;
            if !(is_copy && made.journal.form.sums == Sums::None) {
                assert_eq!(made.copies(), [(70, 2)], "block {at} of {:?}", made.journal.form);
            }
            made.blocks[at as usize] = kept;
        }
        assert_eq!(made.copies(), [(71, 5)]);
    }
}

#[test]
fn damage_between_whole_transactions_is_no_end() {
    for (compatible, incompatible) in &KINDS[2..] {
        for (later, is_end) in [(false, true), (true, false)] {
            let mut made = Made::new(*compatible, *incompatible, 1);
            made.transaction(FIRST, &[(70, 1)], &[]);
            made.transaction(FIRST + 1, &[(71, 1)], &[]);
            if later {
                made.transaction(0, &[(72, 1)], &[]);
            }
            made.blocks[5][9] ^= 1;
            assert_eq!(made.recover().is_ok(), is_end, "{:?}", made.journal.form);
        }
    }
    // Where a commit block may be durable before the rest, what follows damage does not count.
    let mut made = Made::new(0, 1 | 4 | 0x10, 1);
    made.transaction(FIRST, &[(70, 1)], &[]);
    made.transaction(FIRST + 1, &[(71, 1)], &[]);
    made.transaction(0, &[(72, 1)], &[]);
    made.blocks[5][9] ^= 1;
    assert_eq!(made.copies(), [(70, 2)]);
}

#[test]
fn what_an_earlier_lap_left_does_not_count() {
    let mut made = Made::new(0, 1 | 0x10, 1);
    made.transaction(FIRST, &[(70, 1)], &[]);
    made.time = 50;
    made.transaction(FIRST + 1, &[(71, 1)], &[]);
    made.blocks[5][9] ^= 1;
    made.transaction(0, &[(72, 1)], &[]);
    assert_eq!(made.copies(), [(70, 2)]);
}

#[test]
fn a_log_that_never_ends_is_passed_once() {
    let mut made = Made::new(0, 1, 1);
    for sequence in 0..LEN - 1 {
        let commit =
            made.journal.form.commit_block(FIRST.wrapping_add(sequence), Duration::ZERO, 0);
        made.put(commit);
    }
    let reads = Cell::new(0);
    let found = recover(&made.journal, &|at| {
        reads.set(reads.get() + 1);
        Ok(Data::owned(made.blocks[at as usize].clone().into()))
    });
    assert_eq!((found.unwrap().transactions, reads.get()), (LEN - 1, LEN - 1));
}

#[test]
fn no_bytes_make_it_fail_otherwise_than_by_an_error() {
    let mut random = draconis_device::Random::new(7);
    for round in 0..3000u32 {
        let (compatible, incompatible) = KINDS[round as usize % KINDS.len()];
        let mut made = Made::new(compatible, incompatible | 0x20, 1 + round % 3);
        for sequence in 0..4 {
            let block = random.below(1 << 40);
            made.transaction(FIRST.wrapping_add(sequence), &[(block, 1), (7, 2)], &[block, 8]);
        }
        for _ in 0..1 + random.below(8) {
            let at = random.below(LEN.into()) as usize;
            match random.below(3) {
                0 => {
                    let byte = made.blocks[at].get_mut(random.below(40) as usize);
                    byte.into_iter().for_each(|byte| *byte = random.below(256) as u8);
                }
                1 => made.blocks[at] = made.blocks[random.below(LEN.into()) as usize].clone(),
                _ => made.blocks[at].truncate(random.below(64) as usize),
            }
        }
        if let Ok(found) = made.recover() {
            assert!(found.copies.len() < LEN as usize);
        }
    }
}
