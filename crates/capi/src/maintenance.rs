//! Operations on whole volumes: create, fill, resize, tune, check, archive.

use std::ffi::{CString, OsStr, c_int, c_void};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

use draconis_access::overwrite::OverwritePermission;
use draconis_access::resize::ResizeOutcome;
use draconis_access::tar::SparseFormat;
use draconis_access::tuning::TuneOptions;
use draconis_access::volume::image_format;
use draconis_access::{Error, NewVolume, Result, Volume};
use draconis_ext::mkfs::FreeSpace;
use draconis_ext::tune::TuneChanges;
use rustix::io::Errno;

use crate::error::{require, run, run_returning_count, run_with_output};
use crate::place::{draconis_place, host_path, to_location};
use crate::raw::{CStrArg, CStrArrayArg, null_error};
use crate::volume::draconis_volume;

/// Options for a new volume. All zero except the size: ext4 with the defaults of mke2fs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_format_options {
    /// Length in bytes; 0: that of the image.
    pub size_bytes: u64,
    /// "ext2", "ext3" or "ext4"; NULL: "ext4".
    pub kind: CStrArg,
    /// Label of at most 16 bytes; NULL: none.
    pub label: CStrArg,
    /// Features to set, or with ^ to clear, as mke2fs -O spells them; NULL: the defaults.
    pub features: CStrArg,
    /// Block size, 1024 to 65536; 0: depends on the size of the volume.
    pub block_bytes: u32,
    /// Not 0: overwrite an existing ext volume. Other recognised contents are never
    /// overwritten.
    pub force: c_int,
}

/// Sources for filling a new volume. All zero: none, and nothing is excluded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_fill_options {
    /// A directory, or tar archives (plain, gzip, zstd, xz) and container images ("oci:DIR:TAG",
    /// "oci-archive:FILE:TAG", "docker-archive:FILE:TAG"), each laid over those before.
    pub from: CStrArrayArg,
    /// Number of sources.
    pub from_count: usize,
    /// Patterns of names to exclude, as for tar --exclude.
    pub exclude: CStrArrayArg,
    /// Number of patterns.
    pub exclude_count: usize,
    /// Platform to choose from a multi-platform image, such as "linux/arm64"; NULL: this machine's.
    pub platform: CStrArg,
    /// "qcow2" or "vhdx": create a disk image that contains the volume; NULL: raw.
    pub image_format: CStrArg,
    /// Free space to add if the size is computed from the sources.
    pub free_bytes: u64,
    /// Limit for the decompressed size of an archive; 0: 16 GiB plus 100 times its length.
    pub limit_bytes: u64,
    /// Not 0: set the owner of all files to uid and gid.
    pub give: c_int,
    /// User ID for give.
    pub uid: u32,
    /// Group ID for give.
    pub gid: u32,
    /// Not 0: set the owner of all files to root, and clear group and other permissions.
    pub squash: c_int,
    /// Not 0: equal sources give equal bytes, on any machine and at any time.
    pub reproducible: c_int,
    /// Not 0: the smallest volume that holds the source, also on a longer device. Not with a size.
    pub min: c_int,
    /// Free space as a percentage of the volume, up to 95, instead of free_bytes.
    pub free_percent: u32,
    /// Reserved for later versions; all zero.
    pub later: [u64; 7],
}

/// Changes of superblock settings. All zero: none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_tune_options {
    /// Label of at most 16 bytes, empty for none; NULL: unchanged.
    pub label: CStrArg,
    /// A UUID, "random" or "clear"; NULL: unchanged.
    pub uuid: CStrArg,
    /// Features to set, or with ^ to clear, as tune2fs -O spells them; NULL: unchanged.
    pub features: CStrArg,
    /// Reserved blocks: a number, or a percentage ("5%"); NULL: unchanged.
    pub reserved: CStrArg,
    /// Reaction of the kernel to errors: 1 continue, 2 remount read-only, 3 panic; 0: unchanged.
    pub errors: u16,
    /// Maximum mount count before a check; -1: no limit; 0: unchanged.
    pub max_mounts: i32,
    /// Reserved for later versions; all zero.
    pub later: [u64; 8],
}

/// Result of a check.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_check_report {
    /// Not 0: e2fsck -fn would report nothing.
    pub clean: c_int,
    /// Not 0: the check completed all passes.
    pub complete: c_int,
    /// Number of problems found, reported or not.
    pub complaints: u64,
    /// Inodes in use.
    pub used_inodes: u64,
    /// Inodes of the volume.
    pub inodes: u64,
    /// Blocks in use.
    pub used_blocks: u64,
    /// Blocks of the volume.
    pub blocks: u64,
}

