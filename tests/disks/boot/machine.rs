//! A virtual machine: QEMU, a kernel that `tools/kernel` found, and an initramfs that loads the
//! drivers of the disk, mounts it, and starts its `/sbin/init`.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use crate::common::{Draconis, has_tool, report_skipped};

const QEMU_PROGRAM: &str = "qemu-system-x86_64";
/// Requirements for starting machines.
pub(crate) struct MachineRequirements {
    kernel: PathBuf,
    /// The initramfs.
    first: Vec<u8>,
    /// A static busybox.
    pub busybox: Vec<u8>,
    /// Names of the busybox applets.
    pub applets: Vec<String>,
}

impl MachineRequirements {
    /// Finds the requirements; reports the test as skipped if one is missing.
    pub(crate) fn find_requirements(test: &str) -> Option<Self> {
        if !cfg!(target_arch = "x86_64") {
            report_skipped(format_args!("{test} needs an x86-64 machine"));
            return None;
        }
        if !has_tool(test, QEMU_PROGRAM) || !has_tool(test, "busybox") {
            return None;
        }
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        let cache = cache.join("draconis/kernel");
        let kernel = cache.join("vmlinuz");
        let Ok(modules) = std::fs::read_dir(cache.join("modules")).map(|found| {
            let mut found: Vec<PathBuf> = found.map(|entry| entry.unwrap().path()).collect();
            found.sort();
            found
        }) else {
            report_skipped(format_args!("{test} needs a kernel, which tools/kernel downloads"));
            return None;
        };
        let place =
            run_and_capture(Command::new("sh").args(["-c", "realpath $(command -v busybox)"]));
        let busybox = std::fs::read(place.trim()).unwrap();
        if has_interpreter(&busybox) {
            report_skipped(format_args!("{test} needs a static busybox (busybox-static)"));
            return None;
        }
        let applets = run_and_capture(Command::new("busybox").arg("--list"));
        let applets = applets.lines().map(str::to_owned).collect();
        let first = build_initramfs(&busybox, &modules);
        Some(Self { kernel, first, busybox, applets })
    }

    /// Starts a machine with a disk.
    pub(crate) fn boot(&self, draconis: &Draconis, disk: &DiskOption) -> RunningGuest {
        let first = draconis.path("first.cpio");
        std::fs::write(&first, &self.first).unwrap();
        let mut qemu = Command::new(QEMU_PROGRAM);
        qemu.args(["-accel", qemu_accelerator(), "-cpu", "qemu64", "-m", "192"]);
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        qemu.args(["-serial", "stdio", "-kernel"]).arg(&self.kernel).arg("-initrd").arg(&first);
        // On a busy machine the timer of an emulated guest can miss the check of its kernel.
        let line = "console=ttyS0 quiet panic=-1 no_timer_check ROOT_DEVICE";
        qemu.args(["-append", &format!("{line}={} ROOT_TYPE={}", disk.root, disk.kind)]);
        let file = disk.path.display();
        match disk.door {
            DiskDoor::VhostUser => {
                // Two processors have a queue each.
                qemu.args(["-M", "q35,memory-backend=memory", "-smp", "2"]);
                qemu.args(["-object", "memory-backend-memfd,id=memory,size=192M,share=on"]);
                qemu.args(["-chardev", &format!("socket,id=disk,path={file},reconnect=1")]);
                qemu.args(["-device", "vhost-user-blk-pci,chardev=disk"]);
            }
            DiskDoor::Nbd | DiskDoor::NbdWithoutCache => {
                let server = format!("server.type=unix,server.path={file},reconnect-delay=60");
                let node = format!("driver=nbd,node-name=disk,{server},discard=unmap");
                qemu.args(["-M", "q35", "-blockdev", &node]);
                let cache = if disk.door == DiskDoor::Nbd { "on" } else { "off" };
                qemu.args(["-device", &format!("virtio-blk-pci,drive=disk,write-cache={cache}")]);
            }
            DiskDoor::File(format) => {
                let drive = format!("file={file},format={format},if=virtio,cache=unsafe");
                qemu.args(["-M", "q35", "-drive", &drive]);
            }
        }
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = qemu.spawn().unwrap();
        let (send, lines) = mpsc::channel();
        let (output, errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let from = |source: Box<dyn std::io::Read + Send>| {
            let send = send.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                    if send.send(line).is_err() {
                        return;
                    }
                }
            });
        };
        from(Box::new(output));
        from(Box::new(errors));
        RunningGuest { child, lines, said: String::new() }
    }
}

/// How QEMU gets to a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DiskDoor {
    /// A file in this format.
    File(&'static str),
    /// The Unix socket of an NBD server, which QEMU waits for when it is gone.
    Nbd,
    /// The same; each write is durable when it is answered.
    NbdWithoutCache,
    VhostUser,
}

/// Disk of a guest's root file system.
pub(crate) struct DiskOption {
    path: PathBuf,
    root: &'static str,
    kind: &'static str,
    door: DiskDoor,
}

impl DiskOption {
    pub(crate) fn raw_disk(path: &Path, kind: &'static str) -> Self {
        Self::behind(DiskDoor::File("raw"), path, kind)
    }

