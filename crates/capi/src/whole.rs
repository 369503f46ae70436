//! Whole volumes: made, filled, changed, checked, archived.

use std::ffi::{CString, OsStr, c_int, c_void};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use draconis_access::overwrite::Force;
use draconis_access::resize::Resized;
use draconis_access::tar::Sparse;
use draconis_access::tuning::Words;
use draconis_access::volume::image_format;
use draconis_access::{Error, NewVolume, Place, Result, Volume};
use draconis_ext::mkfs::FreeSpace;
use draconis_ext::tune::Changes;
use rustix::io::Errno;

use crate::error::{answer, count, put, there};
use crate::raw::{Text, Texts, none};
use crate::volume::draconis_volume;

/// Where in an image the volume is. All zero: the whole image, or the only partition that holds a
/// volume.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_place {
    /// It begins at this byte.
    pub offset_bytes: u64,
    /// It is this partition, counted from 1.
    pub partition: u32,
    /// Of a disk image, what it differs from: names that the image says are not opened. May be
    /// NULL.
    pub backing: Text,
}

/// A volume that is to be made. All zero but for the size: ext4, as mke2fs would make it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_format_options {
    /// Its length in bytes; 0: that of the image.
    pub size_bytes: u64,
    /// "ext2", "ext3" or "ext4"; NULL: "ext4".
    pub kind: Text,
    /// At most 16 bytes; NULL: none.
    pub label: Text,
    /// Features to give or, with ^, to take away, as mke2fs -O spells them; NULL: the usual ones.
    pub features: Text,
    /// Bytes of a block, 1024 to 65536; 0: by the size.
    pub block_bytes: u32,
    /// Not 0: overwrite the ext volume that the image holds. Nothing else that is recognised is
    /// overwritten.
    pub force: c_int,
}

/// What a new volume is filled with. All zero: nothing, and nothing is left out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_fill_options {
    /// A directory, or tar archives (plain, gzip, zstd, xz) and container images ("oci:DIR:TAG",
    /// "oci-archive:FILE:TAG", "docker-archive:FILE:TAG"), each over those before.
    pub from: Texts,
    /// How many there are.
    pub from_count: usize,
    /// Patterns of what is left out, as tar --exclude has them.
    pub exclude: Texts,
    /// How many there are.
    pub exclude_count: usize,
    /// Of an image for several, this platform, such as "linux/arm64"; NULL: this machine's.
    pub platform: Text,
    /// "qcow2" or "vhdx": the volume is made in a disk image; NULL: it is all of the file.
    pub image_format: Text,
    /// Free space of a volume whose size follows from the source, in bytes. Without this,
    /// free_percent and min: 10 % of the volume, and at least 16 MiB.
    pub free_bytes: u64,
    /// What an archive may unpack to; 0: 16 GiB and a hundred times its length.
    pub limit_bytes: u64,
    /// Not 0: everything becomes that of uid and gid.
    pub give: c_int,
    /// Whose it becomes.
    pub uid: u32,
    /// Whose it becomes.
    pub gid: u32,
    /// Not 0: everything becomes root's, and nothing is for others.
    pub squash: c_int,
    /// Not 0: the same bytes of the same source, whenever and wherever.
    pub reproducible: c_int,
    /// Not 0: the smallest volume that holds the source, also on a longer device. Not with a size.
    pub min: c_int,
    /// Free space as a percentage of the volume, up to 95, instead of free_bytes.
    pub free_percent: u32,
    /// All zero: for what later versions know.
    pub later: [u64; 7],
}

/// What is to be changed of a volume. All zero: nothing.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_tune_options {
    /// At most 16 bytes, none for none; NULL: as it is.
    pub label: Text,
    /// A UUID, "random" or "clear"; NULL: as it is.
    pub uuid: Text,
    /// Features to give or, with ^, to take away, as tune2fs -O spells them; NULL: as they are.
    pub features: Text,
    /// What is kept for the superuser: blocks, or "5%" of them; NULL: as it is.
    pub reserved: Text,
    /// What the kernel does about damage: 1 goes on, 2 remounts read-only, 3 panics; 0: as it is.
    pub errors: u16,
    /// Mounts after which it is to be checked; -1: never; 0: as it is.
    pub max_mounts: i32,
    /// All zero: for what later versions know.
    pub later: [u64; 8],
}

/// What a check found.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_check_report {
    /// Not 0: e2fsck -fn would have nothing to say.
    pub clean: c_int,
    /// Not 0: the check went through all passes.
    pub complete: c_int,
    /// Complaints, told or not.
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

