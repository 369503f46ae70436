use std::os::fd::AsFd;

use draconis_device::Random;

use super::*;

fn reopen_oplog(memory: &SharedMemory, epoch: u64) -> OpLog {
    let memory = memory.as_fd().try_clone_to_owned().unwrap();
    OpLog::new(map_existing(memory).unwrap(), epoch).unwrap()
}

fn change_record(seconds: i64, inode: u32) -> ChangeRecord {
    let inode = (inode != 0).then_some(FileId { inode, generation: inode + 1 });
    ChangeRecord {
        now: Time { seconds, nanoseconds: 5 },
        inode,
        renamed_inode: Some(InodeNumber(3)),
    }
}

fn mutation<'a>(bytes: &'a [u8], more: &'a [u8]) -> Option<(&'a [u8], RequestData<'a>)> {
    Some((bytes, RequestData::Bytes(more)))
}

fn panic_on_wait() -> bool {
    panic!("there is room")
}

/// Returns unique id, accepted and answered flags of the unfinished requests.
fn unfinished_flags(log: &OpLog, taken: (u64, u64)) -> Vec<(u64, bool, bool)> {
    let all = log.load_unfinished(taken).unwrap().into_iter();
    all.map(|(one, _)| (one.unique, one.is_accepted, one.answered)).collect()
}

#[test]
fn successor_finds_unfinished_changes() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    log.begin_request(10, mutation(b"head", b" and data"), panic_on_wait);
    log.record_change(1, change_record(-7, 12));
    // The first has no reply; the second has one; the third changes nothing.
    log.begin_request(11, mutation(b"second", b""), panic_on_wait);
    log.record_change(2, change_record(8, 0));
    log.finish_request();
    log.begin_request(12, mutation(b"third", b""), panic_on_wait);
    log.finish_request();
    log.begin_request(13, None, panic_on_wait);
    log.record_change(3, change_record(9, 0));
    let mut hands = take_in_flight(&memory);
    hands.dedup();
    assert_eq!(hands, [13]);
    assert!(take_in_flight(&memory).is_empty(), "a request is reported once");

    let log = reopen_oplog(&memory, 2);
    let found = log.load_unfinished((1, 1)).unwrap();
    let (first, how) = &found[0];
    assert_eq!((first.request.as_slice(), first.unique), (&b"head and data"[..], 10));
    assert_eq!((first.created, *how), (Some(Node(12)), change_record(-7, 12)));
    assert_eq!(unfinished_flags(&log, (1, 1)), [(10, true, false), (11, false, true)]);
    // The second is replayed, and this worker dies, too.
    log.replay(found[1].0.position, 11, &mut || log.record_change(1, change_record(8, 0)));
    assert_eq!((marked_epoch(&memory), was_volume_clean(&memory)), (2, None));
    let log = reopen_oplog(&memory, 3);
    assert_eq!(unfinished_flags(&log, (2, 0)), [(11, false, true), (10, true, false)]);
    let log = reopen_oplog(&memory, 4);
    assert_eq!(unfinished_flags(&log, (2, 1)), [(11, true, true), (10, true, false)]);
    log.finish_inherited(found.iter().map(|(one, _)| one.position));
    let log = reopen_oplog(&memory, 5);
    assert_eq!(unfinished_flags(&log, (2, 1)), []);
}

#[test]
fn successor_reads_recorded_outcome() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    let partial = RequestOutcome { errno: 0, written_bytes: 100 };
    for (unique, outcome) in [
        (10, None),
        (11, Some(partial)),
        (12, Some(RequestOutcome { errno: 28, written_bytes: 0 })),
    ] {
        log.begin_request(unique, mutation(b"request", b""), panic_on_wait);
        assert!(!log.has_changed());
        log.record_change(unique, change_record(1, 0));
        assert!(log.has_changed());
        outcome.into_iter().for_each(|outcome| log.record_outcome(outcome));
        // Another thread replies to the second.
        let deferred = if unique == 11 { log.defer_completion() } else { None };
        if unique != 10 {
            log.finish_request();
        }
        CURRENT_ENTRY.set(None);
        let found = reopen_oplog(&memory, 2).load_unfinished((1, 0)).unwrap();
        let (found, _) = found.last().unwrap();
        assert_eq!((found.unique, found.outcome), (unique, outcome));
        assert_eq!(found.is_accepted, unique == 12, "a change that failed is not replayed");
        assert_eq!(found.answered, unique == 12);
        if let Some(deferred) = deferred {
            log.finish_deferred(deferred);
            assert!(reopen_oplog(&memory, 2).load_unfinished((1, 0)).unwrap()[1].0.answered);
        }
    }
}

#[test]
fn full_oplog_waits_for_disk_acceptance() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    let data = vec![1; 1 << 20];
    let (asked, mut number) = (Cell::new(0), 0);
    for unique in 0..100 {
        log.begin_request(unique, mutation(b"x", &data), || {
            asked.set(asked.get() + 1);
            log.record_accepted_through(number);
            true
        });
        number += 1;
        log.record_change(number, change_record(1, 0));
        log.finish_request();
    }
    assert!((12..=17).contains(&asked.get()), "{}", asked.get());
    // The disk accepts nothing any more: the request is not logged.
    for unique in 100..140 {
        log.begin_request(unique, mutation(b"x", &data), || false);
        log.record_change(u64::MAX, change_record(1, 0));
        log.finish_request();
    }
    log.record_accepted_through(number);
    log.begin_request(200, mutation(b"y", b""), panic_on_wait);
    log.finish_request();
}

