//! Conformance checks that every [`Disk`] must pass.
//!
//! Each check takes a writable disk without other users, of at least [`MIN_SECTORS`] sectors and with
//! any contents. It panics with a description if the disk breaks a guarantee of [`Disk`].
//! [`check_all`] runs every check, each on its own disk:
//!
//! ```
//! use draconis_device::MemoryDisk;
//! use draconis_testkit::conform;
//!
//! conform::check_all(|| MemoryDisk::new(vec![0; 1 << 20], 512));
//! ```
//!
//! States after a power cut are checked elsewhere: see [`crate::CrashStates`].

use draconis_types::Block;

use draconis_device::{Disk, Error, Extent, Group, Refused, Ticket, Urgency, Write};

/// Minimum sectors of a checked disk.
pub const MIN_SECTORS: u64 = 300;

/// A check and its name.
pub type NamedCheck = (&'static str, fn(&dyn Disk));

/// All checks.
pub const ALL_CHECKS: [NamedCheck; 15] = [
    ("reads reach both ends and no further", reads_work_up_to_last_sector),
    ("a refusal returns the block", refused_read_returns_block),
    ("a refused group comes back", refused_group_is_returned_unapplied),
    ("what comes later wins", later_overlapping_write_wins),
    ("a group of any shape is applied", groups_of_all_sizes_are_applied),
    ("what was waited for is there", durable_group_is_readable),
    ("many at once", concurrent_reads_and_groups_are_independent),
    ("a chain is taken whole", chain_is_applied_in_order),
    ("a refused chain comes back", refused_chain_is_returned_unapplied),
    ("what is settled is seen", visible_group_is_seen_by_all_reads),
    ("waiting ends for all", concurrent_waits_all_return),
    ("tickets ascend", tickets_ascend_across_threads),
    ("discards harm nothing else", discard_changes_only_its_extents),
    ("holes read as zeros", holes_read_as_zeros),
    ("punched holes are all zeros", punched_hole_is_zeros_in_its_turn),
];

/// Runs every check, each on a disk created by `make`.
///
/// # Panics
/// If a disk fails a check.
pub fn check_all<D: Disk>(mut make: impl FnMut() -> D) {
    for (name, check) in ALL_CHECKS {
        log::debug!("conform: {name}");
        check(&make());
    }
}

/// A disk in units of its sectors.
#[derive(Clone, Copy)]
struct CheckedDisk<'a> {
    disk: &'a dyn Disk,
    sector_bytes: usize,
}

/// First sector, number of sectors, and the byte that fills them.
type FilledRange = (u64, usize, u8);

impl<'a> CheckedDisk<'a> {
    fn from_disk(disk: &'a dyn Disk) -> Self {
        let properties = disk.properties();
        let sector_bytes = properties.sector_bytes as usize;
        assert!(sector_bytes.is_power_of_two(), "a sector of {sector_bytes} bytes");
        assert!(!properties.read_only, "a disk that can be written");
        assert!(properties.len_bytes >= MIN_SECTORS * sector_bytes as u64, "a disk large enough");
        Self { disk, sector_bytes }
    }

    /// As [`Self::from_disk`], with each of the first [`MIN_SECTORS`] sectors filled with its number.
    fn with_numbered_sectors(disk: &'a dyn Disk) -> Self {
        let subject = Self::from_disk(disk);
        let fills: Vec<_> = (0..MIN_SECTORS).map(|nth| (nth, 1, nth as u8)).collect();
        let ticket = subject.submit(&fills);
        assert_eq!(disk.wait_durable(ticket), Ok(()));
        subject
    }

    fn sector_extent(&self, sector: u64, count: usize) -> Extent {
        let bytes = self.sector_bytes as u64;
        Extent::new(sector * bytes, count as u64 * bytes)
    }

    fn filled_block(&self, count: usize, byte: u8) -> Block {
        let mut block = Block::private(count * self.sector_bytes);
        block.copy_in(0, &vec![byte; count * self.sector_bytes]);
        block
    }

    fn make_group(&self, fills: &[FilledRange]) -> Group {
        let write = |&(sector, count, byte): &FilledRange| Write {
            at_bytes: self.sector_extent(sector, 0).start_bytes,
            block: self.filled_block(count, byte),
        };
        Group { writes: fills.iter().map(write).collect() }
    }

    fn submit(&self, fills: &[FilledRange]) -> Ticket {
        self.disk.submit(self.make_group(fills), &[]).expect("a group that is all right is taken")
    }

    fn submit_chain(&self, chain: Vec<Group>, after: &[Ticket]) -> Vec<Ticket> {
        self.disk.submit_chain(chain, after).expect("a chain that is all right is taken")
    }

