//! A root file system as an archive, its `/sbin/init`, and the facts to compare.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::boot::machine::MachineRequirements;
use crate::common::Draconis;
use crate::common::volume::run_ok;

/// Offset of the only partition of [`make_partitioned_qcow2`].
pub(crate) const PARTITION_OFFSET: usize = 1 << 20;

/// Script of the guest: says that it has started, reports `/given`, creates and reports `/made`, syncs, and shuts down with
/// its root remounted read-only.
const INIT_SCRIPT: &str = r#"#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
echo STARTED
facts() { xargs stat -c "%n|%F|%a|%h|%u|%g"; }
find /given | facts > /report/given
cat /given/letter > /report/letter 2>/dev/null
su ann -c 'cat /given/own; cat /given/secret 2>/dev/null || echo denied' > /report/denied

mkdir -p /made/deep/er
cd /made
for n in $(seq 300); do echo "file $n" > deep/er/$n; done
dd if=/dev/urandom of=big bs=64k count=64 2>/dev/null
dd if=/dev/urandom of=sparse bs=1k count=3 seek=9000 2>/dev/null
truncate -s 100000 cut
dd if=big of=cut bs=1000 count=70 conv=notrunc 2>/dev/null
truncate -s 33333 cut
ln deep/er/7 deep/er/8 .
ln -s deep/er/8 soft
ln -s "$(printf '%0200d' 7)" long
mknod null c 1 3
mkfifo fifo
mv deep/er/9 moved
mv deep moved-too
rm moved-too/er/1?
mkdir gone; touch gone/x; rm -r gone
chown 70000:123456 big
chmod 4711 big
chmod 1777 moved-too
find /made/* | facts > /report/made
cd /
find made -type f | xargs md5sum > /report/sums
sync
echo SYNCED
mount -o remount,ro / && echo DONE
poweroff -f
"#;

/// Script of a guest that verifies what it reads, and looks for errors that its kernel has seen.
const VERIFIER_SCRIPT: &str = r#"#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
echo VERIFYING
if verifier /data SECONDS; then
    dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|JBD2: .*error|timed out|blocked for more' \
        && echo "WRONG: the kernel has seen errors"
    md5sum /data > /report/sum
    mount -o remount,ro / && echo DONE
fi
poweroff -f
"#;

/// A name in `/given`: name, type, mode, links, owner.
type ExpectedEntry = (&'static str, &'static str, u32, u64, (u64, u64));

/// Contents of `/given`.
const EXPECTED_ENTRIES: &[ExpectedEntry] = &[
    ("", "directory", 0o755, 3, (0, 0)),
    ("/dir", "directory", 0o2775, 2, (7, 70_000)),
    ("/dir/file", "regular file", 0o640, 2, (1_000_000, 1000)),
    ("/null", "character special file", 0o666, 1, (0, 0)),
    ("/own", "regular file", 0o400, 1, (1000, 1000)),
    ("/secret", "regular file", 0o600, 1, (0, 0)),
    ("/soft", "symbolic link", 0o777, 1, (0, 0)),
    ("/su", "regular file", 0o4755, 1, (0, 0)),
    ("/twin", "regular file", 0o640, 2, (1_000_000, 1000)),
];

/// A root file system.
pub(crate) struct RootArchive {
    tar: tar::Builder<Vec<u8>>,
}

impl RootArchive {
    pub(crate) fn new(machine: &MachineRequirements) -> Self {
        let mut root = Self { tar: tar::Builder::new(vec![]) };
        for dir in ["bin", "dev", "proc", "sbin", "report", "etc"] {
            root.add_entry(dir, tar::EntryType::Directory, 0o755, (0, 0), b"");
        }
        root.add_entry("bin/busybox", tar::EntryType::Regular, 0o4755, (0, 0), &machine.busybox);
        for applet in machine.applets.iter().filter(|applet| *applet != "busybox") {
            root.add_link(&format!("bin/{applet}"), tar::EntryType::Symlink, "busybox");
        }
        root.add_entry("sbin/init", tar::EntryType::Regular, 0o755, (0, 0), INIT_SCRIPT.as_bytes());
        let users = b"root:x:0:0::/:/bin/sh\nann:x:1000:1000::/:/bin/sh\n";
        root.add_entry("etc/passwd", tar::EntryType::Regular, 0o644, (0, 0), users);
        for &(name, kind, mode, _, owner) in EXPECTED_ENTRIES {
            let path = format!("given{name}");
            let bytes = format!("{}\n", name.trim_start_matches('/'));
            match (name, kind) {
                ("/twin", _) => root.add_link(&path, tar::EntryType::Link, "given/dir/file"),
                (_, "directory") => {
                    root.add_entry(&path, tar::EntryType::Directory, mode, owner, b"")
                }
                (_, "symbolic link") => root.add_link(&path, tar::EntryType::Symlink, "dir/file"),
                (_, "character special file") => {
                    root.add_entry(&path, tar::EntryType::Char, mode, owner, b"");
                }
                _ => root.add_entry(&path, tar::EntryType::Regular, mode, owner, bytes.as_bytes()),
            }
        }
        root
    }

    /// Replaces the guest's script by one that runs the verifier, which is added.
    pub(crate) fn with_verifier(mut self, verifier: &[u8], seconds: u64) -> Self {
        self.add_entry("bin/verifier", tar::EntryType::Regular, 0o755, (0, 0), verifier);
        let script = VERIFIER_SCRIPT.replace("SECONDS", &seconds.to_string());
        self.add_entry("sbin/init", tar::EntryType::Regular, 0o755, (0, 0), script.as_bytes());
        self
    }

    /// Writes it to a file; returns the argument for `--from`.
    pub(crate) fn write(self, into: &Path) -> String {
        std::fs::write(into, self.tar.into_inner().unwrap()).unwrap();
        into.to_str().unwrap().to_owned()
    }

    fn add_entry(
        &mut self,
        path: &str,
        kind: tar::EntryType,
        mode: u32,
        owner: (u64, u64),
        bytes: &[u8],
    ) {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner.0);
        header.set_gid(owner.1);
        header.set_size(bytes.len() as u64);
        header.set_mtime(1_000_000_000);
        if kind == tar::EntryType::Char {
            header.set_device_major(1).unwrap();
            header.set_device_minor(3).unwrap();
        }
        self.tar.append_data(&mut header, path, bytes).unwrap();
    }

    fn add_link(&mut self, path: &str, kind: tar::EntryType, target: &str) {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(0o777);
        header.set_size(0);
        self.tar.append_link(&mut header, path, target).unwrap();
    }
}

/// Facts of each name: path, type, mode, links, owner and group.
pub(crate) struct EntryFacts(pub(crate) BTreeSet<(String, String, u32, u64, u64, u64)>);

impl EntryFacts {
    pub(crate) fn expected() -> Self {
        let facts = EXPECTED_ENTRIES.iter().map(|&(name, kind, mode, links, (uid, gid))| {
            (format!("/given{name}"), kind.to_owned(), mode, links, uid, gid)
        });
        Self(facts.collect())
    }

    /// Parses the output of `stat` in the guest.
    pub(crate) fn parse_guest_report(report: &str) -> Self {
        let facts = report.lines().map(|line| {
            let [path, kind, mode, links, uid, gid] =
                line.split('|').collect::<Vec<_>>().try_into().expect(line);
            let number = |text: &str| text.parse().expect(line);
            let mode = u32::from_str_radix(mode, 8).expect(line);
            let kind = kind.replace("regular empty file", "regular file");
            (path.to_owned(), kind, mode, number(links), number(uid), number(gid))
        });
        Self(facts.collect())
    }

    /// Asserts that both are equal; prints the first differences.
    pub(crate) fn assert_same(&self, other: &Self) {
        let differ: Vec<_> = self.0.symmetric_difference(&other.0).take(10).collect();
        assert!(differ.is_empty(), "{differ:#?}");
    }

    /// Parses the output of `draconis ls --json`, which omits the listed directory.
    pub(crate) fn parse_ls_json(json: &str) -> Self {
        let list: Vec<serde_json::Value> = serde_json::from_str(json).unwrap();
        let facts = list.iter().map(|one| {
            let text = |name: &str| one[name].as_str().unwrap().to_owned();
            let number = |name: &str| one[name].as_u64().unwrap();
            let mode = u32::from_str_radix(&text("mode"), 8).unwrap();
            (text("path"), text("kind"), mode, number("links"), number("uid"), number("gid"))
        });
        Self(facts.collect())
    }
}

/// Creates a qcow2 disk with one partition that contains `volume`.
pub(crate) fn make_partitioned_qcow2(draconis: &Draconis, volume: &Path, disk: &Path) {
    use std::io::Write as _;
    let bytes = std::fs::read(volume).unwrap();
    let raw = draconis.path("disk.raw");
    let file = std::fs::File::create(&raw).unwrap();
    file.set_len((2 << 20) + bytes.len() as u64).unwrap();
    let mut sfdisk = Command::new("sfdisk");
    let mut child = sfdisk.args(["-q"]).arg(&raw).stdin(Stdio::piped()).spawn().unwrap();
    let sectors = bytes.len() / 512;
    writeln!(child.stdin.take().unwrap(), "label: gpt\nstart=2048, size={sectors}").unwrap();
    assert!(child.wait().unwrap().success());
    file.write_all_at(&bytes, PARTITION_OFFSET as u64).unwrap();
    run_ok(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).arg(&raw).arg(disk));
}