/// Hears of a complaint, as a text that is valid during the call.
pub type draconis_complaint_fn =
    Option<extern "C" fn(context: *mut c_void, complaint: *const std::ffi::c_char)>;

/// Takes bytes of an archive, all of them; an errno, or 0.
pub type draconis_write_fn =
    Option<extern "C" fn(context: *mut c_void, bytes: *const c_void, len: usize) -> c_int>;

/// A path of the host.
pub(crate) fn host_path<'a>(text: Text, what: &str) -> Result<&'a Path> {
    text.get(what).map(|bytes| Path::new(OsStr::from_bytes(bytes)))
}

/// What C says of where a volume is.
pub(crate) fn given(place: Option<&draconis_place>) -> Place {
    let Some(place) = place else { return Place::default() };
    let backing = place.backing.given().map(|bytes| Path::new(OsStr::from_bytes(bytes)).into());
    Place {
        offset_bytes: (place.offset_bytes > 0).then_some(place.offset_bytes),
        partition: (place.partition > 0).then_some(place.partition),
        backing: backing.into_iter().collect(),
    }
}

/// What C says of a volume that is to be made.
fn new_volume(options: Option<&draconis_format_options>) -> Result<NewVolume> {
    let mut new = NewVolume::default();
    let Some(options) = options else { return Ok(new) };
    if let Some(label) = options.label.given() {
        new.label = label.to_vec();
    }
    if let Some(kind) = word(options.kind, "kind")? {
        new.kind = kind.to_owned();
    }
    new.features = word(options.features, "features")?.unwrap_or_default().to_owned();
    new.len_bytes = (options.size_bytes > 0).then_some(options.size_bytes);
    new.block_bytes = (options.block_bytes > 0).then_some(options.block_bytes);
    new.force = Force::usual(options.force != 0);
    Ok(new)
}

/// A text in UTF-8, if there is one.
pub(crate) fn word<'a>(text: Text, what: &str) -> Result<Option<&'a str>> {
    let read = text.given().map(std::str::from_utf8).transpose();
    read.map_err(|_| Error::new(Errno::INVAL, format!("{what} is no text in UTF-8")))
}

/// Makes an empty volume in image: a file, which is made if it is not there, a block device, or
/// "STORE#NAME", a disk in a store. options may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_format(image: Text, options: Option<&draconis_format_options>) -> c_int {
    answer(|| Volume::create(host_path(image, "image")?, &new_volume(options)?).map(drop))
}

/// Makes a volume in image, as draconis_format, and fills it. Without a size in options, which may
/// be NULL, a file becomes as long as what it is filled with needs. note, which may be NULL, hears
/// in this thread of what is left out, a sentence each.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_format_filled(
    image: Text,
    options: Option<&draconis_format_options>,
    fill: Option<&draconis_fill_options>,
    note: draconis_complaint_fn,
    context: *mut c_void,
) -> c_int {
    answer(|| {
        let mut new = new_volume(options)?;
        let fill = there(fill, "fill")?;
        nothing(&fill.later)?;
        let from = fill.from.get(fill.from_count, "from")?;
        new.from = from.into_iter().map(|name| OsStr::from_bytes(name).to_owned().into()).collect();
        let exclude = fill.exclude.get(fill.exclude_count, "exclude")?;
        new.exclude = exclude.into_iter().map(<[u8]>::to_vec).collect();
        let wrong = |why: &str| Error::new(Errno::INVAL, why);
        let platform = word(fill.platform, "platform")?.map(str::parse).transpose();
        new.platform = platform.map_err(wrong)?;
        let format = word(fill.image_format, "image_format")?;
        new.image_format = image_format(format)?;
        new.min = fill.min != 0;
        new.free = match (fill.free_bytes, fill.free_percent) {
            (0, 0) => FreeSpace::Usual,
            (free @ 1.., 0) if !new.min => FreeSpace::Bytes(free),
            (0, part @ 1..=95) if !new.min => FreeSpace::Part(part * 10_000),
            _ => return Err(wrong("free space: free_bytes, free_percent up to 95, or min")),
        };
        if new.min && new.len_bytes.is_some() {
            return Err(wrong("min and size_bytes exclude each other"));
        }
        new.limit_bytes = (fill.limit_bytes > 0).then_some(fill.limit_bytes);
        new.give_to = (fill.give != 0).then_some((fill.uid, fill.gid));
        new.squash = fill.squash != 0;
        new.reproducible = fill.reproducible != 0;
        for text in &Volume::create(host_path(image, "image")?, &new)?.notes {
            tell(note, context, text);
        }
        Ok(())
    })
}

