//! Calls on an open file.

use super::{CallContext, Table};
use crate::case::{ACCESS_ACL, APPEND, IMMUTABLE, NOATIME, NODUMP, SYNC, access_list};
use crate::look::{self, said, short};
use crate::sys::{self, Mapping};
use crate::who::{FOREIGN, GROUP, OTHER};

const NOW: (i64, i64) = (0, libc::UTIME_NOW);
const OMIT: (i64, i64) = (0, libc::UTIME_OMIT);
const KEEP: u32 = u32::MAX;

pub fn add(table: &mut Table) {
    let (read, write, both) = (libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR);
    for (name, at, len) in [("start", 0, 100), ("all", 0, 200_000), ("end", 9_990, 100)] {
        table.on_descriptor(format!("pread {name}"), read, move |acts, fd| {
            let mut buffer = vec![0; len];
            let answer = acts.who.act(|| sys::pread(fd, &mut buffer, at));
            acts.record_answer("pread", said(&answer, |&len| short(&buffer[..len as usize])));
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
        table.on_descriptor(format!("pwrite {name}"), write, move |acts, fd| {
            let _ = acts.call("pwrite", || sys::pwrite(fd, &vec![b'w'; len], at));
        });
    }
    table.on_descriptor("append", write | libc::O_APPEND, |acts, fd| {
        let _ = acts.call("write", || sys::write(fd, b"appended"));
    });
    table.on_descriptor("pwritev2", write, |acts, fd| {
        let _ = acts.call("pwritev", || sys::pwritev2(fd, [b"one", b"another"], 7, 0));
        for (name, flag) in
            [("append", libc::RWF_APPEND), ("dsync", libc::RWF_DSYNC), ("nowait", libc::RWF_NOWAIT)]
        {
            let _ = acts.call(name, || sys::pwritev2(fd, [b"x", b"yz"], 0, flag));
        }
    });
    table.on_descriptor("direct pwrite", write | libc::O_DIRECT, |acts, fd| {
        let memory = vec![b'd'; 3 * 4096];
        let skip = memory.as_ptr().align_offset(4096);
        let bytes = &memory[skip..skip + 4096];
        let _ = acts.call("aligned", || sys::pwrite(fd, bytes, 4096));
        let _ = acts.call("behind the end", || sys::pwrite(fd, bytes, 16_384));
    });
    for (name, at) in [("start", 10), ("second page", 5000)] {
        table.on_descriptor(format!("mapped store {name}"), both, move |acts, fd| {
            mapped_store(acts, fd, at);
        });
    }
    for len in [0, 5, 5000, 10_000, 20_000] {
        table.on_descriptor(format!("ftruncate {len}"), write, move |acts, fd| {
            let _ = acts.call("ftruncate", || sys::ftruncate(fd, len));
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
            table.on_descriptor(format!("fallocate {name} {at}+{len}"), write, move |acts, fd| {
                let _ = acts.call("fallocate", || sys::fallocate(fd, mode, at, len));
            });
        }
    }
    type Copy = fn(&std::os::fd::OwnedFd, &std::os::fd::OwnedFd, usize) -> sys::Answer;
    let copies: [(&str, Copy); 2] =
        [("copy_file_range", sys::copy_file_range), ("sendfile", sys::sendfile)];
    for (name, copy) in copies {
        table.on_descriptor(format!("{name} into it"), write, move |acts, fd| {
            if let Ok(from) = sys::open(&acts.o, libc::O_RDONLY, 0) {
                let _ = acts.call("copy", || copy(&from, fd, 2000));
            }
        });
        table.on_descriptor(format!("{name} from it"), read, move |acts, fd| {
            if let Ok(to) = sys::open(&acts.o, libc::O_WRONLY, 0) {
                let _ = acts.call("copy", || copy(fd, &to, 2000));
            }
        });
    }
    table.on_descriptor("splice into it", write, |acts, fd| {
        let [from, to] = sys::pipe();
        sys::write(&to, b"by a pipe").unwrap();
        let _ = acts.call("splice", || sys::splice(&from, fd, 9));
    });
    table.on_descriptor("splice from it", read, |acts, fd| {
        let [from, to] = sys::pipe();
        let _ = acts.call("splice", || sys::splice(fd, &to, 1000));
        let mut buffer = [0; 1000];
        let answer = sys::read(&from, &mut buffer);
        acts.record_answer("arrived", said(&answer, |&len| short(&buffer[..len as usize])));
    });
    table.on_descriptor("lseek", read, |acts, fd| {
        for (name, whence) in [("data", libc::SEEK_DATA), ("hole", libc::SEEK_HOLE)] {
            for at in [0, 5000, 30_000, 61_000, 99_999, 100_000] {
                let _ = acts.call(name, || sys::seek(fd, at, whence));
            }
        }
        let _ = acts.call("end", || sys::seek(fd, -1, libc::SEEK_END));
        let _ = acts.call("before the start", || sys::seek(fd, -1, libc::SEEK_SET));
    });
    for (name, number) in [
        ("fsync", libc::SYS_fsync),
        ("fdatasync", libc::SYS_fdatasync),
        ("syncfs", libc::SYS_syncfs),
    ] {
        table.on_descriptor(name, read, move |acts, fd| {
            let _ = acts.call(name, || sys::sync(number, fd));
        });
    }
    table.on_descriptor("locks", both, |acts, fd| {
        let _ = acts.call("flock", || sys::flock(fd, libc::LOCK_EX | libc::LOCK_NB));
        if let Ok(other) = sys::open(&acts.t, libc::O_RDONLY | libc::O_NONBLOCK, 0) {
            let _ = acts.call("flock again", || sys::flock(&other, libc::LOCK_SH | libc::LOCK_NB));
        }
        let _ = acts.call("lock", || sys::lock(fd, libc::F_SETLK, libc::F_WRLCK));
        let _ = acts.call("own lock", || sys::lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK));
        let _ = acts.call("unlock", || sys::lock(fd, libc::F_SETLK, libc::F_UNLCK));
    });
    for mode in [0o640, 0o6755] {
        table.on_descriptor(format!("fchmod {mode:o}"), read, move |acts, fd| {
            let _ = acts.call("fchmod", || sys::fchmod(fd, mode));
        });
    }
    for (name, owner, group) in [
        ("-1:-1", KEEP, KEEP),
        ("other", OTHER, KEEP),
        ("foreign", KEEP, FOREIGN),
        ("group", KEEP, GROUP),
    ] {
        table.on_descriptor(format!("fchown to {name}"), read, move |acts, fd| {
            let _ = acts.call("fchown", || sys::fchown(fd, owner, group));
        });
    }
    for (name, times) in
        [("now", [NOW, NOW]), ("given", [(77, 88), (99, 11)]), ("one", [OMIT, NOW])]
    {
        table.on_descriptor(format!("futimens {name}"), read, move |acts, fd| {
            let _ = acts.call("futimens", || sys::futimens(fd, times));
        });
    }
    table.on_descriptor("fsetxattr", read, |acts, fd| {
        let _ = acts.call("user", || sys::fsetxattr(fd, "user.set", b"here", 0));
        let _ = acts.call("list", || sys::fsetxattr(fd, ACCESS_ACL, &access_list(7), 0));
    });
    add_flags(table);
    table.on_descriptor("names", read, |acts, fd| {
        let answer = acts.who.act(|| sys::names(fd));
        acts.record_answer("names", said(&answer, |names| names.join(" ")));
    });
    table.on_descriptor("names noatime", read | libc::O_NOATIME, |acts, fd| {
        let answer = acts.who.act(|| sys::names(fd));
        acts.record_answer("names", said(&answer, |names| names.len().to_string()));
    });
    table.on_descriptor("pread noatime", read | libc::O_NOATIME, |acts, fd| {
        acts.bytes("read", || look::read_all(fd));
    });
    table.on_descriptor("linkat of a descriptor", read, |acts, fd| {
        let n = acts.n.clone();
        let _ = acts.call("link", || sys::link_fd(fd, &n));
    });
}

fn add_flags(table: &mut Table) {
    let read = libc::O_RDONLY;
    for (name, on, off) in [
        ("immutable", IMMUTABLE, 0),
        ("append", APPEND, 0),
        ("nodump", NODUMP, 0),
        ("noatime", NOATIME, 0),
        ("sync", SYNC, 0),
        ("none", 0, !0),
        ("unchanged", 0, 0),
        ("reserved", 0x0800_0000, 0),
    ] {
        table.on_descriptor(format!("SETFLAGS {name}"), read, move |acts, fd| {
            let now = sys::flags(fd);
            acts.record_answer("GETFLAGS", said(&now, |flags| format!("{flags:x}")));
            let flags = (now.unwrap_or(0) & !off) | on;
            let _ = acts.call("SETFLAGS", || sys::set_flags(fd, flags));
            let now = sys::flags(fd);
            acts.record_answer("GETFLAGS", said(&now, |flags| format!("{flags:x}")));
        });
    }
    for (name, flags, project) in
        [("immutable", 8, 0), ("append", 0x10, 0), ("nodump", 0x80, 0), ("project", 0, 7)]
    {
        table.on_descriptor(format!("FSSETXATTR {name}"), read, move |acts, fd| {
            let now = acts.who.act(|| sys::fsxattr(fd));
            acts.record_answer("FSGETXATTR", said(&now, |value| format!("{value:x?}")));
            let mut value = now.unwrap_or_default();
            value[0] |= flags;
            value[3] = project;
            let _ = acts.call("FSSETXATTR", || sys::set_fsxattr(fd, value));
            let now = sys::fsxattr(fd);
            acts.record_answer("FSGETXATTR", said(&now, |value| format!("{value:x?}")));
        });
    }
    table.on_descriptor("GETVERSION", read, |acts, fd| {
        let _ = acts.call("GETVERSION", || sys::version(fd));
    });
}

/// Stores a few bytes through a mapping, if the file has such a page.
fn mapped_store(acts: &mut CallContext, fd: &std::os::fd::OwnedFd, at: usize) {
    let len = sys::fstat(fd).map_or(0, |seen| seen.stx_size as usize);
    if len <= at + 6 {
        return;
    }
    let mapped = acts.who.act(|| Mapping::new(fd, len, true));
    acts.record_answer("map", said(&mapped, |_| "mapped".into()));
    if let Ok(mut mapped) = mapped {
        let _ = acts.call("store", || mapped.store(at, b"mapped"));
        let _ = acts.call("sync", || mapped.sync());
    }
}
