//! Calls on an open file.

use super::{CallContext, CallTable};
use crate::exact::case::{
    ACCESS_ACL, APPEND_FL, IMMUTABLE_FL, NOATIME_FL, NODUMP_FL, SYNC_FL, acl_with_extra_user,
};
use crate::exact::look::{self, format_bytes, format_result};
use crate::exact::sys::{self, MemoryMapping};
use crate::exact::who::{FOREIGN_GID, OTHER_UID, OWNER_GID};

const TIME_NOW: (i64, i64) = (0, libc::UTIME_NOW);
const TIME_OMIT: (i64, i64) = (0, libc::UTIME_OMIT);
const KEEP_OWNER: u32 = u32::MAX;

pub fn add_descriptor_calls(table: &mut CallTable) {
    let (read, write, both) = (libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR);
    for (name, at, len) in [("start", 0, 100), ("all", 0, 200_000), ("end", 9_990, 100)] {
        table.add_descriptor_call(format!("pread {name}"), read, move |acts, fd| {
            let mut buffer = vec![0; len];
            let answer = acts.who.run_as_user(|| sys::pread(fd, &mut buffer, at));
            acts.record_answer(
                "pread",
                format_result(&answer, |&len| format_bytes(&buffer[..len as usize])),
            );
        });
    }
    for (name, at, len) in [
        ("start", 0, 5),
        ("page", 4096, 4096),
        ("across the end", 9_000, 3000),
        ("behind the end", 30_000, 10),
        ("in a hole", 20_000, 5000),
        ("nothing", 3, 0),
    ] {
        table.add_descriptor_call(format!("pwrite {name}"), write, move |acts, fd| {
            let _ = acts.run_call("pwrite", || sys::pwrite(fd, &vec![b'w'; len], at));
        });
    }
    table.add_descriptor_call("append", write | libc::O_APPEND, |acts, fd| {
        let _ = acts.run_call("write", || sys::write(fd, b"appended"));
    });
    table.add_descriptor_call("pwritev2", write, |acts, fd| {
        let _ = acts.run_call("pwritev", || sys::pwritev2(fd, [b"one", b"another"], 7, 0));
        for (name, flag) in
            [("append", libc::RWF_APPEND), ("dsync", libc::RWF_DSYNC), ("nowait", libc::RWF_NOWAIT)]
        {
            let _ = acts.run_call(name, || sys::pwritev2(fd, [b"x", b"yz"], 0, flag));
        }
    });
    table.add_descriptor_call("direct pwrite", write | libc::O_DIRECT, |acts, fd| {
        let memory = vec![b'd'; 3 * 4096];
        let skip = memory.as_ptr().align_offset(4096);
        let bytes = &memory[skip..skip + 4096];
        let _ = acts.run_call("aligned", || sys::pwrite(fd, bytes, 4096));
        let _ = acts.run_call("behind the end", || sys::pwrite(fd, bytes, 16_384));
    });
    for (name, at) in [("start", 10), ("second page", 5000)] {
        table.add_descriptor_call(format!("mapped store {name}"), both, move |acts, fd| {
            store_through_mapping(acts, fd, at);
        });
    }
    for len in [0, 5, 5000, 10_000, 20_000] {
        table.add_descriptor_call(format!("ftruncate {len}"), write, move |acts, fd| {
            let _ = acts.run_call("ftruncate", || sys::ftruncate(fd, len));
        });
    }
    for (name, mode) in [
        ("plain", 0),
        ("keep", libc::FALLOC_FL_KEEP_SIZE),
        ("punch", libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
        ("zero", libc::FALLOC_FL_ZERO_RANGE),
        ("zero keep", libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
        ("collapse", libc::FALLOC_FL_COLLAPSE_RANGE),
        ("insert", libc::FALLOC_FL_INSERT_RANGE),
        ("unshare", libc::FALLOC_FL_UNSHARE_RANGE),
    ] {
        for (at, len) in [(0, 4096), (100, 5000), (8192, 40_000)] {
            table.add_descriptor_call(
                format!("fallocate {name} {at}+{len}"),
                write,
                move |acts, fd| {
                    let _ = acts.run_call("fallocate", || sys::fallocate(fd, mode, at, len));
                },
            );
        }
    }
    type CopyCall = fn(&std::os::fd::OwnedFd, &std::os::fd::OwnedFd, usize) -> sys::SyscallResult;
    let copies: [(&str, CopyCall); 2] =
        [("copy_file_range", sys::copy_file_range), ("sendfile", sys::sendfile)];
    for (name, copy) in copies {
        table.add_descriptor_call(format!("{name} into it"), write, move |acts, fd| {
            if let Ok(from) = sys::open(&acts.o, libc::O_RDONLY, 0) {
                let _ = acts.run_call("copy", || copy(&from, fd, 2000));
            }
        });
        table.add_descriptor_call(format!("{name} from it"), read, move |acts, fd| {
            if let Ok(to) = sys::open(&acts.o, libc::O_WRONLY, 0) {
                let _ = acts.run_call("copy", || copy(fd, &to, 2000));
            }
        });
    }
    table.add_descriptor_call("splice into it", write, |acts, fd| {
        let [from, to] = sys::pipe();
        sys::write(&to, b"by a pipe").unwrap();
        let _ = acts.run_call("splice", || sys::splice(&from, fd, 9));
    });
    table.add_descriptor_call("splice from it", read, |acts, fd| {
        let [from, to] = sys::pipe();
        let _ = acts.run_call("splice", || sys::splice(fd, &to, 1000));
        let mut buffer = [0; 1000];
        let answer = sys::read(&from, &mut buffer);
        acts.record_answer(
            "arrived",
            format_result(&answer, |&len| format_bytes(&buffer[..len as usize])),
        );
    });
    table.add_descriptor_call("lseek", read, |acts, fd| {
        for (name, whence) in [("data", libc::SEEK_DATA), ("hole", libc::SEEK_HOLE)] {
            for at in [0, 5000, 30_000, 61_000, 99_999, 100_000] {
                let _ = acts.run_call(name, || sys::seek(fd, at, whence));
            }
        }
        let _ = acts.run_call("end", || sys::seek(fd, -1, libc::SEEK_END));
        let _ = acts.run_call("before the start", || sys::seek(fd, -1, libc::SEEK_SET));
    });
    for (name, number) in [
        ("fsync", libc::SYS_fsync),
        ("fdatasync", libc::SYS_fdatasync),
        ("syncfs", libc::SYS_syncfs),
    ] {
        table.add_descriptor_call(name, read, move |acts, fd| {
            let _ = acts.run_call(name, || sys::sync_by_number(number, fd));
        });
    }
    table.add_descriptor_call("locks", both, |acts, fd| {
        let _ = acts.run_call("flock", || sys::flock(fd, libc::LOCK_EX | libc::LOCK_NB));
        if let Ok(other) = sys::open(&acts.t, libc::O_RDONLY | libc::O_NONBLOCK, 0) {
            let _ =
                acts.run_call("flock again", || sys::flock(&other, libc::LOCK_SH | libc::LOCK_NB));
        }
        let _ = acts.run_call("lock", || sys::set_lock(fd, libc::F_SETLK, libc::F_WRLCK));
        let _ = acts.run_call("own lock", || sys::set_lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK));
        let _ = acts.run_call("unlock", || sys::set_lock(fd, libc::F_SETLK, libc::F_UNLCK));
    });
    for mode in [0o640, 0o6755] {
        table.add_descriptor_call(format!("fchmod {mode:o}"), read, move |acts, fd| {
            let _ = acts.run_call("fchmod", || sys::fchmod(fd, mode));
        });
    }
    for (name, owner, group) in [
        ("-1:-1", KEEP_OWNER, KEEP_OWNER),
        ("other", OTHER_UID, KEEP_OWNER),
        ("foreign", KEEP_OWNER, FOREIGN_GID),
        ("group", KEEP_OWNER, OWNER_GID),
    ] {
        table.add_descriptor_call(format!("fchown to {name}"), read, move |acts, fd| {
            let _ = acts.run_call("fchown", || sys::fchown(fd, owner, group));
        });
    }
    for (name, times) in [
        ("now", [TIME_NOW, TIME_NOW]),
        ("given", [(77, 88), (99, 11)]),
        ("one", [TIME_OMIT, TIME_NOW]),
    ] {
        table.add_descriptor_call(format!("futimens {name}"), read, move |acts, fd| {
            let _ = acts.run_call("futimens", || sys::futimens(fd, times));
        });
    }
    table.add_descriptor_call("fsetxattr", read, |acts, fd| {
        let _ = acts.run_call("user", || sys::fsetxattr(fd, "user.set", b"here", 0));
        let _ =
            acts.run_call("list", || sys::fsetxattr(fd, ACCESS_ACL, &acl_with_extra_user(7), 0));
    });
    add_inode_flag_calls(table);
    table.add_descriptor_call("names", read, |acts, fd| {
        let answer = acts.who.run_as_user(|| sys::list_names(fd));
        acts.record_answer("names", format_result(&answer, |names| names.join(" ")));
    });
    table.add_descriptor_call("names noatime", read | libc::O_NOATIME, |acts, fd| {
        let answer = acts.who.run_as_user(|| sys::list_names(fd));
        acts.record_answer("names", format_result(&answer, |names| names.len().to_string()));
    });
    table.add_descriptor_call("pread noatime", read | libc::O_NOATIME, |acts, fd| {
        acts.run_call_returning_bytes("read", || look::read_all(fd));
    });
    table.add_descriptor_call("linkat of a descriptor", read, |acts, fd| {
        let n = acts.n.clone();
        let _ = acts.run_call("link", || sys::link_fd(fd, &n));
    });
}

fn add_inode_flag_calls(table: &mut CallTable) {
    let read = libc::O_RDONLY;
    for (name, on, off) in [
        ("immutable", IMMUTABLE_FL, 0),
        ("append", APPEND_FL, 0),
        ("nodump", NODUMP_FL, 0),
        ("noatime", NOATIME_FL, 0),
        ("sync", SYNC_FL, 0),
        ("none", 0, !0),
        ("unchanged", 0, 0),
        ("reserved", 0x0800_0000, 0),
    ] {
        table.add_descriptor_call(format!("SETFLAGS {name}"), read, move |acts, fd| {
            let now = sys::get_inode_flags(fd);
            acts.record_answer("GETFLAGS", format_result(&now, |flags| format!("{flags:x}")));
            let flags = (now.unwrap_or(0) & !off) | on;
            let _ = acts.run_call("SETFLAGS", || sys::set_inode_flags(fd, flags));
            let now = sys::get_inode_flags(fd);
            acts.record_answer("GETFLAGS", format_result(&now, |flags| format!("{flags:x}")));
        });
    }
    for (name, flags, project) in
        [("immutable", 8, 0), ("append", 0x10, 0), ("nodump", 0x80, 0), ("project", 0, 7)]
    {
        table.add_descriptor_call(format!("FSSETXATTR {name}"), read, move |acts, fd| {
            let now = acts.who.run_as_user(|| sys::get_fsxattr(fd));
            acts.record_answer("FSGETXATTR", format_result(&now, |value| format!("{value:x?}")));
            let mut value = now.unwrap_or_default();
            value[0] |= flags;
            value[3] = project;
            let _ = acts.run_call("FSSETXATTR", || sys::set_fsxattr(fd, value));
            let now = sys::get_fsxattr(fd);
            acts.record_answer("FSGETXATTR", format_result(&now, |value| format!("{value:x?}")));
        });
    }
    table.add_descriptor_call("GETVERSION", read, |acts, fd| {
        let _ = acts.run_call("GETVERSION", || sys::get_version(fd));
    });
}

/// Stores a few bytes through a mapping, if the file has such a page.
fn store_through_mapping(acts: &mut CallContext, fd: &std::os::fd::OwnedFd, at: usize) {
    let len = sys::fstat(fd).map_or(0, |seen| seen.stx_size as usize);
    if len <= at + 6 {
        return;
    }
    let mapped = acts.who.run_as_user(|| MemoryMapping::new(fd, len, true));
    acts.record_answer("map", format_result(&mapped, |_| "mapped".into()));
    if let Ok(mut mapped) = mapped {
        let _ = acts.run_call("store", || mapped.store_bytes(at, b"mapped"));
        let _ = acts.run_call("sync", || mapped.sync());
    }
}
