use draconis_testkit::wait::{pause, wait_until};
use std::io::Write as _;

use super::system_info::read_queue_attribute;
use super::*;
use crate::Write;
use crate::uring::discard_blocks;

fn image_file(len: usize) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..len).map(|i| (i / 512) as u8).collect();
    file.write_all(&bytes).unwrap();
    file
}

fn option_variants() -> Vec<FileOptions> {
    let mut all = vec![];
    for direct in [false, true] {
        for uring in [false, true] {
            all.push(FileOptions { write: true, direct, uring });
        }
    }
    all
}

#[test]
fn unaligned_sector_reads_work_in_every_mode() {
    // 100,000 is no multiple of any alignment: the last sectors need the bounce buffer.
    let file = image_file(100_000);
    for options in option_variants() {
        let disk = FileDisk::open(file.path(), options).unwrap();
        assert_eq!(disk.properties().len_bytes, 99_840);
        for (start, len) in [(0, 512), (512, 4096), (4096, 65_536), (98_816, 1024), (0, 99_840)] {
            for urgency in [Urgency::Now, Urgency::Ahead] {
                let block = Block::private(len as usize);
                let answer = disk.read(Extent::new(start, len), block, urgency).wait();
                let got = answer.unwrap().unwrap().into_private();
                assert!(
                    got.chunks(512).zip((start / 512)..).all(|(s, n)| s == [n as u8; 512]),
                    "{options:?} {urgency:?} {start} {len}"
                );
            }
        }
    }
}

#[test]
fn many_concurrent_read_aheads_complete() {
    let file = image_file(1 << 20);
    for options in option_variants() {
        let disk = FileDisk::open(file.path(), options).unwrap();
        let pending: Vec<_> = (0..512u64)
            .map(|i| {
                let at = Extent::new((i * 37 % 512) * 2048, 2048);
                (at, disk.read(at, Block::private(2048), Urgency::Ahead))
            })
            .collect();
        for (at, pending) in pending {
            let got = pending.wait().unwrap().unwrap().into_private();
            assert_eq!(got[0], (at.start_bytes / 512) as u8);
        }
    }
}

#[test]
fn groups_are_written_in_order_and_survive_reopening() {
    for options in option_variants() {
        let file = image_file(100_000);
        let disk = FileDisk::open(file.path(), options).unwrap();
        let write = |at_bytes, byte| {
            let mut block = Block::private(1024);
            block.copy_in(0, &[byte; 1024]);
            Write { at_bytes, block }
        };
        let first = Group { writes: vec![write(512, 0xaa), write(98_816, 0xbb)] };
        let first = disk.submit(first, &[]).unwrap();
        let second = disk.submit(Group { writes: vec![write(1024, 0xcc)] }, &[first]).unwrap();
        disk.wait_durable(second).unwrap();
        disk.wait_durable(first).unwrap();
        drop(disk);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len(), 100_000);
        assert_eq!((bytes[511], bytes[512], bytes[1024]), (0, 0xaa, 0xcc));
        assert_eq!((bytes[2047], bytes[2048], bytes[98_816]), (0xcc, 4, 0xbb));
        assert_eq!((bytes[99_839], bytes[99_840]), (0xbb, 195));
    }
}

fn group_of(writes: &[(u64, usize, u8)]) -> Group {
    let write = |&(at_bytes, len, byte): &(u64, usize, u8)| {
        let mut block = Block::private(len);
        block.copy_in(0, &vec![byte; len]);
        Write { at_bytes, block }
    };
    Group { writes: writes.iter().map(write).collect() }
}

