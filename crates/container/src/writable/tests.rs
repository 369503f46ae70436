//! Images created by qemu-img, modified here, and checked by qemu-img.

mod compact;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{
    Disk, Extent, FileDisk, Group, MemoryDisk, OpenedFile, Properties, Random, Refused,
    SubmitOptions, Ticket, Write,
};
use draconis_testkit::thin::{self, DirectClient};
use draconis_testkit::{CrashOptions, CrashStates, Event, RecordDisk, conform};
use draconis_types::Block;

use super::block_from;
use crate::create::{DryRunDisk, NewFormat, NewImageDisk};
use crate::tests::{memory_disk, read_all, sample_contents};
use crate::{Error, OpenedImage, UnsupportedFeature, open, open_for_writing};
use draconis_testkit::report_skipped;

const MIB: u64 = 1 << 20;

/// A disk in memory that grows, like a growing file.
struct GrowingDisk {
    disk: MemoryDisk,
    len_bytes: u64,
    /// End of all writes.
    end_bytes: AtomicU64,
}

impl GrowingDisk {
    fn new(mut bytes: Vec<u8>, room_bytes: u64) -> Self {
        let len_bytes = (bytes.len() as u64).next_multiple_of(512);
        bytes.resize(room_bytes.max(len_bytes) as usize, 0);
        let end_bytes = len_bytes.into();
        Self { disk: MemoryDisk::new(bytes, 512), len_bytes, end_bytes }
    }

    /// Returns the contents of the equivalent file.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = read_disk_bytes(self);
        bytes.truncate(self.end_bytes.load(Ordering::Relaxed) as usize);
        bytes
    }

    /// Returns the file as the next open sees it.
    fn reopen(&self) -> Arc<Self> {
        Arc::new(Self::new(self.bytes(), self.max_len_bytes()))
    }
}

impl draconis_device::ForwardingDisk for GrowingDisk {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.disk
    }

    fn properties(&self) -> Properties {
        Properties { len_bytes: self.len_bytes, ..self.inner_disk().properties() }
    }

    fn max_len_bytes(&self) -> u64 {
        self.inner_disk().properties().len_bytes
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        for write in chain.iter().flat_map(|group| &group.writes) {
            let end = write.at_bytes + write.block.len() as u64;
            self.end_bytes.fetch_max(end, Ordering::Relaxed);
        }
        self.inner_disk().submit_with(chain, after, terms)
    }
}

/// Returns all bytes up to the maximum length of a disk.
fn read_disk_bytes(disk: &dyn Disk) -> Vec<u8> {
    let len = disk.max_len_bytes();
    let read = disk.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    read.into_private().to_vec()
}

fn run_command(program: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => Some(output),
        Err(_) => {
            report_skipped(format!("images that are changed need {program}"));
            None
        }
    }
}

fn run_command_ok(program: &str, arguments: &[&str]) -> Option<()> {
    let output = run_command(program, arguments)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    Some(())
}

/// Creates an image with qemu-img and `options`, qcow2 by default, and fills it with the qemu-io
/// `commands`; `snapshot NAME` is an additional command.
fn create_image(dir: &Path, options: &[&str], len: &str, commands: &[&str]) -> Option<Vec<u8>> {
    let path = dir.join("made");
    let shown = path.to_str().unwrap();
    let format: &[&str] = if options.contains(&"-f") { &[] } else { &["-f", "qcow2"] };
    run_command_ok("qemu-img", &[&["create", "-q"], format, options, &[shown, len]].concat())?;
    for command in commands {
        match command.strip_prefix("snapshot ") {
            Some(name) => run_command_ok("qemu-img", &["snapshot", "-c", name, shown])?,
            None => run_command_ok("qemu-io", &["-c", command, shown])?,
        }
    }
    Some(std::fs::read(&path).unwrap())
}

