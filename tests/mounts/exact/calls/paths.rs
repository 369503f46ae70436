//! Calls on the target of a path.

use super::{CallGroup, CallTable};
use crate::exact::case::{ACCESS_ACL, DEFAULT_ACL, acl_with_extra_user, minimal_acl};
use crate::exact::look::format_result;
use crate::exact::sys;
use crate::exact::who::{FOREIGN_GID, OTHER_UID, OWNER_GID, OWNER_UID};

const TIME_NOW: (i64, i64) = (0, libc::UTIME_NOW);
const TIME_OMIT: (i64, i64) = (0, libc::UTIME_OMIT);
const FIXED_TIME: (i64, i64) = (123_456_789, 987_654_321);
const KEEP_OWNER: u32 = u32::MAX;

pub fn add_path_calls(table: &mut CallTable) {
    let path = CallGroup::Path;
    for len in [0, 5, 10_000, 20_000, -1] {
        table.add_call(path, format!("truncate {len}"), move |acts| {
            let t = acts.t.clone();
            let _ = acts.run_call("truncate", || sys::truncate(&t, len));
        });
    }
    for mode in [0o000, 0o644, 0o664, 0o6755, 0o2777, 0o1777] {
        table.add_call(path, format!("chmod {mode:o}"), move |acts| {
            let t = acts.t.clone();
            let _ = acts.run_call("chmod", || sys::chmod(&t, mode));
        });
    }
    let owners = [
        ("-1:-1", KEEP_OWNER, KEEP_OWNER),
        ("root", 0, 0),
        ("owner:group", OWNER_UID, OWNER_GID),
        ("owner", OWNER_UID, KEEP_OWNER),
        ("group", KEEP_OWNER, OWNER_GID),
        ("foreign group", KEEP_OWNER, FOREIGN_GID),
        ("other", OTHER_UID, KEEP_OWNER),
    ];
    for (name, owner, group) in owners {
        for (how, flags) in [("chown", 0), ("lchown", libc::AT_SYMLINK_NOFOLLOW)] {
            table.add_call(path, format!("{how} {name}"), move |acts| {
                let t = acts.t.clone();
                let _ = acts.run_call(how, || sys::chown(&t, owner, group, flags));
            });
        }
    }
    for (name, times) in [
        ("now", [TIME_NOW, TIME_NOW]),
        ("omitted", [TIME_OMIT, TIME_OMIT]),
        ("given", [FIXED_TIME, (-77, 1)]),
        ("far", [(4_000_000_000, 1), (20_000_000_000, 1)]),
        ("now and omitted", [TIME_NOW, TIME_OMIT]),
        ("omitted and given", [TIME_OMIT, FIXED_TIME]),
        ("given and now", [FIXED_TIME, TIME_NOW]),
    ] {
        for (how, flags) in [("", 0), (" of a link", libc::AT_SYMLINK_NOFOLLOW)] {
            table.add_call(path, format!("utimens {name}{how}"), move |acts| {
                let t = acts.t.clone();
                let _ = acts.run_call("utimens", || sys::utimens(&t, times, flags));
            });
        }
    }
    for (mode_name, mode) in [("f", 0), ("r", 4), ("w", 2), ("x", 1)] {
        for (flags_name, flags) in
            [("", 0), (" effective", libc::AT_EACCESS), (" nofollow", libc::AT_SYMLINK_NOFOLLOW)]
        {
            table.add_call(path, format!("access {mode_name}{flags_name}"), move |acts| {
                let t = acts.t.clone();
                let _ = acts.run_call("access", || sys::access(&t, mode, flags));
            });
        }
    }
    table.add_call(path, "statx", |acts| {
        let t = acts.t.clone();
        let _ = acts.run_call("lstat", || sys::lstat(&t).map(|seen| i64::from(seen.stx_mode)));
        let _ = acts.run_call("stat", || {
            sys::statx(libc::AT_FDCWD, &t, 0).map(|seen| i64::from(seen.stx_mode))
        });
    });
    table.add_call(path, "statfs", |acts| {
        let t = acts.t.clone();
        let answer = acts.who.run_as_user(|| sys::statfs(&t));
        acts.record_answer("kind", format_result(&answer, |seen| format!("{:x}", seen.f_type)));
        acts.record_answer(
            "block",
            format_result(&answer, |seen| format!("{} {}", seen.f_bsize, seen.f_frsize)),
        );
        acts.record_answer("names", format_result(&answer, |seen| seen.f_namelen.to_string()));
        acts.record_answer(
            "space",
            format_result(&answer, |seen| format!("{} {}", seen.f_blocks, seen.f_files)),
        );
    });
    add_xattr_calls(table);
    table.add_call(path, "name_to_handle_at", |acts| {
        let t = acts.t.clone();
        let handle = acts.who.run_as_user(|| sys::name_to_handle(&t));
        acts.record_answer("handle", format_result(&handle, |_| "a handle".into()));
        let mount = sys::open(acts.top, libc::O_RDONLY | libc::O_DIRECTORY, 0).unwrap();
        if let Ok(handle) = handle {
            let how = libc::O_RDONLY | libc::O_NONBLOCK;
            if let Some(fd) = acts.open("open", || sys::open_by_handle(&mount, &handle, how)) {
                acts.held.push(fd);
            }
        }
    });
    for from_root in [false, true] {
        let name = if from_root { "run as root's child" } else { "run" };
        table.add_call(CallGroup::Run, name, move |acts| {
            if from_root {
                // Caches the attributes before the user runs it.
                let _ = std::process::Command::new(&acts.t).arg("-u").output();
            }
            let t = acts.t.clone();
            for what in ["-u", "-g"] {
                let ran =
                    acts.who.run_as_user(|| std::process::Command::new(&t).arg(what).output());
                let ran = ran.map(|output| output.stdout);
                acts.run_call_returning_bytes(what, || {
                    ran.map_err(|error| error.raw_os_error().unwrap_or(0))
                });
            }
        });
    }
    for what in ["write", "truncate", "mapped store", "punch"] {
        table.add_call(CallGroup::Run, format!("run after {what}"), move |acts| {
            let t = acts.t.clone();
            let _ = std::process::Command::new(&t).arg("-u").output();
            let opened = acts.open("open", || sys::open(&t, libc::O_RDWR, 0));
            if let Some(fd) = opened {
                let len = sys::fstat(&fd).unwrap().stx_size as i64;
                match what {
                    "write" => drop(acts.run_call("write", || sys::pwrite(&fd, b"\0", len))),
                    "truncate" => drop(acts.run_call("truncate", || sys::ftruncate(&fd, len + 9))),
                    "punch" => drop(acts.run_call("punch", || {
                        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                        sys::fallocate(&fd, mode, len - 1, 1)
                    })),
                    _ => {
                        let mut mapped = sys::MemoryMapping::new(&fd, len as usize, true).unwrap();
                        let _ =
                            acts.run_call("store", || mapped.store_bytes(len as usize - 1, b"\0"));
                    }
                }
            }
            let ran = acts.who.run_as_user(|| std::process::Command::new(&t).arg("-u").output());
            let ran = ran.map(|output| output.stdout);
            acts.run_call_returning_bytes("run", || {
                ran.map_err(|error| error.raw_os_error().unwrap_or(0))
            });
        });
    }
}

