//! Decodes the kernel's requests to changes (`struct fuse_*_in` of `linux/fuse.h`).
//!
//! The offsets below count from the end of the header.

use draconis_types::injected_fault::InjectedFault;
use draconis_types::{
    AttributeChange, AttributeName, Credentials, FallocateMode, Name, Node, Refusal, SetTime, Time,
};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::Change;
use crate::fuse::decoder::{
    self, CREATE, FALLOCATE, HEADER_BYTES, Header, IOC_FSSETXATTR, IOC_SETFLAGS, IOCTL, LINK,
    MKDIR, MKNOD, REMOVEXATTR, RENAME, RENAME2, RMDIR, SETATTR, SETXATTR, SYMLINK, TMPFILE, UNLINK,
    WRITE, WRITE_CACHE, WRITE_DATA_OFFSET, WRITE_KILL_SUIDGID, WRITE_LOCKOWNER,
    access_from_open_flags, c_string, u32_at, u64_at,
};

/// The longest target of a symbolic link, in bytes.
const MAX_SYMLINK_TARGET_BYTES: usize = 4096;
/// Offset of the project id in a `struct get_fsxattr`.
const FSX_PROJID_OFFSET: usize = 12;
/// Flag of a new ACL: the caller is not in the group, so setgid is cleared.
const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;

/// Bits of `valid` in `struct fuse_setattr_in`.
mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