/// Checks with qemu-img that an image is valid and has these contents; leaks only if `may_leak`.
fn check_image(dir: &Path, image: &[u8], contents: Option<&[u8]>, may_leak: bool, what: &str) {
    let path = dir.join("judged");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(image.len() as u64).unwrap();
    for (nth, piece) in image.chunks(1 << 16).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, (nth as u64) << 16).unwrap();
        }
    }
    let shown = path.to_str().unwrap();
    let kind = if image.starts_with(b"vhdx") { "vhdx" } else { "qcow2" };
    // The log of an unclosed image must be replayed; leaks are only reported.
    let repair: &[&str] = if may_leak && kind == "vhdx" { &["-r", "all"] } else { &[] };
    let words = ["check", "-f", kind];
    let output = run_command("qemu-img", &[&words, repair, &[shown]].concat()).unwrap();
    let errors = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    assert!(code == Some(0) || may_leak && code == Some(3), "{what}: {code:?} {errors}");
    let Some(contents) = contents else { return };
    let raw = dir.join("raw");
    std::fs::write(&raw, contents).unwrap();
    let raw = raw.to_str().unwrap();
    let output =
        run_command("qemu-img", &["compare", "-f", kind, "-F", "raw", shown, raw]).unwrap();
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stdout));
}

/// Returns the contents of a snapshot of the image that was last checked, or of the created one.
fn read_snapshot(dir: &Path, file: &str, name: &str) -> Vec<u8> {
    let (from, to) = (dir.join(file), dir.join("snapshot"));
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    run_command_ok("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", "-l", name, from, to])
        .unwrap();
    std::fs::read(to).unwrap()
}

fn submit_write(disk: &dyn Disk, at_bytes: u64, bytes: &[u8]) -> Ticket {
    let group = Group { writes: vec![Write { at_bytes, block: block_from(bytes) }] };
    disk.submit(group, &[]).unwrap_or_else(|refused| panic!("{}", refused.error))
}

const IMAGE_OPTIONS: &[&[&str]] = &[
    &[],
    &["-o", "compat=0.10"],
    &["-o", "cluster_size=512"],
    &["-o", "cluster_size=512,refcount_bits=1"],
    &["-o", "cluster_size=4k,refcount_bits=4,lazy_refcounts=on"],
    &["-o", "cluster_size=2M,refcount_bits=64"],
    &["-o", "preallocation=metadata"],
    &["-o", "refcount_bits=8,preallocation=full"],
    &["-f", "vhdx", "-o", "block_size=1M"],
    &["-f", "vhdx"],
    &["-f", "vhdx", "-o", "subformat=fixed"],
];

/// Returns true if an image can store new data only by growing.
fn needs_growing_file(options: &[&str]) -> bool {
    options.contains(&"vhdx")
}

#[test]
#[ignore = "tools: qemu-img"]
fn writable_image_conforms() {
    let dir = tempfile::tempdir().unwrap();
    for options in IMAGE_OPTIONS {
        let Some(image) = create_image(dir.path(), options, "3M", &[]) else { return };
        let end = image.len() as u64;
        for (grows, room) in [(true, end + 24 * MIB), (false, end + 16 * MIB)] {
            if !grows && needs_growing_file(options) {
                continue;
            }
            let mut files: Vec<Arc<GrowingDisk>> = vec![];
            conform::check_all(|| {
                let mut bytes = image.clone();
                if !grows {
                    // Bytes of a device past the image are arbitrary.
                    bytes.resize(room as usize, 0x5A);
                }
                let file = Arc::new(GrowingDisk::new(bytes, room));
                files.push(file.clone());
                open_for_writing(file, &[], 7).unwrap().disk
            });
            for file in files.iter().step_by(5) {
                let opened = open(file.reopen(), &[]).unwrap();
                let contents = read_all(&*opened.disk).unwrap();
                let what = format!("{options:?}, grows: {grows}");
                let image = file.bytes();
                check_image(dir.path(), &image, Some(&contents), false, &what);
            }
        }
    }
}

