//! Whole volumes: made, checked, archived.

use std::ffi::{CString, OsStr, c_int, c_void};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use draconis_access::tar::Sparse;
use draconis_access::{Error, NewVolume, Place, Result, Volume};
use rustix::io::Errno;

use crate::error::{answer, count, put, there};
use crate::raw::{Text, none};
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
    /// Of a qcow2 image, what it differs from: names that the image says are not opened. May be
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
    /// Not 0: overwrite what the image holds.
    pub force: c_int,
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

/// Makes an empty volume in image: a file, which is made if it is not there, a block device, or
/// "STORE#NAME", a disk in a store. options may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_format(image: Text, options: Option<&draconis_format_options>) -> c_int {
    answer(|| {
        let image = host_path(image, "image")?;
        let mut new = NewVolume::default();
        if let Some(options) = options {
            let text = |text: Text, what: &str| {
                let bytes = text.given().unwrap_or_default();
                String::from_utf8(bytes.to_vec())
                    .map_err(|_| Error::new(Errno::INVAL, format!("{what} is no text in UTF-8")))
            };
            if let Some(label) = options.label.given() {
                new.label = label.to_vec();
            }
            if options.kind.given().is_some() {
                new.kind = text(options.kind, "kind")?;
            }
            new.features = text(options.features, "features")?;
            new.len_bytes = (options.size_bytes > 0).then_some(options.size_bytes);
            new.block_bytes = (options.block_bytes > 0).then_some(options.block_bytes);
            new.force = options.force != 0;
        }
        Volume::create(image, &new)
    })
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
            let text = CString::new(complaint_of.to_string()).unwrap_or_default();
            if let Some(complaint) = complaint {
                complaint(context, text.as_ptr());
            }
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
