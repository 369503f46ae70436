use super::*;

fn group_event(ticket: u64, after: &[u64], writes: &[(u64, usize, u8)]) -> Event {
    Event::Group {
        ticket: Ticket(ticket),
        chain: Ticket(ticket),
        after: after.iter().copied().map(Ticket).collect(),
        writes: writes
            .iter()
            .map(|(sector, count, byte)| (sector * 512, vec![*byte; count * 512]))
            .collect(),
    }
}

/// Returns ticket, marks and the first byte of the first four sectors of each state.
fn crash_states(events: Vec<Event>, options: CrashOptions) -> Vec<(u64, Vec<u64>, [u8; 4])> {
    let crashes = CrashStates::new(vec![0; 4096], events, options);
    crashes
        .map(|crash| {
            let bytes = crash.disk.to_bytes();
            let sectors = std::array::from_fn(|nth| bytes[nth * 512]);
            (crash.durable.0, crash.marks().to_vec(), sectors)
        })
        .collect()
}

const EXHAUSTIVE_OPTIONS: CrashOptions =
    CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 20 };
const PREFIX_OPTIONS: CrashOptions = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };

#[test]
fn without_flush_any_subset_may_be_written() {
    let events = vec![group_event(1, &[], &[(0, 1, 1)]), group_event(2, &[], &[(1, 2, 2)])];
    let got: Vec<_> = crash_states(events, EXHAUSTIVE_OPTIONS)
        .into_iter()
        .map(|(_, _, sectors)| sectors)
        .collect();
    let mut sorted = got.clone();
    sorted.sort_unstable();
    let expected: Vec<[u8; 4]> =
        (0..8).map(|bits| [bits >> 2 & 1, (bits >> 1 & 1) * 2, (bits & 1) * 2, 0]).collect();
    assert_eq!(sorted, expected);
}

#[test]
fn overwritten_sector_may_be_old_or_new() {
    let events = vec![group_event(1, &[], &[(0, 1, 1)]), group_event(2, &[], &[(0, 1, 2)])];
    let got: Vec<u8> =
        crash_states(events, EXHAUSTIVE_OPTIONS).iter().map(|(_, _, sectors)| sectors[0]).collect();
    assert_eq!(got, [0, 1, 2]);
}

#[test]
fn dependent_group_is_present_only_after_its_dependency() {
    let chain = vec![
        group_event(1, &[], &[(0, 1, 1), (1, 1, 1)]),
        group_event(2, &[1], &[(2, 1, 2)]),
        group_event(3, &[2], &[(3, 1, 3)]),
    ];
    let got: Vec<_> =
        crash_states(chain, EXHAUSTIVE_OPTIONS).into_iter().map(|(at, _, it)| (at, it)).collect();
    let expected = [
        (0, [0, 0, 0, 0]),
        (0, [1, 0, 0, 0]),
        (0, [0, 1, 0, 0]),
        (0, [1, 1, 0, 0]),
        (1, [1, 1, 0, 0]),
        (1, [1, 1, 2, 0]),
        (2, [1, 1, 2, 0]),
        (2, [1, 1, 2, 3]),
    ];
    assert_eq!(got, expected);
}

#[test]
fn flush_makes_all_earlier_groups_durable() {
    let events = vec![
        group_event(1, &[], &[(0, 1, 1)]),
        group_event(2, &[], &[(1, 1, 2)]),
        group_event(3, &[1], &[(2, 1, 3)]),
    ];
    let got = crash_states(events, EXHAUSTIVE_OPTIONS);
    assert!(got.iter().all(|(_, _, s)| s[2] == 0 || (s[0], s[1]) == (1, 2)), "{got:?}");
    assert_eq!(got.last().unwrap(), &(2, vec![], [1, 2, 3, 0]));
}

#[test]
fn crash_state_has_marks_made_before_it() {
    let events = vec![
        Event::Mark(1),
        group_event(1, &[], &[(0, 1, 1)]),
        group_event(2, &[], &[(1, 1, 2)]),
        Event::Mark(2),
        Event::Durable(Ticket(1)),
        Event::Mark(3),
        group_event(3, &[], &[(2, 1, 3)]),
        Event::Durable(Ticket(3)),
        Event::Mark(4),
    ];
    let got = crash_states(events, EXHAUSTIVE_OPTIONS);
    // Before the first wait all subsets are possible, even of the second group; nothing is
    // known of the third. Then the first group is present, and after the last wait all are.
    let at = |durable: u64| -> Vec<_> {
        got.iter().filter(|(at, ..)| *at == durable).map(|(_, m, s)| (m.clone(), *s)).collect()
    };
    assert_eq!(at(0).len(), 4);
    assert!(at(0).iter().all(|(marks, s)| *marks == [1, 2] && s[2] == 0));
    assert_eq!(at(1).len(), 4);
    assert!(at(1).iter().all(|(marks, s)| *marks == [1, 2, 3] && s[0] == 1));
    assert_eq!(at(3), [(vec![1, 2, 3, 4], [1, 2, 3, 0])]);
}

#[test]
fn recording_may_start_at_any_ticket() {
    let events = vec![group_event(8, &[7], &[(0, 1, 1)]), group_event(9, &[8], &[(1, 1, 2)])];
    let got: Vec<_> = crash_states(events, EXHAUSTIVE_OPTIONS)
        .into_iter()
        .map(|(at, _, s)| (at, s[0], s[1]))
        .collect();
    assert_eq!(got, [(7, 0, 0), (7, 1, 0), (8, 1, 0), (8, 1, 2)]);
}