/// Random writes to an image with all types of clusters.
#[test]
#[ignore = "tools: qemu-img"]
fn writes_over_all_cluster_kinds_keep_neighbours() {
    let dir = tempfile::tempdir().unwrap();
    let raw = sample_contents(5 << 20);
    let commands =
        ["write -P 7 100k 300k", "write -z 1M 128k", "write -z -u 2M 70k", "discard 3M 64k"];
    let mut images: Vec<(Vec<u8>, Vec<Vec<u8>>)> = vec![];
    for options in IMAGE_OPTIONS {
        let packed = [&["-O", "qcow2", "-c"], *options].concat();
        let is_not = |it: &&str| {
            ["preallocation", "refcount_bits=1", "vhdx"].iter().any(|no| it.contains(no))
        };
        if !options.iter().any(is_not) {
            let Some(image) = crate::tests::convert_with_qemu_img(dir.path(), &raw, &packed) else {
                return;
            };
            images.push((image, vec![]));
        }
        let Some(image) = create_image(dir.path(), options, "5M", &commands) else { return };
        images.push((image, vec![]));
    }
    let below = dir.path().join("below");
    std::fs::write(&below, &raw[..4 << 20]).unwrap();
    let options = ["-F", "raw", "-b", below.to_str().unwrap()];
    let Some(image) = create_image(dir.path(), &options, "5M", &commands) else { return };
    images.push((image, vec![raw[..4 << 20].to_vec()]));

    let mut random = Random::new(5);
    for (nth, (image, behind)) in images.into_iter().enumerate() {
        let behind: Vec<Arc<dyn Disk>> = behind.into_iter().map(memory_disk).collect();
        let mut file = Arc::new(GrowingDisk::new(image, 48 * MIB));
        let opened = open(file.clone(), &behind).unwrap();
        let mut expected = read_all(&*opened.disk).unwrap();
        for session in 0..3u8 {
            let OpenedImage { disk, session: image, .. } =
                open_for_writing(file.clone(), &behind, 7).unwrap();
            let len = disk.properties().len_bytes;
            for round in 0..40u8 {
                let count = 1 + random.next_below(if round % 8 == 0 { 600 } else { 20 });
                let at = random.next_below(len / 512 - count) * 512;
                let is_hole = round % 4 == 3;
                let byte = if is_hole { 0 } else { session * 64 + round + 1 };
                let bytes = vec![byte; (count * 512) as usize];
                expected[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                let ticket = match is_hole {
                    true => disk.punch_hole(Extent::new(at, count * 512)).unwrap().unwrap(),
                    false => submit_write(&*disk, at, &bytes),
                };
                if round % 5 == 0 {
                    disk.wait_durable(ticket).unwrap();
                }
                if round == 20 {
                    image.as_ref().unwrap().close_session().unwrap();
                    check_image(dir.path(), &file.bytes(), None, false, &format!("{nth}, rests"));
                }
            }
            assert!(read_all(&*disk).unwrap() == expected, "{nth}");
            drop((disk, image));
            file = file.reopen();
            let found = read_all(&*open(file.clone(), &behind).unwrap().disk).unwrap();
            assert!(found == expected, "{nth}");
            check_image(dir.path(), &file.bytes(), Some(&expected), false, &format!("{nth}"));
        }
    }
}

/// Snapshots keep their contents, and other programs can delete them.
#[test]
#[ignore = "tools: qemu-img"]
fn snapshots_keep_their_contents() {
    let dir = tempfile::tempdir().unwrap();
    let commands = [
        "write -P 7 100k 300k",
        "write -c -P 8 2M 2M",
        "write -z -u 1M 70k",
        "snapshot one",
        "write -P 9 200k 64k",
        "write -P 9 3M 64k",
        "snapshot two",
        "snapshot three",
        "write -P 10 1M 64k",
    ];
    let shapes: [&[&str]; 5] = [
        &[],
        &["-o", "compat=0.10"],
        &["-o", "cluster_size=512,refcount_bits=32"],
        &["-o", "cluster_size=4k,lazy_refcounts=on"],
        &["-o", "cluster_size=2M,refcount_bits=64"],
    ];
    let mut random = Random::new(8);
    for options in shapes {
        let Some(image) = create_image(dir.path(), options, "5M", &commands) else { return };
        let names = ["one", "two", "three"];
        let kept = names.map(|name| read_snapshot(dir.path(), "made", name));
        let mut file = Arc::new(GrowingDisk::new(image, 96 * MIB));
        let mut expected = read_all(&*open(file.clone(), &[]).unwrap().disk).unwrap();
        for session in 0..2u8 {
            let what = format!("{options:?}, {session}");
            let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
            for round in 0..30u8 {
                let count = 1 + random.next_below(if round % 8 == 0 { 600 } else { 20 });
                let at = random.next_below(5 * MIB / 512 - count) * 512;
                let bytes = vec![session * 64 + round + 1; (count * 512) as usize];
                expected[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                submit_write(&*disk, at, &bytes);
            }
            assert!(read_all(&*disk).unwrap() == expected, "{what}");
            drop(disk);
            check_image(dir.path(), &file.bytes(), Some(&expected), false, &what);
            for (name, kept) in names.iter().zip(&kept) {
                let found = read_snapshot(dir.path(), "judged", name);
                assert!(found == *kept, "{what}: {name}");
            }
            file = file.reopen();
        }
        let path = dir.path().join("judged");
        for action in ["-d", "-c"] {
            run_command_ok("qemu-img", &["snapshot", action, "two", path.to_str().unwrap()])
                .unwrap();
        }
        let image = std::fs::read(path).unwrap();
        check_image(dir.path(), &image, Some(&expected), false, "deleted by others");
        for (name, kept) in [("one", &kept[0]), ("two", &expected), ("three", &kept[2])] {
            assert!(read_snapshot(dir.path(), "judged", name) == *kept, "{options:?}: {name}");
        }
    }
}

/// Every state after a power cut opens, holds all durable and no unwritten data, and has no damage
/// but leaks; the next writer repairs those.
#[test]
#[ignore = "tools: qemu-img"]
fn power_cut_keeps_durable_writes() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&[&str], bool, &[&str]); 10] = [
        (&[], true, &[]),
        (&["-o", "compat=0.10"], true, &[]),
        (&["-o", "cluster_size=512"], true, &["write -P 9 0 40k"]),
        (&["-o", "cluster_size=4k,refcount_bits=2"], false, &[]),
        (&["-o", "cluster_size=4k"], true, &["write -c -P 5 0 64k", "write -z -u 64k 64k"]),
        (&["-o", "cluster_size=4k,compat=0.10"], false, &["write -c -P 5 0 128k"]),
        (&["-o", "cluster_size=512"], true, &["write -P 9 0 90k", "snapshot one"]),
        (&["-o", "cluster_size=4k,compat=0.10"], false, &["write -P 9 0 1M", "snapshot one"]),
        (&["-f", "vhdx", "-o", "block_size=1M"], true, &[]),
        (&["-f", "vhdx", "-o", "subformat=fixed,block_size=1M"], true, &[]),
    ];
    for (options, grows, commands) in cases {
        let Some(image) = create_image(dir.path(), options, "2M", commands) else { return };
        let room = image.len().next_multiple_of(512) as u64 + 6 * MIB;
        let mut start = image.clone();
        start.resize(room as usize, if grows { 0 } else { 0xA5 });
        let len = if grows { image.len() as u64 } else { room };
        let disk = MemoryDisk::new(start.clone(), 512);
        let len_bytes = len.next_multiple_of(512);
        let growing = GrowingDisk { disk, len_bytes, end_bytes: len_bytes.into() };
        let file = Arc::new(RecordDisk::new(growing));
        let before = read_all(&*open(file.clone(), &[]).unwrap().disk).unwrap();
        file.take_events();
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        // Ticket and contents of the writes of each sector.
        let mut history: Vec<(u64, Extent, u8)> = vec![];
        let mut random = Random::new(11);
        let mut last = Ticket(0);
        for round in 0..60u8 {
            let mut group = Group::default();
            let mut written = vec![];
            for part in 0..1 + random.next_below(3) {
                let count = 1 + random.next_below(12);
                let at =
                    random.next_below(2 * MIB / 512 / if round < 30 { 16 } else { 1 } - 12) * 512;
                let with = 100 + round * 2 + (part % 2) as u8;
                let block = block_from(&vec![with; count as usize * 512]);
                group.writes.push(Write { at_bytes: at, block });
                written.push((Extent::new(at, count * 512), with));
            }
            let after: &[Ticket] =
                if random.next_below(4) == 0 && last.0 > 0 { &[last] } else { &[] };
            last = disk.submit(group, after).unwrap();
            history.extend(written.into_iter().map(|(at, with)| (last.0, at, with)));
            if round % 7 == 6 {
                disk.wait_durable(last).unwrap();
            }
        }
        drop(disk);
        let few = CrashOptions { subsets: 6, ..CrashOptions::default() };
        let crashes = CrashStates::new(start, file.take_events(), few);
        let mut states = 0;
        for crash in crashes {
            states += 1;
            let what = format!("{options:?}: state {states}, {:?}", crash.kind);
            let opened = open(crash.disk.clone(), &[]);
            let found = read_all(&*opened.unwrap_or_else(|error| panic!("{what}: {error}")).disk);
            let found = found.unwrap();
            for (sector, bytes) in found.chunks(512).enumerate() {
                let at = Extent::new(sector as u64 * 512, 512);
                let of_it = history.iter().filter(|(_, extent, _)| extent.overlaps(at));
                let old = before[sector * 512];
                let mut durable = of_it.clone().filter(|(ticket, ..)| *ticket <= crash.durable.0);
                let durable = durable.next_back().map_or(old, |(_, _, with)| *with);
                let mut may = of_it
                    .filter(|(ticket, ..)| *ticket > crash.durable.0 && *ticket <= crash.written.0);
                let is_one = bytes.iter().all(|byte| *byte == bytes[0]);
                let is_known = bytes[0] == durable || may.any(|(_, _, with)| *with == bytes[0]);
                assert!(is_one && is_known, "{what}: sector {sector} is {}", bytes[0]);
            }
            let is_judged = states % 40 == 1;
            if is_judged {
                check_image(dir.path(), &read_disk_bytes(&*crash.disk), Some(&found), true, &what);
                if commands.contains(&"snapshot one") {
                    assert!(read_snapshot(dir.path(), "judged", "one") == before, "{what}");
                }
            }
            if !is_judged && states % 4 != 0 {
                continue;
            }
            let file: Arc<dyn Disk> = match needs_growing_file(options) {
                true => Arc::new(GrowingDisk::new(read_disk_bytes(&*crash.disk), room + 8 * MIB)),
                false => crash.disk.clone(),
            };
            let next = open_for_writing(file.clone(), &[], 7);
            let next = next.unwrap_or_else(|error| panic!("{what}: {error}")).disk;
            let ticket = submit_write(&*next, MIB + 512, &[1; 512]);
            next.wait_durable(ticket).unwrap();
            drop(next);
            if is_judged {
                let mut found = found;
                found[MIB as usize + 512..][..512].fill(1);
                let what = format!("{what}, mended");
                check_image(dir.path(), &read_disk_bytes(&*file), Some(&found), false, &what);
            }
        }
        assert!(states > 100, "{options:?}: {states}");
    }
}

