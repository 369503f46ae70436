//! Tests of the FUSE front end with a tree that is known to be right.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use draconis_front::fuse::{self, Activity, Server, ServerOptions};
use draconis_testkit::wait::wait_until;
use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use super::MemoryTree;

struct TestMount {
    dir: tempfile::TempDir,
    tree: Arc<MemoryTree>,
    server: Option<JoinHandle<()>>,
}

fn mount_memory_tree(write_back: bool) -> Option<TestMount> {
    if !rustix::process::geteuid().is_root() || File::open("/dev/fuse").is_err() {
        draconis_testkit::report_skipped("mounting needs root and /dev/fuse");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let options = fuse::KernelOptions {
        source: "memory".into(),
        device: None,
        subtype: "draconis".into(),
        read_only: false,
        allow_other: true,
        default_permissions: true,
        dev: true,
        suid: true,
        no_exec: false,
        access_times: draconis_types::AccessTimes::Relative,
        sync: false,
        dir_sync: false,
        contexts: vec![],
    };
    let connection = fuse::mount(dir.path(), None, &options).unwrap();
    let tree = Arc::new(MemoryTree::new(true));
    let served = tree.clone();
    let behaviour = ServerOptions { permissions: true, write_back, ..Default::default() };
    let server = std::thread::spawn(move || {
        Server::new(&*served, behaviour).serve(connection, &Activity::default()).unwrap();
    });
    Some(TestMount { dir, tree, server: Some(server) })
}

impl TestMount {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        // A failed test may leave files open: do not wait for them.
        let force = std::thread::panicking();
        // A child of another test may hold our files between its fork and its exec.
        wait_until("the mount is gone", || fuse::unmount(self.dir.path(), force).is_ok());
        if let Some(server) = self.server.take().filter(|_| !force) {
            server.join().unwrap();
        }
    }
}

fn names_come_and_go(m: &TestMount) {
    std::fs::write(m.at("a"), "bytes").unwrap();
    assert!(!m.at("b").exists(), "now the kernel knows that there is none");
    std::fs::hard_link(m.at("a"), m.at("b")).unwrap();
    assert_eq!(std::fs::metadata(m.at("a")).unwrap().nlink(), 2);
    std::fs::remove_file(m.at("a")).unwrap();
    assert_eq!(std::fs::metadata(m.at("b")).unwrap().nlink(), 1);
    std::fs::create_dir(m.at("dir")).unwrap();
    assert_eq!(std::fs::metadata(m.dir.path()).unwrap().nlink(), 3);
    std::fs::rename(m.at("b"), m.at("dir/c")).unwrap();
    assert_eq!(std::fs::read(m.at("dir/c")).unwrap(), b"bytes");
    let busy = std::fs::remove_dir(m.at("dir")).unwrap_err();
    assert_eq!(busy.raw_os_error(), Some(Errno::NOTEMPTY.raw_os_error()));
    symlink("dir/c", m.at("link")).unwrap();
    assert_eq!(std::fs::read_link(m.at("link")).unwrap(), PathBuf::from("dir/c"));
    assert_eq!(std::fs::read(m.at("link")).unwrap(), b"bytes");
    let rename =
        |from: &str, to: &str, how| rustix::fs::renameat_with(CWD, m.at(from), CWD, m.at(to), how);
    assert_eq!(rename("link", "dir/c", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename("link", "dir", RenameFlags::EXCHANGE).unwrap();
    assert!(m.at("link").is_dir() && std::fs::read_link(m.at("dir")).is_ok());
    std::fs::remove_dir_all(m.at("link")).unwrap();
    std::fs::remove_file(m.at("dir")).unwrap();
    assert_eq!(std::fs::read_dir(m.dir.path()).unwrap().count(), 0);
}

fn what_lost_its_name_lives_until_its_last_user_has_gone(m: &TestMount) {
    let mut files: Vec<File> = (0..20)
        .map(|i| {
            let mut file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(m.at(&format!("{i}")))
                .unwrap();
            file.write_all(&[i; 5000]).unwrap();
            file
        })
        .collect();
    // Each listing, lookup and link changes the lookup count.
    for entry in std::fs::read_dir(m.dir.path()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::metadata(&path).unwrap();
        std::fs::hard_link(&path, m.at("other name")).unwrap();
        std::fs::remove_file(m.at("other name")).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
    assert_eq!(m.tree.count(), 21);
    for (i, file) in files.iter_mut().enumerate() {
        file.set_len(4000).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut bytes = vec![];
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, vec![i as u8; 4000]);
        file.sync_all().unwrap();
    }
    drop(files);
    wait_until("removed files are gone", || m.tree.count() <= 1);
}

fn bytes_are_what_was_written_however_it_was(m: &TestMount) {
    let path = m.at("file");
    let pattern: Vec<u8> =
        (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&path, &pattern).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), pattern);
    // Truncation by open sends no request of its own: the kernel must send a SETATTR.
    drop(File::options().write(true).truncate(true).open(&path).unwrap());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    assert_eq!(m.tree.lock().by_number.values().map(|o| o.attributes.size_bytes).min(), Some(0));
    let direct = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(&path)
        .unwrap();
    direct.write_all_at(&pattern[..1 << 20], 4096).unwrap();
    let mut back = vec![0; 1 << 20];
    direct.read_exact_at(&mut back, 4096).unwrap();
    assert_eq!(back, &pattern[..1 << 20]);
    let mut append = File::options().append(true).open(&path).unwrap();
    append.write_all(b"tail").unwrap();
    append.sync_data().unwrap();
    let all = std::fs::read(&path).unwrap();
    assert_eq!(
        (all.len(), &all[..4096], &all[all.len() - 4..]),
        ((1 << 20) + 4100, &[0; 4096][..], &b"tail"[..])
    );
    // A write from a page of one file to a mapping of another involves the kernel alone.
    let copied = std::fs::copy(&path, m.at("copy")).unwrap();
    assert_eq!((copied, std::fs::read(m.at("copy")).unwrap()), (all.len() as u64, all));
}

