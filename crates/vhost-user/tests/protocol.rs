//! Requests of a guest, driven by hand: every type and error, malformed rings, takeover.

mod driver;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use draconis_device::{Disk, Extent, MemoryDisk};
use draconis_testkit::thin::{ThinClient, zeros_take_no_space};
use draconis_types::Block;
use draconis_vhost_user::{ConnectionError, Device, Resources, serve};
use driver::*;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

type Serving = JoinHandle<Result<(), ConnectionError>>;

fn memory_disk() -> Arc<MemoryDisk> {
    let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512) as u8).collect();
    Arc::new(MemoryDisk::new(bytes, 512))
}

fn serve_disk(disk: Arc<dyn Disk>) -> (UnixStream, Serving) {
    let device = Arc::new(Device::new(disk, "serial number of a disk"));
    let resources = Arc::new(Resources::new().unwrap());
    let (stream, other) = UnixStream::pair().unwrap();
    (stream, std::thread::spawn(move || serve(other, &device, &resources)))
}

fn connect(disk: Arc<dyn Disk>, features: u64) -> (Driver, Serving) {
    let (stream, serving) = serve_disk(disk);
    (Driver::connect(stream, Guest::new(), features), serving)
}

/// Disconnects; the back end must have seen no error.
fn end(driver: Driver, serving: Serving) -> Guest {
    let Driver { guest, front_end, .. } = driver;
    drop(front_end);
    serving.join().unwrap().unwrap();
    guest
}

