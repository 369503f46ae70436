//! Exports in faults other than their own death: the disk below loses power, the process of a bucket is
//! killed, the bucket is away. What was flushed is there afterwards. `DRACONIS_ROUNDS` is the number of
//! faults of each image, `DRACONIS_SEED` the first seed.
//!
//! The disk below an export is a file of nbdfuse, whose NBD server is this process: a write to the
//! file goes to a simulated disk at once, an fsync flushes that disk.

use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::bucket::TestBucket;
use crate::common::export::{
    BlockWriter, Export, NbdFuse, SimpleClient, check_image, make_qcow2, make_store, nbdcopy,
    rounds, succeed, text,
};
use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_tool};
use draconis_device::{
    Disk, Error, Extent, Group, Pending, Properties, Random, ReadAnswer, Refused, Ticket, Urgency,
    Write,
};
use draconis_nbd::Connection;
use draconis_testkit::sim::{Clock, SimDisk, Ssd, SsdParameters};
use draconis_types::Block;
use draconis_types::lock::RwLock;
use rustix::process::{Pid, Signal, kill_process};

const CLIENTS: u64 = 3;
/// Length of the simulated disk: a store of 192 MiB fits.
const DISK_BYTES: u64 = 192 << 20;
/// Unit that a power cut writes whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Time for which requests to a bucket are tried again, where an outage is to be longer.
const SHORT_DEADLINE_S: u64 = 2;
/// The same, longer than any outage that no client is to notice.
const LONG_DEADLINE_S: u64 = 300;
const EIO: u32 = 5;

fn seeds(default: u64) -> std::ops::Range<u64> {
    let first = std::env::var("DRACONIS_SEED").map_or(1, |text| text.parse().unwrap());
    first..first + rounds(default)
}

/// A simulated disk until the power is cut; then every request fails.
struct PoweredDisk {
    properties: Properties,
    disk: RwLock<Option<Arc<SimDisk>>>,
}

impl PoweredDisk {
    fn new(disk: Arc<SimDisk>) -> Self {
        Self { properties: disk.properties(), disk: RwLock::new(Some(disk)) }
    }

    /// Cuts the power, and returns what is left. A flush that was answered was done before.
    fn cut(&self, seed: u64) -> Arc<SimDisk> {
        let disk = self.disk.write().take().unwrap();
        disk.crash_and_restart(seed)
    }

    fn with_power<T>(
        &self,
        use_disk: impl FnOnce(&SimDisk) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.disk.read().as_ref().map_or(Err(Error::ServiceEnded), |disk| use_disk(disk))
    }
}

impl Disk for PoweredDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let disk = self.disk.read();
        let gone = |into| Err(Refused { payload: into, error: Error::ServiceEnded });
        Pending::ready(match &*disk {
            Some(disk) => disk.read(at, into, urgency).wait().unwrap_or_else(|| gone(None)),
            None => gone(Some(into)),
        })
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        match &*self.disk.read() {
            Some(disk) => disk.submit_chain(chain, after),
            None => Err(Refused { payload: Some(chain), error: Error::ServiceEnded }),
        }
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.with_power(|disk| disk.wait_visible(ticket))
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.with_power(|disk| disk.wait_durable(ticket))
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.with_power(|disk| disk.discard(extents, after))
    }
}

/// Returns a simulated disk with a volatile write cache that holds the contents of a file.
fn simulated_disk(contents: &Path, seed: u64) -> Arc<SimDisk> {
    let parameters =
        SsdParameters { volatile_cache: true, seed, ..SsdParameters::p3700(DISK_BYTES) };
    let disk = SimDisk::new(Ssd::new(parameters), &Clock::new());
    let bytes = std::fs::read(contents).unwrap();
    assert!(bytes.len() as u64 <= DISK_BYTES);
    for (nth, bytes) in
        bytes.chunks(1 << 20).enumerate().filter(|(_, it)| it.iter().any(|b| *b != 0))
    {
        let mut block = Block::private(bytes.len().next_multiple_of(SECTOR_BYTES));
        block.copy_in(0, bytes);
        let group = Group { writes: vec![Write { at_bytes: (nth as u64) << 20, block }] };
        let ticket = disk.submit(group, &[]).unwrap();
        disk.wait_visible(ticket).unwrap();
    }
    disk.fork()
}