/// Callback for a problem; the text is valid during the call.
pub type draconis_complaint_fn =
    Option<extern "C" fn(context: *mut c_void, complaint: *const std::ffi::c_char)>;

/// Callback that takes all the bytes of a piece of an archive; returns an errno, or 0.
pub type draconis_write_fn =
    Option<extern "C" fn(context: *mut c_void, bytes: *const c_void, len: usize) -> c_int>;

/// Converts the C struct to the specification of a new volume.
fn new_volume(options: Option<&draconis_format_options>) -> Result<NewVolume> {
    let mut new = NewVolume::default();
    let Some(options) = options else { return Ok(new) };
    if let Some(label) = options.label.as_optional_bytes() {
        new.label = label.to_vec();
    }
    if let Some(kind) = optional_utf8(options.kind, "kind")? {
        new.kind = kind.to_owned();
    }
    new.features = optional_utf8(options.features, "features")?.unwrap_or_default().to_owned();
    new.len_bytes = (options.size_bytes > 0).then_some(options.size_bytes);
    new.block_bytes = (options.block_bytes > 0).then_some(options.block_bytes);
    new.force = OverwritePermission::from_force_flag(options.force != 0);
    Ok(new)
}

/// Converts an optional C string to UTF-8.
pub(crate) fn optional_utf8<'a>(text: CStrArg, what: &str) -> Result<Option<&'a str>> {
    let read = text.as_optional_bytes().map(std::str::from_utf8).transpose();
    read.map_err(|_| Error::new(Errno::INVAL, format!("{what} is no text in UTF-8")))
}

/// Creates an empty volume in image: a file, which is created if missing, a block device, or
/// "STORE#NAME", a disk in a store. options may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_format(
    image: CStrArg,
    options: Option<&draconis_format_options>,
) -> c_int {
    run(|| Volume::create(host_path(image, "image")?, &new_volume(options)?).map(drop))
}

/// Creates a volume as draconis_format does, and fills it. options may be NULL; without a size, a
/// file becomes as long as its contents need. note may be NULL; it is called in this thread with a
/// sentence for each kind of item that is skipped.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_format_filled(
    image: CStrArg,
    options: Option<&draconis_format_options>,
    fill: Option<&draconis_fill_options>,
    note: draconis_complaint_fn,
    context: *mut c_void,
) -> c_int {
    run(|| {
        let mut new = new_volume(options)?;
        let fill = require(fill, "fill")?;
        check_reserved_fields_zero(&fill.later)?;
        let from = fill.from.get(fill.from_count, "from")?;
        new.from = from.into_iter().map(|name| OsStr::from_bytes(name).to_owned().into()).collect();
        let exclude = fill.exclude.get(fill.exclude_count, "exclude")?;
        new.exclude = exclude.into_iter().map(<[u8]>::to_vec).collect();
        let wrong = |why: &str| Error::new(Errno::INVAL, why);
        let platform = optional_utf8(fill.platform, "platform")?.map(str::parse).transpose();
        new.platform = platform.map_err(wrong)?;
        let format = optional_utf8(fill.image_format, "image_format")?;
        new.image_format = image_format(format)?;
        new.min = fill.min != 0;
        new.free = match (fill.free_bytes, fill.free_percent) {
            (0, 0) => FreeSpace::Usual,
            (free @ 1.., 0) if !new.min => FreeSpace::Bytes(free),
            (0, part @ 1..=95) if !new.min => FreeSpace::Ppm(part * 10_000),
            _ => return Err(wrong("free space: free_bytes, free_percent up to 95, or min")),
        };
        if new.min && new.len_bytes.is_some() {
            return Err(wrong("min and size_bytes exclude each other"));
        }
        new.max_unpacked_bytes = (fill.limit_bytes > 0).then_some(fill.limit_bytes);
        new.owner_override = (fill.give != 0).then_some((fill.uid, fill.gid));
        new.squash = fill.squash != 0;
        new.reproducible = fill.reproducible != 0;
        for text in &Volume::create(host_path(image, "image")?, &new)?.notes {
            call_note_callback(note, context, text);
        }
        Ok(())
    })
}

/// Grows the volume in image to size_bytes, or with 0 to the whole file or device. A file is
/// extended with a hole. grown and place may be NULL; grown gets the new length. After an
/// interruption the volume is unchanged, or growing it again completes the change.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_grow(
    image: CStrArg,
    place: Option<&draconis_place>,
    size_bytes: u64,
    grown: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    resize(grown, || {
        let size = (size_bytes > 0).then_some(size_bytes);
        Volume::grow(host_path(image, "image")?, &to_location(place), size)
    })
}