#[test]
fn flush_happens_only_for_ordered_groups() {
    let file = image_file(100_000);
    for options in option_variants() {
        let disk = FileDisk::open(file.path(), options).unwrap();
        let small = || group_of(&[(0, 512, 1)]);
        let mut flushes = 0;
        let mut costs = |expected, what: &dyn Fn() -> Ticket| {
            let ticket = what();
            let after = disk.flush_count();
            assert_eq!(after - flushes, expected, "{options:?}");
            flushes = after;
            ticket
        };
        let settled = |ticket| {
            disk.wait_visible(ticket).unwrap();
            ticket
        };
        let first = costs(0, &|| settled(disk.submit(small(), &[]).unwrap()));
        let second = costs(0, &|| settled(disk.submit(small(), &[]).unwrap()));
        // The flush for the older one also covers the newer one.
        let third = costs(1, &|| settled(disk.submit(small(), &[first]).unwrap()));
        costs(0, &|| settled(disk.submit(small(), &[second, first]).unwrap()));
        costs(1, &|| settled(disk.submit(small(), &[third]).unwrap()));
        // Three groups, two flushes; only a third flush makes the last one durable.
        let chain = || vec![small(), small(), small()];
        let last = costs(2, &|| {
            let tickets = disk.submit_chain(chain(), &[third]).unwrap();
            settled(tickets[2]);
            // The chain's own flush has made it durable.
            disk.wait_durable(tickets[0]).unwrap();
            disk.wait_durable(tickets[1]).unwrap();
            tickets[2]
        });
        let wait = |ticket| {
            disk.wait_durable(ticket).unwrap();
            ticket
        };
        costs(1, &|| wait(last));
        costs(0, &|| wait(last));
        costs(0, &|| settled(disk.submit(small(), &[last]).unwrap()));
    }
}

#[test]
fn concurrent_waiters_share_flushes() {
    let file = image_file(100_000);
    let disk = FileDisk::open(file.path(), option_variants()[0]).unwrap();
    let ticket = disk.submit(group_of(&[(0, 512, 1)]), &[]).unwrap();
    disk.wait_visible(ticket).unwrap();
    let barrier = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                disk.wait_durable(ticket).unwrap();
            });
        }
    });
    assert_eq!(disk.flush_count(), 1);
}

/// Threads that overwrite each other's sectors: the newest ticket wins, and a visible write is read.
#[test]
fn concurrent_overlapping_groups_land_in_ticket_order() {
    const SECTORS: u64 = 24;
    for options in option_variants() {
        let file = image_file(SECTORS as usize * 512);
        let disk = FileDisk::open(file.path(), options).unwrap();
        let write_some = |thread: u64| {
            let mut random = crate::Random::new(thread);
            let written = (0..150u8).map(|nth| {
                let (at, count) = (random.next_below(SECTORS - 3), 1 + random.next_below(3));
                let byte = nth.wrapping_mul(8).wrapping_add(thread as u8);
                let group = group_of(&[(at * 512, count as usize * 512, byte)]);
                let ticket = disk.submit(group, &[]).unwrap();
                disk.wait_visible(ticket).unwrap();
                (ticket, at..at + count, byte)
            });
            written.collect::<Vec<_>>()
        };
        let mut all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|it| scope.spawn(move || write_some(it))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        all.sort_by_key(|(ticket, ..)| *ticket);
        let mut wanted = std::collections::BTreeMap::new();
        for (_, sectors, byte) in all {
            wanted.extend(sectors.map(|sector| (sector, byte)));
        }
        let bytes = std::fs::read(file.path()).unwrap();
        for (sector, byte) in wanted {
            let found = &bytes[sector as usize * 512..][..512];
            assert!(found.iter().all(|it| *it == byte), "{options:?}: sector {sector}");
        }
    }
}

#[test]
fn writes_without_a_waiter_are_written_too() {
    let file = image_file(100_000);
    let disk = FileDisk::open(file.path(), option_variants()[0]).unwrap();
    // Submitted at once, while the thread dozes, and after it fell asleep.
    for (byte, pause_ms) in [(1, 0), (2, 0), (3, 2), (4, 60), (5, 0)] {
        pause("the writer's thread falls asleep", std::time::Duration::from_millis(pause_ms));
        disk.submit(group_of(&[(4096, 512, byte)]), &[]).unwrap();
        wait_until("the write is in the file", || {
            std::fs::read(file.path()).unwrap()[4096] == byte
        });
    }
    assert_eq!(disk.flush_count(), 0);
}

