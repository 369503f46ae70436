//! Simulated disks: effect of waiting on time, of a power cut on contents, and reproducible runs.

use std::sync::Arc;

use draconis_device::{Disk, Extent, Group, Pending, ReadAnswer, Ticket, Urgency, Write};
use draconis_testkit::sim::{
    Clock, Completion, DeviceTiming, DiskStatistics, Hdd, HddParameters, RequestKind, SimDisk,
    SimRequest, Ssd, SsdParameters,
};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::Block;

const MIB: u64 = 1 << 20;

fn fill_write(at_bytes: u64, len: usize, byte: u8) -> Write {
    let mut block = Block::private(len);
    block.copy_in(0, &vec![byte; len]);
    Write { at_bytes, block }
}

fn single_write_group(at_bytes: u64, len: usize, byte: u8) -> Group {
    Group { writes: vec![fill_write(at_bytes, len, byte)] }
}

fn submit_write(disk: &SimDisk, at_bytes: u64, len: usize, byte: u8) -> Ticket {
    disk.submit(single_write_group(at_bytes, len, byte), &[]).unwrap()
}

fn start_read(disk: &SimDisk, at_bytes: u64, len: usize) -> Pending<ReadAnswer> {
    disk.read(Extent::new(at_bytes, len as u64), Block::private(len), Urgency::Ahead)
}

fn read_bytes(disk: &dyn Disk, at_bytes: u64, len: usize) -> Vec<u8> {
    let answer = disk.read_now(Extent::new(at_bytes, len as u64), Block::private(len));
    answer.unwrap().into_private().to_vec()
}

/// A disk without volatile memory, and one with.
fn ssd_and_hdd() -> [(Arc<SimDisk>, Clock); 2] {
    [SimDisk::ssd(64 * MIB, 1), SimDisk::hdd(64 * MIB, 1)]
}

#[test]
fn virtual_time_stops_without_waiter() {
    for (disk, clock) in ssd_and_hdd() {
        let ticket = submit_write(&disk, MIB, 4096, 7);
        let one = start_read(&disk, MIB, 4096);
        let other = start_read(&disk, 2 * MIB, 4096);
        assert!(!one.is_ready() && !other.is_ready());
        assert_eq!(clock.now_ns(), 0);
        // A submitted write is visible at once, and takes its time.
        assert_eq!(one.wait().unwrap().unwrap().into_private()[0], 7);
        let then = clock.now_ns();
        assert!(then > 1000);
        assert_eq!(other.wait().unwrap().unwrap().into_private()[0], 0);
        assert!(clock.now_ns() < 2 * then + 20_000_000);
        disk.wait_visible(ticket).unwrap();
        disk.wait_durable(ticket).unwrap();
        let then = clock.now_ns();
        disk.wait_durable(ticket).unwrap();
        assert_eq!(clock.now_ns(), then, "what is done needs no waiting");
    }
}

#[test]
fn clock_advance_completes_requests() {
    for (disk, clock) in ssd_and_hdd() {
        let answer = start_read(&disk, MIB, 4096);
        clock.advance(1000);
        assert!(!answer.is_ready());
        clock.advance(50_000_000);
        assert!(answer.is_ready());
        let _ = answer.wait();
        assert_eq!(clock.now_ns(), 50_001_000);
        assert_eq!(disk.statistics().reads, 1);
    }
}

#[test]
fn disks_share_one_clock() {
    let clock = Clock::new();
    let slow = SimDisk::new(Hdd::desktop_7200(64 * MIB), &clock);
    let quick = SimDisk::new(Ssd::p3700(64 * MIB), &clock);
    let (far, near) = (start_read(&slow, 32 * MIB, 4096), start_read(&quick, 0, 4096));
    let _ = near.wait();
    assert!(clock.now_ns() < 1_000_000 && !far.is_ready());
    for round in 0..2000 {
        let ticket = submit_write(&quick, round * 4096, 4096, 1);
        quick.wait_durable(ticket).unwrap();
    }
    assert!(far.is_ready(), "{} ns", clock.now_ns());
}

#[test]
fn ordered_groups_flush_only_volatile_cache() {
    for ((disk, _), flushes) in ssd_and_hdd().into_iter().zip([0, 3]) {
        let chain = (0..3).map(|nth| single_write_group(nth * 4096, 4096, 1)).collect();
        let tickets = disk.submit_chain(chain, &[]).unwrap();
        let free = submit_write(&disk, MIB, 4096, 1);
        disk.wait_durable(tickets[2]).unwrap();
        disk.wait_durable(tickets[0]).unwrap();
        assert_eq!(disk.statistics().flushes, flushes);
        disk.wait_durable(free).unwrap();
        // It was submitted after the chain and may have been written before its last flush.
        assert!(disk.statistics().flushes <= flushes + 1);
    }
}

