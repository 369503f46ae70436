//! Each notified call, by number.

use std::os::fd::AsRawFd;

use draconis_ext::{
    Access, AttributeChange, Cookie, FileType, InodeNumber, NewNode, RenameMode, SetTime, Time,
    XattrSet,
};

use crate::files::errno;
use crate::supervisor::{Answer, Object, Reply, Supervisor};
use crate::sys::{self, Notification};
use crate::tree::{Place, as_path, c_string, io_errno};

const CWD: u64 = libc::AT_FDCWD as u64;
const NO_FOLLOW: u64 = libc::AT_SYMLINK_NOFOLLOW as u64;
const EMPTY_PATH: u64 = libc::AT_EMPTY_PATH as u64;

fn done() -> Answer {
    Ok(Some(Reply::Value(0)))
}

impl Supervisor {
    pub fn answer(&mut self, call: &Notification) -> Answer {
        let [a, b, c, d, e, _] = call.args;
        let follows = |flags: u64| flags & NO_FOLLOW == 0;
        match i64::from(call.nr) {
            libc::SYS_open => self.open(call, CWD, a, b, c),
            libc::SYS_creat => {
                self.open(call, CWD, a, (libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC) as u64, b)
            }
            libc::SYS_openat => self.open(call, a, b, c, d),
            libc::SYS_openat2 => {
                let how = self.read(call, c, 24)?;
                let word =
                    |at: usize| u64::from_ne_bytes(how[at..at + 8].try_into().unwrap_or_default());
                // Limits of the walk (RESOLVE_*) are not implemented in the spike.
                self.open(call, a, b, word(0), word(8))
            }
            libc::SYS_stat => self.stat_of(call, (CWD, a), 0, true, b),
            libc::SYS_lstat => self.stat_of(call, (CWD, a), 0, false, b),
            libc::SYS_fstat => self.stat_of(call, (a, 0), EMPTY_PATH, true, b),
            libc::SYS_newfstatat => self.stat_of(call, (a, b), d, follows(d), c),
            libc::SYS_statx => match self.target(call, (a, b), c, follows(c))? {
                Some(inode) => self.statx(call, inode, e),
                None => Ok(None),
            },
            libc::SYS_access => self.access(call, (CWD, a), b, 0),
            libc::SYS_faccessat => self.access(call, (a, b), c, 0),
            libc::SYS_faccessat2 => self.access(call, (a, b), c, d),
            libc::SYS_readlink => self.read_link(call, (CWD, a), b, c),
            libc::SYS_readlinkat => self.read_link(call, (a, b), c, d),
            libc::SYS_getdents64 => self.entries(call, a, b, c),
            libc::SYS_mkdir => self.create(call, (CWD, a), FileType::Directory, b, 0, b""),
            libc::SYS_mkdirat => self.create(call, (a, b), FileType::Directory, c, 0, b""),
            libc::SYS_mknod => self.make_node(call, (CWD, a), b, c),
            libc::SYS_mknodat => self.make_node(call, (a, b), c, d),
            libc::SYS_symlink => self.symlink(call, a, (CWD, b)),
            libc::SYS_symlinkat => self.symlink(call, a, (b, c)),
            libc::SYS_rmdir => self.unlink(call, (CWD, a), true),
            libc::SYS_unlink => self.unlink(call, (CWD, a), false),
            libc::SYS_unlinkat => self.unlink(call, (a, b), c & libc::AT_REMOVEDIR as u64 != 0),
            libc::SYS_rename => self.rename(call, (CWD, a), (CWD, b), 0),
            libc::SYS_renameat => self.rename(call, (a, b), (c, d), 0),
            libc::SYS_renameat2 => self.rename(call, (a, b), (c, d), e),
            libc::SYS_link => self.link(call, (CWD, a), (CWD, b), 0),
            libc::SYS_linkat => self.link(call, (a, b), (c, d), e),
            libc::SYS_chmod => self.chmod(call, (CWD, a), 0, b),
            libc::SYS_fchmod => self.chmod(call, (a, 0), EMPTY_PATH, b),
            libc::SYS_fchmodat => self.chmod(call, (a, b), 0, c),
            libc::SYS_fchmodat2 => self.chmod(call, (a, b), d, c),
            libc::SYS_chown => self.chown(call, (CWD, a), 0, b, c),
            libc::SYS_lchown => self.chown(call, (CWD, a), NO_FOLLOW, b, c),
            libc::SYS_fchown => self.chown(call, (a, 0), EMPTY_PATH, b, c),
            libc::SYS_fchownat => self.chown(call, (a, b), e, c, d),
            libc::SYS_utimensat if b == 0 => self.set_times(call, (a, 0), EMPTY_PATH, c, 1),
            libc::SYS_utimensat => self.set_times(call, (a, b), d, c, 1),
            libc::SYS_utimes => self.set_times(call, (CWD, a), 0, b, 1000),
            libc::SYS_futimesat => self.set_times(call, (a, b), 0, c, 1000),
            libc::SYS_utime => self.set_times(call, (CWD, a), 0, b, 0),
            libc::SYS_chdir => self.chdir(call, a),
            libc::SYS_fchdir => {
                self.forget_cwd(call);
                Ok(None)
            }
            libc::SYS_umask => {
                self.set_umask(call, a as u32 & 0o777);
                Ok(None)
            }
            libc::SYS_statfs => match self.target(call, (CWD, a), 0, true)? {
                Some(_) => self.statfs(call, b),
                None => Ok(None),
            },
            libc::SYS_fstatfs => match self.object(call, a)? {
                Some(_) => self.statfs(call, b),
                None => Ok(None),
            },
            libc::SYS_truncate => self.truncate(call, a, b),
            libc::SYS_fsync => self.sync_file(call, a, false),
            libc::SYS_fdatasync => self.sync_file(call, a, true),
            libc::SYS_sync | libc::SYS_syncfs => {
                if self.write {
                    self.files.write_back_all(&self.tree.volume)?;
                    self.tree.volume.sync().map_err(errno)?;
                }
                Ok(None)
            }
            libc::SYS_execve => self.execute(call, (CWD, a), 0),
            libc::SYS_execveat => self.execute(call, (a, b), e),
            libc::SYS_inotify_add_watch => match self.target(call, (CWD, b), 0, true)? {
                Some(_) => Err(libc::ENOSPC),
                None => Ok(None),
            },
            libc::SYS_getxattr => self.xattr(call, (CWD, a), 0, b, c, d),
            libc::SYS_lgetxattr => self.xattr(call, (CWD, a), NO_FOLLOW, b, c, d),
            libc::SYS_fgetxattr => self.xattr(call, (a, 0), EMPTY_PATH, b, c, d),
            libc::SYS_listxattr => self.xattr(call, (CWD, a), 0, 0, b, c),
            libc::SYS_llistxattr => self.xattr(call, (CWD, a), NO_FOLLOW, 0, b, c),
            libc::SYS_flistxattr => self.xattr(call, (a, 0), EMPTY_PATH, 0, b, c),
            libc::SYS_setxattr => self.set_xattr(call, (CWD, a), 0, b, Some((c, d, e))),
            libc::SYS_lsetxattr => self.set_xattr(call, (CWD, a), NO_FOLLOW, b, Some((c, d, e))),
            libc::SYS_fsetxattr => self.set_xattr(call, (a, 0), EMPTY_PATH, b, Some((c, d, e))),
            libc::SYS_removexattr => self.set_xattr(call, (CWD, a), 0, b, None),
            libc::SYS_lremovexattr => self.set_xattr(call, (CWD, a), NO_FOLLOW, b, None),
            libc::SYS_fremovexattr => self.set_xattr(call, (a, 0), EMPTY_PATH, b, None),
            _ => Ok(None),
        }
    }