/// Writes all of `disk` to a file, with holes for zeros.
fn save_contents(disk: &SimDisk, path: &Path) {
    let file = std::fs::File::options().write(true).truncate(true).open(path).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    for at in (0..DISK_BYTES).step_by(1 << 20) {
        let block = Block::private(1 << 20);
        let bytes = disk.read_now(Extent::new(at, 1 << 20), block).unwrap().into_private();
        if bytes.iter().any(|byte| *byte != 0) {
            file.write_all_at(&bytes, at).unwrap();
        }
    }
}

/// The simulated disk as a file, by NBD and nbdfuse.
struct PoweredFile {
    disk: Arc<PoweredDisk>,
    fuse: NbdFuse,
}

impl PoweredFile {
    /// Serves `disk` at a socket of its own below `dir`.
    fn serve(disk: Arc<SimDisk>, dir: PathBuf) -> Self {
        std::fs::create_dir(&dir).unwrap();
        let at = dir.join("fuse");
        std::fs::create_dir(&at).unwrap();
        let socket = dir.join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let disk = Arc::new(PoweredDisk::new(disk));
        let exports: Arc<[_]> =
            [draconis_nbd::Export::new(String::new(), "simulated".into(), disk.clone())].into();
        std::thread::spawn(move || {
            // Until the process of the test ends; it serves nobody then.
            for stream in listener.incoming() {
                let (stream, exports) = (stream.unwrap(), exports.clone());
                std::thread::spawn(move || serve_client(stream, &exports));
            }
        });
        let fuse = NbdFuse::mount(at, &format!("nbd+unix:///?socket={}", text(&socket)));
        Self { disk, fuse }
    }
}

fn serve_client(stream: UnixStream, exports: &[draconis_nbd::Export]) {
    let mut connection = Connection::new(stream.try_clone().unwrap(), stream);
    if let Ok(Some(session)) = connection.negotiate(exports) {
        let _ = connection.transmit(&session);
    }
}

fn has_nbdfuse(test: &str) -> bool {
    ["nbdfuse", "nbdcopy", "fusermount3"].iter().all(|tool| has_tool(test, tool))
}

/// Images for the simulated disk: a file with its bytes, and the name of the disk in it.
fn make_images(draconis: &Draconis) -> Vec<(PathBuf, &'static str)> {
    let raw = draconis.path("raw");
    std::fs::File::create(&raw).unwrap().set_len(32 << 20).unwrap();
    let store = make_store(draconis);
    let store = PathBuf::from(store.split_once('#').unwrap().0);
    vec![(raw, ""), (make_qcow2(draconis, "qcow2"), ""), (store, "#vol")]
}