fn data_is_found_that_the_kernel_has_not_written_back(m: &TestMount) {
    let file = File::create_new(m.at("file")).unwrap();
    file.write_all_at(b"data", 100_000).unwrap();
    // Nothing was written back, so without fetching dirty pages the server sees an empty file.
    let seek = |whence| rustix::fs::seek(&file, whence);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(7)), Ok(7));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(7)), Ok(100_004));
    assert_eq!(seek(rustix::fs::SeekFrom::Data(200_000)), Err(Errno::NXIO));
}

fn attributes_are_set_and_privileges_lost(m: &TestMount) {
    let path = m.at("file");
    let mut file = File::options().write(true).create_new(true).mode(0o666).open(&path).unwrap();
    let look = || std::fs::metadata(&path).unwrap();
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(umask);
    assert_eq!(look().mode(), 0o100_666 & !umask.bits());
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o6755)).unwrap();
    std::os::unix::fs::chown(&path, Some(7), Some(8)).unwrap();
    assert_eq!((look().uid(), look().gid(), look().mode()), (7, 8, 0o100_755));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o4755)).unwrap();
    // Root may keep setuid and setgid; other users may not.
    file.write_all(b"by root").unwrap();
    assert_eq!(look().mode(), 0o104_755);
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o4777)).unwrap();
    std::fs::set_permissions(m.dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let script = format!("echo x >> {}", path.display());
    let wrote = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", &script])
        .status();
    if wrote.is_ok_and(|status| status.success()) {
        assert_eq!(look().mode(), 0o100_777);
    }
    let time = std::time::UNIX_EPOCH + Duration::new(1_234_567_890, 987_654_321);
    file.set_times(std::fs::FileTimes::new().set_modified(time).set_accessed(time)).unwrap();
    assert_eq!((look().modified().unwrap(), look().accessed().unwrap()), (time, time));
    let fifo = m.at("device");
    let kind = rustix::fs::FileType::CharacterDevice;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, &fifo, kind, mode, rustix::fs::makedev(300, 70_000)).unwrap();
    assert_eq!(std::fs::metadata(&fifo).unwrap().rdev(), rustix::fs::makedev(300, 70_000));
}