fn read(disk: &MemoryDisk, at: u64, len: u64) -> Vec<u8> {
    let block = disk.read_now(Extent::new(at, len), Block::private(len as usize)).unwrap();
    block.into_private().to_vec()
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn requests_of_every_type_are_answered() {
    for features in [u64::MAX, !F_EVENT_IDX] {
        let disk = memory_disk();
        let (mut driver, serving) = connect(disk.clone(), features);
        let (status, bytes) = driver.request(READ, 2, &[], 1024);
        assert_eq!((status, &bytes[..]), (OK, &[[2; 512], [3; 512]].concat()[..]));
        assert_eq!(driver.request(OUT, 1, &[9; 1536], 0).0, OK);
        assert_eq!(read(&disk, 512, 2048), [vec![9; 1536], vec![4; 512]].concat());
        assert_eq!(driver.request(READ, 0, &[], 0).0, OK, "of no length");
        assert_eq!(driver.request(FLUSH, 0, &[], 0).0, OK);
        let (status, id) = driver.request(GET_ID, 0, &[], 20);
        assert_eq!((status, &id[..]), (OK, &b"serial number of a d"[..]));
        let ranges = [range(1, 1, 0), range(5, 2, 1)].concat();
        assert_eq!(driver.request(WRITE_ZEROES, 0, &ranges, 0).0, OK);
        assert_eq!(read(&disk, 512, 512), [0; 512]);
        assert_eq!(read(&disk, 5 * 512, 1536), [vec![0; 1024], vec![7; 512]].concat());
        assert_eq!(driver.request(DISCARD, 0, &range(8, 16, 0), 0).0, OK);
        // Large, and in one part of memory.
        let bytes: Vec<u8> = (0..65536).map(|at: u32| (at % 251) as u8).collect();
        assert_eq!(driver.request(OUT, 1024, &bytes, 0).0, OK);
        assert_eq!(driver.request(READ, 1024, &[], 65536), (OK, bytes));
        end(driver, serving);
    }
}

#[test]
fn wrong_requests_get_a_status() {
    let disk = memory_disk();
    let (mut driver, serving) = connect(disk.clone(), u64::MAX);
    let sectors = 2048;
    for (kind, sector, data, output, wanted) in [
        (READ, sectors, vec![], 512, IO_ERROR),
        (READ, sectors - 1, vec![], 1024, IO_ERROR),
        (READ, u64::MAX, vec![], 512, IO_ERROR),
        (READ, u64::MAX / 512, vec![], 512, IO_ERROR),
        (READ, 0, vec![], 511, IO_ERROR),
        (OUT, 0, vec![1; 513], 0, IO_ERROR),
        (OUT, sectors, vec![1; 512], 0, IO_ERROR),
        (DISCARD, 0, range(0, 1, 1), 0, UNSUPPORTED),
        (DISCARD, 0, range(sectors, 1, 0), 0, IO_ERROR),
        (DISCARD, 0, range(u64::MAX, 1, 0), 0, IO_ERROR),
        (DISCARD, 0, range(0, u32::MAX, 0), 0, IO_ERROR),
        (DISCARD, 0, vec![0; 15], 0, IO_ERROR),
        (DISCARD, 0, vec![], 0, IO_ERROR),
        (DISCARD, 0, range(0, 1, 0).repeat(33), 0, IO_ERROR),
        (WRITE_ZEROES, 0, range(0, 1, 2), 0, UNSUPPORTED),
        (WRITE_ZEROES, 0, range(sectors - 1, 2, 0), 0, IO_ERROR),
        (2, 0, vec![], 0, UNSUPPORTED),
        (14, 0, vec![0; 16], 0, UNSUPPORTED),
        (u32::MAX, 0, vec![], 512, UNSUPPORTED),
    ] {
        let (status, _) = driver.request(kind, sector, &data, output);
        assert_eq!(status, wanted, "{kind} {sector} {} {output}", data.len());
    }
    assert_eq!(read(&disk, 0, 1024), [[0; 512], [1; 512]].concat());
    // A header that is too short.
    driver.guest.write_request(0, READ, 0, &[], 512);
    driver.guest.set_descriptor(0, Guest::part(0), 15, NEXT, 1);
    driver.guest.make_available(0);
    driver.kick();
    assert_eq!(driver.wait_used(), Some((0, 1)));
    assert_eq!(driver.guest.status(0), IO_ERROR);
    assert_eq!(driver.request(READ, 1, &[], 512), (OK, vec![1; 512]));
    end(driver, serving);
}

/// Header, contents and status may be divided in any way, also over an indirect table.
#[test]
fn requests_in_any_layout_are_answered() {
    let disk = memory_disk();
    let (mut driver, serving) = connect(disk.clone(), u64::MAX);
    let guest = &mut driver.guest;
    guest.write_request(0, READ, 3, &[], 512);
    let part = Guest::part(0);
    let table = part + 0x4000;
    for (nth, (at, len, flags)) in [
        (part, 7, NEXT),
        (part + 7, 9, NEXT),
        (part + 0x100, 100, WRITE | NEXT),
        (0, 0, WRITE | NEXT),
        (part + 0x100 + 100, 413, WRITE),
    ]
    .into_iter()
    .enumerate()
    {
        guest.set_descriptor_at(table + 16 * nth as u64, at, len, flags, nth as u16 + 1);
    }
    guest.set_descriptor(0, table, 80, INDIRECT, 0);
    guest.make_available(0);
    driver.kick();
    assert_eq!(driver.wait_used(), Some((0, 513)));
    assert_eq!(driver.guest.output(0, 513), [&[3; 512][..], &[OK]].concat());
    end(driver, serving);
}

/// A request that reaches the disk in sectors of 4096 bytes.
#[test]
fn parts_of_large_sectors_are_written() {
    let disk = Arc::new(MemoryDisk::new(vec![5; 1 << 16], 4096));
    let (mut driver, serving) = connect(disk.clone(), u64::MAX);
    assert_eq!(driver.config(20, 4), 4096u32.to_le_bytes());
    assert_eq!(driver.request(OUT, 7, &[6; 1024], 0).0, OK);
    assert_eq!(
        driver.request(READ, 6, &[], 2048).1,
        [vec![5; 512], vec![6; 1024], vec![5; 512]].concat()
    );
    assert_eq!(driver.request(WRITE_ZEROES, 0, &range(8, 1, 0), 0).0, OK);
    let expected = [vec![5; 3584], vec![6; 512], vec![0; 512], vec![5; 3584]].concat();
    assert_eq!(read(&disk, 0, 8192), expected);
    end(driver, serving);
}

#[test]
fn many_requests_are_carried_out_at_the_same_time() {
    let (mut driver, serving) = connect(memory_disk(), u64::MAX);
    for round in 0..200u64 {
        for head in (0..SIZE - 2).step_by(3) {
            driver.guest.put_request(head, READ, (round + u64::from(head)) % 2048, &[], 512);
        }
        driver.kick();
        let mut heads = vec![];
        for _ in (0..SIZE - 2).step_by(3) {
            let (head, len) = driver.wait_used().unwrap();
            assert_eq!((len, driver.guest.status(head)), (513, OK));
            let sector = (round + u64::from(head)) as u8;
            assert_eq!(driver.guest.output(head, 512), [sector; 512]);
            heads.push(head);
        }
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), 21, "each was answered once");
    }
    end(driver, serving);
}