#[test]
fn waiters_share_one_flush() {
    let (disk, _) = SimDisk::hdd(64 * MIB, 1);
    let tickets: Vec<_> = (0..100).map(|nth| submit_write(&disk, nth * 4096, 4096, 1)).collect();
    disk.wait_durable(tickets[99]).unwrap();
    tickets.iter().for_each(|ticket| disk.wait_durable(*ticket).unwrap());
    assert_eq!(disk.statistics().flushes, 1);
}

#[test]
fn adjacent_writes_merge_into_one_request() {
    let (disk, _) = SimDisk::ssd(64 * MIB, 1);
    let writes = (0..64).rev().map(|nth| fill_write(nth * 512, 512, nth as u8)).collect();
    let ticket = disk.submit(Group { writes }, &[]).unwrap();
    disk.wait_durable(ticket).unwrap();
    let DiskStatistics { writes, written_bytes, .. } = disk.statistics();
    assert_eq!((writes, written_bytes), (1, 64 * 512));
    assert_eq!(read_bytes(&*disk, 512 * 33, 512)[0], 33);
}

#[test]
fn full_queue_advances_virtual_time() {
    for (disk, clock) in ssd_and_hdd() {
        for nth in 0..200 {
            submit_write(&disk, nth % 50 * MIB, MIB as usize, 0);
        }
        // 200 MiB do not fit a queue of 64 MiB.
        assert!(clock.now_ns() > 10_000_000, "{}", clock.now_ns());
    }
}

/// Runs a mixed load; returns time and hash of all completions.
fn run_mixed_load(disk: &SimDisk, rounds: u64) -> (u64, u64) {
    let mut x = 1u64;
    let mut chance = |end: u64| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % end
    };
    let mut flying = vec![];
    for round in 0..rounds {
        let at = chance(60 * 256) * 4096;
        match chance(10) {
            0..5 => drop(submit_write(disk, at, 4096 << chance(4), round as u8)),
            5..9 => flying.push(start_read(disk, at, 4096)),
            _ => {
                let ticket = submit_write(disk, at, 512, 9);
                disk.wait_durable(ticket).unwrap();
                flying.drain(..).for_each(|answer| drop(answer.wait()));
            }
        }
        if round % 50 == 0 {
            let ticket = submit_write(disk, at, 512, 1);
            disk.discard(&[Extent::new(at, 65536)], &[ticket]).unwrap();
        }
    }
    disk.run_until_idle();
    (disk.statistics().trace, disk.clock().now_ns())
}

#[test]
fn same_seed_gives_same_trace() {
    for make in [SimDisk::hdd, SimDisk::ssd] {
        let once = run_mixed_load(&make(64 * MIB, 5).0, 2000);
        assert_eq!(run_mixed_load(&make(64 * MIB, 5).0, 2000), once);
        assert_ne!(run_mixed_load(&make(64 * MIB, 6).0, 2000).0, once.0);
    }
}

#[test]
fn forked_disk_is_independent() {
    for (disk, clock) in ssd_and_hdd() {
        run_mixed_load(&disk, 300);
        submit_write(&disk, 0, 4096, 1);
        let copy = disk.fork();
        assert_eq!(copy.clock().now_ns(), clock.now_ns());
        assert!(read_bytes(&*copy, 0, 4 << 20) == read_bytes(&*disk, 0, 4 << 20));
        submit_write(&copy, 0, 4096, 2);
        assert_eq!((read_bytes(&*copy, 0, 1 << 12)[0], read_bytes(&*disk, 0, 1 << 12)[0]), (2, 1));
    }
}

#[test]
fn power_cut_keeps_durable_groups() {
    for (disk, _) in ssd_and_hdd() {
        submit_write(&disk, 0, 8192, 1);
        let ticket = submit_write(&disk, 4096, 4096, 2);
        disk.wait_durable(ticket).unwrap();
        let volatile = disk.properties().rotational;
        let before = submit_write(&disk, 0, 1024, 3);
        submit_write(&disk, 512, 1024, 4);
        disk.submit(single_write_group(65536, 4096, 5), &[before]).unwrap();
        let mut seen = [[0; 6]; 4];
        for seed in 0..200 {
            let crashed = disk.crash_and_restart(seed);
            let bytes = read_bytes(&*crashed, 0, 8192);
            assert!(bytes[4096..].iter().all(|byte| *byte == 2));
            for (sector, seen) in seen.iter_mut().enumerate() {
                let sector = &bytes[sector * 512..][..512];
                assert!(sector.iter().all(|byte| *byte == sector[0]), "torn within a sector");
                seen[usize::from(sector[0])] += 1;
            }
            // Their dependent group was not started.
            assert_eq!(read_bytes(&*crashed, 65536, 512), [0; 512]);
        }
        let values =
            |seen: &[u32; 6]| -> Vec<usize> { (0..6).filter(|at| seen[*at] > 0).collect() };
        let got: Vec<_> = seen.iter().map(values).collect();
        assert_eq!(got, [vec![1, 3], vec![1, 3, 4], vec![1, 4], vec![1]], "{volatile}");
        // The original disk is unaffected.
        assert_eq!(read_bytes(&*disk, 0, 512)[0], 3);
        disk.wait_durable(before).unwrap();
        assert_eq!(read_bytes(&*disk.crash_and_restart(7), 0, 512)[0], 3);
    }
}