    fn place_at(
        &mut self,
        call: &Notification,
        (dirfd, path): (u64, u64),
        follow: bool,
    ) -> Result<Option<Place>, i32> {
        let path = self.string(call, path)?;
        self.place(call, dirfd, &path, follow)
    }

    fn require_write(&self) -> Result<(), i32> {
        if self.write { Ok(()) } else { Err(libc::EROFS) }
    }

    /// Checks that the caller may change the names of a directory.
    fn may_change(&self, call: &Notification, place: &Place) -> Result<(), i32> {
        self.require_write()?;
        self.caller(call)?.may(&self.tree.volume, place.dir, 3)
    }

    fn open(
        &mut self,
        call: &Notification,
        dirfd: u64,
        path: u64,
        flags: u64,
        mode: u64,
    ) -> Answer {
        let flags = flags as i32;
        let has = |flag: i32| flags & flag == flag;
        let follow = !has(libc::O_NOFOLLOW) && !has(libc::O_CREAT | libc::O_EXCL);
        let path = self.string(call, path)?;
        let placed = self.place(call, dirfd, &path, follow)?;
        let Some(place) = placed else { return self.open_again(call, &path, flags) };
        if has(libc::O_TMPFILE) {
            return Err(libc::EOPNOTSUPP);
        }
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writes || has(libc::O_TRUNC) {
            self.require_write()?;
        }
        let (inode, mut empty) = match place.node {
            None if !has(libc::O_CREAT) => return Err(libc::ENOENT),
            None if place.slash => return Err(libc::EISDIR),
            None => (self.create_at(call, &place, FileType::File, mode, 0, b"")?, true),
            Some(_) if has(libc::O_CREAT | libc::O_EXCL) => return Err(libc::EEXIST),
            Some(inode) => (inode, false),
        };
        let cloexec = has(libc::O_CLOEXEC);
        if !empty {
            let held = self.tree.volume.inode(inode).map_err(errno)?;
            match held.kind {
                FileType::Directory if writes || has(libc::O_CREAT) => return Err(libc::EISDIR),
                FileType::Directory => {
                    if !has(libc::O_PATH) {
                        self.caller(call)?.may(&self.tree.volume, inode, 4)?;
                    }
                    let real = self.tree.stand_in(inode, &place.path())?;
                    // A descriptor of O_PATH cannot be installed: an ordinary one stands for it.
                    let fd = sys::open_at(libc::AT_FDCWD, &real, libc::O_DIRECTORY, 0)?;
                    return Ok(Some(Reply::Descriptor(fd, cloexec)));
                }
                _ if has(libc::O_DIRECTORY) => return Err(libc::ENOTDIR),
                FileType::File => {}
                FileType::Symlink => return Err(libc::ELOOP),
                _ => return Err(libc::ENXIO),
            }
            if !has(libc::O_PATH) {
                let want = [4, 2, 6, 6][(flags & libc::O_ACCMODE) as usize];
                self.caller(call)?.may(&self.tree.volume, inode, want)?;
                let append = has(libc::O_APPEND);
                let access = Access { read: want & 4 != 0, write: writes, append };
                self.tree.volume.check_open(inode, access).map_err(errno)?;
            }
            if has(libc::O_TRUNC) && !has(libc::O_PATH) {
                if held.size_bytes > 0 {
                    let change = AttributeChange { size_bytes: Some(0), ..Default::default() };
                    self.tree.volume.set_attributes(inode, &change).map_err(errno)?;
                }
                empty = true;
            }
        }
        let fd = self.files.open(&self.tree.volume, inode, flags, empty)?;
        Ok(Some(Reply::Descriptor(fd, cloexec)))
    }

