//! One file, changed in every possible way, compared with its bytes in memory.
//!
//! ```text
//!  0 ------ hole ------ base ==== window ==== base + size ---- base + WINDOW
//! ```
//!
//! The window is where the depth of the file's map changes. Only it is modified, and the file never
//! ends before it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use draconis_device::Random;
use rustix::fs::{Advice, FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::common::volume::{MountedVolume, run_e2fsck};
use crate::common::{has_fuse, is_installed, report_skipped};
use crate::storms::{set_all_times, should_run_long_tests, test_seeds};

const WINDOW_BYTES: usize = 400 << 10;
const OPERATION_COUNT: usize = 700;

/// Maps and accesses parts of a file in its own process, because mappings are unsafe.
struct MmapHelper {
    process: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

const MMAP_HELPER_SCRIPT: &str = "import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
for line in sys.stdin:
    how, at, n, byte = line.split()
    at, n, byte = int(at), int(n), int(byte)
    page = at & ~4095
    m = mmap.mmap(fd, at - page + n, offset=page)
    if how == 'read':
        sys.stdout.buffer.write(m[at - page:])
    else:
        m[at - page:] = bytes([byte]) * n
        if how == 'sync':
            m.flush()
        sys.stdout.buffer.write(b'done\\n')
    m.close()
    sys.stdout.flush()
";

impl MmapHelper {
    fn start(file: &Path) -> Option<Self> {
        if !is_installed("python3") {
            report_skipped("mappings of files need python3");
            return None;
        }
        let mut process = Command::new("python3")
            .args(["-c", MMAP_HELPER_SCRIPT])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, answers) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Some(Self { process, ask, answers: BufReader::new(answers) })
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let mut found = vec![0; len];
        writeln!(self.ask, "read {at} {len} 0").unwrap();
        self.answers.read_exact(&mut found).unwrap();
        found
    }

    fn fill(&mut self, at: u64, len: usize, byte: u8, sync: bool) {
        let how = if sync { "sync" } else { "fill" };
        writeln!(self.ask, "{how} {at} {len} {byte}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n");
    }

    fn exit(mut self) {
        drop(self.ask);
        assert!(self.process.wait().unwrap().success());
    }
}

/// Open descriptors of the file.
struct OpenDescriptors {
    cached: File,
    direct: File,
    mapper: Option<MmapHelper>,
}

impl OpenDescriptors {
    fn open_all(path: &Path) -> Self {
        let open = |flags: OFlags| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.custom_flags(flags.bits() as i32).open(path).unwrap()
        };
        let (cached, direct) = (open(OFlags::empty()), open(OFlags::DIRECT));
        Self { cached, direct, mapper: MmapHelper::start(path) }
    }
}

struct FileStressTest {
    volume: MountedVolume,
    options: &'static str,
    open: Option<OpenDescriptors>,
    base: u64,
    model: Vec<u8>,
    random: Random,
    /// Operations so far, for debugging a failure.
    done: Vec<String>,
}

impl FileStressTest {
    fn new(block: u64, options: &'static str, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let volume = MountedVolume::new(&block.to_string(), "32M", options);
        let pointers = block / 4;
        let depths = [0, 12, 12 + pointers, 12 + pointers + pointers * pointers];
        // Beyond 4 GiB of holes, comparing the file takes seconds.
        let reachable = if block < 4096 || should_run_long_tests() { 4 } else { 3 };
        let depth = depths[random.next_below(reachable) as usize];
        let base = (depth * block).saturating_sub(150_000);
        let open = OpenDescriptors::open_all(&volume.at("file"));
        open.cached.set_len(base).unwrap();
        Self { volume, options, open: Some(open), base, model: vec![], random, done: vec![] }
    }

    fn open(&mut self) -> &mut OpenDescriptors {
        self.open.as_mut().expect("it is open between operations")
    }

    fn log_operation(&mut self, what: &str, at: usize, len: usize) {
        let line = format!("{what} {at:#x}+{len:#x} of {:#x}", self.model.len());
        eprintln!("{line}");
        self.done.push(line);
    }

    /// Returns a range of the window, sometimes aligned to sectors or pages.
    fn random_range(&mut self, longest: usize) -> (usize, usize) {
        let edge = [1, 1, 512, 4096][self.random.next_below(4) as usize];
        let at = self.random.next_below(WINDOW_BYTES as u64) as usize / edge * edge;
        let longest = longest.min(WINDOW_BYTES - at);
        let len = (1 + self.random.next_below(longest as u64) as usize).div_ceil(edge) * edge;
        (at, len.min(WINDOW_BYTES - at))
    }