#[test]
fn groups_after_failed_write_are_not_written() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    for options in option_variants() {
        let fd = memfd_create("disk", MemfdFlags::ALLOW_SEALING).unwrap();
        let file = File::from(fd.try_clone().unwrap());
        file.set_len(1 << 16).unwrap();
        let disk = FileDisk::from_fd(fd, options).unwrap();
        // From here on writes past the first two pages fail.
        file.set_len(8192).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let first = disk.submit(group_of(&[(0, 4096, 1)]), &[]).unwrap();
        disk.wait_durable(first).unwrap();
        let at = [4096, 8192, 0, 4096].into_iter();
        let chain = at.zip(2..).map(|(at, byte)| group_of(&[(at, 4096, byte)])).collect();
        let tickets = disk.submit_chain(chain, &[first]).unwrap();
        for &ticket in tickets[1..].iter().rev() {
            assert!(matches!(disk.wait_durable(ticket), Err(Error::Io { what: "write", .. })));
            assert!(matches!(disk.wait_visible(ticket), Err(Error::Io { what: "write", .. })));
        }
        // Durable groups stay durable: the chain's own flush covered its first group.
        assert_eq!((disk.wait_durable(first), disk.wait_durable(tickets[0])), (Ok(()), Ok(())));
        let refused = disk.submit(group_of(&[(0, 512, 9)]), &[]).unwrap_err();
        assert_eq!(refused.error, Error::Stopped);
        assert_eq!(disk.wait_durable(Ticket(6)), Err(Error::UnknownTicket(Ticket(6))));
        drop(disk);
        let mut bytes = vec![0; 8192];
        rustix::io::pread(&file, &mut bytes[..], 0).unwrap();
        assert_eq!((bytes[0], bytes[4096]), (1, 2));
    }
}

#[test]
fn adjacent_writes_are_merged_and_land_in_place() {
    for options in option_variants() {
        let file = image_file(1 << 20);
        let disk = FileDisk::open(file.path(), options).unwrap();
        // Backwards, with a gap, in sizes that direct I/O does not support, larger than one
        // request; and overlapping ones, whose order matters.
        let scattered: Vec<_> =
            (0..1500u64).rev().filter(|n| n % 700 != 3).map(|n| (n * 512, 512, 0xa0)).collect();
        let blocks: Vec<_> = (0..32).map(|n| ((800 << 10) + (n << 12), 4096, n as u8)).collect();
        let overlapping = [(1000 << 10, 8192, 1), (1004 << 10, 8192, 2), (1002 << 10, 4096, 3)];
        let chain = vec![group_of(&scattered), group_of(&blocks), group_of(&overlapping)];
        let tickets = disk.submit_chain(chain, &[]).unwrap();
        disk.wait_durable(tickets[2]).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        for n in 0..1500 {
            let expected = if n % 700 == 3 { n as u8 } else { 0xa0 };
            assert!(bytes[n * 512..][..512].iter().all(|b| *b == expected), "{options:?} {n}");
        }
        for n in 0..32 {
            assert_eq!(bytes[(800 << 10) + (n << 12)], n as u8);
        }
        let kib: Vec<_> = (1000..1012).map(|kib| bytes[kib << 10]).collect();
        assert_eq!(kib, [1, 1, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]);
    }
}

#[test]
fn refused_read_returns_its_block() {
    let file = image_file(4096);
    let options = FileOptions { write: false, direct: true, uring: false };
    let disk = FileDisk::open(file.path(), options).unwrap();
    let refused = disk.read_now(Extent::new(4096, 512), Block::private(512)).unwrap_err();
    assert_eq!(refused.payload.unwrap().len(), 512);
    assert!(matches!(refused.error, Error::OutOfRange { .. }));
    let refused = disk.read_now(Extent::new(1, 512), Block::private(512)).unwrap_err();
    assert!(matches!(refused.error, Error::Misaligned { .. }));
    let refused = disk.submit(Group::default(), &[]).unwrap_err();
    assert_eq!(refused.error, Error::ReadOnly);
}