    fn read(&self, sector: u64, count: usize, urgency: Urgency) -> Vec<u8> {
        let block = self.filled_block(count, 0xdd);
        let answer = self.disk.read(self.sector_extent(sector, count), block, urgency).wait();
        answer.expect("an answer").expect("a read within the disk").into_private().to_vec()
    }

    /// Returns the byte that fills each of the sectors.
    fn sector_fill_bytes(&self, sector: u64, count: usize) -> Vec<u8> {
        let bytes = self.read(sector, count, Urgency::Now);
        let byte = |sector: &[u8]| {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector in parts");
            sector[0]
        };
        bytes.chunks(self.sector_bytes).map(byte).collect()
    }

    fn is_numbered(&self) -> bool {
        self.sector_fill_bytes(0, MIN_SECTORS as usize)
            .into_iter()
            .eq((0..MIN_SECTORS).map(|nth| nth as u8))
    }

    fn len_sectors(&self) -> u64 {
        self.disk.properties().len_bytes / self.sector_bytes as u64
    }

    /// Returns a ticket that the disk has not issued.
    fn unissued_ticket(&self) -> Ticket {
        Ticket(self.submit(&[]).0 + 1000)
    }
}

fn assert_durable(disk: &dyn Disk, ticket: Ticket) {
    assert_eq!(disk.wait_durable(ticket), Ok(()), "{ticket:?}");
}

fn block_lens(chain: &[Group]) -> Vec<Vec<usize>> {
    let group = |group: &Group| group.writes.iter().map(|write| write.block.len()).collect();
    chain.iter().map(group).collect()
}

/// Reads of any length and urgency return written bytes, up to the last sector.
pub fn reads_work_up_to_last_sector(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let last = it.len_sectors() - 1;
    let ticket = it.submit(&[(last, 1, 0xee)]);
    assert_durable(disk, ticket);
    for urgency in [Urgency::Now, Urgency::Ahead] {
        for (sector, count) in [(0, 1), (1, 8), (8, 128), (7, 200), (0, MIN_SECTORS as usize - 1)] {
            let bytes = it.read(sector, count, urgency);
            for (nth, got) in bytes.chunks(it.sector_bytes).enumerate() {
                let number = sector as u8;
                let number = number.wrapping_add(nth as u8);
                assert!(got.iter().all(|byte| *byte == number), "{count} at {sector}: {nth}");
            }
        }
        assert!(it.read(last, 1, urgency).iter().all(|byte| *byte == 0xee), "the last sector");
    }
}

/// Requests out of range or misaligned are refused, and return their block.
pub fn refused_read_returns_block(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    let (len, sector) = (disk.properties().len_bytes, it.sector_bytes);
    for urgency in [Urgency::Now, Urgency::Ahead] {
        let refused = |start, extent_len: usize, len| {
            let at = Extent::new(start, extent_len as u64);
            let answer = disk.read(at, Block::private(len), urgency).wait().expect("an answer");
            let Err(Refused { payload, error }) = answer else { panic!("{at} of {len} was read") };
            assert_eq!(payload.expect("the block comes back").len(), len);
            error
        };
        let top = u64::MAX - (sector as u64 - 1);
        for (start, len) in [(len, sector), (len - sector as u64, 2 * sector), (top, sector)] {
            let error = refused(start, len, len);
            assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
        }
        for (start, extent_len, len) in
            [(1, sector, sector), (0, sector - 1, sector - 1), (0, 2 * sector, sector)]
        {
            let error = refused(start, extent_len, len);
            assert!(matches!(error, Error::Misaligned { .. }), "{error}");
        }
    }
}