    /// Returns a range inside the file; an empty one if the file is too short.
    fn random_range_inside(&mut self, longest: usize) -> Option<(usize, usize)> {
        let (at, len) = self.random_range(longest);
        let len = len.min(self.model.len().saturating_sub(at));
        (len > 0).then_some((at, len))
    }

    fn grow_model(&mut self, end: usize) {
        let end = end.max(self.model.len());
        self.model.resize(end, 0);
    }

    fn compare_with_model(&self, found: &[u8], at: usize, what: &str) {
        let expected = &self.model[at..at + found.len()];
        let Some(bad) = found.iter().zip(expected).position(|(a, b)| a != b) else { return };
        let last = self.done.len().saturating_sub(40);
        panic!(
            "{what} {at:#x}+{:#x}: byte {:#x} is {} and should be {}; before:\n{}",
            found.len(),
            at + bad,
            found[bad],
            expected[bad],
            self.done[last..].join("\n")
        );
    }

    fn write(&mut self, direct: bool) {
        let (at, len) = self.random_range(60_000);
        self.log_operation(if direct { "direct write" } else { "write" }, at, len);
        self.grow_model(at + len);
        let first = self.random.next_below(256) as usize;
        let bytes: Vec<u8> = (0..len).map(|i| ((first + i / 7) & 0xff) as u8).collect();
        self.model[at..at + len].copy_from_slice(&bytes);
        let offset = self.base + at as u64;
        let open = self.open();
        let file = if direct { &open.direct } else { &open.cached };
        file.write_all_at(&bytes, offset).unwrap();
    }

    fn read(&mut self, direct: bool) {
        let Some((at, len)) = self.random_range_inside(100_000) else { return };
        self.log_operation(if direct { "direct read" } else { "read" }, at, len);
        let (offset, mut found) = (self.base + at as u64, vec![0; len]);
        let open = self.open();
        let file = if direct { &open.direct } else { &open.cached };
        file.read_exact_at(&mut found, offset).unwrap();
        self.compare_with_model(&found, at, if direct { "direct read" } else { "read" });
    }

    fn truncate_file(&mut self) {
        // Shrinking and growing are equally frequent.
        let len = self.random.next_below(WINDOW_BYTES as u64) as usize;
        self.log_operation("truncate", 0, len);
        let end = self.base + len as u64;
        self.open().cached.set_len(end).unwrap();
        self.model.resize(len, 0);
    }

    fn access_by_mmap(&mut self) {
        let Some((at, len)) = self.random_range_inside(50_000) else { return };
        let (offset, how) = (self.base + at as u64, self.random.next_below(3));
        let byte = self.random.next_below(256) as u8;
        self.log_operation(["map", "map, fill", "map, fill, sync"][how as usize], at, len);
        let Some(mapper) = &mut self.open().mapper else { return };
        if how == 0 {
            let found = mapper.read(offset, len);
            return self.compare_with_model(&found, at, "mapped");
        }
        mapper.fill(offset, len, byte, how == 2);
        self.model[at..at + len].fill(byte);
    }

    fn fallocate_range(&mut self) {
        let (at, len) = self.random_range(60_000);
        let keep = self.random.next_below(2) == 0;
        let (how, what) = match self.random.next_below(3) {
            0 => (FallocateFlags::empty(), "allocate"),
            1 => (FallocateFlags::PUNCH_HOLE, "punch"),
            _ => (FallocateFlags::ZERO_RANGE, "zero"),
        };
        let keep = keep || how == FallocateFlags::PUNCH_HOLE;
        let how = if keep { how | FallocateFlags::KEEP_SIZE } else { how };
        self.log_operation(&format!("{what}, keep {keep}"), at, len);
        let offset = self.base + at as u64;
        let answer = rustix::fs::fallocate(&self.open().cached, how, offset, len as u64);
        let inside = at + len <= self.model.len();
        // ext2 cannot keep blocks beyond the end: the call fails without a change. With write-back
        // caching, the kernel may know an end that the volume does not know.
        let unknown = self.options.ends_with(",writeback") && what == "allocate";
        if answer == Err(Errno::OPNOTSUPP) && keep && (!inside || unknown) {
            return;
        }
        answer.unwrap_or_else(|e| panic!("{what}: {e}; {:?}", self.done.last()));
        if !keep {
            self.grow_model(at + len);
        }
        let end = (at + len).min(self.model.len());
        if what != "allocate" && at < end {
            self.model[at..end].fill(0);
        }
    }