#[test]
fn only_volatile_cache_loses_unflushed_writes() {
    for (disk, _) in ssd_and_hdd() {
        let ticket = submit_write(&disk, 0, 512, 1);
        disk.wait_visible(ticket).unwrap();
        let lost = (0..40)
            .filter(|seed| read_bytes(&*disk.crash_and_restart(*seed), 0, 512)[0] == 0)
            .count();
        assert_eq!(lost > 0, disk.properties().rotational, "{lost}");
    }
}

#[test]
fn recorded_sim_run_yields_crash_states() {
    let disk = RecordDisk::new(SimDisk::hdd(64 * MIB, 1).0);
    let ticket = disk.submit(single_write_group(0, 1024, 1), &[]).unwrap();
    disk.submit(single_write_group(0, 512, 2), &[ticket]).unwrap();
    let crashes = CrashStates::new(vec![0; 4096], disk.take_events(), CrashOptions::default());
    assert!(crashes.count() >= 5);
}

#[test]
fn sim_disk_memory_is_sparse() {
    for (disk, clock) in [SimDisk::hdd(1 << 40, 1), SimDisk::ssd(1 << 40, 1)] {
        for nth in 0..64 {
            submit_write(&disk, nth << 34, 8192, 1);
        }
        let last = submit_write(&disk, (1 << 40) - 4096, 4096, 0);
        disk.wait_durable(last).unwrap();
        disk.discard(&[Extent::new(1 << 39, 1 << 39)], &[last]).unwrap();
        disk.run_until_idle();
        assert!(clock.now_ns() > 0 && disk.memory_bytes() <= 128 * 4096);
        assert_eq!(read_bytes(&*disk, 3 << 34, 4096)[0], 1);
    }
}

#[test]
fn discards_reduce_write_amplification() {
    let moved = |discards: bool| {
        let parameters = SsdParameters::p3700(64 * MIB);
        let disk = SimDisk::new(Ssd::preconditioned(parameters), &Clock::new());
        if discards {
            disk.discard(&[Extent::new(0, 32 * MIB)], &[]).unwrap();
        }
        let mut at = 0;
        for _ in 0..16_000 {
            at = (at * 69_069 + 12_345) % 8192;
            submit_write(&disk, 32 * MIB + at * 4096, 4096, 1);
        }
        disk.run_until_idle();
        disk.statistics().work.moved_bytes
    };
    let (with, without) = (moved(true), moved(false));
    assert!(with * 3 < without, "{with} {without}");
}

#[test]
fn nonvolatile_cache_makes_flush_cheap() {
    let sync_us = |volatile_cache| {
        let parameters = SsdParameters::p3700(64 * MIB);
        let disk = Ssd::new(SsdParameters { volatile_cache, ..parameters });
        let disk = SimDisk::new(disk, &Clock::new());
        (0..100).for_each(|nth| {
            let ticket = submit_write(&disk, nth * 512, 512, 1);
            disk.wait_durable(ticket).unwrap();
        });
        disk.clock().now_ns() / 100_000
    };
    let (kept, lost) = (sync_us(false), sync_us(true));
    assert!(kept <= 25 && lost > 300, "{kept} {lost}");
}

#[test]
fn hdd_reorders_requests_and_reads_ahead() {
    let parameters = HddParameters::desktop_7200(1 << 40);
    let disk = || SimDisk::new(Hdd::new(parameters), &Clock::new());
    let scattered: Vec<u64> = (0..32).map(|nth| (nth * 7919 % 32) << 35).collect();
    let at_once = disk();
    let all: Vec<_> = scattered.iter().map(|at| start_read(&at_once, *at, 4096)).collect();
    all.into_iter().for_each(|answer| drop(answer.wait()));
    let in_turn = disk();
    scattered.iter().for_each(|at| drop(read_bytes(&*in_turn, *at, 4096)));
    let (at_once, in_turn) = (at_once.clock().now_ns(), in_turn.clock().now_ns());
    assert!(at_once * 3 < in_turn * 2, "{at_once} {in_turn}");

    let reader = disk();
    read_bytes(&*reader, 0, 65536);
    reader.clock().advance(20_000_000);
    let before = reader.clock().now_ns();
    read_bytes(&*reader, 65536, 1 << 20);
    assert!(reader.clock().now_ns() - before < 4_000_000, "it was read ahead");
    assert_eq!(reader.statistics().work.seeks, 0);
}