impl Change {
    /// Decodes a request for which [`Header::is_mutation`] is true. `detached_len` bytes of write
    /// data are not in `request`.
    ///
    /// # Errors
    /// `EINVAL` for a truncated request; the errno of an invalid name; `EOPNOTSUPP` for operations
    /// that no tree implements.
    pub(in crate::fuse) fn decode_change(
        header: Header,
        request: &[u8],
        detached_len: usize,
        setxattr_ext: bool,
    ) -> Result<Self, Errno> {
        let body = request.get(HEADER_BYTES..).ok_or(Errno::INVAL)?;
        let u32_of = |at| u32_at(body, at).ok_or(Errno::INVAL);
        let u64_of = |at| u64_at(body, at).map(Node).ok_or(Errno::INVAL);
        match header.opcode {
            SETATTR => {
                let caller = Credentials { uid: header.uid, gid: header.gid };
                let change = decode_attribute_change(body, caller).ok_or(Errno::INVAL)?;
                Ok(Self::SetAttributes(change))
            }
            SYMLINK => {
                let [name, target] = two_c_strings_at(body, 0)?;
                if target.len() > MAX_SYMLINK_TARGET_BYTES {
                    return Err(Errno::NAMETOOLONG);
                }
                Ok(Self::Symlink { name: parse_name(name)?, target: target.to_vec() })
            }
            MKNOD => Ok(Self::MakeNode {
                name: name_at(body, 16)?,
                mode: u32_of(0)?,
                umask: u32_of(8)?,
                device: decode_rdev(u32_of(4)?),
            }),
            MKDIR => Ok(Self::MakeDirectory {
                name: name_at(body, 8)?,
                mode: u32_of(0)?,
                umask: u32_of(4)?,
            }),
            UNLINK => Ok(Self::Unlink { name: name_at(body, 0)? }),
            RMDIR => Ok(Self::RemoveDirectory { name: name_at(body, 0)? }),
            RENAME | RENAME2 => {
                let (flags, fixed_bytes) =
                    if header.opcode == RENAME { (0, 8) } else { (u32_of(8)?, 16) };
                let [name, new_name] = two_c_strings_at(body, fixed_bytes)?;
                let (name, new_name) = (parse_name(name)?, Box::new(parse_name(new_name)?));
                Ok(Self::Rename { name, to: u64_of(0)?, new_name, flags })
            }
            LINK => Ok(Self::Link { node: u64_of(0)?, name: name_at(body, 8)? }),
            WRITE => decode_write(request, body, detached_len).map(Self::Write).ok_or(Errno::INVAL),
            SETXATTR => {
                let set = decode_set_xattr(request, body, setxattr_ext);
                set.map(Self::SetXattr).ok_or(Errno::INVAL)
            }
            REMOVEXATTR => {
                let name = c_string(body).ok_or(Errno::INVAL)?;
                let name = AttributeName::new(name).map_err(Refusal::errno)?;
                Ok(Self::RemoveXattr { name })
            }
            CREATE => Ok(Self::Create(decoder::Create {
                name: name_at(body, 16)?,
                mode: u32_of(4)?,
                umask: u32_of(8)?,
                access: access_from_open_flags(u32_of(0)?),
                exclusive: u32_of(0)? & OFlags::EXCL.bits() != 0,
            })),
            TMPFILE => Ok(Self::CreateTmpfile { mode: u32_of(4)?, umask: u32_of(8)? }),
            FALLOCATE => {
                let how = fallocate_mode(u32_of(24)?).ok_or(Errno::OPNOTSUPP)?;
                Ok(Self::Fallocate { offset: u64_of(8)?.0, len: u64_of(16)?.0, how })
            }
            IOCTL if IOC_SETFLAGS.contains(&u32_of(12)?) => {
                Ok(Self::SetFlags { flags: u32_of(32)? })
            }
            // Only project id 0 is supported.
            IOCTL if u32_of(12)? == IOC_FSSETXATTR && u32_of(32 + FSX_PROJID_OFFSET)? == 0 => {
                Ok(Self::SetXflags { xflags: u32_of(32)? })
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

/// Returns the NUL-terminated string at `at`.
fn c_string_at(body: &[u8], at: usize) -> Result<&[u8], Errno> {
    body.get(at..).and_then(c_string).ok_or(Errno::INVAL)
}

/// Returns two NUL-terminated strings, the first at `at`.
fn two_c_strings_at(body: &[u8], at: usize) -> Result<[&[u8]; 2], Errno> {
    let first = c_string_at(body, at)?;
    Ok([first, c_string_at(body, at + first.len() + 1)?])
}

fn parse_name(bytes: &[u8]) -> Result<Name, Errno> {
    Name::new(bytes).map_err(Refusal::errno)
}

fn name_at(body: &[u8], at: usize) -> Result<Name, Errno> {
    parse_name(c_string_at(body, at)?)
}

fn decode_write(request: &[u8], body: &[u8], detached_len: usize) -> Option<decoder::Write> {
    let (len, flags) = (u32_at(body, 16)?, u32_at(body, 20)?);
    let there = request.len().checked_sub(WRITE_DATA_OFFSET)? + detached_len;
    (len as usize <= there).then_some(decoder::Write {
        offset: u64_at(body, 8)?,
        len,
        direct: flags & WRITE_LOCKOWNER != 0,
        from_cache: flags & WRITE_CACHE != 0,
        clear_privileges: flags & WRITE_KILL_SUIDGID != 0,
    })
}

fn decode_set_xattr(request: &[u8], body: &[u8], long: bool) -> Option<decoder::SetXattr> {
    let fixed_bytes = if long { 16 } else { 8 };
    let name = c_string(body.get(fixed_bytes..)?)?;
    let from = HEADER_BYTES + fixed_bytes + name.len() + 1;
    let value = from..from.checked_add(u32_at(body, 0)? as usize)?;
    request.get(value.clone())?;
    let flags = if long { u32_at(body, 8)? } else { 0 };
    Some(decoder::SetXattr {
        name: AttributeName::new(name).ok()?,
        value,
        flags: u32_at(body, 4)?,
        clear_setgid: flags & SETXATTR_ACL_KILL_SGID != 0,
    })
}

/// Unpacks major and minor number, as the kernel packs them for user space.
fn decode_rdev(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00))
}

/// Returns the operation of a `fallocate` mode, if ext volumes have it. The kernel itself refuses
/// to collapse, insert or unshare a range.
fn fallocate_mode(mode: u32) -> Option<FallocateMode> {
    let (keep, punch, zero) = (
        FallocateFlags::KEEP_SIZE.bits(),
        FallocateFlags::PUNCH_HOLE.bits(),
        FallocateFlags::ZERO_RANGE.bits(),
    );
    let keep_size = mode & keep != 0;
    match mode & !keep {
        0 if keep_size => Some(FallocateMode::KeepSize),
        0 => Some(FallocateMode::Allocate),
        mode if mode == punch && keep_size => Some(FallocateMode::PunchHole),
        mode if mode == zero => Some(FallocateMode::ZeroRange { keep_size }),
        _ => None,
    }
}

/// Decodes `struct fuse_setattr_in`. A new owner clears setuid and setgid for any caller. So does a
/// change without attributes: the kernel sends it before an unprivileged caller writes or punches a
/// hole. A new length has its own flag.
fn decode_attribute_change(body: &[u8], caller: Credentials) -> Option<AttributeChange> {
    body.get(..88)?;
    let valid = u32_at(body, 0)?;
    let has = |bits: u32| valid & bits != 0;
    let time = |to: u32, now: u32, seconds_at: usize, nanoseconds_at: usize| {
        if has(now) {
            return Some(SetTime::Now);
        }
        let seconds = u64_at(body, seconds_at)? as i64;
        let nanoseconds = u32_at(body, nanoseconds_at)?.min(999_999_999);
        has(to).then_some(SetTime::To(Time { seconds, nanoseconds }))
    };
    let owner = fattr::UID | fattr::GID;
    let something = owner | fattr::MODE | fattr::SIZE | fattr::ATIME | fattr::MTIME | fattr::CTIME;
    let announces_a_write = !has(something) && !InjectedFault::Privileges.is_made();
    let clears_privileges = has(owner | fattr::KILL_SUIDGID) || announces_a_write;
    let u32_if = |bit, at| if has(bit) { u32_at(body, at) } else { None };
    Some(AttributeChange {
        mode: u32_if(fattr::MODE, 68),
        uid: u32_if(fattr::UID, 76),
        gid: u32_if(fattr::GID, 80),
        size_bytes: u64_at(body, 16).filter(|_| has(fattr::SIZE)),
        accessed: time(fattr::ATIME, fattr::ATIME_NOW, 32, 56),
        modified: time(fattr::MTIME, fattr::MTIME_NOW, 40, 60),
        changed: time(fattr::CTIME, 0, 48, 64),
        clear_privileges: clears_privileges.then_some(caller),
    })
}

#[cfg(test)]
mod tests {
    use draconis_types::Access;

    use super::*;

    fn encode_request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[16..24].copy_from_slice(&12_u64.to_ne_bytes());
        bytes[24..28].copy_from_slice(&1_u32.to_ne_bytes());
        bytes[28..32].copy_from_slice(&2_u32.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn decode_request(bytes: &[u8]) -> Result<Change, Errno> {
        Change::decode_change(Header::parse(bytes).unwrap(), bytes, 0, true)
    }

    fn write_request(len: u32, flags: u32, data: usize) -> Vec<u8> {
        let mut body = vec![0; 40 + data];
        body[8..16].copy_from_slice(&4096_u64.to_ne_bytes());
        body[16..20].copy_from_slice(&len.to_ne_bytes());
        body[20..24].copy_from_slice(&flags.to_ne_bytes());
        encode_request(WRITE, &body)
    }

    fn words_to_bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn file_name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    /// A request of every opcode that changes the tree.
    fn all_change_requests() -> Vec<Vec<u8>> {
        let ioctl = |command: u32| {
            let mut body = vec![0; 32 + decoder::FSXATTR_BYTES];
            body[12..16].copy_from_slice(&command.to_ne_bytes());
            encode_request(IOCTL, &body)
        };
        let fixed = |opcode, len: usize, rest: &[u8]| {
            encode_request(opcode, &[&vec![0; len], rest].concat())
        };
        let mut all = vec![
            fixed(SETATTR, 88, b""),
            fixed(SYMLINK, 0, b"name\0target\0"),
            fixed(MKNOD, 16, b"name\0"),
            fixed(MKDIR, 8, b"name\0"),
            fixed(UNLINK, 0, b"name\0"),
            fixed(RMDIR, 0, b"name\0"),
            fixed(RENAME, 8, b"name\0new\0"),
            fixed(RENAME2, 16, b"name\0new\0"),
            fixed(LINK, 8, b"name\0"),
            write_request(5, 0, 5),
            fixed(SETXATTR, 16, b"user.a\0"),
            fixed(REMOVEXATTR, 0, b"user.a\0"),
            fixed(CREATE, 16, b"name\0"),
            fixed(FALLOCATE, 32, b""),
            fixed(TMPFILE, 16, b"name\0"),
        ];
        all.extend(IOC_SETFLAGS.into_iter().chain([IOC_FSSETXATTR]).map(ioctl));
        all
    }

    #[test]
    fn all_mutations_and_only_mutations_are_decoded() {
        let all = all_change_requests();
        for bytes in &all {
            let header = Header::parse(bytes).unwrap();
            assert!(header.is_mutation(bytes), "opcode {}", header.opcode);
            assert!(decode_request(bytes).is_ok(), "opcode {}", header.opcode);
        }
        for opcode in 0..1000 {
            let bytes = encode_request(opcode, &[0; 200]);
            if Header::parse(&bytes).unwrap().is_mutation(&bytes) {
                let has = |it: &Vec<u8>| Header::parse(it).unwrap().opcode == opcode;
                assert!(all.iter().any(has), "opcode {opcode}");
            } else {
                assert_eq!(decode_request(&bytes), Err(Errno::OPNOTSUPP), "opcode {opcode}");
            }
        }
    }

    #[test]
    fn truncated_request_is_invalid() {
        for whole in all_change_requests() {
            let least =
                if u32_at(&whole, 4) == Some(FALLOCATE) { whole.len() - 4 } else { whole.len() };
            for len in HEADER_BYTES..least {
                let refused = decode_request(&whole[..len]);
                // Trailing bytes of some requests are ignored.
                assert!(refused.is_err() || is_optional(&whole, len), "{whole:?} at {len}");
            }
        }
        assert_eq!(decode_request(&write_request(6, 0, 5)), Err(Errno::INVAL));
    }

    /// Returns true if the bytes of a request from `len` on are ignored.
    fn is_optional(request: &[u8], len: usize) -> bool {
        let header = Header::parse(request).unwrap();
        match header.opcode {
            IOCTL => len >= HEADER_BYTES + 36,
            TMPFILE => len >= HEADER_BYTES + 12,
            _ => false,
        }
    }

    #[test]
    fn write_data_is_decoded_in_place() {
        let bytes = write_request(5, WRITE_KILL_SUIDGID | 1, 5);
        let write = decoder::Write {
            offset: 4096,
            len: 5,
            direct: false,
            from_cache: true,
            clear_privileges: true,
        };
        assert_eq!(decode_request(&bytes), Ok(Change::Write(write)));
        assert_eq!(bytes.len() - WRITE_DATA_OFFSET, 5);
    }

    #[test]
    fn two_names_are_split() {
        let mut body = vec![0; 16];
        (body[0], body[8]) = (7, 2);
        body.extend_from_slice(b"old\0new\0");
        let to = Node(7);
        let both = (file_name(b"old"), Box::new(file_name(b"new")));
        let rename = Change::Rename { name: both.0, to, new_name: both.1, flags: 2 };
        assert_eq!(decode_request(&encode_request(RENAME2, &body)), Ok(rename));
        let symlink = Change::Symlink { name: file_name(b"a"), target: b"../b".to_vec() };
        assert_eq!(decode_request(&encode_request(SYMLINK, b"a\0../b\0")), Ok(symlink));
        assert_eq!(decode_request(&encode_request(SYMLINK, b"a\0../b")), Err(Errno::INVAL));
        let long = [b"a\0", vec![b'x'; MAX_SYMLINK_TARGET_BYTES + 1].as_slice(), b"\0"].concat();
        assert_eq!(decode_request(&encode_request(SYMLINK, &long)), Err(Errno::NAMETOOLONG));
        let long = [vec![b'x'; 256].as_slice(), b"\0"].concat();
        assert_eq!(decode_request(&encode_request(UNLINK, &long)), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn create_and_tmpfile_are_decoded() {
        let mut body =
            words_to_bytes(&[(OFlags::WRONLY | OFlags::EXCL).bits(), 0o100_644, 0o22, 0]);
        body.extend_from_slice(b"file\0");
        let access = Access { write: true, ..Access::default() };
        let (mode, umask) = (0o100_644, 0o22);
        let create =
            decoder::Create { name: file_name(b"file"), mode, umask, access, exclusive: true };
        assert_eq!(decode_request(&encode_request(CREATE, &body)), Ok(Change::Create(create)));
        let unnamed = Change::CreateTmpfile { mode, umask };
        assert_eq!(decode_request(&encode_request(TMPFILE, &body)), Ok(unnamed));
    }

    #[test]
    fn setxattr_is_decoded_in_both_header_lengths() {
        for long in [true, false] {
            let mut body = vec![0; if long { 16 } else { 8 }];
            (body[0], body[4]) = (5, 2);
            if long {
                body[8] = 1;
            }
            body.extend_from_slice(b"user.a\0value");
            let bytes = encode_request(SETXATTR, &body);
            let header = Header::parse(&bytes).unwrap();
            let Ok(Change::SetXattr(set)) = Change::decode_change(header, &bytes, 0, long) else {
                panic!()
            };
            assert_eq!((&bytes[set.value.clone()], set.flags), (&b"value"[..], 2));
            assert_eq!((set.name.as_bytes(), set.clear_setgid), (&b"user.a"[..], long));
            let cut = Change::decode_change(header, &bytes[..bytes.len() - 1], 0, long);
            assert_eq!(cut, Err(Errno::INVAL));
        }
    }

    #[test]
    fn device_numbers_match_kernel_encoding() {
        assert_eq!(decode_rdev(0x0103), (1, 3));
        let (major, minor) = (0xfff, 0xf_ffff);
        let packed = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
        assert_eq!(decode_rdev(packed), (major, minor));
    }

    #[test]
    fn setattr_valid_mask_selects_attributes() {
        let caller = Credentials { uid: 1, gid: 2 };
        let change = |valid: u32| {
            let mut body = vec![0; 88];
            body[..4].copy_from_slice(&valid.to_ne_bytes());
            body[40..48].copy_from_slice(&(-5_i64).to_ne_bytes());
            body[60..64].copy_from_slice(&9_u32.to_ne_bytes());
            body[68..72].copy_from_slice(&0o100_600_u32.to_ne_bytes());
            body[76..80].copy_from_slice(&7_u32.to_ne_bytes());
            match decode_request(&encode_request(SETATTR, &body)) {
                Ok(Change::SetAttributes(change)) => change,
                other => panic!("{other:?}"),
            }
        };
        let modified = Some(SetTime::To(Time { seconds: -5, nanoseconds: 9 }));
        let mode = Some(0o100_600);
        let expected = AttributeChange { mode, modified, ..AttributeChange::default() };
        assert_eq!(change(fattr::MODE | fattr::MTIME), expected);
        let (uid, accessed) = (Some(7), Some(SetTime::Now));
        let clear_privileges = Some(caller);
        let expected =
            AttributeChange { uid, accessed, clear_privileges, ..AttributeChange::default() };
        assert_eq!(change(fattr::UID | fattr::ATIME_NOW | fattr::ATIME), expected);
        // A change without attributes announces a write by a caller who may not keep privileges.
        assert_eq!(change(0).clear_privileges, Some(caller));
        assert_eq!(change(fattr::SIZE).clear_privileges, None);
    }

    #[test]
    fn fallocate_modes_are_decoded() {
        let (keep, punch, zero) = (1, 2, 16);
        assert_eq!(fallocate_mode(0), Some(FallocateMode::Allocate));
        assert_eq!(fallocate_mode(keep), Some(FallocateMode::KeepSize));
        assert_eq!(fallocate_mode(punch | keep), Some(FallocateMode::PunchHole));
        assert_eq!(fallocate_mode(zero), Some(FallocateMode::ZeroRange { keep_size: false }));
        // A hole that would move the end, collapsing, inserting.
        for mode in [punch, 8, 32, punch | zero] {
            assert_eq!(fallocate_mode(mode), None);
        }
    }
}