/// A refused group writes nothing and is returned whole.
pub fn refused_group_is_returned_unapplied(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let (len, sector) = (disk.properties().len_bytes, it.sector_bytes);
    let good = || Write { at_bytes: 0, block: it.filled_block(1, 0xaa) };
    let top = u64::MAX - (sector as u64 - 1);
    for (at_bytes, bytes) in [(len, sector), (top, sector), (7, sector), (sector as u64, 100)] {
        let bad = Write { at_bytes, block: Block::private(bytes) };
        let refused = disk.submit(Group { writes: vec![good(), bad] }, &[]);
        let Err(Refused { payload, error }) = refused else { panic!("{bytes} at {at_bytes}") };
        let writes = payload.expect("the group comes back").writes;
        let back: Vec<_> = writes.iter().map(|it| (it.at_bytes, it.block.len())).collect();
        assert_eq!(back, [(0, sector), (at_bytes, bytes)]);
        let mut byte = [0];
        writes[0].block.copy_out(sector - 1, &mut byte);
        assert_eq!(byte, [0xaa]);
        let why = matches!(error, Error::OutOfRange { .. } | Error::Misaligned { .. });
        assert!(why, "{error}");
    }
    let unknown = it.unissued_ticket();
    let refused = disk.submit(Group { writes: vec![good()] }, &[unknown]).err();
    let Some(Refused { payload, error }) = refused else { panic!("{unknown:?} was believed") };
    assert_eq!(error, Error::UnknownTicket(unknown));
    assert_eq!(block_lens(&payload.into_iter().collect::<Vec<_>>()), [[sector]]);
    assert_eq!(disk.wait_durable(unknown), Err(Error::UnknownTicket(unknown)));
    assert_eq!(disk.wait_visible(unknown), Err(Error::UnknownTicket(unknown)));
    assert!(it.is_numbered(), "a refused group changed something");
}

/// Overlapping writes are applied in order, within a group and between groups.
pub fn later_overlapping_write_wins(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let first = it.submit(&[(0, 4, 1), (1, 1, 2), (2, 8, 3)]);
    let second = disk.submit(it.make_group(&[(3, 1, 4)]), &[first]).expect("taken");
    assert!(second > first, "{second:?} after {first:?}");
    let third = it.submit(&[(4, 1, 5)]);
    assert_durable(disk, third);
    assert_eq!(it.sector_fill_bytes(0, 11), [1, 2, 3, 4, 5, 3, 3, 3, 3, 3, 10]);
}

/// A group of many writes, with many dependencies, of one large write, or empty.
pub fn groups_of_all_sizes_are_applied(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    let tickets: Vec<_> = (0..40).map(|nth| it.submit(&[(0, 1, nth)])).collect();
    let many: Vec<_> = (0..200).map(|nth| (299 - nth, 1, nth as u8)).collect();
    let last = disk.submit(it.make_group(&many), &tickets).expect("taken");
    assert_durable(disk, last);
    let bytes = it.sector_fill_bytes(0, MIN_SECTORS as usize);
    assert_eq!(bytes[0], 39);
    assert!((0..200).all(|nth| bytes[299 - nth] == nth as u8));
    let whole = it.make_group(&[(0, MIN_SECTORS as usize, 0x77)]);
    let whole = disk.submit(whole, &[last]).expect("taken");
    assert_durable(disk, whole);
    assert_eq!(it.sector_fill_bytes(0, MIN_SECTORS as usize), [0x77; MIN_SECTORS as usize]);
    let nothing = it.submit(&[]);
    assert_durable(disk, nothing);
    assert_eq!(it.submit_chain(vec![], &[]), []);
}

/// After a wait, the group and its dependencies are readable; waiting twice is no error.
pub fn durable_group_is_readable(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    for round in 1..20u8 {
        let at = u64::from(round) * 2;
        let first = it.submit(&[(at, 1, round)]);
        let second = disk.submit(it.make_group(&[(at + 1, 1, round)]), &[first]).expect("taken");
        assert_durable(disk, second);
        assert_eq!(it.sector_fill_bytes(at, 2), [round; 2]);
        assert_durable(disk, first);
        assert_durable(disk, second);
    }
}

/// Six threads, each with its own part of the disk.
pub fn concurrent_reads_and_groups_are_independent(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    std::thread::scope(|scope| {
        for user in 0..6u64 {
            scope.spawn(move || {
                let base = user * 50;
                for round in 0..20u64 {
                    let at = base + round % 49;
                    let byte = (user * 40 + round) as u8;
                    let ahead: Vec<_> = (0..4)
                        .map(|nth| {
                            let at = it.sector_extent(base + 49 - nth % 2, 1);
                            disk.read(at, it.filled_block(1, 0xdd), Urgency::Ahead)
                        })
                        .collect();
                    let ticket = it.submit(&[(at, 1, byte)]);
                    assert_durable(disk, ticket);
                    assert_eq!(it.sector_fill_bytes(at, 1), [byte]);
                    for (nth, pending) in (0..).zip(ahead) {
                        let got = pending.wait().expect("an answer").expect("a read");
                        let untouched = (base + 49 - nth % 2) as u8;
                        let got = got.into_private()[0];
                        assert!(nth % 2 == 1 || got == untouched, "{got} for {untouched}");
                    }
                }
            });
        }
    });
}