/// Sends random requests at random times and runs the device until it is idle; returns requests and
/// completions.
fn drive_timing(
    timing: &mut dyn DeviceTiming,
    seed: u64,
) -> (Vec<(SimRequest, u64)>, Vec<Completion>) {
    let mut x = seed;
    let mut chance = |end: u64| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % end
    };
    let depth = timing.model().depth as u64;
    let (mut asked, mut done, mut now_ns) = (vec![], vec![], 0);
    for id in 0..2500u64 {
        let kind = match chance(20) {
            0..8 => RequestKind::Read,
            8..17 => RequestKind::Write,
            17..19 => RequestKind::Flush,
            _ => RequestKind::Discard,
        };
        let len = 512 << chance(12);
        let at = Extent::new(chance((64 * MIB - len) / 512) * 512, len);
        let request = SimRequest {
            id,
            kind,
            at: if kind == RequestKind::Flush { Extent::new(0, 0) } else { at },
        };
        // Now and then it idles; it never has more requests than its depth.
        let until_ns = now_ns + if chance(30) == 0 { 40_000_000 } else { chance(100_000) };
        while let Some(next) = timing.next_event_ns()
            && (next <= until_ns || asked.len() - done.len() >= depth as usize)
        {
            assert!(next >= now_ns, "what happens next happened before");
            now_ns = next;
            timing.advance(next, &mut done);
        }
        now_ns = now_ns.max(until_ns);
        timing.advance(now_ns, &mut done);
        timing.submit(now_ns, request);
        asked.push((request, now_ns));
    }
    while let Some(next) = timing.next_event_ns() {
        timing.advance(next, &mut done);
    }
    (asked, done)
}

#[test]
fn timing_models_complete_each_request_once() {
    let hdd = |volatile_cache| {
        let parameters = HddParameters::desktop_7200(64 * MIB);
        Hdd::new(HddParameters { volatile_cache, cache_bytes: 4 * MIB, ..parameters })
    };
    let ssd = |volatile_cache, page_bytes| {
        let parameters = SsdParameters::p3700(64 * MIB);
        Ssd::preconditioned(SsdParameters { volatile_cache, page_bytes, ..parameters })
    };
    let devices: [Box<dyn DeviceTiming>; 5] = [
        Box::new(hdd(true)),
        Box::new(hdd(false)),
        Box::new(ssd(false, 4096)),
        Box::new(ssd(true, 16384)),
        Box::new(ssd(true, 512)),
    ];
    for mut device in devices {
        let (asked, done) = drive_timing(&mut *device, 7);
        assert!(done.is_sorted_by_key(|one| one.at_ns));
        let mut ids: Vec<_> = done.iter().map(|one| one.id).collect();
        ids.sort_unstable();
        assert!(ids.iter().copied().eq(0..asked.len() as u64), "{device:?}");
        for Completion { at_ns, id } in &done {
            assert!(*at_ns > asked[*id as usize].1, "done before it was asked for");
        }
        // A copy after a power cut is idle.
        let mut copy = device.clone_boxed();
        copy.submit(u64::MAX / 4, asked[0].0);
        copy.power_cut(u64::MAX / 4);
        assert_eq!(copy.next_event_ns(), None);
    }
}

#[test]
fn hdd_flush_destages_earlier_writes() {
    let parameters = HddParameters::desktop_7200(64 * MIB);
    let mut device = Hdd::new(parameters);
    let (mut done, mut now_ns, mut id) = (vec![], 0, 0);
    let mut take = |device: &mut Hdd, now_ns, kind, at| {
        device.submit(now_ns, SimRequest { id, kind, at });
        id += 1;
        id - 1
    };
    for round in 1..20u64 {
        for nth in 0..round {
            // No two writes touch.
            let at = Extent::new((round * 37 + nth * 1009) % 1500 * 8192, 4096);
            take(&mut device, now_ns, RequestKind::Write, at);
        }
        let before = device.work_counters().programmed_bytes;
        let flush = take(&mut device, now_ns, RequestKind::Flush, Extent::new(0, 0));
        // After the flush, without delaying it.
        take(&mut device, now_ns, RequestKind::Write, Extent::new(40 * MIB + round * 8192, 4096));
        while !done.iter().any(|it: &Completion| it.id == flush) {
            now_ns = device.next_event_ns().expect("it goes on");
            device.advance(now_ns, &mut done);
        }
        let put = device.work_counters().programmed_bytes - before;
        assert!((round - 1) * 4096 <= put && put <= (round + 1) * 4096, "{round}: {put}");
    }
}
