//! Open volumes: files by path, directories, open files.

use std::ffi::{CString, OsStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use draconis_access::{Error, File, OpenOptions, Result, Volume, VolumeLocation};
use draconis_ext::{Follow, RenameMode, XattrSet};
use draconis_types::{AttributeChange, Attributes, SetTime, Time};
use rustix::io::Errno;

use crate::error::{require, run, run_returning_count, run_with_output};
use crate::place::{draconis_place, host_path, to_location};
use crate::raw::{Bytes, CStrArg, CStrArrayArg, OutBuffer, null_error};

/// Open for writing, exclusively.
pub const DRACONIS_WRITE: u32 = 1;
/// Create the file if it is missing.
pub const DRACONIS_CREATE: u32 = 2;
/// Fail if it exists.
pub const DRACONIS_EXCLUSIVE: u32 = 4;
/// Truncate the file to length 0.
pub const DRACONIS_TRUNCATE: u32 = 8;
/// Do not follow a symbolic link.
pub const DRACONIS_NOFOLLOW: u32 = 16;
/// Fail if the new name exists.
pub const DRACONIS_NOREPLACE: u32 = 32;
/// Exchange the two names.
pub const DRACONIS_EXCHANGE: u32 = 64;

/// An open volume. Can be used by any number of threads together.
pub struct draconis_volume(pub(crate) Arc<Volume>);

/// An open file, without a file position. Can be used by any number of threads together.
pub struct draconis_file(File);

/// The contents of a directory when it was opened. For one thread at a time.
pub struct draconis_dir {
    entries: std::vec::IntoIter<draconis_access::DirEntry>,
    damage: Option<Error>,
    name: CString,
}

/// A time: seconds since 1970, and nanoseconds after that.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct draconis_time {
    /// Seconds; negative before 1970.
    pub seconds: i64,
    /// 0 to 999999999.
    pub nanoseconds: u32,
}

/// File attributes, as of stat(2).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_stat_data {
    /// Inode number.
    pub inode: u32,
    /// File type and permissions, as st_mode.
    pub mode: u32,
    /// Number of hard links.
    pub links: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Major number of a device.
    pub device_major: u32,
    /// Minor number of a device.
    pub device_minor: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Allocated space, in units of 512 bytes.
    pub blocks_512: u64,
    /// Last access.
    pub accessed: draconis_time,
    /// Last modification of the contents.
    pub modified: draconis_time,
    /// Last change of the inode.
    pub changed: draconis_time,
}

/// A directory entry.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_entry {
    /// The name. Valid until the next call with this directory.
    pub name: *const c_char,
    /// Inode number.
    pub inode: u32,
    /// File type, as in st_mode.
    pub kind: u32,
}

/// Information about a volume.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_volume_info {
    /// "ext2", "ext3" or "ext4".
    pub kind: [c_char; 8],
    /// The label.
    pub label: [c_char; 20],
    /// The UUID.
    pub uuid: [u8; 16],
    /// Length in bytes.
    pub size_bytes: u64,
    /// Block size.
    pub block_bytes: u32,
    /// Not 0: cleanly unmounted.
    pub clean: c_int,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of free blocks.
    pub free_blocks: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// Number of free inodes.
    pub free_inodes: u64,
}

impl From<Time> for draconis_time {
    fn from(Time { seconds, nanoseconds }: Time) -> Self {
        Self { seconds, nanoseconds }
    }
}

impl From<draconis_time> for Time {
    fn from(draconis_time { seconds, nanoseconds }: draconis_time) -> Self {
        Self { seconds, nanoseconds }
    }
}

impl From<Attributes> for draconis_stat_data {
    fn from(of: Attributes) -> Self {
        Self {
            inode: u32::try_from(of.node.0).unwrap_or(u32::MAX),
            mode: of.mode,
            links: of.links,
            uid: of.uid,
            gid: of.gid,
            device_major: of.device.0,
            device_minor: of.device.1,
            size_bytes: of.size_bytes,
            blocks_512: of.blocks_512,
            accessed: of.accessed.into(),
            modified: of.modified.into(),
            changed: of.changed.into(),
        }
    }
}

fn follow(flags: u32) -> Follow {
    if flags & DRACONIS_NOFOLLOW != 0 { Follow::No } else { Follow::Yes }
}

/// Refuses unknown flags.
fn check_flags(flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        more => Err(Error::new(Errno::INVAL, format!("flags {more:#x} mean nothing here"))),
    }
}