/// A disk whose first sector is read only while `is_open`.
struct Gate {
    disk: Arc<MemoryDisk>,
    is_open: std::sync::Mutex<bool>,
    opened: std::sync::Condvar,
}

impl Disk for Gate {
    fn properties(&self) -> draconis_device::Properties {
        self.disk.properties()
    }

    fn read(
        &self,
        at: Extent,
        into: Block,
        urgency: draconis_device::Urgency,
    ) -> draconis_device::Pending<draconis_device::ReadAnswer> {
        if at.start_bytes == 0 {
            let is_open = self.is_open.lock().unwrap();
            drop(self.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
        }
        self.disk.read(at, into, urgency)
    }
}

/// Also requests that come one by one, after a slow one has begun.
#[test]
fn slow_requests_delay_no_others() {
    let gate =
        Gate { disk: memory_disk(), is_open: false.into(), opened: std::sync::Condvar::new() };
    let gate = Arc::new(gate);
    let (mut driver, serving) = connect(gate.clone(), u64::MAX);
    let slow = [0, 6, 9, 12];
    for head in slow {
        driver.guest.put_request(head, READ, 0, &[], 512);
        driver.kick();
        draconis_testkit::wait::pause(
            "the slow request is begun",
            std::time::Duration::from_millis(5),
        );
        driver.guest.put_request(3, READ, 5, &[], 512);
        driver.kick();
        assert_eq!(driver.wait_used(), Some((3, 513)));
        draconis_testkit::wait::pause(
            "the slow request waits",
            std::time::Duration::from_millis(40),
        );
    }
    *gate.is_open.lock().unwrap() = true;
    gate.opened.notify_all();
    let mut heads = slow.map(|_| driver.wait_used().unwrap().0);
    heads.sort_unstable();
    assert_eq!(heads, slow);
    end(driver, serving);
}

#[test]
fn broken_rings_stop() {
    type Break = fn(&mut Guest);
    let breaks: &[(&str, Break)] = &[
        ("no status", |guest| {
            guest.set_descriptor(0, SPACE, 16, 0, 0);
            guest.make_available(0);
        }),
        ("a loop", |guest| {
            guest.set_descriptor(0, SPACE, 16, NEXT, 0);
            guest.make_available(0);
        }),
        ("a head outside", |guest| guest.make_available(SIZE)),
        ("a next outside", |guest| {
            guest.set_descriptor(0, SPACE, 16, NEXT, SIZE);
            guest.make_available(0);
        }),
        ("contents outside memory", |guest| {
            guest.write_request(0, READ, 0, &[], 512);
            guest.set_descriptor(1, MEMORY_BYTES as u64 - 511, 512, NEXT | WRITE, 2);
            guest.make_available(0);
        }),
        ("contents that wrap", |guest| {
            guest.write_request(0, READ, 0, &[], 512);
            guest.set_descriptor(1, u64::MAX - 5, 512, NEXT | WRITE, 2);
            guest.make_available(0);
        }),
        ("a part to be read after one to be written", |guest| {
            guest.write_request(0, READ, 0, &[], 512);
            guest.set_descriptor(2, SPACE, 16, 0, 0);
            guest.make_available(0);
        }),
        ("an indirect table in another", |guest| {
            guest.set_descriptor_at(SPACE, SPACE, 16, INDIRECT, 0);
            guest.set_descriptor(0, SPACE, 16, INDIRECT, 0);
            guest.make_available(0);
        }),
        ("too many available", |guest| guest.set_available_idx(SIZE + 2)),
    ];
    for (name, break_ring) in breaks {
        let (mut driver, serving) = connect(memory_disk(), u64::MAX);
        assert_eq!(driver.request(READ, 1, &[], 512), (OK, vec![1; 512]));
        break_ring(&mut driver.guest);
        driver.kick();
        assert_eq!(driver.wait_used(), None, "{name}");
        end(driver, serving);
    }
}

#[test]
fn read_only_disks_refuse_changes() {
    let disk = Arc::new(ReadOnly(memory_disk()));
    let (mut driver, serving) = connect(disk, u64::MAX);
    assert_ne!(driver.features & F_RO, 0);
    assert_eq!(driver.request(READ, 1, &[], 512), (OK, vec![1; 512]));
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, IO_ERROR);
    assert_eq!(driver.request(DISCARD, 0, &range(0, 1, 0), 0).0, IO_ERROR);
    assert_eq!(driver.request(WRITE_ZEROES, 0, &range(0, 1, 0), 0).0, IO_ERROR);
    assert_eq!(driver.request(FLUSH, 0, &[], 0).0, OK);
    end(driver, serving);
}