/// Whenever the writing process is killed, no table refers past the end of the file, which
/// `qemu-img check` would call damage.
#[test]
#[ignore = "tools: qemu-img"]
fn killed_writer_leaves_no_reference_past_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [&[&str]; 3] = [&[], &["-o", "compat=0.10"], &["-o", "cluster_size=4k"]];
    for options in cases {
        let Some(mut image) = create_image(dir.path(), options, "64M", &[]) else { return };
        let file = Arc::new(RecordDisk::new(GrowingDisk::new(image.clone(), 32 * MIB)));
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        for nth in 0..12 {
            submit_write(&*disk, nth * 5 * MIB, &vec![nth as u8 + 1; 300 << 10]);
        }
        drop(disk);
        let events = file.take_events();
        let groups = events.iter().filter_map(|event| match event {
            Event::Group { writes, .. } => Some(writes),
            _ => None,
        });
        for (nth, writes) in groups.enumerate() {
            for (at_bytes, bytes) in writes {
                let (start, end) = (*at_bytes as usize, *at_bytes as usize + bytes.len());
                image.resize(image.len().max(end), 0);
                image[start..end].copy_from_slice(bytes);
            }
            check_image(dir.path(), &image, None, true, &format!("{options:?}: group {nth}"));
        }
    }
}