/// Makes the volume in image larger: size_bytes long, or, with 0, as long as the file or device.
/// A file is lengthened, with a hole. grown, which may be NULL, gets the length that it has then.
/// place may be NULL. If it is cut off, the volume is as it was, or doing it again ends it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_grow(
    image: Text,
    place: Option<&draconis_place>,
    size_bytes: u64,
    grown: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    resize(grown, || {
        let size = (size_bytes > 0).then_some(size_bytes);
        Volume::grow(host_path(image, "image")?, &given(place), size)
    })
}

/// Makes the volume in image smaller: size_bytes long, or, with 0, as short as what it holds. Files
/// beyond the new end are moved, inodes there get other numbers, and a file is cut behind the
/// volume. Otherwise as draconis_grow.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_shrink(
    image: Text,
    place: Option<&draconis_place>,
    size_bytes: u64,
    shrunk: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    resize(shrunk, || {
        let size = (size_bytes > 0).then_some(size_bytes);
        Volume::shrink(host_path(image, "image")?, &given(place), size)
    })
}

fn resize(out: Option<&mut MaybeUninit<u64>>, work: impl FnOnce() -> Result<Resized>) -> c_int {
    let out = out.map(|out| out.write(0));
    answer(|| {
        let len_bytes = work()?.len_bytes();
        if let Some(out) = out {
            *out = len_bytes;
        }
        Ok(())
    })
}

/// Changes what the volume in image says of itself. place may be NULL. Without changes one that
/// was cut off is ended.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_tune(
    image: Text,
    place: Option<&draconis_place>,
    options: Option<&draconis_tune_options>,
) -> c_int {
    answer(|| {
        let options = there(options, "options")?;
        nothing(&options.later)?;
        let words = Words {
            uuid: word(options.uuid, "uuid")?,
            reserved: word(options.reserved, "reserved")?,
            features: word(options.features, "features")?,
            most_mounts: (options.max_mounts != 0).then_some(options.max_mounts),
        };
        let changes = Changes {
            label: options.label.given().map(<[u8]>::to_vec),
            errors: (options.errors > 0).then_some(options.errors),
            ..words.changes()?
        };
        Volume::tune(host_path(image, "image")?, &given(place), &changes)
    })
}

/// Refuses what a later version may know.
fn nothing(later: &[u64]) -> Result<()> {
    match later.iter().all(|it| *it == 0) {
        true => Ok(()),
        false => Err(Error::new(Errno::INVAL, "the options ask for what this version has not")),
    }
}

fn tell(to: draconis_complaint_fn, context: *mut c_void, text: &str) {
    if let Some(to) = to {
        to(context, CString::new(text).unwrap_or_default().as_ptr());
    }
}

/// Checks the volume in image without changing it. complaint, which may be NULL, hears of each
/// complaint in this thread. Damage is no failure: report says it. place may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_check(
    image: Text,
    place: Option<&draconis_place>,
    complaint: draconis_complaint_fn,
    context: *mut c_void,
    report: Option<&mut MaybeUninit<draconis_check_report>>,
) -> c_int {
    put(report, draconis_check_report::default(), || {
        let found = Volume::check(host_path(image, "image")?, &given(place))?.0;
        for complaint_of in &found.complaints {
            tell(complaint, context, &complaint_of.to_string());
        }
        Ok(draconis_check_report {
            clean: found.is_clean().into(),
            complete: found.complete.into(),
            complaints: (found.complaints.len() as u64).saturating_add(found.more),
            used_inodes: found.used_inodes,
            inodes: found.inodes,
            used_blocks: found.used_blocks,
            blocks: found.blocks,
        })
    })
}

/// Writes what is at and below path as a tar archive (pax, holes kept), through write, in this
/// thread. How many things could not be read and are left out, of which the first is in
/// draconis_error_message, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_tar(
    volume: Option<&draconis_volume>,
    path: Text,
    write: draconis_write_fn,
    context: *mut c_void,
) -> i64 {
    let mut first = None;
    let told = count(|| {
        let volume = there(volume, "volume")?;
        let write = write.ok_or_else(|| none("write"))?;
        let mut out = Callback { write: Some(write), context };
        let left_out = volume.0.tar(path.get("path")?, Sparse::Auto, &mut out)?;
        first = left_out.first().cloned();
        Ok(left_out.len() as u64)
    });
    if let Some(text) = first {
        // Keeps the text for the caller; the count stays the answer.
        answer(|| Err(Error::new(Errno::UCLEAN, text)));
    }
    told
}

struct Callback {
    /// None once it failed: it is not called again.
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
