//! Running exports, and clients for them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use draconis_device::Random;

use super::volume::run_e2fsck;
use super::{Draconis, make_source_tree, mke2fs, report_skipped, wait_until};

/// A running export.
pub struct Export {
    pub child: Child,
    /// What it printed when it was ready.
    pub about: serde_json::Value,
}

impl Export {
    pub fn start(command: Command, arguments: &[&str]) -> Self {
        let mut export = Self::spawn(command, arguments);
        let mut line = String::new();
        BufReader::new(export.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        export.about = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{arguments:?}"));
        export
    }

    pub fn spawn(mut command: Command, arguments: &[&str]) -> Self {
        command.args(["export", "--json"]).args(arguments).stdout(Stdio::piped());
        Self { child: command.spawn().unwrap(), about: serde_json::Value::Null }
    }

    /// Starts an export at the socket `name` below the directory.
    pub fn at(draconis: &Draconis, name: &str, arguments: &[&str]) -> Self {
        let socket = format!("unix:{}", draconis.path(name).display());
        Self::start(draconis.command(), &[&["--nbd", &socket], arguments].concat())
    }

    pub fn uri(&self) -> &str {
        self.about["exports"][0]["uris"][0].as_str().unwrap()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Ends the export, which must succeed.
    pub fn end(mut self) {
        self.signal(rustix::process::Signal::TERM);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Creates an ext4 volume with files.
pub fn make_volume(draconis: &Draconis, name: &str) -> PathBuf {
    let tree = draconis.make_dir("tree");
    make_source_tree(&tree);
    let image = draconis.path(name);
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "32M");
    image
}

pub fn nbdcopy(arguments: &[&str]) {
    succeed(Command::new("nbdcopy").args(arguments));
}

/// Copies an export out, compares it with `wanted`, and checks its volume.
pub fn assert_contents(draconis: &Draconis, uri: &str, wanted: &Path) {
    let copy = draconis.path("copy");
    let _ = std::fs::remove_file(&copy);
    nbdcopy(&[uri, text(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(wanted).unwrap(), "{uri}");
    run_e2fsck(&copy);
}

/// Creates the store `s` of 192 MiB with the disk `vol` of 32 MiB.
pub fn make_store(draconis: &Draconis) -> String {
    let store = draconis.path("s");
    let store = text(&store);
    draconis.run_ok(["store", "create", store, "--size", "192M", "--layout", "cow", "--sparse"]);
    draconis.run_ok(["store", "disk", store, "vol", "32M"]);
    format!("{store}#vol")
}

pub fn make_qcow2(draconis: &Draconis, name: &str) -> PathBuf {
    let image = draconis.path(name);
    succeed(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", text(&image), "32M"]));
    image
}

/// Returns libnbd's shell, in Python; `None` if it is not installed.
pub fn nbdsh(test: &str) -> Option<fn() -> Command> {
    let of_path: fn() -> Command = || Command::new("nbdsh");
    // Another Python in the path does not have the module.
    let of_system: fn() -> Command = || {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-m", "nbd"]);
        command
    };
    let works = |make: &fn() -> Command| {
        let output = make().arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let found = [of_path, of_system].into_iter().find(works);
    if found.is_none() {
        report_skipped(format_args!("{test} needs nbdsh"));
    }
    found
}

/// A client with simple replies, one request at a time.
pub struct SimpleClient {
    stream: UnixStream,
    pub transmission_flags: u16,
}

impl SimpleClient {
    /// Connects to a socket, and chooses the default export.
    pub fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(draconis_testkit::wait::HANG_BOUND)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).unwrap();
        Self { stream, transmission_flags: u16::from_be_bytes([reply[8], reply[9]]) }
    }

    /// Sends a request, and returns the error of its reply.
    fn call(&mut self, command: u16, offset: u64, len: usize, payload: &[u8]) -> u32 {
        self.try_call((command, 0), offset, len, payload).unwrap()
    }

    /// Sends a request with flags. Fails if the export is gone.
    pub fn try_call(
        &mut self,
        (command, flags): (u16, u16),
        offset: u64,
        len: usize,
        payload: &[u8],
    ) -> std::io::Result<u32> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(7_u64.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend((len as u32).to_be_bytes());
        request.extend(payload);
        self.stream.write_all(&request)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        Ok(u32::from_be_bytes(reply[4..8].try_into().unwrap()))
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        assert_eq!(self.call(0, offset, len, &[]), 0);
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        assert_eq!(self.call(1, offset, bytes.len(), bytes), 0);
    }

    pub fn flush(&mut self) {
        assert_eq!(self.call(3, 0, 0, &[]), 0);
    }
}

/// Checks a store, or a qcow2 file, after a fault.
pub fn check_image(draconis: &Draconis, image: &str) {
    if image.ends_with("qcow2") {
        // Lost clusters are allowed, damage is not.
        let mut check = Command::new("qemu-img");
        let check = check.args(["check", "-q", image]).stdout(Stdio::null()).status().unwrap();
        assert!(matches!(check.code(), Some(0 | 3)), "{image}");
    } else if let Some((store, _)) = image.split_once('#') {
        draconis.run_ok(["store", "check", store]);
    }
}

/// Returns `DRACONIS_ROUNDS`, the number of faults of each image in a campaign.
pub fn rounds(default: u64) -> u64 {
    std::env::var("DRACONIS_ROUNDS").map_or(default, |text| text.parse().unwrap())
}

/// Units of each [`BlockWriter`], which no other one writes.
const WRITER_UNITS: u64 = 400;
/// Longest write of a [`BlockWriter`], in units.
const MAX_WRITE_UNITS: u64 = 24;

/// A client that writes to its own part of the disk until the export fails.
pub struct BlockWriter {
    first_unit: u64,
    unit_bytes: usize,
    /// Numbers of the writes that each unit may show after a fault, 0 for zeros: the durable one, then
    /// all later ones.
    units: Vec<Vec<u64>>,
    pub writes: u64,
    pub flushes: u64,
    random: Random,
}

impl BlockWriter {
    const WRITE: u16 = 1;
    const FLUSH: u16 = 3;
    const WRITE_ZEROES: u16 = 6;
    const FUA: u16 = 1;

    /// Creates the `nth` writer of a disk of zeros. A fault may tear a write between two units.
    pub fn new(nth: u64, seed: u64, unit_bytes: usize) -> Self {
        Self {
            first_unit: nth * WRITER_UNITS,
            unit_bytes,
            units: vec![vec![0]; WRITER_UNITS as usize],
            writes: 0,
            flushes: 0,
            random: Random::new(seed * 1000 + nth),
        }
    }

    fn contents(&self, number: u64) -> Vec<u8> {
        number.to_le_bytes().repeat(self.unit_bytes / 8)
    }

    /// Writes and flushes until a request fails, and returns its error; `None` if the export is gone.
    pub fn write_until_failure(&mut self, client: &mut SimpleClient) -> Option<u32> {
        loop {
            let choice = self.random.next_below(10);
            if choice == 0 {
                match client.try_call((Self::FLUSH, 0), 0, 0, &[]) {
                    Ok(0) => {}
                    failed => return failed.ok(),
                }
                self.flushes += 1;
                self.units.iter_mut().for_each(|unit| drop(unit.drain(..unit.len() - 1)));
                continue;
            }
            let count = 1 + self.random.next_below(MAX_WRITE_UNITS);
            let at = self.random.next_below(WRITER_UNITS - count);
            let (is_zeros, fua) = (choice == 1, u16::from(choice == 2));
            self.writes += 1;
            let number = if is_zeros { 0 } else { self.writes };
            let written = at as usize..(at + count) as usize;
            // From here on the units may have it, answered or not.
            self.units[written.clone()].iter_mut().for_each(|unit| unit.push(number));
            let (offset, len) =
                ((self.first_unit + at) * self.unit_bytes as u64, count as usize * self.unit_bytes);
            let payload = self.contents(number).repeat(count as usize);
            let answer = match is_zeros {
                true => client.try_call((Self::WRITE_ZEROES, fua), offset, len, &[]),
                false => client.try_call((Self::WRITE, fua), offset, len, &payload),
            };
            match answer {
                Ok(0) => {}
                failed => return failed.ok(),
            }
            if fua == Self::FUA {
                self.flushes += 1;
                self.units[written].iter_mut().for_each(|unit| *unit = vec![number]);
            }
        }
    }

    /// Compares the units with what they may have. What they have is durable from then on.
    pub fn check(&mut self, client: &mut SimpleClient, what: &str) {
        let offset = self.first_unit * self.unit_bytes as u64;
        let bytes = client.read(offset, WRITER_UNITS as usize * self.unit_bytes);
        for (nth, found) in bytes.chunks(self.unit_bytes).enumerate() {
            let number = u64::from_le_bytes(found[..8].try_into().unwrap());
            let allowed = &self.units[nth];
            assert!(found == self.contents(number), "{what}: unit {nth} is torn");
            assert!(allowed.contains(&number), "{what}: unit {nth} has {number} of {allowed:?}");
            self.units[nth] = vec![number];
        }
    }
}

/// A mounted directory of nbdfuse, with the disk as a file.
pub struct NbdFuse(PathBuf, Child);

impl NbdFuse {
    pub fn mount(at: PathBuf, uri: &str) -> Self {
        let child = Command::new("nbdfuse").args([text(&at), uri]).spawn().unwrap();
        let mount = Self(at, child);
        wait_until("nbdfuse mounts", || mount.file().exists());
        mount
    }

    pub fn file(&self) -> PathBuf {
        self.0.join("nbd")
    }
}

impl Drop for NbdFuse {
    fn drop(&mut self) {
        let _ = Command::new("fusermount3").args(["-u", "-z", text(&self.0)]).status();
        let _ = self.1.kill();
        let _ = self.1.wait();
    }
}