/// A disk that can only be read.
struct ReadOnly(Arc<MemoryDisk>);

impl Disk for ReadOnly {
    fn properties(&self) -> draconis_device::Properties {
        draconis_device::Properties { read_only: true, ..self.0.properties() }
    }

    fn read(
        &self,
        at: Extent,
        into: Block,
        urgency: draconis_device::Urgency,
    ) -> draconis_device::Pending<draconis_device::ReadAnswer> {
        self.0.read(at, into, urgency)
    }
}

/// Counts the calls that make writes durable.
struct CountsFlushes(Arc<MemoryDisk>, std::sync::atomic::AtomicUsize);

impl Disk for CountsFlushes {
    fn properties(&self) -> draconis_device::Properties {
        self.0.properties()
    }

    fn read(
        &self,
        at: Extent,
        into: Block,
        urgency: draconis_device::Urgency,
    ) -> draconis_device::Pending<draconis_device::ReadAnswer> {
        self.0.read(at, into, urgency)
    }

    fn submit_chain(
        &self,
        chain: Vec<draconis_device::Group>,
        after: &[draconis_device::Ticket],
    ) -> Result<Vec<draconis_device::Ticket>, draconis_device::Refused<Vec<draconis_device::Group>>>
    {
        self.0.submit_chain(chain, after)
    }

    fn wait_visible(&self, ticket: draconis_device::Ticket) -> Result<(), draconis_device::Error> {
        self.0.wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: draconis_device::Ticket) -> Result<(), draconis_device::Error> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        self.0.wait_durable(ticket)
    }
}

#[test]
fn writes_without_a_write_cache_are_durable() {
    let disk = Arc::new(CountsFlushes(memory_disk(), 0.into()));
    let flushes = || disk.1.swap(0, std::sync::atomic::Ordering::SeqCst);
    // Neither FLUSH nor CONFIG_WCE.
    let (mut driver, serving) = connect(disk.clone(), !(F_FLUSH | F_CONFIG_WCE));
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(flushes(), 1);
    end(driver, serving);
    // FLUSH alone means a write cache.
    let (mut driver, serving) = connect(disk.clone(), !F_CONFIG_WCE);
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(flushes(), 0);
    assert_eq!(driver.request(FLUSH, 0, &[], 0).0, OK);
    assert_eq!(flushes(), 1);
    end(driver, serving);
    // The guest switches it off. The in-flight area tells a successor so.
    let (mut driver, serving) = connect(disk.clone(), u64::MAX);
    assert_eq!(driver.config(32, 1), [1]);
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(flushes(), 0);
    let flags = VhostUserConfigFlags::WRITABLE;
    driver.front_end.set_config(32, flags, &[0]).unwrap();
    assert_eq!(driver.config(32, 1), [0]);
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(flushes(), 1);
    let guest = end(driver, serving);
    let (stream, serving) = serve_disk(disk.clone());
    let mut driver = Driver::connect(stream, guest, u64::MAX);
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(flushes(), 1);
    assert!(driver.front_end.set_config(0, flags, &[0]).is_err(), "only the cache is writable");
    drop(driver);
    assert!(serving.join().unwrap().is_err());
}