fn add_xattr_calls(table: &mut CallTable) {
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    let values: [(&str, &'static str, Vec<u8>); 15] = [
        ("user", "user.set", b"value".to_vec()),
        ("user again", "user.there", b"another".to_vec()),
        ("user, empty", "user.set", vec![]),
        ("user, long", "user.set", vec![b'l'; 2000]),
        ("user, too long", "user.set", vec![b'l'; 5000]),
        ("user, no name", "user.", b"value".to_vec()),
        ("trusted", "trusted.set", b"value".to_vec()),
        ("security", "security.set", b"value".to_vec()),
        ("unknown", "nothing.set", b"value".to_vec()),
        ("capability", "security.capability", capability),
        ("access list", ACCESS_ACL, acl_with_extra_user(7)),
        ("minimal access list", ACCESS_ACL, minimal_acl(0o640)),
        ("same access list", ACCESS_ACL, minimal_acl(0o664)),
        ("default list", DEFAULT_ACL, acl_with_extra_user(6)),
        ("wrong access list", ACCESS_ACL, b"\x02\0\0\0wrong".to_vec()),
    ];
    for (title, name, value) in values {
        for (how, flags) in
            [("", 0), (" create", libc::XATTR_CREATE), (" replace", libc::XATTR_REPLACE)]
        {
            if flags != 0 && !title.starts_with("user") {
                continue;
            }
            let value = value.clone();
            table.add_call(CallGroup::Path, format!("setxattr {title}{how}"), move |acts| {
                let t = acts.t.clone();
                let _ = acts.run_call("setxattr", || sys::setxattr(&t, name, &value, flags));
            });
        }
    }
    for name in
        ["user.there", "user.absent", "trusted.there", "nothing.there", ACCESS_ACL, DEFAULT_ACL]
    {
        table.add_call(CallGroup::Path, format!("removexattr {name}"), move |acts| {
            let t = acts.t.clone();
            let _ = acts.run_call("removexattr", || sys::removexattr(&t, name));
        });
        table.add_call(CallGroup::Path, format!("getxattr {name}"), move |acts| {
            let t = acts.t.clone();
            acts.run_call_returning_bytes("getxattr", || sys::getxattr(&t, name));
        });
    }
    table.add_call(CallGroup::Path, "listxattr", |acts| {
        let t = acts.t.clone();
        acts.run_call_returning_bytes("listxattr", || {
            sys::listxattr(&t).map(|names| names.join(" ").into_bytes())
        });
    });
}