/// Lets writers write until the export or its image fails, after `fault`.
fn write_during(
    writers: Vec<BlockWriter>,
    socket: &Path,
    fault: impl FnOnce(),
) -> Vec<(BlockWriter, Option<u32>)> {
    let start = |mut writer: BlockWriter| {
        let mut client = SimpleClient::connect(socket);
        std::thread::spawn(move || {
            let error = writer.write_until_failure(&mut client);
            (writer, error)
        })
    };
    let threads: Vec<_> = writers.into_iter().map(start).collect();
    fault();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
#[ignore = "tools: nbdfuse"]
fn flushed_writes_survive_power_cuts_of_the_disk() {
    if !has_nbdfuse("exports on a disk without power") {
        return;
    }
    let draconis = Draconis::new();
    let socket = draconis.path("sock");
    let (mut cuts, mut flushes) = (0, 0);
    for (contents, name) in make_images(&draconis) {
        let seeds = seeds(3);
        let mut disk = simulated_disk(&contents, seeds.start);
        let new_writer = |nth| BlockWriter::new(nth, seeds.start, SECTOR_BYTES);
        let mut writers: Vec<_> = (0..CLIENTS).map(new_writer).collect();
        for seed in seeds.clone() {
            let lower = PoweredFile::serve(disk, draconis.path(&format!("cut-{cuts}")));
            let image = format!("{}{name}", text(&lower.fuse.file()));
            let mut export = Export::at(&draconis, "sock", &[&image]);
            // What the power cut before has left.
            let what = format!("{}{name}, seed {seed}", text(&contents));
            let mut client = SimpleClient::connect(&socket);
            writers.iter_mut().for_each(|writer| writer.check(&mut client, &what));
            drop(client);
            let mut random = Random::new(seed);
            let mut left = None;
            let after = write_during(writers, &socket, || {
                draconis_testkit::wait::pause(
                    "the fault comes at any moment",
                    Duration::from_millis(10 + random.next_below(120)),
                );
                left = Some(lower.disk.cut(seed));
                // Some clients hear of it, others do not.
                draconis_testkit::wait::pause(
                    "some clients hear of it, others do not",
                    Duration::from_millis(random.next_below(3) * 20),
                );
                export.child.kill().unwrap();
            });
            export.child.wait().unwrap();
            writers = after.into_iter().map(|(writer, _)| writer).collect();
            disk = left.unwrap();
            cuts += 1;
        }
        // What the last one has left.
        save_contents(&disk, &contents);
        let image = format!("{}{name}", text(&contents));
        let export = Export::at(&draconis, "sock", &[&image]);
        let mut client = SimpleClient::connect(&socket);
        writers.iter_mut().for_each(|writer| writer.check(&mut client, &image));
        drop(client);
        export.end();
        check_image(&draconis, &image);
        assert!(writers.iter().all(|writer| writer.writes > 0));
        flushes += writers.iter().map(|writer| writer.flushes).sum::<u64>();
    }
    eprintln!("{cuts} power cuts, {flushes} flushes");
}

fn file_contents(nth: u64) -> Vec<u8> {
    vec![nth as u8 + 1; 1000 + 7919 * (nth as usize % 9)]
}

/// Puts files into the volume of a disk until that fails; returns their number.
fn put_files(draconis: &Draconis, disk: &Path) -> u64 {
    let source = draconis.path("source");
    let is_put = |nth: &u64| {
        std::fs::write(&source, file_contents(*nth)).unwrap();
        let target = format!("{}:/file-{nth}", text(disk));
        draconis.run(["put", text(&source), &target]).status.success()
    };
    (0..).take_while(is_put).count() as u64
}

/// Copies an export out, replays the journal of its volume, and checks the volume and its first files.
fn check_files(draconis: &Draconis, export: Export, files: u64, what: &str) {
    let copy = draconis.path("copy");
    let _ = std::fs::remove_file(&copy);
    nbdcopy(&[export.uri(), text(&copy)]);
    export.end();
    let replay = ["-fy", "-E", "journal_only", text(&copy)];
    succeed(Command::new("e2fsck").args(replay));
    run_e2fsck(&copy);
    for nth in 0..files {
        let found = draconis.run(["cat", &format!("{}:/file-{nth}", text(&copy))]);
        assert!(found.stdout == file_contents(nth), "{what}: file {nth} of {files}");
    }
}

/// A volume that a client fills through an export, on a disk that loses power: after the replay of its
/// journal each file that was put is there.
#[test]
#[ignore = "tools: nbdfuse"]
fn volumes_survive_power_cuts_below_exports() {
    if !has_nbdfuse("volumes on a disk without power") || !has_tool("volumes", "e2fsck") {
        return;
    }
    let draconis = Draconis::new();
    let (mut cuts, mut files) = (0, 0);
    for (contents, name) in make_images(&draconis) {
        // The volume is made through an export, once.
        let empty = format!("{}{name}", text(&contents));
        let export = Export::at(&draconis, "sock", &[&empty]);
        let fuse = NbdFuse::mount(draconis.make_dir("client"), export.uri());
        succeed(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(fuse.file()));
        drop(fuse);
        export.end();
        for seed in seeds(2) {
            let disk = simulated_disk(&contents, seed);
            let lower = PoweredFile::serve(disk, draconis.path(&format!("cut-{cuts}")));
            let image = format!("{}{name}", text(&lower.fuse.file()));
            let export = Export::at(&draconis, "sock", &[&image]);
            let fuse = NbdFuse::mount(draconis.make_dir("client"), export.uri());
            let wait = Duration::from_millis(40 + Random::new(seed).next_below(400));
            let (put, left) = std::thread::scope(|scope| {
                let cut = scope.spawn(|| {
                    draconis_testkit::wait::pause("the fault comes at any moment", wait);
                    lower.disk.cut(seed)
                });
                (put_files(&draconis, &fuse.file()), cut.join().unwrap())
            });
            drop((export, fuse));
            let lower = PoweredFile::serve(left, draconis.path(&format!("after-{cuts}")));
            let image = format!("{}{name}", text(&lower.fuse.file()));
            let export = Export::at(&draconis, "sock", &[&image]);
            check_files(&draconis, export, put, &format!("{empty}, seed {seed}"));
            (cuts, files) = (cuts + 1, files + put);
        }
    }
    eprintln!("{cuts} power cuts, {files} files");
}

/// Returns the process that an export has for its bucket.
fn disk_process_of(export: &Export) -> Pid {
    let parent = format!("PPid:\t{}\n", export.child.id());
    let entries = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let is_child = |dir: &PathBuf| {
        std::fs::read_to_string(dir.join("status")).is_ok_and(|status| status.contains(&parent))
    };
    let found = entries.filter(is_child).find_map(|dir| dir.file_name()?.to_str()?.parse().ok());
    Pid::from_raw(found.expect("a process for the bucket")).unwrap()
}

/// Faults of a bucket and of the processes between.
#[derive(Clone, Copy, Debug)]
enum BucketFault {
    KillExport,
    /// The export stays, and its clients get errors.
    KillDiskProcess,
    KillBoth,
    /// The server ends, and is started again.
    ServerGone,
    /// The server does not answer for a while.
    ServerHangs,
    /// The server is gone for longer than requests are tried again.
    ServerGoneForLong,
    /// The export is killed while the server is gone.
    KillWithoutServer,
}

impl BucketFault {
    fn choose(random: &mut Random, has_server: bool) -> Self {
        match random.next_below(if has_server { 7 } else { 3 }) {
            0 => Self::KillExport,
            1 => Self::KillDiskProcess,
            2 => Self::KillBoth,
            3 => Self::ServerGone,
            4 => Self::ServerHangs,
            5 => Self::ServerGoneForLong,
            _ => Self::KillWithoutServer,
        }
    }

    /// Returns for how long an export tries a request again.
    fn deadline_s(self) -> u64 {
        match self {
            Self::ServerGoneForLong => SHORT_DEADLINE_S,
            _ => LONG_DEADLINE_S,
        }
    }

    /// Carries the fault out, and kills the export unless clients have to end by themselves.
    fn inject(self, place: &mut TestBucket, export: &mut Export, random: &mut Random) {
        let pause =
            |ms| draconis_testkit::wait::pause("the outage lasts", Duration::from_millis(ms));
        let outage_ms = 50 + random.next_below(600);
        match self {
            Self::KillExport => {}
            Self::KillDiskProcess | Self::KillBoth => {
                kill_process(disk_process_of(export), Signal::KILL).unwrap();
                if matches!(self, Self::KillDiskProcess) {
                    return;
                }
            }
            Self::ServerGone | Self::ServerGoneForLong => {
                let is_long = matches!(self, Self::ServerGoneForLong);
                let start = place.stop_server();
                pause(outage_ms + if is_long { 1000 * SHORT_DEADLINE_S } else { 0 });
                start(place);
                pause(outage_ms);
            }
            Self::ServerHangs => {
                place.signal_server(Signal::STOP);
                pause(outage_ms);
                place.signal_server(Signal::CONT);
                pause(outage_ms);
            }
            Self::KillWithoutServer => {
                let start = place.stop_server();
                pause(outage_ms);
                export.child.kill().unwrap();
                start(place);
            }
        }
        export.child.kill().unwrap();
    }
}

/// Creates a store with a disk of zeros, and returns what starts an export of it with a deadline.
fn make_bucket_disk(place: &TestBucket) -> impl Fn(&TestBucket, u64) -> Export + use<> {
    place.run_ok(&["store", "create", &place.address, "--size", "192M"]);
    place.run_ok(&["store", "disk", &place.address, "vol", "32M"]);
    let address = format!("unix:{}", text(&place.draconis.path("sock")));
    let disk = place.disk_name("vol");
    move |place, deadline_s| {
        let mut command = place.command(&[]);
        command.stderr(Stdio::inherit());
        let deadline = deadline_s.to_string();
        Export::start(command, &["--deadline", &deadline, "--nbd", &address, &disk])
    }
}

/// Writes through exports of a disk in a bucket, during faults.
fn test_faults_of_bucket(mut place: TestBucket, has_server: bool) {
    let socket = place.draconis.path("sock");
    let start = make_bucket_disk(&place);
    let seeds = seeds(3);
    let mut writers: Vec<_> =
        (0..CLIENTS).map(|nth| BlockWriter::new(nth, seeds.start, 4096)).collect();
    let mut faults = std::collections::BTreeMap::<_, u64>::new();
    for seed in seeds {
        let mut random = Random::new(seed);
        let fault = BucketFault::choose(&mut random, has_server);
        let mut export = start(&place, fault.deadline_s());
        let after = write_during(writers, &socket, || {
            draconis_testkit::wait::pause(
                "the fault comes at any moment",
                Duration::from_millis(20 + random.next_below(200)),
            );
            fault.inject(&mut place, &mut export, &mut random);
        });
        drop(export);
        let is_hidden = matches!(fault, BucketFault::ServerGone | BucketFault::ServerHangs);
        let is_told = matches!(fault, BucketFault::KillDiskProcess);
        let what = format!("seed {seed}, {fault:?}");
        writers = after
            .into_iter()
            .map(|(writer, error)| {
                // A short outage is no error of a client.
                assert!(!is_hidden || error.is_none(), "{what}: a client got {error:?}");
                assert!(!is_told || error == Some(EIO), "{what}: a client got {error:?}");
                writer
            })
            .collect();
        let export = start(&place, LONG_DEADLINE_S);
        let mut client = SimpleClient::connect(&socket);
        writers.iter_mut().for_each(|writer| writer.check(&mut client, &what));
        drop(client);
        export.end();
        *faults.entry(format!("{fault:?}")).or_default() += 1;
    }
    place.run_ok(&["store", "check", &place.address]);
    let flushes: u64 = writers.iter().map(|writer| writer.flushes).sum();
    eprintln!("{faults:?}, {flushes} flushes");
}

#[test]
fn flushed_writes_survive_faults_of_directory_bucket() {
    let place = TestBucket::directory_bucket();
    std::fs::create_dir_all(place.draconis.path("bucket")).unwrap();
    test_faults_of_bucket(place, false);
}

#[test]
#[ignore = "tools: versitygw"]
fn flushed_writes_survive_faults_of_server_bucket() {
    if let Some(place) = TestBucket::server_bucket() {
        test_faults_of_bucket(place, true);
    }
}

/// A volume in a bucket that a client fills through an export, during faults.
#[test]
#[ignore = "tools: nbdfuse"]
fn volumes_survive_faults_of_server_bucket() {
    if !has_nbdfuse("volumes in a bucket") || !has_tool("volumes", "e2fsck") {
        return;
    }
    let Some(mut place) = TestBucket::server_bucket() else { return };
    let start = make_bucket_disk(&place);
    let (mut files, mut faults) = (0, 0);
    for seed in seeds(2) {
        let mut random = Random::new(seed);
        let fault = BucketFault::choose(&mut random, true);
        let mut export = start(&place, fault.deadline_s());
        let fuse = NbdFuse::mount(place.draconis.make_dir("client"), export.uri());
        let file = fuse.file();
        succeed(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&file));
        let client = Draconis::new();
        let put = std::thread::scope(|scope| {
            let put = scope.spawn(|| put_files(&client, &file));
            draconis_testkit::wait::pause(
                "the fault comes at any moment",
                Duration::from_millis(100 + random.next_below(600)),
            );
            fault.inject(&mut place, &mut export, &mut random);
            put.join().unwrap()
        });
        drop((export, fuse));
        let what = format!("seed {seed}, {fault:?}");
        check_files(&place.draconis, start(&place, LONG_DEADLINE_S), put, &what);
        (files, faults) = (files + put, faults + 1);
    }
    place.run_ok(&["store", "check", &place.address]);
    eprintln!("{faults} faults, {files} files");
}