#[test]
fn disks_that_lose_writes_with_their_process_have_no_write_cache() {
    let disk = Arc::new(CountsFlushes(memory_disk(), 0.into()));
    let device = Arc::new(Device::new(disk.clone(), "").with_durable_writes());
    let resources = Arc::new(Resources::new().unwrap());
    let (stream, other) = UnixStream::pair().unwrap();
    let serving = std::thread::spawn(move || serve(other, &device, &resources));
    let mut driver = Driver::connect(stream, Guest::new(), u64::MAX);
    assert_eq!(driver.config(32, 1), [0]);
    driver.front_end.set_config(32, VhostUserConfigFlags::WRITABLE, &[1]).unwrap();
    assert_eq!(driver.config(32, 1), [0], "the guest cannot switch it on");
    assert_eq!(driver.request(OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(disk.1.load(std::sync::atomic::Ordering::SeqCst), 1);
    end(driver, serving);
}

#[test]
fn stopped_queues_continue_where_they_were() {
    let (mut driver, serving) = connect(memory_disk(), u64::MAX);
    for sector in 0..5 {
        assert_eq!(driver.request(READ, sector, &[], 512).0, OK);
    }
    assert_eq!(driver.front_end.get_vring_base(0).unwrap(), 5);
    driver.guest.put_request(3, READ, 7, &[], 512);
    driver.kick();
    draconis_testkit::wait::pause("an answer would come now", std::time::Duration::from_millis(50));
    assert_eq!(driver.guest.take_used(), None, "the queue is stopped");
    driver.start_queue().unwrap();
    assert_eq!(driver.wait_used(), Some((3, 513)));
    assert_eq!(driver.guest.output(3, 512), [7; 512]);
    end(driver, serving);
}

/// The area of a back end that died: before or after the entry in the used ring.
#[test]
fn successors_carry_out_what_is_in_flight() {
    let (mut driver, serving) = connect(memory_disk(), u64::MAX);
    for sector in 0..3 {
        assert_eq!(driver.request(READ, sector, &[], 512).0, OK);
    }
    let mut guest = end(driver, serving);
    let (_, area) = guest.inflight.as_ref().unwrap();
    let begin = |head: u16, counter: u64| {
        use std::os::unix::fs::FileExt;
        let at = 16 + 16 * u64::from(head);
        area.write_all_at(&counter.to_le_bytes(), at + 8).unwrap();
        area.write_all_at(&[1], at).unwrap();
    };
    use std::os::unix::fs::FileExt;
    // Available: 6, 3, 9, 12. The back end had taken three of them; 3 is in the used ring, but not
    // recorded as done.
    let mut used = [0; 4];
    area.read_exact_at(&mut used, 12).unwrap();
    assert_eq!(used, [0, 0, 3, 0], "last batch head and used index");
    for (head, counter) in [(6, 10), (3, 11), (9, 9)] {
        begin(head, counter);
    }
    area.write_all_at(&3u16.to_le_bytes(), 12).unwrap();
    for head in [6, 3, 9, 12] {
        guest.put_request(head, OUT, 100 + u64::from(head), &[head as u8; 512], 0);
    }
    guest.memory.write_obj([3u32, 1], GuestAddress(0x2000 + 4 + 8 * 3)).unwrap();
    guest.set_used_idx_in_ring(4);
    assert_eq!(guest.take_used(), Some((3, 1)));

    let disk = memory_disk();
    let (stream, serving) = serve_disk(disk.clone());
    let mut driver = Driver::connect(stream, guest, u64::MAX);
    let mut heads: Vec<u16> = (0..3).map(|_| driver.wait_used().unwrap().0).collect();
    heads.sort_unstable();
    assert_eq!(heads, [6, 9, 12]);
    assert_eq!(driver.guest.take_used(), None);
    for head in [6, 9, 12] {
        assert_eq!(read(&disk, (100 + head) * 512, 512), [head as u8; 512]);
        assert_eq!(driver.guest.status(head as u16), OK);
    }
    assert_eq!(read(&disk, 103 * 512, 512), [103; 512], "answered, so not carried out again");
    assert_eq!(driver.request(READ, 0, &[], 512).0, OK);
    end(driver, serving);
}

#[test]
fn memory_is_added_and_removed() {
    let (mut driver, serving) = connect(memory_disk(), u64::MAX);
    let other = Guest::new();
    let mut region =
        VhostUserMemoryRegionInfo::from_guest_region(other.memory.iter().next().unwrap()).unwrap();
    region.guest_phys_addr = 1 << 30;
    driver.front_end.add_mem_region(&region).unwrap();
    driver.guest.write_request(0, READ, 9, &[], 512);
    driver.guest.set_descriptor(1, 1 << 30, 512, NEXT | WRITE, 2);
    driver.guest.make_available(0);
    driver.kick();
    assert_eq!(driver.wait_used(), Some((0, 513)));
    let mut bytes = [0; 512];
    other.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    assert_eq!(bytes, [9; 512]);
    driver.front_end.remove_mem_region(&region).unwrap();
    assert_eq!(driver.request(READ, 8, &[], 512), (OK, vec![8; 512]));
    driver.guest.set_descriptor(1, 1 << 30, 512, NEXT | WRITE, 2);
    driver.guest.make_available(0);
    driver.kick();
    assert_eq!(driver.wait_used(), None);
    // Regions that overlap.
    region.guest_phys_addr = MEMORY_BYTES as u64 - 4096;
    assert!(driver.front_end.add_mem_region(&region).is_err());
    drop(driver);
    assert!(serving.join().unwrap().is_err());
}

/// Descriptors, rings, headers and the in-flight area change at random while they are read.
#[test]
fn changing_memory_is_harmless() {
    use std::os::unix::fs::FileExt;
    for seed in 0..40 {
        let mut random = draconis_device::Random::new(seed);
        let (mut driver, serving) = connect(memory_disk(), u64::MAX);
        let (memory, area) = (driver.guest.memory.clone(), driver.guest.inflight.take().unwrap().1);
        let kick = driver.kick.try_clone().unwrap();
        for head in (0..SIZE - 2).step_by(3) {
            let kind = [READ, OUT, GET_ID, DISCARD, WRITE_ZEROES][usize::from(head) % 5];
            driver.guest.put_request(head, kind, u64::from(head), &[head as u8; 512], 0);
        }
        driver.kick();
        for _ in 0..300 {
            // Mostly the descriptors and rings; small values are more often valid.
            let at = match random.next_below(4) {
                0 => SPACE + random.next_below(21) * PART_BYTES + random.next_below(17),
                _ => random.next_below(0x2240),
            };
            let value = [random.next_below(70) as u8, random.next_below(256) as u8]
                [random.next_below(2) as usize];
            memory.write_obj(value, GuestAddress(at)).unwrap();
            area.write_all_at(&[value], random.next_below(1024)).unwrap();
            kick.write(1).unwrap();
        }
        // A broken ring is no error of the connection.
        let Driver { guest, front_end, .. } = driver;
        drop(front_end);
        serving.join().unwrap().unwrap();
        // A successor of that mess refuses it, or carries out what is there.
        let (stream, serving) = serve_disk(memory_disk());
        let guest = Guest { inflight: None, ..guest };
        let mut driver = Driver::negotiate(stream, guest, u64::MAX);
        driver.share_memory().unwrap();
        let started = driver.start_queue();
        drop(driver);
        assert_eq!(serving.join().unwrap().is_ok(), started.is_ok());
    }
}

#[test]
fn wrong_messages_end_the_connection() {
    // A ring outside the memory.
    let (stream, serving) = serve_disk(memory_disk());
    let mut driver = Driver::negotiate(stream, Guest::new(), u64::MAX);
    assert!(driver.start_queue().is_err(), "no memory yet");
    drop(driver);
    assert!(serving.join().unwrap().is_err());
    // Memory that its file does not have.
    let (stream, serving) = serve_disk(memory_disk());
    let mut driver = Driver::negotiate(stream, Guest::new(), u64::MAX);
    driver.guest.file().set_len(4096).unwrap();
    assert!(driver.share_memory().is_err());
    drop(driver);
    assert!(serving.join().unwrap().is_err());
    // An in-flight area that is too short.
    let (stream, serving) = serve_disk(memory_disk());
    let mut guest = Guest::new();
    let file = guest.file().try_clone().unwrap();
    let area = vhost::vhost_user::message::VhostUserInflight::new(64, 0, 1, SIZE);
    guest.inflight = Some((area, file));
    let connected = std::panic::catch_unwind(|| Driver::negotiate(stream, guest, u64::MAX));
    assert!(connected.is_err());
    assert!(serving.join().unwrap().is_err());
    // Features that were not offered, queues that do not exist.
    let (driver, serving) = connect(memory_disk(), u64::MAX);
    assert!(driver.front_end.set_features(1 << 3).is_err());
    drop(driver);
    assert!(serving.join().unwrap().is_err());
    // Bytes that are no message.
    let (mut stream, serving) = serve_disk(memory_disk());
    std::io::Write::write_all(&mut stream, &[0xa5; 64]).unwrap();
    assert!(serving.join().unwrap().is_err());
}

impl ThinClient for Driver {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        assert_eq!(self.request(OUT, at / 512, bytes, 0).0, OK);
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let (status, bytes) = self.request(READ, at / 512, &[], len as u32);
        assert_eq!(status, OK);
        bytes
    }

    fn trim(&mut self, at: u64, len: u64) {
        assert_eq!(self.request(DISCARD, 0, &range(at / 512, (len / 512) as u32, 0), 0).0, OK);
    }

    fn zero(&mut self, at: u64, len: u64, keeps_space: bool) {
        let range = range(at / 512, (len / 512) as u32, u32::from(!keeps_space));
        assert_eq!(self.request(WRITE_ZEROES, 0, &range, 0).0, OK);
    }

    fn flush(&mut self) {
        assert_eq!(self.request(FLUSH, 0, &[], 0).0, OK);
    }
}

#[test]
fn zeros_stay_holes() {
    zeros_take_no_space(|disk| connect(disk, u64::MAX).0);
}