    pub(crate) fn behind(door: DiskDoor, path: &Path, kind: &'static str) -> Self {
        Self { path: path.to_owned(), root: "/dev/vda", kind, door }
    }

    /// A disk behind a vhost-user socket.
    pub(crate) fn vhost_user(socket: &Path, kind: &'static str) -> Self {
        Self::behind(DiskDoor::VhostUser, socket, kind)
    }

    pub(crate) fn partition_of_qcow2(path: &Path, kind: &'static str) -> Self {
        Self { root: "/dev/vda1", ..Self::behind(DiskDoor::File("qcow2"), path, kind) }
    }
}

/// A running machine, killed on drop.
pub(crate) struct RunningGuest {
    child: Child,
    lines: Receiver<String>,
    said: String,
}

impl RunningGuest {
    /// Waits until the guest reports success and powers itself off; returns all its output.
    pub(crate) fn wait_for_power_off(mut self) -> String {
        self.wait_for_word("DONE");
        self.drain_output();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.said);
        std::mem::take(&mut self.said)
    }

    /// Cuts the power once the guest has printed a word.
    pub(crate) fn cut_power_after_word(mut self, word: &str) {
        self.wait_for_word(word);
    }

    /// Returns true once the guest prints a line that starts with `word`; false after `time`.
    pub(crate) fn says_within(&mut self, word: &str, time: Duration) -> bool {
        draconis_testkit::wait::pause("the guest works", time);
        loop {
            match self.lines.try_recv() {
                Ok(line) => {
                    writeln!(self.said, "{line}").unwrap();
                    if line.starts_with(word) {
                        return true;
                    }
                }
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => {
                    panic!("the guest ended without {word}:\n{}", self.said)
                }
            }
        }
    }

    /// Returns true once the machine has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Returns all output so far.
    pub(crate) fn output(&self) -> &str {
        &self.said
    }

    pub(crate) fn wait_for_word(&mut self, word: &str) {
        while let Some(line) = self.next_line() {
            if line == word {
                return;
            }
        }
        panic!("the guest ended without {word}:\n{}", self.said);
    }

    fn drain_output(&mut self) {
        while self.next_line().is_some() {}
    }

    fn next_line(&mut self) -> Option<String> {
        match draconis_testkit::wait::receive(&self.lines) {
            Ok(line) => {
                writeln!(self.said, "{line}").unwrap();
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the guest hangs:\n{}", self.said),
        }
    }
}

impl Drop for RunningGuest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the accelerator. A hypervisor may have a /dev/kvm that supports only special kernels;
/// the CPU flags then do not include virtualisation.
fn qemu_accelerator() -> &'static str {
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let tells = processor.split_whitespace().any(|word| word == "vmx" || word == "svm");
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    if tells && kvm.is_ok() { "kvm" } else { "tcg" }
}

/// Script that loads all drivers in any order, mounts the root and switches to it.
const INITRAMFS_SCRIPT: &str = r#"#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs devices /dev
for round in 1 2 3 4 5; do
    for module in /modules/*; do $b insmod $module 2>/dev/null; done
done
for round in 1 2 3 4 5 6 7 8 9 10; do
    [ -b $ROOT_DEVICE ] || $b sleep 1
done
$b mount -t $ROOT_TYPE $ROOT_DEVICE /root || { echo "no root"; $b poweroff -f; }
$b mount --move /dev /root/dev
exec $b switch_root /root /sbin/init
"#;

/// Creates the initramfs.
fn build_initramfs(busybox: &[u8], modules: &[PathBuf]) -> Vec<u8> {
    let mut archive = vec![];
    for dir in ["bin", "dev", "modules", "root"] {
        add_cpio_entry(&mut archive, dir, 0o40_755, &[]);
    }
    add_cpio_entry(&mut archive, "bin/busybox", 0o100_755, busybox);
    add_cpio_entry(&mut archive, "init", 0o100_755, INITRAMFS_SCRIPT.as_bytes());
    for module in modules {
        let name = module.file_name().unwrap().to_str().unwrap();
        add_cpio_entry(
            &mut archive,
            &format!("modules/{name}"),
            0o100_644,
            &std::fs::read(module).unwrap(),
        );
    }
    add_cpio_entry(&mut archive, "TRAILER!!!", 0, &[]);
    archive
}

/// Adds an entry in cpio's format `newc`.
fn add_cpio_entry(archive: &mut Vec<u8>, name: &str, mode: usize, bytes: &[u8]) {
    let inode = archive.len() + 1;
    let fields = [inode, mode, 0, 0, 1, 0, bytes.len(), 0, 0, 0, 0, name.len() + 1, 0];
    let mut header = String::from("070701");
    for field in fields {
        write!(header, "{field:08x}").unwrap();
    }
    let pad = |archive: &mut Vec<u8>| archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(header.as_bytes());
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend_from_slice(bytes);
    pad(archive);
}

/// Returns true if an ELF program has an interpreter, so is not static.
fn has_interpreter(program: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = program.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    let headers = || {
        let (at, len, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        Some((0..count).map(move |nth| (at + nth * len) as usize))
    };
    headers().is_none_or(|mut at| at.any(|at| number(at, 4) == Some(PT_INTERP.into())))
}

fn run_and_capture(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