    /// Opens a file of the volume once more, by the descriptor that a program has.
    fn open_again(&mut self, call: &Notification, path: &[u8], flags: i32) -> Answer {
        let Some((fd, b"")) = self.descriptor(call, path) else { return Ok(None) };
        let Some(Object::File(inode)) = self.object(call, fd)? else { return Ok(None) };
        if flags & (libc::O_ACCMODE | libc::O_TRUNC) != 0 {
            self.require_write()?;
            self.caller(call)?.may(&self.tree.volume, inode, 2)?;
        }
        let opened = self.files.open(&self.tree.volume, inode, flags, false)?;
        Ok(Some(Reply::Descriptor(opened, flags & libc::O_CLOEXEC != 0)))
    }

    fn create_at(
        &mut self,
        call: &Notification,
        place: &Place,
        kind: FileType,
        mode: u64,
        device: u64,
        target: &[u8],
    ) -> Result<InodeNumber, i32> {
        self.may_change(call, place)?;
        let caller = self.caller(call)?;
        let mode = match kind {
            FileType::Symlink => 0o777,
            _ => mode as u32 & 0o7777 & !self.umask(call),
        };
        let device = (libc::major(device), libc::minor(device));
        let new = NewNode { kind, mode, uid: caller.uid, gid: caller.gid, device, target };
        let made = self.tree.volume.create(place.dir, &place.name, &new).map_err(errno)?;
        self.tree.remember_name(place.dir, &place.name, made, kind);
        Ok(made)
    }

