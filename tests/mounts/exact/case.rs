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

use crate::exact::calls::SystemCallTest;
use crate::exact::sys;
use crate::exact::who::{FOREIGN_GID, OTHER_UID, OWNER_GID, OWNER_UID, TestUser};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum TargetKind {
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

impl TargetKind {
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
pub struct TargetState {
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

impl TargetState {
    /// Returns true if a file is immutable or append-only.
    pub fn has_flags(&self) -> bool {
        (self.flags | self.parent_flags) & (IMMUTABLE_FL | APPEND_FL) != 0
    }
}

const PLAIN_STATE: TargetState = TargetState {
    name: "plain",
    mode: 0o664,
    owner: (OWNER_UID, OWNER_GID),
    flags: 0,
    acl: false,
    linked: false,
    unlinked: false,
    parent_mode: 0o775,
    parent_owner: (OWNER_UID, OWNER_GID),
    parent_flags: 0,
    parent_acl: false,
};
const OPEN_TO_ALL_STATE: TargetState =
    TargetState { name: "open to all", mode: 0o666, parent_mode: 0o777, ..PLAIN_STATE };

pub const IMMUTABLE_FL: u32 = 0x10;
pub const APPEND_FL: u32 = 0x20;
pub const NODUMP_FL: u32 = 0x40;
pub const NOATIME_FL: u32 = 0x80;
pub const SYNC_FL: u32 = 0x8;

pub const TARGET_STATES: [TargetState; 20] = [
    PLAIN_STATE,
    OPEN_TO_ALL_STATE,
    TargetState { name: "setuid", mode: 0o6777, ..OPEN_TO_ALL_STATE },
    TargetState { name: "setuid of root", mode: 0o6777, owner: (0, 0), ..OPEN_TO_ALL_STATE },
    TargetState { name: "setgid without execution", mode: 0o2666, ..OPEN_TO_ALL_STATE },
    TargetState {
        name: "setgid of a foreign group",
        mode: 0o2777,
        owner: (OWNER_UID, FOREIGN_GID),
        ..OPEN_TO_ALL_STATE
    },
    TargetState {
        name: "closed",
        mode: 0o600,
        parent_mode: 0o755,
        parent_owner: (0, 0),
        ..PLAIN_STATE
    },
    TargetState { name: "immutable", flags: IMMUTABLE_FL, ..OPEN_TO_ALL_STATE },
    TargetState { name: "append-only", flags: APPEND_FL, ..OPEN_TO_ALL_STATE },
    TargetState { name: "setuid append-only", flags: APPEND_FL, mode: 0o6777, ..OPEN_TO_ALL_STATE },
    TargetState { name: "noatime flag", flags: NOATIME_FL, ..OPEN_TO_ALL_STATE },
    TargetState { name: "access ACL", acl: true, ..PLAIN_STATE },
    TargetState { name: "two names", linked: true, ..OPEN_TO_ALL_STATE },
    TargetState { name: "without a name", unlinked: true, ..OPEN_TO_ALL_STATE },
    TargetState {
        name: "sticky parent",
        parent_mode: 0o1777,
        parent_owner: (0, 0),
        ..OPEN_TO_ALL_STATE
    },
    TargetState {
        name: "setgid parent",
        parent_mode: 0o2777,
        parent_owner: (OWNER_UID, FOREIGN_GID),
        ..OPEN_TO_ALL_STATE
    },
    TargetState { name: "default ACL in parent", parent_acl: true, ..OPEN_TO_ALL_STATE },
    TargetState { name: "immutable parent", parent_flags: IMMUTABLE_FL, ..OPEN_TO_ALL_STATE },
    TargetState { name: "append-only parent", parent_flags: APPEND_FL, ..OPEN_TO_ALL_STATE },
    TargetState {
        name: "parent that inherits flags",
        parent_flags: NODUMP_FL | NOATIME_FL,
        ..OPEN_TO_ALL_STATE
    },
];

#[derive(Clone, Copy)]
pub struct TestCase {
    pub call: &'static SystemCallTest,
    pub kind: TargetKind,
    pub who: TestUser,
    pub state: &'static TargetState,
    /// True if another process has the target open and cached; otherwise nothing is cached.
    pub watched: bool,
    /// State of the whole volume, such as full or read-only.
    pub volume: &'static str,
}

impl fmt::Display for TestCase {
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
pub fn page_varying_bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7 + i / 4096 * 31 + i) as u8 | 1).collect()
}

/// Returns an ACL that lets one more user write.
pub fn acl_with_extra_user(mask: u16) -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, !0), (2, 6, OTHER_UID), (4, 4, !0), (16, mask, !0), (32, 4, !0)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Returns an ACL equivalent to a mode.
pub fn minimal_acl(mode: u16) -> Vec<u8> {
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
const OLD_TIMES: [(i64, i64); 2] = [(1_000_000_000, 5), (1_100_000_000, 6)];

fn create_file(path: &Path, bytes: &[u8]) {
    let file = sys::open(path, libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o664).unwrap();
    assert_eq!(sys::write(&file, bytes), Ok(bytes.len() as i64));
}

fn set_owner(path: &Path, owner: (u32, u32)) {
    sys::chown(path, owner.0, owner.1, libc::AT_SYMLINK_NOFOLLOW).unwrap();
}

/// Creates the directory of a case, without times and flags.
pub fn create_case_dir(dir: &Path, kind: TargetKind, state: &TargetState) {
    sys::mkdir(dir, 0o755).unwrap();
    let t = dir.join("t");
    let owner = (OWNER_UID, OWNER_GID);
    create_file(&dir.join("o"), &page_varying_bytes(3000));
    set_owner(&dir.join("o"), owner);
    sys::mkdir(&dir.join("d"), 0o775).unwrap();
    create_file(&dir.join("d/x"), b"within");
    set_owner(&dir.join("d"), owner);
    // The target itself, or behind the link `t`.
    let mut real = t.clone();
    match kind {
        TargetKind::Regular => create_file(&t, &page_varying_bytes(10_000)),
        TargetKind::Empty => create_file(&t, b""),
        TargetKind::Sparse => {
            create_file(&t, &page_varying_bytes(5000));
            let file = sys::open(&t, libc::O_WRONLY, 0).unwrap();
            sys::pwrite(&file, &page_varying_bytes(3000), 60_000).unwrap();
            sys::ftruncate(&file, 100_000).unwrap();
        }
        TargetKind::Program => create_file(&t, &std::fs::read("/usr/bin/id").unwrap()),
        TargetKind::EmptyDirectory | TargetKind::Directory => {
            sys::mkdir(&t, 0o775).unwrap();
            if kind == TargetKind::Directory {
                create_file(&t.join("x"), b"within");
            }
        }
        TargetKind::LinkToFile => {
            real = dir.join("f");
            create_file(&real, &page_varying_bytes(10_000));
            sys::symlink("f", &t).unwrap();
        }
        TargetKind::LinkToDirectory => {
            real = dir.join("g");
            sys::mkdir(&real, 0o775).unwrap();
            sys::symlink("g", &t).unwrap();
        }
        TargetKind::Dangling => {
            sys::symlink("nowhere", &t).unwrap();
        }
        TargetKind::Fifo => drop(sys::mknod(&t, libc::S_IFIFO | 0o664, 0).unwrap()),
        TargetKind::Socket => drop(sys::mknod(&t, libc::S_IFSOCK | 0o664, 0).unwrap()),
        // The null device, and a block device that does not exist.
        TargetKind::Character => drop(sys::mknod(&t, libc::S_IFCHR | 0o664, 0x103).unwrap()),
        TargetKind::Block => drop(sys::mknod(&t, libc::S_IFBLK | 0o664, 0xc855).unwrap()),
        TargetKind::Missing => (),
    }
    if kind != TargetKind::Missing {
        set_owner(&t, state.owner);
    }
    if !matches!(kind, TargetKind::Missing | TargetKind::Dangling) {
        set_owner(&real, state.owner);
        let runs =
            if kind.is_directory() || kind == TargetKind::LinkToDirectory { 0o111 } else { 0 };
        sys::chmod(&real, state.mode | runs).unwrap();
    }
    if kind.is_file() || kind.is_directory() {
        sys::setxattr(&t, "user.there", b"value", 0).unwrap();
        sys::setxattr(&t, "trusted.there", b"of root", 0).unwrap();
        if state.acl {
            sys::setxattr(&t, ACCESS_ACL, &acl_with_extra_user(6), 0).unwrap();
        }
        if state.acl && kind.is_directory() {
            sys::setxattr(&t, DEFAULT_ACL, &acl_with_extra_user(6), 0).unwrap();
        }
    }
    if state.linked && kind.is_file() {
        sys::link(&t, &dir.join("h"), 0).unwrap();
    }
    set_owner(dir, state.parent_owner);
    sys::chmod(dir, state.parent_mode).unwrap();
    if state.parent_acl {
        sys::setxattr(dir, DEFAULT_ACL, &acl_with_extra_user(6), 0).unwrap();
    }
}

/// Sets old times, and then the flags that forbid changing them.
pub fn set_times_and_flags(dir: &Path, kind: TargetKind, state: &TargetState) {
    for name in ["t", "f", "g", "o", "d", "d/x", "t/x", "."] {
        match sys::utimens(&dir.join(name), OLD_TIMES, libc::AT_SYMLINK_NOFOLLOW) {
            Ok(_) | Err(libc::ENOENT | libc::ENOTDIR) => (),
            Err(errno) => panic!("{name}: {}", sys::errno_name(errno)),
        }
    }
    let set = |path: &Path, flags: u32| {
        let fd = sys::open(path, libc::O_RDONLY | libc::O_NONBLOCK, 0).unwrap();
        let now = sys::get_inode_flags(&fd).unwrap();
        sys::set_inode_flags(&fd, now | flags).unwrap();
    };
    if state.flags != 0 && (kind.is_file() || kind.is_directory()) {
        set(&dir.join("t"), state.flags);
    }
    if state.parent_flags != 0 {
        set(dir, state.parent_flags);
    }
}