#[test]
fn truncated_file_returns_error() {
    let file = image_file(1 << 16);
    for options in option_variants() {
        let disk = FileDisk::open(file.path(), options).unwrap();
        file.as_file().set_len(4096).unwrap();
        let at = Extent::new(0, 1 << 16);
        for urgency in [Urgency::Now, Urgency::Ahead] {
            let answer = disk.read(at, Block::private(1 << 16), urgency).wait().unwrap();
            assert!(matches!(answer.unwrap_err().error, Error::ShortRead { .. }));
        }
        file.as_file().set_len(1 << 16).unwrap();
    }
}

#[test]
fn partial_last_sector_is_zero_padded() {
    let file = image_file(5000);
    let expected = [&std::fs::read(file.path()).unwrap()[..], &[0; 120]].concat();
    for direct in [false, true] {
        let options = FileOptions { write: false, direct, uring: false };
        let disk = FileDisk::open(file.path(), options).unwrap();
        assert_eq!(disk.properties().len_bytes, 5120);
        for (start, len) in [(0, 5120), (4608, 512), (4096, 1024), (512, 512)] {
            for urgency in [Urgency::Now, Urgency::Ahead] {
                let at = Extent::new(start, len);
                let mut block = Block::private(len as usize);
                block.copy_in(0, &vec![9; len as usize]);
                let read = disk.read(at, block, urgency).wait().unwrap().unwrap();
                let bytes = &expected[start as usize..(start + len) as usize];
                assert_eq!(&read.into_private()[..], bytes, "{direct} {at}");
            }
        }
        file.as_file().set_len(4700).unwrap();
        let short = disk.read_now(Extent::new(4608, 512), Block::private(512));
        assert!(matches!(short.unwrap_err().error, Error::ShortRead { .. }));
        file.as_file().set_len(5000).unwrap();
        std::os::unix::fs::FileExt::write_all_at(file.as_file(), &expected[..5000], 0).unwrap();
    }
    let options = FileOptions { write: true, direct: false, uring: false };
    let disk = FileDisk::open(file.path(), options).unwrap();
    assert_eq!(disk.properties().len_bytes, 4608);
}

#[test]
fn locked_file_is_refused() {
    let file = image_file(4096);
    let read = FileOptions { write: false, direct: false, uring: false };
    let write = FileOptions { write: true, ..read };
    let one = FileDisk::open(file.path(), read).unwrap();
    let two = FileDisk::open(file.path(), read).unwrap();
    let refused = FileDisk::open(file.path(), write).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ResourceBusy);
    drop((one, two));
    let alone = FileDisk::open(file.path(), write).unwrap();
    assert!(FileDisk::open(file.path(), read).is_err());
    drop(alone);
    assert!(FileDisk::open(file.path(), read).is_ok());
}

#[test]
fn write_unit_is_file_system_block() {
    let file = image_file(8192);
    let block = rustix::fs::fstatvfs(&file).unwrap().f_frsize;
    let unit = write_unit_bytes(&file).unwrap();
    assert!(u64::from(unit) >= block.min(16 << 10) && unit.is_power_of_two(), "{unit}");
    assert_eq!(read_queue_attribute(rustix::fs::makedev(0, 0), "physical_block_size"), None);
}

#[test]
fn regular_file_has_no_device_discard() {
    let file = image_file(8192);
    let fd = OwnedFd::from(file.reopen().unwrap());
    assert_eq!(discard_blocks(&fd, Extent::new(0, 4096)), Err(Errno::NOTTY));
}

