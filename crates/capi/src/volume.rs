//! An open volume: its files by path, directories, open files.

use std::ffi::{CString, OsStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use draconis_access::{Error, File, OpenOptions, Result, Volume, VolumeLocation};
use draconis_exchange::contract::{AttributeChange, Attributes, SetTime, Time};
use draconis_ext::{Follow, RenameMode, XattrSet};
use rustix::io::Errno;

use crate::error::{require, run, run_counting, run_with_output};
use crate::maintenance::{draconis_place, host_path, options_of};
use crate::raw::{Bytes, CStrArg, CStrArrayArg, OutBuffer, null_error};

/// To be changed as well, alone.
pub const DRACONIS_WRITE: u32 = 1;
/// Make a file that is not there.
pub const DRACONIS_CREATE: u32 = 2;
/// It must not be there.
pub const DRACONIS_EXCLUSIVE: u32 = 4;
/// Cut it to nothing.
pub const DRACONIS_TRUNCATE: u32 = 8;
/// Of a symbolic link, itself instead of what it leads to.
pub const DRACONIS_NOFOLLOW: u32 = 16;
/// What is at the new name stays, and the call fails.
pub const DRACONIS_NOREPLACE: u32 = 32;
/// What is at the new name gets the old one.
pub const DRACONIS_EXCHANGE: u32 = 64;

/// An open volume. Any number of threads may use it together.
pub struct draconis_volume(pub(crate) Arc<Volume>);

/// An open file of a volume. Any number of threads may use it together: there is no position.
pub struct draconis_file(File);

/// What a directory held when it was opened. One thread at a time.
pub struct draconis_dir {
    entries: std::vec::IntoIter<draconis_access::DirEntry>,
    damage: Option<Error>,
    name: CString,
}

/// A moment: seconds since 1970, and nanoseconds after that.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct draconis_time {
    /// Seconds; negative before 1970.
    pub seconds: i64,
    /// 0 to 999999999.
    pub nanoseconds: u32,
}

/// What stat(2) says of a file.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_stat_data {
    /// Its number.
    pub inode: u32,
    /// Kind and permissions, as st_mode.
    pub mode: u32,
    /// Names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Of a device, its major number.
    pub device_major: u32,
    /// Of a device, its minor number.
    pub device_minor: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Room that it takes, in units of 512 bytes.
    pub blocks_512: u64,
    /// Last access.
    pub accessed: draconis_time,
    /// Last change of the contents.
    pub modified: draconis_time,
    /// Last change of the inode.
    pub changed: draconis_time,
}

/// A name in a directory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_entry {
    /// The name. Valid until the next call with this directory.
    pub name: *const c_char,
    /// The inode's number.
    pub inode: u32,
    /// What it is, as the kind in st_mode.
    pub kind: u32,
}

/// What there is to know of a volume.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_volume_info {
    /// "ext2", "ext3" or "ext4".
    pub kind: [c_char; 8],
    /// The label.
    pub label: [c_char; 20],
    /// The identity.
    pub uuid: [u8; 16],
    /// Length in bytes.
    pub size_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Not 0: unmounted properly.
    pub clean: c_int,
    /// Blocks.
    pub blocks: u64,
    /// Blocks that are free.
    pub free_blocks: u64,
    /// Inodes.
    pub inodes: u64,
    /// Inodes that are free.
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

/// Refuses flags that the call does not know.
fn check_flags(flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        more => Err(Error::new(Errno::INVAL, format!("flags {more:#x} mean nothing here"))),
    }
}

/// Opens the volume in image: a file, a block device, a partition of either, a disk image (qcow2,
/// VHDX; VHD, VMDK, Android sparse, gzip, zstd, xz: these are only read), or "STORE#NAME".
/// flags: 0 or DRACONIS_WRITE. place may be NULL. draconis_volume_close gives the result back.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_open(
    image: CStrArg,
    place: Option<&draconis_place>,
    flags: u32,
    volume: Option<&mut MaybeUninit<Option<Box<draconis_volume>>>>,
) -> c_int {
    run_with_output(volume, None, || {
        check_flags(flags, DRACONIS_WRITE)?;
        open(host_path(image, "image")?, &options_of(place), flags)
    })
}

/// The same of an image over others: backing_count files, of which each differs from the next.
/// They take the place of place's, and are only read.
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
        let mut place = options_of(place);
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

/// Makes all durable, marks the volume as unmounted, gives the image back and frees volume, also
/// when it fails. Files that are open answer EBADF from then on; they are still to be closed.
/// NULL is no failure.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_close(volume: Option<Box<draconis_volume>>) -> c_int {
    run(|| volume.map_or(Ok(()), |volume| volume.0.close()))
}

/// Makes durable all that was changed. Without it, or draconis_file_sync, changes are in memory
/// until there is much of them.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_volume_sync(volume: Option<&draconis_volume>) -> c_int {
    run(|| require(volume, "volume")?.0.sync())
}

/// What there is to know of a volume.
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

/// What stat(2) would say. flags: 0 or DRACONIS_NOFOLLOW.
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

/// Opens a directory to list it. draconis_dir_close gives it back.
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