#[test]
fn pool_buffers_are_held_until_the_disk_has_accepted_them() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    for unique in 1..=3 {
        let mut room = log.buffer_pool().allocate(5000).unwrap();
        room.fill(unique as u8);
        let room = Arc::new(room);
        log.begin_request(unique, Some((b"write", RequestData::Buffer(&room))), panic_on_wait);
        log.record_change(unique, change_record(1, 0));
        log.finish_request();
    }
    assert_eq!(log.buffer_pool().used_bytes(), 3 * 8192, "entries hold them");
    log.record_accepted_through(1);
    log.free_finished_entries();
    assert_eq!(log.buffer_pool().used_bytes(), 2 * 8192);

    // The second was accepted, but the worker did not learn that.
    let log = reopen_oplog(&memory, 2);
    let found = log.load_unfinished((1, 2)).unwrap();
    let lens: Vec<_> = found.iter().map(|(one, _)| one.request.len()).collect();
    assert_eq!(lens, [5, 5005], "what was taken is not done again");
    assert_eq!(found[1].0.request[5..], [3; 5000]);
    assert_eq!(log.buffer_pool().used_bytes(), 2 * 8192);
    assert_eq!(log.buffer_pool().allocate(1).unwrap().offset(), 0, "that of the first");
    log.replay(found[1].0.position, 3, &mut || log.record_change(1, change_record(1, 0)));
    log.finish_inherited(found.iter().map(|(one, _)| one.position));
    log.record_accepted_through(1);
    log.free_finished_entries();
    assert_eq!(log.buffer_pool().used_bytes(), 0);
}

#[test]
fn unpooled_write_data_is_stored_in_ring() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    let all_others = log.buffer_pool().allocate(PAGE_POOL_BYTES - 3 * 8192).unwrap();
    let contents = |unique: u64| [unique as u8; 5000];
    let mut in_rooms = 0;
    for unique in 1..=8 {
        let room = log.buffer_pool().allocate(5000).map(|mut room| {
            room.copy_from_slice(&contents(unique));
            Arc::new(room)
        });
        in_rooms += u32::from(room.is_some());
        let bytes = contents(unique);
        let said = room.as_ref().map_or(RequestData::Bytes(&bytes), RequestData::Buffer);
        log.begin_request(unique, Some((b"write", said)), panic_on_wait);
        log.record_change(unique, change_record(1, 0));
        log.finish_request();
    }
    assert_eq!((in_rooms, log.buffer_pool().used_bytes()), (3, PAGE_POOL_BYTES));
    assert!(log.should_block_clients());

    let next = reopen_oplog(&memory, 2);
    let found: Vec<_> = next.load_unfinished((1, 1)).unwrap();
    let requests = found.iter().map(|(one, _)| (one.unique, &one.request[..5]));
    assert!(requests.eq((1..=8).map(|unique| (unique, &b"write"[..]))));
    for (one, _) in &found[1..] {
        assert_eq!(one.request[5..], contents(one.unique), "{}", one.unique);
    }
    drop(next);
    // The first worker goes on, and the disk accepts all its changes.
    log.record_accepted_through(8);
    log.free_finished_entries();
    drop(all_others);
    assert_eq!(log.buffer_pool().used_bytes(), 0);
    assert_eq!(log.buffer_pool().allocate(PAGE_POOL_BYTES).map(|room| room.offset()), Some(0));
}

#[test]
fn corrupt_oplog_does_not_panic() {
    let memory = create_memory().unwrap();
    let mut random = Random::new(9);
    for round in 0..200 {
        let log = reopen_oplog(&memory, 1);
        for unique in 0..40 {
            let room = log.buffer_pool().allocate(unique as usize * 100).map(Arc::new);
            let contents = match &room {
                Some(room) if !room.is_empty() => RequestData::Buffer(room),
                _ => RequestData::Bytes(b""),
            };
            log.begin_request(unique, Some((&[7; 100], contents)), panic_on_wait);
            log.record_change(unique + 1, change_record(1, 1));
            log.finish_request();
        }
        for _ in 0..=round % 9 {
            let near = random.next_below(HEADER_BYTES as u64 + 40 * 192) as usize & !3;
            memory.atomic_u32(near.max(8)).store(random.next_u64() as u32, Ordering::Relaxed);
        }
        if random.once_in(4) {
            memory.atomic_u64(TAIL_AND_HEAD_OFFSET).store(random.next_u64(), Ordering::Relaxed);
        }
        let log = reopen_oplog(&memory, 1 + random.next_below(4));
        // Any result will do, but no panic.
        let _ = log.load_unfinished((random.next_below(3), random.next_below(50)));
        memory.atomic_u64(TAIL_AND_HEAD_OFFSET).store(0, Ordering::Relaxed);
    }
}

#[test]
fn first_stop_reason_outlives_workers() {
    let memory = create_memory().unwrap();
    let log = reopen_oplog(&memory, 1);
    assert_eq!(log.stop_reason(), None);
    let long = "é".repeat(MAX_STOP_TEXT_BYTES);
    log.record_stop(&long);
    log.record_stop("a later error");
    let cut = &long[..MAX_STOP_TEXT_BYTES];
    assert_eq!(reopen_oplog(&memory, 2).stop_reason().as_deref(), Some(cut));
}
