//! A case: a call on a type of target, by a user, in a state. Each has its own
//! directory:
//!
//! | name | what it is |
//! |---|---|
//! | `t` | the target |
//! | `f`, `g` | the file or directory that `t` leads to, if it is a link |
//! | `o` | another file, of the owner |
//! | `d` | a directory with the file `x` |
//! | `n` | a missing name, for new files |

use std::fmt;
use std::path::Path;

use crate::calls::Call;
use crate::sys;
use crate::who::{FOREIGN, GROUP, OTHER, OWNER, Who};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    Regular,
    Empty,
    Sparse,
    Program,
    EmptyDirectory,
    Directory,
    LinkToFile,
    LinkToDirectory,
    Dangling,
    Fifo,
    Character,
    Block,
    Socket,
    Missing,
}

impl Kind {
    pub const ALL: [Self; 13] = [
        Self::Regular,
        Self::Empty,
        Self::Sparse,
        Self::EmptyDirectory,
        Self::Directory,
        Self::LinkToFile,
        Self::LinkToDirectory,
        Self::Dangling,
        Self::Fifo,
        Self::Character,
        Self::Block,
        Self::Socket,
        Self::Missing,
    ];

    pub fn is_directory(self) -> bool {
        matches!(self, Self::EmptyDirectory | Self::Directory)
    }

    pub fn is_file(self) -> bool {
        matches!(self, Self::Regular | Self::Empty | Self::Sparse | Self::Program)
    }
}

/// State of the target and its directory before the call.
#[derive(Clone, Copy)]
pub struct State {
    pub name: &'static str,
    mode: u32,
    owner: (u32, u32),
    flags: u32,
    acl: bool,
    linked: bool,
    /// True if passed descriptors refer to an orphan.
    pub unlinked: bool,
    parent_mode: u32,
    parent_owner: (u32, u32),
    parent_flags: u32,
    parent_acl: bool,
}

impl State {
    /// Returns true if a file is immutable or append-only.
    pub fn has_flags(&self) -> bool {
        (self.flags | self.parent_flags) & (IMMUTABLE | APPEND) != 0
    }
}

const PLAIN: State = State {
    name: "plain",
    mode: 0o664,
    owner: (OWNER, GROUP),
    flags: 0,
    acl: false,
    linked: false,
    unlinked: false,
    parent_mode: 0o775,
    parent_owner: (OWNER, GROUP),
    parent_flags: 0,
    parent_acl: false,
};
const OPEN: State = State { name: "open to all", mode: 0o666, parent_mode: 0o777, ..PLAIN };

pub const IMMUTABLE: u32 = 0x10;
pub const APPEND: u32 = 0x20;
pub const NODUMP: u32 = 0x40;
pub const NOATIME: u32 = 0x80;
pub const SYNC: u32 = 0x8;

pub const STATES: [State; 20] = [
    PLAIN,
    OPEN,
    State { name: "setuid", mode: 0o6777, ..OPEN },
    State { name: "setuid of root", mode: 0o6777, owner: (0, 0), ..OPEN },
    State { name: "setgid without execution", mode: 0o2666, ..OPEN },
    State { name: "setgid of a foreign group", mode: 0o2777, owner: (OWNER, FOREIGN), ..OPEN },
    State { name: "closed", mode: 0o600, parent_mode: 0o755, parent_owner: (0, 0), ..PLAIN },
    State { name: "immutable", flags: IMMUTABLE, ..OPEN },
    State { name: "append-only", flags: APPEND, ..OPEN },
    State { name: "setuid append-only", flags: APPEND, mode: 0o6777, ..OPEN },
    State { name: "noatime flag", flags: NOATIME, ..OPEN },
    State { name: "access ACL", acl: true, ..PLAIN },
    State { name: "two names", linked: true, ..OPEN },
    State { name: "without a name", unlinked: true, ..OPEN },
    State { name: "sticky parent", parent_mode: 0o1777, parent_owner: (0, 0), ..OPEN },
    State { name: "setgid parent", parent_mode: 0o2777, parent_owner: (OWNER, FOREIGN), ..OPEN },
    State { name: "default ACL in parent", parent_acl: true, ..OPEN },
    State { name: "immutable parent", parent_flags: IMMUTABLE, ..OPEN },
    State { name: "append-only parent", parent_flags: APPEND, ..OPEN },
    State { name: "parent that inherits flags", parent_flags: NODUMP | NOATIME, ..OPEN },
];

#[derive(Clone, Copy)]
pub struct Case {
    pub call: &'static Call,
    pub kind: Kind,
    pub who: Who,
    pub state: &'static State,
    /// True if another process has the target open and cached; otherwise nothing is cached.
    pub watched: bool,
    /// State of the whole volume, such as full or read-only.
    pub volume: &'static str,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, kind, who, state, .. } = self;
        write!(f, "{} | {kind:?} | {who:?} | {}", call.name, state.name)?;
        write!(f, " | {}", if self.watched { "watched" } else { "not cached" })?;
        if !self.volume.is_empty() {
            write!(f, " | {}", self.volume)?;
        }
        Ok(())
    }
}

/// Returns bytes that differ from page to page.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7 + i / 4096 * 31 + i) as u8 | 1).collect()
}