#[test]
fn discard_frees_space_after_dependency_is_durable() {
    use std::os::unix::fs::MetadataExt;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(&vec![7; 1 << 20]).unwrap();
    file.as_file().sync_all().unwrap();
    let options = FileOptions { write: true, direct: false, uring: false };
    let ordinary = FileDisk::open(file.path(), options).unwrap();
    assert!(!ordinary.properties().discards);
    ordinary.discard(&[Extent::new(0, 1 << 20)], &[]).unwrap();
    drop(ordinary);
    let disk = FileDisk::open_discarding(file.path(), options).unwrap();
    if !disk.properties().discards {
        draconis_testkit::report_skipped("discards in a file need a file system that makes holes");
        return;
    }
    let write = |at_bytes| {
        let mut block = Block::private(4096);
        block.copy_in(0, &[9; 4096]);
        let group = Group { writes: vec![Write { at_bytes, block }] };
        disk.submit(group, &[]).unwrap()
    };
    let first = write(0);
    let beyond = disk.discard(&[Extent::new(1 << 20, 1)], &[]).unwrap_err();
    assert!(matches!(beyond, Error::OutOfRange { .. }));
    assert_eq!(disk.discard(&[], &[Ticket(7)]), Err(Error::UnknownTicket(Ticket(7))));
    disk.discard(&[Extent::new(65536, 65536), Extent::new(100, 9000)], &[first]).unwrap();
    disk.discard(&[Extent::new(512 << 10, 65536)], &[first]).unwrap();
    // A hint causes no flush and waits for its dependency: longer than a thread that ignored it
    // would need.
    disk.wait_visible(first).unwrap();
    pause("a flush would begin now", std::time::Duration::from_millis(20));
    assert_eq!((disk.flush_count(), std::fs::read(file.path()).unwrap()[65536]), (0, 7));
    let kept = write(520 << 10);
    disk.wait_durable(kept).unwrap();
    drop(disk);
    let bytes = std::fs::read(file.path()).unwrap();
    let byte = |at: usize| bytes[at];
    assert_eq!((bytes.len(), byte(0), byte(4095), byte(520 << 10)), (1 << 20, 9, 9, 9));
    assert_eq!((byte(4096), byte(8191), byte(8192)), (0, 0, 7));
    assert_eq!((byte(65535), byte(65536), byte(131_071), byte(131_072)), (7, 0, 0, 7));
    // Written to since: the discard was dropped.
    assert_eq!((byte(512 << 10), byte((576 << 10) - 1)), (7, 7));
    assert!(file.as_file().metadata().unwrap().blocks() < 2048);
}

#[test]
fn growing_file_length_matches_writes() {
    for options in option_variants() {
        // It ends inside a sector.
        let file = image_file(5000);
        let open = || {
            let fd = File::options().read(true).write(true).open(file.path()).unwrap();
            OpenedFile::new(fd.into(), options).unwrap()
        };
        assert_eq!(open().read_file_head().unwrap(), [0; UNALIGNED_HEAD_BYTES]);
        let disk = open().with_growth().unwrap().start();
        assert_eq!(disk.properties().len_bytes, 5120);
        let stands_by = open();
        assert!(disk.max_len_bytes() > 1 << 60);
        let mut block = Block::private(1024);
        block.copy_in(0, &[7; 1024]);
        let group = Group { writes: vec![Write { at_bytes: 1 << 20, block }] };
        let ticket = disk.submit(group, &[]).unwrap();
        disk.wait_durable(ticket).unwrap();
        let read = |at: u64, len: usize| {
            let read = disk.read_now(Extent::new(at, len as u64), Block::private(len));
            read.unwrap().into_private()
        };
        let last = read(4608, 1024);
        assert_eq!((last[0], last[391], last[392], last[1023]), (9, 9, 0, 0), "{options:?}");
        assert_eq!(read((1 << 20) - 512, 512)[..], [0; 512]);
        assert_eq!(read(1 << 20, 2048)[..1025], [&[7; 1024][..], &[0]].concat());
        assert_eq!(read(1 << 30, 512)[..], [0; 512]);
        assert!(disk.read_now(Extent::new(1 << 63, 512), Block::private(512)).is_err());
        // A direct write may have written a whole page.
        let len = file.as_file().metadata().unwrap().len();
        assert!(((1 << 20) + 1024..=(1 << 20) + 4096).contains(&len), "{options:?} {len}");
        // A disk opened earlier has the new length if it grows; otherwise its length is unchanged.
        let len = len.next_multiple_of(512);
        assert_eq!(stands_by.with_growth().unwrap().start().properties().len_bytes, len);
        let fixed = open().start();
        let beyond = Extent::new(fixed.properties().len_bytes, 512);
        assert!(fixed.read_now(beyond, Block::private(512)).is_err());
    }
}