/// Every block of a VHDX image is a change of its log, which is filled several times.
#[test]
#[ignore = "tools: qemu-img"]
fn power_cut_leaves_valid_vhdx_log() {
    const BLOCK_COUNT: u64 = 150;
    let dir = tempfile::tempdir().unwrap();
    let options = ["-f", "vhdx", "-o", "block_size=1M,log_size=1M"];
    let Some(image) = create_image(dir.path(), &options, "160M", &[]) else { return };
    let growing = GrowingDisk::new(image, (BLOCK_COUNT + 20) * MIB);
    let start = read_disk_bytes(&growing);
    let file = Arc::new(RecordDisk::new(growing));
    let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
    let tickets: Vec<Ticket> = (0..BLOCK_COUNT)
        .map(|nth| {
            let ticket = submit_write(&*disk, nth * MIB + 512, &[nth as u8 + 1; 512]);
            if nth % 3 == 0 {
                disk.wait_durable(ticket).unwrap();
            }
            ticket
        })
        .collect();
    drop(disk);
    let few = CrashOptions { subsets: 1, exhaustive_sectors: 0, ..CrashOptions::default() };
    for (state, crash) in CrashStates::new(start, file.take_events(), few).enumerate() {
        let what = format!("state {state}, {:?}", crash.kind);
        if state % 3 != 0 {
            continue;
        }
        let opened = open(crash.disk.clone(), &[]).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (nth, ticket) in tickets.iter().enumerate() {
            let at = Extent::new(nth as u64 * MIB + 512, 512);
            let read = opened.disk.read_now(at, Block::private(512)).unwrap().into_private();
            let (is_there, is_none) = (read[0] == nth as u8 + 1, read[0] == 0);
            assert!(is_there || is_none && *ticket > crash.durable, "{what}: block {nth}");
            assert!(is_none || *ticket <= crash.written, "{what}: block {nth}");
        }
        if state % 150 == 0 {
            let found = read_all(&*opened.disk).unwrap();
            check_image(dir.path(), &read_disk_bytes(&*crash.disk), Some(&found), true, &what);
        }
    }
}