/// Opens the volume in image: a file, a block device, a partition of either, a disk image (qcow2,
/// VHDX; read-only: VHD, VMDK, Android sparse, gzip, zstd, xz), or "STORE#NAME". flags: 0 or
/// DRACONIS_WRITE. place may be NULL. draconis_volume_close frees the volume.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_open(
    image: CStrArg,
    place: Option<&draconis_place>,
    flags: u32,
    volume: Option<&mut MaybeUninit<Option<Box<draconis_volume>>>>,
) -> c_int {
    run_with_output(volume, None, || {
        check_flags(flags, DRACONIS_WRITE)?;
        open(host_path(image, "image")?, &to_location(place), flags)
    })
}

/// Opens an image with backing_count backing files, nearest first. They replace the backing file
/// in place, and are opened read-only.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_open_over(
    image: CStrArg,
    place: Option<&draconis_place>,
    backing: CStrArrayArg,
    backing_count: usize,
    flags: u32,
    volume: Option<&mut MaybeUninit<Option<Box<draconis_volume>>>>,
) -> c_int {
    run_with_output(volume, None, || {
        check_flags(flags, DRACONIS_WRITE)?;
        let mut place = to_location(place);
        let backing = backing.get(backing_count, "backing")?;
        place.backing =
            backing.into_iter().map(|name| OsStr::from_bytes(name).to_owned().into()).collect();
        open(host_path(image, "image")?, &place, flags)
    })
}

fn open(image: &Path, place: &VolumeLocation, flags: u32) -> Result<Option<Box<draconis_volume>>> {
    let opened = match flags & DRACONIS_WRITE {
        0 => Volume::open(image, place),
        _ => Volume::open_for_writing(image, place),
    };
    Ok(Some(Box::new(draconis_volume(opened?))))
}

/// Makes all changes durable, marks the volume as unmounted, releases the image and frees volume
/// even on failure. Open files then return EBADF; they must still be closed. Accepts
/// NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_close(volume: Option<Box<draconis_volume>>) -> c_int {
    run(|| volume.map_or(Ok(()), |volume| volume.0.close()))
}

/// Makes all changes durable. Without this or draconis_file_sync, changes stay in memory until they
/// exceed a limit.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_sync(volume: Option<&draconis_volume>) -> c_int {
    run(|| require(volume, "volume")?.0.sync())
}

/// Gets information about a volume.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_get_info(
    volume: Option<&draconis_volume>,
    info: Option<&mut MaybeUninit<draconis_volume_info>>,
) -> c_int {
    run_with_output(info, draconis_volume_info::default(), || {
        let of = require(volume, "volume")?.0.info()?;
        let mut info = draconis_volume_info {
            uuid: of.uuid,
            size_bytes: of.len_bytes,
            block_bytes: of.space.block_bytes,
            clean: of.clean.into(),
            blocks: of.space.blocks,
            free_blocks: of.space.free_blocks,
            inodes: of.space.inodes,
            free_inodes: of.space.free_inodes,
            ..draconis_volume_info::default()
        };
        // The last byte stays NUL.
        let copy = |into: &mut [c_char], from: &[u8]| {
            let room = into.len() - 1;
            into[..room].iter_mut().zip(from).for_each(|(to, byte)| *to = *byte as c_char);
        };
        copy(&mut info.kind, of.kind.as_bytes());
        copy(&mut info.label, &of.label);
        Ok(info)
    })
}

/// Gets the attributes of a file. flags: 0 or DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_stat(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    flags: u32,
    data: Option<&mut MaybeUninit<draconis_stat_data>>,
) -> c_int {
    run_with_output(data, draconis_stat_data::default(), || {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        Ok(require(volume, "volume")?.0.stat(path.get("path")?, follow(flags))?.into())
    })
}

/// Opens a directory for listing. draconis_dir_close frees it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_dir_open(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    dir: Option<&mut MaybeUninit<Option<Box<draconis_dir>>>>,
) -> c_int {
    run_with_output(dir, None, || {
        let (entries, damage) = require(volume, "volume")?.0.list(path.get("path")?)?;
        let entries = entries.into_iter();
        Ok(Some(Box::new(draconis_dir { entries, damage, name: CString::default() })))
    })
}