/// A chain gets one ticket per group, and its groups are applied in order.
pub fn chain_is_applied_in_order(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let before = it.submit(&[(0, 2, 1)]);
    let chain = vec![
        it.make_group(&[(1, 2, 2), (8, 1, 2)]),
        Group::default(),
        it.make_group(&[(2, 1, 3)]),
        it.make_group(&[(16, 100, 4)]),
    ];
    let small = (0..40).map(|nth| it.make_group(&[(200 + nth, 1, nth as u8)]));
    let tickets = it.submit_chain(chain.into_iter().chain(small).collect(), &[before]);
    assert_eq!(tickets.len(), 44);
    assert!(tickets[0] > before && tickets.windows(2).all(|pair| pair[0] < pair[1]));
    for ticket in [tickets[0], tickets[3], tickets[43], tickets[1]] {
        assert_durable(disk, ticket);
    }
    let bytes = it.sector_fill_bytes(0, MIN_SECTORS as usize);
    assert_eq!(bytes[..9], [1, 2, 3, 3, 4, 5, 6, 7, 2]);
    assert!(bytes[16..116].iter().all(|byte| *byte == 4));
    assert!(bytes[200..240].iter().copied().eq(0..40));
}

/// A chain with one invalid group is refused whole.
pub fn refused_chain_is_returned_unapplied(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let good = || it.make_group(&[(0, 1, 0xaa), (2, 2, 0xaa)]);
    let bad = it.make_group(&[(it.len_sectors() - 1, 2, 1)]);
    let sector = it.sector_bytes;
    let refused = disk.submit_chain(vec![good(), bad, good()], &[]).err();
    let Some(Refused { payload, error }) = refused else { panic!("a chain beyond the end") };
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let (small, large) = (vec![sector, 2 * sector], vec![2 * sector]);
    let payload = payload.expect("the chain comes back");
    assert_eq!(block_lens(&payload), [small.clone(), large, small.clone()]);
    let unknown = it.unissued_ticket();
    let refused = disk.submit_chain(vec![good(), good()], &[unknown]).err();
    let Some(Refused { payload, error }) = refused else { panic!("{unknown:?} was believed") };
    assert_eq!(error, Error::UnknownTicket(unknown));
    assert_eq!(block_lens(&payload.expect("the chain comes back")), [small.clone(), small]);
    assert!(it.is_numbered(), "a refused chain changed something");
    // The refused chain has used no ticket.
    let next = it.submit(&[]);
    assert!(next < unknown);
    assert_durable(disk, next);
}

/// Every read sees a group once `wait_visible` has returned.
pub fn visible_group_is_seen_by_all_reads(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    for round in 0..50u8 {
        let at = u64::from(round) * 2;
        let chain = vec![it.make_group(&[(at, 1, round)]), it.make_group(&[(at + 1, 1, round)])];
        let tickets = it.submit_chain(chain, &[]);
        assert_eq!(disk.wait_visible(tickets[1]), Ok(()));
        for urgency in [Urgency::Now, Urgency::Ahead] {
            assert!(it.read(at, 2, urgency).iter().all(|byte| *byte == round), "{round}");
        }
        assert_eq!(disk.wait_visible(tickets[0]), Ok(()));
    }
}

/// Twelve threads wait, some for groups of other threads.
pub fn concurrent_waits_all_return(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    std::thread::scope(|scope| {
        for user in 0..12u64 {
            scope.spawn(move || {
                for round in 0..10u8 {
                    let at = user * 20;
                    let chain = (0..3).map(|nth| it.make_group(&[(at + nth, 1, round)])).collect();
                    let tickets = it.submit_chain(chain, &[]);
                    assert_durable(disk, tickets[2 - usize::from(round) % 3]);
                    assert_eq!(disk.wait_visible(tickets[2]), Ok(()));
                    assert_eq!(it.sector_fill_bytes(at, 3), [round; 3]);
                }
            });
        }
    });
}

/// Tickets are unique, and ascend within each thread.
pub fn tickets_ascend_across_threads(disk: &dyn Disk) {
    let it = CheckedDisk::from_disk(disk);
    let each = |user: u64| {
        let tickets: Vec<_> = (0..30).map(|nth| it.submit(&[(user * 30 + nth, 1, 1)])).collect();
        assert!(tickets.windows(2).all(|pair| pair[0] < pair[1]), "{tickets:?}");
        tickets
    };
    let mut all: Vec<Ticket> = std::thread::scope(|scope| {
        let users: Vec<_> = (0..4).map(|user| scope.spawn(move || each(user))).collect();
        users.into_iter().flat_map(|user| user.join().expect("a user")).collect()
    });
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "a ticket was given twice");
    let last = all[all.len() - 1];
    assert_durable(disk, last);
    all.into_iter().for_each(|ticket| assert_durable(disk, ticket));
}