/// Shrinks the volume in image to size_bytes, or with 0 to its minimum. Data beyond the new end is
/// moved, inodes there get new numbers, and a file is truncated after the volume. The rest is as
/// for draconis_grow.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_shrink(
    image: CStrArg,
    place: Option<&draconis_place>,
    size_bytes: u64,
    shrunk: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    resize(shrunk, || {
        let size = (size_bytes > 0).then_some(size_bytes);
        Volume::shrink(host_path(image, "image")?, &to_location(place), size)
    })
}

fn resize(
    out: Option<&mut MaybeUninit<u64>>,
    work: impl FnOnce() -> Result<ResizeOutcome>,
) -> c_int {
    let out = out.map(|out| out.write(0));
    run(|| {
        let len_bytes = work()?.len_bytes();
        if let Some(out) = out {
            *out = len_bytes;
        }
        Ok(())
    })
}

/// Changes superblock settings of the volume in image. place may be NULL. Without changes, an
/// interrupted change is completed.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_tune(
    image: CStrArg,
    place: Option<&draconis_place>,
    options: Option<&draconis_tune_options>,
) -> c_int {
    run(|| {
        let options = require(options, "options")?;
        check_reserved_fields_zero(&options.later)?;
        let words = TuneOptions {
            uuid: optional_utf8(options.uuid, "uuid")?,
            reserved: optional_utf8(options.reserved, "reserved")?,
            features: optional_utf8(options.features, "features")?,
            max_mounts: (options.max_mounts != 0).then_some(options.max_mounts),
        };
        let changes = TuneChanges {
            label: options.label.as_optional_bytes().map(<[u8]>::to_vec),
            errors: (options.errors > 0).then_some(options.errors),
            ..words.parse()?
        };
        Volume::tune(host_path(image, "image")?, &to_location(place), &changes)
    })
}

/// Refuses nonzero reserved fields.
fn check_reserved_fields_zero(later: &[u64]) -> Result<()> {
    match later.iter().all(|it| *it == 0) {
        true => Ok(()),
        false => Err(Error::new(Errno::INVAL, "the options ask for what this version has not")),
    }
}

fn call_note_callback(to: draconis_complaint_fn, context: *mut c_void, text: &str) {
    if let Some(to) = to {
        to(context, CString::new(text).unwrap_or_default().as_ptr());
    }
}

/// Checks the volume in image without changing it. complaint may be NULL; it is called in this
/// thread for each problem. Damage is reported in report, not as an error. place may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_check(
    image: CStrArg,
    place: Option<&draconis_place>,
    complaint: draconis_complaint_fn,
    context: *mut c_void,
    report: Option<&mut MaybeUninit<draconis_check_report>>,
) -> c_int {
    run_with_output(report, draconis_check_report::default(), || {
        let found = Volume::check(host_path(image, "image")?, &to_location(place))?.0;
        for complaint_of in &found.problems {
            call_note_callback(complaint, context, &complaint_of.to_string());
        }
        Ok(draconis_check_report {
            clean: found.is_clean().into(),
            complete: found.complete.into(),
            complaints: (found.problems.len() as u64).saturating_add(found.suppressed),
            used_inodes: found.used_inodes,
            inodes: found.inodes,
            used_blocks: found.used_blocks,
            blocks: found.blocks,
        })
    })
}

/// Writes the tree at path as a tar archive (pax, holes preserved) through write, in this thread.
/// Returns the number of items skipped because of errors, the first of which is in
/// draconis_error_message, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_tar(
    volume: Option<&draconis_volume>,
    path: CStrArg,
    write: draconis_write_fn,
    context: *mut c_void,
) -> i64 {
    let mut first = None;
    let told = run_returning_count(|| {
        let volume = require(volume, "volume")?;
        let write = write.ok_or_else(|| null_error("write"))?;
        let mut out = Callback { write: Some(write), context };
        let left_out = volume.0.tar(path.get("path")?, SparseFormat::Auto, &mut out)?;
        first = left_out.first().cloned();
        Ok(left_out.len() as u64)
    });
    if let Some(text) = first {
        // Stores the message for the caller; the count stays the return value.
        run(|| Err(Error::new(Errno::UCLEAN, text)));
    }
    told
}

struct Callback {
    /// `None` once the callback has failed: it is not called again.
    write: Option<extern "C" fn(*mut c_void, *const c_void, usize) -> c_int>,
    context: *mut c_void,
}

impl Write for Callback {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(write) = self.write else { return Err(io::ErrorKind::BrokenPipe.into()) };
        match write(self.context, bytes.as_ptr().cast(), bytes.len()) {
            0 => Ok(bytes.len()),
            errno => {
                self.write = None;
                Err(io::Error::from_raw_os_error(errno.saturating_abs()))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