fn extended_attributes_and_flags(m: &TestMount) {
    let path = m.at("file");
    let file = File::create_new(&path).unwrap();
    let set = |name: &str, value: &[u8], how| rustix::fs::setxattr(&path, name, value, how);
    set("user.a", b"1", XattrFlags::empty()).unwrap();
    assert_eq!(set("user.a", b"2", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.b", b"2", XattrFlags::REPLACE), Err(Errno::NODATA));
    set("user.a", &[9; 60_000], XattrFlags::REPLACE).unwrap();
    let mut value = vec![0; 65536];
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut value[..]), Ok(60_000));
    rustix::fs::removexattr(&path, "user.a").unwrap();
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut value[..]), Err(Errno::NODATA));
    use rustix::fs::IFlags;
    assert_eq!(rustix::fs::ioctl_getflags(&file), Ok(IFlags::empty()));
    rustix::fs::ioctl_setflags(&file, IFlags::NOATIME | IFlags::NODUMP).unwrap();
    assert_eq!(rustix::fs::ioctl_getflags(&file), Ok(IFlags::NOATIME | IFlags::NODUMP));
    let dir = File::open(m.dir.path()).unwrap();
    assert_eq!(rustix::fs::ioctl_getflags(&dir), Ok(IFlags::empty()));
}

fn space_is_reserved_and_given_back(m: &TestMount) {
    let file = File::options().read(true).write(true).create_new(true).open(m.at("f")).unwrap();
    file.write_all_at(&[7; 8192], 0).unwrap();
    let ask = |mode, offset, len| rustix::fs::fallocate(&file, mode, offset, len);
    ask(FallocateFlags::empty(), 0, 20_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 20_000);
    ask(FallocateFlags::KEEP_SIZE, 0, 40_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 20_000);
    ask(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096).unwrap();
    let mut bytes = [1; 8192];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!((&bytes[..4096], &bytes[4096..]), (&[7; 4096][..], &[0; 4096][..]));
    assert_eq!(ask(FallocateFlags::COLLAPSE_RANGE, 0, 4096), Err(Errno::OPNOTSUPP));
}

fn many_wait_while_others_work(m: &TestMount) {
    std::thread::scope(|scope| {
        for i in 0..12 {
            scope.spawn(move || {
                let mut file = File::create_new(m.at(&format!("{i}"))).unwrap();
                for round in 0..50 {
                    file.write_all(&[round; 512]).unwrap();
                    if i % 3 != 0 {
                        file.sync_all().unwrap();
                    }
                    std::fs::metadata(m.at(&format!("{}", (i + 1) % 12))).ok();
                }
            });
        }
    });
    for i in 0..12 {
        assert_eq!(std::fs::metadata(m.at(&format!("{i}"))).unwrap().len(), 25_600);
    }
}

/// Defines each test twice: with and without the write-back cache.
macro_rules! both {
    ($($name:ident)*) => {
        mod write_through {
            $(#[test]
            fn $name() {
                if let Some(m) = super::mount_memory_tree(false) {
                    super::$name(&m);
                }
            })*
        }
        mod write_back {
            $(#[test]
            fn $name() {
                if let Some(m) = super::mount_memory_tree(true) {
                    super::$name(&m);
                }
            })*
        }
    };
}

both! {
    names_come_and_go
    what_lost_its_name_lives_until_its_last_user_has_gone
    bytes_are_what_was_written_however_it_was
    data_is_found_that_the_kernel_has_not_written_back
    attributes_are_set_and_privileges_lost
    extended_attributes_and_flags
    space_is_reserved_and_given_back
    many_wait_while_others_work
}