    fn copy_range(&mut self) {
        let Some((from, len)) = self.random_range_inside(60_000) else { return };
        let to = self.random.next_below((WINDOW_BYTES - len) as u64) as usize;
        if to < from + len && from < to + len {
            return;
        }
        self.log_operation(&format!("copy to {to:#x}"), from, len);
        let (mut source, mut target) = (self.base + from as u64, self.base + to as u64);
        let cached = &self.open().cached;
        let mut left = len;
        while left > 0 {
            let (one, other) = (Some(&mut source), Some(&mut target));
            let copied = rustix::fs::copy_file_range(cached, one, cached, other, left).unwrap();
            assert!(copied > 0);
            left -= copied;
        }
        self.grow_model(to + len);
        self.model.copy_within(from..from + len, to);
    }

    /// Holes must be zeros, and data segments must end.
    fn check_seek(&mut self) {
        self.log_operation("seek", 0, 0);
        let (base, end) = (self.base, self.base + self.model.len() as u64);
        let cached = &self.open().cached;
        // The kernel asks for holes without writing back its cache.
        cached.sync_data().unwrap();
        let mut at = base;
        let mut holes = vec![];
        while at < end {
            let data = match rustix::fs::seek(cached, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(errno) => {
                    assert_eq!(errno, Errno::NXIO);
                    end
                }
            };
            assert!((at..=end).contains(&data), "data at {data} after {at}");
            holes.push((at - base) as usize..(data - base) as usize);
            if data < end {
                at = rustix::fs::seek(cached, SeekFrom::Hole(data)).unwrap();
                assert!((data + 1..=end).contains(&at), "a hole at {at} after data at {data}");
            } else {
                at = end;
            }
        }
        for hole in holes {
            let bad = self.model[hole.clone()].iter().position(|&byte| byte != 0);
            assert_eq!(bad, None, "data in {hole:x?}, said to be a hole; {:#?}", self.done);
        }
    }

    /// Drops the kernel's cache of the file, so that it is read again.
    fn drop_page_cache(&mut self) {
        self.log_operation("forget", 0, 0);
        let open = self.open();
        open.cached.sync_all().unwrap();
        rustix::fs::fadvise(&open.cached, 0, None, Advice::DontNeed).unwrap();
    }

    fn close(&mut self) {
        if let Some(mapper) = self.open.take().and_then(|open| open.mapper) {
            mapper.exit();
        }
    }

    fn reopen(&mut self) {
        self.log_operation("reopen", 0, 0);
        self.close();
        self.open = Some(OpenDescriptors::open_all(&self.volume.at("file")));
    }

    fn remount(&mut self) {
        self.log_operation("remount", 0, 0);
        self.close();
        self.volume.unmount();
        run_e2fsck(&self.volume.image);
        self.volume.draconis.mount(&self.volume.image, "at", self.options);
        self.open = Some(OpenDescriptors::open_all(&self.volume.at("file")));
    }

    fn random_operation(&mut self) {
        match self.random.next_below(200) {
            0..40 => self.write(false),
            40..70 => self.read(false),
            70..85 => self.truncate_file(),
            85..110 => self.access_by_mmap(),
            110..135 => self.fallocate_range(),
            135..145 => self.copy_range(),
            145..160 => self.write(true),
            160..175 => self.read(true),
            175..182 => self.open().cached.sync_all().unwrap(),
            182..187 => self.open().cached.sync_data().unwrap(),
            187..191 => self.check_seek(),
            191..195 => self.drop_page_cache(),
            195..199 => self.reopen(),
            _ => self.remount(),
        }
        let len = self.open().cached.metadata().unwrap().len();
        let expected = self.base + self.model.len() as u64;
        assert_eq!(len, expected, "the size after {:?}", self.done.last());
    }

    fn run(mut self) {
        for operation in 0..OPERATION_COUNT {
            self.random_operation();
            if operation % 50 == 49 {
                let (base, mut found) = (self.base, vec![0; self.model.len()]);
                self.open().cached.read_exact_at(&mut found, base).unwrap();
                self.compare_with_model(&found, 0, "all");
            }
        }
        set_all_times(&self.volume.at);
        self.close();
        self.volume.unmount_and_check();
    }
}

fn run_file_stress_tests(block: u64, options: &'static str) {
    if !has_fuse("storms of bytes") {
        return;
    }
    for seed in test_seeds() {
        FileStressTest::new(block, options, seed).run();
    }
}

#[test]
fn file_stress_1_kib_blocks() {
    run_file_stress_tests(1024, "rw,noatime,nowriteback");
}

#[test]
fn file_stress_1_kib_blocks_write_back() {
    run_file_stress_tests(1024, "rw,noatime,writeback");
}

#[test]
fn file_stress_4_kib_blocks() {
    run_file_stress_tests(4096, "rw,noatime,nowriteback");
}

#[test]
fn file_stress_4_kib_blocks_write_back() {
    run_file_stress_tests(4096, "rw,noatime,writeback");
}
