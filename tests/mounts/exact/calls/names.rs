//! Calls that create, move and remove names.

use super::{CallContext, CallGroup, CallTable};
use crate::exact::sys;

type RenamePaths = fn(&CallContext) -> (std::path::PathBuf, std::path::PathBuf);

pub fn add_name_calls(table: &mut CallTable) {
    let pairs: [(&str, RenamePaths); 10] = [
        ("t to n", |a| (a.t.clone(), a.n.clone())),
        ("t to o", |a| (a.t.clone(), a.o.clone())),
        ("o to t", |a| (a.o.clone(), a.t.clone())),
        ("t to t", |a| (a.t.clone(), a.t.clone())),
        ("t to d", |a| (a.t.clone(), a.d.clone())),
        ("d to t", |a| (a.d.clone(), a.t.clone())),
        ("t to d/y", |a| (a.t.clone(), a.d.join("y"))),
        ("t to d/x", |a| (a.t.clone(), a.d.join("x"))),
        ("d/x to t", |a| (a.d.join("x"), a.t.clone())),
        ("t to its h", |a| (a.t.clone(), a.t.with_file_name("h"))),
    ];
    let name = CallGroup::Name;
    for (title, paths) in pairs {
        for (how, flags) in [
            ("", 0),
            (" noreplace", libc::RENAME_NOREPLACE),
            (" exchange", libc::RENAME_EXCHANGE),
            (" whiteout", libc::RENAME_WHITEOUT),
        ] {
            table.add_call(name, format!("rename {title}{how}"), move |acts| {
                let (from, to) = paths(acts);
                let _ = acts.run_call("rename", || sys::rename(&from, &to, flags));
            });
        }
    }
    for (title, paths) in &pairs[..2] {
        for (how, flags) in [("", 0), (" follow", libc::AT_SYMLINK_FOLLOW)] {
            let paths = *paths;
            table.add_call(name, format!("link {title}{how}"), move |acts| {
                let (from, to) = paths(acts);
                let _ = acts.run_call("link", || sys::link(&from, &to, flags));
            });
        }
    }
    for (title, which, target) in [
        ("n", "n", "t"),
        ("n, long", "n", "a/long/target/of/more/than/sixty/bytes/is/kept/in/a/block/of/its/own/"),
        ("t", "t", "n"),
        ("in t", "t/n", "n"),
    ] {
        table.add_call(name, format!("symlink {title}"), move |acts| {
            let path = acts.t.with_file_name(which);
            let _ = acts.run_call("symlink", || sys::symlink(target, &path));
        });
    }
    table.add_call(name, "readlink", |acts| {
        let t = acts.t.clone();
        acts.run_call_returning_bytes("readlink", || sys::readlink(&t));
    });
    for (title, flags) in [("unlink", 0), ("rmdir", libc::AT_REMOVEDIR)] {
        for which in ["t", "t/", "t/x", "o", "d", "n"] {
            table.add_call(name, format!("{title} {which}"), move |acts| {
                let path = acts.t.with_file_name("").join(which);
                let _ = acts.run_call(title, || sys::unlink(&path, flags));
            });
        }
    }
    for mask in [0o022, 0o077, 0] {
        for which in ["n", "t", "t/n"] {
            table.add_call(name, format!("mkdir {which}, umask {mask:o}"), move |acts| {
                let path = acts.t.with_file_name(which);
                sys::set_umask(mask);
                let _ = acts.run_call("mkdir", || sys::mkdir(&path, 0o7777));
                sys::set_umask(0o022);
            });
        }
    }
    for (title, kind, device) in [
        ("file", libc::S_IFREG, 0),
        ("fifo", libc::S_IFIFO, 0),
        ("socket", libc::S_IFSOCK, 0),
        ("character device", libc::S_IFCHR, 0x103),
        ("whiteout", libc::S_IFCHR, 0),
        ("block device", libc::S_IFBLK, 0x0012_3456),
    ] {
        for which in ["n", "t", "t/n"] {
            table.add_call(name, format!("mknod {title} {which}"), move |acts| {
                let path = acts.t.with_file_name(which);
                sys::set_umask(0o027);
                let _ = acts.run_call("mknod", || sys::mknod(&path, kind | 0o6777, device));
                sys::set_umask(0o022);
            });
        }
    }
}