/// Refcounts that QEMU left stale, as with lazy refcounts, are rebuilt; also if the file ends before
/// the last cluster, which reads as zeros then.
#[test]
#[ignore = "tools: qemu-img"]
fn refcounts_of_an_unclosed_image_are_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["-o", "lazy_refcounts=on"];
    let path = dir.path().join("made");
    if create_image(dir.path(), &options, "3M", &[]).is_none() {
        return;
    }
    let shown = path.to_str().unwrap();
    let killed =
        ["-f", "qcow2", "-c", "write -P 3 1M 200k", "-c", "flush", "-c", "sigraise 9", shown];
    if run_command("qemu-io", &killed).is_none() {
        return;
    }
    let image = std::fs::read(&path).unwrap();
    assert_eq!(image[79] & 1, 1, "qemu-io left it marked as in use");
    for is_short in [false, true] {
        let mut image = image.clone();
        let mut expected = vec![0; 3 << 20];
        expected[1 << 20..(1 << 20) + (200 << 10)].fill(3);
        if is_short {
            image.truncate((image.len() - 1) & !0xFFFF);
            expected[(1 << 20) + (192 << 10)..(1 << 20) + (200 << 10)].fill(0);
        }
        let file = Arc::new(GrowingDisk::new(image, 16 * MIB));
        assert!(read_all(&*open(file.clone(), &[]).unwrap().disk).unwrap() == expected);
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        submit_write(&*disk, 2 << 20, &[8; 512]);
        expected[2 << 20..(2 << 20) + 512].fill(8);
        drop(disk);
        let image = file.bytes();
        assert_eq!(image[79] & 1, 0);
        check_image(dir.path(), &image, Some(&expected), false, "closed");
    }
}

/// More L2 tables than the cache holds: evicted ones are read again as they were changed.
#[test]
#[ignore = "tools: qemu-img"]
fn evicted_l2_tables_are_read_again() {
    const COUNT: u64 = 14;
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = create_image(dir.path(), &["-o", "cluster_size=2M"], "8T", &[]) else {
        return;
    };
    let file = Arc::new(GrowingDisk::new(image, 128 * MIB));
    let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
    let at = |nth: u64, round: u64| (nth << 39) + round * 2 * MIB;
    for round in 0..2 {
        for nth in 0..COUNT {
            submit_write(&*disk, at(nth, round), &[1 + nth as u8; 512]);
        }
    }
    for (nth, round) in (0..COUNT).flat_map(|nth| [(nth, 0), (nth, 1)]) {
        let read = disk.read_now(Extent::new(at(nth, round), 512), Block::private(512)).unwrap();
        assert_eq!(read.into_private()[..], [1 + nth as u8; 512], "{nth}, {round}");
    }
    drop(disk);
    check_image(dir.path(), &file.bytes(), None, false, "evicted");
}

/// Clusters are overwritten where they are, and free ones in the file are used before it grows. An
/// image is marked as dirty while clusters are allocated.
#[test]
#[ignore = "tools: qemu-img"]
fn file_grows_only_without_free_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&[&str], u64, u8); 2] =
        [(&["write -P 1 0 1M"], 64 << 10, 0), (&["write -P 1 0 1M", "discard 0 1M"], 2 * MIB, 1)];
    for (commands, at, dirty) in cases {
        let Some(image) = create_image(dir.path(), &[], "3M", commands) else { return };
        let file = Arc::new(GrowingDisk::new(image, 16 * MIB));
        let len = file.bytes().len();
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        disk.wait_durable(submit_write(&*disk, at, &[2; 512])).unwrap();
        assert_eq!(file.bytes()[79] & 1, dirty, "{commands:?}");
        drop(disk);
        assert_eq!((file.bytes().len(), file.bytes()[79] & 1), (len, 0), "{commands:?}");
        check_image(dir.path(), &file.bytes(), None, false, commands[0]);
    }
}