/// Gets the next name in byte order, without "." and "..": returns 1, or 0 at the end. In a damaged
/// directory, the readable names come first and then -EUCLEAN.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_dir_next(
    dir: Option<&mut draconis_dir>,
    entry: Option<&mut MaybeUninit<draconis_entry>>,
) -> c_int {
    let mut found = 0;
    let told = run_with_output(
        entry,
        draconis_entry { name: std::ptr::null(), inode: 0, kind: 0 },
        || {
            let dir = dir.ok_or_else(|| null_error("dir"))?;
            match dir.entries.next() {
                Some(next) => {
                    found = 1;
                    // Names contain no NUL: the volume rejects such names.
                    dir.name = CString::new(next.name).unwrap_or_default();
                    let kind = next.kind.mode_bits();
                    Ok(draconis_entry { name: dir.name.as_ptr(), inode: next.inode, kind })
                }
                None => match dir.damage.take() {
                    Some(damage) => Err(damage),
                    None => Ok(draconis_entry { name: std::ptr::null(), inode: 0, kind: 0 }),
                },
            }
        },
    );
    if told == 0 { found } else { told }
}

/// Closes a directory. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_dir_close(dir: Option<Box<draconis_dir>>) {
    drop(dir);
}

/// Copies as many bytes as fit to a C buffer; returns the full length.
fn copy_out(bytes: &[u8], room: OutBuffer, len: usize) -> Result<u64> {
    let room = room.get(len, "the buffer")?;
    room.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
    Ok(bytes.len() as u64)
}

/// Copies up to len bytes of a symbolic link's target to buffer, without a final NUL. Returns the
/// full length, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_readlink(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        copy_out(&require(volume, "volume")?.0.read_link(path.get("path")?)?, buffer, len)
    })
}

/// Copies up to len bytes of an extended attribute, given by full name such as "user.x", to buffer.
/// Returns the full length, or a negative errno: ENODATA if it does not exist. flags: 0 or
/// DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_getxattr(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    name: CStrArg,
    flags: u32,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        let volume = require(volume, "volume")?;
        copy_out(&volume.0.xattr(path.get("path")?, name.get("name")?, follow(flags))?, buffer, len)
    })
}

/// Copies up to len bytes of the names of extended attributes, each followed by a NUL, to buffer.
/// Returns the full length, or a negative errno. flags: 0 or DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_listxattr(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    flags: u32,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        let names = require(volume, "volume")?.0.xattr_names(path.get("path")?, follow(flags))?;
        let all: Vec<u8> = names.into_iter().flat_map(|name| [name, vec![0]].concat()).collect();
        copy_out(&all, buffer, len)
    })
}

/// Sets an extended attribute, given by full name, to len bytes. flags: any of DRACONIS_NOFOLLOW
/// and DRACONIS_EXCLUSIVE: EEXIST if it exists.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_setxattr(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    name: CStrArg,
    value: Bytes,
    len: usize,
    flags: u32,
) -> c_int {
    run(|| {
        check_flags(flags, DRACONIS_NOFOLLOW | DRACONIS_EXCLUSIVE)?;
        let how = match flags & DRACONIS_EXCLUSIVE {
            0 => XattrSet::Any,
            _ => XattrSet::Create,
        };
        let (path, name) = (path.get("path")?, name.get("name")?);
        let value = value.get(len, "value")?;
        require(volume, "volume")?.0.set_xattr(path, name, value, how, follow(flags))
    })
}

/// Removes an extended attribute: ENODATA if it does not exist. flags: 0 or
/// DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_removexattr(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    name: CStrArg,
    flags: u32,
) -> c_int {
    run(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        let (path, name) = (path.get("path")?, name.get("name")?);
        require(volume, "volume")?.0.remove_xattr(path, name, follow(flags))
    })
}

/// Creates a directory with these permissions, owned by the calling user.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_mkdir(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    mode: u32,
) -> c_int {
    run(|| require(volume, "volume")?.0.make_dir(path.get("path")?, mode))
}

/// Creates a symbolic link at path with this target.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_symlink(
    volume: Option<&draconis_volume>,
    target: CStrArg,
    path: CStrArg,
) -> c_int {
    run(|| require(volume, "volume")?.0.symlink(target.get("target")?, path.get("path")?))
}

/// Creates a hard link.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_link(
    volume: Option<&draconis_volume>,
    from: CStrArg,
    to: CStrArg,
) -> c_int {
    run(|| require(volume, "volume")?.0.link(from.get("from")?, to.get("to")?))
}

/// Removes a file that is no directory.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_unlink(volume: Option<&draconis_volume>, path: CStrArg) -> c_int {
    run(|| require(volume, "volume")?.0.unlink(path.get("path")?))
}

/// Removes an empty directory.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_rmdir(volume: Option<&draconis_volume>, path: CStrArg) -> c_int {
    run(|| require(volume, "volume")?.0.remove_dir(path.get("path")?))
}