/// Returns an ACL that lets one more user write.
pub fn access_list(mask: u16) -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, !0), (2, 6, OTHER), (4, 4, !0), (16, mask, !0), (32, 4, !0)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Returns an ACL equivalent to a mode.
pub fn minimal_list(mode: u16) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions) in [(1_u16, mode >> 6 & 7), (4, mode >> 3 & 7), (32, mode & 7)] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
    }
    bytes
}

pub const ACCESS_ACL: &str = "system.posix_acl_access";
pub const DEFAULT_ACL: &str = "system.posix_acl_default";

/// Old times: with relatime, reading updates the first, because it is older than the second.
const OLD: [(i64, i64); 2] = [(1_000_000_000, 5), (1_100_000_000, 6)];

fn file(path: &Path, bytes: &[u8]) {
    let file = sys::open(path, libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o664).unwrap();
    assert_eq!(sys::write(&file, bytes), Ok(bytes.len() as i64));
}

fn give(path: &Path, owner: (u32, u32)) {
    sys::chown(path, owner.0, owner.1, libc::AT_SYMLINK_NOFOLLOW).unwrap();
}

/// Creates the directory of a case, without times and flags.
pub fn make(dir: &Path, kind: Kind, state: &State) {
    sys::mkdir(dir, 0o755).unwrap();
    let t = dir.join("t");
    let owner = (OWNER, GROUP);
    file(&dir.join("o"), &pattern(3000));
    give(&dir.join("o"), owner);
    sys::mkdir(&dir.join("d"), 0o775).unwrap();
    file(&dir.join("d/x"), b"within");
    give(&dir.join("d"), owner);
    // The target itself, or behind the link `t`.
    let mut real = t.clone();
    match kind {
        Kind::Regular => file(&t, &pattern(10_000)),
        Kind::Empty => file(&t, b""),
        Kind::Sparse => {
            file(&t, &pattern(5000));
            let file = sys::open(&t, libc::O_WRONLY, 0).unwrap();
            sys::pwrite(&file, &pattern(3000), 60_000).unwrap();
            sys::ftruncate(&file, 100_000).unwrap();
        }
        Kind::Program => file(&t, &std::fs::read("/usr/bin/id").unwrap()),
        Kind::EmptyDirectory | Kind::Directory => {
            sys::mkdir(&t, 0o775).unwrap();
            if kind == Kind::Directory {
                file(&t.join("x"), b"within");
            }
        }
        Kind::LinkToFile => {
            real = dir.join("f");
            file(&real, &pattern(10_000));
            sys::symlink("f", &t).unwrap();
        }
        Kind::LinkToDirectory => {
            real = dir.join("g");
            sys::mkdir(&real, 0o775).unwrap();
            sys::symlink("g", &t).unwrap();
        }
        Kind::Dangling => {
            sys::symlink("nowhere", &t).unwrap();
        }
        Kind::Fifo => drop(sys::mknod(&t, libc::S_IFIFO | 0o664, 0).unwrap()),
        Kind::Socket => drop(sys::mknod(&t, libc::S_IFSOCK | 0o664, 0).unwrap()),
        // The null device, and a block device that does not exist.
        Kind::Character => drop(sys::mknod(&t, libc::S_IFCHR | 0o664, 0x103).unwrap()),
        Kind::Block => drop(sys::mknod(&t, libc::S_IFBLK | 0o664, 0xc855).unwrap()),
        Kind::Missing => (),
    }
    if kind != Kind::Missing {
        give(&t, state.owner);
    }
    if !matches!(kind, Kind::Missing | Kind::Dangling) {
        give(&real, state.owner);
        let runs = if kind.is_directory() || kind == Kind::LinkToDirectory { 0o111 } else { 0 };
        sys::chmod(&real, state.mode | runs).unwrap();
    }
    if kind.is_file() || kind.is_directory() {
        sys::setxattr(&t, "user.there", b"value", 0).unwrap();
        sys::setxattr(&t, "trusted.there", b"of root", 0).unwrap();
        if state.acl {
            sys::setxattr(&t, ACCESS_ACL, &access_list(6), 0).unwrap();
        }
        if state.acl && kind.is_directory() {
            sys::setxattr(&t, DEFAULT_ACL, &access_list(6), 0).unwrap();
        }
    }
    if state.linked && kind.is_file() {
        sys::link(&t, &dir.join("h"), 0).unwrap();
    }
    give(dir, state.parent_owner);
    sys::chmod(dir, state.parent_mode).unwrap();
    if state.parent_acl {
        sys::setxattr(dir, DEFAULT_ACL, &access_list(6), 0).unwrap();
    }
}

/// Sets old times, and then the flags that forbid changing them.
pub fn finish(dir: &Path, kind: Kind, state: &State) {
    for name in ["t", "f", "g", "o", "d", "d/x", "t/x", "."] {
        match sys::utimens(&dir.join(name), OLD, libc::AT_SYMLINK_NOFOLLOW) {
            Ok(_) | Err(libc::ENOENT | libc::ENOTDIR) => (),
            Err(errno) => panic!("{name}: {}", sys::errno_name(errno)),
        }
    }
    let set = |path: &Path, flags: u32| {
        let fd = sys::open(path, libc::O_RDONLY | libc::O_NONBLOCK, 0).unwrap();
        let now = sys::flags(&fd).unwrap();
        sys::set_flags(&fd, now | flags).unwrap();
    };
    if state.flags != 0 && (kind.is_file() || kind.is_directory()) {
        set(&dir.join("t"), state.flags);
    }
    if state.parent_flags != 0 {
        set(dir, state.parent_flags);
    }
}