/// A refcount table that moves twice: the clusters of the old one are free.
#[test]
#[ignore = "tools: qemu-img"]
fn moved_refcount_table_leaks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["-o", "cluster_size=512,refcount_bits=64"];
    let Some(image) = create_image(dir.path(), &options, "12M", &[]) else { return };
    let mut file = Arc::new(GrowingDisk::new(image, 48 * MIB));
    for session in 0..12 {
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        submit_write(&*disk, session * MIB, &[3; 1 << 20]);
        drop(disk);
        file = file.reopen();
    }
    check_image(dir.path(), &file.bytes(), None, false, "moved");
}

/// A file that cannot grow is filled to its end, also with clusters that have no refcount block yet.
#[test]
#[ignore = "tools: qemu-img"]
fn file_that_cannot_grow_is_filled() {
    const CLUSTER: usize = 512;
    let dir = tempfile::tempdir().unwrap();
    let options = ["-o", "cluster_size=512,refcount_bits=64"];
    let Some(image) = create_image(dir.path(), &options, "12M", &[]) else { return };
    // Fills an image of a file of `len` bytes, which can be `limit` bytes long.
    let fill = |image: &[u8], len: usize, limit: usize| {
        let mut bytes = image.to_vec();
        bytes.resize(len, 0);
        let file = Arc::new(GrowingDisk::new(bytes, limit as u64));
        let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
        let mut expected = read_all(&*disk).unwrap();
        let used = expected.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let mut added = 0;
        for at in (used..expected.len()).step_by(CLUSTER) {
            let writes = vec![Write { at_bytes: at as u64, block: block_from(&[5; CLUSTER]) }];
            if let Err(refused) = disk.submit(Group { writes }, &[]) {
                assert!(refused.error.is_no_space(), "{}", refused.error);
                break;
            }
            expected[at..at + CLUSTER].fill(5);
            added += CLUSTER;
        }
        drop(disk);
        let what = format!("{len} of {limit}");
        // The last L2 table may be without a cluster.
        check_image(dir.path(), &file.bytes(), Some(&expected), true, &what);
        // An L2 table and a refcount block count 64 clusters each.
        let least = (limit - image.len()) / 16 * 15;
        assert!(added + 24 * CLUSTER >= least, "{what}: {added} of {least}");
        file.bytes()
    };
    for free in [1, 40, 64, 65, 66, 130, 200] {
        let len = image.len() + free * CLUSTER;
        fill(&image, len, len);
    }
    // The refcount table counts the clusters of 2 MiB.
    let image = fill(&image, image.len(), (2 << 20) - (64 << 10));
    for more in (0..200).step_by(9) {
        fill(&image, image.len(), image.len() + more * CLUSTER);
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn inconsistent_or_unknown_image_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = create_image(dir.path(), &[], "8M", &["write -P 1 0 200k"]) else { return };
    let cluster = 1 << 16;
    let number = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let (first, counts) = (number(40) as usize, number(48) as usize);
    let second = (number(first) & 0x00FF_FFFF_FFFF_FE00) as usize;
    let block = number(counts) as usize;
    let data = number(second) as usize & 0xFFFF_FFFF;
    let copied = 1u64 << 63;
    // 2^59 bytes need 2^30 entries.
    let first_too_long = [(1u64 << 59).to_be_bytes(), u64::from(u32::MAX).to_be_bytes()].concat();
    let cases: [(&str, usize, Vec<u8>, &str); 13] = [
        ("two entries", second + 8, number(second).to_be_bytes().into(), "same cluster"),
        ("a table", second + 8, (first as u64 | copied).to_be_bytes().into(), "same cluster"),
        ("itself", first + 8, number(first).to_be_bytes().into(), ""),
        ("the head", second + 8, (copied | 1 << 40).to_be_bytes().into(), "behind the end"),
        ("no multiple", second + 8, (copied | (data as u64 + 512)).to_be_bytes().into(), "is none"),
        ("not counted", block + data / cluster * 2, vec![0, 0], "not counted"),
        ("counts of the table", counts, (first as u64).to_be_bytes().into(), "same cluster"),
        ("no counts", counts, vec![0; 8], "not counted"),
        ("table of counts too long", 56, vec![0, 0, 0, 129], "counts that cannot be"),
        ("table of counts unaligned", 48, (counts as u64 + 512).to_be_bytes().into(), "cannot be"),
        ("no table of counts", 48, vec![0; 8], "counts that cannot be"),
        ("first table too long", 24, first_too_long, "first table does not fit"),
        ("snapshots", 60, vec![0, 0, 0, 1], "is none"),
    ];
    for (what, at, bytes, said) in cases {
        let mut broken = image.clone();
        broken[at..at + bytes.len()].copy_from_slice(&bytes);
        let file: Arc<dyn Disk> = Arc::new(GrowingDisk::new(broken.clone(), 16 * MIB));
        match open_for_writing(file.clone(), &[], 7) {
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains(said) && error.contains("qcow2"), "{what}: {error}");
            }
            // Tables that the disk does not use are not checked.
            Ok(_) => assert!(said.is_empty(), "{what} is changed"),
        }
        assert!(read_disk_bytes(&*file)[..broken.len()] == broken, "{what}");
    }
    let bitmaps = {
        let path = dir.path().join("made");
        let added = run_command_ok("qemu-img", &["bitmap", "--add", path.to_str().unwrap(), "map"]);
        added.map(|()| std::fs::read(&path).unwrap())
    };
    let refused = open_for_writing(memory_disk(bitmaps.unwrap()), &[], 7).err().unwrap();
    assert!(
        matches!(refused, Error::Unsupported(UnsupportedFeature::ReadOnlyFormat(..))),
        "{refused}"
    );
}

