//! A volume.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use draconis_access::populate::{ImagePlatform, SourceSpec};
use draconis_access::tar::SparseFormat;
use draconis_access::tuning::TuneOptions;
use draconis_access::volume::image_format as image_format_of;
use draconis_access::{NewVolume, OpenOptions, VolumeLocation};
use draconis_types::{AttributeChange, Attributes, SetTime, Time};
use draconis_ext::mkfs::FreeSpace;
use draconis_ext::tune::TuneChanges;
use draconis_ext::{Follow, RenameMode, XattrSet};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::file::File;
use crate::{force_of, raised, unlocked};

/// An open volume.
#[pyclass(frozen, module = "draconis._draconis")]
pub struct Volume(Arc<draconis_access::Volume>);

/// Inode, mode, links, uid, gid, device (major, minor), size, blocks, and in nanoseconds when it
/// was accessed, modified and changed.
pub type Stat = (u64, u32, u32, u32, u32, (u32, u32), u64, u64, i128, i128, i128);

const SECOND: i128 = 1_000_000_000;

fn nanoseconds(time: Time) -> i128 {
    i128::from(time.seconds) * SECOND + i128::from(time.nanoseconds)
}

fn time(nanoseconds: i128) -> SetTime {
    let bounds = (i128::from(i64::MIN), i128::from(i64::MAX));
    let seconds = nanoseconds.div_euclid(SECOND).clamp(bounds.0, bounds.1);
    SetTime::To(Time {
        seconds: seconds as i64,
        nanoseconds: nanoseconds.rem_euclid(SECOND) as u32,
    })
}

/// What `stat` shows, for Python.
pub fn stat(of: &Attributes) -> Stat {
    (
        of.node.0,
        of.mode,
        of.links,
        of.uid,
        of.gid,
        of.device,
        of.size_bytes,
        of.blocks_512,
        nanoseconds(of.accessed),
        nanoseconds(of.modified),
        nanoseconds(of.changed),
    )
}

fn follow(follows: bool) -> Follow {
    if follows { Follow::Yes } else { Follow::No }
}

/// Free space: bytes, or a text such as "20%".
#[derive(FromPyObject)]
enum Free {
    Bytes(u64),
    Part(String),
}

impl Free {
    fn space(self) -> Result<FreeSpace, String> {
        match self {
            Self::Bytes(bytes) => Ok(FreeSpace::Bytes(bytes)),
            Self::Part(text) => {
                let part = text.strip_suffix('%').and_then(|part| part.parse::<f64>().ok());
                let part = part.filter(|part| (0.0..=95.0).contains(part));
                let part = part.map(|part| FreeSpace::Ppm((part * 10_000.0) as u32));
                part.ok_or_else(|| format!("free={text:?}: bytes, or a percentage up to '95%'"))
            }
        }
    }
}

/// What a new volume is filled with.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Source {
    from: Vec<PathBuf>,
    exclude: Vec<Vec<u8>>,
    platform: Option<String>,
    limit: Option<u64>,
    free: Option<Free>,
    min: bool,
    give_to: Option<(u32, u32)>,
    squash: bool,
    reproducible: bool,
}