#[test]
fn prefix_states_are_ordered_with_next_write_torn() {
    let events =
        vec![group_event(1, &[], &[(0, 1, 1), (1, 2, 2)]), group_event(2, &[1], &[(3, 1, 3)])];
    let crashes = CrashStates::new(vec![0; 4096], events, PREFIX_OPTIONS);
    let cuts: Vec<_> = crashes.map(|crash| (crash.durable.0, crash.kind)).collect();
    let expected = [
        (0, CrashKind::Prefix(0)),
        (0, CrashKind::Prefix(1)),
        (0, CrashKind::Torn(1)),
        (1, CrashKind::Prefix(0)),
        (1, CrashKind::Prefix(1)),
    ];
    // A tear that takes all or nothing is a prefix, and is generated once.
    assert!(cuts.iter().all(|cut| expected.contains(cut)), "{cuts:?}");
    assert!(
        expected
            .iter()
            .filter(|cut| !cuts.contains(cut))
            .all(|(_, cut)| *cut == CrashKind::Torn(1))
    );
}

#[test]
fn discard_applies_after_dependency_is_durable() {
    // A move: the first sector is copied to the second, then discarded.
    let run = |seed, after: &[u64], again: bool| {
        let discard = Event::Discard {
            extents: vec![Extent::new(0, 512)],
            after: after.iter().copied().map(Ticket).collect(),
        };
        let mut events = vec![
            group_event(1, &[], &[(0, 1, 1)]),
            Event::Durable(Ticket(1)),
            group_event(2, &[], &[(1, 1, 1)]),
            discard,
            group_event(3, &[2], &[(2, 1, 3)]),
        ];
        if again {
            events.insert(4, group_event(3, &[], &[(0, 1, 9)]));
            events[5] = group_event(4, &[3], &[(2, 1, 3)]);
        }
        crash_states(events, CrashOptions { seed, ..EXHAUSTIVE_OPTIONS })
    };
    let lost = |after: &[u64]| {
        let all = (0..8).flat_map(|seed| run(seed, after, false));
        all.filter(|(at, _, s)| *at > 0 && s[0] == 0 && s[1] == 0).count()
    };
    assert_eq!(lost(&[2]), 0);
    assert!(lost(&[]) > 0);
    let gone = |seed: &u64| run(*seed, &[2], false).last().unwrap().2[0] == 0;
    let gone = (0..16).filter(gone).count();
    assert!((1..16).contains(&gone), "now and then: {gone}");
    // A later write to the discarded range stays.
    assert!((0..16).all(|seed| run(seed, &[2], true).last().unwrap().2[0] == 9));
}

#[test]
fn seed_selects_subset_states() {
    let events = || -> Vec<_> {
        (1..40).map(|nth| group_event(nth, &[], &[(nth % 4, 2, nth as u8)])).collect()
    };
    let run =
        |seed| crash_states(events(), CrashOptions { seed, subsets: 50, exhaustive_sectors: 0 });
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
    assert!(run(7).len() > 80);
}

/// Two cells and a counter of the rounds completed in both: the protocol writes the cells, then
/// the counter.
fn journal_rounds(ordered: bool) -> Vec<Event> {
    (0..5u64)
        .flat_map(|round| {
            let byte = round as u8 + 1;
            let cells = group_event(2 * round + 1, &[], &[(0, 1, byte), (1, 1, byte)]);
            let after: &[u64] = if ordered { &[2 * round + 1] } else { &[] };
            let counter = group_event(2 * round + 2, after, &[(2, 1, byte)]);
            [cells, counter, Event::Durable(Ticket(2 * round + 2)), Event::Mark(round + 1)]
        })
        .collect()
}

fn count_order_violations(events: Vec<Event>) -> usize {
    let states = crash_states(events, EXHAUSTIVE_OPTIONS);
    assert!(states.len() > 20);
    let is_wrong = |(_, marks, [a, b, counter, _]): &&(u64, Vec<u64>, [u8; 4])| {
        *counter > *a.min(b) || u64::from(*counter) < marks.last().copied().unwrap_or(0)
    };
    states.iter().filter(is_wrong).count()
}

#[test]
fn missing_write_order_is_detected() {
    assert_eq!(count_order_violations(journal_rounds(true)), 0);
    assert!(count_order_violations(journal_rounds(false)) > 0);
    // A protocol that acknowledges a round too early.
    let mut hasty = journal_rounds(true);
    hasty.iter_mut().for_each(|event| {
        if let Event::Mark(round) = event {
            *round += 1;
        }
    });
    assert!(count_order_violations(hasty) > 0);
}

#[test]
fn crash_states_are_independent_disks() {
    use draconis_device::Write;
    let events = vec![group_event(1, &[], &[(0, 2, 1)]), group_event(2, &[1], &[(1, 1, 2)])];
    let crashes: Vec<_> = CrashStates::new(vec![0; 4096], events, EXHAUSTIVE_OPTIONS).collect();
    let last = crashes.last().unwrap();
    let read = |disk: &CrashDisk, at: u64, len: u64| {
        let block = Block::private(len as usize);
        disk.read_now(Extent::new(at, len), block).unwrap().into_private().to_vec()
    };
    assert_eq!(read(&last.disk, 0, 1536), [vec![1; 512], vec![2; 512], vec![0; 512]].concat());
    let write = Write { at_bytes: 512, block: Block::private(1024) };
    let ticket = last.disk.submit(Group { writes: vec![write] }, &[]).unwrap();
    last.disk.wait_durable(ticket).unwrap();
    assert_eq!(read(&last.disk, 512, 512), [0; 512]);
    let before = &crashes[crashes.len() - 2];
    assert_eq!(read(&before.disk, 512, 512), [1; 512]);
    assert_eq!(last.disk.to_bytes().len(), 4096);
}