#[test]
#[ignore = "tools: qemu-img"]
fn a_failed_write_stops_writes_but_not_reads() {
    use draconis_testkit::{Fault, FaultDisk, FaultTarget};
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = create_image(dir.path(), &[], "3M", &["write -P 1 0 200k"]) else { return };
    let file = Arc::new(FaultDisk::new(GrowingDisk::new(image, 16 * MIB)));
    let disk = open_for_writing(file.clone(), &[], 7).unwrap().disk;
    let ticket = submit_write(&*disk, 0, &[2; 512]);
    disk.wait_durable(ticket).unwrap();
    file.add_fault(FaultTarget::Writes(Extent::new(0, u64::MAX)), Fault::Break { kept_writes: 0 });
    let group = Group { writes: vec![Write { at_bytes: MIB, block: block_from(&[3; 4096]) }] };
    let tried = disk.submit(group, &[]).map(|ticket| disk.wait_durable(ticket));
    assert!(!matches!(tried, Ok(Ok(()))));
    let group = Group { writes: vec![Write { at_bytes: 2 * MIB, block: block_from(&[4; 4096]) }] };
    let tried = disk.submit(group, &[]).map(|ticket| disk.wait_durable(ticket));
    assert!(!matches!(tried, Ok(Ok(()))));
    let read = disk.read_now(Extent::new(0, 1024), Block::private(1024)).unwrap();
    assert_eq!(read.bytes().map(|bytes| (bytes[0], bytes[512])), Some((2, 1)));
}

/// A qcow2 and a VHDX image in a file.
#[test]
fn zeros_free_space_of_the_file() {
    for format in [NewFormat::Qcow2, NewFormat::Vhdx] {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(format.max_file_bytes(thin::DISK_BYTES)).unwrap();
        let whole = FileDisk::open_discarding(file.path(), thin::OPTIONS).unwrap();
        let draft = DryRunDisk::new(&whole, format, thin::DISK_BYTES);
        let end = NewImageDisk::new(&whole, &draft, [7; 16]).unwrap().finish().unwrap();
        drop(whole);
        file.as_file().set_len(end).unwrap();
        let whole = OpenedFile::new(file.reopen().unwrap().into(), thin::OPTIONS).unwrap();
        let whole = whole.with_discards().with_growth().unwrap().start();
        let image = open_for_writing(Arc::new(whole), &[], 7).unwrap();
        thin::check_client(&mut DirectClient::new(image.disk), Some(file.as_file()));
        image.session.unwrap().close_session().unwrap();
    }
}