/// The next name, in the order of the bytes, without "." and "..": 1, or 0 behind the last. Where
/// a part of the directory is damaged, what can be read comes first and then -EUCLEAN.
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
                    // Names hold no NUL: the volume refuses such.
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

/// Gives a directory back. NULL is taken.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_dir_close(dir: Option<Box<draconis_dir>>) {
    drop(dir);
}

/// Copies bytes to where C wants them, as many as there is room for; how many there are.
fn copy_out(bytes: &[u8], room: OutBuffer, len: usize) -> Result<u64> {
    let room = room.get(len, "the buffer")?;
    room.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
    Ok(bytes.len() as u64)
}

/// Where a symbolic link leads: up to len bytes of it go to buffer, without a NUL at the end. The
/// length of all of it, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_readlink(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_counting(|| {
        copy_out(&require(volume, "volume")?.0.read_link(path.get("path")?)?, buffer, len)
    })
}

/// An extended attribute, by its whole name such as "user.x": up to len bytes of it go to buffer.
/// The length of all of it, or a negative errno: ENODATA if there is none. flags: 0 or
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
    run_counting(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        let volume = require(volume, "volume")?;
        copy_out(&volume.0.xattr(path.get("path")?, name.get("name")?, follow(flags))?, buffer, len)
    })
}

/// The names of extended attributes, each with a NUL behind it: up to len bytes of them go to
/// buffer. The length of all of them, or a negative errno. flags: 0 or DRACONIS_NOFOLLOW.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_listxattr(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    flags: u32,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_counting(|| {
        check_flags(flags, DRACONIS_NOFOLLOW)?;
        let names = require(volume, "volume")?.0.xattr_names(path.get("path")?, follow(flags))?;
        let all: Vec<u8> = names.into_iter().flat_map(|name| [name, vec![0]].concat()).collect();
        copy_out(&all, buffer, len)
    })
}

/// Sets an extended attribute, by its whole name, to len bytes. flags: any of DRACONIS_NOFOLLOW and
/// DRACONIS_EXCLUSIVE: EEXIST if there is one of that name.
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

/// Removes an extended attribute: ENODATA if there is none of that name. flags: 0 or
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

/// Makes a directory with these permissions, of the user who runs the program.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_mkdir(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    mode: u32,
) -> c_int {
    run(|| require(volume, "volume")?.0.make_dir(path.get("path")?, mode))
}

/// Makes a symbolic link at path that leads to target.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_symlink(
    volume: Option<&draconis_volume>,
    target: CStrArg,
    path: CStrArg,
) -> c_int {
    run(|| require(volume, "volume")?.0.symlink(target.get("target")?, path.get("path")?))
}

/// Gives what is at from another name.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_link(
    volume: Option<&draconis_volume>,
    from: CStrArg,
    to: CStrArg,
) -> c_int {
    run(|| require(volume, "volume")?.0.link(from.get("from")?, to.get("to")?))
}

/// Removes a file, or whatever is no directory.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_unlink(volume: Option<&draconis_volume>, path: CStrArg) -> c_int {
    run(|| require(volume, "volume")?.0.unlink(path.get("path")?))
}

/// Removes an empty directory.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_rmdir(volume: Option<&draconis_volume>, path: CStrArg) -> c_int {
    run(|| require(volume, "volume")?.0.remove_dir(path.get("path")?))
}

/// Moves a name; what is at to is replaced, unless flags is DRACONIS_NOREPLACE or
/// DRACONIS_EXCHANGE.
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

/// Changes permissions. flags: 0 or DRACONIS_NOFOLLOW, here as below.
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

/// Sets the times of last access and of the last change of the contents.
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
/// DRACONIS_TRUNCATE; a file that is made gets these permissions. draconis_file_close gives it
/// back.
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

/// Reads up to len bytes from offset on. How many there were: fewer only at the end of the file;
/// or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_read(
    file: Option<&draconis_file>,
    offset: u64,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_counting(|| {
        let file = require(file, "file")?;
        Ok(file.0.read_at(offset, buffer.get(len, "the buffer")?)? as u64)
    })
}

/// Writes len bytes at offset. How many were: fewer where the volume became full; or a negative
/// errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_write(
    file: Option<&draconis_file>,
    offset: u64,
    bytes: Bytes,
    len: usize,
) -> i64 {
    run_counting(|| Ok(require(file, "file")?.0.write_at(offset, bytes.get(len, "bytes")?)? as u64))
}

/// Gives a file a length; what is new reads as zeros.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_truncate(file: Option<&draconis_file>, size_bytes: u64) -> c_int {
    run(|| require(file, "file")?.0.set_len(size_bytes))
}

/// What stat(2) would say of an open file.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_stat(
    file: Option<&draconis_file>,
    data: Option<&mut MaybeUninit<draconis_stat_data>>,
) -> c_int {
    run_with_output(data, draconis_stat_data::default(), || {
        Ok(require(file, "file")?.0.stat()?.into())
    })
}

/// Makes a file durable, and what leads to it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_sync(file: Option<&draconis_file>) -> c_int {
    run(|| require(file, "file")?.0.sync())
}

/// Gives a file back. What was written is durable after draconis_volume_close, or sync. NULL is
/// taken.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_file_close(file: Option<Box<draconis_file>>) {
    run(|| {
        drop(file);
        Ok(())
    });
}