/// Renames a file or directory; an existing file at to is replaced, unless flags is
/// DRACONIS_NOREPLACE or DRACONIS_EXCHANGE.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_rename(
    volume: Option<&draconis_volume>,
    from: CStrArg,
    to: CStrArg,
    flags: u32,
) -> c_int {
    run(|| {
        let how = match flags {
            0 => RenameMode::Replace,
            DRACONIS_NOREPLACE => RenameMode::NoReplace,
            DRACONIS_EXCHANGE => RenameMode::Exchange,
            _ => return check_flags(flags, 0),
        };
        require(volume, "volume")?.0.rename(from.get("from")?, to.get("to")?, how)
    })
}

fn set_attributes(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    flags: u32,
    change: AttributeChange,
) -> c_int {
    run(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        require(volume, "volume")?.0.set_attributes(path.get("path")?, follow(flags), &change)
    })
}

/// Changes permissions. flags, here and below: 0 or DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_chmod(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    mode: u32,
    flags: u32,
) -> c_int {
    set_attributes(
        volume,
        path,
        flags,
        AttributeChange { mode: Some(mode), ..AttributeChange::default() },
    )
}

/// Changes owner and group.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_chown(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    uid: u32,
    gid: u32,
    flags: u32,
) -> c_int {
    let change = AttributeChange { uid: Some(uid), gid: Some(gid), ..AttributeChange::default() };
    set_attributes(volume, path, flags, change)
}

/// Sets the access and modification times.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_utimes(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    accessed: draconis_time,
    modified: draconis_time,
    flags: u32,
) -> c_int {
    let change = AttributeChange {
        accessed: Some(SetTime::To(accessed.into())),
        modified: Some(SetTime::To(modified.into())),
        ..AttributeChange::default()
    };
    set_attributes(volume, path, flags, change)
}

/// Opens a regular file. flags: any of DRACONIS_WRITE, DRACONIS_CREATE, DRACONIS_EXCLUSIVE,
/// DRACONIS_TRUNCATE. A new file gets these permissions. draconis_file_close frees the
/// file.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_open(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    flags: u32,
    mode: u32,
    file: Option<&mut MaybeUninit<Option<Box<draconis_file>>>>,
) -> c_int {
    run_with_output(file, None, || {
        let known = DRACONIS_WRITE | DRACONIS_CREATE | DRACONIS_EXCLUSIVE | DRACONIS_TRUNCATE;
        check_flags(flags, known)?;
        let has = |flag: u32| flags & flag != 0;
        let how = OpenOptions {
            write: has(DRACONIS_WRITE),
            create: has(DRACONIS_CREATE),
            exclusive: has(DRACONIS_EXCLUSIVE),
            truncate: has(DRACONIS_TRUNCATE),
            mode,
        };
        let opened = File::open(&require(volume, "volume")?.0, path.get("path")?, how)?;
        Ok(Some(Box::new(draconis_file(opened))))
    })
}

/// Reads up to len bytes from offset. Returns the number of bytes read, which is short only at the
/// end of the file, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_read(
    file: Option<&draconis_file>,
    offset: u64,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        let file = require(file, "file")?;
        Ok(file.0.read_at(offset, buffer.get(len, "the buffer")?)? as u64)
    })
}

/// Writes len bytes at offset. Returns the number of bytes written, which is short if the volume
/// became full, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_write(
    file: Option<&draconis_file>,
    offset: u64,
    bytes: Bytes,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        Ok(require(file, "file")?.0.write_at(offset, bytes.get(len, "bytes")?)? as u64)
    })
}

/// Sets the length of a file; new bytes read as zeros.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_truncate(file: Option<&draconis_file>, size_bytes: u64) -> c_int {
    run(|| require(file, "file")?.0.set_len(size_bytes))
}

/// Gets the attributes of an open file.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_stat(
    file: Option<&draconis_file>,
    data: Option<&mut MaybeUninit<draconis_stat_data>>,
) -> c_int {
    run_with_output(data, draconis_stat_data::default(), || {
        Ok(require(file, "file")?.0.stat()?.into())
    })
}

/// Makes a file and its directory entry durable.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_sync(file: Option<&draconis_file>) -> c_int {
    run(|| require(file, "file")?.0.sync())
}

/// Closes a file. Its data is durable after draconis_volume_close or a sync. Accepts
/// NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_close(file: Option<Box<draconis_file>>) {
    run(|| {
        drop(file);
        Ok(())
    });
}