    fn create(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        kind: FileType,
        mode: u64,
        device: u64,
        target: &[u8],
    ) -> Answer {
        let Some(place) = self.place_at(call, at, false)? else { return Ok(None) };
        if place.node.is_some() {
            return Err(libc::EEXIST);
        }
        if place.slash && kind != FileType::Directory {
            return Err(libc::ENOENT);
        }
        self.create_at(call, &place, kind, mode, device, target)?;
        done()
    }

    fn make_node(&mut self, call: &Notification, at: (u64, u64), mode: u64, device: u64) -> Answer {
        let kind = match mode & 0o170000 {
            0 => FileType::File,
            bits => FileType::from_mode(bits as u32).ok_or(libc::EINVAL)?,
        };
        if matches!(kind, FileType::CharDevice | FileType::BlockDevice)
            && self.caller(call)?.uid != 0
        {
            return Err(libc::EPERM);
        }
        self.create(call, at, kind, mode, device, b"")
    }

    fn symlink(&mut self, call: &Notification, target: u64, at: (u64, u64)) -> Answer {
        let target = self.string(call, target)?;
        self.create(call, at, FileType::Symlink, 0o777, 0, &target)
    }

    fn stat_of(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        flags: u64,
        follow: bool,
        to: u64,
    ) -> Answer {
        match self.target(call, at, flags, follow)? {
            Some(inode) => self.stat(call, inode, to),
            None => Ok(None),
        }
    }

