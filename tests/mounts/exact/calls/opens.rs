//! Ways to open a file, each with a read and a write afterwards.

use super::{CallGroup, CallTable};
use crate::exact::sys;

pub fn add_open_calls(table: &mut CallTable) {
    let accesses = [("read", libc::O_RDONLY), ("write", libc::O_WRONLY), ("both", libc::O_RDWR)];
    let flags = [
        ("", 0),
        (" trunc", libc::O_TRUNC),
        (" append", libc::O_APPEND),
        (" append trunc", libc::O_APPEND | libc::O_TRUNC),
        (" creat", libc::O_CREAT),
        (" creat excl", libc::O_CREAT | libc::O_EXCL),
        (" creat trunc", libc::O_CREAT | libc::O_TRUNC),
        (" creat append nofollow", libc::O_CREAT | libc::O_APPEND | libc::O_NOFOLLOW),
        (" noatime", libc::O_NOATIME),
        (" direct", libc::O_DIRECT),
        (" directory", libc::O_DIRECTORY),
        (" nofollow", libc::O_NOFOLLOW),
        (" path", libc::O_PATH),
        (" sync", libc::O_SYNC),
        (" tmpfile", libc::O_TMPFILE),
        (" tmpfile excl", libc::O_TMPFILE | libc::O_EXCL),
    ];
    for (access_name, access) in accesses {
        for (flags_name, flags) in flags {
            table.add_call(
                CallGroup::Open,
                format!("open {access_name}{flags_name}"),
                move |acts| {
                    let (t, how) = (acts.t.clone(), access | flags | libc::O_NONBLOCK);
                    let Some(fd) = acts.open("open", || sys::open(&t, how, 0o6751)) else { return };
                    let mut buffer = [0; 100];
                    let _ = acts.run_call("read", || sys::read(&fd, &mut buffer));
                    let _ = acts.run_call("write", || sys::write(&fd, b"stored"));
                    if flags & libc::O_TMPFILE == libc::O_TMPFILE {
                        let n = acts.n.clone();
                        let to = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
                        let _ = acts.run_call("link", || {
                            sys::link(to.as_ref(), &n, libc::AT_SYMLINK_FOLLOW)
                        });
                    }
                    acts.held.push(fd);
                },
            );
        }
    }
    for mode in [0o666, 0o4711] {
        table.add_call(CallGroup::Open, format!("creat n {mode:o}"), move |acts| {
            // A random walk may have made it a FIFO.
            let how = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC | libc::O_NONBLOCK;
            let n = acts.n.clone();
            let Some(fd) = acts.open("creat", || sys::open(&n, how, mode)) else { return };
            let _ = acts.run_call("write", || sys::write(&fd, b"made"));
            acts.held.push(fd);
        });
    }
}