#[pymethods]
impl Volume {
    #[new]
    fn new(
        py: Python<'_>,
        image: PathBuf,
        write: bool,
        offset: Option<u64>,
        partition: Option<u32>,
        backing: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let place = VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            ..VolumeLocation::default()
        };
        let open = || match write {
            true => draconis_access::Volume::open_for_writing(&image, &place),
            false => draconis_access::Volume::open(&image, &place),
        };
        unlocked(py, open).map(Self)
    }

    #[staticmethod]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn format(
        py: Python<'_>,
        image: PathBuf,
        size: Option<u64>,
        kind: String,
        label: Vec<u8>,
        features: String,
        block_size: Option<u32>,
        inodes: Option<u32>,
        reserved: Option<f64>,
        owner: Option<(u32, u32)>,
        image_format: Option<String>,
        source: Source,
        force: Option<String>,
    ) -> PyResult<Vec<String>> {
        let Source { from, exclude, platform, limit, free, min, give_to, squash, reproducible } =
            source;
        let platform: Result<Option<ImagePlatform>, _> =
            platform.as_deref().map(str::parse).transpose();
        let new = NewVolume {
            kind,
            len_bytes: size,
            free: free.map_or(Ok(FreeSpace::Usual), Free::space).map_err(PyValueError::new_err)?,
            min,
            block_bytes: block_size,
            label,
            features,
            inodes,
            reserved_ppm: reserved.map(|percent| (percent.clamp(0.0, 50.0) * 10_000.0) as u32),
            owner,
            from: from.into_iter().map(OsString::from).map(SourceSpec::from).collect(),
            exclude,
            platform: platform.map_err(PyValueError::new_err)?,
            max_unpacked_bytes: limit,
            owner_override: give_to,
            squash,
            reproducible,
            image_format: image_format_of(image_format.as_deref()).map_err(raised)?,
            force: force_of(force),
            ..NewVolume::default()
        };
        unlocked(py, || draconis_access::Volume::create(&image, &new)).map(|made| made.notes)
    }

    #[staticmethod]
    fn grow(
        py: Python<'_>,
        image: PathBuf,
        size: Option<u64>,
        offset: Option<u64>,
        partition: Option<u32>,
        backing: Vec<PathBuf>,
    ) -> PyResult<u64> {
        let place = VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            ..VolumeLocation::default()
        };
        let grown = unlocked(py, || draconis_access::Volume::grow(&image, &place, size));
        grown.map(|grown| grown.len_bytes())
    }

    #[staticmethod]
    fn shrink(
        py: Python<'_>,
        image: PathBuf,
        size: Option<u64>,
        offset: Option<u64>,
        partition: Option<u32>,
        backing: Vec<PathBuf>,
    ) -> PyResult<u64> {
        let place = VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            ..VolumeLocation::default()
        };
        let shrunk = unlocked(py, || draconis_access::Volume::shrink(&image, &place, size));
        shrunk.map(|shrunk| shrunk.len_bytes())
    }

    #[staticmethod]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn tune(
        py: Python<'_>,
        image: PathBuf,
        label: Option<Vec<u8>>,
        uuid: Option<String>,
        features: String,
        reserved: Option<String>,
        errors: Option<u16>,
        max_mounts: Option<i32>,
        offset: Option<u64>,
        partition: Option<u32>,
        backing: Vec<PathBuf>,
    ) -> PyResult<()> {
        let place = VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            ..VolumeLocation::default()
        };
        let (uuid, reserved) = (uuid.as_deref(), reserved.as_deref());
        let words =
            TuneOptions { uuid, reserved, features: Some(&features), max_mounts: max_mounts };
        let changes = TuneChanges { label, errors, ..words.parse().map_err(raised)? };
        unlocked(py, || draconis_access::Volume::tune(&image, &place, &changes))
    }

    /// Whether it is clean and complete, its complaints and how many more there are, and counts.
    #[staticmethod]
    #[allow(clippy::type_complexity, reason = "Python takes it apart")]
    fn check(
        py: Python<'_>,
        image: PathBuf,
        offset: Option<u64>,
        partition: Option<u32>,
        backing: Vec<PathBuf>,
    ) -> PyResult<(bool, bool, Vec<String>, u64, (u64, u64, u64, u64))> {
        let place = VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            ..VolumeLocation::default()
        };
        let found = unlocked(py, || draconis_access::Volume::check(&image, &place))?.0;
        let complaints = found.problems.iter().map(ToString::to_string).collect();
        let counts = (found.used_inodes, found.inodes, found.used_blocks, found.blocks);
        Ok((found.is_clean(), found.complete, complaints, found.suppressed, counts))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        unlocked(py, || self.0.close())
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        unlocked(py, || self.0.sync())
    }

    fn is_writable(&self, py: Python<'_>) -> PyResult<bool> {
        unlocked(py, || self.0.is_writable())
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = unlocked(py, || self.0.info())?;
        let dict = PyDict::new(py);
        dict.set_item("kind", info.kind)?;
        dict.set_item("label", PyBytes::new(py, &info.label))?;
        dict.set_item("uuid", PyBytes::new(py, &info.uuid))?;
        dict.set_item("features", info.features)?;
        dict.set_item("clean", info.clean)?;
        dict.set_item("size", info.len_bytes)?;
        dict.set_item("block_size", info.space.block_bytes)?;
        dict.set_item("blocks", info.space.blocks)?;
        dict.set_item("free_blocks", info.space.free_blocks)?;
        dict.set_item("inodes", info.space.inodes)?;
        dict.set_item("free_inodes", info.space.free_inodes)?;
        Ok(dict)
    }

    fn stat(&self, py: Python<'_>, path: &[u8], follows: bool) -> PyResult<Stat> {
        Ok(stat(&unlocked(py, || self.0.stat(path, follow(follows)))?))
    }

    /// Names, inodes and kinds; and, where a part is damaged, the failure.
    #[allow(clippy::type_complexity, reason = "Python takes it apart")]
    fn list<'py>(
        &self,
        py: Python<'py>,
        path: &[u8],
    ) -> PyResult<(Vec<(Bound<'py, PyBytes>, u32, u32)>, Option<PyErr>)> {
        let (entries, damage) = unlocked(py, || self.0.list(path))?;
        let named = |entry: draconis_access::DirEntry| {
            (PyBytes::new(py, &entry.name), entry.inode, entry.kind.mode_bits())
        };
        Ok((entries.into_iter().map(named).collect(), damage.map(raised)))
    }

    fn readlink<'py>(&self, py: Python<'py>, path: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &unlocked(py, || self.0.read_link(path))?))
    }

    fn listxattr<'py>(
        &self,
        py: Python<'py>,
        path: &[u8],
        follows: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let names = unlocked(py, || self.0.xattr_names(path, follow(follows)))?;
        Ok(names.iter().map(|name| PyBytes::new(py, name)).collect())
    }

    fn getxattr<'py>(
        &self,
        py: Python<'py>,
        path: &[u8],
        name: &[u8],
        follows: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &unlocked(py, || self.0.xattr(path, name, follow(follows)))?))
    }

    fn setxattr(
        &self,
        py: Python<'_>,
        path: &[u8],
        name: &[u8],
        value: &[u8],
        how: u32,
        follows: bool,
    ) -> PyResult<()> {
        let how = match how {
            1 => XattrSet::Create,
            2 => XattrSet::Replace,
            _ => XattrSet::Any,
        };
        unlocked(py, || self.0.set_xattr(path, name, value, how, follow(follows)))
    }

    fn removexattr(&self, py: Python<'_>, path: &[u8], name: &[u8], follows: bool) -> PyResult<()> {
        unlocked(py, || self.0.remove_xattr(path, name, follow(follows)))
    }

    fn mkdir(&self, py: Python<'_>, path: &[u8], mode: u32) -> PyResult<()> {
        unlocked(py, || self.0.make_dir(path, mode))
    }

    fn symlink(&self, py: Python<'_>, target: &[u8], path: &[u8]) -> PyResult<()> {
        unlocked(py, || self.0.symlink(target, path))
    }

    fn link(&self, py: Python<'_>, from: &[u8], to: &[u8]) -> PyResult<()> {
        unlocked(py, || self.0.link(from, to))
    }

    fn unlink(&self, py: Python<'_>, path: &[u8]) -> PyResult<()> {
        unlocked(py, || self.0.unlink(path))
    }

    fn rmdir(&self, py: Python<'_>, path: &[u8]) -> PyResult<()> {
        unlocked(py, || self.0.remove_dir(path))
    }

    fn rename(&self, py: Python<'_>, from: &[u8], to: &[u8], replace: bool) -> PyResult<()> {
        let how = if replace { RenameMode::Replace } else { RenameMode::NoReplace };
        unlocked(py, || self.0.rename(from, to, how))
    }

    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn set_attributes(
        &self,
        py: Python<'_>,
        path: &[u8],
        follows: bool,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        times: Option<(i128, i128)>,
    ) -> PyResult<()> {
        let change = AttributeChange {
            mode,
            uid,
            gid,
            size_bytes: size,
            accessed: times.map(|(accessed, _)| time(accessed)),
            modified: times.map(|(_, modified)| time(modified)),
            ..AttributeChange::default()
        };
        unlocked(py, || self.0.set_attributes(path, follow(follows), &change))
    }

    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn open(
        &self,
        py: Python<'_>,
        path: &[u8],
        write: bool,
        create: bool,
        exclusive: bool,
        truncate: bool,
        mode: u32,
    ) -> PyResult<File> {
        let how = OpenOptions { write, create, exclusive, truncate, mode };
        unlocked(py, || draconis_access::File::open(&self.0, path, how)).map(File)
    }

    /// Gives the bytes of an archive to `write`; what was left out, in words.
    fn tar(&self, py: Python<'_>, path: &[u8], write: Py<PyAny>) -> PyResult<Vec<String>> {
        let mut out = Callback { write, failure: None };
        let told = py.detach(|| self.0.tar(path, SparseFormat::Auto, &mut out));
        match out.failure {
            Some(failure) => Err(failure),
            None => told.map_err(raised),
        }
    }
}

/// A function of Python's that takes bytes.
struct Callback {
    write: Py<PyAny>,
    failure: Option<PyErr>,
}

impl Write for Callback {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failure.is_none() {
            let call = |py: Python<'_>| self.write.call1(py, (PyBytes::new(py, bytes),)).map(drop);
            self.failure = Python::attach(call).err();
        }
        match self.failure {
            None => Ok(bytes.len()),
            // What it raised is raised again when the archive has ended.
            Some(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