    fn access(&mut self, call: &Notification, at: (u64, u64), want: u64, flags: u64) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        if want & 2 != 0 {
            self.require_write()?;
        }
        let caller = self.caller(call)?;
        caller.may(&self.tree.volume, inode, want as u32 & 7)?;
        let held = self.tree.volume.attributes(inode).map_err(errno)?;
        match want & 1 != 0 && held.kind == FileType::File && held.mode & 0o111 == 0 {
            true => Err(libc::EACCES),
            false => done(),
        }
    }

    fn read_link(&mut self, call: &Notification, at: (u64, u64), to: u64, len: u64) -> Answer {
        let Some(inode) = self.target(call, at, 0, false)? else { return Ok(None) };
        let held = self.tree.volume.inode(inode).map_err(errno)?;
        if held.kind != FileType::Symlink {
            return Err(libc::EINVAL);
        }
        let mut target = self.tree.volume.read_link_of(&held).map_err(errno)?;
        target.truncate(len as usize);
        self.write(call, to, &target)?;
        Ok(Some(Reply::Value(target.len() as i64)))
    }

    /// The position is the stand-in's own, so that `lseek`, dup and fork work by themselves.
    fn entries(&mut self, call: &Notification, fd: u64, to: u64, len: u64) -> Answer {
        let Some(Object::Directory(inode, copy)) = self.object(call, fd)? else { return Ok(None) };
        let at = sys::lseek(copy.as_raw_fd(), 0, libc::SEEK_CUR)?;
        let limit = (len as usize).min(1 << 20);
        let mut out: Vec<u8> = Vec::with_capacity(limit.min(32 << 10));
        let mut next = at as u64;
        let mut is_full = false;
        let listed = self.tree.volume.entries(inode, Cookie(next), true, |entry| {
            let entry = match entry {
                Ok(entry) => entry,
                Err(damage) => {
                    next = damage.next.0;
                    return true;
                }
            };
            let record = (19 + entry.name.len() + 1).next_multiple_of(8);
            if out.len() + record > limit {
                is_full = true;
                return false;
            }
            let end = out.len() + record;
            next = entry.next.0;
            out.extend(u64::from(entry.inode.0).to_ne_bytes());
            out.extend(next.to_ne_bytes());
            out.extend((record as u16).to_ne_bytes());
            out.push(entry.kind.map_or(0, |kind| (kind.mode_bits() >> 12) as u8));
            out.extend(entry.name);
            out.resize(end, 0);
            true
        });
        match listed {
            Err(draconis_ext::Error::NotFound) => return done(),
            listed => listed.map_err(errno)?,
        }
        if out.is_empty() && is_full {
            return Err(libc::EINVAL);
        }
        if !out.is_empty() {
            self.write(call, to, &out)?;
        }
        sys::lseek(copy.as_raw_fd(), next as i64, libc::SEEK_SET)?;
        Ok(Some(Reply::Value(out.len() as i64)))
    }

    fn unlink(&mut self, call: &Notification, at: (u64, u64), is_dir: bool) -> Answer {
        let Some(place) = self.place_at(call, at, false)? else { return Ok(None) };
        let node = place.found()?;
        if place.name.is_empty() {
            return Err(libc::EBUSY);
        }
        self.may_change(call, &place)?;
        self.tree.forget_name(&place);
        let removed = match is_dir {
            true => self.tree.volume.remove_directory(place.dir, &place.name),
            false => self.tree.volume.unlink(place.dir, &place.name),
        };
        removed.map_err(errno)?;
        self.tree.forget(&place);
        self.files.drop_orphan(&self.tree.volume, node);
        done()
    }

    fn rename(
        &mut self,
        call: &Notification,
        from: (u64, u64),
        to: (u64, u64),
        flags: u64,
    ) -> Answer {
        let mode = match flags {
            0 => RenameMode::Replace,
            1 => RenameMode::NoReplace,
            2 => RenameMode::Exchange,
            _ => return Err(libc::EINVAL),
        };
        let from = self.place_at(call, from, false)?;
        let to = self.place_at(call, to, false)?;
        let (from, to) = match (from, to) {
            (None, None) => return Ok(None),
            (Some(from), Some(to)) => (from, to),
            _ => return Err(libc::EXDEV),
        };
        from.found()?;
        if from.name.is_empty() || to.name.is_empty() {
            return Err(libc::EBUSY);
        }
        self.may_change(call, &from)?;
        self.may_change(call, &to)?;
        self.tree.forget_name(&from);
        self.tree.forget_name(&to);
        let volume = &self.tree.volume;
        volume.rename(from.dir, &from.name, to.dir, &to.name, mode).map_err(errno)?;
        if from.node == to.node {
            return done();
        }
        self.tree.forget(&to);
        match mode {
            RenameMode::Exchange => self.tree.forget(&from),
            _ => self.tree.renamed(&from, &to),
        }
        if let Some(replaced) = to.node {
            self.files.drop_orphan(&self.tree.volume, replaced);
        }
        done()
    }

    fn link(
        &mut self,
        call: &Notification,
        from: (u64, u64),
        to: (u64, u64),
        flags: u64,
    ) -> Answer {
        let from = self.place_at(call, from, flags & libc::AT_SYMLINK_FOLLOW as u64 != 0)?;
        let to = self.place_at(call, to, false)?;
        let (from, to) = match (from, to) {
            (None, None) => return Ok(None),
            (Some(from), Some(to)) => (from, to),
            _ => return Err(libc::EXDEV),
        };
        self.may_change(call, &to)?;
        if to.node.is_some() {
            return Err(libc::EEXIST);
        }
        self.tree.volume.link(from.found()?, to.dir, &to.name).map_err(errno)?;
        done()
    }

    /// Changes attributes; what a program wrote before goes to the volume first.
    fn change(&mut self, inode: InodeNumber, change: &AttributeChange) -> Answer {
        self.files.write_back(&self.tree.volume, inode)?;
        self.tree.volume.set_attributes(inode, change).map_err(errno)?;
        done()
    }

    fn require_owner(&self, call: &Notification, inode: InodeNumber) -> Result<(), i32> {
        self.require_write()?;
        let caller = self.caller(call)?;
        let held = self.tree.volume.attributes(inode).map_err(errno)?;
        if caller.uid == 0 || caller.uid == held.uid { Ok(()) } else { Err(libc::EPERM) }
    }

    fn chmod(&mut self, call: &Notification, at: (u64, u64), flags: u64, mode: u64) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        self.require_owner(call, inode)?;
        if self.tree.volume.inode(inode).map_err(errno)?.kind == FileType::Symlink {
            return Err(libc::EOPNOTSUPP);
        }
        self.change(
            inode,
            &AttributeChange { mode: Some(mode as u32 & 0o7777), ..Default::default() },
        )
    }

    fn chown(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        flags: u64,
        uid: u64,
        gid: u64,
    ) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        self.require_owner(call, inode)?;
        let caller = self.caller(call)?;
        let given = |id: u64| (id as u32 != u32::MAX).then_some(id as u32);
        let (uid, gid) = (given(uid), given(gid));
        let held = self.tree.volume.attributes(inode).map_err(errno)?;
        let own = |gid: u32| gid == held.gid || gid == caller.gid || caller.groups.contains(&gid);
        if caller.uid != 0
            && (uid.is_some_and(|uid| uid != held.uid) || gid.is_some_and(|gid| !own(gid)))
        {
            return Err(libc::EPERM);
        }
        self.change(inode, &AttributeChange { uid, gid, ..Default::default() })
    }

    /// `unit` is what the second number of a time counts: 1 nanoseconds, 1000 microseconds,
    /// 0 that there is none.
    fn set_times(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        flags: u64,
        times: u64,
        unit: i64,
    ) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        let mut set = [Some(SetTime::Now); 2];
        if times != 0 {
            let bytes = self.read(call, times, if unit == 0 { 16 } else { 32 })?;
            let words: Vec<i64> =
                bytes.as_chunks::<8>().0.iter().map(|word| i64::from_ne_bytes(*word)).collect();
            let pairs = match unit {
                0 => [(words[0], 0), (words[1], 0)],
                _ => [(words[0], words[1]), (words[2], words[3])],
            };
            for (set, (seconds, part)) in set.iter_mut().zip(pairs) {
                *set = match part {
                    libc::UTIME_NOW if unit == 1 => Some(SetTime::Now),
                    libc::UTIME_OMIT if unit == 1 => None,
                    _ => {
                        let nanoseconds = u32::try_from(part * unit).map_err(|_| libc::EINVAL)?;
                        Some(SetTime::To(Time { seconds, nanoseconds }))
                    }
                };
            }
        }
        match set.iter().all(|set| *set == Some(SetTime::Now)) {
            true if self.require_owner(call, inode).is_err() => {
                self.require_write()?;
                self.caller(call)?.may(&self.tree.volume, inode, 2)?;
            }
            true => {}
            false => self.require_owner(call, inode)?,
        }
        let [accessed, modified] = set;
        self.change(inode, &AttributeChange { accessed, modified, ..Default::default() })
    }

    fn truncate(&mut self, call: &Notification, path: u64, size: u64) -> Answer {
        let Some(inode) = self.target(call, (CWD, path), 0, true)? else { return Ok(None) };
        self.require_write()?;
        self.caller(call)?.may(&self.tree.volume, inode, 2)?;
        if self.tree.volume.inode(inode).map_err(errno)?.kind != FileType::File {
            return Err(libc::EISDIR);
        }
        self.change(inode, &AttributeChange { size_bytes: Some(size), ..Default::default() })?;
        self.files.truncate(inode, size)?;
        done()
    }

    fn sync_file(&mut self, call: &Notification, fd: u64, data_only: bool) -> Answer {
        let Some(object) = self.object(call, fd)? else { return Ok(None) };
        if self.write {
            let inode = object.inode();
            self.files.write_back(&self.tree.volume, inode)?;
            self.tree.volume.sync_inode(inode, data_only).map_err(errno)?;
        }
        done()
    }

    /// The kernel follows the path itself, through stand-ins, and enters a real directory.
    fn chdir(&mut self, call: &Notification, path: u64) -> Answer {
        let Some(place) = self.place_at(call, (CWD, path), true)? else {
            self.forget_cwd(call);
            return Ok(None);
        };
        let inode = place.found()?;
        if self.tree.volume.inode(inode).map_err(errno)?.kind != FileType::Directory {
            return Err(libc::ENOTDIR);
        }
        self.caller(call)?.may(&self.tree.volume, inode, 1)?;
        self.tree.make_real(&place)?;
        self.tree.stand_in(inode, &place.path())?;
        self.forget_cwd(call);
        Ok(None)
    }

    /// The kernel executes a copy at the same path, so that `/proc/self/exe` is right.
    fn execute(&mut self, call: &Notification, at: (u64, u64), flags: u64) -> Answer {
        let path = self.string(call, at.1)?;
        // If it succeeds, the memory is another one.
        self.forget_memory(call);
        if path.is_empty() && flags & EMPTY_PATH != 0 {
            return Ok(None);
        }
        self.execute_path(call, at.0, &path, 4)
    }

    fn execute_path(&mut self, call: &Notification, dirfd: u64, path: &[u8], depth: u32) -> Answer {
        let Some(place) = self.place(call, dirfd, path, true)? else { return Ok(None) };
        let inode = place.found()?;
        let held = self.attributes(inode)?;
        self.caller(call)?.may(&self.tree.volume, inode, 1)?;
        if held.kind != FileType::File || held.mode & 0o111 == 0 {
            return Err(libc::EACCES);
        }
        if held.mode & 0o6000 != 0 {
            let path = as_path(path).display();
            eprintln!("draconis-run: {path}: setuid and setgid programs are not run from a volume");
            return Err(libc::EPERM);
        }
        self.tree.make_real(&place)?;
        let real = place.path();
        let version = (inode.0, held.size_bytes, held.modified);
        self.tree.add_real(real.clone());
        if self.programs.get(&real) != Some(&version) || !as_path(&real).exists() {
            let new = [&real, b".draconis-new".as_slice()].concat();
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
            let to = sys::open_at(libc::AT_FDCWD, &new, flags, 0o755)?;
            self.files.copy_out(&self.tree.volume, inode, &to)?;
            drop(to);
            std::fs::rename(as_path(&new), as_path(&real)).map_err(io_errno)?;
            self.programs.insert(real.clone(), version);
        }
        let head = self.tree.volume.read(inode, 0, 256).map_err(errno)?;
        if depth > 0
            && let Some(line) = head.strip_prefix(b"#!")
        {
            let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
            let interpreter =
                line.split(|byte| byte.is_ascii_whitespace()).next().unwrap_or_default();
            if !interpreter.is_empty() {
                return self.execute_path(call, CWD, interpreter, depth - 1);
            }
        }
        Ok(None)
    }

    /// A name at 0 asks for the list.
    fn xattr(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        flags: u64,
        name: u64,
        to: u64,
        len: u64,
    ) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        let value = match name {
            0 => {
                let names = self.tree.volume.xattr_names(inode).map_err(errno)?;
                names.into_iter().flat_map(|name| [name, vec![0]].concat()).collect()
            }
            name => self.tree.volume.xattr(inode, &self.string(call, name)?).map_err(errno)?,
        };
        if len > 0 {
            if value.len() as u64 > len {
                return Err(libc::ERANGE);
            }
            self.write(call, to, &value)?;
        }
        Ok(Some(Reply::Value(value.len() as i64)))
    }

    fn set_xattr(
        &mut self,
        call: &Notification,
        at: (u64, u64),
        flags: u64,
        name: u64,
        value: Option<(u64, u64, u64)>,
    ) -> Answer {
        let Some(inode) = self.target(call, at, flags, flags & NO_FOLLOW == 0)? else {
            return Ok(None);
        };
        self.require_owner(call, inode)?;
        let name = self.string(call, name)?;
        c_string(&name)?;
        let Some((value, len, how)) = value else {
            self.tree.volume.remove_xattr(inode, &name).map_err(errno)?;
            return done();
        };
        if len > 65536 {
            return Err(libc::E2BIG);
        }
        let value = self.read(call, value, len as usize)?;
        let how = match how {
            0 => XattrSet::Any,
            1 => XattrSet::Create,
            2 => XattrSet::Replace,
            _ => return Err(libc::EINVAL),
        };
        self.tree.volume.set_xattr(inode, &name, &value, how, false).map_err(errno)?;
        done()
    }
}