/// A punched hole is zeros, without its neighbours; groups before it are gone, and later ones are not.
pub fn punched_hole_is_zeros_in_its_turn(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    it.submit(&[(20, 30, 0xcc)]);
    let Some(hole) = disk.punch_hole(it.sector_extent(25, 100)).unwrap() else { return };
    let over = it.submit(&[(30, 1, 0xcd)]);
    assert!(hole < over, "a hole is a group");
    assert_durable(disk, over);
    disk.wait_all_durable().unwrap();
    for (sector, byte) in it.sector_fill_bytes(0, MIN_SECTORS as usize).into_iter().enumerate() {
        let wanted = match sector {
            30 => 0xcd,
            20..25 => 0xcc,
            25..125 => 0,
            _ => sector as u8,
        };
        assert_eq!(byte, wanted, "sector {sector}");
    }
    let beyond = disk.punch_hole(it.sector_extent(it.len_sectors() - 1, 2));
    assert!(matches!(beyond, Err(Error::OutOfRange { .. })), "{beyond:?}");
}

/// Discarded sectors hold their old contents or zeroes; other sectors and later writes stay.
pub fn discard_changes_only_its_extents(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    let ticket = it.submit(&[(299, 1, 43)]);
    let odd = Extent::new(it.sector_bytes as u64 * 120 + 1, it.sector_bytes as u64);
    let gone =
        [it.sector_extent(16, 64), it.sector_extent(100, 1), odd, it.sector_extent(150, 100)];
    assert_eq!(disk.discard(&gone, &[ticket]), Ok(()));
    // Before and after its dependency is durable; over the discarded range, and beside it.
    let over = it.submit(&[(20, 2, 0xcc), (155, 1, 0xcc)]);
    assert_durable(disk, over);
    let again = it.submit(&[(40, 1, 0xcd)]);
    assert_eq!(disk.discard(&[it.sector_extent(60, 20)], &[over]), Ok(()));
    assert_durable(disk, again);
    for nth in 0..3 {
        let bytes = it.sector_fill_bytes(0, MIN_SECTORS as usize);
        for (sector, byte) in bytes.into_iter().enumerate() {
            let was = sector as u8;
            let is_gone =
                |at: &Extent| at.overlaps(it.sector_extent(sector as u64, 1)) && *at != odd;
            match sector {
                20 | 21 | 155 => assert_eq!(byte, 0xcc, "sector {sector}"),
                40 => assert_eq!(byte, 0xcd),
                _ if gone.iter().any(is_gone) => {
                    assert!(byte == was || byte == 0, "{byte} in sector {sector}");
                }
                _ => assert_eq!(byte, was, "sector {sector}"),
            }
        }
        let ticket = it.submit(&[(nth, 1, nth as u8)]);
        assert_durable(disk, ticket);
    }
    if disk.properties().discards {
        let beyond = it.sector_extent(it.len_sectors() - 1, 2);
        let error = disk.discard(&[beyond], &[]).expect_err("beyond the end");
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
        let unknown = it.unissued_ticket();
        assert_eq!(disk.discard(&[], &[unknown]), Err(Error::UnknownTicket(unknown)));
    }
}

/// Checks that the runs of the disk cover it, and that a hole reads as zeros: also after discards
/// and writes that are visible.
pub fn holes_read_as_zeros(disk: &dyn Disk) {
    let it = CheckedDisk::with_numbered_sectors(disk);
    assert_eq!(disk.discard(&[it.sector_extent(16, 200)], &[]), Ok(()));
    let ticket = it.submit(&[(64, 3, 0xee)]);
    assert_eq!(disk.wait_visible(ticket), Ok(()));
    let end = it.len_sectors().min(MIN_SECTORS * 8) * it.sector_bytes as u64;
    let mut at = 0;
    while at < end {
        let run = disk.allocation_run(Extent::new(at, end - at)).expect("a run within the disk");
        assert!(run.len_bytes > 0 && run.len_bytes <= end - at, "{run:?} at byte {at}");
        if run.is_hole {
            let sector_bytes = it.sector_bytes as u64;
            for sector in at.div_ceil(sector_bytes)..(at + run.len_bytes) / sector_bytes {
                assert_eq!(it.sector_fill_bytes(sector, 1), [0], "sector {sector}");
            }
        }
        at += run.len_bytes;
    }
    let beyond = it.sector_extent(it.len_sectors() - 1, 2);
    let error = disk.allocation_run(beyond).expect_err("beyond the end");
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}
